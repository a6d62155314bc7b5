"""The independent oracle: every intervention again, with plain torch hooks on a plain transformers module.

Nothing here knows nnsight or this package's interventions, engine or family records: modules are found by their
own names, caches are copied and expanded by transformers' own methods, attention is read from eager weights.
An edit is a function of a module's output (or of an output projection's input) that returns what to put there.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

EMBED = -1
Edit = Callable[[torch.Tensor], torch.Tensor]
Expected = list[dict]  # per cell: "logits" (vocab,) or "loss", and layer -> attention (heads, keys)


class Oracle:
    """One untouched transformers module of a named family (a name of `tiny.FAMILIES`, or a bundled model's)."""

    def __init__(self, module: torch.nn.Module, family: str) -> None:
        self.module = module.eval()
        inner = module.model
        self.decoder = inner.language_model if family == "qwen3_5" else inner
        linear = "mamba" if "granite" in family or "mamba" in family else "linear_attn"
        self.mixers, self.linear, self.softmax = [], [], []
        for index, layer in enumerate(self.decoder.layers):
            mixer = getattr(layer, linear, None)
            (self.softmax if mixer is None else self.linear).append(index)
            self.mixers.append(layer.self_attn if mixer is None else mixer)
        self.heads = module.config.get_text_config().num_attention_heads

    # -- forwards ------------------------------------------------------------------
    def run(self, ids: torch.Tensor, edits: dict[int, Edit] | None = None, heads: dict[int, int] | None = None, **kw):
        """One forward over whole prompts with edits by layer and heads to remove by layer. transformers' output."""
        kw = {"use_cache": False, "attention_mask": torch.ones_like(ids), **kw}
        with torch.no_grad(), self._hooked(edits or {}, heads or {}):
            return self.module(input_ids=ids, **kw)

    def logits(self, ids: torch.Tensor, edits: dict[int, Edit] | None = None, **kw) -> torch.Tensor:
        """Logits at the last position, (batch, vocab)."""
        return self.run(ids, edits, logits_to_keep=1, **kw).logits[:, -1].float()

    def outputs(self, ids: torch.Tensor, layers: Sequence[int], **kw) -> dict[int, torch.Tensor]:
        """The outputs of mixers (EMBED: of the embeddings) at all positions, untouched."""
        seen: dict[int, torch.Tensor] = {}

        def keep(layer: int) -> Edit:
            def edit(output: torch.Tensor) -> torch.Tensor:
                seen[layer] = output.clone()
                return output

            return edit

        self.run(ids, {layer: keep(layer) for layer in layers}, logits_to_keep=1, **kw)
        return seen

    def attention(self, ids: torch.Tensor, layers: Sequence[int], edits=None, **kw) -> dict[int, torch.Tensor]:
        """Eager attention weights from the last position: layer -> (batch, heads, keys)."""
        before = self.module.config._attn_implementation
        rows: dict[int, torch.Tensor] = {}
        hooks = [
            self.mixers[layer].register_forward_hook(
                lambda _m, _i, out, layer=layer: rows.update({layer: out[1][:, :, -1].float()})
            )
            for layer in layers
        ]
        self.module.set_attn_implementation("eager")
        try:
            self.run(ids, edits, logits_to_keep=1, **kw)
        finally:
            self.module.set_attn_implementation(before)
            for hook in hooks:
                hook.remove()
        return rows

    def losses(self, ids: torch.Tensor, edits: dict[int, Edit] | None = None) -> torch.Tensor:
        """Mean next-token cross entropy of each row, in nats."""
        logits = self.run(ids, edits).logits.float()
        return torch.stack([torch.nn.functional.cross_entropy(row[:-1], t[1:]) for row, t in zip(logits, ids)])

    def means(self, ids: torch.Tensor) -> dict[int, torch.Tensor]:
        """The mean output of every linear mixer over all tokens of some texts."""
        return {layer: out.double().mean((0, 1)).float() for layer, out in self.outputs(ids, self.linear).items()}

    # -- the one-token path --------------------------------------------------------
    def prefix(self, ids: torch.Tensor):
        """The cache after all tokens but the last."""
        return self.run(ids[:, :-1], use_cache=True, logits_to_keep=1).cache

    def continuation(self, ids: torch.Tensor, cache, rows: torch.Tensor) -> tuple[torch.Tensor, dict]:
        """Last tokens of `rows` and the keywords under which they continue a private copy of the cache."""
        mine = copy.deepcopy(cache)
        mine.reorder_cache(rows)
        return ids[rows, -1:], {"cache": mine, "use_cache": True, "attention_mask": torch.ones_like(ids[rows])}

    # -- hooks ---------------------------------------------------------------------
    @contextmanager
    def _hooked(self, edits: dict[int, Edit], heads: dict[int, int]) -> Iterator[None]:
        handles = []
        for layer, edit in edits.items():
            site = self.decoder.embed_tokens if layer == EMBED else self.mixers[layer]
            handles.append(site.register_forward_hook(_output_hook(edit)))
        for layer, head in heads.items():
            handles.append(self.mixers[layer].o_proj.register_forward_pre_hook(self._head_hook(head), with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _head_hook(self, head: int):
        def hook(_module, args, kwargs):
            values = args[0].clone()
            width = values.shape[-1] // self.heads
            values[..., head * width : (head + 1) * width] = 0
            return (values, *args[1:]), kwargs

        return hook


def _output_hook(edit: Edit):
    def hook(_module, _inputs, output):
        if isinstance(output, tuple):
            return (edit(output[0]), *output[1:])
        return edit(output)

    return hook


# -- edits -------------------------------------------------------------------------
def fill(value: torch.Tensor | float) -> Edit:
    """The output := zero, or one vector, at every position."""

    def edit(output: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(output) + value

    return edit


def put(values: torch.Tensor, positions: Sequence[Sequence[int]], rows: Sequence[int] | None = None) -> Edit:
    """The output at `positions[n]` of row `rows[n]` (default: row n) := `values[n]`, one position at a time."""

    def edit(output: torch.Tensor) -> torch.Tensor:
        out = output.clone()
        for n, places in enumerate(positions):
            for k, place in enumerate(places):
                out[n if rows is None else rows[n], place] = values[n, k]
        return out

    return edit


def take(outputs: torch.Tensor, positions: Sequence[Sequence[int]]) -> torch.Tensor:
    """Outputs at per-row positions: (batch, k, d_model)."""
    return torch.stack([torch.stack([outputs[n, p] for p in places]) for n, places in enumerate(positions)])


def random_like(donor: torch.Tensor, host: torch.Tensor, seed: int, layer: int, ids: tuple[int, ...]) -> torch.Tensor:
    """Host plus noise of the size of donor - host; the noise is a function of (seed, layer, host prompt) alone."""
    digest = hashlib.sha256(f"{seed},{layer},{ids}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:6], "big"))
    noise = torch.randn(host.shape, generator=generator)
    return host + noise * ((donor - host).norm() / noise.norm())


# -- what the oracle says about cells ------------------------------------------------
def batched(cells: Sequence[Any]) -> list[list[int]]:
    """Indices of full-path cells that make one batch: one edit, one shape, in the order of the plan."""
    groups: dict[tuple, list[int]] = {}
    for i, cell in enumerate(cells):
        key = (cell.intervention, cell.mode, cell.layers, cell.head, len(cell.where), len(cell.host), len(cell.watch))
        groups.setdefault(key, []).append(i)
    return list(groups.values())


def full_edits(oracle: Oracle, cells: Sequence[Any], means: Callable[[], dict]) -> tuple[dict, dict]:
    """(edits, heads) of one batch of full-path cells."""
    first = cells[0]
    if first.intervention == "remove":
        values = means() if first.mode == "mean" else {}
        return {layer: fill(values.get(layer, 0.0)) for layer in first.layers}, {}
    if first.intervention == "heads":
        return {}, {first.layers[0]: first.head}
    if first.intervention == "transplant":
        donors = oracle.outputs(_ids([c.donor for c in cells]), first.layers)
        source, where = [c.source for c in cells], [c.where for c in cells]
        return {layer: put(take(out, source), where) for layer, out in donors.items()}, {}
    if first.intervention != "none":
        raise ValueError(f"the oracle knows no intervention {first.intervention!r}")
    return {}, {}


def expect_full(oracle: Oracle, cells: Sequence[Any], means: Callable[[], dict] = dict) -> Expected:
    """Per cell the oracle's last logits (or text loss) and attention rows, each batch in forwards over whole prompts."""
    out: Expected = [{} for _ in cells]
    for group in batched(cells):
        batch = [cells[i] for i in group]
        ids = _ids([c.host for c in batch])
        edits, heads = full_edits(oracle, batch, means)
        if batch[0].text:
            found = {"loss": oracle.losses(ids, edits)}
        else:
            found = {"logits": oracle.logits(ids, edits, heads=heads)}
            watched = sorted({layer for layer, _ in batch[0].watch})
            found |= oracle.attention(ids, watched, edits, heads=heads) if watched else {}
        for row, i in enumerate(group):
            out[i] = {what: value[row] for what, value in found.items()}
    return out


def expect_final(oracle: Oracle, cells: Sequence[Any]) -> Expected:
    """The same for final-path cells: prefixes once, then one token per cell from a copy of its host's cache."""
    order = sorted(range(len(cells)), key=lambda i: (cells[i].labels["pair"], i))
    cells = [cells[i] for i in order]
    prompts = list({p.ids: p for c in cells for p in (c.host, c.donor) if p is not None}.values())
    place = {p.ids: i for i, p in enumerate(prompts)}
    ids = _ids(prompts)
    past = oracle.prefix(ids)
    tokens, how = oracle.continuation(ids, past, torch.arange(len(prompts)))
    natural = oracle.outputs(tokens, oracle.linear, **how)
    edits = {}
    for layer in sorted({layer for c in cells for layer in c.layers}):
        rows = [i for i, c in enumerate(cells) if layer in c.layers]
        values = []
        for i in rows:
            host, donor = (natural[layer][place[p.ids], 0] for p in (cells[i].host, cells[i].donor))
            random = cells[i].mode == "random"
            values.append(random_like(donor, host, cells[i].seed, layer, cells[i].host.ids) if random else donor)
        edits[layer] = put(torch.stack(values)[:, None], [[0]] * len(rows), rows)
    hosts = torch.tensor([place[c.host.ids] for c in cells])
    tokens, how = oracle.continuation(ids, past, hosts)
    found = {"logits": oracle.logits(tokens, edits, **how)}
    watched = sorted({layer for c in cells for layer, _ in c.watch})
    if watched:
        tokens, how = oracle.continuation(ids, past, hosts)
        found |= oracle.attention(tokens, watched, edits, **how)
    out: Expected = [{} for _ in cells]
    for row, i in enumerate(order):
        out[i] = {what: value[row] for what, value in found.items()}
    return out


def _ids(prompts: Sequence[Any]) -> torch.Tensor:
    return torch.tensor([prompt.ids for prompt in prompts])
