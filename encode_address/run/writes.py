"""From edits to writes: which values go where, in the form that `apply_edits` takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from encode_address.run.batch import noise_seed
from encode_address.run.cells import PATCHES, Edit, Run
from encode_address.run.edits import (
    pass_on,
    put_gate,
    put_inputs,
    put_key,
    put_outputs,
    put_query,
    put_value,
    set_value,
    zero_head,
)
from encode_address.tasks.prompts import Prompt

ATTENTION = ("query", "key", "value")
SITES = {verb: verb for verb in PATCHES} | {"transplant": "output"}


class Sources:
    """Where the bank has what donors have (see `run.steps`): (site, layer) -> the run's key -> its row. `positions` are those that
    are kept of a run; None: the last one."""

    def __init__(self, positions: Sequence[int] | None) -> None:
        self.positions = None if positions is None else torch.tensor(positions)
        self._place = {position: i for i, position in enumerate(positions or ())}
        self._rows: dict[tuple, dict[tuple, int]] = {}

    def add(self, runs: Sequence[Run], sites: Sequence[tuple[str, int]]) -> None:
        """A step took `sites` of `runs`."""
        for site in sites:
            known = self._rows.setdefault(site, {})
            start = len(known)
            known.update((run.key, start + i) for i, run in enumerate(runs))

    def values(self, site: str, layer: int, wanted: Sequence[tuple[Run, Sequence[int]]]) -> tuple:
        """What stands for (n, k, ...): of each run, at its own k positions (the last one, where only that was taken)."""
        known = self._rows[site, layer]
        rows = torch.tensor([known[run.key] for run, _ in wanted])
        places = None if self.positions is None else torch.tensor([[self._place[p] for p in ps] for _, ps in wanted])
        return "taken", site, layer, rows, places


Writes = list[tuple[tuple, list[Edit]]]  # a write for `apply_edits`, and the edits that it serves


def writes(engine: Any, rows: Sequence[tuple[Prompt, Sequence[Edit]]], own: Sources, short: bool) -> Writes:
    """One write per layer and kind of edit, over the rows that it concerns. `short`: the batch is of last tokens."""
    groups: dict[tuple, list[tuple[int, Prompt, Edit]]] = {}
    for i, (host, edits) in enumerate(rows):
        for edit in edits:
            for layer in edit.layers if edit.verb != "state" else ():
                groups.setdefault((layer, edit.verb, edit.mode, edit.head, len(edit.where)), []).append((i, host, edit))
    plan = [_write(engine, layer, some, own, short) for (layer, *_), some in groups.items()]
    return [(edit, [e for *_, e in some]) for edit, some in zip(plan, groups.values())]


def _write(engine: Any, layer: int, some: Sequence[tuple[int, Prompt, Edit]], own: Sources, short: bool) -> tuple:
    """One edit for `apply_edits`: what (row, host, edit)s of one kind do to one layer."""
    model, first = engine.model, some[0][2]
    which, where = torch.tensor([i for i, *_ in some]), torch.tensor([edit.where for *_, edit in some])
    at = torch.zeros_like(where) if short else where  # a short batch has one position, but keys and values of all
    verb, head, returns = first.verb, first.head, model.family.layer_returns
    if verb == "heads":
        return layer, "heads", zero_head, (head, model.heads_of(layer))
    if verb == "replace":
        return engine.fitted(first.map).write(layer, returns)
    if verb == "remove":
        if first.mode == "layer":
            return layer, "residual", pass_on, (returns,)
        value = None if first.mode == "zero" else engine.means()[layer]
        if not first.where:
            return layer, "output", set_value, (value,)
        value = torch.zeros(model.config.hidden_size) if value is None else value
        return layer, "output", put_outputs, (value.expand(*where.shape, -1), at, which)
    if first.given is not None:
        values = torch.stack([edit.given.values[layer] for *_, edit in some])
        return layer, "output", put_outputs, (values, at, which)
    values = own.values(SITES[verb], layer, [(edit.run, edit.source) for *_, edit in some])
    if verb == "query":
        return layer, "inside", put_query, (model.attention_op(layer), values, which, head)
    if verb == "gate":
        return layer, "gate", put_gate, (model.heads, values, which, head)
    if verb in ("key", "value"):
        write = put_key if verb == "key" else put_value
        # From the end: the last tokens' keys are there whatever a sliding window's cache has let go.
        place = where - len(some[0][1]) if short else where
        return layer, "inside", write, (model.attention_op(layer), values, place, which)
    if verb == "transplant":
        if first.mode == "random":
            hosts = own.values("output", layer, [(Run(host), edit.where) for _, host, edit in some])
            values = "noisy", hosts, values, [noise_seed(e.seed, layer, host.ids) for _, host, e in some]
        return layer, "output", put_outputs, (values, at, which)
    return layer, "input" if verb == "input" else "residual", put_inputs, (values, at, which)


def attention_calls(model: Any, layers: Sequence[int]) -> dict[int, str]:
    """The attention call of each layer; its source is touched here, outside any trace, as nnsight needs."""
    return {layer: model.attention_op(layer) for layer in layers}
