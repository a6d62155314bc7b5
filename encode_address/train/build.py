"""Tiny hybrids: their configurations, an initialisation that can learn to look things up, and growth by new layers.

Copy-like ("mimetic") initialisation: from the usual one a model this small did not find key matching within the steps
that two cores allow. Queries start equal to keys, and output projections as transposes of value projections, so a
layer begins as a weak lookup by similarity; nothing says by which.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import (
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
)

from encode_address.train.words import vocabulary

WIDTH, HEADS, HEAD_DIM = 64, 2, 32
LINEAR_HEADS, STATE, LINEAR_DIM = 4, 16, 32  # of a linear mixer: heads, key (or state) size, value size
CHUNK = 64
SPREAD = 0.06  # of weights at the start
CLASSES = {"gdn": Qwen3_5ForCausalLM, "mamba2": GraniteMoeHybridForCausalLM, "griffin": RecurrentGemmaForCausalLM}
# Step sizes of a linear layer's decay at the start, smallest and largest.
LASTING, FORGETFUL = (0.001, 0.1), (0.03, 0.3)


def config(architecture: str, pattern: str) -> Any:
    """The configuration of "gdn", "mamba2" or "griffin" with layers as in `pattern`: l linear, a softmax attention."""
    kinds = [{"l": "linear_attention", "a": "full_attention"}[letter] for letter in pattern]
    shared = {
        "vocab_size": len(vocabulary()),
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": len(kinds),
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "layer_types": kinds,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "initializer_range": SPREAD,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if architecture == "gdn":
        rope = {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        }
        return Qwen3_5TextConfig(
            **shared,
            head_dim=HEAD_DIM,
            linear_conv_kernel_dim=4,
            linear_key_head_dim=STATE,
            linear_value_head_dim=LINEAR_DIM,
            linear_num_key_heads=LINEAR_HEADS,
            linear_num_value_heads=LINEAR_HEADS,
            rope_parameters=rope,
        )
    if architecture == "griffin":
        letters = {"l": "recurrent", "a": "attention"}
        own = {**shared, "intermediate_size": 4 * WIDTH}  # it is halved between gate and value
        del own["layer_types"], own["initializer_range"]
        return RecurrentGemmaConfig(
            **own,
            block_types=[letters[letter] for letter in pattern],
            attention_window_size=shared["max_position_embeddings"],
            rope_parameters={"rope_type": "default", "rope_theta": 1e2, "partial_rotary_factor": 0.25},
        )
    return GraniteMoeHybridConfig(
        **shared,
        shared_intermediate_size=2 * WIDTH,
        num_local_experts=0,
        num_experts_per_tok=0,
        mamba_n_heads=LINEAR_HEADS,
        mamba_d_head=LINEAR_DIM,
        mamba_expand=LINEAR_HEADS * LINEAR_DIM // WIDTH,
        mamba_d_state=STATE,
        mamba_n_groups=1,
        mamba_d_conv=4,
        mamba_chunk_size=CHUNK,
        attention_multiplier=0.4,
        position_embedding_type=None,
    )


def build(architecture: str, pattern: str, seed: int) -> nn.Module:
    """A model with copy-like initialisation; the same weights for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = CLASSES[architecture](config(architecture, pattern))
        embeddings = model.model.embed_tokens.weight.data
        # A direction that all words share: with it, attention by similarity has something to subtract from.
        embeddings[1:] += SPREAD * torch.sign(torch.randn(WIDTH))
        for layer in model.model.layers:
            if mixer(layer) is linear(layer):
                first = layer is model.model.layers[0]
                steps = FORGETFUL if first else LASTING
                if architecture == "griffin":
                    _init_griffin(linear(layer), steps)
                else:
                    _init_linear(linear(layer), architecture, len(pattern), steps)
            else:
                _init_softmax(mixer(layer), architecture)
    return model


def mixer(layer: nn.Module) -> nn.Module:
    """A decoder layer's mixer."""
    return linear(layer) or getattr(layer, "self_attn", None) or layer.temporal_block


