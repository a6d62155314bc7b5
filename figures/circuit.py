"""The circuit of one model, block by block: what removal breaks, and what a transplant moves.

    python figures/circuit.py RESULTS_DIR

One figure per variant. (a) Each block removed: accuracy, logit gap relative to the intact model's, and attention
of the reader on the asked entry. (b) Each block transplanted at the last token: share of hosts that answer with the
donor's entry, and attention of the reader on that entry; markers are donors that should not redirect. Bars have
95 % intervals over prompt pairs. An Address of several blocks is also shown transplanted as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import ScaledTranslation

from encode_address import figures, metrics
from encode_address.models.layout import runs
from encode_address.stats import NOTHING, Estimate, estimate, per_pair

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


def draw(table: pd.DataFrame, verdict: dict[str, Any] | None, folder: Path) -> list[Path]:
    """Write one figure per variant that has removal and transplant rows; returns the files."""
    return figures.draw_each("circuit", _figure, table, verdict, folder)


def _figure(rows: pd.DataFrame, view: dict[str, Any], variant: str):
    intact = metrics.select(rows, experiment="baseline", intervention="none")
    removed = metrics.select(rows, experiment="removal", intervention="remove", mode="zero")
    moved = metrics.select(rows, experiment="transplant", intervention="transplant", position="final")
    own = metrics.select(moved, donor="same-dictionary")
    slots = _slots(removed, own, view)
    if intact.empty or removed.empty or own.empty or not slots:
        return None
    head = figures.reader(view, intact, "target")
    width = min(7.0, max(3.4, 1.0 + 0.27 * (slots[-1].x + 1)))
    figure, (top, bottom) = figures.panels(width, 2, 1.15, above=0.36, between=0.52, below=0.48, right=0.36)
    removal = [_unit(removed, slot) for slot in slots]
    transplant = [_unit(own, slot) for slot in slots]
    after_removal = [
        Series("accuracy", figures.BLUE, [metrics.accuracy(r) for r in removal], metrics.accuracy(intact).value),
        Series("gap ÷ intact", figures.SKY, [_gap_ratio(r, intact) for r in removal], 1.0),
        Series(
            "attention on asked entry",
            figures.ORANGE,
            [_attention(_clean(r), head, "target") for r in removal],
            _attention(_clean(intact), head, "target").value,
        ),
    ]
    name = f" (L{head[0]}H{head[1]})" if head else ""
    after_transplant = [
        Series("redirected", figures.GREEN, [estimate(r["redirected"], r["pair"]) for r in transplant]),
        Series(
            f"attention on donor's entry{name}",
            figures.ORANGE,
            [_attention(r, head, "donor_index") for r in transplant],
        ),
    ]
    _bars(top, slots, after_removal, "after removal", legend_at=12)
    _bars(bottom, slots, after_transplant, "after transplant", legend_at=23)
    _controls(bottom, slots, moved)
    _landmarks(top, bottom, slots, view)
    counts = dict.fromkeys(f"{r['pair'].nunique()}" for r in (removed, own))
    name = f"{rows['model'].iloc[0]}, " if "model" in rows else ""
    bottom.set_xlabel(f"block ({name}{variant}, n = {' and '.join(counts)} pairs)", labelpad=12)
    for slot in slots:
        bottom.annotate(
            slot.label[1], (slot.x, 0), (0, -12), xycoords=bottom.get_xaxis_transform(), textcoords="offset points",
            ha="center", va="top", size=6.5,
        )  # fmt: skip
    for axes, letter in ((top, "a"), (bottom, "b")):
        axes.text(-0.02, 1.04, f"({letter})", transform=axes.transAxes, ha="right", va="bottom", weight="bold")
    return figure


# -- what is shown ---------------------------------------------------------------
def _slots(removed: pd.DataFrame, own: pd.DataFrame, view: dict[str, Any]) -> list[Slot]:
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


def _unit(rows: pd.DataFrame, slot: Slot) -> pd.DataFrame:
    return metrics.select(rows, block=slot.name)


def _clean(rows: pd.DataFrame) -> pd.DataFrame:
    return metrics.select(rows, form="clean")


def _attention(rows: pd.DataFrame, head: tuple[int, int] | None, index: str) -> Estimate:
    if head is None or rows.empty:
        return NOTHING
    return estimate(metrics.attention(rows, head, index), rows["pair"])


def _gap_ratio(rows: pd.DataFrame, intact: pd.DataFrame) -> Estimate:
    """Mean gap of `rows` over the mean intact gap of the same pairs.

    The values given to `estimate` have this ratio as their mean, and vary as it does when pairs are drawn anew
    (both means move together), so that its interval is the ratio's.
    """
    if rows.empty:
        return NOTHING
    gaps = pd.concat([2 * per_pair(rows, "margin"), 2 * per_pair(intact, "margin")], axis=1, join="inner").dropna()
    if gaps.empty:
        return NOTHING
    left, whole = gaps.iloc[:, 0], gaps.iloc[:, 1]
    ratio = left.mean() / whole.mean()
    values = ratio + (left - ratio * whole) / whole.mean()
    return estimate(values, values.index.to_series())


# -- how ---------------------------------------------------------------------------
def _bars(axes: Any, slots: list[Slot], series: list[Series], label: str, legend_at: float) -> None:
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


def _controls(axes: Any, slots: list[Slot], moved: pd.DataFrame) -> None:
    """Small markers: the share redirected by donors that carry no other address."""
    handles = []
    for i, (donor, marker) in enumerate(CONTROLS.items()):
        rows = metrics.select(moved, donor=donor)
        found = [(slot.x, estimate(r["redirected"], r["pair"])) for slot in slots if len(r := _unit(rows, slot))]
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


def _landmarks(top: Any, bottom: Any, slots: list[Slot], view: dict[str, Any]) -> None:
    """Bands on the Encode and Address blocks, and a dotted line where a reader layer sits."""
    blocks = [slot for slot in slots if "+" not in slot.name]
    place = {slot.name: slot.x for slot in blocks}
    roles, readers = [], []
    for role, colour in figures.BANDS.items():
        for run in runs(sorted(place[name] for name in view.get(role.lower()) or [] if name in place)):
            roles.append(((run[0] + run[-1]) / 2, role))
            for axes in (top, bottom):
                axes.axvspan(run[0] - 0.5, run[-1] + 0.5, color=colour, linewidth=0, zorder=0)
    heads = [figures.head_of(name) for name in view.get("readers") or []]
    for layer in sorted({layer for layer, _ in heads}):
        before = [slot.x for slot in blocks if slot.last_layer < layer]
        if before:
            readers.append((max(before) + 0.5, f"L{layer}H{heads[0][1]}" if len(heads) == 1 else f"L{layer}"))
            for axes in (top, bottom):
                axes.axvline(max(before) + 0.5, color=figures.DARK, linestyle=":", linewidth=0.9, zorder=1.8)
    _labels(top, roles)
    _labels(bottom, readers)


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


if __name__ == "__main__":
    figures.main(draw)
