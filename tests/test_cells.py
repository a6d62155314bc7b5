"""Cells: keys differ exactly where the row could, and each goes on the cheapest path that can run it."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from encode_address.errors import RunError
from encode_address.run.cells import EMBED, FINAL, FULL, INTERVENTIONS, PATCHES, READ, Cell, Edit, context_of
from encode_address.run.given import Given
from encode_address.run.projection import Projection
from encode_address.tasks.prompts import Prompt


def prompt(length: int, first: int = 0, last: int = 90, choices: int = 0) -> Prompt:
    """Tokens that count up from `first`, and a last one; with first = 2, a dictionary of two entries."""
    spans = {"final": (length - 1,)}
    keys = ("a", "b") if first == 2 and length > 3 else ()
    spans |= {f"entry {i}": (i,) for i in range(len(keys))}
    return Prompt((*range(first, first + length - 1), last), spans, keys=keys, choices=tuple(range(choices)))


PROMPTS = [
    prompt(length, first, last, choices)
    for length in (1, 4, 5, 8)
    for first in (0, 1, 2)
    for last in (90, 91)  # prompts of one first and length share their prefix
    for choices in (0, 2)
]
VERBS = (
    "none", "remove", "heads", "transplant", "embeddings", "query", "key", "value", "gate", "input", "residual", "state",
    "truncate", "text",
)  # fmt: skip
LAYERS = [(0,), (0, 1), (2,), (0, 2), (3,), (1, 2, 5)]
outcomes = st.sampled_from([(), (("correct", 1),), (("correct", 1), ("swapped", 2)), (("correct", 2), ("kept", 1))])
watches = st.lists(st.tuples(st.sampled_from([1, 3]), st.integers(0, 1)), max_size=2, unique=True).map(tuple)


def further(host: Prompt, donor: Prompt) -> list[tuple[Edit, ...]]:
    """Edits of a host beside the main one, on a layer of their own: removal, or a donor's output, plain or edited."""
    ends = {"where": host.final, "source": host.final}
    plain = Edit("transplant", (4,), donor=donor, **ends)
    removed = Edit("remove", (4,))
    twice = Edit("transplant", (4,), donor=donor, under=(Edit("remove", (1,)),), **ends)
    return [(removed,), (plain,), (twice,), (plain, Edit("key", (7,), donor=donor, **ends))]


@st.composite
def cells(draw, verbs=VERBS, pool=PROMPTS):
    """Any cell that a model of 6 layers could be given, on each path that takes it."""
    host = draw(st.sampled_from(pool))
    donor = draw(st.sampled_from([p for p in pool if len(p) == len(host)]))
    long = len(host) > 1
    verb = draw(st.sampled_from([v for v in verbs if long or v != "state"]))
    shared = {
        "outcomes": draw(outcomes),
        "watch": draw(watches),
        "seed": draw(st.integers(-1, 1)),
        "labels": draw(st.dictionaries(st.sampled_from(["block", "pair"]), st.integers(0, 3))),
    }
    layers, path = draw(st.sampled_from(LAYERS)), draw(st.sampled_from(["", FULL]))
    at_the_end = {"donor": donor, "where": host.final, "source": host.final, "layers": layers}
    shared["also"] = draw(st.sampled_from([(), *further(host, donor)]))
    if verb in PATCHES:
        at_the_end["under"] = draw(st.sampled_from([(), *further(donor, host)]))
    if verb == "none":
        path = draw(st.sampled_from([FULL, READ, FINAL] if long else [FULL, READ]))
        if path != FULL:
            shared["also"] = ()
        if path == READ:
            shared |= {"outcomes": (), "watch": shared["watch"] or ((1, 0),)}
        return Cell("none", host, path, **shared)
    if verb == "text":
        touched = draw(st.sampled_from([(), layers]))
        mode = draw(st.sampled_from(["zero", "mean"])) if touched else ""
        return Cell("remove" if touched else "none", host, layers=touched, mode=mode, text=True)
    if verb == "remove":
        where = draw(st.sampled_from([(), (0,), host.final]))
        return Cell("remove", host, layers=layers, where=where, mode=draw(st.sampled_from(["zero", "mean"])), **shared)
    if verb == "heads":
        return Cell("heads", host, layers=layers[-1:], head=draw(st.integers(0, 1)), mode="zero", **shared)
    if verb == "truncate":
        also = tuple(e for e in shared["also"] if max(e.layers) <= layers[-1])
        return Cell("truncate", host, layers=layers[-1:], **shared | {"watch": (), "also": also})
    if verb == "state":
        mode = draw(st.sampled_from(["recurrent", "conv", "both"]))
        also = tuple(edit for edit in shared["also"] if edit.at_the_end(host))
        return Cell("state", host, layers=layers, donor=donor, mode=mode, **shared | {"also": also})
    if verb in ("query", "gate"):
        return Cell(verb, host, path, head=draw(st.integers(-1, 1)), **at_the_end, **shared)
    where = draw(st.lists(st.integers(0, len(host) - 1), min_size=1, max_size=3, unique=True).map(tuple))
    if verb in ("key", "value", "input", "residual"):
        return Cell(verb, host, **at_the_end | {"where": where, "source": where}, **shared)
    if verb == "embeddings":
        where = draw(st.sampled_from([where, host.final]))
        return Cell("transplant", host, layers=(EMBED,), donor=donor, where=where, source=where, mode=verb, **shared)
    mode = draw(st.sampled_from(["outputs", "random"]))
    at_the_end["under"] = () if mode == "random" else at_the_end["under"]
    if draw(st.booleans()):
        return Cell("transplant", host, path, mode=mode, **at_the_end, **shared)
    return Cell("transplant", host, mode=mode, **at_the_end | {"where": where, "source": where}, **shared)


