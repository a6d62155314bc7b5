"""Stitches: another model's block in place of some layers, between two linear maps (paper section 3.13).

With h the residual stream that enters the replaced layers of the host at some position, M the entry map and N the exit map,

    h_out = h + N(B(M(h)) - M(h))

B are the donor's decoder layers as they are: mixers, norms, MLPs, residual sums. M is fitted to the residual that enters B in
the donor's own run, on aligned tokens; N to what the replaced layers add in the intact host, on B's writes for *mapped* inputs, on
all tokens. Both are ridge maps from sums over a stream of prompts, so that memory does not grow with prompts. Of every six
prompts four are fitted, one chooses the penalty, one tells the error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from encode_address.errors import RunError
from encode_address.interventions import mixer_output
from encode_address.maps import RidgeMap
from encode_address.models.layout import layer_span
from encode_address.run.edits import pass_on, pass_through, skip
from encode_address.run.projection import StandIn
from encode_address.tasks.prompts import Prompt

FIT, SELECT, REPORT = "fit", "select", "report"
ROLES = (FIT, FIT, FIT, FIT, SELECT, REPORT)
KINDS = ("block", "zeroed", "shuffled", "mean", "linear", "identity")
CLASSES = ("key", "value", "delimiter", "question", "final", "wrapper", "text")
LABELS = {"entry": "delimiter", "key": "key", "value": "value", "question": "question"}
Arm = tuple[str, tuple[int, ...]]  # a kind, and the donor's layers


@dataclass(frozen=True, eq=False)
class Row:
    """A prompt as the host and as the donor read it; `at` are positions (host's, donor's) of tokens that are the same."""

    host: Prompt
    donor: Prompt
    at: tuple[tuple[int, int], ...]

    @property
    def digest(self) -> str:
        return repr((self.host.digest, self.donor.digest, self.at))


@dataclass(frozen=True, eq=False)
class Slot:
    """Layers of the host that something of the donor stands in for, and what its maps are fitted on. All `arms` are fitted
    together, from the same rows, with the same penalty search and seed:

    block      the donor's layers, both maps fitted          linear     h + N(h), no donor at all (the paper's bypass)
    zeroed     the same with mixers that give zero           mean       h + the mean of what the host's layers add
    shuffled   the block, both maps fitted on rows whose     identity   the donor's layers without maps: the host's own, in
               targets are other rows'                                  a copy of the same width

    `under` stands in for earlier slots while these maps are fitted.
    """

    host: Any
    layers: tuple[int, ...]
    donor: Any
    rows: tuple[Row, ...]
    arms: tuple[Arm, ...]
    under: tuple[StandIn, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if self.host.remote or self.donor.remote:
            raise RunError(
                "a stitch runs one model's layers inside the other's forward, where a server would take them for its own: "
                "load both models without remote=True"
            )
        if not self.layers or self.layers != tuple(range(self.layers[0], self.layers[-1] + 1)):
            raise RunError(f"layers {self.layers} do not follow one another, so no block stands in for them")
        for kind, block in self.arms:
            if kind not in KINDS:
                raise RunError(f"no stitch of kind {kind!r}: use one of {', '.join(KINDS)}")
            if not block and kind not in ("linear", "mean"):
                raise RunError(f"a stitch of kind {kind!r} needs layers of the donor")
            if wrong := [layer for layer in block if layer not in self.donor.linear_layers]:
                raise RunError(f"{self.donor.name}: L{wrong[0]} is no linear layer, so it is part of no block")
        widths = self.host.config.hidden_size, self.donor.config.hidden_size
        if widths[0] != widths[1] and any(kind == "identity" for kind, _ in self.arms):
            raise RunError(f"layers of width {widths[1]} need maps to stand in for layers of width {widths[0]}")
        if any(one.layers[-1] >= self.layers[0] for one in self.under):
            raise RunError("earlier slots lie below: their maps are fitted first")

    @cached_property
    def shared(self) -> str:
        """A hash of what all arms are fitted on."""
        rows, below = [row.digest for row in self.rows], [one.digest for one in self.under]
        what = (self.host.fingerprint, self.layers, self.donor.fingerprint, rows, below, self.seed)
        return hashlib.sha256(repr(what).encode()).hexdigest()[:24]

    @property
    def needs_fit(self) -> bool:
        return any(kind != "identity" for kind, _ in self.arms)

    @property
    def sources(self) -> dict[int, int]:
        """The donor's layers whose input an entry map is fitted to, and how many arms need each."""
        first = [block[0] for kind, block in self.arms if kind in ("block", "zeroed", "shuffled")]
        return {layer: first.count(layer) for layer in sorted({*first})}

    def batches(self, tokens: int, roles: Sequence[str] = (FIT, SELECT, REPORT)) -> Iterator[tuple[str, list[Row]]]:
        """The rows with what they are used for, in batches whose prompts have one length on each side."""
        groups: dict[tuple, list[Row]] = {}
        for i, row in enumerate(self.rows):
            role = ROLES[i % len(ROLES)]
            if role in roles:
                groups.setdefault((role, len(row.host), len(row.donor)), []).append(row)
        for (role, *lengths), rows in groups.items():
            size = max(1, tokens // max(lengths))
            for start in range(0, len(rows), size):
                yield role, rows[start : start + size]

    def cost(self, tokens: int) -> tuple[int, int]:
        """Tokens x layers, and traces: the host up to the slot twice, and for the error a third time on a sixth of the prompts,
        the donor up to its blocks once. The donor's blocks count for the layers that they replace."""
        if not self.needs_fit:
            return 0, 0
        last, deepest = self.layers[-1], max(self.sources, default=0)
        twice = 2 if self.sources else 1
        total = traces = 0
        for role, rows in self.batches(tokens):
            passes = twice + (role == REPORT)
            host, donor = (sum(len(getattr(row, side)) for row in rows) for side in ("host", "donor"))
            total += passes * host * (1 + last) + donor * deepest
            traces += passes + bool(self.sources)
        return total, traces


@dataclass(frozen=True, eq=False)
class Stitch(StandIn):
    """One arm of a slot."""

    slot: Slot
    kind: Arm
    unit: str = field(default="layers", init=False)

    def __post_init__(self) -> None:
        if self.kind not in self.slot.arms:
            raise RunError(f"this slot has no {self.kind}: it has {self.slot.arms}")

    @property
    def layers(self) -> tuple[int, ...]:
        return self.slot.layers

    @property
    def under(self) -> tuple[StandIn, ...]:
        return self.slot.under

    @cached_property
    def data(self) -> str:
        return hashlib.sha256(repr((self.slot.shared, self.slot.arms)).encode()).hexdigest()[:24]

    @property
    def digest(self) -> str:
        return f"{self.slot.shared} {self.kind}"

    def cost(self, tokens: int) -> tuple[int, int]:
        return self.slot.cost(tokens)

    def fit(self, engine: Any) -> dict[Arm, Fitted]:
        from encode_address.run.stitch_fit import fit  # it needs what is here

        return fit(engine, self.slot)


@dataclass(frozen=True)
class Fitted:
    """A fitted arm: its maps, (weight, bias) each or None, their scikit-learn form, and what is told of them in every row."""

    slot: Slot
    arm: Arm
    maps: tuple[RidgeMap | None, RidgeMap | None]
    columns: dict[str, float]

    @cached_property
    def entry(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        return tensors(self.maps[0], self.slot.host.device)

    @cached_property
    def exit(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        return tensors(self.maps[1], self.slot.host.device)

    @property
    def donor_layers(self) -> list[Any]:
        """As nnsight envoys: a call of one that belongs to the traced model leaves its place in the trace alone."""
        return [self.slot.donor.layers[i] for i in self.arm[1]]

    def stands(self, residual: torch.Tensor) -> torch.Tensor:
        """What leaves the slot when `residual` (batch, positions, d_model) enters it."""
        kind, _ = self.arm
        if kind in ("linear", "mean"):
            return residual + mapped(residual, self.exit)
        return stitched(residual, self.donor_layers, self.entry, self.exit, None, kind == "zeroed")

    def write(self, layer: int, returns: int = 0) -> tuple:
        """What it does to one layer of the slot, for `apply_edits`; `returns` is the family's `layer_returns`."""
        if layer != self.slot.layers[0]:
            return layer, "residual", pass_on, (returns,)
        kind, _ = self.arm
        if kind in ("linear", "mean"):
            return layer, "residual", pass_through, (*self.exit, returns)
        return layer, "residual", pass_stitched, (self.donor_layers, self.entry, self.exit, kind == "zeroed", returns)


def pass_stitched(layer, donor, entry, exit, zeroed, returns=0):
    """The decoder layer does not run: what enters it goes through another model's layers, between two maps. Their mixers get
    the mask that this layer's would have had."""
    residual, mask = layer.input, layer.inputs[1].get("attention_mask")
    out = stitched(residual, donor, entry, exit, mask, zeroed)
    skip(layer, out, returns)
    return (mixer_output(layer) == out).all()


def run_layers(layers, residual, mask=None, zeroed=False):
    """The residual stream (batch, positions, d_model) that leaves linear `layers` which `residual` enters, wherever they
    belong: another model's, or this one's own, out of their place. Local models only: a server would take another model's
    layers for its own.

    `mask` is what their mixers get (None for prompts of equal length); linear layers need no positions. `zeroed`: mixers
    give zero, norms and MLPs run.
    """
    hooks = [layer.mixer._module.register_forward_hook(_nothing) for layer in layers] if zeroed else []
    try:
        for layer in layers:
            left = layer(residual, position_embeddings=None, attention_mask=mask, cache=None)
            residual = left[0] if isinstance(left, tuple) else left
    finally:
        for hook in hooks:
            hook.remove()
    return residual


def stitched(residual, layers, entry, exit, mask=None, zeroed=False):
    """h + N(B(M(h)) - M(h)): another model's block B in place of some layers, M the entry map and N the exit map.

    `residual` h (batch, positions, d_host); `entry` and `exit` are (weight, bias) with weight (d_host, d_donor) and (d_donor,
    d_host), or None for the identity. Without an exit map the terms are summed so that the block's own values come out to the bit.
    """
    entered = mapped(residual, entry)
    weights = next(layers[0]._module.parameters())
    left = run_layers(layers, entered.to(weights), mask, zeroed).to(entered)
    if exit is None:
        return (residual - entered) + left
    return residual + mapped(left - entered, exit)


def mapped(values, map):
    """values @ weight + bias, in the values' precision and place; the values themselves where `map` is None."""
    if map is None:
        return values
    weight, bias = map
    return values @ weight.to(values) + bias.to(values)


def _nothing(_module, _inputs, output):
    """A forward hook: zeros instead of a mixer's output."""
    return (torch.zeros_like(output[0]), *output[1:]) if isinstance(output, tuple) else torch.zeros_like(output)


def classes(prompt: Prompt) -> list[str]:
    """The class of each position of a prompt, of CLASSES. A prompt without a dictionary is a text."""
    if not prompt.keys:
        return ["text"] * len(prompt)
    out = ["wrapper"] * len(prompt)
    for name, positions in prompt.spans.items():
        label = LABELS.get(name.partition(" ")[0])
        for position in positions if label else ():
            if label != "delimiter" or out[position] == "wrapper":
                out[position] = label
    out[prompt.final[0]] = "final"
    return out


def tensors(one: RidgeMap | None, device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
    if one is None:
        return None
    return tuple(torch.tensor(array, dtype=torch.float32, device=device) for array in (one.coef_, one.intercept_))


def said(arm: Arm) -> str:
    """An arm as text: "block 4-6"."""
    kind, block = arm
    return f"{kind} {layer_span(block)}" if block else kind
