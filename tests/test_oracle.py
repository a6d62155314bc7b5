"""The interventions on outputs and heads, and the experiments' cells, against the plain-torch oracle.

On every family and trained model; see `oracle_cases` for what is compared and how closely. What is done inside
attention, to states and by truncation is in `test_oracle_inside`.
"""

from __future__ import annotations

from types import SimpleNamespace

import nnsight
import pytest
import torch

from encode_address import interventions as iv
from encode_address.errors import RunError
from encode_address.experiments import baseline, encode, readers, removal, transplant
from encode_address.run import edits as edits_module
from encode_address.run.cells import FINAL, FULL
from encode_address.run.engine import Engine
from tests import tiny
from tests.oracle import EMBED, fill, put, take
from tests.oracle_cases import (
    MODELS,
    PAIRS,
    case,
    check,
    expect,
    ids_of,
    mean_outputs,
    moved,
    patched,
    tolerance,
    untouched,
)


@pytest.fixture(params=MODELS)
def one(request):
    return case(request.param)


# -- the experiments' cells ----------------------------------------------------------
def test_intact_model_and_attention(one):
    table, margins = check(one, baseline.cells(one.swaps, one.watch))
    assert margins.nunique() == len(table)


@pytest.mark.parametrize("mode", ["zero", "mean"])
def test_removal(one, mode):
    cells = removal.cells(one.swaps, one.units, mode, one.watch)
    _, margins = check(one, cells)
    intact = expect(one, baseline.cells(one.swaps))
    for start in range(0, len(cells), len(intact)):
        block = margins[start : start + len(intact)]
        plain = [float(w["logits"][c.outcomes[0][1]] - w["logits"][c.outcomes[1][1]]) for w, c in zip(intact, cells)]
        assert moved(block, plain) > 1e-3, f"removing {cells[start].labels['block']} has no effect that could be missed"


def test_means_over_the_text(one):
    ours, want = one.engine.means(), mean_outputs(one.name)
    for layer in one.model.linear_layers:
        assert (ours[layer] - want[layer]).abs().max() <= 1e-5 * max(1.0, float(want[layer].std()))
        assert want[layer].norm() > 1e-2


def test_text_loss(one):
    chunks = one.text.chunks(one.model.tokenizer, n=5)
    _, losses = check(one, removal.text_cells(chunks, one.units))
    assert moved(losses[5:10], losses[:5]) > 1e-3


@pytest.mark.parametrize("swap", ["value", "key"])
def test_encode_swaps(one, swap):
    """One (value) or two (key) patched positions, outputs and embeddings."""
    items = one.entries(PAIRS, swap)
    _, margins = check(one, encode.cells(items, one.units))
    assert moved(margins[-PAIRS:], margins[:PAIRS]) > 1e-3


def test_transplant_at_the_final_position(one):
    """All donors, noise included, of every block, in one batch of one-token continuations."""
    plan = transplant.host_cells(one.questions, watch=one.watch)
    plan += transplant.cells(one.questions, one.units, watch=one.watch)
    table, margins = check(one, plan)
    donors = table["donor"].fillna("")
    hosts = table[table["intervention"] == "none"].set_index("pair")["margin"]
    for kind in transplant.DONORS:
        effect = (margins - table["pair"].map(hosts))[donors == kind].abs().max()
        assert effect <= 1e-4 if kind == "identity" else effect > 1e-3, f"{kind}: {effect}"


def test_transplant_over_the_question(one):
    """Many positions at once, recomputed in full."""
    donors = [kind for kind in transplant.DONORS if kind != "random"]
    plan = transplant.host_cells(one.questions, "question") + transplant.cells(
        one.questions, one.units, donors, "question", one.watch
    )
    _, margins = check(one, plan)
    assert moved(margins[PAIRS : 2 * PAIRS], margins[:PAIRS]) > 1e-3


def test_every_head_removed(one):
    _, margins = check(one, readers.cells(one.swaps, one.watch))
    assert margins.nunique() > len(margins) / 2


# -- two paths, and exact facts --------------------------------------------------------
def test_final_path_equals_full_recompute(one):
    for _, layers in (*one.units, ("all", one.model.linear_layers)):
        final, full = patched(one, FINAL, layers), patched(one, FULL, layers)
        split, whole = one.engine.run(final), one.engine.run(full)
        for a, b, x, y in zip(expect(one, final), expect(one, full), split["margin"], whole["margin"]):
            bound = tolerance(b["logits"], 1e-4)
            assert (a["logits"] - b["logits"]).abs().max() <= bound
            assert abs(x - y) <= bound
            first, second = b["logits"].topk(2).values
            assert a["logits"].argmax() == b["logits"].argmax() or first - second < bound


