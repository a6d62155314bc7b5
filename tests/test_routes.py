"""Routes: the arms against hooks and against caches that are mixed by hand; gates against the kernels; probes on known data."""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

import encode_address as ea
from encode_address import figures, lab
from encode_address.errors import RunError
from encode_address.experiments import EXPERIMENTS, probes, routes
from encode_address.metrics import select
from encode_address.run.engine import Engine
from tests import tiny
from tests.oracle import expect_final
from tests.oracle_cases import MODELS, agree, case, ids_of
from tests.oracle_runs import Runs, expect_runs


# -- the arms ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", MODELS)
def test_every_arm_is_what_plain_hooks_say(name):
    one = case(name)
    for cut in routes.CUTS:
        cells = routes.cells(one.swaps[:2], one.model.layout, [cut])
        table = one.engine.run(cells)
        expected = expect_runs(Runs(one.oracle), cells) if cut == "dictionary" else expect_final(one.oracle, cells)
        agree(one, cells, table, expected, 1e-4)
        arms = table.pivot(index="pair", columns=["arm", "donor"], values="margin")
        assert (arms.nunique(axis=1) >= 4).all(), "the arms differ"
        # both routes are the clean run, and its own both is no change
        size = 1e-4 * float(table["spread"].max())
        assert (arms["both", "clean"] - arms["clean", ""]).abs().max() <= size
        assert (arms["both", "identity"] - arms["corrupted", ""]).abs().max() <= size
        assert (arms["clean", ""] - arms["corrupted", ""]).abs().max() > 50 * size, "there is something to recover"
        assert routes.recovery(table, "both", cut=cut).value == pytest.approx(1, abs=0.01)
        assert abs(routes.recovery(table, "both", "identity", cut).value) <= 0.01


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_the_dictionary_arms_are_runs_that_continue_from_a_mixed_cache(name):
    """The same by another way: keys and values of one prompt's cache, states of another's, then the question's tokens."""
    one = case(name)
    cells = [c for c in routes.cells(one.swaps[:2], one.model.layout, ["dictionary"]) if c.intervention != "none"]
    table = one.engine.run(cells)
    kv, states, ids = (ids_of(some) for some in zip(*((c.donor, c.also[1].donor, c.host) for c in cells)))
    start = cells[0].host.span("question")[0]
    keys, mixed = (one.oracle.run(some[:, :start], use_cache=True, logits_to_keep=1).cache for some in (kv, states))
    for layer in one.oracle.softmax:
        mixed.layers[layer] = keys.layers[layer]
    after = one.oracle.run(ids[:, start:], use_cache=True, cache=mixed, attention_mask=torch.ones_like(ids)).logits[
        :, -1
    ]
    for (_, row), cell, end in zip(table.iterrows(), cells, after):
        margin = float(end[cell.outcomes[0][1]] - end[cell.outcomes[1][1]])
        assert row["margin"] == pytest.approx(margin, abs=1e-4 * max(1.0, float(end.std()))), cell.labels


def test_another_pair_lends_its_prompt_only_if_it_fits():
    swaps = tiny.swaps(3)
    longer = tiny.swaps(1, seed=5, length=71)
    assert routes.another(swaps, 2) is swaps[0].clean
    assert routes.another([swaps[0], *longer, swaps[1]], 0) is swaps[1].clean
    assert routes.another([swaps[0], *longer], 0) is None
    cells = routes.cells([swaps[0], *longer], case("granite").model.layout)
    assert {cell.labels["donor"] for cell in cells} == {"", "clean", "identity"}
    whose = {(arm, donor): (kv, states) for arm, donor, kv, states in routes.arms(swaps[0], swaps[1].clean)}
    c, x = swaps[0].clean, swaps[0].corrupted
    assert whose["kv", "clean"] == (c, x)
    assert whose["state", "clean"] == (x, c)
    assert whose["kv", "permuted"] == (swaps[1].clean, x)


