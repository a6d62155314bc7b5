"""Removal, block by block and layer by layer: what retrieval needs, and what text does.

    python figures/removal.py RESULTS_DIR

One figure per variant. (a) Accuracy after a block's outputs are set to zero, to their mean over a text, or to those of
another prompt; a dashed line is the intact model. (b) The same, zero, at the dictionary's, the question's or the last
token only. (c) Each layer alone, linear or softmax: zero. (d) Perplexity on text without each block, over the intact one.
Bars have 95 % intervals over prompt pairs.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd

from encode_address import figures, metrics
from encode_address.figures.bars import Series, Slot, draw_bars, draw_landmarks, slots_of
from encode_address.stats import NOTHING, Estimate, estimate

WAYS = {
    "zero": ({"mode": "zero"}, figures.BLUE),
    "mean": ({"mode": "mean"}, figures.SKY),
    "resampled": ({"donor": "resampled"}, figures.ORANGE),
}
PLACES = {"dictionary": figures.BLUE, "question": figures.SKY, "final": figures.ORANGE}


def draw(table: pd.DataFrame, verdict: dict[str, Any] | None, folder: Path) -> list[Path]:
    """Write one figure per variant that has removals at several places; returns the files."""
    text = metrics.select(figures.shown(table), experiment="text")
    return figures.draw_each(
        "removal", lambda rows, view, variant: _figure(rows, text, view, variant), table, verdict, folder
    )


def _figure(rows: pd.DataFrame, text: pd.DataFrame, view: dict[str, Any], variant: str):
    removed = metrics.select(rows, experiment="removal")
    zero = metrics.select(removed, mode="zero")
    if not len(zero) or not set(PLACES) <= set(zero["position"]):
        return None
    intact = metrics.accuracy(metrics.select(rows, experiment="baseline")).value
    blocks, layers = slots_of(zero, zero, view), _layers(zero)
    width = min(7.0, max(3.4, 1.0 + 0.27 * max(len(blocks) + 1, len(layers))))
    panels = 4 if len(text) else 3
    figure, axes = figures.panels(width, panels, 0.95, above=0.36, between=0.5, below=0.4, right=0.36, sharex=False)
    everywhere = metrics.select(removed, position="all")
    ways = [
        Series(
            name,
            colour,
            [_accuracy(metrics.select(everywhere, **how), slot) for slot in blocks],
            intact if name == "zero" else None,
        )
        for name, (how, colour) in WAYS.items()
    ]
    places = [
        Series(f"{place} only", colour, [_accuracy(metrics.select(zero, position=place), slot) for slot in blocks])
        for place, colour in PLACES.items()
    ]
    alone = [_accuracy(metrics.select(zero, position="all"), slot) for slot in layers]
    draw_bars(axes[0], blocks, ways, "accuracy", legend_at=12)
    draw_landmarks(axes[:1], blocks, {**view, "readers": []})
    draw_bars(axes[1], blocks, places, "accuracy", legend_at=1)
    draw_bars(axes[2], layers, [Series("single layers", figures.BLUE, alone, intact)], "accuracy", legend_at=1)
    if len(text):
        draw_bars(
            axes[3],
            blocks,
            [Series("on text", figures.GREEN, _ratios(text, blocks))],
            "ppl ÷ intact",
            legend_at=1,
        )
        axes[3].set_yscale("log")
        axes[3].set_ylim(0.9, None)
    axes[-1].set_xlabel(f"{rows['model'].iloc[0]}, {variant}, n = {zero['pair'].nunique()} pairs")
    for one, letter in zip(axes, "abcd"):
        one.text(-0.02, 1.04, f"({letter})", transform=one.transAxes, ha="right", va="bottom", weight="bold")
    return figure


def _layers(zero: pd.DataFrame) -> list[Slot]:
    names = zero["block"].dropna().unique()
    single = sorted(int(name[1:]) for name in names if name.startswith("L") and name[1:].isdigit())
    return [Slot(f"L{layer}", i, layer, (f"L{layer}", "")) for i, layer in enumerate(single)]


def _accuracy(rows: pd.DataFrame, slot: Slot) -> Estimate:
    rows = metrics.select(rows, block=slot.name)
    return metrics.accuracy(rows) if len(rows) else NOTHING


def _ratios(text: pd.DataFrame, blocks: list[Slot]) -> list[Estimate]:
    """Perplexity without each block over the intact one's, with the interval of the paired loss difference."""
    plain = metrics.select(text, intervention="none").set_index("pair")["loss"]
    out = []
    for slot in blocks:
        rows = metrics.select(text, block=slot.name, mode="zero")
        if rows.empty:
            out.append(NOTHING)
            continue
        more = estimate(
            (rows.set_index("pair")["loss"] - plain).reset_index(drop=True), rows["pair"].reset_index(drop=True)
        )
        out.append(
            Estimate(*(math.exp(x) if i != 1 else x for i, x in enumerate((more.value, more.n, more.low, more.high))))
        )
    return out


if __name__ == "__main__":
    figures.main(draw)
