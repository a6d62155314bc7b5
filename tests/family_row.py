"""What a family supports, found out by running it: one row of `encode_address/models/supported.json`.

Each verb is run on the family's tiny model by the engine and compared with the plain-torch oracle (`oracle`,
`oracle_runs`): "yes" when every row agrees and the edit moved the answer, "no: ..." with the engine's own words where it
refuses. `python -m tests.family_row` writes the file anew, and `docs/families.md` from it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

from encode_address.errors import EncodeAddressError
from encode_address.models import support
from encode_address.run.cells import FINAL, FULL, READ, Cell
from encode_address.run.engine import Engine
from tests import tiny
from tests.oracle import Oracle, expect_final, expect_read
from tests.oracle_cases import agree, ids_of, moved, patched
from tests.oracle_runs import Runs, expect_runs
from tests.tiny_families import MORE

NAMES = (*tiny.FAMILIES, *MORE)
DOCUMENT = Path(__file__).parent.parent / "docs" / "families.md"
PAIRS, LENGTH = 2, 30
SIZE = 1e-5  # of the logits' spread: rows of one batch against whole forwards of one prompt each


@cache
def case(name: str) -> SimpleNamespace:
    """A family's model, its oracle and a few short prompts, under the names that `oracle_cases` uses."""
    model, text, oracle = tiny.load_tiny(name), tiny.toy_text(lines=2, words=16), Oracle(tiny.build(name), name)
    means = cache(lambda: oracle.means(ids_of(text.chunks(model.tokenizer, "train", n=2))))
    return SimpleNamespace(
        name=name,
        model=model,
        oracle=oracle,
        runs=Runs(oracle, means),
        text=text,
        engine=Engine(model, text),
        questions=tiny.questions(PAIRS, length=LENGTH),
        watch=tuple((layer, head) for layer in model.softmax_layers for head in range(0, model.heads, 3)),
    )


def answers(item) -> tuple:
    return ("redirected", item.host.choices[item.donor_index]), ("kept", item.host.answer)


def plain(one, intervention: str, path: str = "", watch=(), **fields) -> list[Cell]:
    """A cell without donor on every host."""
    return [
        Cell(intervention, q.host, path, outcomes=answers(q), watch=watch, labels={"pair": q.pair}, **fields)
        for q in one.questions
    ]


def entry(prompt) -> tuple[int, ...]:
    return prompt.span("entry 1")


def apart(cells: Callable[[str], list[Cell]]) -> list[Cell]:
    """Cells of the two paths, labelled by which was asked for: a family without continuation runs both in full."""
    return [replace(c, labels={**c.labels, "asked": path}) for path in (FINAL, FULL) for c in cells(path)]


def both_paths(one, verb: str, layers, **fields) -> list[Cell]:
    """At the last position, continued from the prefix and as a whole prompt, and at an entry."""
    cells = apart(lambda path: patched(one, path, layers, "dissociation", verb=verb, **fields))
    if verb in ("query", "gate"):
        return cells
    return cells + patched(one, FULL, layers, "dissociation", entry, verb=verb, **fields)


def state(one, mode: str, head: int = -1) -> list[Cell]:
    return patched(one, FINAL, one.model.linear_layers, "dissociation", verb="state", mode=mode, head=head)


def removals(one) -> list[Cell]:
    blocks = [block.layers for block in one.model.layout.blocks]
    cells = [c for layers in blocks for c in plain(one, "remove", watch=one.watch, layers=layers)]
    cells += plain(one, "remove", layers=blocks[1], mode="mean")
    cells += plain(one, "remove", layers=(1,), mode="layer")
    return cells + [c for q in one.questions for c in plain_at(one, q)]


def plain_at(one, item) -> list[Cell]:
    """Removal at one position: the last (one token) and an entry's (the whole prompt)."""
    layers = one.model.layout.blocks[0].layers
    fields = {"layers": layers, "outcomes": answers(item)}
    return [
        Cell("remove", item.host, where=where, labels={"pair": item.pair, "at": name}, **fields)
        for name, where in (("final", item.host.final), ("entry", entry(item.host)))
    ]


def transplants(one) -> list[Cell]:
    blocks = [block.layers for block in one.model.layout.blocks]
    cells = [c for layers in blocks for c in patched(one, FINAL, layers, "dissociation", watch=one.watch)]
    cells += patched(one, FULL, blocks[1], "dissociation", entry, watch=one.watch)
    return cells + patched(one, FULL, (-1,), "dissociation", entry, mode="embeddings")


def ends(one) -> list[Cell]:
    return [c for layer in range(len(one.oracle.mixers)) for c in plain(one, "truncate", layers=(layer,))]


