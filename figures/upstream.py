"""Upstream: what the Address is worth when its donor lacked another block.

    python figures/upstream.py RESULTS_DIR

One figure per variant: the share of intact hosts that the Address of such donors redirects, and what those donors answer
themselves. Bars have 95 % intervals over prompt pairs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from encode_address import figures, metrics
from encode_address.experiments.upstream import redirected
from encode_address.figures.bars import Series, Slot, draw_bars
from encode_address.stats import estimate


def draw(table: pd.DataFrame, verdict: dict[str, Any] | None, folder: Path) -> list[Path]:
    """Write one figure per variant that has upstream rows; returns the files."""
    return figures.draw_each("upstream", _figure, table, verdict, folder)


def _figure(rows: pd.DataFrame, view: dict[str, Any], variant: str):
    rows = metrics.select(rows, experiment="upstream")
    if rows.empty:
        return None
    names = list(dict.fromkeys(rows["without"]))
    slots = [
        Slot(name, i, i, (name.replace("all before", "all\nbefore") or "none", "")) for i, name in enumerate(names)
    ]
    width = min(7.0, max(3.4, 1.0 + 0.3 * (len(slots) + 1)))
    figure, (axes,) = figures.panels(width, 1, 1.3, above=0.36, between=0.4, below=0.55, right=0.2)
    own = [metrics.select(rows, donor="itself", without=name) for name in names]
    series = [
        Series("host, redirected", figures.GREEN, [redirected(rows, name) for name in names]),
        Series("donor, correct", figures.GREY, [estimate(some["correct"], some["pair"]) for some in own]),
    ]
    draw_bars(axes, slots, series, "share of pairs", legend_at=1)
    block = rows["block"].iloc[0]
    axes.set_xlabel(
        f"removed in the donor of {block} ({rows['model'].iloc[0]}, {variant}, n = {rows['pair'].nunique()})"
    )
    return figure


if __name__ == "__main__":
    figures.main(draw)
