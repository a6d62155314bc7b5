"""Real checkpoints at their real dimensions, without their weights: from facts that ship with the package (`real.json`).

`unconfirmed` names the widths that no configuration at hand gives: where there are any, the layers, blocks and readers are
facts, and sizes in bytes are not. A `Sketch` has every name and size of a model, and cannot run.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from nnsight import NNsight
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from encode_address.errors import ModelError
from encode_address.models.families import family_of
from encode_address.models.hybrid import HybridModel
from encode_address.models.layout import Layout

_FILE = Path(__file__).parent / "real.json"


@dataclass(frozen=True)
class Facts:
    """What is known of one checkpoint: its configuration, and the widths that are not."""

    name: str
    hub: str
    config: Any
    unconfirmed: tuple[str, ...] = field(default=())

    @property
    def layout(self) -> Layout:
        return Layout.from_config(self.config, self.name)


def names() -> list[str]:
    """The checkpoints whose facts are shipped."""
    return [*json.loads(_FILE.read_text())]


def facts(name: str) -> Facts | None:
    """The facts of a checkpoint, by its short name or its name on the hub; None where none are shipped."""
    for short, known in json.loads(_FILE.read_text()).items():
        if name.lower() in (short, known["hub"].lower()):
            settings = dict(known["config"])
            if "softmax" in known:
                kinds = ["linear_attention"] * settings["num_hidden_layers"]
                for layer in known["softmax"]:
                    kinds[layer] = "full_attention"
                settings["layer_types"] = kinds
            config = AutoConfig.for_model(known["model_type"], **settings)
            return Facts(short, known["hub"], config, tuple(known.get("unconfirmed", ())))
    return None


class Sketch(HybridModel):
    """A model on the meta device: its names, its layout and its sizes. It can be planned for and cannot run."""

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        name: str,
        dtype: torch.dtype,
        folder: Any = None,
        unconfirmed: tuple[str, ...] = (),
    ) -> None:
        layout, family = Layout.from_config(config.get_text_config(), name), family_of(config, name)
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        super().__init__(module, tokenizer, name=name, family=family, layout=layout, folder=folder)
        self.unconfirmed = unconfirmed

    @staticmethod
    def _wrapped(module: Any, tokenizer: Any, rename: dict[str, str], revision: str | None) -> Any:
        return NNsight(module, rename=rename)

    weightless = True

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def attn_implementation(self) -> str:
        return "none"

    @property
    def fingerprint(self) -> str:
        """Of the configuration: there are no weights."""
        return hashlib.sha256(self.module.config.to_json_string().encode()).hexdigest()[:16]

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())

    @property
    def weight_bytes(self) -> int:
        return sum(parameter.numel() * parameter.element_size() for parameter in self.module.parameters())

    def cache_bytes(self, length: int) -> int:
        """As of a model that runs; 0 where a width that it depends on is unconfirmed."""
        return 0 if self.unconfirmed else super().cache_bytes(length)

    def prefix(self, ids: Any) -> Any:
        """The cache after token ids, without contents: a forward on the meta device."""
        known = {"input_ids": torch.tensor(ids, device="meta"), "use_cache": True, "logits_to_keep": 1}
        cache = DynamicCache(config=self.config) if self.family.held else None
        for part in self.module.modules():
            if type(part).__name__.endswith(
                "Experts"
            ):  # which expert gets a token is in its numbers, and there are none
                part.forward = lambda hidden, *_, **__: torch.empty_like(hidden)
        with torch.no_grad():
            result = self.module(**known, **({} if cache is None else {"cache": cache}))
        return result.cache if cache is None else cache

    def trace(self, *_: Any, **__: Any) -> Any:
        raise ModelError(f"{self.name} has no weights here: it can be planned for, and not run")
