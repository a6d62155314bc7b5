"""What rows say: re-pooling, two-way intervals, verdicts that refuse, edges that are not there, and a probe with its floor."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from encode_address.gathering import behaviour, contrasts, pooling, probe
from encode_address.gathering.behaviour import CARRIED, COUNTERFACTUAL, DESTRUCTION, NONE, REVERSED, SUBTHRESHOLD
from encode_address.stats import Estimate
from encode_address.tasks.arms import ARMS

DEPTH, VOCABULARY, N = 8, 100, 12
KEYS = {"arm": "flexible", "donor": "donor", "path": "full", "position": "last 1"}


def grid(shift, n=N, depth=DEPTH, donors=4, kinds=("linear", "softmax")):
    """Rows of mixers patched at every layer: clean values differ by pair, `shift(p, r, pair)` is added to them."""
    rows = []
    for pair in range(n):
        own = {"part": "grid", **KEYS, "pair": pair, "donor_z": f"k{pair % donors}"}
        for r in range(depth):
            base = pair / 7 + r
            rows.append({**own, "site": "none", "layer": -1, "read": r, "M.address": base, "rank.address": 50.0})
            for p in range(r + 1):
                moved = base + shift(p, r, pair)
                more = {"mixer": kinds[p % 2], "crossed": sum(p < i <= r for i in range(1, depth, 2))}
                rank = 50.0 if moved == base else 5.0
                rows.append(
                    {**own, **more, "site": "mixer", "layer": p, "read": r, "M.address": moved, "rank.address": rank}
                )
    return pd.DataFrame(rows)


def test_shifts_are_against_the_same_target_at_the_same_layer():
    moved = pooling.shifts(grid(lambda p, r, pair: 10 * p + r + pair), ["address"], VOCABULARY, ("M", "L", "R"))
    assert len(moved) == N * DEPTH * (DEPTH + 1) / 2
    expected = 10 * moved["layer"] + moved["read"] + moved["pair"]
    assert np.allclose(moved["dM.address"], expected)
    some = moved[moved["dM.address"] > 0]
    assert np.allclose(some["dL.address"], math.log10(51 / 6))
    assert np.allclose(some["dR.address"], 45 / 99)


def test_a_profile_is_the_mean_of_its_rows_and_its_interval_is_of_that_mean():
    rng = np.random.default_rng(0)
    noise = {(p, r, i): rng.normal() for p in range(DEPTH) for r in range(DEPTH) for i in range(N)}
    moved = pooling.shifts(grid(lambda p, r, i: 2 + noise[p, r, i]), ["address"], VOCABULARY)
    found = pooling.profile(moved, "dM.address", DEPTH)
    assert [*found] == [*range(DEPTH - 1)]
    assert pooling.distances(DEPTH) == (1, 2, 3)
    for p, value in found.items():
        reads = [r for r in (p + 1, p + 2, p + 3) if r < DEPTH]
        by_pair = [np.mean([2 + noise[p, r, i] for r in reads]) for i in range(N)]
        assert value.n == N
        assert value.value == pytest.approx(np.mean(by_pair))
        separate = [
            pooling.two_way(one := moved[(moved["layer"] == p) & (moved["read"] == r)], one["dM.address"])
            for r in reads
        ]
        if len(reads) > 1:  # a mean of bounds is too wide: the cells' noise is independent
            assert value.high - value.low < np.mean([e.high - e.low for e in separate])
    table = pooling.strata(moved, "dM.address")
    cells = moved.groupby(["mixer", "crossed"])["dM.address"].mean()
    assert np.allclose(table.set_index(["mixer", "crossed"])["value"], cells)
    assert table["cells"].sum() == DEPTH * (DEPTH + 1) / 2


def test_donors_that_repeat_make_intervals_wider():
    rng = np.random.default_rng(1)
    own = rng.normal(size=4)  # what each donor brings
    values = pd.Series([own[i % 4] + 0.1 * rng.normal() for i in range(40)])
    shared = pd.DataFrame({"pair": range(40), "donor_z": [f"k{i % 4}" for i in range(40)]})
    alone = shared.assign(donor_z=[f"k{i}" for i in range(40)])
    wide, narrow = pooling.two_way(shared, values), pooling.two_way(alone, values)
    assert wide.value == narrow.value == pytest.approx(values.mean())
    assert wide.high - wide.low > 1.5 * (narrow.high - narrow.low)


def test_two_way_weights_are_products_of_draws():
    table = pd.DataFrame({"pair": [0, 1, 2, 3], "donor_z": ["a", "a", "b", "c"]})
    drawn = pooling.weights(table)
    donors = drawn[:, 0] * drawn[:, 1]
    assert drawn.shape == (pooling.RESAMPLES, 4)
    assert ((drawn[:, 0] == 0) | (drawn[:, 1] >= 0)).all()
    assert drawn.mean(0) == pytest.approx(np.ones(4), abs=0.15)  # targets and donors are drawn independently
    assert np.cov(drawn[:, 0], drawn[:, 1])[0, 1] > np.cov(drawn[:, 0], drawn[:, 2])[0, 1]
    assert donors.max() > 1


def test_concentration_knows_that_maxima_are_maxima():
    moved = pooling.shifts(grid(lambda p, r, i: 6.0 + i / 10 if p == 4 else 2.0 + i / 10), ["address"], VOCABULARY)
    ratio, gap = pooling.concentration(moved, "dM.address", DEPTH, 4, 5)
    assert ratio.value == pytest.approx((6 + 0.55) / (2 + 0.55))
    assert gap.value == pytest.approx(4.0)
    assert ratio.low < ratio.value < ratio.high
    assert gap.low == pytest.approx(gap.high)
    nothing = pooling.shifts(grid(lambda p, r, i: 0.0), ["address"], VOCABULARY)
    assert pooling.concentration(nothing, "dM.address", DEPTH, 4, 5)[0].n == 0
    assert pooling.concentration(moved, "dM.address", DEPTH, 0, 5)[0].n == 0  # nothing is shallower
    below = pooling.shifts(grid(lambda p, r, i: 6.0 if p == 4 else -1.0), ["address"], VOCABULARY)
    assert pooling.concentration(below, "dM.address", DEPTH, 4, 5)[0].low == math.inf


# -- behaviour ---------------------------------------------------------------------------------------
def answered(by_layer, n=N):
    """Rows about answers: per layer what every pair answers."""
    rows = []
    for pair in range(n):
        own = {"part": "answer", **KEYS, "pair": pair, "donor_z": f"k{pair}"}
        at = {"margin.redirected": -5.0, "margin.others": -5.0, "distracted": 0.0, "redirected": 0.0, "carried": 0.0}
        rows.append({**own, **at, "site": "none", "layer": -1, "kept": 1.0})
        for layer, says in enumerate(by_layer):
            said = {"kept": 0.0, "redirected": 0.0, "carried": 0.0, "distracted": 0.0}
            said["distracted" if says == "other" else says.split()[0]] = 1 / 6 if says == "other" else 1.0
            margin = -3.0 if says == "kept more" else -5.0
            rows.append({**own, **at, **said, "margin.redirected": margin, "site": "residual", "layer": layer})
    return pd.DataFrame(rows)


def test_every_layer_gets_its_verdict_and_edges_may_be_missing():
    layers = ["kept", "kept more", "redirected", "redirected", "carried", "other"]
    table = behaviour.depth_profile(pooling.answers(answered(layers)))
    assert table["verdict"].tolist() == [NONE, SUBTHRESHOLD, COUNTERFACTUAL, COUNTERFACTUAL, CARRIED, DESTRUCTION]
    assert table["destroyed"].tolist() == [False, False, False, False, True, True]
    assert behaviour.edges(table) == {"window": [2, 3], "lower": 2, "upper": 4}
    first = behaviour.edges(behaviour.depth_profile(pooling.answers(answered(["redirected", "kept"]))))
    assert first["lower"].startswith("not found")
    assert first["upper"] == "not found: nothing is destroyed above"
    last = behaviour.edges(behaviour.depth_profile(pooling.answers(answered(["kept", "redirected"]))))
    assert last["lower"] == 1
    assert last["upper"].startswith("not found")
    none = behaviour.edges(behaviour.depth_profile(pooling.answers(answered(["kept", "other"]))))
    assert none == {"window": "not found", "lower": "not found", "upper": "not found"}


def test_destruction_is_not_transport():
    """A patch after which every answer is drawn blindly has transport 0: the donor's is as frequent as each other wrong one."""
    rows = answered(["kept"], n=48)
    patched = rows["site"] == "residual"
    says = np.arange(patched.sum()) % 8  # eight candidates: 0 its own, 1 the donor's, 2 carried, the rest others
    for name, which in (("kept", says == 0), ("redirected", says == 1), ("carried", says == 2)):
        rows.loc[patched, name] = which.astype(float)
    rows.loc[patched, "distracted"] = (says > 2) / 5
    table = behaviour.depth_profile(pooling.answers(rows))
    assert table["transport"][0].value == pytest.approx(0)
    assert table["verdict"][0] == DESTRUCTION
    assert table["destroyed"][0]