@pytest.mark.parametrize("path", [FULL, FINAL])
def test_identity_transplant_is_bit_exact(one, path):
    plain = one.engine.run(untouched(one, path))
    same = one.engine.run(patched(one, path, one.model.linear_layers, "host"))
    assert same["margin"].tolist() == plain["margin"].tolist()
    assert same["spread"].tolist() == plain["spread"].tolist()


def test_a_saved_cache_outlives_a_continuation(one):
    """Continuing changes a cache in place; what was read from it before must not change along."""
    ids, model = ids_of([s.clean for s in one.swaps]), one.model
    with torch.no_grad(), model.trace(ids[:, :-1], use_cache=True) as tracer:
        past = tracer.result.cache.save()
    saved, steps = iv.read_cache(past), []
    last = {"input_ids": ids[:, -1:], "attention_mask": torch.ones_like(ids), "cache": past, "use_cache": True}
    for _ in range(2):
        with torch.no_grad(), model.lm.trace(**last) as tracer:
            logits = tracer.result.logits[:, -1].clone().save()
        steps.append(logits)
        iv.write_cache(past, saved, torch.arange(len(ids)))
    assert torch.equal(*steps)
    tokens, how = one.oracle.continuation(ids, one.oracle.prefix(ids), torch.arange(len(ids)))
    want = one.oracle.logits(tokens, **how)
    assert (steps[0] - want).abs().max() <= tolerance(want)


def before_question(prompt) -> tuple[int, ...]:
    return tuple(range(prompt.span("question")[0]))


def test_transplant_before_the_question_from_the_same_dictionary_is_a_no_op(one):
    """Up to the question host and donor are the same tokens, so nothing may change - bit for bit."""
    plain = one.engine.run(untouched(one, FULL))
    layers = one.model.linear_layers
    same = one.engine.run(patched(one, FULL, layers, where=before_question))
    assert same["margin"].tolist() == plain["margin"].tolist()
    other = one.engine.run(patched(one, FULL, layers, "other_dictionary", before_question))
    assert moved(other["margin"], plain["margin"]) > 1e-3


# -- the interventions themselves, whole logits ------------------------------------------
def compare(one: SimpleNamespace, ids: torch.Tensor, ours: torch.Tensor, edits: dict, **kw) -> None:
    """Logits of every position against the oracle's; the edit must have moved them."""
    want, plain = one.oracle.run(ids, edits, **kw).logits, one.oracle.run(ids).logits
    assert (ours - want).abs().max() <= tolerance(want)
    assert (want - plain).abs().max() > 1e-2


@pytest.mark.parametrize("with_means", [False, True])
def test_remove_in_a_trace(one, with_means):
    ids = ids_of([s.clean for s in one.swaps])
    for name, layers in one.units:
        mixers = one.model.mixers(name)
        value = [mean_outputs(one.name)[layer] for layer in layers] if with_means else None
        with torch.no_grad(), one.model.trace(ids) as tracer:
            iv.remove(mixers, value)
            logits = tracer.result.logits.clone().save()
        compare(one, ids, logits, {layer: fill(value[i] if value else 0.0) for i, layer in enumerate(layers)})


def test_capture_and_transplant_in_a_trace(one):
    """Different positions in every row, and only some rows written."""
    hosts, donors = (ids_of([getattr(q, name) for q in one.questions]) for name in ("host", "donor"))
    length = hosts.shape[1]
    where = [[3, length - 1], [1, length - 2], [length - 4, 8]]
    source = [[length - 1, 3], [2, length - 3], [length - 4, 6]]
    rows = [2, 0, 3]
    for name, layers in one.units:
        mixers = one.model.mixers(name)
        with torch.no_grad(), one.model.trace(donors[:3]):
            taken = nnsight.save([])
            for mixer in mixers:
                taken.append(iv.capture(mixer, torch.tensor(source)))
        natural = one.oracle.outputs(donors[:3], layers)
        for layer, ours in zip(layers, taken):
            want = take(natural[layer], source)
            assert (ours - want).abs().max() <= 1e-5 * max(1.0, float(want.std()))
        with torch.no_grad(), one.model.trace(hosts) as tracer:
            iv.transplant(mixers, taken, torch.tensor(where), torch.tensor(rows))
            logits = tracer.result.logits.clone().save()
        compare(one, hosts, logits, {layer: put(v, where, rows) for layer, v in zip(layers, taken)})


