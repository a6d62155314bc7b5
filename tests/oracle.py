"""The independent oracle: every intervention again, with plain torch hooks on a plain transformers module.

Nothing here knows nnsight or this package's interventions, engine or family records: modules are found by their
own names, caches are copied and expanded by transformers' own methods, attention is read from eager weights, and
edited within an attention function of our own.
An edit is a function of a module's output (or of an output projection's input) that returns what to put there;
an inner edit is a function of the query and key that attention receives.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache

from tests.oracle_parts import first, kind_of, mixer_of, state_in

EMBED = -1
Edit = Callable[[torch.Tensor], torch.Tensor]
Inner = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
Expected = list[dict]  # per cell: "logits" (vocab,) or "loss", and layer -> attention (heads, keys)


class Oracle:
    """One untouched transformers module of a named family (a name of `tiny.FAMILIES`, or a bundled model's)."""

    def __init__(self, module: torch.nn.Module, family: str) -> None:
        self.module = module.eval()
        self.decoder = getattr(module.model, "language_model", module.model)
        self.embed = self.decoder.get_input_embeddings()
        self.mixers = [mixer_of(layer) for layer in self.decoder.layers]
        kinds = [kind_of(mixer) for mixer in self.mixers]
        self.linear, self.softmax = ([i for i, kind in enumerate(kinds) if kind == k] for k in ("linear", "softmax"))
        self.outs = [first(mixer, ("out_proj", "o_proj", "linear_out")) for mixer in self.mixers]
        self.heads = module.config.get_text_config().num_attention_heads
        # States that lie on modules: (layer, name) -> the module and its attribute.
        self.held = {}
        for i in self.linear if family == "recurrent_gemma" else ():
            self.held[i, "recurrent"] = (self.mixers[i].rg_lru, "recurrent_states")
            self.held[i, "conv"] = (self.mixers[i], "conv1d_state")

    # -- forwards ------------------------------------------------------------------
    def run(
        self,
        ids: torch.Tensor,
        edits: dict[int, Edit] | None = None,
        heads: dict[int, int] | None = None,
        inner: dict[int, Inner] | None = None,
        **kw,
    ):
        """One forward over whole prompts with edits, heads to remove and inner edits by layer. transformers' output."""
        kw = {"use_cache": False, "attention_mask": torch.ones_like(ids), **kw}
        for what, state in getattr(kw.get("cache"), "held", {}).items():
            setattr(*self.held[what], state)
        with torch.no_grad(), self._hooked(edits or {}, heads or {}), self._inside(inner or {}):
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

    def queries_and_keys(self, ids: torch.Tensor, layers: Sequence[int], **kw) -> dict[int, tuple]:
        """What softmax layers' attention receives, untouched: layer -> (query, key), (batch, heads, positions, dim)."""
        seen: dict[int, tuple] = {}

        def keep(layer: int) -> Inner:
            def inner(query: torch.Tensor, key: torch.Tensor):
                seen[layer] = (query.clone(), key.clone())
                return query, key

            return inner

        self.run(ids, inner={layer: keep(layer) for layer in layers}, logits_to_keep=1, **kw)
        return seen

    def truncated(self, ids: torch.Tensor, layer: int) -> torch.Tensor:
        """Last logits (batch, vocab) of a model that has no layers above `layer`."""
        whole = self.decoder.layers
        self.decoder.layers = whole[: layer + 1]
        try:
            return self.logits(ids)
        finally:
            self.decoder.layers = whole

    def losses(self, ids: torch.Tensor, edits: dict[int, Edit] | None = None, **kw) -> torch.Tensor:
        """Mean next-token cross entropy of each row, in nats."""
        logits = self.run(ids, edits, **kw).logits.float()
        return torch.stack([torch.nn.functional.cross_entropy(row[:-1], t[1:]) for row, t in zip(logits, ids)])

    def means(self, ids: torch.Tensor) -> dict[int, torch.Tensor]:
        """The mean output of every linear mixer over all tokens of some texts."""
        return {layer: out.double().mean((0, 1)).float() for layer, out in self.outputs(ids, self.linear).items()}

    # -- the one-token path --------------------------------------------------------
    def prefix(self, ids: torch.Tensor, one_by_one: bool = False):
        """The cache after all tokens but the last; `one_by_one`: token after token, by the kernels for one token."""
        if self.held:
            cache = DynamicCache(config=self.module.config)
            cache.held = dict.fromkeys(self.held)
            self.run(ids[:, :-1], use_cache=True, cache=cache)
            cache.held = {what: getattr(*place).clone() for what, place in self.held.items()}
            return cache
        cache = self.run(ids[:, :1] if one_by_one else ids[:, :-1], use_cache=True, logits_to_keep=1).cache
        for end in range(2, ids.shape[1]) if one_by_one else ():
            mask = torch.ones_like(ids[:, :end])
            self.run(ids[:, end - 1 : end], use_cache=True, cache=cache, attention_mask=mask)
        return cache

    def continuation(self, ids: torch.Tensor, cache, rows: torch.Tensor) -> tuple[torch.Tensor, dict]:
        """Last tokens of `rows` and the keywords under which they continue a private copy of the cache."""
        mine = copy.deepcopy(cache)
        mine.reorder_cache(rows)
        if hasattr(mine, "linear_cache"):
            mine.linear_cache = [x[rows] if isinstance(x, torch.Tensor) else x for x in mine.linear_cache]
        if self.held:
            mine.held = {what: state[rows] for what, state in mine.held.items()}
        last = ids[rows, -1:]
        where = {"attention_mask": torch.ones_like(ids[rows]), "position_ids": torch.full_like(last, ids.shape[1] - 1)}
        return last, {"cache": mine, "use_cache": True, **where}

    # -- hooks ---------------------------------------------------------------------
    @contextmanager
    def _hooked(self, edits: dict[int, Edit], heads: dict[int, int]) -> Iterator[None]:
        handles = []
        for layer, edit in edits.items():
            site = self.embed if layer == EMBED else self.mixers[layer]
            handles.append(site.register_forward_hook(_output_hook(edit)))
        for layer, head in heads.items():
            handles.append(self.outs[layer].register_forward_pre_hook(self._head_hook(head), with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def _inside(self, inner: dict[int, Inner]) -> Iterator[None]:
        """All softmax layers compute attention by `oracle_parts.attention`, which makes the inner edits."""
        if not inner:
            yield
            return
        before = self.module.config._attn_implementation
        for layer, edit in inner.items():
            self.mixers[layer].oracle_inner = edit
        self.module.set_attn_implementation("oracle")
        try:
            yield
        finally:
            self.module.set_attn_implementation(before)
            for layer in inner:
                del self.mixers[layer].oracle_inner

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


def put_query(values: Sequence[torch.Tensor], rows: Sequence[int], heads: Sequence[int]) -> Inner:
    """The last query of row `rows[n]`, head `heads[n]` (-1: every head) := `values[n]` (heads, head_dim)."""

    def inner(query: torch.Tensor, key: torch.Tensor):
        query = query.clone()
        for value, row, head in zip(values, rows, heads):
            for h in range(query.shape[1]) if head == -1 else [head]:
                query[row, h, -1] = value[h]
        return query, key

    return inner


def put_key(donor: torch.Tensor, positions: Sequence[Sequence[int]]) -> Inner:
    """The keys of row n at `positions[n]` := those of row n of `donor` (batch, kv_heads, positions, head_dim)."""

    def inner(query: torch.Tensor, key: torch.Tensor):
        key = key.clone()
        for row, places in enumerate(positions):
            for place in places:
                key[row, :, place] = donor[row, :, place]
        return query, key

    return inner


def swap_states(cache, donors, cells: Sequence[Any]) -> None:
    """The recurrent and/or conv states of the state cells' layers := those of another cache, row by row."""
    for row, cell in enumerate(cells):
        for layer in cell.layers if cell.intervention == "state" else ():
            heads = slice(None) if cell.head == -1 else cell.head
            if cell.mode in ("recurrent", "both"):
                mine, theirs = (state_in(some, layer, "recurrent") for some in (cache, donors))
                mine[row, heads] = theirs[row, heads]
            if cell.mode in ("conv", "both"):
                state_in(cache, layer, "conv")[row] = state_in(donors, layer, "conv")[row]


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


def full_edits(oracle: Oracle, cells: Sequence[Any], means: Callable[[], dict]) -> dict[str, dict]:
    """The `edits`, `heads` and `inner` edits of one batch of full-path cells."""
    first = cells[0]
    if first.intervention == "remove":
        values = means() if first.mode == "mean" else {}
        return {"edits": {layer: fill(values.get(layer, 0.0)) for layer in first.layers}}
    if first.intervention == "heads":
        return {"heads": {first.layers[0]: first.head}}
    if first.intervention == "none":
        return {}
    donors, where = _ids([c.donor for c in cells]), [c.where for c in cells]
    if first.intervention == "transplant":
        natural = oracle.outputs(donors, first.layers)
        return {"edits": {layer: put(take(out, [c.source for c in cells]), where) for layer, out in natural.items()}}
    inside = oracle.queries_and_keys(donors, first.layers)
    if first.intervention == "key":
        return {"inner": {layer: put_key(key, where) for layer, (_, key) in inside.items()}}
    if first.intervention == "query":
        every, heads = range(len(cells)), [first.head] * len(cells)
        return {"inner": {layer: put_query(list(q[:, :, -1]), every, heads) for layer, (q, _) in inside.items()}}
    raise ValueError(f"the oracle knows no intervention {first.intervention!r}")


def expect_full(oracle: Oracle, cells: Sequence[Any], means: Callable[[], dict] = dict) -> Expected:
    """Per cell the oracle's last logits (or text loss) and attention rows, each batch in forwards over whole prompts."""
    out: Expected = [{} for _ in cells]
    for group in batched(cells):
        batch = [cells[i] for i in group]
        ids, changes = _ids([c.host for c in batch]), full_edits(oracle, batch, means)
        if batch[0].text:
            found = {"loss": oracle.losses(ids, **changes)}
        else:
            found = {"logits": oracle.logits(ids, **changes)}
            watched = sorted({layer for layer, _ in batch[0].watch})
            found |= oracle.attention(ids, watched, **changes) if watched else {}
        for row, i in enumerate(group):
            out[i] = {what: value[row] for what, value in found.items()}
    return out


def expect_read(oracle: Oracle, cells: Sequence[Any]) -> Expected:
    """Per read-path cell the last logits of a truncated model, or the attention rows of the whole one."""
    out: Expected = []
    for cell in cells:
        ids = _ids([cell.host])
        if cell.intervention == "truncate":
            out.append({"logits": oracle.truncated(ids, cell.layers[0])[0]})
        else:
            rows = oracle.attention(ids, sorted({layer for layer, _ in cell.watch}))
            out.append({layer: weights[0] for layer, weights in rows.items()})
    return out


def expect_final(oracle: Oracle, cells: Sequence[Any], one_by_one: bool = False) -> Expected:
    """The same for final-path cells: prefixes once, then one token per cell from a copy of its host's cache."""
    first = {ids: i for i, ids in reversed([*enumerate(c.host.ids for c in cells)])}
    order = sorted(range(len(cells)), key=lambda i: (first[cells[i].host.ids], i))
    cells = [cells[i] for i in order]
    prompts = list({p.ids: p for c in cells for p in (c.host, c.donor) if p is not None}.values())
    place = {p.ids: i for i, p in enumerate(prompts)}
    ids = _ids(prompts)
    past = oracle.prefix(ids, one_by_one)
    hosts = torch.tensor([place[c.host.ids] for c in cells])
    donors = torch.tensor([place[(c.donor or c.host).ids] for c in cells])

    def inputs(rows: torch.Tensor, swap: bool = True) -> tuple[torch.Tensor, dict]:
        tokens, how = oracle.continuation(ids, past, rows)
        if swap:
            swap_states(how["cache"], oracle.continuation(ids, past, donors)[1]["cache"], cells)
        return tokens, how

    tokens, how = inputs(torch.arange(len(prompts)), swap=False)
    natural = oracle.outputs(tokens, oracle.linear, **how)
    edits, inner = {}, {}
    for layer, rows in _rows_by_layer(cells, "transplant").items():
        values = []
        for i in rows:
            host, donor = (natural[layer][place[p.ids], 0] for p in (cells[i].host, cells[i].donor))
            random = cells[i].mode == "random"
            values.append(random_like(donor, host, cells[i].seed, layer, cells[i].host.ids) if random else donor)
        edits[layer] = put(torch.stack(values)[:, None], [[0]] * len(rows), rows)
    for layer, rows in _rows_by_layer(cells, "query").items():
        tokens, how = inputs(torch.arange(len(prompts)), swap=False)
        query, _ = oracle.queries_and_keys(tokens, [layer], **how)[layer]
        inner[layer] = put_query([query[donors[i], :, -1] for i in rows], rows, [cells[i].head for i in rows])
    tokens, how = inputs(hosts)
    found = {"logits": oracle.logits(tokens, edits, inner=inner, **how)}
    watched = sorted({layer for c in cells for layer, _ in c.watch})
    if watched:
        tokens, how = inputs(hosts)
        found |= oracle.attention(tokens, watched, edits, inner=inner, **how)
    out: Expected = [{} for _ in cells]
    for row, i in enumerate(order):
        out[i] = {what: value[row] for what, value in found.items()}
    return out


def _rows_by_layer(cells: Sequence[Any], verb: str) -> dict[int, list[int]]:
    layers = sorted({layer for c in cells if c.intervention == verb for layer in c.layers})
    return {layer: [i for i, c in enumerate(cells) if c.intervention == verb and layer in c.layers] for layer in layers}


def _ids(prompts: Sequence[Any]) -> torch.Tensor:
    return torch.tensor([prompt.ids for prompt in prompts])
