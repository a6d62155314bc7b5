"""One frozen record per architecture: where things live and what its quirks are.

Adding a family is one record here and one entry in `tests/tiny.py`. The uniform names that `rename` maps
to are `layers`, `final_norm`, `embed`, `lm_head`, and per layer `mixer` (with `out_proj`), `mlp`,
`input_norm`, `post_norm`.
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


@dataclass(frozen=True)
class Family:
    """Where an architecture keeps its parts, and what must be known to patch it.

    `linear_class` and `softmax_class` are the attribute names of the two mixers in a decoder layer.
    `linear_returns` and `softmax_returns` say what those mixers return ("tensor" or "tuple": output first).
    `continues` says whether one more token continues exactly from the cache; where it does not, final-position cells
    run as full forwards. `notes` is printed by `encode-address check`.
    """

    name: str
    model_types: tuple[str, ...]
    linear_attr: str
    softmax_attr: str = "self_attn"
    linear_returns: str = "tensor"
    softmax_returns: str = "tuple"
    continues: bool = True
    rename: dict[str, str] = field(default_factory=dict)
    notes: str = ""

    def mixer_attr(self, kind: str) -> str:
        return self.linear_attr if kind == "linear" else self.softmax_attr

    def returns(self, kind: str) -> str:
        return self.linear_returns if kind == "linear" else self.softmax_returns


QWEN = Family(
    name="qwen3_5",
    model_types=("qwen3_5_text", "qwen3_5", "qwen3_5_moe_text", "qwen3_5_moe", "qwen3_next"),
    linear_attr="linear_attn",
    rename={**_DECODER, **_WRAPPED, "linear_attn": "mixer"},
    notes="Gated DeltaNet; softmax attention with per-head q/k norm, partial RoPE and an output gate",
)

GRANITE = Family(
    name="granitemoehybrid",
    model_types=("granitemoehybrid",),
    linear_attr="mamba",
    rename={**_DECODER, "mamba": "mixer", "shared_mlp": "mlp"},
    notes="Mamba-2; the mixer output is patched before residual_multiplier; `mlp` is the shared MLP, experts are beside it",
)

FAMILIES = (QWEN, GRANITE)


def family_of(config: Any, name: str = "this model") -> Family:
    """The record for a config's model_type. Raises ModelError, naming the supported ones."""
    for model_type in (getattr(config, "model_type", None), getattr(config.get_text_config(), "model_type", None)):
        for family in FAMILIES:
            if model_type in family.model_types:
                return family
    supported = ", ".join(t for f in FAMILIES for t in f.model_types)
    raise ModelError(
        f"{name}: model type {config.model_type!r} is not supported (supported: {supported}); "
        "add a Family record in encode_address/models/families.py"
    )