def test_calibration_leaves_out_the_answer_itself():
    moved = pooling.shifts(grid(lambda p, r, i: (i + 1.0) if p == 5 else 0.0), ["address"], VOCABULARY)
    said = pooling.answers(answered(["kept"] * DEPTH)).assign(site="mixer")
    said["donor_z"] = "k" + (said["pair"] % 4).astype(str)
    said["d answer"] = 3.0 * (said["pair"] + 1)
    table, trials = behaviour.calibration(moved, said, 5, "address", DEPTH)
    assert table["ratio"][0].value == pytest.approx(3.0)
    assert table["r"][0] == pytest.approx(1.0)
    assert len(trials) == N
    table, _ = behaviour.calibration(moved, said, DEPTH - 2, "address", DEPTH)
    assert table.empty  # only the last layer lies above


# -- contrasts ----------------------------------------------------------------------------------------
def arms_rows(values, right, n=40):
    """Unpatched rows of arms: z's readout M (plus noise by instance) and the share of right answers."""
    rows = []
    for pair in range(n):
        for arm in values:
            own = {"arm": arm, "donor": "none", "site": "none", "pair": pair}
            hit = float((pair * 7) % n < right[arm] * n)
            rows.append({**own, "part": "answer", "kept": hit, "chance": 0.5 if arm == "control" else 0.125})
            for r in range(DEPTH):
                value = values[arm] + math.sin(pair) + 0.1 * math.sin(31 * pair + len(arm))
                rows.append({**own, "part": "grid", "read": r, "M.own key": value, "rank.own key": 0.0})
    return pd.DataFrame(rows)


