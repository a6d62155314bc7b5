"""The engine's paths are exact: one token from a cache, whole prompts and late entry all give the same numbers.

Prompts are of lengths around the linear kernels' chunks of 64. Also: what a plan says it costs is what it costs, a
family without an exact continuation, and bfloat16.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

import encode_address
from encode_address.errors import EncodeAddressError, RunError
from encode_address.experiments import readers, removal, transplant
from encode_address.models.check import both_paths, path_gap, random_ids
from encode_address.run.cells import FINAL, FULL, Cell
from encode_address.run.engine import Engine
from encode_address.tasks.prompts import Prompt
from tests import tiny
from tests.oracle import expect_final
from tests.oracle_cases import MODELS, case, expect, moved, patched, same_rows, untouched

LENGTHS = (2, 17, 63, 64, 65, 93, 128, 129)


@pytest.fixture(params=MODELS)
def one(request):
    return case(request.param)


def raw_prompts(model, count: int, length: int) -> list[Prompt]:
    """Random tokens that end alike, with two "entries" so that attention can be read, and choices."""
    rows = random_ids(model, count, length, seed=length).tolist()
    spans = {"entry 0": (0,), "entry 1": tuple(range(1, length)), "final": (length - 1,)}
    choices = tuple(random_ids(model, 1, 4, seed=1)[0].tolist())
    ids = [(*row[:-1], rows[0][-1]) for row in rows]
    return [Prompt(row, spans, keys=("first", "rest"), choices=choices, answer=choices[0]) for row in ids]


def raw_cell(verb: str, host: Prompt, path: str, label, watch=(), **kw) -> Cell:
    where = host.final if verb in ("transplant", "query") else ()
    outcomes = (("a", host.choices[0]), ("b", host.choices[1]))
    return Cell(verb, host, path, where=where, source=where, outcomes=outcomes, watch=watch, labels={"n": label}, **kw)


def close(one, cells, a, b, size: float) -> None:
    """Two tables of the same cells agree within `size` of the logits' spread, and say the same unless it is a tie."""
    bound = size * b["spread"].clip(lower=1)
    assert ((a["spread"] - b["spread"]).abs() <= bound).all()
    assert ((a["margin"] - b["margin"]).abs() <= bound).all(), (a["margin"] - b["margin"]).abs().max()
    for name in (name for name in b if name.startswith("attn.")):
        gap = torch.tensor(a[name].tolist()) - torch.tensor(b[name].tolist())
        assert gap.abs().max() <= size, name
    for i in (a["said"].fillna("") != b["said"].fillna("")).to_numpy().nonzero()[0]:
        first, second = expect(one, [cells[i]])[0]["logits"].topk(2).values
        assert first - second <= bound[i], f"{cells[i].columns()}: {a['said'][i]} against {b['said'][i]}"


# -- the final path ------------------------------------------------------------------------
def at_the_end(one, path: str, hosts, donors) -> list[Cell]:
    """Hosts as they are, and with outputs and queries of the last position from donors."""
    softmax, watch = one.model.softmax_layers, one.watch[::3]
    edits = [
        ("transplant", {"layers": one.units[1][1], "mode": "outputs"}),
        ("transplant", {"layers": one.model.linear_layers, "mode": "outputs"}),
        ("query", {"layers": softmax}),
        ("query", {"layers": softmax[-1:], "head": 1}),
    ]
    cells = [raw_cell("none", host, path, n, watch) for n, host in enumerate(hosts)]
    for verb, kw in edits:
        cells += [raw_cell(verb, h, path, n, watch, donor=d, **kw) for n, (h, d) in enumerate(zip(hosts, donors))]
    return cells