# -- keys -------------------------------------------------------------------------------------
CONTEXT = context_of({"model": "tiny", "dtype": "float32", "text_source": ""})


def content(cell: Cell) -> tuple:
    """All that a cell says, as plain values."""
    fields = {f.name: getattr(cell, f.name) for f in dataclasses.fields(cell)}
    for name in ("host", "donor"):
        fields[name] = fields[name] and (fields[name].ids, fields[name].choices)
    fields["labels"] = tuple(sorted(fields["labels"].items()))
    for name in ("also", "under"):
        fields[name] = tuple(edit.work for edit in fields[name])
    return tuple(fields.items())


@given(st.tuples(cells(), cells()) | cells().map(lambda cell: (cell, dataclasses.replace(cell))))
@settings(max_examples=300, deadline=None)
def test_two_cells_have_one_key_exactly_when_they_say_the_same(pair):
    a, b = pair
    assert (a.key(CONTEXT) == b.key(CONTEXT)) == (content(a) == content(b))
    bare_a, bare_b = (content(dataclasses.replace(cell, labels={})) for cell in (a, b))
    assert (a.work == b.work) == (bare_a == bare_b)
    assert a.key(CONTEXT) == dataclasses.replace(a, labels=dict(reversed(a.labels.items()))).key(CONTEXT)


