"""Output transplant, block by block and layer by layer: how much of the lookup moves to the donor's key.

    python figures/transplant.py RESULTS_DIR

One figure per variant. (a) Each block transplanted at the last token, over the whole question, and over the question
without its last token: share of hosts that answer with the donor's entry; markers are donors that should not redirect.
(b) Each linear layer alone, at the last token. Bars have 95 % intervals over prompt pairs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from encode_address import figures, metrics
from encode_address.figures.bars import Series, Slot, draw_bars, draw_controls, draw_landmarks, slots_of
from encode_address.stats import NOTHING, estimate

PLACES = {
    "final": ("last token", figures.GREEN),
    "question": ("whole question", figures.BLUE),
    "question-before": ("question before it", figures.SKY),
}


def draw(table: pd.DataFrame, verdict: dict[str, Any] | None, folder: Path) -> list[Path]:
    """Write one figure per variant that has transplants at all three places; returns the files."""
    return figures.draw_each("transplant", _figure, table, verdict, folder)


def _figure(rows: pd.DataFrame, view: dict[str, Any], variant: str):
    moved = metrics.select(rows, experiment="transplant", intervention="transplant")
    own = metrics.select(moved, donor="same-dictionary")
    if not len(own) or not set(PLACES) <= set(own["position"]):
        return None
    blocks = slots_of(own, own, view)
    layers = _layers(own, blocks)
    width = min(7.0, max(3.4, 1.0 + 0.27 * max(len(blocks), len(layers))))
    figure, axes = figures.panels(
        width, 2 if layers else 1, 1.15, above=0.52, between=0.55, below=0.4, right=0.2, sharex=False
    )
    series = [
        Series(label, colour, [_redirected(own, place, slot.name) for slot in blocks])
        for place, (label, colour) in PLACES.items()
    ]
    draw_bars(axes[0], blocks, series, "redirected", legend_at=23)
    draw_controls(axes[0], blocks, metrics.select(moved, position="final"))
    draw_landmarks(axes[:1], blocks, view)
    if layers:
        alone = [_redirected(own, "final", slot.name) for slot in layers]
        draw_bars(
            axes[1],
            layers,
            [Series("single layer, at the last token", figures.GREEN, alone)],
            "redirected",
            legend_at=1,
        )
    name = f"{rows['model'].iloc[0]}, " if "model" in rows else ""
    axes[-1].set_xlabel(f"{name}{variant}, n = {own['pair'].nunique()} pairs")
    for one, letter in zip(axes, "ab"):
        one.text(-0.02, 1.04, f"({letter})", transform=one.transAxes, ha="right", va="bottom", weight="bold")
    return figure


def _layers(own: pd.DataFrame, blocks: list[Slot]) -> list[Slot]:
    """The linear layers that were transplanted alone, in order."""
    names = own["block"].dropna().unique()
    single = sorted(int(name[1:]) for name in names if name.startswith("L") and name[1:].isdigit())
    return [Slot(f"L{layer}", i, layer, (f"L{layer}", "")) for i, layer in enumerate(single)]


def _redirected(own: pd.DataFrame, place: str, block: str):
    rows = metrics.select(own, position=place, block=block)
    return estimate(rows["redirected"], rows["pair"]) if len(rows) else NOTHING


if __name__ == "__main__":
    figures.main(draw)