def test_one_token_equals_whole_prompts_at_every_length(one):
    """The same edits on both paths. All lengths in one run: prompts of different length never share a batch."""
    pairs = [raw_prompts(one.model, 4, length) for length in LENGTHS]
    final, full = ([cell for p in pairs for cell in at_the_end(one, path, p[:2], p[2:])] for path in (FINAL, FULL))
    split, whole = one.engine.run(final), one.engine.run(full)
    assert split["path"].unique().tolist() == [FINAL]
    assert whole["path"].unique().tolist() == [FULL]
    close(one, full, split, whole, 1e-4)
    edits = len(final) // len(LENGTHS) // 2
    for start in range(0, len(final), 2 * edits):
        part = whole["margin"][start : start + 2 * edits].to_numpy().reshape(edits, 2)
        assert (abs(part[1:] - part[0]).max(1) > 1e-5).all(), f"an edit has no effect at length {len(full[start].host)}"


def test_states_equal_a_recompute_of_whole_prompts_at_every_length(one):
    """Each cell alone in plain torch: both prompts run, states are swapped by hand, one token goes on."""
    linear = one.model.linear_layers
    cells = []
    for length in LENGTHS:
        host, donor = raw_prompts(one.model, 2, length)
        cells.append(raw_cell("none", host, FINAL, 0))
        for mode in ("recurrent", "conv", "both"):
            cells.append(raw_cell("state", host, FINAL, 0, donor=donor, layers=linear, mode=mode))
    table = one.engine.run(cells)
    for cell, margin in zip(cells, table["margin"]):
        logits = expect_final(one.oracle, [cell])[0]["logits"]
        a, b = (logits[token] for _, token in cell.outcomes)
        assert abs(margin - float(a - b)) <= 1e-4 * max(1.0, float(logits.std())), (cell.mode, len(cell.host))
    margins = table["margin"].to_numpy().reshape(len(LENGTHS), 4)
    assert (abs(margins[:, 1:] - margins[:, :1]) > 1e-5).all()


@pytest.mark.parametrize("name", ["qwen3_5_text", "granite", "tiny-gdn", "tiny-mamba2"])
def test_states_equal_those_of_a_token_by_token_recurrence(name):
    """The oracle's prefix runs one token at a time, so no chunked kernel, ours included, is trusted."""
    one = case(name)
    host, donor = raw_prompts(one.model, 2, 65)
    kw = {"donor": donor, "layers": one.model.linear_layers}
    cells = [raw_cell("none", host, FINAL, 0)]
    cells += [raw_cell("state", host, FINAL, 0, mode=mode, **kw) for mode in ("recurrent", "conv", "both")]
    table = one.engine.run(cells)
    for cell, margin, want in zip(cells, table["margin"], expect_final(one.oracle, cells, one_by_one=True)):
        a, b = (want["logits"][token] for _, token in cell.outcomes)
        assert abs(margin - float(a - b)) <= 1e-4 * max(1.0, float(want["logits"].std())), cell.mode


# -- late entry ------------------------------------------------------------------------------
def before_question(prompt) -> tuple[int, ...]:
    return prompt.span("entry 0") + prompt.span("entry 1")


def edits_at_many_depths(one) -> list[list[Cell]]:
    """Full-path edits that begin at several layers, two hosts each; all heads are watched."""
    softmax, out = one.model.softmax_layers, []
    for name, layers in one.units:
        out.append(removal.cells(one.swaps[:1], [(name, layers)], watch=one.watch))
        out.append(patched(one, FULL, layers, "dissociation", before_question, watch=one.watch)[:2])
    out.append(removal.cells(one.swaps[:1], one.units[1:2], "mean", one.watch))
    out.append(readers.cells(one.swaps[:1], one.watch[-1:]))
    out.append(patched(one, FULL, softmax[-1:], "dissociation", before_question, verb="key", watch=one.watch)[:2])
    out.append(patched(one, FULL, softmax[1:], verb="query", watch=one.watch)[:2])
    return out


def test_late_entry_equals_a_run_from_the_embeddings(one):
    """All edits in one plan share what runs below them; each edit alone has nothing to share and runs whole."""
    edits = edits_at_many_depths(one)
    cells = [cell for edit in edits for cell in edit]
    (bundle,) = one.engine.plan(cells).bundles
    assert len(bundle.starts) >= 4
    together = one.engine.run(cells)
    start = 0
    for edit in edits:
        (alone,) = one.engine.plan(edit).bundles
        assert alone.starts == []
        part = together.iloc[start : start + len(edit)].reset_index(drop=True)
        close(one, edit, part, one.engine.run(edit), 3e-5)
        start += len(edit)


