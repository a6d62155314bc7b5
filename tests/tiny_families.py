"""Tiny models of the families beside Gated DeltaNet and Granite; see `tiny` for what their weights are like.

Fewer layers and shorter chunks than those, since every check runs on all of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    MiniMaxConfig,
    MiniMaxForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
)

from tests.tiny import HEADS, KV_HEADS, VOCAB, VOCAB_SIZE, layer_types

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


def _olmo_hybrid():
    linear = {"linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_key_head_dim": 8}
    linear |= {"linear_value_head_dim": 12}
    return OlmoHybridForCausalLM(OlmoHybridConfig(**common(layer_types=layer_types(SHORT), **linear)))


def _lfm2():
    kinds = [{"l": "conv", "a": "full_attention"}[kind] for kind in SHORT]
    return Lfm2ForCausalLM(Lfm2Config(**common(layer_types=kinds, tie_word_embeddings=False)))


def _lfm2_moe():
    kinds = [{"l": "conv", "a": "full_attention"}[kind] for kind in SHORT]
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_dense_layers": 2}
    settings = common(layer_types=kinds, tie_word_embeddings=False, **experts)
    return Lfm2MoeForCausalLM(Lfm2MoeConfig(**settings))


def _jamba():
    """Layer types follow from a period: softmax at 1 and 4. Experts on odd layers."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "expert_layer_period": 2, "expert_layer_offset": 1}
    mamba = {"mamba_d_state": 5, "mamba_dt_rank": 7, "mamba_expand": 2}
    settings = common(attn_layer_period=3, attn_layer_offset=1, **experts, **mamba)
    return JambaForCausalLM(JambaConfig(**settings))


def _recurrent_gemma():
    """The window is shorter than the prompts, so that a key outside it shows."""
    kinds = [{"l": "recurrent", "a": "attention"}[kind] for kind in SHORT]
    settings = common(block_types=kinds, attention_window_size=26, logits_soft_cap=4.0, attention_bias=True)
    return RecurrentGemmaForCausalLM(RecurrentGemmaConfig(**settings, w_init_variance_scale=0.01))


def _nemotron_h():
    kinds = {"l": "linear_attention", "a": "full_attention"}
    types = [kinds.get(kind) or ("moe" if i == 1 else "mlp") for i, kind in enumerate(NEMOTRON)]
    mamba = {"mamba_num_heads": 6, "mamba_head_dim": 16, "ssm_state_size": 10, "n_groups": 2, "chunk_size": 16}
    experts = {"n_routed_experts": 4, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40}
    settings = common(NEMOTRON, layers_block_type=types, head_dim=20, **mamba, **experts)
    return NemotronHForCausalLM(NemotronHConfig(**settings))


def _minimax():
    weights = {"full_attn_alpha_factor": 0.7, "full_attn_beta_factor": 1.3, "linear_attn_alpha_factor": 0.8}
    weights |= {"linear_attn_beta_factor": 1.2, "mlp_alpha_factor": 0.9, "mlp_beta_factor": 1.1}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    settings = common(layer_types=layer_types(SHORT), head_dim=14, block_size=16, **weights, **experts)
    settings |= {"initializer_range": 0.03}
    return MiniMaxForCausalLM(MiniMaxConfig(**settings))


def _kimi_linear():
    """Widths of latent attention that are all different: values are narrower than queries and keys."""
    latent = {"kv_lora_rank": 18, "qk_rope_head_dim": 6, "qk_nope_head_dim": 10, "v_head_dim": 12}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1}
    linear = {"linear_head_dim": 8, "linear_num_heads": 5}
    settings = common(layer_types=layer_types(SHORT), **latent, **experts, **linear)
    return KimiLinearForCausalLM(KimiLinearConfig(**settings | {"num_key_value_heads": HEADS}))


NEMOTRON = "lmlalmal"
MORE: dict[str, Callable[[], torch.nn.Module]] = {
    "bamba": _bamba,
    "olmo_hybrid": _olmo_hybrid,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2_moe,
    "jamba": _jamba,
    "recurrent_gemma": _recurrent_gemma,
    "nemotron_h": _nemotron_h,
    "minimax": _minimax,
    "kimi_linear": _kimi_linear,
}
PATTERNS = dict.fromkeys(MORE, SHORT) | {"jamba": "lallal", "nemotron_h": NEMOTRON}
