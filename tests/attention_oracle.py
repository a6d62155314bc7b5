"""Edited attention once more, in plain torch: a registered attention function, its mask as transformers builds it for eager attention.

Knows nothing of nnsight, of this package's interventions or of its phases: an edit is a function of one layer's weights (batch, heads,
queries, keys), additive mask included in their scores, that returns the weights to use and which heads speak at which query.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

Edit = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
_EDIT: list[Edit] = []


def _attention(module, query, key, value, mask, scaling, dropout=0.0, **_kwargs):
    copies = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
    scores = query @ key.transpose(2, 3) * scaling
    if mask is not None:
        scores = scores + mask[..., : key.shape[2]]
    weights, speak = _EDIT[-1](module.layer_idx, scores.softmax(-1), scores)
    output = (weights @ value).transpose(1, 2)
    if speak is not None:  # (batch, heads, queries)
        output = output * speak.transpose(1, 2)[..., None]
    return output.contiguous(), weights


AttentionInterface.register("edited", _attention)
AttentionMaskInterface.register("edited", eager_mask)


@contextmanager
def edited(module: torch.nn.Module, edit: Edit):
    """All softmax layers use the function above, under `edit`."""
    before = module.config._attn_implementation
    module.set_attn_implementation("edited")
    _EDIT.append(edit)
    try:
        yield
    finally:
        _EDIT.pop()
        module.set_attn_implementation(before)


def logits(module: torch.nn.Module, ids: torch.Tensor, edit: Edit) -> torch.Tensor:
    """Logits at all positions (batch, length, vocab)."""
    with torch.no_grad(), edited(module, edit):
        return module(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits.float()


def by_phase(first: int, prefill: Edit | None, generation: Edit | None) -> Edit:
    """One edit at queries before `first`, another from there on."""

    def edit(layer, weights, scores):
        out, speak = weights.clone(), torch.ones(weights.shape[:3])
        for one, rows in ((prefill, slice(0, first)), (generation, slice(first, None))):
            if one is not None:
                new, heads = one(layer, weights[:, :, rows], scores[:, :, rows])
                out[:, :, rows] = new
                if heads is not None:
                    speak[:, :, rows] = heads.to(speak)
        return out, speak

    return edit