def test_attention_below_the_entry_is_the_intact_models(one):
    """It is read once and belongs to every edit that enters above it; from the edit on it is the edit's own."""
    items = [cell for edit in edits_at_many_depths(one) for cell in edit if cell.intervention in ("transplant", "key")]
    items = [cell for cell in items if cell.watch]
    hosts = {cell.host.ids: cell.host for cell in items}
    plain = [
        Cell("none", h, FULL, watch=one.watch, outcomes=items[0].outcomes, labels={"n": n})
        for n, h in enumerate(hosts.values())
    ]
    table, intact = one.engine.run(items), one.engine.run(plain)
    row = {ids: i for i, ids in enumerate(hosts)}
    below = above = 0
    for i, cell in enumerate(items):
        for layer, head in cell.watch:
            name = f"attn.L{layer}H{head}"
            gap = (torch.tensor(table[name][i]) - torch.tensor(intact[name][row[cell.host.ids]])).abs().max()
            if layer < cell.start:
                below += 1
                assert gap <= 1e-6, name
            else:
                above = max(above, float(gap))
    assert below > 0
    assert above > 1e-4


@pytest.mark.parametrize("name", ["qwen3_5_text", "granite", "tiny-mamba2"])
def test_text_loss_with_late_entry(name):
    one = case(name)
    chunks = one.text.chunks(one.model.tokenizer, n=3)
    cells = removal.text_cells(chunks, one.units)
    assert any(bundle.starts for bundle in one.engine.plan(cells).bundles)
    together = one.engine.run(cells)["loss"]
    for start in range(0, len(cells), len(chunks)):
        alone = one.engine.run(cells[start : start + len(chunks)])["loss"]
        assert abs(together[start : start + len(chunks)].to_numpy() - alone.to_numpy()).max() <= 1e-5
    assert moved(together[3:6], together[:3]) > 1e-3


# -- what a plan costs -------------------------------------------------------------------------
def of_every_kind(one) -> dict[str, list[Cell]]:
    """Cells of each intervention and path, of two prompt lengths where the prompts are ours."""
    linear, softmax, watch = one.model.linear_layers, one.model.softmax_layers, one.watch[::3]
    read = [Cell("none", q.host, watch=watch, labels={"pair": q.pair}) for q in one.questions]
    swaps = one.swaps[:2]
    asked = {"outcomes": (("correct", swaps[0].clean.answer), ("swapped", swaps[0].corrupted.answer))}
    kinds = {
        "none": untouched(one, FINAL, watch) + untouched(one, FULL, watch) + read,
        "remove": removal.cells(swaps, one.units, watch=watch),
        "mean": removal.cells(swaps, one.units[2:3], "mean"),
        "text": removal.text_cells(one.text.chunks(one.model.tokenizer, n=3), one.units),
        "heads": readers.cells(swaps, one.watch[-3:]),
        "transplant": transplant.cells(one.questions, one.units, watch=watch),
        "transplant full": transplant.cells(one.questions, one.units, ("identity", "other-dictionary"), "question"),
        "noise full": patched(
            one, FULL, linear[2:4], "dissociation", before_question, "transplant", mode="random", seed=1
        ),
        "state": patched(one, FINAL, linear, verb="state", mode="both"),
        "query": patched(one, FINAL, softmax, verb="query", head=1) + patched(one, FULL, softmax, verb="query"),
        "key": patched(one, FULL, softmax[-1:], "dissociation", before_question, verb="key"),
        "truncate": [Cell("truncate", s.clean, layers=(n,), **asked, labels={"n": n}) for s in swaps for n in (1, 6)],
    }
    host, donor = raw_prompts(one.model, 2, 30)
    kinds["short"] = at_the_end(one, FINAL, [host], [donor]) + at_the_end(one, FULL, [host], [donor])
    return kinds


