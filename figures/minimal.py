"""The minimal hybrid: what is left of retrieval when few linear layers are kept, and which.

    python figures/minimal.py RESULTS_DIR

One figure per variant. (a) Accuracy on new dictionaries with each named set of linear layers kept at full depth, the others giving
their mean over a text or zero, sorted by the former; small circles are single random sets. Right: how many layers, and the perplexity
on text (mean removal; of several random sets the median), and the KV-memory task where it was run. The dashed line is .8 of the
intact model. (b) The greedy elimination on dev dictionaries: accuracy and perplexity against the number of layers kept; open: the best removal that was refused.
(c) The linear layers that each of its steps keeps. Bars are 95 % intervals over prompt pairs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from encode_address import figures, metrics
from encode_address.experiments.minimal import KEPT_SHARE, elimination, memory_accuracy, said, text_perplexity

COLOURS = {"mean": figures.BLUE, "zero": figures.ORANGE}
LIGHT, NOT_RUN = "#DDDDDD", "-"
LEFT, PANEL, RIGHT, COLUMN = 1.02, 1.9, 0.98, 0.38  # inches of (a): its names, bars, two columns of numbers, a third
BAR, LAYER = 0.19, 0.085  # inches of a set's two bars, and of a layer of (c)


def draw(table: pd.DataFrame, verdict: dict[str, Any] | None, folder: Path) -> list[Path]:
    """Write one figure per variant that has rows of `minimal`; returns the files. Dev rows are shown, so all splits are read."""
    paths: list[Path] = []
    if metrics.select(table, experiment="minimal").empty:
        return paths
    for variant in figures.variants(table):
        rows = table[(table["variant"] == variant) | table["variant"].isna()]
        if len(metrics.select(rows, arm="named")):
            with figures.style():
                view = figures.verdict_of(verdict, variant)
                paths += figures.write(_figure(rows, view, variant), folder, "minimal", variant)
    return paths


def _figure(rows: pd.DataFrame, view: dict[str, Any], variant: str) -> Figure:
    named = metrics.select(rows, experiment="minimal", arm="named", cut="full")
    path, sets = elimination(rows), named["kept_set"].nunique()
    layers = path[0].kept
    scored = not metrics.select(rows, experiment="minimal-kv20").empty
    right = RIGHT + COLUMN * scored
    above, gap, below, curve = 0.3, 0.68 if scored else 0.78, 0.4, 0.95
    bars, strip = BAR * sets, LAYER * max(6, len(layers))
    total = above + bars + gap + curve + 0.1 + strip + below
    width = LEFT + PANEL + right
    figure = Figure(figsize=(width, total))
    FigureCanvasAgg(figure)

    def axes_at(bottom: float, height: float, right: float):
        return figure.add_axes((LEFT / width, bottom / total, (width - LEFT - right) / width, height / total))

    third = axes_at(below, strip, 0.6)
    second = axes_at(below + strip + 0.1, curve, 0.6)
    first = axes_at(below + strip + 0.1 + curve + gap, bars, right)
    _sets(first, rows, named, view)
    model = f"{rows['model'].iloc[0]}, " if "model" in rows else ""
    first.set_xlabel(f"accuracy ({model}{variant}, n = {named['pair'].nunique()} pairs)")
    _path(second, rows, path)
    _strip(third, path, layers)
    for axes, letter in zip((first, second, third), "abc"):
        axes.annotate(
            f"({letter})", (0, 1), (-LEFT * 72 + 4, 0), xycoords="axes fraction", textcoords="offset points",
            va="bottom" if letter != "c" else "top", weight="bold",
        )  # fmt: skip
    return figure


def _sets(axes: Any, rows: pd.DataFrame, named: pd.DataFrame, view: dict[str, Any]) -> None:
    """Two bars per named set, best above, and what else there is to say of it at the right."""
    groups = {name: some for name, some in named.groupby("kept_set", sort=False)}
    share = {
        name: {mode: metrics.accuracy(metrics.select(some, removal=mode)) for mode in COLOURS} for name, some in groups.items()
    }  # fmt: skip
    order = sorted(groups, key=lambda name: -share[name]["mean"].value)
    for i, (mode, colour) in enumerate(COLOURS.items()):
        at = [y + 0.2 * (2 * i - 1) for y in range(len(order))]
        some = [share[name][mode] for name in order]
        spread = [[max(0.0, e.value - e.low) for e in some], [max(0.0, e.high - e.value) for e in some]]
        axes.barh(at, [e.value for e in some], 0.38, color=colour, label=f"{mode} removal", zorder=2)
        axes.errorbar([e.value for e in some], at, xerr=spread, fmt="none", ecolor=figures.DARK, elinewidth=0.5, capsize=0.7, capthick=0.5)  # fmt: skip
        for y, name in zip(at, order):
            drawn = [d for _, d in metrics.select(groups[name], removal=mode).groupby("draw")]
            if len(drawn) > 1:
                axes.plot([metrics.accuracy(d).value for d in drawn], [y] * len(drawn), "o", color=figures.DARK,
                          markerfacecolor="white", markersize=2, markeredgewidth=0.5, zorder=4, clip_on=False)  # fmt: skip
    axes.axvline(KEPT_SHARE * share["all"]["mean"].value, color=figures.DARK, linestyle=(0, (3, 3)), linewidth=0.7)
    axes.set_yticks(range(len(order)), order)
    axes.set_ylim(len(order) - 0.45, -0.55)
    axes.set_xlim(0, 1.02)
    axes.tick_params(axis="y", length=0)
    _columns(axes, rows, groups, order, view)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2)


def _columns(
    axes: Any, rows: pd.DataFrame, groups: dict[str, pd.DataFrame], order: list[str], view: dict[str, Any]
) -> None:
    """How many layers a set keeps, its perplexity, and its score in the KV-memory task, or why there is none."""
    columns: dict[str, list[str]] = {"layers": [], "ppl": [], "kv20": []}
    for name in order:
        kept = list(groups[name]["kept_layers"].unique())
        score = memory_accuracy(rows, kept[0]) if len(kept) == 1 else None
        columns["layers"].append(str(int(groups[name]["k"].iloc[0])))
        columns["ppl"].append(_short(float(np.median([text_perplexity(rows, one) for one in kept]))))
        columns["kv20"].append(f"{score.value:.2f}" if score and score.n else NOT_RUN)
    if set(columns["kv20"]) == {NOT_RUN}:
        del columns["kv20"]
        why = (view.get("figures") or {}).get("kv20")
        line = why if isinstance(why, str) else "kv20: not run"
        axes.annotate(_wrapped(line), (0, 0), (-LEFT * 72 + 4, -24), xycoords="axes fraction", textcoords="offset points",
                      va="top", size=5.5)  # fmt: skip
    for i, (title, values) in enumerate(columns.items()):
        x = 22 + 30 * i - (4 if i else 0)
        for y, value in [(-0.85, title), *enumerate(values)]:
            axes.annotate(value, (1, y), (x, 0), xycoords=axes.get_yaxis_transform(), textcoords="offset points",
                          ha="right", va="center" if y >= 0 else "bottom", size=6, annotation_clip=False)  # fmt: skip


def _path(axes: Any, rows: pd.DataFrame, path: list[Any]) -> None:
    """Accuracy on dev and perplexity on text along the elimination."""
    x = [len(step.kept) for step in path]
    spread = [[max(0.0, s.dev.value - s.dev.low) for s in path], [max(0.0, s.dev.high - s.dev.value) for s in path]]
    other = axes.twinx()
    lines = [
        (axes, "accuracy on dev", figures.BLUE, "o", [step.dev.value for step in path]),
        (other, "perplexity on text", figures.ORANGE, "s", [text_perplexity(rows, said(step.kept)) for step in path]),
    ]
    axes.errorbar(x, lines[0][4], yerr=spread, fmt="none", ecolor=figures.BLUE, elinewidth=0.6, capsize=1, capthick=0.6)
    handles = []
    for where, label, colour, marker, values in lines:
        handles += where.plot(x, values, color=colour, linewidth=1.2, marker=marker, markersize=3, label=label)
        for step, value in zip(path, values):
            if not step.accepted:
                where.plot(len(step.kept), value, marker, color=colour, markerfacecolor="white", markersize=3, zorder=4)
    other.set_yscale("log")
    other.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    other.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}" if value < 10_000 else _short(value)))
    other.yaxis.set_minor_formatter(NullFormatter())
    other.spines["right"].set_visible(True)
    other.set_ylabel("perplexity")
    axes.set_zorder(other.get_zorder() + 1)
    axes.patch.set_visible(False)
    axes.set_ylabel("accuracy")
    axes.set_ylim(-0.03, 1.05)
    axes.set_xlim(x[0] + 0.5, x[-1] - 0.5)
    axes.set_xticks(x, [])
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2)


def _strip(axes: Any, path: list[Any], layers: tuple[int, ...]) -> None:
    """A column per step: dark squares are the linear layers that are kept; the refused step is framed only."""
    for step in path:
        for y, layer in enumerate(layers):
            kept = layer in step.kept
            colour = figures.DARK if kept and step.accepted else "white" if kept else LIGHT
            edge = figures.DARK if kept else LIGHT
            axes.add_patch(Rectangle((len(step.kept) - 0.4, y - 0.38), 0.8, 0.76, facecolor=colour, edgecolor=edge, linewidth=0.5))  # fmt: skip
    shown = range(0, len(layers), -(-len(layers) // 12))
    axes.set_yticks(shown, [f"L{layers[i]}" for i in shown], size=5.5)
    axes.set_ylim(len(layers) - 0.4, -0.6)
    axes.set_xlim(len(path[0].kept) + 0.5, len(path[-1].kept) - 0.5)
    sizes = [len(step.kept) for step in path]
    every = -(-len(sizes) // 12)
    axes.set_xticks(sizes[::every], map(str, sizes[::every]))
    axes.set_xlabel("linear layers kept, of the greedy elimination")
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(length=0)


def _short(value: float) -> str:
    """A perplexity in few characters."""
    if value != value:
        return NOT_RUN
    return f"{value:.1f}" if value < 100 else f"{value:.0f}" if value < 10_000 else f"{value:.0e}".replace("e+0", "e")


def _wrapped(line: str, width: int = 78) -> str:
    words, out = line.split(), [""]
    for word in words:
        if len(out[-1]) + len(word) >= width:
            out.append("")
        out[-1] = f"{out[-1]} {word}".strip()
    return "\n".join(out)


if __name__ == "__main__":
    figures.main(draw)