def attention_alone(one) -> list[Cell]:
    return [Cell("none", q.host, READ, watch=one.watch, labels={"pair": q.pair}) for q in one.questions]


def softmax(one) -> tuple[int, ...]:
    return one.model.softmax_layers


def linear(one) -> tuple[int, ...]:
    return one.model.layout.blocks[1].layers


# What is asked of a family: the name of a column of the table -> its cells.
VERBS: dict[str, Callable[[SimpleNamespace], list[Cell]]] = {
    "intact": lambda one: apart(lambda path: plain(one, "none", path, one.watch)),
    "attention": attention_alone,
    "remove": removals,
    "transplant": transplants,
    "recurrent state": lambda one: state(one, "recurrent"),
    "conv state": lambda one: state(one, "conv"),
    "both states": lambda one: state(one, "both"),
    "state of a head": lambda one: [c for head in (0, 1, 3) for c in state(one, "recurrent", head)],
    "query": lambda one: both_paths(one, "query", softmax(one), watch=one.watch),
    "key": lambda one: both_paths(one, "key", softmax(one), watch=one.watch),
    "value": lambda one: both_paths(one, "value", softmax(one)),
    "gate": lambda one: both_paths(one, "gate", softmax(one)),
    "input": lambda one: both_paths(one, "input", (*softmax(one), linear(one)[0])),
    "residual": lambda one: both_paths(one, "residual", linear(one)[:1]),
    "softmax heads": lambda one: plain(one, "heads", layers=softmax(one)[-1:], head=1),
    "linear heads": lambda one: plain(one, "heads", layers=linear(one)[-1:], head=1),
    "truncate": ends,
}


def outcome(name: str, verb: str) -> str:
    """ "yes", or "no: " and the engine's line. Raises AssertionError where the engine and the oracle differ."""
    one = case(name)
    cells = VERBS[verb](one)
    try:
        table = one.engine.run(cells)
    except EncodeAddressError as error:
        return "no: " + str(error).replace(f"{one.model.name}: ", "")
    expect = (
        expect_final if verb.endswith(("state", "states", "head")) else expect_read if verb == "attention" else None
    )
    expected = expect(one.oracle, cells) if expect else expect_runs(one.runs, cells)
    margins = agree(one, cells, table, expected, SIZE)
    if cells[0].intervention not in ("none", "truncate"):
        intact, starts = [margin(one, cell) for cell in cells], range(0, len(cells), PAIRS)
        effects = [moved(margins[i : i + PAIRS], intact[i : i + PAIRS]) for i in starts]
        # One head of a state may do next to nothing: then another must do something.
        least = max(effects) if verb == "state of a head" else min(effects)
        assert least > 10 * SIZE, f"{name}: {verb} has no effect that could be missed ({effects})"
    if verb == "attention":
        sharpest = max(float(want[layer].max()) for want in expected for layer in one.model.softmax_layers)
        assert sharpest > 2 / LENGTH, f"{name}: attention is uniform, a wrong row could not be told ({sharpest})"
    return "yes"


def margin(one, cell: Cell) -> float:
    """The oracle's margin of a cell's host under no edit."""
    logits = one.runs.run(cell.host).logits
    return float(logits[cell.outcomes[0][1]] - logits[cell.outcomes[1][1]])


def row_of(name: str) -> dict[str, str]:
    """The row of one family: what the model's own checks say of it, and every verb's outcome."""
    one = case(name)
    found = {finding.name: finding for finding in one.model.check().findings}
    bad = [finding.name for finding in found.values() if finding.ok is not True]
    assert not bad, f"{name}: {bad}"
    refusal = found.get("left padding is refused")
    split = found.get("split execution is not used")
    row = {
        "family": one.model.family.name,
        "model type": one.model.config.model_type,
        "class": type(one.model.module).__name__,
        "checks": f"{len(found)} of {len(found)}",
        "ragged batches": "no: " + refusal.seen.replace(f"{one.model.name}: ", "") if refusal else "yes",
    }
    row["one-token continuation"] = "no: final-position cells run as full forwards" if split else "yes"
    return row | {verb: outcome(name, verb) for verb in VERBS}


def main() -> None:
    """Write the table that is shipped, and the document that shows it."""
    asked = sys.argv[1:]
    known = support.rows() if support.SUPPORTED.is_file() else {}
    rows = {name: known[name] if asked and name not in asked and name in known else row_of(name) for name in NAMES}
    support.SUPPORTED.write_text(json.dumps(rows, indent=1) + "\n")
    DOCUMENT.write_text(support.document())


if __name__ == "__main__":
    main()
