"""Recurrent state: where the address is kept before the last token.

    python figures/state.py RESULTS_DIR

One figure per variant. (a) Each block's states before the last token taken from the donor - recurrent, convolutional, or both:
share of hosts that answer with the donor's entry; markers are control donors, with both states. (b) The block whose states move
most: what it writes at the last token, its states, and, with the host's states, what its mixers get or what enters it there.
Bars have 95 % intervals over prompt pairs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from encode_address import figures, metrics
from encode_address.experiments.state import redirected
from encode_address.figures.bars import Series, Slot, draw_bars, draw_controls, draw_landmarks, slots_of

MODES = {
    "recurrent": ("recurrent", figures.BLUE),
    "conv": ("convolutional", figures.SKY),
    "both": ("both", figures.GREEN),
}
WAYS = {
    "transplant": "output",
    "both": "both\nstates",
    "recurrent": "recurrent\nstate",
    "input": "mixer\ninput",
    "residual": "block\ninput",
}


def draw(table: pd.DataFrame, verdict: dict[str, Any] | None, folder: Path) -> list[Path]:
    """Write one figure per variant that has state rows; returns the files."""
    return figures.draw_each("state", _figure, table, verdict, folder)


def _figure(rows: pd.DataFrame, view: dict[str, Any], variant: str):
    states = metrics.select(rows, experiment="state", intervention="state")
    if states.empty:
        return None
    blocks = [slot for slot in slots_of(states, states, view) if "+" not in slot.name]
    width = min(7.0, max(3.4, 1.0 + 0.27 * (len(blocks) + 1)))
    figure, (top, bottom) = figures.panels(width, 2, 1.15, above=0.52, between=0.6, below=0.56, right=0.2, sharex=False)
    series = [
        Series(label, colour, [redirected(rows, slot.name, mode) for slot in blocks])
        for mode, (label, colour) in MODES.items()
    ]
    draw_bars(top, blocks, series, "redirected", legend_at=23)
    draw_controls(top, blocks, metrics.select(states, mode="both"))
    draw_landmarks([top], blocks, view)
    best = max((slot.name for slot in blocks), key=lambda name: redirected(rows, name, "both").value)
    places = [Slot(way, i, i, (label, "")) for i, (way, label) in enumerate(WAYS.items())]
    draw_bars(bottom, places, [Series(f"{best}, at the last token", figures.GREEN, [redirected(rows, best, w) for w in WAYS])],
              "redirected", legend_at=1)  # fmt: skip
    name = f"{rows['model'].iloc[0]}, " if "model" in rows else ""
    bottom.set_xlabel(f"taken from the donor ({name}{variant}, n = {states['pair'].nunique()} pairs)")
    for axes, letter in ((top, "a"), (bottom, "b")):
        axes.text(-0.02, 1.04, f"({letter})", transform=axes.transAxes, ha="right", va="bottom", weight="bold")
    return figure


if __name__ == "__main__":
    figures.main(draw)
