"""How the maps of a stitch are fitted: the host's prompts and the donor's in a stream, sums of rows, and what they miss where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import nnsight
import torch

from encode_address.errors import RunError
from encode_address.interventions import mixer_output
from encode_address.maps import Error, Moments, RidgeMap
from encode_address.run.edits import apply_edits
from encode_address.run.stitch import (
    CLASSES,
    FIT,
    REPORT,
    SELECT,
    Arm,
    Fitted,
    Row,
    Slot,
    classes,
    mapped,
    run_layers,
    tensors,
)


def fit(engine: Any, slot: Slot) -> dict[Arm, Fitted]:
    """Every arm of a slot. Raises RunError for too few rows, for numbers that are not finite, for another model's slot."""
    model = engine.model
    if slot.host.fingerprint != model.fingerprint:
        raise RunError(
            f"these maps are for layers of {slot.host.name}, not of {model.name}: make a slot of {model.name}"
        )
    found: dict[Arm, Fitted] = {arm: Fitted(slot, arm, (None, None), {}) for arm in slot.arms if arm[0] == "identity"}
    if not slot.needs_fit:
        return found
    entries, exits = _entries(engine, slot)
    if slot.sources:
        exits |= _exits(engine, slot, entries)
    columns = {arm: _told(slot, arm, entries, exits) for arm in exits}
    rest = {
        arm: Fitted(slot, arm, (entries[arm][0] if arm in entries else None, exits[arm][0]), columns[arm])
        for arm in exits
    }
    for arm, errors in _errors(engine, slot, rest).items():
        columns[arm] |= errors
    return found | rest


class _Sums:
    """The sums of one regression, by what their rows are used for."""

    def __init__(self, kind: str, seed: int) -> None:
        self.kind, self.seed = kind, seed
        self.of = {role: Moments(seed if kind == "shuffled" else None) for role in (FIT, SELECT, REPORT)}

    def add(self, role: str, x: torch.Tensor, y: torch.Tensor) -> None:
        self.of[role].add(x.double().cpu().numpy(), y.double().cpu().numpy())

    def fitted(self) -> tuple[RidgeMap, Error]:
        """The map, and its error on prompts that neither were fitted nor chose the penalty."""
        rows = self.of[FIT]
        if not (rows.n and self.of[SELECT].n and self.of[REPORT].n):
            raise RunError(
                "maps need six prompts or more: four to fit, one to choose the penalty, one to tell the error"
            )
        kind = "ridge" if self.kind not in ("mean", "shuffled") else self.kind
        one = RidgeMap(kind=kind, random_state=self.seed, rows_per_feature=1.0).fit_moments(rows, self.of[SELECT])
        return one, one.error_on(self.of[REPORT])


Maps = dict[Arm, tuple[RidgeMap, Error]]


def _entries(engine: Any, slot: Slot) -> tuple[Maps, Maps]:
    """Entry maps of the arms that have the donor's layers, and exit maps of those that have none."""
    into = {(layer, kind): _Sums(kind, slot.seed) for layer in slot.sources for kind in _entry_kinds(slot, layer)}
    plain = {arm: _Sums(arm[0], slot.seed) for arm in slot.arms if arm[0] in ("linear", "mean")}
    for role, rows in slot.batches(engine.limits.tokens):
        entering, write = _host(engine, slot, rows)
        for sums in plain.values():
            sums.add(role, entering.flatten(0, 1), write.flatten(0, 1))
        if not into:
            continue
        native = _donor(engine, slot, rows)
        index = [_flat(rows, side) for side in (0, 1)]
        x = entering.flatten(0, 1)[index[0].to(entering.device)]
        for (layer, _), sums in into.items():
            y = native[layer].flatten(0, 1)
            sums.add(role, x, y[index[1].to(y.device)])
    fitted = {key: sums.fitted() for key, sums in into.items()}
    entries = {
        arm: fitted[arm[1][0], _entry_kind(arm[0])] for arm in slot.arms if arm[0] in ("block", "zeroed", "shuffled")
    }
    return entries, {arm: sums.fitted() for arm, sums in plain.items()}


def _entry_kind(kind: str) -> str:
    return "shuffled" if kind == "shuffled" else "block"


def _entry_kinds(slot: Slot, layer: int) -> set[str]:
    """Zeroed mixers change nothing before the block: their entry map is a fit to the same rows, so it is made once."""
    return {_entry_kind(kind) for kind, block in slot.arms if block and block[0] == layer and kind != "identity"}


def _exits(engine: Any, slot: Slot, entries: Maps) -> Maps:
    """Exit maps, on the donor's writes for mapped inputs, at all positions."""
    sums = {arm: _Sums(arm[0], slot.seed) for arm in entries}
    maps = {arm: tensors(one, engine.model.device) for arm, (one, _) in entries.items()}
    for role, rows in slot.batches(engine.limits.tokens):
        entering, write = _host(engine, slot, rows)
        for arm, found in sums.items():
            entered = mapped(entering, maps[arm])
            left = _through(slot, arm, entered)
            found.add(role, (left - entered).flatten(0, 1), write.flatten(0, 1))
    return {arm: found.fitted() for arm, found in sums.items()}


