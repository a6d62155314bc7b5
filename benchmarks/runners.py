"""Four ways to run the same cells: plain hooks, one nnsight trace per cell, the engine, and the floor.

Each returns `Done`: per pair and set of layers the margin (the difference of the two target logits at the last
position) and the standard deviation of the logits, and the tokens that went through the model. All ask for the
logits of the last position only, and none builds a cache that it does not use: the slower ways are not made slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import nnsight
import torch

from benchmarks.cases import Case, Layers
from encode_address.run.engine import Engine


@dataclass(frozen=True)
class Done:
    """(pairs, sets) margins, (pairs, sets) standard deviations of the logits, and tokens forwarded."""

    margin: torch.Tensor
    spread: torch.Tensor
    tokens: int

    def of(self, sets: slice) -> Done:
        """The same for some of the sets of layers."""
        return Done(self.margin[:, sets], self.spread[:, sets], self.tokens)


@dataclass
class Batches:
    """The largest batches that the engine formed: prompts of a prefix run, rows of a one-token run."""

    prefix: int = 0
    step: int = 0

    def see(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """A forward pre-hook that keeps the sizes."""
        rows, tokens = kwargs["input_ids"].shape
        if tokens == 1:
            self.step = max(self.step, rows)
        else:
            self.prefix = max(self.prefix, rows)

    def __str__(self) -> str:
        return f"{self.prefix} prefixes, {self.step} cells"


# -- (a) naive: plain torch hooks, full forwards -----------------------------------
def naive(case: Case, intervention: str, subsets: Sequence[Layers], batch: int) -> Done:
    """Every cell recomputed from its prompt, `batch` pairs at a time.

    transplant: one donor forward that captures every layer asked for, then one host forward for each set of layers.
    state: for each set of layers, donor prefix, host prefix, exchange of states, last token.
    """
    run = {"transplant": _naive_transplant, "state": _naive_state}[intervention]
    parts = []
    for start in range(0, len(case.hosts), batch):
        hosts, donors = (_ids(prompts[start : start + batch]) for prompts in (case.hosts, case.donors))
        targets = torch.tensor(case.targets[start : start + batch])
        parts.append(run(case, hosts, donors, targets, subsets))
    return Done(
        torch.cat([p.margin for p in parts]), torch.cat([p.spread for p in parts]), sum(p.tokens for p in parts)
    )


def _naive_transplant(case: Case, hosts, donors, targets, subsets: Sequence[Layers]) -> Done:
    seen: dict[int, torch.Tensor] = {}

    def keep(layer: int) -> Callable:
        def hook(module: Any, args: Any, output: torch.Tensor) -> None:
            seen[layer] = output[:, -1].clone()

        return hook

    def put(layer: int) -> Callable:
        def hook(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
            output[:, -1] = seen[layer]
            return output

        return hook

    read: list[tuple] = []
    with torch.no_grad():
        with _hooks(case, {layer: keep(layer) for layers in subsets for layer in layers}):
            case.plain(input_ids=donors, use_cache=False, logits_to_keep=1)
        for layers in subsets:
            with _hooks(case, {layer: put(layer) for layer in layers}):
                read.append(_read(case.plain(input_ids=hosts, use_cache=False, logits_to_keep=1).logits, targets))
    return _done(read, donors.numel() + hosts.numel() * len(subsets))


def _naive_state(case: Case, hosts, donors, targets, subsets: Sequence[Layers]) -> Done:
    read: list[tuple] = []
    with torch.no_grad():
        for layers in subsets:
            caches = []
            for ids in (donors, hosts):
                caches.append(case.plain(input_ids=ids[:, :-1], use_cache=True, logits_to_keep=1).cache)
            donor, host = caches
            for layer in layers:
                host.layers[layer].recurrent_states[0] = donor.layers[layer].recurrent_states[0].clone()
            read.append(_read(case.plain(input_ids=hosts[:, -1:], cache=host, use_cache=True).logits, targets))
    prefixes = donors[:, :-1].numel() + hosts[:, :-1].numel()
    return _done(read, (prefixes + len(hosts)) * len(subsets))


@contextmanager
def _hooks(case: Case, hooks: dict[int, Callable]) -> Iterator[None]:
    layers, attribute = case.plain.get_decoder().layers, case.model.family.mixer_attr("linear")
    handles = [getattr(layers[i], attribute).register_forward_hook(hook) for i, hook in hooks.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# -- (b) nnsight as its documentation shows it ---------------------------------------
def traces(case: Case, intervention: str, subsets: Sequence[Layers]) -> Done:
    """One prompt at a time: a transplant is one full-forward trace per cell (and one per donor), a state three."""
    run = {"transplant": _trace_transplant, "state": _trace_state}[intervention]
    margins, spreads, tokens = [], [], 0
    for host, donor, targets in zip(case.hosts, case.donors, case.targets):
        part = run(case.model, _ids([host]), _ids([donor]), torch.tensor([targets]), subsets)
        margins.append(part.margin)
        spreads.append(part.spread)
        tokens += part.tokens
    return Done(torch.cat(margins), torch.cat(spreads), tokens)


def _trace_transplant(model: Any, host, donor, targets, subsets: Sequence[Layers]) -> Done:
    layers, read = model.layers, []
    touched = sorted({layer for chosen in subsets for layer in chosen})
    with torch.no_grad(), model.lm.trace(_whole(donor), use_cache=False, logits_to_keep=1):
        seen = nnsight.save({})
        for i in touched:
            seen[i] = layers[i].mixer.output[:, -1].clone()
    for chosen in subsets:
        with torch.no_grad(), model.lm.trace(_whole(host), use_cache=False, logits_to_keep=1) as tracer:
            for i in chosen:
                layers[i].mixer.output[:, -1] = seen[i]
            logits = tracer.result.logits.save()
        read.append(_read(logits, targets))
    return _done(read, donor.numel() + host.numel() * len(subsets))


def _trace_state(model: Any, host, donor, targets, subsets: Sequence[Layers]) -> Done:
    read = []
    for chosen in subsets:
        with torch.no_grad(), model.lm.trace(_whole(donor[:, :-1]), use_cache=True, logits_to_keep=1) as tracer:
            theirs = tracer.result.cache.save()
        with torch.no_grad(), model.lm.trace(_whole(host[:, :-1]), use_cache=True, logits_to_keep=1) as tracer:
            cache = tracer.result.cache.save()
        for i in chosen:
            cache.layers[i].recurrent_states[0] = theirs.layers[i].recurrent_states[0].clone()
        last = {"input_ids": host[:, -1:], "attention_mask": torch.ones_like(host), "cache": cache, "use_cache": True}
        with torch.no_grad(), model.lm.trace(last) as tracer:
            logits = tracer.result.logits.save()
        read.append(_read(logits, targets))
    return _done(read, (2 * host.numel() - 1) * len(subsets))


def _whole(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


# -- (c) ours --------------------------------------------------------------------------
def ours(case: Case, intervention: str, subsets: Sequence[Layers], size: Batches | None = None) -> Done:
    """The engine, from nothing: prefixes, donors and cells. `size` is told the batches that it formed."""
    engine = Engine(case.model)
    hook = (size or Batches()).see
    watch = case.model.module.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        table = engine.run(case.cells(intervention, subsets))
    finally:
        watch.remove()
    margin, spread = (torch.tensor(table[c].to_numpy()).view(-1, len(subsets)) for c in ("margin", "spread"))
    return Done(margin, spread, engine.tokens)


# -- (d) the floor ----------------------------------------------------------------------
def floor(case: Case, intervention: str, subsets: Sequence[Layers], size: Batches) -> Done:
    """The tokens that the plan cannot do without, in the engine's batch sizes, on plain transformers; nothing is edited.

    Prefixes of hosts and donors; for transplants the donors' last token; and one token per cell from a copy of its
    host's cache. The margins are those of the intact hosts.
    """
    pairs, count, margins, spreads, tokens = max(1, size.prefix // 2), len(subsets), [], [], 0
    for start in range(0, len(case.hosts), pairs):
        hosts, donors = (_ids(prompts[start : start + pairs]) for prompts in (case.hosts, case.donors))
        both = torch.cat([hosts, donors])
        with torch.no_grad():
            cache = case.plain(input_ids=both[:, :-1], use_cache=True, logits_to_keep=1).cache
        saved = _tensors(cache)
        tokens += both[:, :-1].numel()
        if intervention == "transplant":
            for rows in torch.arange(len(hosts), len(both)).split(size.step):
                _step(case, both, rows, cache, saved)
            tokens += len(donors)
        targets = torch.tensor(case.targets[start : start + pairs])
        for rows in torch.arange(len(hosts)).repeat_interleave(count).split(size.step):
            margin, spread = _read(_step(case, both, rows, cache, saved), targets[rows])
            margins.append(margin)
            spreads.append(spread)
            tokens += len(rows)
    return Done(torch.cat(margins).view(-1, count), torch.cat(spreads).view(-1, count), tokens)


def _step(case: Case, ids: torch.Tensor, rows: torch.Tensor, cache: Any, saved: list[tuple]) -> torch.Tensor:
    """Logits of the last token of `rows`, from copies of their prefixes' caches."""
    for layer, name, tensor in saved:
        chosen = tensor.index_select(0, rows)
        if name in ("keys", "values"):
            setattr(layer, name, chosen)
        else:
            getattr(layer, name)[0] = chosen
    with torch.no_grad():
        return case.plain(input_ids=ids[rows, -1:], cache=cache, use_cache=True).logits


def _tensors(cache: Any) -> list[tuple[Any, str, torch.Tensor]]:
    """Every tensor of a prefix's cache with its place. They are not copied: a step replaces them, and runs on copies."""
    found = []
    for layer in cache.layers:
        if hasattr(layer, "recurrent_states"):
            found += [(layer, name, getattr(layer, name)[0]) for name in ("recurrent_states", "conv_states")]
        else:
            found += [(layer, name, getattr(layer, name)) for name in ("keys", "values")]
    return found


# -- shared ------------------------------------------------------------------------------
def _ids(prompts: Sequence[Any]) -> torch.Tensor:
    return torch.tensor([prompt.ids for prompt in prompts])


def _read(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    last = logits[:, -1].float()
    pair = last.gather(1, targets)
    return pair[:, 0] - pair[:, 1], last.std(-1)


def _done(read: list[tuple], tokens: int) -> Done:
    margins, spreads = zip(*read)
    return Done(torch.stack(margins, 1), torch.stack(spreads, 1), tokens)
