"""What a trained model can do and how, on dictionaries and texts of its own seed, with plain torch hooks.

These are the figures of the card and of the choice between seeds. They are not the evidence for a circuit: that is
`find`, which draws other dictionaries and knows nothing of this module.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from encode_address.models.layout import Layout
from encode_address.train.data import FORMATS, Asked, ask, text_batch
from encode_address.train.hooks import captured, replaced, silenced
from encode_address.train.words import SURFACES

SEED = 12_345
ROWS, CIRCUIT_ROWS, TEXTS = 512, 256, 192
PLACES = ("chat", ""), ("list", ""), ("rev", ""), ("chat", "far")  # where a circuit is measured


def _asked(form: str, surface: str, size: int, rows: int) -> tuple[Asked, torch.Tensor, torch.Tensor]:
    """A batch with one question, its prompts up to the answer, and the answers."""
    batch = ask(form, size, [surface], rows, torch.Generator().manual_seed(SEED))
    end = batch.answers[0] + 1
    return batch, batch.ids[:, :end], batch.ids[:, end]


@torch.no_grad()
def _said(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1].argmax(-1)


def _share(hits: torch.Tensor) -> float:
    return round(float(hits.float().mean()), 4)


def accuracy(model: nn.Module, form: str, surface: str, size: int = 8, rows: int = ROWS) -> float:
    """The share of fresh dictionaries of which the model gives the entry asked for, against the whole vocabulary."""
    _, ids, answers = _asked(form, surface, size, rows)
    return _share(_said(model, ids) == answers)


@torch.no_grad()
def perplexity(model: nn.Module, rows: int = TEXTS) -> float:
    """Of stories about topics and places that training kept apart."""
    ids = text_batch(rows, random.Random(SEED), test=True)
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return math.exp(float(cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())))


def redirected(
    model: nn.Module, layers: Sequence[int], form: str, surface: str, size: int = 8, rows: int = CIRCUIT_ROWS
) -> float:
    """The share of hosts that answer with the value of the donor's key, once the mixer outputs of `layers` at the last
    position are those of the donor: the same dictionary, asked for the next entry (paper section 3.7)."""
    batch, hosts, _ = _asked(form, surface, size, rows)
    each, other = torch.arange(rows), (batch.targets[:, 0] + 1) % size
    donors = hosts.clone()
    donors[:, batch.asked] = hosts[each, torch.tensor(batch.keys)[other]][:, None]
    last = torch.full((rows, 1), hosts.shape[1] - 1)
    said = _patched(model, layers, donors, hosts, last)
    return _share(said == hosts[each, torch.tensor(batch.values)[other]])


def carried(
    model: nn.Module, layers: Sequence[int], swap: str, form: str, surface: str, size: int = 8, rows: int = CIRCUIT_ROWS
) -> float:
    """The share of hosts that answer as if a swap in the dictionary were theirs, once the mixer outputs of `layers` at the
    swapped words are the donor's (paper section 3.5). "value": the host has the values of two entries exchanged, patched at
    the asked one; "key": the donor has their keys exchanged, patched at both."""
    batch, plain, answers = _asked(form, surface, size, rows)
    each, target = torch.arange(rows), batch.targets[:, 0]
    other = (target + 1) % size
    places = torch.tensor(batch.values if swap == "value" else batch.keys)
    exchanged = plain.clone()
    exchanged[each, places[target]], exchanged[each, places[other]] = (
        plain[each, places[other]],
        plain[each, places[target]],
    )
    if swap == "value":
        return _share(_patched(model, layers, plain, exchanged, places[target][:, None]) == answers)
    both = torch.stack([places[target], places[other]], 1)
    said = _patched(model, layers, exchanged, plain, both)
    return _share(said == plain[each, torch.tensor(batch.values)[other]])


def _patched(
    model: nn.Module, layers: Sequence[int], donors: torch.Tensor, hosts: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """What hosts answer with the donors' mixer outputs of `layers` at `positions`."""
    with captured(model, layers) as outputs:
        _said(model, donors)
    with replaced(model, outputs, positions):
        return _said(model, hosts)


def scores(model: nn.Module, rows: int = ROWS) -> dict[str, Any]:
    """Accuracy per format and surface (of plain variants, of 4 and 16 entries too), and perplexity."""
    table = {
        _name(form, surface): accuracy(model, form, surface, rows=rows) for form in FORMATS for surface in SURFACES
    }
    sizes = {f"{form}{size}": accuracy(model, form, "", size, rows) for form in FORMATS for size in (4, 16)}
    return {"accuracy": {**table, **sizes}, "perplexity": round(perplexity(model), 3)}


def circuit(model: nn.Module, rows: int = CIRCUIT_ROWS) -> dict[str, Any]:
    """Per block: transplant, accuracy without it, swaps carried, perplexity without it; per softmax layer and per set of blocks: the
    transplant at worst over formats; and the accuracy with the block that redirects most silent at the dictionary only,
    or from the question on only."""
    layout, intact = Layout.from_config(model.config), perplexity(model)
    out: dict[str, Any] = {}
    for block in layout.blocks:
        moved = {_name(*place): redirected(model, block.layers, *place, rows=rows) for place in PLACES}
        with silenced(model, {i: [slice(None)] for i in block.layers}):
            removed = {_name(*place): accuracy(model, *place, rows=rows) for place in PLACES}
            ratio = round(perplexity(model) / intact, 3)
        swaps = {
            swap: {_name(*place): carried(model, block.layers, swap, *place, rows=rows) for place in PLACES[:3]}
            for swap in ("value", "key")
        }
        out[block.name] = {"redirected": moved, "removed": removed, "carried": swaps, "perplexity_ratio": ratio}
    names = [block.name for block in layout.blocks]
    sets = {
        "+".join(some): layout.layers_of("+".join(some))
        for n in range(2, len(names) + 1)
        for some in combinations(names, n)
    }
    units = {**sets, **{f"L{i}": [i] for i in layout.softmax_layers}}
    least = {
        name: min(redirected(model, layers, *place, rows=rows // 2) for place in PLACES)
        for name, layers in units.items()
    }
    best = max(out, key=lambda name: min(out[name]["redirected"].values()))
    layers = layout.block(best).layers
    without: dict[str, dict[str, float]] = {"keys": {}, "query": {}}
    for form, surface in PLACES:
        question = _asked(form, surface, 8, 1)[0].question
        for part, where in (("keys", slice(0, question)), ("query", slice(question, None))):
            with silenced(model, {i: [where] for i in layers}):
                without[part][_name(form, surface)] = accuracy(model, form, surface, rows=rows)
    return {
        "blocks": out,
        "sets": {name: least[name] for name in sets},
        "softmax": {name: least[name] for name in least if name not in sets},
        "address": best,
        "accuracy_without_address_in": without,
    }


def _name(form: str, surface: str) -> str:
    return f"{form}8" + (f"/{surface}" if surface else "")