@pytest.mark.parametrize(("name", "batch_tokens"), [("qwen3_5_text", None), ("qwen3_5_text", 200), ("tiny-mamba2", 1)])
def test_a_plan_says_what_it_takes(name, batch_tokens):
    """Tokens and traces of every kind of cell alone, and of all in one plan, before they are run."""
    one = case(name)
    kinds = of_every_kind(one)
    assert {cell.intervention for cells in kinds.values() for cell in cells} == {
        "none", "remove", "transplant", "state", "query", "key", "heads", "truncate",
    }  # fmt: skip
    everything = [cell for cells in kinds.values() for cell in cells]
    for what, cells in {**(kinds if batch_tokens == 200 else {}), "everything": everything}.items():
        engine = Engine(one.model, one.text, batch_tokens)
        plan = engine.plan(cells)
        table = engine.run(cells)
        assert (engine.tokens, engine.traces) == (plan.tokens, plan.traces), what
        assert engine.planned == plan.tokens >= plan.floor == engine.floor > 0, what
        assert len(table) == plan.cells == len(cells)


def test_a_plan_of_what_is_left_says_what_it_takes(tmp_path):
    """Rows that are there cost nothing, but what they shared with the rest is still run."""
    one = case("qwen3_5_text")
    cells = [cell for cells in of_every_kind(one).values() for cell in cells]
    engine = Engine(one.model, one.text, 300)
    keys = engine.keys(cells)
    nothing = engine.plan(cells, keys)
    assert (nothing.tokens, nothing.traces, nothing.cells, nothing.floor) == (0, 0, 0, 0)
    with encode_address.run.store.Store(tmp_path) as store:
        some = cells[: len(cells) // 3]
        engine.run(some, store)
        done, before = store.keys(), (engine.layer_tokens, engine.traces)
        plan = engine.plan(cells, done)
        engine.run(cells, store)
    assert plan.cells == len(cells) - len(some)
    assert 0 < plan.floor <= plan.tokens
    assert (engine.layer_tokens - before[0], engine.traces - before[1]) == (plan.layer_tokens, plan.traces)


# -- a donor that is the host as far as it matters ------------------------------------------------
@pytest.mark.parametrize(
    ("name", "verb", "mode"), [("tiny-gdn", "state", "conv"), ("qwen3_5_text", "transplant", "outputs")]
)
def test_a_donor_with_the_same_values_there_is_no_error(name, verb, mode):
    """The first layer knows the last few tokens only, or has forgotten the rest: what is written is what was there.

    Whether such a cell shares its trace with others must not decide whether it runs.
    """
    one = case(name)
    (cell,) = patched(one, FINAL, (0,), "other_dictionary", verb=verb, mode=mode)[:1]
    plain = one.engine.run(untouched(one, FINAL)[:1])
    assert moved(one.engine.run([cell])["margin"], plain["margin"]) <= 1e-5 * max(1.0, plain["spread"][0])


# -- a family that does not continue exactly -----------------------------------------------------
def test_a_family_without_continuation_runs_in_full_and_says_so():
    one, model = case("granite"), tiny.load_tiny("granite")
    model.family = dataclasses.replace(model.family, continues=False)
    engine = Engine(model)
    cells = patched(one, FINAL, one.units[1][1]) + patched(one, FINAL, model.softmax_layers, verb="query")
    plan = engine.plan(cells)
    assert str(plan).endswith(f"; granitemoehybrid does not continue exactly from a cache: {len(cells)} final-position "
                              "cells run as full forwards")  # fmt: skip
    table, usual = engine.run(cells), one.engine.run(cells)
    assert table["path"].unique().tolist() == [FULL]
    assert usual["path"].unique().tolist() == [FINAL]
    assert engine.tokens == plan.tokens
    close(one, [dataclasses.replace(cell, path=FULL) for cell in cells], table, usual, 1e-4)
    assert set(table["key"]).isdisjoint(usual["key"])
    assert "continue" not in str(engine.plan(untouched(one, FULL)))
    with pytest.raises(RunError, match="granitemoehybrid does not continue exactly from a cache"):
        engine.run(patched(one, FINAL, (0,), verb="state", mode="both"))


def test_states_that_a_server_does_not_show_are_refused_and_the_rest_runs_in_full(monkeypatch):
    one = case("recurrent_gemma")
    model, cells = one.model, patched(one, FINAL, (0, 1))
    usual = one.engine.run([dataclasses.replace(cell, path=FULL) for cell in cells])
    monkeypatch.setattr(model, "where", lambda model, function, arguments: function(model, *arguments))
    engine, why = Engine(model), "recurrent_gemma keeps its states on its modules, where only a local model shows them"
    assert str(engine.plan(cells)).endswith(f"; {why}: {len(cells)} final-position cells run as full forwards")
    table = engine.run(cells)
    assert table["path"].unique().tolist() == [FULL]
    assert same_rows(table, usual)
    with pytest.raises(RunError, match=f"^{why}: state transplants do not run on it"):
        engine.run(patched(one, FINAL, (0,), verb="state", mode="both"))
    with pytest.raises(RunError, match=f"steering continues from a cache, and {why}"):
        encode_address.steer(model, "a=1", "a", from_key="b")
    assert path_gap(model, [cell.host for cell in cells]) == {}


# -- bfloat16 ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["tiny-gdn", "tiny-mamba2"])
def test_bfloat16_states_its_gap_and_nothing_is_still_nothing(name):
    """The two paths differ by rounding that is no longer small; on one path an edit of nothing changes no bit."""
    one, model = case(name), encode_address.load(name, device="cpu", dtype="bfloat16")
    hosts = [item.host for item in one.questions]
    gap, exact = path_gap(model, hosts), path_gap(one.model, hosts)
    assert set(gap) == {"largest_logit_difference", "logit_std", "same_answer", "prompts"}
    assert gap["prompts"] == len(hosts) >= gap["same_answer"]
    whole, split = both_paths(model, torch.tensor([host.ids for host in hosts]))
    assert gap["largest_logit_difference"] == float((whole - split).abs().max())
    assert gap["logit_std"] == pytest.approx(float(whole.std()))
    assert exact["largest_logit_difference"] <= 1e-4 * max(1.0, exact["logit_std"])
    assert exact["same_answer"] == len(hosts)
    engine, linear, softmax = Engine(model), model.linear_layers, model.softmax_layers
    nothing = {
        FINAL: [
            ("transplant", linear, {"mode": "outputs"}),
            ("state", linear, {"mode": "both"}),
            ("query", softmax, {}),
        ],
        FULL: [("transplant", linear, {"mode": "outputs"}), ("query", softmax, {})],
    }
    for path, edits in nothing.items():
        plain = engine.run(untouched(one, path))
        for verb, layers, kw in edits:
            assert same_rows(plain, engine.run(patched(one, path, layers, "host", verb=verb, **kw))), (path, verb)
            assert not same_rows(plain, engine.run(patched(one, path, layers, verb=verb, **kw))), (path, verb)
    keys = patched(one, FULL, softmax, "host", before_question, verb="key")
    assert same_rows(engine.run(untouched(one, FULL)), engine.run(keys))


# -- what cannot be done -------------------------------------------------------------------------------
WRONG = {
    "state of a softmax layer": (
        FINAL,
        "state",
        "softmax",
        {"mode": "both"},
        "L2 is a softmax layer, it has no recurrent state",
    ),
    "query of a linear layer": (FINAL, "query", "linear", {}, "L0 is a linear layer and has no attention"),
    "query of a linear layer in full": (FULL, "query", "linear", {}, "L0 is a linear layer and has no attention"),
    "key of a linear layer": (FULL, "key", "linear", {}, "L0 is a linear layer and has no attention"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_layer_of_the_wrong_kind_is_one_clear_line(what):
    one = case("qwen3_5_text")
    path, verb, kind, kw, line = WRONG[what]
    layers = {"softmax": one.model.softmax_layers, "linear": one.model.linear_layers}[kind][:1]
    with pytest.raises(EncodeAddressError, match=line) as caught:
        one.engine.run(patched(one, path, layers, verb=verb, **kw))
    assert "\n" not in str(caught.value)
