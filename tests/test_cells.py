"""Cells: batches cover every cell once and mix nothing, keys differ exactly where the row could."""

import dataclasses
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from encode_address.errors import RunError, TaskError
from encode_address.run.cells import EMBED, FINAL, Cell, bundles, slices
from encode_address.tasks.prompts import Prompt

LENGTHS = (4, 5, 7)
PROMPTS = [
    Prompt(tuple(range(start, start + length)), {"final": (length - 1,)}, choices=tuple(range(choices)))
    for length in LENGTHS
    for start in (0, 1, 2)
    for choices in (0, 2)
]
prompts = st.sampled_from(PROMPTS)
layers = st.sampled_from([(0,), (0, 1), (2,), (0, 2), (EMBED,)])
watches = st.lists(st.tuples(st.sampled_from([1, 3]), st.integers(0, 1)), max_size=2, unique=True).map(tuple)
outcomes = st.sampled_from([(), (("correct", 1),), (("correct", 1), ("swapped", 2)), (("correct", 2), ("kept", 1))])


@st.composite
def final_cells(draw):
    """A cell of the final path: nothing done, or mixer outputs of the last position from a donor."""
    host = draw(prompts)
    shared = {
        "path": FINAL,
        "outcomes": draw(outcomes),
        "watch": draw(watches),
        "labels": draw(st.dictionaries(st.sampled_from(["block", "pair"]), st.integers(0, 3))),
    }
    if draw(st.booleans()):
        return Cell("none", host, **shared)
    donor = draw(prompts.filter(lambda p: len(p) == len(host)))
    touched = draw(layers.filter(lambda chosen: EMBED not in chosen))
    return Cell("transplant", host, donor=donor, layers=touched, where=host.final, source=host.final, **shared)


@st.composite
def cells(draw):
    """Any cell of the full path: patched with a donor of the host's length, or edited without one."""
    host = draw(prompts)
    shared = {
        "layers": draw(layers),
        "mode": draw(st.sampled_from(["", "zero", "mean", "outputs", "embeddings"])),
        "head": draw(st.sampled_from([-1, 0, 1])),
        "outcomes": draw(outcomes),
        "watch": draw(watches),
        "text": draw(st.booleans()),
        "labels": draw(st.dictionaries(st.sampled_from(["block", "pair"]), st.integers(0, 3))),
    }
    if draw(st.booleans()):
        verb = draw(st.sampled_from(["none", "remove", "heads"]))
        return Cell(verb, host, **shared | ({"layers": ()} if verb == "none" else {}))
    donor = draw(prompts.filter(lambda p: len(p) == len(host)))
    where = draw(st.lists(st.integers(0, len(host) - 1), min_size=1, max_size=3, unique=True).map(tuple))
    return Cell("transplant", host, donor=donor, where=where, source=where, **shared)


def ids(some) -> Counter:
    return Counter(map(id, some))


# -- batches --------------------------------------------------------------------------------
@given(st.lists(cells(), max_size=40), st.integers(1, 60))
@settings(max_examples=150, deadline=None)
def test_slices_cover_every_cell_once_and_mix_nothing(plan, batch_tokens):
    """A slice is one trace: one edit, one shape, one set of watched layers; its rows fit the budget."""
    batches = list(slices(plan, batch_tokens))
    assert ids(cell for batch in batches for cell in batch) == ids(plan)
    for batch in batches:
        assert len(batch) >= 1
        assert len({(c.intervention, c.mode, c.layers, c.head) for c in batch}) == 1
        assert len({(len(c.host), len(c.where), len(c.source), c.donor is None, c.text) for c in batch}) == 1
        assert len({(len(c.outcomes), len(c.host.choices)) for c in batch}) == 1
        assert len({frozenset(layer for layer, _ in c.watch) for c in batch}) == 1
        assert len(batch) == 1 or sum(len(c.host) for c in batch) <= batch_tokens


@given(st.lists(cells(), max_size=40), st.integers(1, 60))
@settings(max_examples=50, deadline=None)
def test_slices_keep_the_order_of_one_edit(plan, batch_tokens):
    """Within an edit and shape the rows come in the order of the plan, so that donors are captured in sequence."""
    place = {id(cell): i for i, cell in enumerate(plan)}
    for batch in slices(plan, batch_tokens):
        places = [place[id(cell)] for cell in batch]
        assert places == sorted(places)


def test_slices_are_as_full_as_the_budget_allows():
    plan = [Cell("none", PROMPTS[0]) for _ in range(10)]  # 4 tokens each
    assert [len(batch) for batch in slices(plan, 13)] == [3, 3, 3, 1]
    assert [len(batch) for batch in slices(plan, 1)] == [1] * 10
    assert list(slices([], 13)) == []


