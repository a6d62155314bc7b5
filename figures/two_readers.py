"""Two readers: what each block of an Address moves by itself, and what all of them move together.

    python figures/two_readers.py RESULTS_DIR

One figure per model whose Address has several blocks, or readers in several layers, of the table's first variant: hosts as they are,
with each block of the Address from the donor at the last token, and with all of them; the share that answers with the donor's
entry, and the attention on that entry of one reader head per layer. Bars have 95 % intervals over prompt pairs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from encode_address import figures, metrics
from encode_address.figures import gathered
from encode_address.figures.bars import Series, Slot, draw_bars
from encode_address.stats import NOTHING, Estimate, estimate

COLOURS = (figures.ORANGE, figures.SKY, figures.BLUE, figures.GREY, figures.DARK)


def draw(table: pd.DataFrame, verdict: dict[str, Any] | None, folder: Path) -> list[Path]:
    """Write the figure; [] where the Address is one block and all readers are in one layer, or its rows are missing."""
    return figures.draw_first("two-readers", _figure, table, verdict, folder)


def _figure(rows: pd.DataFrame, view: dict[str, Any], variant: str) -> Figure | None:
    address, heads = view.get("address") or [], [figures.head_of(name) for name in view.get("readers") or []]
    units = [*address, "+".join(address)] if len(address) > 1 else address
    host = {"experiment": "transplant", "intervention": "none", "position": "final"}
    moved = {**host, "intervention": "transplant", "donor": "same-dictionary"}
    rows = gathered.of_one_draw(rows, host, *({**moved, "block": unit} for unit in units))
    watched = metrics.heads(metrics.select(rows, **moved))
    chosen: dict[int, tuple[int, int]] = {}
    for head in heads:
        if head in watched:
            chosen.setdefault(head[0], head)
    if not units or not chosen or (len(units) < 2 and len(chosen) < 2):
        return None
    parts = [metrics.select(rows, **host), *(metrics.select(rows, **moved, block=unit) for unit in units)]
    if not all(map(len, parts)):
        return None
    labels = ["host", *units]
    if "+" in units[-1]:
        labels[-1] = units[-1] if len(units[-1]) < 9 else "all of\nthem"
    slots = [Slot(label, i, 0, (label, "")) for i, label in enumerate(labels)]
    series = [Series("redirected", figures.GREEN, [_redirected(part) for part in parts])]
    for i, (_, head) in enumerate(sorted(chosen.items())):
        values = [_attention(part, head) for part in parts]
        series.append(Series(f"L{head[0]}H{head[1]}", COLOURS[i % len(COLOURS)], values))
    width = min(7.0, max(3.4, 0.6 + 0.14 * len(slots) * len(series), 0.9 + 0.55 * len(series)))
    figure, (axes,) = figures.panels(width, 1, 1.3, above=0.32, between=0.4, below=0.6, right=0.1, left=0.5)
    draw_bars(axes, slots, series, "share; attention on\ndonor's entry", legend_at=6)
    name = f"{rows['model'].iloc[0]}, " if "model" in rows else ""
    axes.set_xlabel(f"transplanted at the last token\n({name}{variant}, n = {parts[0]['pair'].nunique()} pairs)")
    return figure


def _redirected(rows: pd.DataFrame) -> Estimate:
    rows = gathered.once(rows)
    return estimate(rows["redirected"], rows["pair"])


def _attention(rows: pd.DataFrame, head: tuple[int, int]) -> Estimate:
    if head not in metrics.heads(rows):
        return NOTHING
    rows = gathered.once(rows, head)
    return estimate(metrics.attention(rows, head, "donor_index"), rows["pair"])


if __name__ == "__main__":
    figures.main(draw, gathered.gathered)
