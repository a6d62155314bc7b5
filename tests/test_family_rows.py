"""The table of families is what running them says: each row again, by the engine and by the oracle (`family_row`)."""

from __future__ import annotations

import pytest
import torch

from encode_address.interventions import final_attention, read_cache
from encode_address.models.families import FAMILIES, REFUSED
from encode_address.models.support import document, rows
from encode_address.run.cells import FINAL
from tests import family_row
from tests.family_row import NAMES, case
from tests.oracle_cases import patched, same_rows


@pytest.mark.parametrize("name", NAMES)
def test_a_row_of_the_table(name):
    """`python -m tests.family_row NAME` writes it again."""
    assert family_row.row_of(name) == rows()[name]


def test_every_family_has_a_row_and_nothing_else_does():
    known = rows()
    assert [*known] == [*NAMES]
    assert {row["family"] for row in known.values()} == {family.name for family in FAMILIES}
    types = {t.removesuffix("_text") for family in FAMILIES for t in family.model_types}
    assert types == {row["model type"].removesuffix("_text") for row in known.values()}
    assert not types & {*REFUSED}


def test_the_document_is_the_table():
    assert document() == family_row.DOCUMENT.read_text()


@pytest.mark.parametrize("name", ["lfm2", "jamba", "recurrent_gemma", "minimax", "kimi_linear"])
def test_the_hosts_own_states_are_bit_exact(name):
    """Wherever they lie: in the cache's layers, in a list of the cache, on the modules."""
    one = case(name)
    mode = one.model.family.states[0]
    plain, same = (
        one.engine.run(patched(one, FINAL, one.model.linear_layers, "host", verb=verb, mode=how))
        for verb, how in (("transplant", "outputs"), ("state", mode))
    )
    assert same_rows(plain, same)


def test_states_on_modules_do_not_leak_from_one_prefix_to_the_next():
    """Of RecurrentGemma: a prefix gives the same states whatever ran before it, also one of a single token."""
    one = case("recurrent_gemma")
    model = one.model
    for ids in (torch.tensor([[7, 9, 11, 13]]), torch.tensor([[7]])):
        model.prefix([[21, 22, 23]])
        first = read_cache(model.prefix(ids), model.held)
        model.prefix([[31, 32, 33, 34, 35]])
        second = read_cache(model.prefix(ids), model.held)
        assert [[*layer] for layer in first] == [[*layer] for layer in second]
        assert all(torch.equal(a[k], b[k]) for a, b in zip(first, second) for k in a)
    assert {"recurrent", "conv"} <= {*first[0]}
    assert {"keys", "values", "seen"} == {*first[2]}


def test_a_sliding_window_has_no_weight_on_what_it_has_let_go():
    one = case("recurrent_gemma")
    model, window = one.model, one.model.config.attention_window_size
    layer, ids = model.softmax_layers[0], torch.tensor([q.host.ids for q in one.questions])
    op, far = model.attention_op(layer), ids.shape[1] - window
    with torch.no_grad(), model.trace(ids):
        weights = final_attention(model.layers[layer].mixer, op).save()
    assert far > 0
    assert weights[:, :, :far].abs().max() == 0
    assert weights[:, :, far:].min() > 0
