"""Rows of probes under arms: batches, the way each arm is run, and what is said of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import torch

from encode_address.attention import forward
from encode_address.attention.arms import Arm
from encode_address.errors import RunError
from encode_address.tasks.probes import Probe, by_length, elsewhere, reach

BOUNDARIES = ("split", "hf")
NEW_TOKENS = 40  # of greedy decoding
LATE = 8  # queries before the end whose choice of heads is compared from one to the next


def _call(engine: Any, function: Callable[..., Any], *given: Any) -> Any:
    """Run a function of `forward` where the model is."""
    return engine.ask(engine.model, function, given)


def window_of(model: Any) -> int | None:
    """How many keys up to its own a query of the model sees, where its attention is a sliding window; else None."""
    if "sliding_attention" not in (getattr(model.config, "layer_types", None) or ()):
        return None
    return getattr(model.config, "attention_window_size", None) or getattr(model.config, "sliding_window", None)


def continues(model: Any) -> bool:
    """Whether a prefill can be shared: the family goes on exactly from its cache, which holds all its states."""
    return model.family.continues and not model.family.held


def ops_of(model: Any) -> dict[int, str]:
    """The attention call of every softmax layer."""
    return {layer: model.attention_op(layer) for layer in model.softmax_layers}


def tokens_of(model: Any, probes: Sequence[Probe], arms: Sequence[Arm], boundary: str = "split") -> int:
    """The tokens that `measured` forwards."""
    total = 0
    for own in _kinds(model, arms):
        for probe in probes if own else ():
            prompt = probe.repeated if own[0].twice else probe.prompt
            if prompt is None:
                continue
            length, m = len(prompt), len(probe.answer)
            if own[0].together:
                total += sum((length + m - 1) * (2 if _swaps(arm) else 1) for arm in own)
            else:
                last = boundary == "split"  # a step of the last token for every arm, or one prefill with it
                total += length - last + (m - 1 + last) * len(own)
    return total


def measured(
    engine: Any, probes: Sequence[Probe], arms: Sequence[Arm], boundary: str = "split"
) -> list[dict[str, Any]]:
    """A row per arm and probe: `right` (every token of the answer is the most likely one), `recall` (the share that are), `log_prob` (their
    mean, nats), `rank` of the first, `choice_right` among the prompt's choices where it has some, `reach` (see `tasks.probes.reach`).

    Greedy decoding says the answer exactly where `right` holds: each token is the most likely one after those before it.
    """
    rows: list[dict[str, Any]] = []
    for own in _kinds(engine.model, arms):
        some = [p for p in probes if p.repeated] if own[0].twice else list(probes)
        some = [replace(p, prompt=p.repeated) for p in some] if own[0].twice else some
        for group in by_length(some):
            size = max(1, engine.limits.tokens // (2 * len(group[0].prompt)))
            partners = group[1:] + group[:1]
            for start in range(0, len(group), size):
                batch = slice(start, start + size)
                rows += _batch(engine, group[batch], partners[batch], own, boundary, len(group) > 1)
    return rows


def _kinds(model: Any, arms: Sequence[Arm]) -> Iterator[list[Arm]]:
    """Arms that run the same way: those that share a prefill, or (together) each by itself."""
    kinds: dict[Any, list[Arm]] = {}
    for arm in arms:
        alone = arm.together or not continues(model)
        arm = replace(arm, together=alone)
        kinds.setdefault((arm.twice, alone, None if alone else arm.prefill), []).append(arm)
    yield from kinds.values()


def _swaps(arm: Arm) -> bool:
    return any(edit and edit.linear == "swap" for edit in (arm.prefill, arm.generation))


def _batch(
    engine: Any, probes: list[Probe], partners: list[Probe], arms: list[Arm], boundary: str, paired: bool
) -> Iterator[dict[str, Any]]:
    model, device = engine.model, engine.model.device
    ids = torch.tensor([probe.prompt.ids for probe in probes], device=device)
    targets = torch.tensor([probe.answer for probe in probes], device=device)
    choices = _even([probe.prompt.choices or (probe.answer[0],) for probe in probes]).to(device)
    columns = {span: _columns(probes, span).to(device) for arm in arms for span in arm.spans}
    first = ids.shape[1] - (boundary == "split")
    asked = (ids, targets, choices, first, ops_of(model))
    given = (columns, torch.tensor([probe.pair for probe in probes], device=device))
    layers = model.softmax_layers
    if not arms[0].together:
        before = arms[0].prefill.plain(layers) if arms[0].prefill else {}
        later = [arm.generation.plain(layers) if arm.generation else {} for arm in arms]
        engine.count(ids[:, :first].numel())
        engine.count(len(later) * (ids.shape[1] - first + targets.shape[1] - 1) * len(ids))
        said = _call(engine, forward.stepped, *asked, {forward.PREFILL: before, forward.GENERATION: later}, *given)
        for arm, one in zip(arms, said):
            yield from _rows(model, arm, probes, one)
        return
    for arm in arms:
        if _swaps(arm) and not paired:
            continue  # no other prompt of this length
        lent = torch.tensor([partner.prompt.ids for partner in partners], device=device) if _swaps(arm) else None
        edits = _edits(arm, layers)
        engine.count((ids.numel() + targets[:, :-1].numel()) * (1 if lent is None else 2))
        yield from _rows(model, arm, probes, _call(engine, forward.whole, *asked, edits, *given, lent))


def _rows(model: Any, arm: Arm, probes: Sequence[Probe], said: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if not bool(said["finite"].all()):
        raise RunError(f"NaN or infinite logits: {arm.columns} ({model.name}); try --dtype float32")
    window = window_of(model)
    predicted, log_prob = said["predicted"].tolist(), said["log_prob"].tolist()
    ranks, choices = said["rank"].tolist(), said["choices"].tolist()
    for i, probe in enumerate(probes):
        hits = [a == b for a, b in zip(predicted[i], probe.answer)]
        row = {"pair": probe.pair, **probe.labels, **arm.columns}
        row |= {"tokens": len(probe.prompt), "answer_tokens": len(probe.answer)}
        row |= {"right": all(hits), "recall": sum(hits) / len(hits), "log_prob": sum(log_prob[i]) / len(hits)}
        row |= {"rank": ranks[i][0], "said": model.tokenizer.decode(predicted[i])}
        row["reach"] = reach(probe.prompt, window) if "needle" in probe.prompt.spans else ""
        if known := probe.prompt.choices:
            among = choices[i][: len(known)]
            row["choice_right"] = known[among.index(max(among))] == probe.answer[0]
        yield row


def _columns(probes: Sequence[Probe], span: str) -> torch.Tensor:
    """(n, positions): true where a span lies, the answer's tokens included as positions."""
    width = len(probes[0].prompt) + len(probes[0].answer)
    out = torch.zeros(len(probes), width, dtype=torch.bool)
    for row, probe in enumerate(probes):
        if span.startswith("elsewhere"):
            places = elsewhere(probe.prompt, int(span.split()[1]), probe.pair)
        else:
            places = [p for p in probe.prompt.span(span) if p not in probe.prompt.final]
        out[row, list(places)] = True
    return out


