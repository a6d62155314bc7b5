"""HybridModel: nnsight's TransformersModel with the same names on every family.

Inside a trace use `model.layers[i].mixer`, `.mlp`, `.input_norm`, `.post_norm`, `model.mixers("G2")`,
`model.final_norm`, `model.lm_head`, `model.embed`; softmax and linear mixers alike have `.out_proj`.
Everything else here stays on this machine: a HybridModel that is captured by a trace travels as a plain
view of those names (`__reduce__`), so no tokenizer and no class of this package reaches a server.
"""

from __future__ import annotations

import hashlib
import json
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from nnsight.modeling.transformers import TransformersModel
from transformers import DynamicCache

from encode_address.errors import ModelError, TaskError
from encode_address.interventions import read_cache
from encode_address.models.families import Family
from encode_address.models.layout import Block, Layout
from encode_address.models.view import continuation, view

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 22


def here(model: Any, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Run `function(model, *arguments)` in this process."""
    return function(model, *arguments)


class HybridModel:
    """A loaded hybrid model. Build one with `encode_address.load`.

    Attributes: `name`, `lm` (the nnsight model), `tokenizer`, `config` (the text config), `layout`,
    `family`, `folder` (a bundled model's own files, or None), `revision`, `remote`, `where` (how `ask` gets to the model).
    """

    def __init__(
        self,
        module: Any,
        tokenizer: Any,
        *,
        name: str,
        family: Family,
        layout: Layout,
        folder: Any = None,
        revision: str | None = None,
        remote: bool = False,
    ) -> None:
        self.lm = self._wrapped(module, tokenizer, family.rename, revision if remote else None)
        self.name, self.tokenizer, self.family, self.layout = name, tokenizer, family, layout
        self.folder, self.revision, self.remote = folder, revision, remote
        self.where: Callable[[Any, Callable[..., Any], Sequence[Any]], Any] = here
        self.config = self.lm._module.config.get_text_config()
        self._fingerprint: str | None = None
        self._cache_sizes: tuple[int, int] | None = None  # bytes: fixed, and per token

    # -- uniform names -------------------------------------------------------
    @property
    def layers(self) -> Any:
        """The decoder layers, as nnsight envoys."""
        return self.lm.layers

    @property
    def embed(self) -> Any:
        return self.lm.embed

    @property
    def final_norm(self) -> Any:
        return self.lm.final_norm

    @property
    def lm_head(self) -> Any:
        return self.lm.lm_head

    @property
    def blocks(self) -> dict[str, Block]:
        """The blocks by name; an unknown name is answered by `model.layout.block(name)`."""
        return _Blocks({block.name: block for block in self.layout.blocks}, self.layout)

    @property
    def softmax_layers(self) -> tuple[int, ...]:
        return self.layout.softmax_layers

    @property
    def linear_layers(self) -> tuple[int, ...]:
        return self.layout.linear_layers

    def mixers(self, names: str) -> list[Any]:
        """The mixer envoys of a block or union ("G2", "G2+G3") or of one layer ("L4"), in order."""
        return [self.layers[i].mixer for i in self.layout.layers_of(names)]

    @property
    def heads(self) -> int:
        """Query heads of a softmax layer."""
        return self.config.num_attention_heads

    def heads_of(self, layer: int) -> int:
        """Heads of a layer's mixer: query heads of a softmax layer, value heads of a linear one.

        Raises ModelError where the mixer has none.
        """
        if layer in self.softmax_layers:
            return self.heads
        if self.family.linear_heads is None or layer not in self.linear_layers:
            kind = self.layout.kinds[layer]
            raise ModelError(
                f"{self.name}: the {kind} mixers of the family {self.family.name} have no heads (L{layer})"
            )
        return getattr(self.config, self.family.linear_heads)

    @property
    def headed(self) -> tuple[int, ...]:
        """The layers whose mixers have heads."""
        linear = self.linear_layers if self.family.linear_heads is not None else ()
        return tuple(sorted((*self.softmax_layers, *linear)))

    def states_of(self, layer: int) -> tuple[str, ...]:
        """The states of a layer's mixer: of "recurrent" and "conv"; none of a softmax layer."""
        return self.family.states if layer in self.linear_layers else ()

    @property
    def gated(self) -> bool:
        """Whether softmax outputs are gated: the query projection then gives a gate beside each head's query."""
        return self.family.gated

    @property
    def head_dim(self) -> int:
        """The width of a query and a key."""
        return getattr(self.config, self.family.head_dim, None) or self.config.hidden_size // self.heads

    @property
    def pads(self) -> bool:
        """Whether prompts of different length can share a batch."""
        return self.family.pads and not getattr(self.config, self.family.unpadded_by, False)

    @property
    def logits_scaling(self) -> float:
        """What the head's output is divided by to give the model's logits."""
        return getattr(self.config, "logits_scaling", 1.0)

    @property
    def logits_cap(self) -> float | None:
        """The soft cap of the model's logits, cap x tanh(logits / cap), where it has one."""
        return getattr(self.config, "logits_soft_cap", None)

    # -- facts ---------------------------------------------------------------
    @property
    def module(self) -> torch.nn.Module:
        """The transformers module itself."""
        return self.lm._module

    @property
    def device(self) -> torch.device:
        """Where prompts go: the model's device; a remote model has none here, so the CPU."""
        return torch.device("cpu") if self.remote else next(self.module.parameters()).device

    @property
    def dtype(self) -> str:
        return str(next(self.module.parameters()).dtype).removeprefix("torch.")

    @property
    def attn_implementation(self) -> str:
        return self.lm.attn_implementation

    @property
    def weightless(self) -> bool:
        """Whether the weights are not here."""
        return self.remote

    @property
    def place(self) -> str:
        """Where the model is: "local", or the host of its server."""
        host = getattr(self.where, "host", "") if self.remote else ""
        return host.partition("://")[2] or "local"

    @property
    def slug(self) -> str:
        """The model's folder name in results: a folder's basename, or "Qwen/Qwen3.5-9B" -> "Qwen--Qwen3.5-9B"."""
        path = Path(self.name)
        return path.resolve().name if path.is_dir() else self.name.replace("/", "--")

    @property
    def fingerprint(self) -> str:
        """A hash of the configuration and of every bit of the weights, taken once, when first asked for."""
        if self._fingerprint is None:
            config = {k: v for k, v in self.module.config.to_dict().items() if k != "_name_or_path"}
            digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
            if self.remote:
                digest.update(f"{self.name}@{self.revision}".encode())
            else:
                for key, value in self.module.state_dict().items():
                    digest.update(f"{key}{tuple(value.shape)}{value.dtype}{_weigh(value)}".encode())
            self._fingerprint = digest.hexdigest()[:16]
        return self._fingerprint

    def cache_bytes(self, length: int) -> int:
        """The size of one prompt's cache: states, and keys and values of `length` tokens. One token is run to see, on the meta
        device where the weights are not here."""
        if self._cache_sizes is None:
            cache = self._sketch().prefix([[0]]) if self.remote else self.prefix([[0]])
            sizes = {True: 0, False: 0}
            for layer in read_cache(cache, self.held):
                for name, tensor in layer.items():
                    sizes[name in ("keys", "values")] += tensor.numel() * tensor.element_size()
            self._cache_sizes = sizes[False], sizes[True]
        return self._cache_sizes[0] + self._cache_sizes[1] * length

    # -- running -------------------------------------------------------------
    def encode(self, prompts: Any) -> dict[str, torch.Tensor]:
        """Token ids and mask, (batch, positions), for a prompt or a list of prompts.

        A prompt is text, a `Prompt`, a list of token ids, or a tensor of them. Prompts of different length
        are padded on the left, with position ids, so that position -1 is each one's last token.
        """
        if isinstance(prompts, torch.Tensor):
            ids = torch.atleast_2d(prompts).to(self.device)
            if ids.numel():
                return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            rows = []
        else:
            many = isinstance(prompts, (list, tuple)) and not (prompts and isinstance(prompts[0], int))
            rows = [self._ids(p) for p in (prompts if many else [prompts])]
        if not rows or min(len(r) for r in rows) == 0:
            raise TaskError("an empty prompt: give text or at least one token id")
        length = max(len(r) for r in rows)
        ids = torch.tensor([[0] * (length - len(r)) + list(r) for r in rows], device=self.device)
        mask = torch.tensor([[0] * (length - len(r)) + [1] * len(r) for r in rows], device=self.device)
        batch = {"input_ids": ids, "attention_mask": mask}
        if len({len(r) for r in rows}) > 1 and not self.pads:
            raise TaskError(
                f"{self.name}: {self.family.name} does not mask padding: give prompts of one length at a time"
            )
        if len({len(r) for r in rows}) > 1:
            batch["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
        return batch

    @property
    def uncontinued(self) -> str:
        """Why no run of this model continues from a prefix's cache; "" where runs do."""
        if not self.family.continues:
            return f"{self.family.name} does not continue exactly from a cache"
        if self.family.held and self.elsewhere:
            return f"{self.family.name} keeps its states on its modules, where only a local model shows them"
        return ""

    @property
    def elsewhere(self) -> bool:
        """Whether `ask` takes functions to another process."""
        return self.where is not here

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What `function(model, *arguments)` returns, run where the model is: one job on a server.

        There `model` is a plain view (see `__reduce__`). `function` is one of a module of this package that needs torch and nnsight
        alone; arguments and what it returns are plain: tensors, numbers, strings, lists, tuples, dicts, functions like it.
        """
        return self.where(self, function, arguments)

    def trace(self, prompts: Any, **kwargs: Any) -> Any:
        """`with model.trace(prompts) as tracer:` - one forward, to be read and edited by nnsight.

        No cache is built unless `use_cache=True` is passed. Wrap it in `torch.no_grad()`.
        """
        kwargs.setdefault("use_cache", False)
        if self.remote:
            kwargs.setdefault("remote", True)
        return self.lm.trace(**self.encode(prompts), **kwargs)

    @property
    def held(self) -> list[dict[str, tuple[Any, str]]] | None:
        """Per layer, the states that its modules hold themselves (see `interventions.slots`); None where the cache has all."""
        if not self.family.held:
            return None
        layers = self.module.get_decoder().layers
        return [
            {name: _place(layers[i], path) for name, path in self.family.held.items()} if kind == "linear" else {}
            for i, kind in enumerate(self.layout.kinds)
        ]

    def prefix(self, ids: Any) -> Any:
        """The cache after token ids (batch, positions), all of one length."""
        if not self.family.held:
            with torch.no_grad(), self.trace(ids, use_cache=True, logits_to_keep=1) as tracer:
                cache = tracer.result.cache.save()
            return cache
        # Such a model returns no cache, and goes on from whatever its modules still hold.
        for slots in self.held:
            for holder, attribute in slots.values():
                setattr(holder, attribute, None)
        cache = DynamicCache(config=self.config)
        with torch.no_grad(), self.trace(ids, use_cache=True, logits_to_keep=1, cache=cache) as tracer:
            tracer.result.logits.save()
        return cache

    def continuation(self, last: torch.Tensor, length: int, cache: Any) -> dict[str, Any]:
        """The keywords of a trace of one more token (batch, 1) each, of prompts of `length`, from their prefixes' cache."""
        return continuation(last.to(self.device), length, cache)

    def stop(self, tracer: Any) -> None:
        """At the end of a trace: the layers above are not needed, so they do not run here. On a server they do: in a
        sandbox nothing can follow a trace that stopped."""
        tracer.stop()

    def attention_op(self, layer: int) -> str:
        """The name of a softmax layer's attention call, for `interventions.final_attention`.

        Touches `.source` outside any trace, as nnsight needs it to be. Raises ModelError on a linear layer.
        """
        if layer not in self.softmax_layers:
            raise ModelError(
                f"L{layer} is a {self.layout.kinds[layer]} layer and has no attention; softmax layers: {self._softmax_names()}"
            )
        names = [n for n in self.layers[layer].mixer.source.names if n.startswith("attention_interface")]
        if not names:
            raise ModelError(
                f"{self.name}: no attention call found in L{layer}; this transformers version is not supported"
            )
        return names[-1]

    def check(self, full: bool = True) -> Any:
        """Verify the names and the arithmetic (see `models.check`); returns the report."""
        from encode_address.models.check import check

        return check(self, full=full)

    def __repr__(self) -> str:
        blocks = ", ".join(f"{b.name} [{b.span}]" for b in self.layout.blocks)
        return f"HybridModel({self.name}, {self.family.name}, blocks {blocks}; softmax {self._softmax_names()})"

    def __reduce__(self) -> tuple:
        facts = {
            "blocks": {b.name: types.SimpleNamespace(layers=b.layers, reader=b.reader) for b in self.layout.blocks},
            "linear_layers": self.linear_layers,
            "softmax_layers": self.softmax_layers,
            "heads": self.heads,
            "head_dim": self.head_dim,
            "logits_scaling": self.logits_scaling,
            "logits_cap": self.logits_cap,
        }
        return view, (self.lm, facts)

    # -- helpers -------------------------------------------------------------
    @staticmethod
    def _wrapped(module: Any, tokenizer: Any, rename: dict[str, str], revision: str | None) -> Any:
        known = {"tokenizer": tokenizer, "task": "text-generation", "rename": rename}
        return TransformersModel(module, revision=revision, **known)

    def _sketch(self) -> Any:
        from encode_address.models.real import Sketch  # not at the top: it is made of this class

        return Sketch(self.module.config, self.tokenizer, self.name, next(self.module.parameters()).dtype)

    def _ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        return list(getattr(prompt, "ids", prompt))

    def _softmax_names(self) -> str:
        return ", ".join(f"L{i}" for i in self.softmax_layers)


def _place(layer: torch.nn.Module, path: str) -> tuple[Any, str]:
    """The module that holds an attribute, and its name: "temporal_block.conv1d_state" of a layer."""
    *modules, attribute = path.split(".")
    return layer.get_submodule(".".join(modules)), attribute


class _Blocks(dict):
    """Blocks by name; a missing name raises the layout's own error, which lists what there is."""

    def __init__(self, blocks: dict[str, Block], layout: Layout) -> None:
        dict.__init__(self, blocks)
        self._layout = layout

    def __missing__(self, name: str) -> Block:
        return self._layout.block(name)


def _weigh(value: torch.Tensor) -> list[int]:
    """Exact integer sums over a tensor's bits, plain and weighted by place, chunk by chunk where it lies."""
    bits = value.detach().contiguous().flatten().view(_INTEGERS[value.element_size()])
    sums = []
    for chunk in bits.split(_CHUNK):
        place = torch.arange(1, chunk.numel() + 1, device=chunk.device)
        sums += [int(chunk.sum(dtype=torch.int64)), int((chunk * place).sum())]
    return sums