BASE = Cell(
    "transplant",
    Prompt((1, 2, 3, 4), {"final": (3,), "entry 0": (0, 1)}, query=0, choices=(7, 8)),
    path=FULL,
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
ROWS = torch.ones(1, 4)
GIVEN = Given({layer: ROWS for layer in BASE.layers})
REPLACED = {"intervention": "replace", "path": "", "layers": (2, 3, 4), "mode": "", "donor": None, "where": (), "source": (), "watch": ()}  # fmt: skip
CHANGES = {
    "intervention": {"intervention": "key", "mode": ""},
    "host ids": {"host": dataclasses.replace(BASE.host, ids=(1, 2, 3, 5))},
    "host spans": {"host": dataclasses.replace(BASE.host, spans={"final": (3,), "entry 0": (0,)})},
    "host query": {"host": dataclasses.replace(BASE.host, query=1)},
    "host choices": {"host": dataclasses.replace(BASE.host, choices=(8, 7))},
    "path": {"path": FINAL},
    "layers": {"layers": (2, 4)},
    "layers in another run": {"layers": (2, 3, 5)},
    "embeddings": {"layers": (EMBED,), "mode": "embeddings"},
    "embeddings and a layer": {"layers": (EMBED, 2), "mode": "embeddings"},
    "where": {"where": (2,)},
    "source": {"source": (2,)},
    "donor ids": {"donor": dataclasses.replace(BASE.donor, ids=(1, 2, 6, 4))},
    "mode": {"mode": "random"},
    "head": {"intervention": "query", "mode": "", "head": 0},
    "seed": {"seed": 1},
    "outcome token": {"outcomes": (("redirected", 7), ("kept", 9))},
    "outcome name": {"outcomes": (("redirected", 7), ("stayed", 8))},
    "outcome order": {"outcomes": (("kept", 8), ("redirected", 7))},
    "watched head": {"watch": ((3, 1),)},
    "an edit of the donor's run": {"under": (Edit("remove", (1,)),)},
    "another edit of it": {"under": (Edit("remove", (0,)),)},
    "a further edit": {"also": (Edit("remove", (1,)),)},
    "a further edit, later": {"also": (Edit("remove", (7,)),)},
    "two of them": {"also": (Edit("remove", (1,)), Edit("remove", (7,)))},
    "no measures": {"outcomes": (), "watch": ()},
    "text": {"outcomes": (), "watch": (), "text": True},
    "a map": {**REPLACED, "map": Projection((2, 3, 4), "layers", (BASE.host,))},
    "a map of mixers": {**REPLACED, "map": Projection((2, 3, 4), "mixers", (BASE.host,))},
    "a constant": {**REPLACED, "map": Projection((2, 3, 4), "layers", (BASE.host,), "mean")},
    "a map fitted on other prompts": {**REPLACED, "map": Projection((2, 3, 4), "layers", (BASE.donor,))},
    "given values": {"donor": None, "source": (), "mode": "given", "given": GIVEN},
    "other given values": {"donor": None, "source": (), "mode": "given", "given": Given({2: -ROWS, 4: ROWS, 5: ROWS})},
    "what follows a position": {"outcomes": (), "watch": (), "text": True, "after": 1},
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


def test_every_factor_changes_the_key_and_in_its_own_way():
    keys = {name: dataclasses.replace(BASE, **change).key(CONTEXT) for name, change in CHANGES.items()}
    keys["nothing"] = BASE.key(CONTEXT)
    assert len(set(keys.values())) == len(keys)
    assert {field.name for field in dataclasses.fields(Cell)} == {name for c in CHANGES.values() for name in c}


def test_labels_change_the_row_but_not_the_work():
    """Cells that differ in their labels only run once, so their work must be the same, and nothing else's."""
    works = {name: dataclasses.replace(BASE, **change).work for name, change in CHANGES.items()}
    assert {name for name, work in works.items() if work == BASE.work} == {"a label", "a further label"}
    assert len(set(works.values())) == len(works) - 1


@pytest.mark.parametrize("change", [{"model": "other"}, {"dtype": "bfloat16"}, {"text_source": "t:1"}, {"torch": "2"}])
def test_the_context_changes_the_key(change):
    facts = {"model": "tiny", "dtype": "float32", "text_source": ""}
    assert BASE.key(context_of({**facts, **change})) != BASE.key(context_of(facts))
    assert context_of(dict(reversed(facts.items()))) == context_of(facts)


# -- paths --------------------------------------------------------------------------------------
HOST, DONOR = prompt(5), prompt(5, first=1)
PATCHED = {"layers": (2,), "donor": DONOR, "where": (4,), "source": (4,)}
ANSWER = {"outcomes": (("correct", 1),)}


@pytest.mark.parametrize(
    ("verb", "more", "path"),
    [
        ("none", {"watch": ((3, 0),)}, READ),
        ("none", ANSWER, FULL),
        ("none", {**ANSWER, "watch": ((3, 0),)}, FULL),
        ("none", {"text": True}, FULL),
        ("remove", {"layers": (2,), "mode": "zero"}, FULL),
        ("heads", {"layers": (2,), "head": 1}, FULL),
        ("transplant", PATCHED, FINAL),
        ("transplant", {**PATCHED, "mode": "random"}, FINAL),
        ("transplant", {**PATCHED, "donor": HOST}, FINAL),
        ("transplant", {**PATCHED, "where": (3,), "source": (3,)}, FULL),
        ("transplant", {**PATCHED, "where": (3, 4), "source": (3, 4)}, FULL),
        ("transplant", {**PATCHED, "source": (3,)}, FULL),
        ("transplant", {**PATCHED, "where": (3,)}, FULL),
        ("transplant", {**PATCHED, "layers": (EMBED,)}, FULL),
        ("transplant", {**PATCHED, "layers": (EMBED, 2)}, FULL),
        ("state", {"layers": (2,), "donor": DONOR, "mode": "recurrent"}, FINAL),
        ("query", PATCHED, FINAL),
        ("query", {**PATCHED, "head": 1}, FINAL),
        ("key", PATCHED, FINAL),
        ("key", {**PATCHED, "where": (0, 1), "source": (0, 1)}, FULL),
        ("value", PATCHED, FINAL),
        ("gate", PATCHED, FINAL),
        ("input", PATCHED, FINAL),
        ("residual", {**PATCHED, "where": (0,), "source": (0,)}, FULL),
        ("truncate", {"layers": (2,), **ANSWER}, READ),
        ("remove", {"layers": (2,), "where": (4,)}, FINAL),
        ("remove", {"layers": (2,), "where": (3,)}, FULL),
        ("truncate", {"layers": (2,), **ANSWER, "also": (Edit("remove", (1,)),)}, FULL),
        ("none", {**ANSWER, "also": (Edit("remove", (1,)),)}, FULL),
        ("none", {**ANSWER, "also": (Edit("remove", (1,), where=(4,)),)}, FINAL),
        ("transplant", {**PATCHED, "also": (Edit("remove", (1,)),)}, FULL),
        ("transplant", {**PATCHED, "under": (Edit("remove", (1,)),)}, FINAL),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_path_is_the_cheapest_that_can_run_the_cell(verb, more, path):
    cell = Cell(verb, HOST, **more)
    assert cell.path == cell.columns()["path"] == path


def test_every_intervention_has_a_default_path():
    """No word of the tables is left out of the test above, but the one that does not exist yet."""
    marks = test_the_path_is_the_cheapest_that_can_run_the_cell.pytestmark
    assert {case[0] for case in marks[0].args[1]} == set(INTERVENTIONS) - {"replace"}


@pytest.mark.parametrize("verb", PATCHES)
def test_a_prompt_of_one_token_never_gets_the_final_path(verb):
    """Nothing comes before its last token, so there is no cache to continue from."""
    host, donor = prompt(1), prompt(1, last=91)
    edit = {"layers": (2,), "donor": donor, "where": (0,), "source": (0,)}
    assert Cell(verb, host, **edit).path == FULL
    with pytest.raises(RunError, match="the final path"):
        Cell(verb, host, FINAL, **edit)


@given(cells())
@settings(max_examples=200, deadline=None)
def test_what_is_on_the_final_path_leaves_every_position_before_the_last_alone(cell):
    if cell.path == FINAL:
        assert len(cell.host) > 1
        assert all(edit.where == cell.host.final for edit in cell.edits)
        assert EMBED not in cell.layers
        assert not cell.text
    if cell.path == READ:
        assert not cell.edits
        assert cell.intervention == "truncate" or not cell.outcomes


# -- what a cell says of itself -----------------------------------------------------------------
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
    assert dataclasses.replace(BASE, layers=(EMBED,), mode="embeddings").columns()["layers"] == "embed"
    assert dataclasses.replace(BASE, labels={"mode": "x"}).columns()["mode"] == "outputs"


@pytest.mark.parametrize("given_where", [(), (0,)])
def test_a_state_is_the_one_before_the_last_token_whatever_is_said(given_where):
    cell = Cell("state", HOST, layers=(2,), donor=DONOR, mode="both", where=given_where, source=given_where)
    assert cell.where == cell.source == (4,)
    assert cell.work == Cell("state", HOST, layers=(2,), donor=DONOR, mode="both").work


@pytest.mark.parametrize(
    ("layers", "start"), [((3,), 3), ((2, 5), 2), ((5, 2), 2), ((0, 4), 0), ((EMBED,), 0), ((EMBED, 4), 0)]
)
def test_the_start_is_the_first_layer_that_runs_otherwise(layers, start):
    assert dataclasses.replace(BASE, layers=layers, mode="embeddings" if EMBED in layers else "").start == start
    assert Cell("none", HOST, **ANSWER).start == 0