def test_embeddings_in_a_trace(one):
    hosts, donors = (ids_of([getattr(q, name) for q in one.questions]) for name in ("host", "dissociation"))
    where = torch.tensor([q.host.span("value 1") + q.host.span("question") for q in one.questions])
    embed = one.model.embed
    with torch.no_grad(), one.model.trace(donors):
        taken = iv.capture(embed, where).save()
    with torch.no_grad(), one.model.trace(hosts) as tracer:
        iv.transplant([embed], [taken], where)
        logits = tracer.result.logits.clone().save()
    compare(one, hosts, logits, {EMBED: put(take(one.oracle.outputs(donors, [EMBED])[EMBED], where), where.tolist())})


def test_heads_and_attention_in_a_trace(one):
    ids, model = ids_of([s.clean for s in one.swaps]), one.model
    for layer in model.softmax_layers:
        mixer, op, heads = model.layers[layer].mixer, model.attention_op(layer), model.heads
        for head in range(heads):
            with torch.no_grad(), model.trace(ids) as tracer:
                weights = iv.final_attention(mixer, op).save()
                iv.remove_head(mixer, head, heads)
                logits = tracer.result.logits.clone().save()
            compare(one, ids, logits, {}, heads={layer: head})
        want = one.oracle.attention(ids, [layer])[layer]
        assert (weights - want).abs().max() <= 1e-5
        assert want.max() > 2 / ids.shape[1], "attention is uniform: a wrong row could not be told"


# -- the guards have teeth -----------------------------------------------------------------
def remove_from_a_copy(mixers, value):
    iv.mixer_output(mixers[0]).clone()[:] = 0


def remove_head_from_a_copy(mixer, head, heads):
    iv.head_outputs(mixer, heads).clone()[:, :, head] = 0


def transplant_into_a_copy(mixers, donor, positions, rows):
    iv.mixer_output(mixers[0]).clone()[rows[:, None], positions] = donor[0]


def transplant_into_the_rows_before(mixers, donor, positions, rows):
    iv.transplant(mixers, donor, positions, rows - 1)


LOST = {
    "remove": ("remove", remove_from_a_copy),
    "heads": ("remove_head", remove_head_from_a_copy),
    "transplant full": ("transplant", transplant_into_a_copy),
    "transplant final": ("transplant", transplant_into_a_copy),
    "transplant to other rows": ("transplant", transplant_into_the_rows_before),
}


@pytest.mark.parametrize("what", LOST)
@pytest.mark.parametrize("name", ["qwen3_5_text", "granite"])
def test_a_write_that_does_not_land_is_an_error(monkeypatch, name, what):
    """Each verb's writer is exchanged for one that writes elsewhere; what the engine reads back must tell."""
    one = case(name)
    layers = one.units[1][1]
    cells = {
        "remove": removal.cells(one.swaps, one.units[1:2]),
        "heads": readers.cells(one.swaps, one.watch[:1]),
        "transplant full": patched(one, FULL, layers),
        "transplant final": patched(one, FINAL, layers),
        "transplant to other rows": patched(one, FINAL, layers),
    }[what]
    one.engine.run(cells)  # as it is, it fires
    monkeypatch.setattr(edits_module, *LOST[what])
    with pytest.raises(RunError, match="did not fire"):
        one.engine.run(cells)


@pytest.mark.parametrize("what", ["baseline", "removal", "final", "text"])
def test_nan_weights_are_an_error(what):
    one, model = case("qwen3_5_text"), tiny.load_tiny("qwen3_5_text")
    cells = {
        "baseline": baseline.cells(one.swaps),
        "removal": removal.cells(one.swaps, one.units),
        "final": patched(one, FINAL, (0,)),
        "text": removal.text_cells(one.text.chunks(model.tokenizer, n=2), []),
    }[what]
    Engine(model).run(cells)  # as it is, it runs
    with torch.no_grad():
        model.module.model.layers[4].mlp.down_proj.weight[3, 5] = float("nan")
    with pytest.raises(RunError, match="NaN"):
        Engine(model).run(cells)
