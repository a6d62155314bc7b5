"""The three ways to run a bundle of cells: (engine, bundle) -> the steps to run (see `run.steps`), nothing is run here.

*final*: edits at the last position. The prefixes run once; every cell is one token that continues from a copy of
its host's cache. A cache is never shared: running from it changes it in place.
*full*: edits anywhere. Whole prompts run, from the first touched layer up where the residual stream below it is
kept for several edits.
*read*: nothing is edited. One forward per host serves every read, and stops after the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from encode_address.errors import RunError
from encode_address.run.batch import asked, entries_of, ids_of, watched
from encode_address.run.cells import FINAL, FULL, READ, Cell, Edit, Run
from encode_address.run.edits import state_stands
from encode_address.run.plan import Bundle, hosts_of
from encode_address.run.writes import ATTENTION, SITES, Sources, Writes, attention_calls, writes

SEEN_OF_STATE = 64  # numbers of each swapped state that are compared with the donor's where the mixer reads it
Seen = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """One trace: the plain `data` that runs (see `run.steps`), the `cells` that it measures (none, where it only prepares), the
    `writes` that it makes, and what it forwards, `tokens` through `layers` layers."""

    data: dict[str, Any]
    tokens: int
    layers: int
    cells: Sequence[Cell] = ()
    writes: Writes = field(default_factory=list)

    @property
    def sourced(self) -> set[int]:
        """The layers whose attention call it touches."""
        takes = {layer for layer, *_, op, _, _ in self.data.get("takes", ()) if op}
        inside = {layer for (layer, place, *_), _ in self.writes if place == "inside"}
        return {*self.data.get("watch", ()), *takes, *inside}

    def results(self, seen: Seen) -> Iterator[tuple[Sequence[Cell], Seen]]:
        """What was seen, by cells that are measured alike."""
        if self.data["do"] != "read":
            yield self.cells, seen
            return
        plain, exits = _reads(self.cells)
        if plain:
            yield plain, {"attention": seen["attention"]}
        for i, cells in exits.items():
            if self.data["text"]:
                yield cells, {"loss": {"loss": seen["loss"][i]}}
            else:
                yield cells, {"attention": {}, "answer": seen["answer"][i]}


# -- final -----------------------------------------------------------------------------
def final(engine: Any, bundle: Bundle) -> Iterator[Step]:
    """One token per cell."""
    prefixes, rows = bundle.prefixes, max(1, engine.limits.tokens // bundle.length)
    for start in range(0, len(prefixes), rows):
        ids = torch.tensor(prefixes[start : start + rows])
        yield Step({"do": "prefix", "ids": ids}, ids.numel(), engine.depth)
    row = {ids: i for i, ids in enumerate(prefixes)}
    own = Sources(None)
    yield from _sources(engine, bundle, own, row)
    for cells in bundle.steps:
        yield _continued(engine, cells, row, own)


def _last(prompts: Sequence[Any], row: dict[tuple, int]) -> dict[str, Any]:
    """The batch of each prompt's last token, from its prefix's cache: `row` is where the bank has it."""
    return {
        "last": torch.tensor([[prompt.ids[-1]] for prompt in prompts]),
        "length": len(prompts[0]),
        "prefix": torch.tensor([row[prompt.ids[:-1]] for prompt in prompts]),
        "swapped": {},
        "heads": [],
    }


def _continued(engine: Any, cells: Sequence[Cell], row: dict[tuple, int], own: Sources) -> Step:
    model, hosts = engine.model, [cell.host for cell in cells]
    batch, plan = _last(hosts, row), writes(engine, [(cell.host, cell.edits) for cell in cells], own, short=True)
    for layer, name, head, which, taken, some in _swaps(model, cells, row):
        if head == -1:
            batch["swapped"].setdefault((layer, name), batch["prefix"].clone())[which] = taken
        else:
            batch["heads"].append((layer, head, which, taken))
        expected = ("state", layer, name, head, taken, SEEN_OF_STATE)
        plan.append(((layer, "state", state_stands, (layer, name, head, expected, which, model.held)), some))
    return Step(batch | _asked(engine, cells, plan), len(cells), engine.depth, cells, plan)


def _asked(engine: Any, cells: Sequence[Cell], plan: Writes, start: int = 0) -> dict[str, Any]:
    """What every step that measures answers is told."""
    watch = attention_calls(engine.model, [layer for layer in watched(cells) if layer >= start])
    return {
        "do": "answer",
        "edits": [edit for edit, _ in plan],
        "watch": watch,
        "entries": entries_of([cell.host for cell in cells]) if watch else None,
        "tokens": asked(cells),
        "exit": cells[0].exit,
        "start": start,
        "below": [layer for layer in watched(cells) if layer < start],
        "watched": watched(cells),
        "returns": engine.model.family.layer_returns,
    }


def _swaps(model: Any, cells: Sequence[Cell], row: dict[tuple, int]) -> Iterator[tuple]:
    """State transplants: (layer, name, head, rows of the batch, prefix rows that their state is taken from, edits)."""
    groups: dict[tuple, list[tuple[int, Edit]]] = {}
    for i, cell in enumerate(cells):
        for edit in cell.edits:
            if edit.verb == "state":
                groups.setdefault((edit.layers, edit.mode, edit.head), []).append((i, edit))
    for (layers, mode, head), which in groups.items():
        taken = torch.tensor([row[edit.donor.ids[:-1]] for _, edit in which])
        rows, edits = torch.tensor([i for i, _ in which]), [edit for _, edit in which]
        for layer in layers:
            if head != -1:
                model.heads_of(layer)  # refused where there are none
            for name in ("recurrent", "conv") if mode == "both" else (mode,):
                if name not in model.states_of(layer):
                    raise RunError(
                        f"{model.name}: L{layer} is a {model.layout.kinds[layer]} layer, it has no {name} state"
                    )
                yield layer, name, head, rows, taken, edits


# -- full ------------------------------------------------------------------------------
def full(engine: Any, bundle: Bundle) -> Iterator[Step]:
    """Whole prompts; the cells of a trace have the same edits, but for their donors and positions."""
    places = {p for cell in bundle.cells for _, edit in cell.every_edit for p in (*edit.where, *edit.source)}
    own = Sources(sorted(places))
    yield from _sources(engine, bundle, own, {})
    yield from _entry(engine, bundle)
    row = {host.digest: i for i, host in enumerate(bundle.entered)}
    for cells in bundle.steps:
        yield _whole(engine, bundle, cells, own, row)


def _entry(engine: Any, bundle: Bundle) -> Iterator[Step]:
    """Of hosts whose edits enter late: the residual stream that enters there, and watched attention below.

    Attention below the first touched layer is the intact model's, so it is read here.
    """
    if not bundle.entered:
        return
    starts, top = bundle.starts, bundle.starts[-1]
    watch = attention_calls(engine.model, [layer for layer in watched(bundle.cells) if layer < top])
    rows = engine.limits.rows(FULL, bundle.length)
    for start in range(0, len(bundle.entered), rows):
        hosts = bundle.entered[start : start + rows]
        entries = entries_of(hosts) if watch else None
        data = {"do": "enter", "ids": ids_of(hosts), "starts": starts, "watch": watch, "entries": entries}
        yield Step(data, len(hosts) * bundle.length, top)


def _whole(engine: Any, bundle: Bundle, cells: Sequence[Cell], own: Sources, row: dict[str, int]) -> Step:
    start = cells[0].start if bundle.entered else 0
    plan = writes(engine, [(cell.host, cell.edits) for cell in cells], own, short=False)
    batch = {"ids": ids_of([cell.host for cell in cells])}
    batch["entered"] = torch.tensor([row[cell.host.digest] for cell in cells]) if start else None
    tokens, layers = batch["ids"].numel() * cells[0].rows, (cells[0].end or engine.depth) - start
    if not cells[0].text:
        return Step(batch | _asked(engine, cells, plan, start), tokens, layers, cells, plan)
    batch |= {"do": "text", "edits": [edit for edit, _ in plan], "start": start, "each": cells[0].rows}
    batch |= {"after": torch.tensor([cell.after for cell in cells]), "returns": engine.model.family.layer_returns}
    return Step(batch, tokens, layers, cells, plan)


# -- donors ----------------------------------------------------------------------------
def _sources(engine: Any, bundle: Bundle, own: Sources, row: dict[tuple, int]) -> Iterator[Step]:
    """Run what values are taken from, stage by stage: a donor's run may itself be under edits that have donors."""
    if any(edit.verb == "gate" for cell in bundle.cells for _, edit in cell.every_edit) and not engine.model.gated:
        raise RunError(f"{engine.model.name}: its softmax layers have no output gate to edit")
    needed: dict[tuple, set[tuple[str, int]]] = {}
    for cell in bundle.cells:
        for run, edit in cell.sources:
            needed.setdefault(run.key, set()).update((SITES[edit.verb], layer) for layer in edit.layers)
    for short, runs, last in bundle.stages:
        rows = engine.limits.rows(FINAL if short else FULL, bundle.length)
        for start in range(0, len(runs), rows):
            some = runs[start : start + rows]
            sites = sorted({site for run in some for site in needed[run.key]}, key=lambda site: (site[1], site[0]))
            yield _taken(engine, some, sites, own, row, short, last)
            own.add(some, sites)


