"""Blocks replaced by a linear map of each token: what is left of retrieval and of text.

    python figures/encode_linear.py RESULTS_DIR

One figure per variant. (a) Accuracy when the decoder layers of a block are replaced by the map, by a map fitted on text alone, by one
fitted on shuffled pairs, or by their mean write. (b) How many times as perplexing text becomes (log scale). Bars have 95 % intervals
over prompt pairs, or over text chunks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from encode_address import figures, metrics
from encode_address.experiments.encode_linear import LINEAR, MEAN, SHUFFLED, TEXT_ONLY, kept, perplexity_ratio
from encode_address.figures.bars import Series, Slot, draw_bars, draw_landmarks

COLOURS = {LINEAR: figures.BLUE, TEXT_ONLY: figures.SKY, SHUFFLED: figures.ORANGE, MEAN: figures.GREY}


def draw(table: pd.DataFrame, verdict: dict[str, Any] | None, folder: Path) -> list[Path]:
    """Write one figure per variant that has rows of `encode-linear`; returns the files."""
    text = metrics.select(table, experiment="encode-linear-text")  # of no variant: all of them share it

    def make(rows: pd.DataFrame, view: dict[str, Any], variant: str) -> Figure | None:
        return _figure(rows, text, view, variant)

    return figures.draw_each("encode-linear", make, table, verdict, folder)


def _figure(rows: pd.DataFrame, text: pd.DataFrame, view: dict[str, Any], variant: str) -> Figure | None:
    own = metrics.select(rows, experiment="encode-linear", intervention="replace")
    if own.empty:
        return None
    blocks = sorted(own["block"].unique(), key=lambda name: int(name[1:]))
    slots = [Slot(name, i, i, (name, "")) for i, name in enumerate(blocks)]
    width = min(7.0, max(3.4, 1.0 + 0.5 * len(blocks)))
    figure, (top, bottom) = figures.panels(width, 2, 1.1, above=0.36, between=0.55, below=0.5, right=0.2, sharex=False)
    arms = COLOURS.items()
    series = [Series(arm, colour, [kept(rows, name, arm, "layers") for name in blocks]) for arm, colour in arms]
    draw_bars(top, slots, series, "accuracy", legend_at=12)
    series = [
        Series(arm, colour, [perplexity_ratio(text, name, arm, "layers") for name in blocks]) for arm, colour in arms
    ]
    draw_bars(bottom, slots, series, "perplexity ratio", legend_at=3)
    if bottom.get_legend() is not None:
        bottom.get_legend().remove()
    bottom.set_yscale("log")
    bottom.set_ylim(0.8, None)
    draw_landmarks([top, bottom], slots, view)
    bottom.axhline(1, color=figures.DARK, linestyle=(0, (3, 3)), linewidth=0.8)
    model = f"{rows['model'].iloc[0]}, " if "model" in rows else ""
    bottom.set_xlabel(f"replaced block ({model}{variant}, n = {own['pair'].nunique()} pairs)")
    for axes, letter in ((top, "a"), (bottom, "b")):
        axes.text(-0.02, 1.04, f"({letter})", transform=axes.transAxes, ha="right", va="bottom", weight="bold")
    return figure


if __name__ == "__main__":
    figures.main(draw)
