"""Tiny models of the families beside Gated DeltaNet and Granite; see `tiny` for what their weights are like.

Fewer layers and shorter chunks than those, since every check runs on all of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import (
    BambaConfig,
    BambaForCausalLM,
)

from tests.tiny import HEADS, KV_HEADS, VOCAB, VOCAB_SIZE

SHORT = "llalal"  # blocks G0 [0-1], G1 [3], and G2 [5] without a reader


def common(pattern: str = SHORT, **changes) -> dict:
    """What every configuration has."""
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 56,
        "num_hidden_layers": len(pattern),
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 512,
        "initializer_range": 0.06,
        "bos_token_id": VOCAB["<s>"],
        "eos_token_id": VOCAB["</s>"],
        "pad_token_id": VOCAB["<pad>"],
        **changes,
    }


def softmax_layers(pattern: str = SHORT) -> list[int]:
    return [i for i, kind in enumerate(pattern) if kind == "a"]


def _mamba2() -> dict:
    return {
        "mamba_expand": 2,
        "mamba_n_heads": 6,
        "mamba_d_head": 16,
        "mamba_d_state": 10,
        "mamba_n_groups": 2,
        "mamba_chunk_size": 16,
    }


def _bamba():
    return BambaForCausalLM(BambaConfig(**common(attn_layer_indices=softmax_layers(), **_mamba2())))


MORE: dict[str, Callable[[], torch.nn.Module]] = {
    "bamba": _bamba,
}
PATTERNS = dict.fromkeys(MORE, SHORT)