def verdict_of(values, right, measure="M"):
    return contrasts.contrast(arms_rows(values, right), "flexible", "control", measure, DEPTH, VOCABULARY)


def test_entry_verdicts_refuse_before_they_claim():
    good = {"flexible": 0.95, "control": 0.9}
    assert verdict_of({"flexible": 2.0, "control": 1.0}, good).verdict == "ENTRY EFFECT"
    assert verdict_of({"flexible": 2.0, "control": 1.0}, good).shift.value == pytest.approx(1.0, abs=0.05)
    assert verdict_of({"flexible": 1.0, "control": 2.0}, good).verdict == "REVERSED"
    assert verdict_of({"flexible": 1.0, "control": 1.0}, good).verdict == "NO ENTRY EFFECT"
    assert verdict_of({"flexible": 2.0, "control": 1.0}, {"flexible": 1.0, "control": 0.75}).verdict == "CONFOUNDED"
    chance = verdict_of({"flexible": 2.0, "control": 1.0}, {"flexible": 0.95, "control": 0.5})
    assert chance.verdict == "INVALID"
    assert chance.shift.n == 0
    assert "control" in chance.why
    saturated = verdict_of({"flexible": 2.0, "control": 1.0}, good, "R")
    assert saturated.verdict == "INVALID"
    assert "saturated" in saturated.why
    assert (
        contrasts.contrast(
            arms_rows({"flexible": 1.0}, {"flexible": 1.0}), "flexible", "report", "M", DEPTH, VOCABULARY
        ).verdict
        == "INVALID"
    )


def test_the_two_by_two_and_its_refusal():
    values = {"flexible": 5.0, "supplied": 3.0, "report": 2.0, "control": 1.0}
    right = dict.fromkeys(values, 0.95)
    found = contrasts.two_by_two(arms_rows(values, right), "M", DEPTH, VOCABULARY)
    assert found["verdict"] == "MEASURED"
    expected = {"latent demand": 2.0, "operator": 2.0, "inference": 1.0, "interaction": 1.0, "confound share": 0.5}
    for name, value in expected.items():
        assert found[name].value == pytest.approx(value, abs=0.05)
        assert found[name].low <= found[name].value <= found[name].high
    refused = contrasts.two_by_two(arms_rows(values, {**right, "report": 0.1}), "M", DEPTH, VOCABULARY)
    assert refused["verdict"] == "INVALID"
    assert set(refused) == {"verdict", "why"}
    assert "report" in refused["why"]