def _taken(
    engine: Any,
    runs: Sequence[Run],
    sites: Sequence[tuple],
    own: Sources,
    row: dict[tuple, int],
    short: bool,
    last: int,
) -> Step:
    """One trace of donors' runs, up to the last layer that is needed."""
    model, prompts = engine.model, [run.prompt for run in runs]
    plan = writes(engine, [(run.prompt, run.edits) for run in runs], own, short)
    plan = [(edit, some) for edit, some in plan if edit[0] <= last]
    ops = attention_calls(model, [layer for site, layer in sites if site in ATTENTION])
    takes = [
        (layer, "inside" if site in ATTENTION else site, site, ops.get(layer), model.heads, own.positions)
        for site, layer in sites
    ]
    batch = _last(prompts, row) if short else {"ids": ids_of(prompts)}
    data = batch | {"do": "take", "edits": [edit for edit, _ in plan], "takes": takes}
    return Step(data, len(runs) * (1 if short else len(prompts[0])), 1 + last, writes=plan)


# -- read ------------------------------------------------------------------------------
def read(engine: Any, bundle: Bundle) -> Iterator[Step]:
    """Attention of the intact model, and answers of truncated ones, many reads in one forward."""
    hosts, text = hosts_of(bundle.cells), bundle.cells[0].text
    row = {host.digest: i for i, host in enumerate(hosts)}
    plain, exits = _reads(bundle.pending)
    heads = watched(plain)
    watch = attention_calls(engine.model, list(heads))
    data = {
        "do": "read",
        "ids": ids_of(hosts),
        "text": text,
        "last": bundle.last_read,
        "watch": watch,
        "entries": entries_of(hosts) if watch else None,
        "watched": heads,
        "plain": torch.tensor([row[cell.host.digest] for cell in plain]),
        "exits": {
            layer: (torch.tensor([row[c.host.digest] for c in cells]), None if text else asked(cells))
            for layer, cells in exits.items()
        },
    }
    yield Step(data, len(hosts) * bundle.length, 1 + bundle.last_read, bundle.pending)


def _reads(cells: Sequence[Cell]) -> tuple[list[Cell], dict[int, list[Cell]]]:
    """Cells that read attention, and those of truncated models by their last layer."""
    exits: dict[int, list[Cell]] = {}
    for cell in cells:
        if cell.intervention == "truncate":
            exits.setdefault(cell.layers[0], []).append(cell)
    return [cell for cell in cells if cell.intervention == "none"], exits


PATHS = {FINAL: final, FULL: full, READ: read}
