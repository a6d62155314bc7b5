"""Block replacement between two models: what is in the table, what it concludes, what is refused."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pandas as pd
import pytest

import encode_address as ea
from encode_address.cross import replaced, stand_ins
from encode_address.cross.replace import dry_run, replace
from encode_address.errors import EncodeAddressError, NameNotFound, RunError
from encode_address.experiments.base import Circuit
from encode_address.figures import replacement
from encode_address.metrics import select
from encode_address.run.stitch import Row
from encode_address.tasks import Prompt

CIRCUIT = Circuit(("G0",), ("G2",), ((7, 1),))
VERDICT = {"variants": {"chat8": {"encode": ["G0"], "address": ["G2"], "readers": ["L7H1"]}}}
ARMS = {"intact", "removed", "linear", "mean", "donor", "zeroed", "shuffled", "donor G0", "donor G1", "own, refitted", "identity"}  # fmt: skip


@pytest.fixture(scope="module")
def models():
    return ea.load("tiny-gdn", device="cpu"), ea.load("tiny-mamba2", device="cpu")


@pytest.fixture(scope="module", autouse=True)
def fewer_lines():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stand_ins, "LINES", 12)
        yield


@pytest.fixture(scope="module")
def done(models, tmp_path_factory):
    """Both slots of a small run, with the circuits that `find` would have stored."""
    out = tmp_path_factory.mktemp("replace")
    for model in models:
        (out / model.slug).mkdir()
        (out / model.slug / "verdict.json").write_text(json.dumps(VERDICT))
    result = replace(*models, "address,both", n=6, fit=30, out=out)
    return SimpleNamespace(result=result, out=out, manifest=json.loads((result.folder / "manifest.json").read_text()))


def test_every_arm_is_in_the_table_on_words_that_the_fit_has_not_seen(done, models):
    table = done.result.table
    assert done.result.folder == done.out / "tiny-mamba2" / "replace-tiny-gdn"
    for role, arms in (("address", ARMS), ("both", ARMS | {"both removed", "both linear"})):
        rows = select(table, experiment="replace", role=role)
        assert set(rows["arm"]) == arms
        assert (rows.groupby("arm")["pair"].nunique() == 6).all()
        assert set(select(table, experiment="replace-text", role=role)["arm"]) == arms
        assert rows["attn.L7H1"].notna().all()
        same = rows.set_index(["arm", "pair"])["margin"]
        assert (same["identity"] == same["intact"]).all()
        assert (same["removed"] != same["intact"]).any()
    donor = select(table, experiment="replace", role="address", arm="donor")
    assert donor[["entry_r2", "exit_r2", "error_key", "error_final", "error_text"]].notna().all(axis=None)
    assert select(table, experiment="replace", role="address", arm="own, refitted")["exit_r2"].iloc[0] > 0.999
    pairs = stand_ins.Pairs(*models, "chat8")
    assert {*pairs.words.fit_keys}.isdisjoint(pairs.words.test_keys)
    assert {key for item in pairs.test(6) for key in item.host.keys} <= {*pairs.words.test_keys}


def test_what_is_written_says_what_was_done(done):
    account, folder = done.manifest["this_run"], done.result.folder
    assert account["tokens_forwarded"] == account["tokens_planned"]
    verdict = json.loads((folder / "verdict.json").read_text())
    figures = verdict["variants"]["chat8"]["figures"]
    assert set(figures) == {"address", "both"}
    assert figures["address"]["identity_off_by"] == 0
    assert verdict["variants"]["chat8"]["alignment"]["host_share"] == 1
    summary = pd.read_csv(folder / "summary.csv")
    compared = summary[summary["arm"] == "donor - best control"]
    assert list(compared["role"]) == ["address", "both"]
    assert compared["control"].notna().all()
    maps = {path.name for path in (folder / "maps").iterdir()}
    assert {"chat8-address-donor-G2-entry.json", "chat8-address-donor-G2-exit.safetensors"} <= maps
    about = json.loads((folder / "maps" / "chat8-address-donor-G2-entry.json").read_text())["about"]
    assert about["donor"]["model"] == "tiny-gdn"
    assert about["host"]["layers"] == [4, 5, 6]
    paths = replacement.draw(done.result.table, verdict, folder)
    assert [path.name for path in paths] == ["replacement-chat8.png", "replacement-chat8.pdf"]


def test_a_second_run_runs_nothing_and_says_the_same(done, models):
    said = dry_run(*models, "address,both", n=6, fit=30, out=done.out)
    assert f"{done.manifest['this_run']['tokens_planned']:,} tokens" in said
    assert f"{len(done.result.table):,} rows are stored" in said
    again = replace(*models, "address,both", n=6, fit=30, out=done.out)
    assert again.sentence == done.result.sentence
    assert list(again.table["key"]) == list(done.result.table["key"])
    assert json.loads((again.folder / "manifest.json").read_text())["this_run"]["tokens_forwarded"] == 0


def test_a_stopped_model_is_asked_among_the_values(models, tmp_path):
    donor, host = models
    result = replace(donor, host, source="G2", target="G1", truncate=4, n=4, fit=40, out=tmp_path)
    rows = select(result.table, experiment="replace")
    assert set(rows["cut"]) == {"4"}
    assert set(rows["intervention"]) == {"truncate"}
    assert select(result.table, experiment="replace-text").empty
    same = rows.set_index(["arm", "pair"])["margin"]
    assert (same["identity"] - same["intact"]).abs().max() <= 1e-5
    assert not list(tmp_path.glob("*/verdict.json"))  # blocks were given, so no `find` ran


def test_controls_of_two_slots_are_about_the_address(models):
    donor, host = models
    plan = stand_ins.plan("both", donor, host, (CIRCUIT, CIRCUIT), None, None)
    assert [place.target for place in plan.every] == ["G0", "G2"]
    assert plan.targets == "G2"
    prompt = Prompt((1, 2, 3))
    arms = stand_ins.arms(donor, host, plan, [Row(prompt, prompt, ((0, 0),))], 0)
    assert {arm: [one and one.kind for one in standing] for arm, standing in arms.items()} == {
        "removed": [("block", (0,)), None],
        "linear": [("block", (0,)), ("linear", ())],
        "mean": [("block", (0,)), ("mean", ())],
        "donor": [("block", (0,)), ("block", (4, 5, 6))],
        "zeroed": [("block", (0,)), ("zeroed", (4, 5, 6))],
        "shuffled": [("block", (0,)), ("shuffled", (4, 5, 6))],
        "donor G0": [("block", (0,)), ("block", (0,))],
        "donor G1": [("block", (0,)), ("block", (2,))],
        "own, refitted": [("block", (0,)), ("block", (4, 5, 6))],
        "identity": [("identity", (0,)), ("identity", (4, 5, 6))],
        "both removed": [None, None],
        "both linear": [("linear", ()), ("linear", ())],
    }
    shared = {arms[arm][1].data for arm in ("linear", "mean", "donor", "zeroed", "shuffled", "donor G0", "donor G1")}
    assert len(shared) == 1  # the same rows, in the same runs
    assert arms["own, refitted"][1].slot.donor is host
    assert all(
        one.slot.under[0].digest == arms["donor"][0].digest for one in (arms["donor"][1], arms["own, refitted"][1])
    )
    assert arms["both linear"][1].slot.under == (arms["both linear"][0],)


# -- conclusions, on tables made by hand -------------------------------------------------------
N = 60
CONTROLS = ["removed", "linear", "zeroed", "donor G0"]


def rows_of(hits: dict[str, int], off: float = 0.0) -> pd.DataFrame:
    """`hits` of N per arm; arms that are not named hit nothing."""
    out = []
    for arm in ("intact", *CONTROLS, "donor", "own, refitted", "identity"):
        count = hits.get(arm, N if arm in ("intact", "own, refitted", "identity") else 0)
        for pair in range(N):
            hit, mass = pair < count, [0.0] * 8
            mass[pair % 8] = 0.9 if hit else 0.1
            out.append(
                {"experiment": "replace", "arm": arm, "pair": pair, "correct": hit, "choice_correct": hit, "target": pair % 8, "attn.L7H1": mass}
                | {"margin": float(pair) + (off if arm == "identity" else 0)}
                | ({"entry_r2": 0.8, "exit_r2": 0.9, "error_key": 1.5, "error_final": 7.0} if arm == "donor" else {})
            )  # fmt: skip
    return pd.DataFrame(out)


def concluded(hits, off=0.0):
    return replaced.conclude(rows_of(hits, off), CONTROLS, ((7, 1),), None)


@pytest.mark.parametrize(
    ("hits", "status", "note", "because"),
    [
        ({"donor": 58, "linear": 10}, "holds", "", ""),
        ({"donor": 58, "donor G0": 57}, "undecided", "UNINFORMATIVE", "donor G0 is within 0.1 of it"),
        ({"donor": 58, "removed": 55}, "undecided", "UNINFORMATIVE", "removal leaves 0.92"),
        ({"donor": 20, "linear": 5}, "does not hold", "", ""),
        ({"donor": 4, "linear": 14}, "does not hold", "UNINFORMATIVE", "linear does better"),
        ({"donor": 50, "linear": 5}, "undecided", "", ""),  # neither kept nor lost for certain
        ({"donor": 58, "intact": 30}, "undecided", "", ""),  # the task itself is not solved
    ],
)
def test_the_conclusion_is_against_the_best_control(hits, status, note, because):
    found = concluded(hits)
    best = found.figures["donor - best control"]
    assert (found.status, best["note"]) == (status, note)
    assert because in best["because"]
    if note and hits.get("intact", N) == N:
        assert "UNINFORMATIVE" in found.why
    assert best["value"] == pytest.approx((hits["donor"] - max(hits.get(arm, 0) for arm in CONTROLS)) / N)
    assert best["low"] <= best["value"] <= best["high"]


def test_a_failure_says_where():
    found = concluded({"donor": 6, "linear": 2, "own, refitted": 59})
    where = found.figures["diagnosis"]
    assert where["worst_positions"] == "final"
    assert where["own_refitted"] == pytest.approx(59 / 60)
    assert where["attention_gained"]["value"] == pytest.approx(0.8 * 6 / N)
    for part in ("entry map R2 0.80", "exit map R2 0.90", "at final positions the error is 7 times what", "own block through fitted maps 0.98"):  # fmt: skip
        assert part in found.why


def test_plumbing_that_is_not_exact_decides_nothing():
    found = concluded({"donor": 58, "linear": 10}, off=1e-3)
    assert found.status == "undecided"
    assert "the plumbing is wrong" in found.why


# -- what is refused ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kwargs", "error", "says"),
    [
        ({"slot": "middle"}, NameNotFound, "no slot 'middle'"),
        ({"source": "G9"}, NameNotFound, "no block 'G9'"),
        ({"target": "G9"}, NameNotFound, "no block 'G9'"),
        ({"source": "L3", "target": "G2"}, RunError, "L3 is no linear layer"),
        ({"source": "G2", "target": "G2", "truncate": 5}, RunError, "stopped after L5 does not reach G2"),
        ({"source": "G2", "target": "G2", "truncate": 50}, NameNotFound, "no layer 50"),
        ({"n": 1}, EncodeAddressError, "n of 2 or more"),
    ],
)
def test_bad_input_is_one_clear_line(models, tmp_path, kwargs, error, says):
    given = {"n": 4, "fit": 12, **kwargs}
    with pytest.raises(error, match=says) as raised:
        replace(*models, out=tmp_path, **given)
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_too_few_dictionaries_and_remote_models_are_refused(models, tmp_path):
    with pytest.raises(RunError, match="without remote=True"):
        replace(SimpleNamespace(remote=True), models[1], out=tmp_path)
    few = [Row(Prompt((1, 2, 3)), Prompt((1, 2, 3)), ((0, 0),))] * 6
    donor, host = models
    plan = stand_ins.plan("address", donor, host, (CIRCUIT, CIRCUIT), None, None)
    standing = stand_ins.arms(donor, host, plan, few, 0)
    items = stand_ins.Pairs(donor, host, "chat8").test(2)
    with pytest.raises(RunError, match=r"too few rows for a map: .* for 64 features, it needs 64 or more"):
        ea.Engine(host).run(stand_ins.cells(items, plan, {"donor": standing["donor"]}, {}))
