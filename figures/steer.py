"""Steering: how often an edit redirects the answer, and what it costs.

    python figures/steer.py RESULTS_DIR

One figure per variant. (a) Share of hosts that answer with the donor's entry when the Address's outputs at the last token, or its
states before it, are the donor's, or when noise of that size is added. (b) How many times as perplexing the text is that follows the
redirected answer, and other text that gets the same outputs in its middle, with the edit as without it; the dashed line is 1. Bars have
95 % intervals over prompt pairs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from encode_address import figures, metrics
from encode_address.experiments.steer import perplexity_ratio, redirected
from encode_address.figures.bars import Series, Slot, draw_bars

ARMS = {"output": "its outputs", "state": "its states", "random": "noise"}
SITES = {"continuation": "text after the\nredirected answer", "unrelated": "unrelated\ntext"}
COLOURS = {"output": figures.BLUE, "random": figures.GREY}


def draw(table: pd.DataFrame, verdict: dict[str, Any] | None, folder: Path) -> list[Path]:
    """Write one figure per variant that has rows of `steer`; returns the files."""
    return figures.draw_each("steer", _figure, table, verdict, folder)


def _figure(rows: pd.DataFrame, _view: dict[str, Any], variant: str) -> Figure | None:
    rows = metrics.select(rows, experiment="steer")
    if rows.empty:
        return None
    figure, (top, bottom) = figures.panels(3.4, 2, 1.0, above=0.3, between=0.72, below=0.42, right=0.2, sharex=False)
    name = f"{rows['model'].iloc[0]}, " if "model" in rows else ""
    block = rows["block"].iloc[0]
    arms = [Slot(arm, i, i, (label, "")) for i, (arm, label) in enumerate(ARMS.items())]
    draw_bars(top, arms, [Series("answers with the donor's entry", figures.BLUE, [redirected(rows, a) for a in ARMS])], "redirected", 1)  # fmt: skip
    top.set_xlabel(f"edited at {block} ({name}{variant}, n = {rows['pair'].nunique()} pairs)")
    sites = [Slot(site, i, i, (label, "")) for i, (site, label) in enumerate(SITES.items())]
    series = [Series(ARMS[arm], colour, [perplexity_ratio(rows, site, arm) for site in SITES]) for arm, colour in COLOURS.items()]  # fmt: skip
    draw_bars(bottom, sites, series, "perplexity ratio", 1)
    bottom.axhline(1, color=figures.DARK, linestyle=(0, (3, 3)), linewidth=0.8)
    for axes, letter in ((top, "a"), (bottom, "b")):
        axes.text(-0.02, 1.04, f"({letter})", transform=axes.transAxes, ha="right", va="bottom", weight="bold")
    return figure


if __name__ == "__main__":
    figures.main(draw)
