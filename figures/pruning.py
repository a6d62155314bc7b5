"""The pruning curve: retrieval and text, of the model that stops after each layer.

    python figures/pruning.py RESULTS_DIR

One figure for all variants. Normalised choice accuracy (0: chance, 1: full model), each variant thin and their mean bold, beside the
language-model score on text (the knowledge measure shown here is perplexity on text, not benchmark accuracy). Below, the layers: dark softmax, light
linear, with the circuit's parts. Bars are 95 % intervals over prompt pairs of the mean's variants.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.patches import Rectangle

from encode_address import figures, metrics
from encode_address.experiments.pruning import normalised, score

LIGHT = "#DDDDDD"


def draw(table: pd.DataFrame, verdict: dict[str, Any] | None, folder: Path) -> list[Path]:
    """Write the figure if the table has pruning rows; returns the files."""
    rows = figures.shown(table)
    if metrics.select(rows, experiment="pruning").empty or normalised(rows).empty:
        return []
    with figures.style():
        return figures.write(_figure(rows, verdict or {}), folder, "pruning", "all")


def _figure(rows: pd.DataFrame, verdict: dict[str, Any]):
    curves, task = normalised(rows), metrics.select(rows, experiment="pruning")
    variants = list(dict.fromkeys(curves["variant"]))
    layers = sorted(curves["last"].unique())
    width = min(7.0, max(3.4, 1.0 + 0.12 * len(layers)))
    figure, (top,) = figures.panels(width, 1, 1.6, above=0.5, between=0.4, below=0.9, right=0.2)
    for variant in variants:
        one = curves[curves["variant"] == variant]
        top.plot(one["last"], one["value"], color=figures.SKY, linewidth=0.7, zorder=2)
    mean = curves.groupby("last")[["value", "low", "high"]].mean()
    spread = [mean["value"] - mean["low"], mean["high"] - mean["value"]]
    label = f"retrieval (mean of {', '.join(variants)})" if len(variants) > 1 else f"retrieval ({variants[0]})"
    top.errorbar(mean.index, mean["value"], yerr=spread, color=figures.BLUE, linewidth=1.4, marker="o", markersize=2.5,
                 elinewidth=0.6, label=label, zorder=3)  # fmt: skip
    words = verdict.get("vocabulary")
    scores = score(rows, words) if words else {}
    if scores:
        top.plot(list(scores), list(scores.values()), color=figures.ORANGE, linewidth=1.4, marker="s", markersize=2.2,
                 label="language-model score", zorder=3)  # fmt: skip
    top.axhline(0, color=figures.DARK, linewidth=0.6)
    top.set_ylabel("normalised")
    top.set_xlim(layers[0] - 0.7, layers[-1] + 0.7)
    _strip(top, verdict, layers)
    name = f" ({rows['model'].iloc[0]}, n = {task['pair'].nunique()} pairs)" if "model" in rows else ""
    top.set_xlabel(f"last layer that runs{name}", labelpad=34)
    top.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=1)
    return figure


def _strip(axes: Any, verdict: dict[str, Any], layers: list[int]) -> None:
    """A row of layers under the axis, dark for softmax, and the names of the circuit's parts under them."""
    softmax = set((verdict.get("layout") or {}).get("softmax") or ())
    place = axes.get_xaxis_transform()
    for layer in layers:
        colour = figures.DARK if layer in softmax else LIGHT
        axes.add_patch(
            Rectangle((layer - 0.42, -0.26), 0.84, 0.07, transform=place, color=colour, clip_on=False, linewidth=0)
        )
    blocks = {b["name"]: b["layers"] for b in (verdict.get("layout") or {}).get("blocks") or ()}
    views = list((verdict.get("variants") or {}).values())
    parts = {
        part: {name for view in views for name in view.get(part) or ()} for part in ("encode", "address", "readers")
    }
    marks = [
        (part.capitalize(), [i for name in parts[part] for i in blocks.get(name, ())]) for part in ("encode", "address")
    ]
    marks.append(("Reader", [figures.head_of(name)[0] for name in parts["readers"]]))
    for part, where in marks:
        if where:
            axes.text((min(where) + max(where)) / 2, -0.3, part, transform=place, ha="center", va="top", size=6.5)
            axes.axvspan(
                min(where) - 0.5, max(where) + 0.5, color=figures.BANDS.get(part, "#EEEEEE"), linewidth=0, zorder=0
            )


if __name__ == "__main__":
    figures.main(draw)