# -- gates -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_a_state_of_ones_is_left_as_the_gates_say(name, monkeypatch):
    """Each token alone is given to the model's own kernel, on a state of ones, into which nothing is written."""
    one = case(name)
    oracle, prompts = one.oracle, [swap.clean for swap in one.swaps[:2]]
    rows = pd.DataFrame(routes.read_gates(one.engine, prompts))
    assert len(rows) == len(prompts) * sum(map(one.model.heads_of, one.model.linear_layers))
    kernels = sys.modules[type(oracle.mixers[oracle.linear[0]]).__module__]
    mamba = "granite" in name
    kernel = "mamba2_chunk_scan" if mamba else "torch_chunk_gated_delta_rule"
    original, left = getattr(kernels, kernel), []

    def spy(*args, **kwargs):
        def alone(x):  # (batch, positions, ...) -> (batch x positions, 1, ...)
            return x.flatten(0, 1)[:, None]

        if mamba:
            x, dt, a, b, c = args
            heads, size = x.shape[2], (x.shape[3], b.shape[3])
            more = {**kwargs, "initial_states": torch.ones(dt.shape[:2].numel(), heads, *size)}
            more["return_final_states"] = True
            state = original(alone(torch.zeros_like(x)), alone(dt), a, alone(b), alone(c), **more)[1]
        else:
            q, k, v = args
            heads, size = v.shape[2], (k.shape[3], v.shape[3])
            given = {"g": alone(kwargs["g"]), "beta": torch.zeros_like(alone(kwargs["beta"]))}
            start = torch.ones(given["g"].shape[0], heads, *size)
            more = {**kwargs, **given, "initial_state": start, "output_final_state": True}
            state = original(alone(q), alone(k), alone(v), **more)[1]
        left.append(state[:, :, 0, 0].view(len(prompts), -1, heads))
        assert (state == state[:, :, :1, :1]).all()
        return original(*args, **kwargs)

    monkeypatch.setattr(kernels, kernel, spy)
    oracle.run(ids_of(prompts))
    assert len(left) == len(oracle.linear)
    for layer, share in zip(oracle.linear, left):
        assert (share > 0).all()
        measured = share.double().log().mean(1)
        said = select(rows, layer=layer).pivot(index="pair", columns="head", values="log_decay").to_numpy()
        assert said == pytest.approx(measured.numpy(), rel=1e-4, abs=1e-6)
    spread = rows.groupby(["layer", "head"])["log_decay"].mean()
    assert spread.nunique() == len(spread), "heads differ, so that none can stand for another"


def test_the_clamp_of_the_step_counts():
    mixer = copy.deepcopy(case("granite").oracle.mixers[case("granite").oracle.linear[0]])
    projected = torch.randn(2, 5, mixer.in_proj.out_features) * 3
    mixer.time_step_limit = (0.5, 1.0)
    with torch.no_grad():
        rate = -routes.log_decay(mixer, "in_proj", projected) / mixer.A_log.exp()
    assert float(rate.min()) == pytest.approx(0.5)
    assert float(rate.max()) == pytest.approx(1.0)


def test_half_lives_are_of_the_mean_rate_and_carry_its_interval():
    rows = pd.DataFrame({"part": "half-life", "layer": 4, "head": 1, "pair": range(40)})
    rows["log_decay"] = np.log(0.5) / np.where(rows["pair"] % 2, 5.0, 20.0)  # mean rate: ln 2 / 8
    (life,) = routes.half_lives(rows).values()
    assert life.value == pytest.approx(8)
    assert 6.5 < life.low < 8 < life.high < 10
    assert routes.half_lives(rows.assign(log_decay=0.0))[4, 1].value == np.inf


def test_a_mixer_without_a_gate_is_one_clear_line():
    plain = SimpleNamespace(_module=torch.nn.Linear(2, 2))
    model = SimpleNamespace(name="other", layers=[SimpleNamespace(mixer=plain)])
    with pytest.raises(RunError, match=r"other: no forget gate is known in L0 \(Linear\)"):
        routes.gate_projection(model, 0)


# -- probes ------------------------------------------------------------------------------------------------------------
def test_prompts_ask_one_key_at_one_place_and_its_values_are_balanced():
    task = ea.tasks.dictionary(case("tiny-gdn").model, "chat8")
    some = probes.prompts(task, 24)
    assert len(some) == 144
    assert len({(p.keys[p.query], p.query, len(p)) for p in some}) == 1
    bound = pd.Series([p.values[p.query] for p in some]).value_counts()
    assert len(bound) == 14
    assert set(bound) <= {10, 11}
    assert {v for p in some for v in p.values} == set(bound.index)
    assert all(len(set(p.values)) == len(set(p.keys)) == 8 for p in some)
    assert probes.presence(some).sum(1).tolist() == [8.0] * 144
    entry, end, before, final = (probes.until(some[0], mark) for mark in probes.MARKS)
    words = task.tokenizer.convert_ids_to_tokens(entry.ids)
    assert words[-1] == some[0].values[some[0].query]
    assert [len(end), len(before), len(final)] == [some[0].span("question")[0], len(some[0]) - 1, len(some[0])]
    assert len(probes.prompts(task, 2)) == 45  # every class in every fold
    assert len({p.values[p.query] for p in probes.prompts(task, 100)}) == 20


