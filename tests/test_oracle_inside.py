"""What is done to states, queries and keys, and by truncation, against the plain-torch oracle.

On every family and trained model, with whole plans of mixed cells. See `oracle_cases` for how closely both must
agree. Each intervention is also shown to do nothing, bit for bit, when the donor is the host, and to move the
answer for another donor: otherwise agreement would prove little.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from encode_address import interventions as iv
from encode_address.errors import RunError
from encode_address.run import edits as edits_module
from encode_address.run import steps as steps_module
from encode_address.run.cells import FINAL, FULL, READ, Cell
from tests.oracle import put_key, put_query
from tests.oracle_cases import (
    MODELS,
    PAIRS,
    agree,
    case,
    check,
    expect,
    ids_of,
    moved,
    patched,
    same_rows,
    tolerance,
    untouched,
)

STATES = ("recurrent", "conv", "both")


@pytest.fixture(params=MODELS)
def one(request):
    return case(request.param)


def several(one) -> list[tuple[int, ...]]:
    """Sets of linear layers: every block, and all of them."""
    return [*(layers for _, layers in one.units), one.model.linear_layers]


def first_two_entries(prompt) -> tuple[int, ...]:
    return prompt.span("entry 0") + prompt.span("entry 1")


def parts(margins, sizes=PAIRS):
    """Margins of one edit after another."""
    return [margins[start : start + sizes] for start in range(0, len(margins), sizes)]


# -- state ---------------------------------------------------------------------------------
def test_state(one):
    """Every block's states from three donors, mixed with transplants and hosts in one batch."""
    cells = untouched(one, FINAL, one.watch)
    for mode in STATES:
        for layers in several(one):
            for donor in ("donor", "dissociation", "host"):
                cells += patched(one, FINAL, layers, donor, verb="state", mode=mode, watch=one.watch)
    cells += patched(one, FINAL, one.units[0][1], watch=one.watch)
    table, margins = check(one, cells)
    plain = margins[:PAIRS]
    for cell, part in zip(cells[::PAIRS], parts(margins)):
        if cell.labels["donor"] == "host":
            assert moved(part, plain) <= 1e-4
        elif cell.layers == one.model.linear_layers:
            assert moved(part, plain) > 1e-3, (
                f"{cell.mode} of {cell.labels['donor']} has no effect that could be missed"
            )
    assert table["path"].unique().tolist() == [FINAL]


def test_the_state_of_one_head(one):
    """Every head of every linear layer; all heads of a layer by themselves are less than the layer."""
    layer = one.units[1][1][0]
    heads = range(one.model.heads_of(layer))
    cells = [
        c for h in heads for c in patched(one, FINAL, (layer,), "dissociation", verb="state", mode="recurrent", head=h)
    ]
    table, _ = check(one, cells)
    assert table.groupby("pair")["margin"].nunique().min() > 1
    with pytest.raises(RunError, match="only recurrent states have heads"):
        patched(one, FINAL, (layer,), verb="state", mode="both", head=0)


@pytest.mark.parametrize("mode", STATES)
def test_the_hosts_own_state_is_bit_exact(one, mode):
    plain = one.engine.run(untouched(one, FINAL))
    same = one.engine.run(patched(one, FINAL, one.model.linear_layers, "host", verb="state", mode=mode))
    assert same_rows(plain, same)


def test_both_states_are_the_two_together(one):
    """The modes are three different edits: none is a part of another by mistake."""
    layers = one.model.linear_layers
    found = [one.engine.run(patched(one, FINAL, layers, verb="state", mode=mode))["margin"] for mode in STATES]
    assert min(moved(a, b) for i, a in enumerate(found) for b in found[:i]) > 1e-3


# -- query -----------------------------------------------------------------------------------
def test_query(one):
    """One head, every head, all softmax layers; on both paths, which agree with the oracle and with one another."""
    tables = {}
    for path in (FINAL, FULL):
        cells = untouched(one, path, one.watch)
        for layers, head in [(one.model.softmax_layers, -1), *(((layer,), head) for layer, head in one.watch[1::5])]:
            cells += patched(one, path, layers, verb="query", head=head, watch=one.watch)
        tables[path], margins = check(one, cells)
        plain, every, *heads = parts(margins)
        assert moved(every, plain) > 1e-3
        assert sum(moved(head, plain) > 1e-5 for head in heads) > len(heads) / 2
    bound = 1e-4 * tables[FULL]["spread"].clip(lower=1)
    assert ((tables[FINAL]["margin"] - tables[FULL]["margin"]).abs() <= bound).all()


