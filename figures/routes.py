"""Routes: whether the bound value travels by keys and values or by states, how fast gates forget, and what states hold.

    python figures/routes.py RESULTS_DIR

One figure per variant. (a) Share of the gap between corrupted and clean prompt that is recovered when what comes after a cut sees the
clean prompt's keys and values ("KV"), its states, both, and, as controls, those of another pair's prompt or its own; bars have 95 %
intervals over prompt pairs; the dashed line is a run that knows neither answer. (b) A dot per head of every linear layer: tokens after
which its forget gate alone halves the state; the dotted line is the length of a prompt. (c) Share of prompts whose bound value a probe
tells from a layer's state, by where the state is read, with 95 % intervals; dashed: a probe that knows which values are in the
dictionary; dotted: the largest class.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from encode_address import figures, metrics
from encode_address.experiments.probes import BEFORE, END, ENTRY, FINAL
from encode_address.experiments.routes import CUTS, HALF, floors, half_lives, probed, recovery
from encode_address.figures.bars import Series, Slot, draw_bars

ARMS = {
    ("kv", "clean"): "clean\nKV", ("state", "clean"): "clean\nstates", ("both", "clean"): "clean\nboth",
    ("kv", "permuted"): "other\nKV", ("state", "permuted"): "other\nstates", ("both", "identity"): "its own\nboth",
}  # fmt: skip
CUT = {"dictionary": (figures.BLUE, "of the dictionary"), "final": (figures.SKY, "of all before the last token")}
MARKS = {ENTRY: figures.GREEN, END: figures.BLUE, BEFORE: figures.SKY, FINAL: figures.ORANGE}
LABELS = 24  # layers, above which only some are named
DASHED, DOTTED = (0, (3, 3)), (0, (1, 2))


def draw(table: pd.DataFrame, verdict: dict[str, Any] | None, folder: Path) -> list[Path]:
    """Write one figure per variant that has rows of `routes`; returns the files."""
    return figures.draw_each("routes", _figure, table, verdict, folder)


def _figure(rows: pd.DataFrame, _view: dict[str, Any], variant: str) -> Figure | None:
    rows = metrics.select(rows, experiment="routes")
    if rows.empty:
        return None
    lives, known = half_lives(rows), probed(rows)
    layers = sorted({layer for layer, _ in lives})
    width = min(7.0, max(3.6, 0.9 + 0.15 * len(layers)))
    figure, axes = figures.panels(
        width, 2 + bool(known), 1.05, above=0.3, between=0.72, below=0.35, right=0.5, left=0.55, sharex=False
    )
    _recoveries(axes[0], rows, f"{rows['model'].iloc[0]}, {variant}" if "model" in rows else variant)
    _half_lives(axes[1], lives, layers, metrics.select(rows, part="half-life")["tokens"].median())
    if known:
        _probes(axes[2], rows, known, layers)
    for panel, letter in zip(axes, "abc"):
        panel.annotate(f"({letter})", (0, 1), (-36, 5), xycoords="axes fraction", textcoords="offset points", weight="bold")  # fmt: skip
    return figure


def _recoveries(axes: Any, rows: pd.DataFrame, name: str) -> None:
    slots = [Slot(label, i, i, (label, "")) for i, label in enumerate(ARMS.values())]
    series = [Series(CUT[cut][1], CUT[cut][0], [recovery(rows, *arm, cut) for arm in ARMS]) for cut in CUTS]
    draw_bars(axes, slots, series, "recovery", 4)
    axes.axhline(HALF, color=figures.DARK, linestyle=DASHED, linewidth=0.8, zorder=1.5)
    n = metrics.select(rows, part="routes")["pair"].nunique()
    axes.set_xlabel(f"clean, another pair's, own ({name}, n = {n} pairs)")


def _half_lives(axes: Any, lives: dict[tuple[int, int], Any], layers: list[int], tokens: float) -> None:
    for i, layer in enumerate(layers):
        values = np.array([life.value for (own, _), life in sorted(lives.items()) if own == layer])
        known = np.isfinite(values) & (values > 0)
        at = i + 0.5 * (np.arange(len(values)) / max(1, len(values) - 1) - 0.5)
        axes.plot(at[known], values[known], "o", color=figures.BLUE, markersize=2.6, markeredgewidth=0, clip_on=False)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.minorticks_off()
    axes.axhline(tokens, color=figures.DARK, linestyle=DOTTED, linewidth=0.9)
    axes.text(1.01, tokens, "prompt", transform=axes.get_yaxis_transform(), va="center", size=6)
    axes.set_ylabel("half-life (tokens)")
    _layers(axes, layers, "linear layer; one dot per head")


def _probes(axes: Any, rows: pd.DataFrame, known: dict[str, dict[int, Any]], layers: list[int]) -> None:
    place = {layer: i for i, layer in enumerate(layers)}
    for shift, (mark, colour) in zip((-0.12, -0.04, 0.04, 0.12), MARKS.items()):
        some = known.get(mark, {})
        at, values = [place[layer] + shift for layer in some], [e.value for e in some.values()]
        spread = [[max(0.0, e.value - e.low) for e in some.values()], [max(0.0, e.high - e.value) for e in some.values()]]  # fmt: skip
        axes.errorbar(at, values, yerr=spread, color=colour, label=mark, marker="o", markersize=2.4, elinewidth=0.6)
    floor, chance = floors(rows)
    for value, style, text, side in (
        (floor["floor_correct"].value, DASHED, "presence", "bottom"),
        (chance, DOTTED, "chance", "top"),
    ):
        axes.axhline(value, color=figures.DARK, linestyle=style, linewidth=0.8, zorder=1)
        axes.text(1.01, value, text, transform=axes.get_yaxis_transform(), va=side, size=6)
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=[5, 10]))
    axes.set_ylabel("probe accuracy")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.05), ncols=len(MARKS), handlelength=1.4, columnspacing=0.9)
    _layers(axes, layers, f"linear layer whose state is read (n = {floor['floor_correct'].n} prompts)")


def _layers(axes: Any, layers: list[int], label: str) -> None:
    step = -(-len(layers) // LABELS)
    axes.set_xticks(range(0, len(layers), step), [f"L{layer}" for layer in layers[::step]])
    axes.set_xlim(-0.55, len(layers) - 0.45)
    axes.set_xlabel(label)


if __name__ == "__main__":
    figures.main(draw)
