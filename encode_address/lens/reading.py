"""Reading through a lens: one trace, where the model is, gives every layer's logits and the model's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from encode_address.errors import RunError
from encode_address.lens.fitted import Lens
from encode_address.lens.traced import read_through
from encode_address.models.hybrid import HybridModel


@dataclass(frozen=True)
class Reading:
    """`logits`: per layer (batch, vocabulary), or (batch, tokens) of a row lens; `own` (batch, vocabulary): what the model says at
    the same position of the same pass. Float32 on the CPU."""

    logits: dict[int, torch.Tensor]
    own: torch.Tensor


def read(
    model: HybridModel, lens: Lens, prompts: Any, layers: Sequence[int] | None = None, position: int = -1
) -> Reading:
    """Read prompts at `layers` (default: all of `lens.readable`) at one position, counted from the end (-1 is the last token).

    Raises RunError for another model's lens, a layer or position that it was not fitted at, or logits that are not finite.
    """
    lens.require(model)
    batch = model.encode(prompts)
    lengths = batch["attention_mask"].sum(-1)
    shortest = int(lengths.min())
    if not -shortest <= position < 0:
        raise RunError(f"position {position} is not one of {shortest} counted from the end: -1 is the last token")
    lens.require_position(shortest + position)
    chosen = lens.readable if layers is None else tuple(sorted(set(layers)))
    matrices = {layer: lens.carrier(layer) for layer in chosen}
    seen = model.ask(read_through, batch, position, matrices, lens.kind == "rows")
    for name, values in [
        *((f"L{layer}", values) for layer, values in seen["logits"].items()),
        ("the model", seen["own"]),
    ]:
        if not torch.isfinite(values).all():
            raise RunError(f"the logits of {name} are NaN or infinite; try --dtype float32")
    return Reading(seen["logits"], seen["own"])