@pytest.mark.parametrize("path", [FINAL, FULL])
def test_the_hosts_own_query_is_bit_exact(one, path):
    plain = one.engine.run(untouched(one, path, one.watch))
    same = one.engine.run(patched(one, path, one.model.softmax_layers, "host", verb="query", watch=one.watch))
    assert same_rows(plain, same)


# -- key -------------------------------------------------------------------------------------
def test_key(one):
    """Keys of entries, at places that differ from row to row, in all softmax layers and in the last alone."""

    def asked_entry(prompt):
        return prompt.span(f"entry {prompt.query}")

    cells = untouched(one, FULL, one.watch)
    for layers, where in ((one.model.softmax_layers, first_two_entries), (one.model.softmax_layers[-1:], asked_entry)):
        cells += patched(one, FULL, layers, "dissociation", where, verb="key", watch=one.watch)
    table, margins = check(one, cells)
    plain, everywhere, *_ = parts(margins)
    assert moved(everywhere, plain) > 1e-3
    seen = [torch.tensor(table[column].tolist()) for column in table if column.startswith("attn.")]
    changes = [(column[:PAIRS] - column[PAIRS : 2 * PAIRS])[:, :2].abs().max() for column in seen]
    assert max(changes) > 1e-4, "the attention that is read does not see the keys"


def test_the_hosts_own_keys_are_bit_exact(one):
    """Also from a donor that is the same up to the keys: only what comes later differs."""
    plain = one.engine.run(untouched(one, FULL, one.watch))
    for donor in ("host", "donor"):
        layers = one.model.softmax_layers
        same = one.engine.run(patched(one, FULL, layers, donor, first_two_entries, verb="key", watch=one.watch))
        assert same_rows(plain, same)


# -- truncate, and attention alone --------------------------------------------------------------
def truncations(one) -> list[Cell]:
    depth = len(one.model.layout.kinds)
    asked = [(s.pair, s.clean, (("correct", s.clean.answer), ("swapped", s.corrupted.answer))) for s in one.swaps]
    return [
        Cell("truncate", host, layers=(layer,), outcomes=outcomes, labels={"pair": pair})
        for layer in range(depth)
        for pair, host, outcomes in asked
    ]


def test_truncation_and_attention_in_one_forward(one):
    """Every exit against a model that really has no more layers, and the attention that is read beside them."""
    exits = truncations(one)
    attention = [Cell("none", item.host, watch=one.watch, labels={"pair": item.pair}) for item in one.questions]
    cells = [*exits[:3], *attention, *exits[3:]]
    assert {cell.path for cell in cells} == {READ}
    before = one.engine.traces
    _, margins = check(one, cells)
    assert one.engine.traces - before == len({len(cell.host) for cell in cells})
    said = parts(margins.dropna().tolist())
    assert min(moved(a, b) for a, b in pairwise(said)) > 1e-3, "two exits say the same"


def test_the_loss_of_truncated_models(one):
    """On text, at every exit in one forward, against a model that has no layers above."""
    chunks = one.text.chunks(one.model.tokenizer, "test", n=3)
    cells = [
        Cell("truncate", chunk, layers=(layer,), text=True, labels={"pair": i})
        for layer in range(len(one.oracle.mixers))
        for i, chunk in enumerate(chunks)
    ]
    assert {cell.path for cell in cells} == {READ}
    table = one.engine.run(cells)
    ids, whole = ids_of(chunks), one.oracle.decoder.layers
    for layer, rows in table.groupby("layers"):
        one.oracle.decoder.layers = whole[: int(layer) + 1]
        want = one.oracle.losses(ids)
        one.oracle.decoder.layers = whole
        assert rows["loss"].to_list() == pytest.approx(want.tolist(), rel=1e-5, abs=1e-5)
    last = one.engine.run([Cell("none", chunk, text=True) for chunk in chunks])
    assert rows["loss"].to_list() == pytest.approx(last["loss"].to_list(), rel=1e-5)


def test_the_last_exit_is_the_model(one):
    cells = truncations(one)[-PAIRS:]
    plain = [Cell("none", c.host, path=FULL, outcomes=c.outcomes, labels=c.labels) for c in cells]
    last, whole = one.engine.run(cells), one.engine.run(plain)
    assert ((last["margin"] - whole["margin"]).abs() <= 1e-5 * whole["spread"].clip(lower=1)).all()
    assert last["said"].tolist() == whole["said"].tolist()


