"""Attention-only retrieval: heads and keys by phase.

    python figures/attention_only.py RESULTS_DIR

One figure per variant that was run. (a)-(c) Accuracy against the heads that each layer keeps, in prefill, in generation, in both: the sharpest
by query, the least sharp, random ones (all seeds), a fixed list, and the sharpest on prompts that state everything twice; the dotted line is 15 %
of the heads. (d) Accuracy when the needle's keys are hidden (omit), alone visible (only), share their weight (balanced), or no
key is visible (null), by phase; weights are not renormalised. (e) Each head's retrieval score and needle mass against what silencing it alone
costs at generation, on other prompts. (f) Accuracy when only the first heads of a ranking are kept at generation. Bars and bands are 95 %
intervals over probes. `needle` also gets depth x length heat maps: intact, no heads, the sharpest 15 %, random 15 %, at generation; cells that
a sliding window does not reach are hatched.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from encode_address import figures, metrics
from encode_address.attention.arms import GENERATION_MODES, PHASES, PREFILL_MODES
from encode_address.experiments.attention_only import NAME, chosen, drop_of, headline
from encode_address.stats import estimate

RULES = {
    "sharp": ("sharpest", figures.BLUE, "o"),
    "random": ("random", figures.GREY, "s"),
    "bottom": ("least sharp", figures.ORANGE, "v"),
    "fixed": ("fixed list", figures.GREEN, "^"),
}
TWICE = ("sharpest, stated twice", figures.DARK, "x")
CURVES = {"retrieval": figures.GREEN, "drop": figures.BLUE, "sharpness": figures.ORANGE, "inverse": figures.SKY}
HEAT = LinearSegmentedColormap.from_list("heat", ["#FFFFFF", "#CFE3F2", figures.BLUE])
MAPS = {"intact": "intact", "none": "no heads", "sharp": "sharpest", "random": "random"}


def draw(table: pd.DataFrame, verdict: dict[str, Any] | None, folder: Path) -> list[Path]:
    """Write one figure per variant whose arms were run, and heat maps of needles; returns the files."""
    paths: list[Path] = []
    rows = metrics.select(table, experiment=NAME)
    for variant in figures.variants(rows):
        own = metrics.select(rows, variant=variant)
        if metrics.select(own, part="grid").empty:
            continue
        with figures.style():
            paths += figures.write(_figure(own, variant), folder, "attention-only", variant)
            if "depth" in own and own["depth"].notna().any():
                paths += figures.write(_maps(own, variant), folder, "attention-only-depth", variant)
    return paths


def _canvas(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    return figure


def _figure(rows: pd.DataFrame, variant: str) -> Figure:
    figure, shown = _canvas(7.0, 4.0), metrics.select(rows, split="confirmation")
    shown = shown[shown["reach"] != "outside"]
    axes = figure.subplots(2, 3)
    figure.subplots_adjust(left=0.085, right=0.985, top=0.87, bottom=0.115, wspace=0.42, hspace=0.75)
    heads = int(metrics.select(shown, part="sweep", by="intact")["k"].iloc[0])
    for one, phase in zip(axes[0], PHASES):
        _sweep(one, shown, heads, phase)
    axes[0, 0].set_ylabel("accuracy")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper left", bbox_to_anchor=(0.085, 0.985), ncols=len(labels))
    _grid(axes[1, 0], metrics.select(shown, part="grid", span="needle", renorm=False))
    _scores(axes[1, 1], metrics.select(rows, split="discovery"))
    _curves(axes[1, 2], metrics.select(shown, part="curve", phase="generation"))
    for one, letter in zip(axes.flat, "abcdef"):
        one.text(-0.17, 1.05, f"({letter})", transform=one.transAxes, ha="right", va="bottom", weight="bold")
    n = metrics.select(shown, part="sweep")["pair"].nunique()
    figure.text(0.985, 0.985, f"{rows['model'].iloc[0]}, {variant}, n = {n} probes", ha="right", va="top", size=6.5)
    return figure


def _line(
    axes: Any, points: list[tuple[float, pd.DataFrame]], label: str, colour: str, marker: str, shift: float = 0
) -> None:
    """A line through (x, rows) with intervals."""
    known = [(x + shift, estimate(own["right"], own["pair"])) for x, own in points if len(own)]
    if known:
        values = [e.value for _, e in known]
        spread = [[max(0.0, e.value - e.low) for _, e in known], [max(0.0, e.high - e.value) for _, e in known]]
        axes.errorbar(
            [x for x, _ in known], values, yerr=spread, color=colour, marker=marker, markersize=3, linewidth=0.9,
            elinewidth=0.6, label=label, clip_on=False,
        )  # fmt: skip


def _sweep(axes: Any, rows: pd.DataFrame, heads: int, phase: str) -> None:
    ks = sorted({int(k) for k in metrics.select(rows, part="sweep")["k"].dropna()})

    def points(by: str, part: str) -> list[tuple[float, pd.DataFrame]]:
        intact = metrics.select(rows, part=part, by="intact")
        return [(k, intact if k == heads else chosen(rows, by, k, phase, part)) for k in ks]

    wide = 0.012 * heads
    for i, (by, (label, colour, marker)) in enumerate(RULES.items()):
        _line(axes, points(by, "sweep"), label, colour, marker, wide * (i - 2))
    _line(axes, points("sharp", "twice"), *TWICE, wide * 2)
    axes.axvline(headline(heads), color=figures.DARK, linestyle=":", linewidth=0.7, zorder=0)
    axes.set_title(phase if phase != "both" else "both phases", size=7)
    axes.set_xlabel(f"heads kept per layer (of {heads})")
    axes.set_ylim(-0.03, 1.03)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))


def _heat(axes: Any, values: np.ndarray, columns: list[str], names: list[str]) -> None:
    """Cells with their values, shares from 0 to 1."""
    axes.imshow(values, cmap=HEAT, vmin=0, vmax=1, aspect="auto")
    for (y, x), value in np.ndenumerate(values):
        if not np.isnan(value):
            axes.text(
                x, y, f"{value:.2f}", ha="center", va="center", size=6, color="white" if value > 0.7 else figures.DARK
            )
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _grid(axes: Any, rows: pd.DataFrame) -> None:
    means = rows.assign(right=rows["right"].astype(float)).pivot_table(
        index="prefill", columns="generation", values="right"
    )
    means = means.reindex(index=PREFILL_MODES, columns=GENERATION_MODES)
    _heat(axes, means.to_numpy(float), ["keep", "omit", "only", "bal.", "null"], list(PREFILL_MODES))
    axes.set_xlabel("keys seen in generation")
    axes.set_ylabel("in prefill")


def _scores(axes: Any, rows: pd.DataFrame) -> None:
    found = metrics.select(rows, part="heads")
    silenced = drop_of(metrics.select(rows, part="drop"), "generation")
    names = {head: f"L{head[0]}H{head[1]}" for head in silenced.index}
    for column, label, colour, marker in (
        ("retrieval", "retrieval score", figures.GREEN, "o"),
        ("mass", "needle mass", figures.SKY, "D"),
    ):
        mean = found.groupby(["layer", "head"])[column].mean()
        both = [(mean[head], silenced[head], head) for head in silenced.index]
        axes.plot(
            [x for x, *_ in both],
            [y for _, y, _ in both],
            marker,
            color=colour,
            markersize=3,
            label=label,
            clip_on=False,
        )
        for x, y, head in sorted(both, key=lambda one: -one[1])[:2] if column == "retrieval" else ():
            axes.annotate(names[head], (x, y), (3, 2), textcoords="offset points", size=6)
    axes.axhline(0, color=figures.DARK, linewidth=0.5, zorder=0)
    axes.margins(y=0.14)
    axes.set_xlim(-0.03, 1.03)
    axes.set_xlabel("score of a head")
    axes.set_ylabel("nats lost without it")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, handlelength=0.6)


def _curves(axes: Any, rows: pd.DataFrame) -> None:
    sizes = sorted({int(size) for size in rows["size"].dropna()})
    drawn = rows[rows["by"].str.startswith("random")]
    for i, (by, colour) in enumerate(CURVES.items()):
        own = metrics.select(rows, by=by)
        shift = 0.012 * max(sizes) * (i - 2)
        _line(axes, [(s, metrics.select(own, size=s)) for s in sizes], by, colour, ".", shift)
    _line(axes, [(s, metrics.select(drawn, size=s)) for s in sizes], "random", figures.GREY, "s", 0.024 * max(sizes))
    axes.set_xlabel("heads kept in all, generation")
    axes.set_ylabel("accuracy")
    axes.set_ylim(-0.03, 1.03)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.legend(loc="lower left", bbox_to_anchor=(-0.14, 1.01), ncols=3, columnspacing=0.6)


def _maps(rows: pd.DataFrame, variant: str) -> Figure:
    shown = metrics.select(rows, split="confirmation")
    heads = int(metrics.select(shown, part="sweep", by="intact")["k"].iloc[0])
    lengths, depths = (sorted({int(x) for x in shown[name].dropna()}) for name in ("length", "depth"))
    figure = _canvas(7.0, 1.75)
    axes = figure.subplots(1, len(MAPS), sharey=True)
    figure.subplots_adjust(left=0.07, right=0.985, top=0.78, bottom=0.22, wspace=0.12)
    for one, (by, label) in zip(axes, MAPS.items()):
        own = (
            metrics.select(shown, part="sweep", by="intact")
            if by == "intact"
            else chosen(shown, by, headline(heads), "generation")
        )
        means = own.assign(right=own["right"].astype(float)).pivot_table(
            index="depth", columns="length", values="right"
        )
        _heat(
            one, means.reindex(index=depths, columns=lengths).to_numpy(float), [*map(str, lengths)], [*map(str, depths)]
        )
        beyond = set(map(tuple, own[own["reach"] == "outside"][["depth", "length"]].astype(int).values))
        for depth, length in beyond:
            at = lengths.index(length) - 0.5, depths.index(depth) - 0.5
            one.fill_between(
                [at[0], at[0] + 1],
                at[1],
                at[1] + 1,
                hatch="////",
                facecolor="none",
                edgecolor=figures.GREY,
                linewidth=0,
            )
        one.set_title(label if by in ("intact", "none") else f"{label} {headline(heads)} of {heads}", size=7)
        one.set_xlabel("tokens of haystack")
    axes[0].set_ylabel("depth (%)")
    per = len(metrics.select(shown, part="sweep", by="intact")) / (len(lengths) * len(depths))
    figure.text(
        0.985,
        0.985,
        f"{rows['model'].iloc[0]}, {variant}, heads kept in generation, {per:.0f} probes a cell",
        ha="right",
        va="top",
        size=6.5,
    )
    return figure


if __name__ == "__main__":
    figures.main(draw)