def test_edits_over_the_same_donors_follow_one_another():
    """Three blocks of the same pairs: slice by slice, all blocks on the same donors, which are then run once."""
    pairs = [(PROMPTS[0], PROMPTS[2]), (PROMPTS[2], PROMPTS[4]), (PROMPTS[4], PROMPTS[0])]
    plan = [
        Cell("transplant", host, layers=(layer,), donor=donor, where=(3,), source=(3,), mode="outputs")
        for layer in (0, 1, 2)
        for host, donor in pairs
    ]
    donors = [tuple(id(cell.donor) for cell in batch) for batch in slices(plan, 8)]
    assert len(donors) == 6
    assert len({d for d in donors[:3]}) == len({d for d in donors[3:]}) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"intervention": "remove"},
        {"layers": (EMBED,)},
        {"where": (1,)},
        {"source": (1,)},
    ],
    ids=str,
)
def test_the_final_path_takes_only_what_it_can_run(wrong):
    """Removal, embeddings and earlier positions need the whole prompt; a cell that asks otherwise is refused."""
    host, donor = PROMPTS[0], PROMPTS[2]
    right = {"intervention": "transplant", "layers": (0,), "where": host.final, "source": host.final}
    Cell(host=host, donor=donor, path=FINAL, **right)
    with pytest.raises(RunError, match="final path"):
        Cell(host=host, donor=donor, path=FINAL, **(right | wrong))


@given(st.lists(final_cells(), max_size=40), st.integers(1, 60))
@settings(max_examples=150, deadline=None)
def test_bundles_cover_every_cell_once_and_fit_their_prefixes(plan, batch_tokens):
    """A bundle is one prefix run: one length, and its distinct prompts fit the budget (or are a single pair)."""
    batches = list(bundles(plan, batch_tokens))
    assert ids(cell for batch in batches for cell in batch) == ids(plan)
    for batch in batches:
        assert batch
        assert len({len(cell.host) for cell in batch}) == 1
        needed = {p.ids for cell in batch for p in (cell.host, cell.donor) if p}
        assert len(needed) <= 2 or sum(map(len, needed)) <= batch_tokens


def test_a_bundle_holds_the_cells_of_a_pair_together():
    """All edits of a pair share its two prefixes: pairs, not edits, are cut apart."""
    plan = [
        Cell(
            "transplant",
            PROMPTS[0],
            path=FINAL,
            layers=(n,),
            donor=PROMPTS[2],
            where=(3,),
            source=(3,),
            labels={"pair": pair},
        )
        for n in (0, 1, 2)
        for pair in (0, 1)
    ]
    other = [dataclasses.replace(c, host=PROMPTS[4], labels={"pair": 2}) for c in plan[::2]]
    assert [{c.labels["pair"] for c in batch} for batch in bundles(plan + other, 8)] == [{0, 1}, {2}]


# -- keys -------------------------------------------------------------------------------------
CONTEXT = {"model": "tiny", "dtype": "float32", "text_source": ""}


def content(cell: Cell) -> tuple:
    """All that a cell says, as plain values."""
    fields = {f.name: getattr(cell, f.name) for f in dataclasses.fields(cell)}
    for name in ("host", "donor"):
        fields[name] = fields[name] and (fields[name].ids, fields[name].choices)
    fields["labels"] = tuple(sorted(fields["labels"].items()))
    return tuple(fields.items())


@given(cells(), cells())
@settings(max_examples=300, deadline=None)
def test_two_cells_have_one_key_exactly_when_they_say_the_same(a, b):
    assert (a.key(CONTEXT) == b.key(CONTEXT)) == (content(a) == content(b))
    assert a.key(CONTEXT) == dataclasses.replace(a, labels=dict(reversed(a.labels.items()))).key(dict(CONTEXT))


BASE = Cell(
    "transplant",
    Prompt((1, 2, 3, 4), {"final": (3,), "entry 0": (0, 1)}, query=0, choices=(7, 8)),
    layers=(2, 4, 5),
    where=(3,),
    donor=Prompt((1, 2, 5, 4), {"final": (3,)}, choices=(7, 8)),
    source=(3,),
    mode="outputs",
    seed=0,
    outcomes=(("redirected", 7), ("kept", 8)),
    watch=((3, 0),),
    labels={"variant": "chat8", "block": "G1", "pair": 0},
)
CHANGES = {
    "intervention": {"intervention": "state"},
    "host ids": {"host": dataclasses.replace(BASE.host, ids=(1, 2, 3, 5))},
    "host spans": {"host": dataclasses.replace(BASE.host, spans={"final": (3,), "entry 0": (0,)})},
    "host query": {"host": dataclasses.replace(BASE.host, query=1)},
    "host choices": {"host": dataclasses.replace(BASE.host, choices=(8, 7))},
    "path": {"path": FINAL},
    "layers": {"layers": (2, 4)},
    "layers in another run": {"layers": (2, 3, 5)},
    "embeddings": {"layers": (EMBED,)},
    "embeddings and a layer": {"layers": (EMBED, 2)},
    "where": {"where": (2,)},
    "source": {"source": (2,)},
    "no donor": {"donor": None},
    "donor ids": {"donor": dataclasses.replace(BASE.donor, ids=(1, 2, 6, 4))},
    "mode": {"mode": "random"},
    "head": {"head": 0},
    "seed": {"seed": 1},
    "outcome token": {"outcomes": (("redirected", 7), ("kept", 9))},
    "outcome name": {"outcomes": (("redirected", 7), ("stayed", 8))},
    "outcome order": {"outcomes": (("kept", 8), ("redirected", 7))},
    "watched head": {"watch": ((3, 1),)},
    "text": {"text": True},
    "longer host": {
        "host": dataclasses.replace(BASE.host, ids=(1, 2, 3, 4, 5)),
        "donor": dataclasses.replace(BASE.donor, ids=(1, 2, 3, 4, 6)),
    },
    "more positions": {"where": (2, 3), "source": (2, 3)},
    "more choices": {"host": dataclasses.replace(BASE.host, choices=(7, 8, 9))},
    "fewer outcomes": {"outcomes": (("redirected", 7),)},
    "other watched layer": {"watch": ((5, 0),)},
    "a label": {"labels": {**BASE.labels, "pair": 1}},
    "a further label": {"labels": {**BASE.labels, "split": "confirmation"}},
}


