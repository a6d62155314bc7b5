"""The independent oracle for cells of several edits and for donors' runs that are edited themselves.

One prompt at a time, whole forwards, plain torch hooks: an edit's values come from another such forward, of the donor
under its own edits. Knows neither paths, bundles nor caches.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface

from tests.oracle import EMBED, Oracle
from tests.oracle_parts import visible

# The config's number of heads of linear mixers, where it is not linear_num_value_heads.
LINEAR_HEADS = {
    "granitemoehybrid": "mamba_n_heads",
    "bamba": "mamba_n_heads",
    "nemotron_h": "mamba_num_heads",
    "kimi_linear": "linear_num_heads",
    "minimax": "num_attention_heads",
}


@dataclass
class Seen:
    """What one forward had: (site, layer) -> (positions, ...), layer -> attention weights, and the logits: the last
    position's, and `every` position's."""

    sites: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    weights: dict[int, torch.Tensor] = field(default_factory=dict)
    logits: torch.Tensor | None = None
    every: torch.Tensor | None = None


class Runs:
    """Every run that was asked for, computed once."""

    def __init__(self, oracle: Oracle, means: Callable[[], dict[int, torch.Tensor]] = dict) -> None:
        self.oracle, self.means = oracle, means
        config, names = oracle.module.config.get_text_config(), LINEAR_HEADS.get(oracle.module.config.model_type, "")
        self.linear_heads = getattr(config, names or "linear_num_value_heads", 1)
        self._seen: dict[tuple, Seen] = {}

    def run(self, prompt: Any, edits: tuple = (), exit: int | None = None) -> Seen:
        key = prompt.ids, tuple(edit.work for edit in edits), exit
        if key not in self._seen:
            self._seen[key] = self._forward(prompt, edits, exit)
        return self._seen[key]

    def _forward(self, prompt: Any, edits: tuple, exit: int | None) -> Seen:
        oracle, seen = self.oracle, Seen()
        layers = oracle.decoder.layers
        writes: dict[tuple[str, int], list] = {}
        gone = {layer for edit in edits if edit.mode == "layer" for layer in edit.layers}
        for edit in edits:
            for layer in edit.layers if edit.mode != "layer" else ():
                site = {"transplant": "output", "remove": "output", "heads": "heads"}.get(edit.verb, edit.verb)
                writes.setdefault((site, layer), []).append(self._write(edit, site, layer))

        def at(site: str, layer: int, values: torch.Tensor) -> torch.Tensor:
            """(1, positions, ...) -> the same after the edits of this site."""
            for write in writes.get((site, layer), ()):
                values = values.clone()
                write(values[0])
            seen.sites[site, layer] = values[0].clone()
            return values

        def before(site: str, layer: int):
            def hook(_module, args, kwargs):
                if "hidden_states" in kwargs:
                    return args, {**kwargs, "hidden_states": at(site, layer, kwargs["hidden_states"])}
                return (at(site, layer, args[0]), *args[1:]), kwargs

            return hook

        def after(site: str, layer: int):
            def hook(_module, _inputs, output):
                if isinstance(output, tuple):
                    return (at(site, layer, output[0]), *output[1:])
                return at(site, layer, output)

            return hook

        def gated(layer: int, heads: int):
            def hook(_module, _inputs, output):
                both = output.view(*output.shape[:2], heads, 2, -1).clone()
                both[:, :, :, 1] = at("gate", layer, both[:, :, :, 1])
                return both.view_as(output)

            return hook

        def attend(layer: int):
            def inner(query, key, value):
                return [
                    at(site, layer, x.transpose(1, 2)).transpose(1, 2)
                    for site, x in (("query", query), ("key", key), ("value", value))
                ]

            return inner

        def heads(layer: int):
            count = oracle.heads if layer in oracle.softmax else self.linear_heads if layer in oracle.linear else 1

            def hook(_module, args, kwargs):
                split = args[0].view(*args[0].shape[:2], count, -1)
                return (at("heads", layer, split).view_as(args[0]), *args[1:]), kwargs

            return hook

        def passed_on(layer: int):
            def hook(_module, _inputs, output):
                entered = seen.sites["residual", layer][None]
                return (entered, *output[1:]) if isinstance(output, tuple) else entered

            return hook

        with ExitStack() as stack:

            def hooked(handle: Any) -> None:
                stack.callback(handle.remove)

            hooked(oracle.embed.register_forward_hook(after("output", EMBED)))
            for i, (layer, mixer, out) in enumerate(zip(layers, oracle.mixers, oracle.outs)):
                hooked(layer.register_forward_pre_hook(before("residual", i), with_kwargs=True))
                hooked(mixer.register_forward_pre_hook(before("input", i), with_kwargs=True))
                if out is not None:
                    hooked(out.register_forward_pre_hook(heads(i), with_kwargs=True))
                hooked(mixer.register_forward_hook(after("output", i)))
                if i in gone:
                    hooked(layer.register_forward_hook(passed_on(i)))
                if i in oracle.softmax:
                    mixer.oracle_runs = (attend(i), seen.weights, i)
                    stack.callback(delattr, mixer, "oracle_runs")
                    if mixer.q_proj.out_features == 2 * out.in_features:
                        hooked(mixer.q_proj.register_forward_hook(gated(i, oracle.heads)))
            if exit is not None:
                oracle.decoder.layers = layers[: exit + 1]
                stack.callback(setattr, oracle.decoder, "layers", layers)
            implementation = oracle.module.config._attn_implementation
            oracle.module.set_attn_implementation("oracle_runs")
            stack.callback(oracle.module.set_attn_implementation, implementation)
            seen.every = oracle.run(torch.tensor([prompt.ids])).logits[0].float()
            seen.logits = seen.every[-1]
        return seen

    def _write(self, edit: Any, site: str, layer: int):
        """In place: what the edit does to (positions, ...)."""
        if edit.verb == "heads":
            return lambda values: values[:, edit.head].zero_()
        if edit.verb == "remove":
            new = self.means()[layer] if edit.mode == "mean" else 0.0
            places = list(edit.where) or slice(None)
            return lambda values: values.__setitem__(places, new)
        donor = self.run(edit.donor, edit.under).sites[site, layer]

        def write(values: torch.Tensor) -> None:
            for place, source in zip(edit.where, edit.source):
                if edit.head == -1:
                    values[place] = donor[source]
                else:
                    values[place, edit.head] = donor[source, edit.head]

        return write


def _attention(module, query, key, value, _mask, scaling: float, sliding_window: int | None = None, **_kwargs):
    """Causal attention of a prompt without padding, after the module's edits."""
    inner, weights, layer = module.oracle_runs
    query, key, value = inner(query, key, value)
    copies, length = query.shape[1] // key.shape[1], query.shape[2]
    key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
    unseen = ~visible(length, length, sliding_window)
    weights[layer] = (query @ key.transpose(2, 3) * scaling).masked_fill(unseen, float("-inf")).softmax(-1)[0]
    return (weights[layer] @ value).transpose(1, 2).contiguous(), weights[layer]


AttentionInterface.register("oracle_runs", _attention)


def expect_runs(runs: Runs, cells) -> list[dict]:
    """What `oracle_cases.agree` compares a table with."""
    out = []
    for cell in cells:
        seen = runs.run(cell.host, cell.edits, cell.exit)
        out.append({"logits": seen.logits, **{layer: seen.weights[layer][:, -1] for layer, _ in cell.watch}})
    return out
