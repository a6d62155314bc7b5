"""The pruning curve: retrieval and knowledge, of the model that stops after each layer.

    python figures/pruning.py RESULTS_DIR

One figure for all variants. Normalised choice accuracy (0: chance, 1: full model), each variant thin and their mean bold, beside what
else the model knows: the mean of six question sets where they were asked (`--knowledge`) and the full model is above chance in them, else
the language-model score on text; the legend says which, and whether the normalisation is the published one. Below, the layers:
dark softmax, light linear, with the circuit's parts. Bars are 95 % intervals, over prompt pairs or questions.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import wrap
from typing import Any

import pandas as pd
from matplotlib.patches import Rectangle

from encode_address import figures, metrics
from encode_address.experiments import pruning
from encode_address.models.layout import runs

LIGHT = "#DDDDDD"


def draw(table: pd.DataFrame, verdict: dict[str, Any] | None, folder: Path) -> list[Path]:
    """Write the figure if the table has pruning rows; returns the files."""
    rows = figures.shown(table)
    if metrics.select(rows, experiment="pruning").empty or pruning.mean(rows, _paper(verdict)).empty:
        return []
    with figures.style():
        return figures.write(_figure(rows, verdict or {}), folder, "pruning", "all")


def _paper(verdict: dict[str, Any] | None) -> bool:
    return pruning.paper_of((verdict or {}).get("options"))


def _figure(rows: pd.DataFrame, verdict: dict[str, Any]):
    paper = _paper(verdict)
    curves, task = pruning.normalised(rows, paper), metrics.select(rows, experiment="pruning")
    lines = [_retrieval(rows, curves, paper), *_beside(rows, verdict, paper)]
    layers = [int(layer) for layer in lines[0][1]["last"]]
    width = min(7.0, max(3.4, 1.0 + 0.12 * len(layers)))
    labels = ["\n".join(wrap(label, int(16 * width))) for label, *_ in lines]
    above = 0.12 + 0.13 * sum(label.count("\n") + 1 for label in labels)
    figure, (top,) = figures.panels(width, 1, 1.6, above=above, between=0.4, below=0.82, right=0.1)
    for _, one in curves.groupby("variant"):
        top.plot(one["last"], one["value"], color=figures.SKY, linewidth=0.7, zorder=2)
    for label, (_, curve, colour, marker) in zip(labels, lines):
        spread = None
        if "low" in curve:
            spread = [(curve["value"] - curve["low"]).clip(0), (curve["high"] - curve["value"]).clip(0)]
        top.errorbar(curve["last"], curve["value"], yerr=spread, color=colour, linewidth=1.4, marker=marker, markersize=2.4,
                     elinewidth=0.6, label=label, zorder=3)  # fmt: skip
    top.axhline(0, color=figures.DARK, linewidth=0.6)
    top.set_ylabel("normalised")
    top.set_xlim(layers[0] - 0.7, layers[-1] + 0.7)
    _strip(top, verdict, layers)
    name = f" ({rows['model'].iloc[0]}, n = {task['pair'].nunique()} pairs)" if "model" in rows else ""
    top.set_xlabel(f"last layer that runs{name}", labelpad=33)
    top.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=1)
    return figure


Line = tuple[str, pd.DataFrame, str, str]  # label, curve by last layer, colour, marker


def _retrieval(rows: pd.DataFrame, curves: pd.DataFrame, paper: bool) -> Line:
    """The mean over variants; as published, over all that were run."""
    among = metrics.select(rows, experiment="pruning") if paper else curves
    variants = list(among["variant"].unique())
    label = f"mean of {', '.join(variants)}" if len(variants) > 1 else variants[0]
    label = f"retrieval ({label}{'; published normalisation' if paper else ''})"
    return label, pruning.mean(rows, paper), figures.BLUE, "o"


def _beside(rows: pd.DataFrame, verdict: dict[str, Any], paper: bool) -> list[Line]:
    """What else the model knows: of questions or, without intervals, of text; none where neither was run."""
    name, curve = pruning.beside(rows, verdict.get("vocabulary"), paper)
    if "low" in curve:
        name += f" (mean of six question sets, {pruning.questions(rows):,} questions)"
    return [(name, curve, figures.ORANGE, "s")] if len(curve) else []


def _strip(axes: Any, verdict: dict[str, Any], layers: list[int]) -> None:
    """A row of layers under the axis, dark for softmax, and the names of the circuit's parts under them."""
    softmax = set((verdict.get("layout") or {}).get("softmax") or ())
    place = axes.get_xaxis_transform()
    for layer in layers:
        colour = figures.DARK if layer in softmax else LIGHT
        axes.add_patch(
            Rectangle((layer - 0.42, -0.2), 0.84, 0.06, transform=place, color=colour, clip_on=False, linewidth=0)
        )
    blocks = {b["name"]: b["layers"] for b in (verdict.get("layout") or {}).get("blocks") or ()}
    views = list((verdict.get("variants") or {}).values())
    parts = {
        part: {name for view in views for name in view.get(part) or ()} for part in ("encode", "address", "readers")
    }
    marks = {
        part.capitalize(): {i for name in parts[part] for i in blocks.get(name, ())} for part in ("encode", "address")
    }
    marks["Reader"] = {figures.head_of(name)[0] for name in parts["readers"]}
    for part, where in marks.items():
        for run in runs(sorted(where)):
            axes.axvspan(run[0] - 0.5, run[-1] + 0.5, color=figures.BANDS.get(part, "#EEEEEE"), linewidth=0, zorder=0)
            # A reader sits right after the Address: its name has a line of its own.
            at = (run[0] + run[-1]) / 2, -0.3 if part == "Reader" else -0.22
            axes.text(*at, part, transform=place, ha="center", va="top", size=6.5)


if __name__ == "__main__":
    figures.main(draw)