def test_a_probe_reads_what_is_bound_and_only_that():
    """States of an associative memory: sum over entries of value x key. Presence is the same memory of one key."""
    task = ea.tasks.dictionary(case("tiny-gdn").model, "chat8")
    some = probes.prompts(task, 60)
    labels, rng = np.array([p.values[p.query] for p in some]), np.random.default_rng(0)
    key, value = ({w: rng.normal(size=16) for w in words} for words in (task.keys, task.values))
    memory = np.stack([sum(np.outer(value[v], key[k]) for k, v in zip(p.keys, p.values)).ravel() for p in some])
    bag = np.stack([sum(value[v] for v in p.values) for p in some])
    shuffled = rng.permutation(labels)
    known, none = probes.right(memory, labels, shuffled)
    assert known.mean() > 0.6
    assert none.mean() < 0.15
    (floor,) = probes.right(probes.presence(some), labels)
    assert floor.mean() == pytest.approx(1 / 8, abs=0.05)
    (told,) = probes.right(bag, labels)
    assert told.mean() == pytest.approx(floor.mean(), abs=0.05)
    # what tells items apart, but not labels, teaches nothing about items that were left out
    (told,) = probes.right(np.eye(len(some)), labels)
    assert told.mean() < 0.1
    (told,) = probes.right(np.ones((len(some), 3)), labels)  # a state that has forgotten all alike
    assert told.mean() < 0.1


def test_wide_states_are_projected_by_one_matrix_that_keeps_distances():
    rng, kept = np.random.default_rng(0), {}
    flat = rng.normal(size=(6, 5000)).astype(np.float32)
    both = probes.projected(flat[:3], kept), probes.projected(flat[3:], kept)
    after = np.concatenate(both)
    assert after.shape == (6, probes.WIDTH)
    assert (after == probes.projected(flat, {})).all()
    before, later = (np.linalg.norm(x[:, None] - x[None], axis=-1)[np.triu_indices(6, 1)] for x in (flat, after))
    assert later / before == pytest.approx(1, abs=0.1)
    assert probes.projected(flat[:, :100], {}) is not None
    assert (probes.projected(flat[:, :100], kept) == flat[:, :100]).all()


@pytest.mark.parametrize("name", ["qwen3_next", "granite"])
def test_states_are_those_of_the_cache_whatever_the_batch(name):
    one = case(name)
    some = [probes.until(swap.clean, "dictionary end") for swap in one.swaps]
    seen = probes.states(Engine(one.model, one.text, batch_tokens=2 * len(some[0])), some)
    cache = one.oracle.run(ids_of(some), use_cache=True, logits_to_keep=1).cache
    assert set(seen) == set(one.oracle.linear)
    for layer, state in seen.items():
        expected = cache.layers[layer].recurrent_states[0].flatten(1)
        assert state == pytest.approx(expected.numpy(), abs=1e-5 * float(expected.abs().max()))


# -- what the rows say -------------------------------------------------------------------------------------------------
def rows_of(kv: float, state: float, n: int = 40, right: bool = True, final: bool = True) -> pd.DataFrame:
    """Pairs of gap 10, whose arms recover these shares; gates of 2 and 8 tokens; probes that know half, or nothing."""
    shares = {("corrupted", ""): 0, ("clean", ""): 1, ("kv", "clean"): kv, ("state", "clean"): state, ("both", "clean"): 1,
              ("both", "identity"): 0, ("kv", "permuted"): 0.5, ("state", "permuted"): 0.0}  # fmt: skip
    out = [
        {"part": "routes", "position": cut, "arm": arm, "donor": donor, "pair": i, "carried": share > 0.5 and right,
         "kept": share < 0.5 and right, "margin": 10 * share - 5 + 0.1 * (i % 3) + 0.3 * share * (i % 2)}
        for cut in (routes.CUTS if final else routes.CUTS[:1]) for (arm, donor), share in shares.items() for i in range(n)
    ]  # fmt: skip
    out += [
        {"part": "half-life", "layer": layer, "head": head, "pair": i, "log_decay": np.log(0.5) / life, "tokens": 50}
        for (layer, head), life in {(2, 0): 3, (4, 0): 2, (4, 1): 8}.items() for i in range(4)
    ]  # fmt: skip
    for mark in probes.MARKS if final else ():
        out += [
            {"part": "probes", "mark": mark, "layer": layer, "pair": i, "chance": 0.1, "floor_correct": i % 8 == 0,
             "shuffled_correct": i % 10 == 0, "correct": layer == 4 and i % 2 == 0}
            for layer in (2, 4) for i in range(n)
        ]  # fmt: skip
    return pd.DataFrame(out).assign(experiment="routes", variant="chat8")


def setting(continues: bool = True) -> SimpleNamespace:
    family = replace(case("tiny-gdn").model.family, continues=continues)
    why = "" if continues else "qwen3_5 does not continue exactly from a cache"
    model = SimpleNamespace(family=family, layout=case("tiny-gdn").model.layout, uncontinued=why)
    return SimpleNamespace(model=model, layout=model.layout)