def linear(layer: nn.Module) -> nn.Module | None:
    """A decoder layer's linear mixer, or None."""
    if hasattr(layer, "temporal_block"):  # RecurrentGemma has one name for both kinds
        return layer.temporal_block if hasattr(layer.temporal_block, "rg_lru") else None
    return getattr(layer, "linear_attn", None) or getattr(layer, "mamba", None)


def _init_linear(module: nn.Module, architecture: str, depth: int, steps: tuple[float, float]) -> None:
    """Decays (log-uniform step sizes), a smoothing convolution, and (GDN) queries equal to keys."""
    low, high = (math.log(step) for step in steps)
    step = torch.exp(torch.rand(module.A_log.numel()) * (high - low) + low)
    module.dt_bias.data = step + torch.log(-torch.expm1(-step))  # what softplus makes `step` of
    module.A_log.data = torch.log(torch.empty_like(step).uniform_(1, 16))
    module.out_proj.weight.data /= (2 * depth) ** 0.25
    module.conv1d.weight.data = 0.3 + 0.15 * torch.randn_like(module.conv1d.weight)
    if architecture == "gdn":
        keys = slice(module.key_dim, 2 * module.key_dim)
        for weight in (module.in_proj_qkv.weight.data, module.conv1d.weight.data):
            weight[: module.key_dim] = weight[keys]


def _init_griffin(module: nn.Module, steps: tuple[float, float]) -> None:
    """Decays as in `_init_linear` where the gate is half open, a smoothing convolution, gates that tell words apart, and an
    output projection that undoes the input's."""
    low, high = (math.log(step) for step in steps)
    rate = torch.empty(module.lru_width).uniform_(low, high).exp() * torch.empty(module.lru_width).uniform_(1, 16)
    module.rg_lru.recurrent_param.data = torch.log(torch.expm1(rate / 4))  # decay: exp(-8 * gate * softplus of it)
    module.conv_1d.weight.data = 0.3 + 0.15 * torch.randn_like(module.conv_1d.weight)
    for gate in (module.rg_lru.input_gate_weight, module.rg_lru.recurrent_gate_weight):
        gate.data = torch.randn_like(gate) / math.sqrt(gate.shape[-1])
    nn.init.orthogonal_(module.linear_x.weight)
    module.linear_out.weight.data = 0.5 * module.linear_x.weight.data.T.clone()
    module.linear_y.bias.data.fill_(1.0)  # its gate lets most through


def _init_softmax(module: nn.Module, architecture: str) -> None:
    key, value = module.k_proj.weight.data, module.v_proj.weight.data
    for weight in (key, value):
        if architecture == "griffin":  # a copy of a copy has to look like the word: no memory here goes by keys
            nn.init.orthogonal_(weight)
        else:
            weight.copy_(torch.randn_like(weight) / math.sqrt(WIDTH))
    module.o_proj.weight.data.copy_(value.T)
    if architecture == "gdn":  # per head: its query, then its gate
        module.q_proj.weight.data.view(HEADS, 2, HEAD_DIM, WIDTH)[:, 0] = key.view(HEADS, HEAD_DIM, WIDTH)
        module.q_norm.weight.data.fill_(0.6)
        module.k_norm.weight.data.fill_(0.6)
        return
    if architecture == "griffin":
        key *= 1.5  # as sharp as the others: no norm of queries and keys, no multiplier
    module.q_proj.weight.data.copy_(key)


def grow(small: nn.Module, architecture: str, pattern: str, origin: Mapping[int, int], seed: int) -> nn.Module:
    """A deeper model that computes what `small` does: layer `i` is `origin[i]` of the small one; layers without an origin
    are new, and write nothing yet (their mixer's and MLP's output projections are zero)."""
    large = build(architecture, pattern, seed)
    old, new = small.state_dict(), large.state_dict()
    for name, weight in new.items():
        parts = name.split(".")
        if parts[:2] != ["model", "layers"]:
            weight.copy_(old[name])
        elif int(parts[2]) in origin:
            weight.copy_(old[".".join([*parts[:2], str(origin[int(parts[2])]), *parts[3:]])])
        elif parts[-2] in ("out_proj", "o_proj", "down_proj", "output_linear", "linear_out"):
            weight.zero_()
    return large
