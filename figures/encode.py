"""Encode swaps, block by block: whose outputs at the swapped tokens carry the swap.

    python figures/encode.py RESULTS_DIR

One figure per variant: the share of hosts that answer as if the value swap, or the key swap, were their own, once a block's
outputs (or the token embeddings, the ceiling) at the swapped tokens are the donor's. Bars have 95 % intervals over items.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from encode_address import figures, metrics
from encode_address.experiments.encode import carried
from encode_address.figures.bars import Series, Slot, draw_bars, draw_landmarks, slots_of

COLOURS = {"value": figures.BLUE, "key": figures.ORANGE}


def draw(table: pd.DataFrame, verdict: dict[str, Any] | None, folder: Path) -> list[Path]:
    """Write one figure per variant that has encode rows of its own experiment; returns the files."""
    own = (verdict or {}).get("experiment", "encode") == "encode"
    return figures.draw_each("encode", _figure, table, verdict, folder) if own else []


def _figure(rows: pd.DataFrame, view: dict[str, Any], variant: str):
    patched = metrics.select(rows, experiment="encode", intervention="transplant")
    if patched.empty or "transplant" in set(rows["experiment"]):
        return None
    blocks = [slot for slot in slots_of(patched, patched, view) if "+" not in slot.name]
    slots = [*blocks, Slot("embed", len(blocks) + 0.3, -1, ("embeddings", ""))]
    width = min(7.0, max(3.4, 1.0 + 0.27 * (slots[-1].x + 1)))
    figure, (axes,) = figures.panels(width, 1, 1.3, above=0.36, between=0.4, below=0.4, right=0.2)
    series = [
        Series(f"{swap} swap", colour, [carried(rows, slot.name, swap) for slot in slots])
        for swap, colour in COLOURS.items()
    ]
    draw_bars(axes, slots, series, "swap carried", legend_at=12)
    draw_landmarks([axes], blocks, view)
    name = f"{rows['model'].iloc[0]}, " if "model" in rows else ""
    axes.set_xlabel(f"patched at the swapped tokens ({name}{variant}, n = {patched['pair'].nunique()})")
    return figure


if __name__ == "__main__":
    figures.main(draw)
