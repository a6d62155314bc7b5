"""Scaling: which readers each block guides, and on which way its address gets there.

    python figures/scaling.py RESULTS_DIR

One figure per variant. (a) For every transplanted set of blocks (rows) and every softmax layer's head (columns): attention from the
last token on the donor's entry minus that on the host's own, mean over pairs; the first row is the host without a patch; a frame
where the set guides the reader. (b) For guided readers with layers in between: the share of that shift that each arm keeps, with
95 % intervals over prompt pairs; the dashed line is the share that makes an arm a way.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from encode_address import figures, metrics
from encode_address.experiments.scaling import EARLIER, HELD, KEEPS, path_of, shift
from encode_address.experiments.scaling import table as guided_pairs
from encode_address.figures.bars import Series, Slot, draw_bars
from encode_address.models.layout import Block, Layout
from encode_address.stats import NOTHING

COLOURS = dict(zip((*HELD, *EARLIER), (figures.BLUE, figures.SKY, figures.DARK, figures.GREEN, figures.ORANGE)))
MAP = LinearSegmentedColormap.from_list("own to donor's", [figures.GREY, "white", figures.ORANGE])
ROW = 0.17


def draw(table: pd.DataFrame, verdict: dict[str, Any] | None, folder: Path) -> list[Path]:
    """Write one figure per variant that has scaling rows; returns the files."""
    return figures.draw_each("scaling", _figure, table, verdict, folder)


def _figure(rows: pd.DataFrame, view: dict[str, Any], variant: str) -> Figure | None:
    rows = metrics.select(rows, experiment="scaling")
    if rows.empty or "layout" not in view:
        return None
    layout = layout_of(view["layout"])
    pairs = guided_pairs(rows, layout)
    heads = metrics.heads(rows)
    sets = ["", *metrics.select(rows, arm="transplant")["block"].unique()]
    ways = [pair for pair in pairs.to_dict("records") if pair["kept"]]
    width = min(7.0, max(4.6 if ways else 3.4, 1.1 + 0.45 * len(heads), 1.0 + 0.75 * len(ways)))
    grid = ROW * len(sets)
    figure, (top, *rest) = figures.panels(
        width, 1 + bool(ways), max(grid, 1.1) if ways else grid, above=0.3, between=0.75, below=0.5 if ways else 0.42, right=0.6,
        left=0.75, sharex=False,
    )  # fmt: skip
    _matrix(top, rows, sets, heads, {(p["block"], p["reader"]) for p in pairs.to_dict("records")})
    name = f"{rows['model'].iloc[0]}, " if "model" in rows else ""
    top.set_xlabel(f"head of each softmax layer ({name}{variant}, n = {rows['pair'].nunique()} pairs)")
    if rest:
        _arms(rest[0], ways)
    for axes, letter in zip((top, *rest), "ab"):
        axes.annotate(
            f"({letter})", (0, 1), (-38, 4), xycoords="axes fraction", textcoords="offset points", weight="bold"
        )
    return figure


def _matrix(axes: Any, rows: pd.DataFrame, sets: list[str], heads: list[tuple[int, int]], guided: set) -> None:
    values = np.array([[shift(rows, name, head).mean() for head in heads] for name in sets])
    image = axes.imshow(values, cmap=MAP, vmin=-1, vmax=1, aspect="auto")
    for (y, x), value in np.ndenumerate(values):
        axes.text(x, y, f"{value:+.2f}", ha="center", va="center", size=6)
        if (sets[y], f"L{heads[x][0]}H{heads[x][1]}") in guided:
            axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, edgecolor=figures.DARK, linewidth=1.2, clip_on=False, zorder=3))  # fmt: skip
    axes.set_yticks(range(len(sets)), [name or "host" for name in sets])
    axes.set_xticks(range(len(heads)), [f"L{layer}H{head}" for layer, head in heads])
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.annotate(
        "attention: the donor's entry minus the host's own", (0, 1), (0, 4), xycoords="axes fraction",
        textcoords="offset points", size=6.5,
    )  # fmt: skip
    bar = axes.figure.colorbar(image, ax=axes, ticks=[-1, 0, 1], fraction=0.05, pad=0.03)
    bar.outline.set_visible(False)


def _arms(axes: Any, ways: list[dict[str, Any]]) -> None:
    places = [
        Slot(way["reader"], i, i, (f"{way['block']} → {way['reader']}\n{_wrapped(path_of(way['kept']))}", ""))
        for i, way in enumerate(ways)
    ]
    series = [Series(arm, colour, [way["kept"].get(arm, NOTHING) for way in ways]) for arm, colour in COLOURS.items()]
    draw_bars(axes, places, series, "share of the shift kept", legend_at=1)
    axes.axhline(KEEPS, color=figures.DARK, linestyle=(0, (3, 3)), linewidth=0.8, zorder=1.5)


def _wrapped(way: str) -> str:
    return way.replace("via attention ", "via attention\n")


def layout_of(facts: dict[str, Any]) -> Layout:
    """The layout that a verdict states."""
    last = max([*facts["softmax"], *(layer for b in facts["blocks"] for layer in b["layers"])])
    kinds = tuple("softmax" if layer in facts["softmax"] else "linear" for layer in range(last + 1))
    blocks = tuple(Block(b["name"], tuple(b["layers"]), b.get("reader")) for b in facts["blocks"])
    return Layout(kinds, blocks)


if __name__ == "__main__":
    figures.main(draw)
