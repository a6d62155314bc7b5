"""Bars by block: what figures of removal and transplant share.

A slot is a place on the x axis, a series the bars of one colour. Bands mark the Encode and Address blocks, a dotted line
where a reader sits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import ScaledTranslation

from encode_address import figures, metrics
from encode_address.models.layout import runs
from encode_address.stats import Estimate, estimate

# Donors that carry no other address: these markers belong at zero.
CONTROLS = {"other-dictionary": "o", "permuted": "x", "random": "^"}
GROUP = 0.78  # of the distance between two blocks is filled with bars


@dataclass(frozen=True)
class Slot:
    """A place on the x axis: a unit of intervention, its position, and its label of one or two lines."""

    name: str
    x: float
    last_layer: int
    label: tuple[str, str]


@dataclass(frozen=True)
class Series:
    """Bars of one colour, one estimate per slot, and the intact model's value where it has one."""

    label: str
    colour: str
    estimates: list[Estimate]
    intact: float | None = None


def slots_of(removed: pd.DataFrame, own: pd.DataFrame, view: dict[str, Any]) -> list[Slot]:
    """The blocks in order, from the verdict's layout or else from the rows; then a union that is the Address."""
    blocks = (view.get("layout") or {}).get("blocks")
    if blocks:
        known = [(b["name"], max(b["layers"]), b.get("reader") is not None) for b in blocks]
    else:
        units = pd.concat([removed, own])[["block", "layers"]].dropna().drop_duplicates("block")
        whole = units[~units["block"].str.contains(r"\+|^L\d+$|^$")]
        last = whole["layers"].str.extract(r"(\d+)$")[0].astype(int)
        known = sorted(((b, layer, True) for b, layer in zip(whole["block"], last)), key=lambda unit: unit[1])
    slots = [
        Slot(block, i, layer, (block, "" if reader else "no reader")) for i, (block, layer, reader) in enumerate(known)
    ]
    union = "+".join(view.get("address") or [])
    if "+" in union and (own["block"] == union).any():
        slots.append(Slot(union, len(slots) + 0.7, slots[-1].last_layer, ("all of", "Address")))
    return slots


def draw_bars(axes: Any, slots: list[Slot], series: list[Series], label: str, legend_at: float) -> None:
    """Grouped bars with intervals; a dashed line in a series' colour is the intact model."""
    width = GROUP / len(series)
    handles, low, high = [], 0.0, 1.0
    for i, one in enumerate(series):
        known = [(slot.x, e) for slot, e in zip(slots, one.estimates) if e.n]
        if not known:
            continue
        at = [x - GROUP / 2 + (i + 0.5) * width for x, _ in known]
        values = [e.value for _, e in known]
        spread = [[max(0.0, e.value - e.low) for _, e in known], [max(0.0, e.high - e.value) for _, e in known]]
        bars = axes.bar(at, values, width * 0.92, color=one.colour, label=one.label, zorder=2)
        axes.errorbar(
            at, values, yerr=spread, fmt="none", ecolor=figures.DARK, elinewidth=0.6, capsize=0.9, capthick=0.6
        )
        handles.append(bars)
        low, high = min([low] + [e.low for _, e in known]), max([high] + [e.high for _, e in known])
        if one.intact is not None:
            # Lines that lie on one another stay visible: each one's dashes fill the others' gaps.
            dashes = (3 * i, (3, 3 * (len(series) - 1)))
            axes.axhline(one.intact, color=one.colour, linestyle=dashes, linewidth=0.9, zorder=1.5)
    if any(one.intact is not None for one in series):
        axes.text(1.01, 1.0, "intact", transform=axes.get_yaxis_transform(), va="center", size=6)
    axes.axhline(0, color=figures.DARK, linewidth=0.6, zorder=2.5)
    axes.set_ylim(low - 0.03 * (high - low), high + 0.04 * (high - low))
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=[5, 10]))
    axes.set_ylabel(label)
    axes.set_xlim(-0.55, slots[-1].x + 0.55)
    axes.set_xticks([slot.x for slot in slots], [slot.label[0] for slot in slots])
    axes.spines["bottom"].set_visible(False)
    _legend(axes, handles, above=legend_at)


def draw_controls(axes: Any, slots: list[Slot], moved: pd.DataFrame) -> None:
    """Small markers: the share redirected by donors that carry no other address."""
    handles = []
    for i, (donor, marker) in enumerate(CONTROLS.items()):
        rows = metrics.select(moved, donor=donor)
        found = [
            (slot.x, estimate(r["redirected"], r["pair"]))
            for slot in slots
            if len(r := metrics.select(rows, block=slot.name))
        ]
        if found:
            at = [x + GROUP * (i - 1) / 4 for x, _ in found]
            face = figures.DARK if marker == "x" else "white"
            handles += axes.plot(
                at, [e.value for _, e in found], marker, color=figures.DARK, markerfacecolor=face, markersize=2.6,
                markeredgewidth=0.6, clip_on=False, zorder=4, label=donor,
            )  # fmt: skip
    if handles:
        title = axes.plot([], [], " ", label="control donors:")  # its handle is empty, so the row starts further left
        bars = axes.get_legend()
        _legend(axes, title + handles, above=12, left=6.5, handlelength=0.6, columnspacing=0.8)
        axes.add_artist(bars)


def draw_landmarks(panels: list[Any], slots: list[Slot], view: dict[str, Any]) -> None:
    """Bands on the Encode and Address blocks, and a dotted line where a reader layer sits."""
    blocks = [slot for slot in slots if "+" not in slot.name]
    place = {slot.name: slot.x for slot in blocks}
    roles, readers = [], []
    for role, colour in figures.BANDS.items():
        for run in runs(sorted(place[name] for name in view.get(role.lower()) or [] if name in place)):
            roles.append(((run[0] + run[-1]) / 2, role))
            for axes in panels:
                axes.axvspan(run[0] - 0.5, run[-1] + 0.5, color=colour, linewidth=0, zorder=0)
    heads = [figures.head_of(name) for name in view.get("readers") or []]
    for layer in sorted({layer for layer, _ in heads}):
        before = [slot.x for slot in blocks if slot.last_layer < layer]
        if before:
            readers.append((max(before) + 0.5, f"L{layer}H{heads[0][1]}" if len(heads) == 1 else f"L{layer}"))
            for axes in panels:
                axes.axvline(max(before) + 0.5, color=figures.DARK, linestyle=":", linewidth=0.9, zorder=1.8)
    _labels(panels[0], roles)
    _labels(panels[-1], readers)


def _labels(axes: Any, labels: list[tuple[float, str]]) -> None:
    """Texts above the axes, each at its x; one that would touch its left neighbour moves to the right."""
    left, right = axes.get_xlim()
    inch = (right - left) / (axes.figure.get_size_inches()[0] * axes.get_position().width)  # in units of x
    free = float("-inf")
    for x, text in sorted(labels):
        half = 0.032 * len(text) * inch
        x = max(x, free + half)
        free = x + half
        axes.annotate(
            text, (x, 1), (0, 1.5), xycoords=axes.get_xaxis_transform(), textcoords="offset points",
            ha="center", va="bottom", size=6.5, annotation_clip=False,
        )  # fmt: skip


def _legend(axes: Any, handles: list[Any], above: float, left: float = 0, **kwargs: Any) -> None:
    """A one-row legend that starts at the axes' left edge, this many points above their top."""
    shift = ScaledTranslation(-left / 72, above / 72, axes.figure.dpi_scale_trans)
    axes.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0, 1), bbox_transform=axes.transAxes + shift,
        ncols=len(handles), **kwargs,
    )  # fmt: skip