@pytest.mark.parametrize(
    ("kv", "state", "status"),
    [(1, 0, "holds"), (0.7, 0.3, "holds"), (0, 1, "does not hold"), (0.9, 0.8, "does not hold"), (0.3, 0.1, "does not hold")],
)  # fmt: skip
def test_the_conclusion_on_tables_made_by_hand(kv, state, status):
    said = routes.conclude(rows_of(kv, state), setting())
    assert said.status == status
    assert f"keys and values of the dictionary recover {kv:.2f}" in said.why
    assert "halve a state in 3 tokens (median of heads), the slowest in 8 (L4H1)" in said.why
    assert "dictionary end 0.50 [0.35, 0.65] (L4)" in said.why
    assert said.figures["presence floor"].startswith("0.12 ")


def test_what_is_too_close_is_undecided_and_what_cannot_do_the_task_is_refused():
    close = rows_of(0.5, 0.0)
    close["margin"] += np.where(close["arm"] == "kv", np.where(close["pair"] % 2, 4.0, -4.0), 0.0)
    assert routes.conclude(close, setting()).status == "undecided"
    refused = routes.conclude(rows_of(1, 0, right=False), setting())
    assert refused.status == "undecided"
    assert "is no evidence" in refused.why


def test_without_a_cache_the_rest_is_left_out_with_a_reason(monkeypatch):
    model = case("tiny-gdn").model
    monkeypatch.setattr(model, "family", setting(continues=False).model.family)
    text = case("tiny-gdn").text
    given = lab.Setting(model, "chat8", ea.tasks.dictionary(model, "chat8"), 4, 0, text)
    cells, gates = routes.steps(given)
    assert {cell.labels["position"] for cell in cells} == {"dictionary"}
    assert gates.labels["part"] == "half-life"
    said = routes.conclude(rows_of(1, 0, final=False), setting(continues=False))
    assert said.status == "holds"
    assert said.figures["probes"] == "not run: qwen3_5 does not continue exactly from a cache"


# -- on a trained model ------------------------------------------------------------------------------------------------
def test_on_a_trained_model_the_value_goes_by_keys_and_values(tmp_path, monkeypatch):
    monkeypatch.setitem(EXPERIMENTS, "routes", routes)
    model = ea.load("tiny-mamba2")
    priced = lab.dry_run("routes", model, "chat8", n=16, out=tmp_path)
    first = ea.experiment("routes", model, "chat8", n=16, out=tmp_path)
    conclusion = first.conclusions["chat8"]
    assert conclusion.status == "holds", conclusion.why
    rows = first.table
    assert routes.recovery(rows, "kv").low > 0.9
    assert routes.recovery(rows, "state").high < 0.1
    assert routes.carried(rows, "kv", "permuted").value <= 0.4
    known = routes.probed(rows)
    assert max(e.value for e in known["entry"].values()) > 0.7 > 0.4 > max(e.value for e in known["dictionary end"].values())  # fmt: skip
    assert select(rows, part="probes").groupby(["mark", "layer"]).size().unique().tolist() == [96]
    account = json.loads((first.folder / "manifest.json").read_text())["this_run"]
    assert account["tokens_forwarded"] == account["tokens_planned"]
    assert "5 readings of the model as it is" in priced
    again = ea.experiment("routes", model, "chat8", n=16, out=tmp_path)
    assert json.loads((again.folder / "manifest.json").read_text())["this_run"]["tokens_forwarded"] == 0
    assert str(again.conclusions["chat8"]) == str(conclusion)


def test_the_figure_shows_the_three_parts(tmp_path, monkeypatch):
    from encode_address.figures import routes as figure

    drawn = []
    monkeypatch.setattr(figures, "write", lambda one, *_: drawn.append(one) or [])
    figure.draw(rows_of(0.9, 0.1), None, tmp_path)
    figure.draw(rows_of(0.9, 0.1, final=False), None, tmp_path)
    top, middle, bottom = drawn[0].axes
    heights = [bar.get_height() for bar in top.patches]
    assert heights[:3] == pytest.approx([0.9, 0.1, 1.0], abs=0.02)
    assert len(heights) == 12
    dots = [y for line in middle.lines for y in line.get_ydata()]
    assert {2.0, 3.0, 8.0} <= {round(float(y), 3) for y in dots}
    assert [label.get_text() for label in middle.get_xticklabels()] == ["L2", "L4"]
    assert [label.get_text() for label in bottom.get_legend().get_texts()] == list(probes.MARKS)
    assert len(drawn[1].axes) == 2
