"""Address and payload: a donor's key and its value on one grid.

    python figures/address_payload.py RESULTS_DIR

One figure per variant, shifts of M in nats. (a) One layer's mixer output at the last token := the donor's (down: patch layer p), read at layer r (across), for the
donor's key, the value that the target's table has for it and the value that the donor's table has; squares mark softmax layers. (b) The patch of the
whole Address block, (c) that of the reader: the same three concepts by readout layer, from the patched layer on; grey: the largest of the three in size under a
random direction of that length, dotted: the looked-up value under a donor that asks the same key (in b). The vertical line is the reader. The scale is
linear up to .1 and logarithmic beyond. Bands are 95 %.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from encode_address import figures, metrics
from encode_address.experiments.address_payload import curve
from encode_address.figures.gathering import CONCEPTS, LINEAR, heat_map, softmax_layers
from encode_address.gathering import pooling

COLOURS = dict(zip(CONCEPTS, (figures.ORANGE, figures.BLUE, figures.GREEN)))
MARKS = dict(zip(CONCEPTS, "^os"))


def draw(table: pd.DataFrame, verdict: dict[str, Any] | None, folder: Path) -> list[Path]:
    """Write one figure per variant that has rows of `address-payload`; returns the files."""
    return figures.draw_each("address-payload", _figure, table, verdict, folder)


def _figure(rows: pd.DataFrame, view: dict[str, Any], variant: str) -> Figure | None:
    rows = metrics.select(rows, experiment="address-payload")
    if metrics.select(rows, part="grid").empty:
        return None
    shifts = pooling.shifts(rows, tuple(CONCEPTS), 2)  # in M, which asks for no vocabulary
    depth, softmax = int(shifts["read"].max()) + 1, softmax_layers(shifts)
    single = shifts[(shifts["block"] == "") & (shifts["donor"] == "donor")]
    figure = Figure(figsize=(7.0, 3.7))
    figures.FigureCanvasAgg(figure)
    upper = figure.add_gridspec(1, 3, left=0.09, right=0.92, top=0.87, bottom=0.56, wspace=0.22)
    means = {c: single.groupby(["layer", "read"])[f"dM.{c}"].mean().unstack() for c in CONCEPTS}
    highest = max(1.0, *(float(np.nanmax(np.abs(table.to_numpy()))) for table in means.values()))
    for i, (concept, table) in enumerate(means.items()):
        axes = figure.add_subplot(upper[0, i])
        image = heat_map(axes, table, depth, highest, softmax)
        axes.set_title(CONCEPTS[concept].replace("\n", " "), size=6.5, pad=3)
        axes.set_xlabel("readout layer r", labelpad=4)
        if i == 0:
            axes.set_ylabel("mixer patched at p", labelpad=4)
            _letter(axes, "a")
    place = axes.get_position()
    bar = figure.colorbar(image, cax=figure.add_axes((0.935, place.y0, 0.012, place.height)))
    bar.outline.set_visible(False)
    bar.set_ticks([-highest, -1, 0, 1, highest], labels=[f"-{highest:.2g}", "-1", "0", "1", f"{highest:.2g}"])
    bar.ax.tick_params(length=0, labelsize=5.5)
    bar.ax.minorticks_off()
    _curves(figure, shifts, view, depth)
    name = f"{rows['model'].iloc[0]}, " if "model" in rows else ""
    figure.text(
        0.09,
        0.955,
        f"{name}{variant}, n = {shifts['pair'].nunique()} pairs: {str(view.get('status', '')).upper()}",
        size=7,
    )
    return figure


def _curves(figure: Figure, shifts: pd.DataFrame, view: dict[str, Any], depth: int) -> None:
    """Panels (b) and (c), where the verdict names an Address and a reader."""
    blocks, heads = view.get("address") or [], [figures.head_of(name)[0] for name in view.get("readers") or []]
    lower = figure.add_gridspec(1, 2, left=0.09, right=0.92, top=0.41, bottom=0.11, wspace=0.18)
    name = "+".join(blocks)
    address = shifts[(shifts["site"] == "mixer") & (shifts["block"] == name)] if name else shifts.iloc[:0]
    if address.empty and name:  # an Address of one layer is among the single layers
        known = next((b for b in (view.get("layout") or {}).get("blocks", []) if b["name"] == name), {"layers": []})
        address = shifts[shifts["layers"] == "-".join(map(str, known["layers"]))]
    reader = min((layer for layer in heads if len(address) and layer > address["layer"].max()), default=None)
    payload = shifts[(shifts["block"] == "") & (shifts["layer"] == reader)]
    shared = None
    for i, (some, said) in enumerate(((address, f"Address {name} patched"), (payload, f"reader L{reader} patched"))):
        axes = shared = figure.add_subplot(lower[0, i], sharey=shared)
        if some.empty:
            axes.text(0.5, 0.5, "no Address, or no reader above it", ha="center", transform=axes.transAxes)
            continue
        _panel(axes, some, reader, depth, placebo=i == 0)
        axes.set_title(said, size=6.5, pad=3)
        axes.set_xlabel("readout layer r")
        _letter(axes, "bc"[i])
        if i == 0:
            axes.set_ylabel("shift of M (nats)")
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.legend(handles, labels, loc="upper left", fontsize=6)


def _panel(axes: Any, some: pd.DataFrame, reader: int | None, depth: int, placebo: bool) -> None:
    first = int(some["read"].min())
    for i, (concept, said) in enumerate(CONCEPTS.items()):
        found = curve(metrics.select(some, donor="donor"), concept)
        _band(axes, found, COLOURS[concept], MARKS[concept], said.replace("\n", " "), "-", 0.04 * (i - 1))
    noise = metrics.select(some, donor="random")
    largest = {c: curve(noise, c) for c in CONCEPTS}
    top = {r: max((largest[c][r] for c in CONCEPTS), key=lambda e: abs(e.value)) for r in largest["address"]}
    _band(axes, top, figures.GREY, "", "random direction", "-", 0.08)
    if placebo:
        _band(
            axes,
            curve(metrics.select(some, donor="placebo"), "redirected"),
            figures.BLUE,
            "",
            "same key asked",
            ":",
            -0.08,
        )
    axes.set_yscale("symlog", linthresh=LINEAR)
    axes.axhline(0, color=figures.GREY, linewidth=0.6, zorder=0)
    if reader is not None:
        axes.axvline(reader, color=figures.DARK, linestyle=":", linewidth=0.8, zorder=0)
    axes.set_xlim(first - 0.6, depth - 0.4)
    axes.set_xticks(range(first, depth, max(1, (depth - first) // 8)))


def _band(axes: Any, found: dict[int, Any], colour: str, mark: str, said: str, style: str, step: float) -> None:
    reads, values = [r + step for r in found], [*found.values()]
    axes.errorbar(reads, [e.value for e in values], np.abs([[e.value - e.low for e in values], [e.high - e.value for e in values]]),
                  color=colour, marker=mark, markersize=3, linestyle=style, label=said, elinewidth=0.8)  # fmt: skip


def _letter(axes: Any, letter: str) -> None:
    axes.annotate(
        f"({letter})", (0, 1), (-22, 4), xycoords="axes fraction", textcoords="offset points", weight="bold", ha="right"
    )


if __name__ == "__main__":
    figures.main(draw)
