"""One frozen record per architecture: where things live and what its quirks are.

Adding a family is one record here and one entry in `tests/tiny.py`. The uniform names that `rename` maps
to are `layers`, `final_norm`, `embed`, `lm_head`, and per layer `mixer` (with `out_proj`), `mlp`,
`input_norm`, `post_norm`; a layer that has no such part has no such name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from encode_address.errors import ModelError

_DECODER = {
    "model.layers": "layers",
    "model.norm": "final_norm",
    "model.embed_tokens": "embed",
    "input_layernorm": "input_norm",
    "post_attention_layernorm": "post_norm",
    "self_attn": "mixer",
    "o_proj": "out_proj",
}
# The multimodal wrapper holds the same decoder one level deeper.
_WRAPPED = {
    "model.language_model.layers": "layers",
    "model.language_model.norm": "final_norm",
    "model.language_model.embed_tokens": "embed",
}
# Names that Bamba and Jamba share.
_FEED_FORWARD = {
    "model.final_layernorm": "final_norm",
    "pre_ff_layernorm": "post_norm",
    "feed_forward": "mlp",
}


@dataclass(frozen=True)
class Family:
    """Where an architecture keeps its parts, and what must be known to patch it.

    `linear_attr` and `softmax_attr` are the attribute names of the two mixers in a decoder layer; where both have one
    name, `linear_class` and `softmax_class`, the ends of their class names, tell them apart.
    `linear_returns` and `softmax_returns` say what those mixers return ("tensor" or "tuple": output first),
    `layer_returns` what a decoder layer does: 0 a tensor, n a tuple of n, output first.
    `continues` says whether one more token continues exactly from the cache; where it does not, final-position cells
    run as full forwards. `states` are the states of a linear layer, `held` those of them that lie on its modules and
    not in the cache, by their path in the decoder layer. `linear_heads` names the config's number of linear heads (None:
    the mixer has none), `head_dim` the config's width of a query. `gated`: the query projection also gives an output gate.
    `pads`: left padding is masked in every layer; `unpadded_by` is a switch of the config that spoils it. `notes` is printed by `encode-address check`.
    """

    name: str
    model_types: tuple[str, ...]
    linear_attr: str
    softmax_attr: str = "self_attn"
    linear_class: str = ""
    softmax_class: str = ""
    linear_returns: str = "tensor"
    softmax_returns: str = "tuple"
    layer_returns: int = 0
    continues: bool = True
    states: tuple[str, ...] = ("recurrent", "conv")
    held: dict[str, str] = field(default_factory=dict)
    linear_heads: str | None = None
    head_dim: str = "head_dim"
    gated: bool = False
    pads: bool = True
    unpadded_by: str = ""
    rename: dict[str, str] = field(default_factory=dict)
    notes: str = ""

    def mixer_attr(self, kind: str) -> str:
        return self.softmax_attr if kind == "softmax" else self.linear_attr

    def mixer_class(self, kind: str) -> str:
        """How the class name of a mixer of this kind ends; empty where its attribute says enough."""
        return {"linear": self.linear_class, "softmax": self.softmax_class}.get(kind, "")

    def returns(self, kind: str) -> str:
        return {"linear": self.linear_returns, "softmax": self.softmax_returns}.get(kind, "tensor")


QWEN = Family(
    name="qwen3_5",
    model_types=("qwen3_5_text", "qwen3_5", "qwen3_5_moe_text", "qwen3_5_moe", "qwen3_next"),
    linear_attr="linear_attn",
    linear_heads="linear_num_value_heads",
    gated=True,
    rename={**_DECODER, **_WRAPPED, "linear_attn": "mixer"},
    notes="Gated DeltaNet; softmax attention with per-head q/k norm, partial RoPE and an output gate",
)

GRANITE = Family(
    name="granitemoehybrid",
    model_types=("granitemoehybrid",),
    linear_attr="mamba",
    linear_heads="mamba_n_heads",
    rename={**_DECODER, "mamba": "mixer", "shared_mlp": "mlp"},
    notes="Mamba-2; the mixer output is patched before residual_multiplier; `mlp` is the shared MLP, experts are beside it",
)

BAMBA = Family(
    name="bamba",
    model_types=("bamba",),
    linear_attr="mamba",
    linear_heads="mamba_n_heads",
    layer_returns=2,
    rename={**_DECODER, **_FEED_FORWARD, "mamba": "mixer"},
    notes="Mamba-2; softmax attention with partial RoPE; positions are counted from 0 again unless they are given",
)

OLMO = Family(
    name="olmo_hybrid",
    model_types=("olmo_hybrid",),
    linear_attr="linear_attn",
    linear_heads="linear_num_value_heads",
    rename={**_DECODER, "linear_attn": "mixer"},
    notes="Gated DeltaNet; a softmax layer has no `input_norm`, and its `post_norm` is applied to the mixer's output",
)

LFM2 = Family(
    name="lfm2",
    model_types=("lfm2", "lfm2_moe"),
    linear_attr="conv",
    states=("conv",),
    unpadded_by="conv_bias",
    rename={
        **_DECODER,
        "model.embedding_norm": "final_norm",
        "conv": "mixer",
        "feed_forward": "mlp",
        "operator_norm": "input_norm",
        "ffn_norm": "post_norm",
    },
    notes="gated short convolutions: the linear layers see three tokens and have no recurrent state, and no heads",
)

JAMBA = Family(
    name="jamba",
    model_types=("jamba",),
    linear_attr="mamba",
    rename={**_DECODER, **_FEED_FORWARD, "mamba": "mixer"},
    notes="Mamba-1, without heads; softmax attention without positions; a cache is continued by one token at a time only",
)

RECURRENT_GEMMA = Family(
    name="recurrent_gemma",
    model_types=("recurrent_gemma",),
    linear_attr="temporal_block",
    softmax_attr="temporal_block",
    linear_class="RecurrentBlock",
    softmax_class="Attention",
    linear_returns="tuple",
    held={"recurrent": "temporal_block.rg_lru.recurrent_states", "conv": "temporal_block.conv1d_state"},
    pads=False,
    rename={
        **_DECODER,
        "model.final_norm": "final_norm",
        "temporal_block": "mixer",
        "linear_out": "out_proj",
        "mlp_block": "mlp",
        "temporal_pre_norm": "input_norm",
        "channel_pre_norm": "post_norm",
    },
    notes="RG-LRU, its states on the modules, without heads; sliding-window attention; biased output projections; soft cap",
)

NEMOTRON = Family(
    name="nemotron_h",
    model_types=("nemotron_h",),
    linear_attr="mixer",
    softmax_attr="mixer",
    linear_class="Mamba2Mixer",
    softmax_class="Attention",
    continues=False,
    linear_heads="mamba_num_heads",
    rename={
        "model.layers": "layers",
        "model.norm_f": "final_norm",
        "model.embeddings": "embed",
        "norm": "input_norm",
        "o_proj": "out_proj",
    },
    notes="Mamba-2, whose step has a least size in whole prompts and none in one token; one mixer in each layer: an MLP is "
    "a layer of its own and belongs to no block",
)

MINIMAX = Family(
    name="minimax",
    model_types=("minimax",),
    linear_attr="self_attn",
    linear_class="LightningAttention",
    softmax_class="MiniMaxAttention",
    linear_returns="tuple",
    states=("recurrent",),
    linear_heads="num_attention_heads",
    rename=_DECODER,
    notes="lightning attention, no conv state; the residual stream is taken after `input_norm`, and weighted",
)

KIMI = Family(
    name="kimi_linear",
    model_types=("kimi_linear",),
    linear_attr="self_attn",
    linear_class="DeltaAttention",
    softmax_class="LinearAttention",
    linear_heads="linear_num_heads",
    head_dim="qk_head_dim",
    rename=_DECODER,
    notes="Kimi Delta Attention; latent attention: keys and values are each head's own where attention reads them, and "
    "shared in the cache",
)

FAMILIES = (QWEN, GRANITE, BAMBA, OLMO, LFM2, JAMBA, RECURRENT_GEMMA, NEMOTRON, MINIMAX, KIMI)

# Hybrid architectures that the names above cannot be said of: model type -> why.
_PARALLEL = (
    "every layer has a linear and a softmax mixer side by side, so no run of linear layers comes before a reader "
    "and a layer does not name one mixer"
)
_SHARED = (
    "its softmax attention is shared between layers and feeds only the Mamba mixer of the same layer, so a layer does not "
    "name one mixer and a reader does not write to the residual stream"
)
_INSIDE = "its convolution and its state lie inside its softmax mixers, so it has no linear mixers apart from them"
REFUSED = {
    "falcon_h1": _PARALLEL,
    "zamba": _SHARED,
    "zamba2": _SHARED,
    "zaya": _INSIDE,
}


def refuse(config: Any, name: str = "this model") -> None:
    """Raise ModelError, with the reason, for an architecture that is known and cannot be supported."""
    for model_type in (getattr(config, "model_type", None), getattr(config.get_text_config(), "model_type", None)):
        if model_type in REFUSED:
            raise ModelError(f"{name}: model type {model_type!r} is refused: {REFUSED[model_type]}")


def family_of(config: Any, name: str = "this model") -> Family:
    """The record for a config's model_type. Raises ModelError, naming the supported ones."""
    refuse(config, name)
    for model_type in (getattr(config, "model_type", None), getattr(config.get_text_config(), "model_type", None)):
        for family in FAMILIES:
            if model_type in family.model_types:
                return family
    supported = ", ".join(t for f in FAMILIES for t in f.model_types)
    raise ModelError(
        f"{name}: model type {config.model_type!r} is not supported (supported: {supported}); "
        "add a Family record in encode_address/models/families.py"
    )
