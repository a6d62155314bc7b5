"""What a cell must not be, and what it is when its mode is not said."""

import re

import pytest

from encode_address.errors import RunError, TaskError
from encode_address.run.cells import EMBED, FINAL, FULL, MODES, READ, Cell, Edit
from tests.test_cells import ANSWER, CONTEXT, DONOR, HOST, PATCHED, prompt

AT_THE_END = "the final path edits the last position only"
LOSS_ALONE = "a text gives its loss alone"
POSITIONS = "where and source must be equally many positions"
OUTSIDE = "a position is outside the prompt of 5 tokens"
ONE_HEAD = "heads takes one layer and one head"
WATCHED = {"watch": ((3, 0),)}
STATE = {"layers": (2,), "donor": DONOR}
SHORT = {"host": prompt(1), "donor": prompt(1), "layers": (2,), "where": (0,), "source": (0,)}


@pytest.mark.parametrize(
    ("verb", "more", "message"),
    [
        ("bananas", {"layers": (0,)}, "unknown intervention 'bananas': use one of none, remove"),
        ("none", {"layers": (0,), **ANSWER}, "none with layers (0,)"),
        ("remove", {}, "remove with layers none: an edit needs layers"),
        ("remove", {"path": "side", "layers": (2,)}, "unknown path 'side': use one of final, full, read: {"),
        ("state", {**STATE, "path": FULL}, "the full path does not run state"),
        ("state", {**SHORT}, "the full path does not run state"),
        ("remove", {"path": FINAL, "layers": (2,)}, AT_THE_END),
        ("remove", {"path": FINAL, "layers": (2,), "where": (3,)}, AT_THE_END),
        ("heads", {"path": FINAL, "layers": (2,), "head": 0}, "the final path does not run heads"),
        ("key", {**PATCHED, "path": FINAL, "where": (3,), "source": (3,)}, AT_THE_END),
        ("none", {"path": FINAL, **ANSWER, "also": (Edit("remove", (2,)),)}, AT_THE_END),
        ("none", {"path": READ, **WATCHED, "also": (Edit("remove", (2,)),)}, "the read path edits nothing"),
        ("truncate", {"layers": (2,), "also": (Edit("remove", (3,)),)}, "an edit above the layer that the model stops"),
        (
            "remove",
            {"layers": (2,), "also": (Edit("remove", (1, 2)),)},
            "the same layer is edited twice in the same way",
        ),
        ("remove", {"layers": (2,), "also": (Edit("truncate", (1,)),)}, "no further edit 'truncate'"),
        ("remove", {"layers": (2,), "also": (Edit("transplant", (1,)),)}, "transplant needs a donor, and positions"),
        (
            "remove",
            {"layers": (2,), "under": (Edit("remove", (1,)),)},
            "remove has no donor's run that could be edited",
        ),
        ("state", {**STATE, "under": (Edit("remove", (1,)),)}, "state has no donor's run that could be edited"),
        ("transplant", {**PATCHED, "mode": "random", "under": (Edit("remove", (1,)),)}, "noise is scaled by a donor's"),
        (
            "transplant",
            {**PATCHED, "under": (Edit("state", (1,), donor=DONOR),)},
            "a donor's run cannot be under state",
        ),
        ("transplant", {**PATCHED, "under": (Edit("heads", (1,)),)}, ONE_HEAD),
        ("transplant", {**PATCHED, "path": READ}, "the read path does not run transplant"),
        ("none", {"host": prompt(1), "path": FINAL, **ANSWER}, "the final path needs prompts of two tokens or more"),
        ("transplant", {**SHORT, "path": FINAL}, "the final path needs prompts of two tokens or more"),
        ("transplant", {**PATCHED, "path": FINAL, "where": (3,)}, AT_THE_END),
        ("transplant", {**PATCHED, "path": FINAL, "source": (3,)}, AT_THE_END),
        ("transplant", {**PATCHED, "path": FINAL, "where": (3, 4), "source": (3, 4)}, AT_THE_END),
        ("transplant", {**PATCHED, "path": FINAL, "layers": (EMBED,)}, AT_THE_END),
        ("transplant", {**PATCHED, "path": FINAL, "layers": (EMBED, 2)}, AT_THE_END),
        ("query", {**PATCHED, "path": FINAL, "where": (3,), "source": (3,)}, AT_THE_END),
        ("none", {"path": FINAL, "text": True}, LOSS_ALONE),
        ("none", {"path": READ, "text": True}, LOSS_ALONE),
        ("none", {"text": True, **ANSWER}, LOSS_ALONE),
        ("none", {"text": True, **WATCHED}, LOSS_ALONE),
        ("transplant", {**PATCHED, "text": True}, LOSS_ALONE),
        ("none", {}, "nothing is asked: give outcomes, watch or text"),
        ("none", {"path": READ}, "nothing is asked: give outcomes, watch or text"),
        ("none", {"path": READ, **ANSWER, **WATCHED}, "the read path reads attention, not answers"),
        ("none", {"path": READ, **ANSWER}, "the read path reads attention, not answers"),
        ("transplant", {**PATCHED, "donor": None}, "transplant needs a donor, and positions"),
        ("query", {**PATCHED, "donor": None}, "query needs a donor, and positions"),
        ("key", {**PATCHED, "donor": None}, "key needs a donor, and positions"),
        ("state", {"layers": (2,)}, "state needs a donor, and positions"),
        ("transplant", {**PATCHED, "where": (), "source": ()}, "transplant needs a donor, and positions"),
        ("key", {**PATCHED, "where": (), "source": ()}, "key needs a donor, and positions"),
        ("none", {"donor": DONOR, **ANSWER}, "none takes no donor"),
        ("remove", {"donor": DONOR, "layers": (2,)}, "remove takes no donor"),
        ("heads", {"donor": DONOR, "layers": (2,), "head": 0}, "heads takes no donor"),
        ("truncate", {"donor": DONOR, "layers": (2,)}, "truncate takes no donor"),
        ("transplant", {**PATCHED, "where": (3, 4)}, POSITIONS),
        ("transplant", {**PATCHED, "source": ()}, POSITIONS),
        ("transplant", {**PATCHED, "where": (5,)}, OUTSIDE),
        ("transplant", {**PATCHED, "source": (5,)}, OUTSIDE),
        ("key", {**PATCHED, "where": (-1,), "source": (-1,)}, OUTSIDE),
        ("query", {**PATCHED, "source": (3,)}, "query keeps its position: where and source"),
        ("key", {**PATCHED, "source": (3,)}, "key keeps its position: where and source"),
        ("query", {**PATCHED, "where": (3,), "source": (3,)}, "query is edited at the last position"),
        ("gate", {**PATCHED, "where": (3,), "source": (3,)}, "gate is edited at the last position"),
        ("value", {**PATCHED, "source": (3,)}, "value keeps its position: where and source"),
        ("state", {**STATE, "mode": "conv", "head": 0}, "only recurrent states have heads"),
        ("state", {**STATE, "mode": "outputs"}, "state has no mode 'outputs'"),
        ("remove", {"layers": (2,), "mode": "median"}, "remove has no mode 'median'"),
        ("transplant", {**PATCHED, "mode": "zero"}, "transplant has no mode 'zero'"),
        ("heads", {"layers": (2,)}, ONE_HEAD),
        ("heads", {"layers": (2, 3), "head": 0}, ONE_HEAD),
        ("truncate", {"layers": (1, 2)}, "truncate takes one layer, no watch"),
        ("truncate", {"layers": (2,), **WATCHED}, "truncate takes one layer, no watch"),
        ("remove", {"layers": (EMBED,)}, "remove does not run on the embeddings"),
        ("remove", {"layers": (EMBED, 2)}, "remove does not run on the embeddings"),
        ("heads", {"layers": (EMBED,), "head": 0}, "heads does not run on the embeddings"),
        ("truncate", {"layers": (EMBED,)}, "truncate does not run on the embeddings"),
        ("remove", {"where": (1,), "source": (1,), "layers": (2,)}, "remove takes no donor"),
        ("heads", {"where": (1,), "layers": (2,), "head": 0}, "heads takes no positions"),
        ("none", {"where": (1,), "source": (1,), **ANSWER}, "none takes no donor"),
        ("transplant", {**PATCHED, "where": (3, 3), "source": (3, 3)}, "named twice"),
        ("remove", {"layers": (2, 2)}, "named twice"),
        ("remove", {"layers": (-2,)}, "layers count from 0"),
        ("remove", {"layers": (2,), "head": 0}, "remove takes no head"),
        ("key", {**PATCHED, "head": 0}, "key takes no head"),
        ("query", {**PATCHED, "mode": "zero"}, "query has no mode 'zero'"),
        ("transplant", {**PATCHED, "mode": "embeddings"}, "the mode embeddings and the layer of embeddings"),
        ("transplant", {**PATCHED, "layers": (EMBED,), "mode": "outputs"}, "the mode embeddings and the layer of"),
        ("query", {**PATCHED, "layers": (EMBED,)}, "query does not run on the embeddings"),
        ("key", {**PATCHED, "layers": (EMBED,)}, "key does not run on the embeddings"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_cell_that_no_path_can_run_is_refused(verb, more, message):
    """Refused when it is made: run as something else it would stand in the table under its own label."""
    with pytest.raises(RunError, match=f"^{re.escape(message)}"):
        Cell(verb, **{"host": HOST, **more})


def test_a_refusal_says_which_cell_it_was():
    with pytest.raises(RunError) as caught:
        Cell("remove", HOST, layers=(2,), mode="median", labels={"variant": "chat8", "pair": 3})
    assert "'variant': 'chat8', 'pair': 3, 'intervention': 'remove'" in str(caught.value)
    assert HOST.digest in str(caught.value)


def test_a_cell_refuses_a_donor_of_another_length():
    with pytest.raises(TaskError, match=r"same number of tokens; these have \[4, 5\]"):
        Cell("transplant", prompt(4), donor=prompt(5), layers=(0,), where=(0,), source=(0,))


# -- modes
@pytest.mark.parametrize(
    ("verb", "more", "mode"),
    [
        ("remove", {"layers": (2,)}, "zero"),
        ("transplant", PATCHED, "outputs"),
        ("state", {"layers": (2,), "donor": DONOR}, "recurrent"),
        ("none", ANSWER, ""),
        ("heads", {"layers": (2,), "head": 1}, "zero"),
        ("query", PATCHED, ""),
        ("key", PATCHED, ""),
        ("truncate", {"layers": (2,)}, ""),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mode_that_is_not_said_is_the_first_of_its_verb(verb, more, mode):
    """Said or not, it is the same cell, so the same row; a verb that is done in one way has no mode."""
    cell = Cell(verb, HOST, **more)
    assert cell.mode == cell.columns()["mode"] == mode
    assert cell.key(CONTEXT) == Cell(verb, HOST, **more, mode=mode).key(CONTEXT)
    elsewhere = ("embeddings", "given")  # what they ask of a cell is not what the others ask
    modes = [other for other in MODES.get(verb, [""]) if other not in elsewhere]
    assert len({Cell(verb, HOST, **more, mode=other).work for other in modes}) == len(modes)


def test_a_donor_that_is_patched_before_its_last_position_needs_the_full_path():
    """The final path keeps the last position of donors' runs alone: it would write that at the earlier one."""
    last, early = HOST.final, Edit("transplant", (0,), (0,), HOST, (0,))
    given = {"layers": (2,), "where": last, "donor": HOST, "source": last, "under": (early,)}
    assert Cell("transplant", HOST, **given).path == FULL
    with pytest.raises(RunError, match=r"^a donor.s run is patched before its last position"):
        Cell("transplant", HOST, FINAL, **given)