SEPARATE = (  # what one trace cannot do, or can not stack into one tensor
    "intervention", "layers", "layers in another run", "embeddings", "embeddings and a layer", "no donor", "mode", "head", "text",
    "longer host", "more positions", "more choices", "fewer outcomes", "other watched layer",
)  # fmt: skip


@pytest.mark.parametrize("name", SEPARATE)
def test_cells_that_one_trace_cannot_run_never_share_a_slice(name):
    other = dataclasses.replace(BASE, **CHANGES[name])
    assert sorted(map(len, slices([BASE, other, BASE, other], 1000))) == [2, 2]


@pytest.mark.parametrize("name", sorted(set(CHANGES) - set(SEPARATE)))
def test_cells_that_one_trace_can_run_share_a_slice(name):
    other = dataclasses.replace(BASE, **CHANGES[name])
    assert list(map(len, slices([BASE, other], 1000))) == [2]


def test_every_factor_changes_the_key_and_in_its_own_way():
    keys = {name: dataclasses.replace(BASE, **change).key(CONTEXT) for name, change in CHANGES.items()}
    keys["nothing"] = BASE.key(CONTEXT)
    assert len(set(keys.values())) == len(keys)
    assert {field.name for field in dataclasses.fields(Cell)} == {name for c in CHANGES.values() for name in c}


@pytest.mark.parametrize("change", [{"model": "other"}, {"dtype": "bfloat16"}, {"text_source": "t:1"}, {"torch": "2"}])
def test_the_context_changes_the_key(change):
    assert BASE.key({**CONTEXT, **change}) != BASE.key(CONTEXT)


# -- cells --------------------------------------------------------------------------------------
def test_a_cell_refuses_a_donor_of_another_length():
    with pytest.raises(TaskError, match=r"same number of tokens; these have \[4, 5\]"):
        Cell("transplant", PROMPTS[0], donor=Prompt((1, 2, 3, 4, 5)), layers=(0,), where=(0,), source=(0,))


@pytest.mark.parametrize("wrong", [("bananas", (0,)), ("none", (0,)), ("remove", ())])
def test_an_intervention_is_one_of_the_words_and_edits_some_layer(wrong):
    """A misspelt verb would otherwise run as an intact model under its own label."""
    verb, touched = wrong
    with pytest.raises(RunError):
        Cell(verb, PROMPTS[0], layers=touched)


def test_columns_are_the_factors_and_win_over_labels():
    assert BASE.columns() == {
        **BASE.labels,
        "intervention": "transplant",
        "mode": "outputs",
        "layers": "2,4-5",
        "head": -1,
        "seed": 0,
        "path": "full",
        "prompt": BASE.host.digest,
        "donor_prompt": BASE.donor.digest,
    }
    assert dataclasses.replace(BASE, layers=(EMBED,)).columns()["layers"] == "embed"
    assert dataclasses.replace(BASE, labels={"mode": "x"}).columns()["mode"] == "outputs"


@pytest.mark.parametrize(
    ("change", "null"),
    [
        ({}, False),
        ({"donor": BASE.host}, True),
        ({"donor": BASE.host, "source": (2,)}, False),
        ({"where": (1,), "source": (1,)}, True),  # donor and host are the same up to the patched position
        ({"where": (0, 2), "source": (0, 2)}, False),
        ({"donor": BASE.host, "mode": "random"}, False),
        ({"intervention": "remove", "donor": None, "where": (), "source": ()}, False),
        ({"intervention": "none", "layers": (), "donor": None, "where": (), "source": ()}, True),
    ],
)
def test_only_an_edit_that_writes_the_hosts_own_values_is_null(change, null):
    """A null edit is excused from having to fire; an edit that should move something never is."""
    assert dataclasses.replace(BASE, **change).is_null is null
