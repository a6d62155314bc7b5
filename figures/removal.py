"""Removal, block by block and layer by layer: what retrieval needs, and what text does.

    python figures/removal.py RESULTS_DIR

One figure per variant. (a) Accuracy after a block's outputs are set to zero, to their mean over a text, or to those of
another prompt; a dashed line is the intact model. (b) The reader head's attention from the last token on the asked entry, on clean
prompts, where a reader was watched. (c) Accuracy, zero, at the dictionary's, the question's or the last token only. (d) Each
layer alone, linear or softmax: zero. (e) Perplexity on text without each block, over the intact one. Bars have 95 % intervals over
prompt pairs, or over text chunks.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

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
    removed, baseline = metrics.select(rows, experiment="removal"), metrics.select(rows, experiment="baseline")
    zero, everywhere = metrics.select(removed, mode="zero"), metrics.select(removed, position="all")
    if not len(zero) or not set(PLACES) <= set(zero["position"]):
        return None
    intact, reader = metrics.accuracy(baseline).value, figures.reader(view, baseline, "target")
    blocks, layers = slots_of(zero, zero, view), _layers(zero)
    ways = [
        Series(name, colour, [_accuracy(metrics.select(everywhere, **how), slot) for slot in blocks])
        for name, (how, colour) in WAYS.items()
    ]
    places = [
        Series(f"{place} only", colour, [_accuracy(metrics.select(zero, position=place), slot) for slot in blocks])
        for place, colour in PLACES.items()
    ]
    alone = [_accuracy(metrics.select(zero, position="all"), slot) for slot in layers]
    drawn = [(blocks, [replace(ways[0], intact=intact), *ways[1:]], "accuracy")]
    if reader:
        drawn.append((blocks, _attended(baseline, everywhere, blocks, reader), f"L{reader[0]}H{reader[1]} attention"))
    drawn += [
        (blocks, places, "accuracy"),
        (layers, [Series("single layers", figures.BLUE, alone, intact)], "accuracy"),
    ]
    if len(text):
        drawn.append((blocks, [Series("on text", figures.GREEN, _ratios(text, blocks))], "ppl ÷ intact"))
    width = min(7.0, max(3.4, 1.0 + 0.27 * max(len(blocks) + 1, len(layers))))
    figure, axes = figures.panels(width, len(drawn), 0.95, above=0.36, between=0.5, below=0.4, right=0.36, sharex=False)
    for i, (one, (slots, series, label)) in enumerate(zip(axes, drawn)):
        draw_bars(one, slots, series, label, legend_at=1 if i else 12)
        one.text(-0.02, 1.04, f"({'abcde'[i]})", transform=one.transAxes, ha="right", va="bottom", weight="bold")
    draw_landmarks(axes[:1], blocks, {**view, "readers": []})
    if len(text):
        axes[-1].set_yscale("log")
        axes[-1].set_ylim(0.9, None)
        top = axes[-1].get_ylim()[1]
        axes[-1].yaxis.set_major_locator(
            MaxNLocator(3) if top < 3 else LogLocator(subs=(1, 2, 5) if top < 30 else (1,))
        )
        axes[-1].yaxis.set_major_formatter("{x:g}")
        axes[-1].yaxis.set_minor_formatter(NullFormatter())
    axes[-1].set_xlabel(f"{rows['model'].iloc[0]}, {variant}, n = {zero['pair'].nunique()} pairs")
    return figure


def _attended(
    baseline: pd.DataFrame, removed: pd.DataFrame, slots: list[Slot], reader: tuple[int, int]
) -> list[Series]:
    """The reader's attention on the asked entry of clean prompts, without each block; blocks that were not watched have none."""

    def mean(rows: pd.DataFrame) -> Estimate:
        rows = metrics.select(rows, form="clean")
        return estimate(metrics.attention(rows, reader, "target"), rows["pair"])

    intact = mean(baseline).value
    return [
        Series(
            name,
            colour,
            [mean(metrics.select(removed, **how, block=slot.name)) for slot in slots],
            intact if name == "zero" else None,
        )
        for name, (how, colour) in WAYS.items()
        if name != "resampled"
    ]


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