def _through(slot: Slot, arm: Arm, entered: torch.Tensor) -> torch.Tensor:
    layers = [slot.donor.layers[i] for i in arm[1]]
    with torch.no_grad():
        weights = next(layers[0]._module.parameters())
        return run_layers(layers, entered.to(weights), None, arm[0] == "zeroed").to(entered)


def _errors(engine: Any, slot: Slot, arms: dict[Arm, Fitted]) -> dict[Arm, dict[str, Any]]:
    """Per arm and class of positions, the share of what the host's layers add there (about its mean there) that is missed."""
    missed = {arm: dict.fromkeys(CLASSES, 0.0) for arm in arms}
    total = {name: Moments() for name in CLASSES}  # the sum of squares about a mean, in a stream
    for _, rows in slot.batches(engine.limits.tokens, (REPORT,)):
        entering, write = _host(engine, slot, rows)
        places = torch.tensor([[CLASSES.index(name) for name in classes(row.host)] for row in rows])
        with torch.no_grad():
            left = {arm: one.stands(entering) - entering - write for arm, one in arms.items()}
        off = {arm: (values.double() ** 2).sum(-1).cpu() for arm, values in left.items()}
        for number, name in enumerate(CLASSES):
            here = places == number
            total[name].add(torch.zeros(int(here.sum()), 1).numpy(), write.double().cpu()[here].numpy())
            for arm, values in off.items():
                missed[arm][name] += float(values[here].sum())
    return {
        arm: {f"error_{name}": lost[name] / total[name].yy for name in CLASSES if total[name].n and total[name].yy}
        for arm, lost in missed.items()
    }


def _told(slot: Slot, arm: Arm, entries: Maps, exits: Maps) -> dict[str, Any]:
    """Columns: R^2 of each map on prompts that took no part in its fit, its penalty in units of the grid."""
    out: dict[str, Any] = {}
    for name, maps in (("entry", entries), ("exit", exits)):
        if arm in maps:
            one, error = maps[arm]
            out |= {f"{name}_r2": error.r2, f"{name}_penalty": one.relative_alpha_, f"{name}_rank": one.rank_}
            out |= {f"{name}_rows": one.n_rows_, f"{name}_at_edge": bool(one.at_edge_)}
    return out | {"map_r2": min(value for name, value in out.items() if name.endswith("_r2"))}


# -- activations -----------------------------------------------------------------------
def _host(engine: Any, slot: Slot, rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """(batch, positions, d_model): what enters the slot, with what stands in for earlier ones, and what its own layers add."""
    model, layers, first, last = engine.model, engine.model.layers, slot.layers[0], slot.layers[-1]
    edits = [engine.fitted(one).write(layer, model.family.layer_returns) for one in slot.under for layer in one.layers]
    ids = torch.tensor([row.host.ids for row in rows])
    engine.count(ids.numel(), 1 + last)
    with torch.no_grad(), model.trace(ids, logits_to_keep=1) as tracer:
        seen = nnsight.save({})
        seen.update(apply_edits(layers, model.embed, edits, {}, None))
        entering = layers[first].input.clone()
        seen["entering"], seen["write"] = entering, mixer_output(layers[last]) - entering
        tracer.stop()
    _finite(seen["write"], model, last)
    return seen["entering"], seen["write"]


def _donor(engine: Any, slot: Slot, rows: Sequence[Row]) -> dict[int, torch.Tensor]:
    """The donor's residual stream that enters each of its blocks, in its own run: layer -> (batch, positions, d_donor)."""
    model, layers, wanted = slot.donor, slot.donor.layers, sorted(slot.sources)
    ids = torch.tensor([row.donor.ids for row in rows])
    engine.count(ids.numel(), wanted[-1])
    with torch.no_grad(), model.trace(ids, logits_to_keep=1) as tracer:
        seen = nnsight.save({})
        for layer in wanted:
            seen[layer] = layers[layer].input.clone()
        tracer.stop()
    for layer, values in seen.items():
        _finite(values, model, layer)
    return seen


def _finite(values: torch.Tensor, model: Any, layer: int) -> None:
    if not bool(torch.isfinite(values).all()):
        raise RunError(
            f"NaN or infinite activations at L{layer} of {model.name}: no map can be fitted; try --dtype float32"
        )


def _flat(rows: Sequence[Row], side: int) -> torch.Tensor:
    """The aligned positions of a batch on one side (0: host, 1: donor), counted through all its rows."""
    length = len(rows[0].donor if side else rows[0].host)
    return torch.tensor([i * length + pair[side] for i, row in enumerate(rows) for pair in row.at])
