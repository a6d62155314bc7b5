"""Reader search (paper section 3.3): which softmax head looks the value up?

The heads with most attention from the last position on the asked entry are removed one at a time. A head that
only attends is not a reader: it must lose gap when removed, and (see `rule`) move with the transplanted address.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from encode_address.experiments.base import Heads, swap_cell
from encode_address.metrics import attention, heads
from encode_address.run.cells import Cell
from encode_address.tasks import Swap

CANDIDATES = 8


def all_heads(model: Any) -> list[tuple[int, int]]:
    """Every softmax head of a model."""
    return [(layer, head) for layer in model.softmax_layers for head in range(model.heads)]


def first_heads(model: Any) -> list[tuple[int, int]]:
    """One head of every softmax layer."""
    return [(layer, 0) for layer in model.softmax_layers]


def candidates(intact: pd.DataFrame, count: int = CANDIDATES) -> list[tuple[int, int]]:
    """The heads with most mean attention on the asked entry of clean prompts, from `baseline` rows."""
    clean = intact[intact["form"] == "clean"]
    mass = {head: attention(clean, head, "target").mean() for head in heads(clean)}
    return sorted(sorted(mass, key=lambda head: -mass[head])[:count])


def top_per_layer(intact: pd.DataFrame) -> list[tuple[int, int]]:
    """The head with most attention on the asked entry in each softmax layer."""
    clean = intact[intact["form"] == "clean"]
    mass = {head: attention(clean, head, "target").mean() for head in heads(clean)}
    return [max((h for h in mass if h[0] == layer), key=lambda h: mass[h]) for layer in sorted({h[0] for h in mass})]


def cells(swaps: Sequence[Swap], which: Heads, labels: Mapping[str, Any] | None = None) -> list[Cell]:
    """Both forms of every pair with each of these heads removed, at all positions."""
    shared = {"experiment": "readers", **(labels or {})}
    return [
        swap_cell(
            "heads", swap, form, {**shared, "reader": f"L{layer}H{head}"}, layers=(layer,), head=head, mode="zero"
        )
        for layer, head in which
        for swap in swaps
        for form in ("clean", "corrupted")
    ]
