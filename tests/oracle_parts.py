"""How the oracle finds mixers, by their own names, and states; and the attention that it puts in the place of theirs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import AttentionInterface


def first(module: torch.nn.Module, names: Sequence[str]) -> torch.nn.Module | None:
    return next((found for name in names if (found := getattr(module, name, None)) is not None), None)


def mixer_of(layer: torch.nn.Module) -> torch.nn.Module:
    return first(layer, ("linear_attn", "mamba", "conv", "temporal_block", "mixer", "self_attn"))


def kind_of(mixer: torch.nn.Module) -> str:
    """By the names of transformers' classes."""
    name = type(mixer).__name__
    if name.endswith(("MLP", "MoE")):
        return "mlp"
    return "softmax" if name.endswith("Attention") and "Delta" not in name and "Lightning" not in name else "linear"


def state_in(cache, layer: int, name: str) -> torch.Tensor:
    """A linear layer's recurrent or conv state, wherever the family keeps it."""
    if hasattr(cache, "held"):
        return cache.held[layer, name]
    if hasattr(cache, "linear_cache"):
        return cache.linear_cache[layer]
    return getattr(cache.layers[layer], f"{name}_states")[0]


def visible(new: int, old: int, window: int | None = None) -> torch.Tensor:
    """(new, old): which of `old` keys each of the last `new` queries may read."""
    seen = torch.ones(new, old, dtype=torch.bool).tril(old - new)
    return seen if window is None else seen.triu(old - new - window + 1)


def attention(module, query, key, value, _mask, scaling: float, sliding_window: int | None = None, **_kwargs):
    """Causal attention of prompts without padding, after the module's inner edit. Returns outputs and weights."""
    if hasattr(module, "oracle_inner"):
        query, key = module.oracle_inner(query, key)
    copies, (new, old) = query.shape[1] // key.shape[1], (query.shape[2], key.shape[2])
    key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
    seen = visible(new, old, sliding_window)
    weights = (query @ key.transpose(2, 3) * scaling).masked_fill(~seen, float("-inf")).softmax(-1)
    # The outputs by torch's own kernel, as the model without edits has them: its sums differ from those above.
    kernel = torch.nn.functional.scaled_dot_product_attention
    mask = {"is_causal": new > 1} if sliding_window is None else {"attn_mask": seen}
    return kernel(query, key, value, scale=scaling, **mask).transpose(1, 2).contiguous(), weights


AttentionInterface.register("oracle", attention)