def test_the_band_is_the_papers():
    known = {24: (9, 22), 32: (12, 29), 48: (18, 44), 60: (23, 55), 64: (24, 59)}
    assert {depth: (contrasts.band(depth)[0], contrasts.band(depth)[-1]) for depth in known} == known
    assert [*contrasts.band(8)] == [3, 4, 5, 6]


def test_necessity_is_beyond_the_control_arm():
    rows = []
    for arm, lost in (("flexible", 0.75), ("control", 0.25)):
        for pair in range(40):
            own = {
                "part": "answer",
                "arm": arm,
                "donor": "mean",
                "path": "full",
                "position": "last 1",
                "pair": pair,
                "donor_z": "k",
            }
            own |= {
                "redirected": 0.0,
                "carried": 0.0,
                "distracted": 0.0,
                "margin.redirected": 0.0,
                "margin.others": 0.0,
            }
            rows.append({**own, "site": "none", "layer": -1, "kept": 1.0})
            rows.append({**own, "site": "mixer", "layer": 2, "kept": float(pair >= 40 * lost)})
    found = contrasts.necessity(pd.DataFrame(rows), ("flexible", "control")).set_index("arm")
    assert found["effect"]["flexible"].value == pytest.approx(-0.75)
    assert found["beyond"]["flexible"].value == pytest.approx(-0.5)
    assert found["beyond"]["control"].n == 0


# -- the probe ---------------------------------------------------------------------------------------
def test_the_probe_finds_what_is_there_and_its_floor_does_not():
    rng = np.random.default_rng(0)
    z = np.array([f"k{i % 4}" for i in range(60)])
    one_hot = np.eye(4)[[int(name[1]) for name in z]]
    there = one_hot[:, None] * 4 + rng.normal(size=(60, 5, 4))
    right, classes = probe.score(there, z, 0)
    assert classes == 4
    assert min(right.values()) > 0.9
    shuffled = [np.mean([*probe.score(there, z, seed, permuted=True)[0].values()]) for seed in range(5)]
    assert np.mean(shuffled) < 0.45
    noise = [np.mean([*probe.score(rng.normal(size=(60, 5, 4)), z, seed)[0].values()]) for seed in range(5)]
    assert np.mean(noise) < 0.45


def test_the_probe_splits_by_instance():
    """What tells instances apart, but not classes, is of no use to it: no instance is in both parts, in any arm."""
    z = np.array([f"k{i % 4}" for i in range(40)])
    fingerprint = np.repeat(np.eye(40)[:, None], 5, 1)  # the same in every arm of an instance
    assert max(probe.score(fingerprint, z, 0)[0].values()) < 0.6
    assert math.isnan(probe.score(fingerprint, np.array(["one"] * 40), 0)[0]["flexible"])


def test_the_probes_summary_takes_the_best_layer_within_a_seed():
    rows = [
        {"probe": kind, "layer": layer, "seed": seed, "arm": arm, "hits": hits}
        for kind, some in (("z", [[0.8, 0.4], [0.2, 0.6]]), ("permuted", [[0.1, 0.3], [0.2, 0.1]]))
        for seed, layers in enumerate(some) for layer, hits in enumerate(layers) for arm in ARMS
    ]  # fmt: skip
    found = probe.summarise(pd.DataFrame(rows))
    assert [*found] == [*ARMS]
    assert found["report"] == {
        "accuracy": pytest.approx(0.7),
        "floor": pytest.approx(0.25),
        "ratio": pytest.approx(2.8),
    }


def test_verdicts_know_their_order():
    nothing = Estimate(0.0, 20, -0.1, 0.1)
    assert behaviour.verdict(nothing, nothing, Estimate(1.0, 20, 0.8, 1.0), nothing) == NONE
    assert behaviour.verdict(nothing, nothing, Estimate(0.2, 20, 0.1, 0.4), Estimate(1.0, 20, 0.5, 1.5)) == DESTRUCTION
    below = Estimate(-0.2, 20, -0.3, -0.1)
    assert behaviour.verdict(below, nothing, Estimate(0.2, 20, 0.1, 0.4), nothing) == REVERSED