def test_attention_on_the_read_path_is_that_of_the_full_path(one):
    read = one.engine.run(
        [Cell("none", item.host, watch=one.watch, labels={"pair": item.pair}) for item in one.questions]
    )
    full = one.engine.run(untouched(one, FULL, one.watch))
    names = [name for name in full if name.startswith("attn.")]
    assert len(names) == len(one.watch)
    gap = torch.tensor(read[names].values.tolist()) - torch.tensor(full[names].values.tolist())
    assert gap.abs().max() <= 1e-6
    assert "margin" not in read


def one_after_another(first, second):
    return lambda query, key: second(*first(query, key))


# -- whole logits --------------------------------------------------------------------------------
def test_queries_and_keys_in_a_trace(one):
    """What is read inside attention, and all logits after both are written by hand, in some rows only."""
    model = one.model
    hosts, donors = (ids_of([getattr(q, name) for q in one.questions]) for name in ("host", "dissociation"))
    where = torch.tensor([first_two_entries(q.host) for q in one.questions])
    for layer in model.softmax_layers:
        mixer, op = model.layers[layer].mixer, model.attention_op(layer)
        query, key = one.oracle.queries_and_keys(donors, [layer])[layer]
        with torch.no_grad(), model.trace(donors):
            ours = [x.clone() for x in iv.query_and_key(mixer, op)[:2]]
            ours_query, ours_key = ours[0].save(), ours[1].save()
        for mine, want in ((ours_query, query), (ours_key, key)):
            assert (mine - want).abs().max() <= tolerance(want)
        taken = torch.stack([key[row, :, places].transpose(0, 1) for row, places in enumerate(where)])
        rows = torch.tensor([2, 0])
        with torch.no_grad(), model.trace(hosts) as tracer:
            iv.write_query(mixer, op, query[rows, :, -1], rows, 1)
            iv.write_key(mixer, op, taken, where)
            logits = tracer.result.logits.clone().save()
        inner = one_after_another(put_query(list(query[rows, :, -1]), [2, 0], [1, 1]), put_key(key, where.tolist()))
        want = one.oracle.run(hosts, inner={layer: inner}).logits
        assert (logits - want).abs().max() <= tolerance(want)
        assert (want - one.oracle.run(hosts).logits).abs().max() > 1e-3


# -- the guards have teeth -------------------------------------------------------------------------
def query_to_a_copy(mixer, op, query, rows=None, head=-1):
    iv.query_and_key(mixer, op)[0].clone()[:, :, -1] = 0


def key_to_a_copy(mixer, op, key, positions, rows=None):
    iv.query_and_key(mixer, op)[1].clone()[:] = 0


def hosts_own_states(cache, saved, rows, swapped=None, held=None):
    iv.write_cache(cache, saved, rows, held=held)


LOST = {
    "query final": (edits_module, "write_query", query_to_a_copy),
    "query full": (edits_module, "write_query", query_to_a_copy),
    "key": (edits_module, "write_key", key_to_a_copy),
    "state": (steps_module, "write_cache", hosts_own_states),
}


@pytest.mark.parametrize("what", LOST)
@pytest.mark.parametrize("name", ["qwen3_5_text", "granite"])
def test_a_write_that_does_not_land_is_an_error(monkeypatch, name, what):
    one = case(name)
    softmax = one.model.softmax_layers[:1]
    cells = {
        "query final": lambda: patched(one, FINAL, softmax, verb="query"),
        "query full": lambda: patched(one, FULL, softmax, verb="query"),
        "key": lambda: patched(one, FULL, softmax, "dissociation", first_two_entries, verb="key"),
        "state": lambda: patched(one, FINAL, one.units[1][1], verb="state", mode="both"),
    }[what]()
    agree(one, cells, one.engine.run(cells), expect(one, cells))  # as it is, it fires
    monkeypatch.setattr(*LOST[what])
    with pytest.raises(RunError, match="did not fire"):
        one.engine.run(cells)


def test_a_donors_nan_is_told_as_what_it_is():
    """What was written does not equal itself, yet the edit fired."""
    one = case("granite")
    cells = patched(one, FINAL, one.units[1][1], verb="transplant")
    mixer = one.model.layers[0].mixer._module  # below the edited ones, so that what is taken from the donor is NaN
    hook = mixer.register_forward_hook(lambda module, args, output: output * float("nan"))
    try:
        with pytest.raises(RunError, match="NaN or infinite logits: transplant outputs at layers"):
            one.engine.run(cells)
    finally:
        hook.remove()
    assert one.engine.run(cells)["margin"].notna().all()
