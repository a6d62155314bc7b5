"""Reading through a lens: one trace gives every layer's logits and the model's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import nnsight
import torch

from encode_address.errors import RunError
from encode_address.interventions.outputs import mixer_output
from encode_address.lens.fitted import Lens
from encode_address.lens.traced import lens_logits
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
    matrices = [lens.matrix(layer) for layer in chosen]
    envoys = [model.layers[i] for i in chosen]
    facts = (model.final_norm, model.lm_head, model.logits_scaling, model.logits_cap)
    rows = lens.kind == "rows"
    with torch.no_grad(), model.trace(prompts, logits_to_keep=-position) as tracer:
        read_out = nnsight.save([])
        for envoy, matrix in zip(envoys, matrices):
            read_out.append(_through(mixer_output(envoy)[:, position], matrix, facts, rows).cpu())
        own = tracer.result.logits[:, position].float().cpu().clone().save()
    for name, values in [*((f"L{layer}", values) for layer, values in zip(chosen, read_out)), ("the model", own)]:
        if not torch.isfinite(values).all():
            raise RunError(f"the logits of {name} are NaN or infinite; try --dtype float32")
    return Reading(dict(zip(chosen, read_out)), own)


def _through(hidden, matrix, facts, rows):
    """In a trace: a row lens's scores, or logits over the vocabulary."""
    if rows:
        return hidden.float() @ matrix.to(hidden.device).T
    norm, head, scaling, cap = facts
    return lens_logits(hidden, matrix, norm, head, scaling, cap)
