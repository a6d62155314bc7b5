"""Removal (paper section 3.2): a block's mixer outputs := 0, or := their mean, at every position.

MLPs, norms and softmax layers are untouched and recomputed. Zeroing the first layer wrecks any model, so removal
alone proves nothing about retrieval; the text loss stands beside every row for that reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from encode_address.experiments.base import Heads, run_cells, swap_cell
from encode_address.models.layout import Layout
from encode_address.run.cells import Cell
from encode_address.tasks import Prompt, Swap, Text, dictionary

Unit = tuple[str, tuple[int, ...]]


def blocks(layout: Layout) -> list[Unit]:
    """Every block, by name."""
    return [(block.name, block.layers) for block in layout.blocks]


def single_layers(layout: Layout) -> list[Unit]:
    """Every linear layer, as "L4"."""
    return [(f"L{layer}", (layer,)) for layer in layout.linear_layers]


def cells(
    swaps: Sequence[Swap],
    units: Sequence[Unit],
    mode: str = "zero",
    watch: Heads = (),
    labels: Mapping[str, Any] | None = None,
) -> list[Cell]:
    """Both forms of every pair with each unit removed; `mode` is "zero" or "mean"."""
    shared = {"experiment": "removal", **(labels or {})}
    return [
        swap_cell("remove", swap, form, {**shared, "block": name}, layers=layers, mode=mode, watch=watch)
        for name, layers in units
        for swap in swaps
        for form in ("clean", "corrupted")
    ]


def text_cells(chunks: Sequence[Prompt], units: Sequence[Unit], labels: Mapping[str, Any] | None = None) -> list[Cell]:
    """The loss on text chunks, intact and with each unit removed, by zero and by mean."""
    shared = {"experiment": "text", "position": "all", **(labels or {})}
    out = [Cell("none", chunk, text=True, labels={**shared, "pair": i}) for i, chunk in enumerate(chunks)]
    for mode in ("zero", "mean"):
        for name, layers in units:
            for i, chunk in enumerate(chunks):
                given = {**shared, "block": name, "pair": i}
                out.append(Cell("remove", chunk, layers=layers, mode=mode, text=True, labels=given))
    return out


def run(
    model: Any, variant: str = "chat8", n: int = 100, seed: int = 0, mode: str = "zero", text: Text | None = None
) -> pd.DataFrame:
    """The table of every block's removal on `n` pairs of `variant`; mode "mean" needs a `text`."""
    swaps = dictionary(model, variant, text).swaps(n, seed)
    return run_cells(model, cells(swaps, blocks(model.layout), mode, labels={"variant": variant}), text)