def _even(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """(n, m); short rows are filled with token 0."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])


def decoded_rows(
    engine: Any, probes: Sequence[Probe], arms: Sequence[Arm], boundary: str = "split", count: int = NEW_TOKENS
) -> list[dict[str, Any]]:
    """A row per arm and probe: what greedy decoding of `count` tokens says, whether it `contains` the answer (lower case, without
    punctuation), and `word_recall`, the share of the answer's words that it has."""
    model, rows = engine.model, []
    for group in by_length(probes):
        size = max(1, engine.limits.tokens // len(group[0].prompt))
        for start in range(0, len(group), size):
            batch = group[start : start + size]
            ids = torch.tensor([probe.prompt.ids for probe in batch], device=model.device)
            first, numbers = ids.shape[1] - (boundary == "split"), torch.tensor([probe.pair for probe in batch])
            for arm in arms:
                edits = _edits(arm, model.softmax_layers)
                asked = (ids, count, first, ops_of(model), edits, {}, numbers.to(model.device), continues(model))
                engine.count(
                    ids.numel() + count * len(ids)
                    if continues(model)
                    else count * (ids.numel() + len(ids) * count // 2)
                )
                for probe, tokens in zip(batch, _call(engine, forward.generated, *asked).tolist()):
                    said = model.tokenizer.decode(tokens, skip_special_tokens=True)
                    row = {
                        "pair": probe.pair,
                        **probe.labels,
                        **arm.columns,
                        "said": said,
                        **containment(said, model.tokenizer.decode(probe.answer)),
                    }
                    rows.append(row | {"reach": reach(probe.prompt, window_of(model))})
    return rows


def containment(said: str, needle: str) -> dict[str, Any]:
    """Whether a text contains another, and the share of its distinct words that it has; in lower case, without punctuation."""
    have, want = (re.sub(r"[^\w\s]", "", text.lower()).split() for text in (said, needle))
    contains = bool(want) and f" {' '.join(want)} " in f" {' '.join(have)} "
    return {"contains": contains, "word_recall": len({*want} & {*have}) / max(1, len({*want}))}


def _edits(arm: Arm, layers: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Both phases' edits as a trace takes them."""
    return {phase: edit.plain(layers) for phase, edit in zip(forward.PHASES, (arm.prefill, arm.generation)) if edit}


def head_rows(engine: Any, probes: Sequence[Probe]) -> list[dict[str, Any]]:
    """A row per head and probe, unedited: `sharpness`, needle `mass` and `retrieval` score of the queries that say the answer
    (`forward.ranked`)."""
    return [row for batch, seen in _ranked(engine, probes) for row in _heads(engine.model, batch, seen)]


def _heads(model: Any, probes: Sequence[Probe], seen: dict[str, Any]) -> Iterator[dict[str, Any]]:
    values = {name: seen[name].tolist() for name in ("sharpness", "mass", "retrieval")}
    for i, probe in enumerate(probes):
        for place, layer in enumerate(model.softmax_layers):
            for head in range(model.heads):
                own = {name: value[i][place][head] for name, value in values.items()}
                yield {"pair": probe.pair, "layer": layer, "head": head, "right": bool(seen["right"][i]), **own}


def overlap_rows(engine: Any, probes: Sequence[Probe], ks: Sequence[int]) -> list[dict[str, Any]]:
    """A row per layer, k and probe: `jaccard`, the mean overlap of the k sharpest heads of one query with those of the next, over
    the last queries; `any_two` of any two of them, and `chance`, that of random choices."""
    rows = []
    for batch, seen in _ranked(engine, probes):
        late = seen["late"]  # (n, layers, heads, queries)
        for k in ks:
            order = late.argsort(dim=2, descending=True, stable=True)[:, :, :k].sort(2).values.tolist()
            for i, probe in enumerate(batch):
                for place, layer in enumerate(engine.model.softmax_layers):
                    sets = [set(one) for one in zip(*order[i][place])]
                    next_, every = list(pairwise(sets)), list(combinations(sets, 2))
                    mean = {
                        name: sum(map(_jaccard, two)) / len(two)
                        for name, two in (("jaccard", next_), ("any_two", every))
                    }
                    expected = chance_overlap(k, engine.model.heads)
                    rows.append({"pair": probe.pair, "layer": layer, "k": k, **mean, "overlap_chance": expected})
    return rows


def chance_overlap(k: int, heads: int) -> float:
    """The expected Jaccard overlap of two random sets of k of `heads`."""
    from scipy.stats import hypergeom

    shared = range(max(0, 2 * k - heads), k + 1)
    return float(sum(hypergeom.pmf(s, heads, k, k) * s / (2 * k - s) for s in shared))


def _jaccard(sets: tuple[set, set]) -> float:
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def _ranked(engine: Any, probes: Sequence[Probe]) -> Iterator[tuple[list[Probe], dict[str, Any]]]:
    model, ops = engine.model, ops_of(engine.model)
    for group in by_length(probes):
        size = max(1, engine.limits.tokens // len(group[0].prompt))
        for start in range(0, len(group), size):
            batch = group[start : start + size]
            ids = torch.tensor([probe.prompt.ids for probe in batch], device=model.device)
            targets = torch.tensor([probe.answer for probe in batch], device=model.device)
            needle = _columns(batch, "needle")[:, : ids.shape[1]].to(model.device)
            engine.count(ids.numel() + targets[:, :-1].numel())
            yield batch, _call(engine, forward.ranked, ids, targets, ops, needle, LATE)
