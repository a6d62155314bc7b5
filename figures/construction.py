"""Construction: the Address builds the reader's query, from its states, with the help of the blocks before it.

    python figures/construction.py RESULTS_DIR

One figure per model. (a) Selectivity of the reader, intact and with keys or query from a run without the Address, or query from one
without the block before it; the table's first variant dark, the second light; how often the asked entry comes first is printed
above. (b) Of the first variant, answers redirected by what is taken from the donor: the Address' output at the last token and at the
question's earlier tokens, the states before the last token of the Address, of the block before it and of the first block, and the
input of the Address' mixers at the last token. (c) Answers redirected by the Address of donors without each earlier block, and
without several. Bars have 95 % intervals over prompt pairs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from encode_address import figures, metrics
from encode_address.experiments import state, upstream
from encode_address.experiments.query_key import selectivity, top1
from encode_address.figures import gathered
from encode_address.figures.bars import GROUP, Series, Slot, draw_bars
from encode_address.figures.state import MODES
from encode_address.stats import NOTHING, Estimate, estimate

COLOURS = (figures.DARK, figures.GREY)
HIGH, LINE, ABOVE, BELOW, UPRIGHT, RIGHT = 1.45, 0.24, 0.36, 0.66, 0.22, 0.1  # inches
ROOM = {"a": (0.5, 2.05), "b": (1.15, 1.45), "c": (0.62, 1.13)}  # left of each panel, and its width
CROWDED = 4  # slots, above which their labels stand upright
Panel = dict[str, Any]


def draw(table: pd.DataFrame, verdict: dict[str, Any] | None, folder: Path) -> list[Path]:
    """Write the figure; [] without an Address, or where fewer than two panels have rows."""
    rows = figures.shown(table)
    names = figures.variants(rows)
    if not names:
        return []
    first = metrics.select(rows, variant=names[0])
    view = figures.verdict_of(verdict, names[0])
    address = view.get("address") or []
    found = {
        "a": _sides(rows, verdict, names[:2]) if address else None,
        "b": _taken(first, view, address) if address else None,
        "c": _needed(first, view, address) if address else None,
    }
    found = {letter: panel for letter, panel in found.items() if panel}
    if len(found) < 2:
        return []
    with figures.style():
        name = f"{rows['model'].iloc[0]}, " if "model" in rows else ""
        return figures.write(_figure(found, f"{name}{names[0]}"), folder, "construction", names[0])


def _figure(found: dict[str, Panel], what: str) -> Figure:
    high = max(HIGH, LINE * len(found["b"]["bars"]) if "b" in found else 0)
    below = BELOW + UPRIGHT * any(len(panel.get("slots", ())) > CROWDED for panel in found.values())
    width, height = sum(sum(ROOM[letter]) for letter in found) + RIGHT, ABOVE + high + below
    figure = Figure(figsize=(width, height))
    figures.FigureCanvasAgg(figure)
    at = 0.0
    for letter, panel in found.items():
        left, across = ROOM[letter]
        axes = figure.add_axes(((at + left) / width, below / height, across / width, high / height))
        at += left + across
        if letter == "b":
            _lying(axes, panel["bars"])
        else:
            draw_bars(axes, panel["slots"], panel["series"], panel["label"], legend_at=12)
            if len(panel["slots"]) > CROWDED:
                axes.tick_params(axis="x", labelrotation=90, labelsize=6)
        for x, text in panel.get("above", {}).items():
            axes.annotate(
                text, (x, 1), (0, 1), xycoords=axes.get_xaxis_transform(), textcoords="offset points", ha="center", va="bottom",
                size=6,
            )  # fmt: skip
        axes.set_xlabel(panel["below"])
        axes.annotate(
            f"({letter})",
            (0, 1),
            (8 - 72 * left, 13),
            xycoords="axes fraction",
            textcoords="offset points",
            weight="bold",
        )
    figure.text(0.06 / width, 0.03 / height, what, ha="left", va="bottom", size=6.5)
    return figure


# -- (a) query and keys ------------------------------------------------------------------------------------------------
def _sides(rows: pd.DataFrame, verdict: dict[str, Any] | None, names: list[str]) -> Panel | None:
    """Selectivity by side; of the second variant only what was asked about the first one's blocks."""
    sides = metrics.select(rows, experiment="query-key", ablation="zero")
    address = "+".join(figures.verdict_of(verdict, names[0]).get("address") or [])
    own = metrics.select(sides, variant=names[0])
    blocks = [address, *(block for block in dict.fromkeys(own["block"]) if block != address)] if len(own) else []
    asked = [(address, "intact", "intact"), (address, "intact", "without"), *((b, "without", "intact") for b in blocks)]
    said = {address: gathered.short(address.split("+"))}
    labels = ["intact", f"keys\nwithout\n{said[address]}", *(f"query\nwithout\n{said.get(b, b)}" for b in blocks)]
    series, first, counts = [], [], []
    for variant, colour in zip(names, COLOURS):
        some = metrics.select(sides, variant=variant)
        head = figures.reader(figures.verdict_of(verdict, variant), some, "target") if len(some) else None
        if head is None:
            continue
        parts = [metrics.select(some, block=b, query_from=query, key_from=key) for b, query, key in asked]
        values = [estimate(selectivity(part, head), part["pair"]) if len(part) else NOTHING for part in parts]
        series.append(Series(f"{variant}, L{head[0]}H{head[1]}", colour, values))
        first.append([f"{top1(part, head).mean():.2f}" if len(part) else "–" for part in parts])
        counts.append(str(some["pair"].nunique()))
    if not any(value.n for one in series for value in one.estimates):
        return None
    slots = [Slot(label, i, 0, (label, "")) for i, label in enumerate(labels)]
    return {
        "slots": slots,
        "series": series,
        "label": "selectivity",
        "above": {i: " / ".join(values) for i, values in enumerate(zip(*first))},
        "below": f"n = {' and '.join(dict.fromkeys(counts))} pairs",
    }


# -- (b) what is taken from the donor ------------------------------------------------------------------------------------
def _taken(rows: pd.DataFrame, view: dict[str, Any], address: list[str]) -> Panel | None:
    """Lying bars: (label, [(colour, estimate)]), from the output down to the input."""
    states = metrics.select(rows, experiment="state", intervention="state")
    if states.empty:
        return None
    blocks = [block["name"] for block in (view.get("layout") or {}).get("blocks") or []]
    before = blocks[: blocks.index(address[0])] if address[0] in blocks else []
    name, whole = gathered.short(address), "+".join(address)
    moved = {"experiment": "transplant", "intervention": "transplant", "donor": "same-dictionary", "block": whole}
    final, earlier = {**moved, "position": "final"}, {**moved, "position": "question-before"}
    drawn = gathered.of_one_draw(rows, final, earlier)
    drawn = drawn if len(drawn) else gathered.of_one_draw(rows, final)
    bars = [
        (f"{name}'s output,\nlast token", [(figures.DARK, _redirected(metrics.select(drawn, **final)))]),
        (f"{name}'s output,\nquestion before", [(figures.DARK, _redirected(metrics.select(drawn, **earlier)))]),
    ]
    for block in dict.fromkeys([*address, *before[-1:], *before[:1]]):
        own = [(colour, state.redirected(rows, block, mode)) for mode, (_, colour) in MODES.items()]
        bars.append((f"{block}'s states", own))
    bars += [(f"{b}'s input,\nlast token", [(figures.DARK, state.redirected(rows, b, "input"))]) for b in address]
    bars = [(label, known) for label, own in bars if (known := [(colour, e) for colour, e in own if e.n])]
    counts = dict.fromkeys(str(e.n) for _, own in bars for _, e in own)
    return {"bars": bars, "below": f"redirected (n = {' and '.join(counts)} pairs)"}


def _lying(axes: Any, bars: list[tuple[str, list[tuple[str, Estimate]]]]) -> None:
    for y, (_, own) in enumerate(bars):
        height = GROUP / max(len(own), 2)
        for i, (colour, e) in enumerate(own):
            at = y + (i - (len(own) - 1) / 2) * height
            axes.barh(at, e.value, height * 0.92, color=colour, zorder=2)
            spread = [[max(0.0, e.value - e.low)], [max(0.0, e.high - e.value)]]
            axes.errorbar(
                e.value,
                at,
                xerr=spread,
                fmt="none",
                ecolor="#777777",
                elinewidth=0.6,
                capsize=0.9,
                capthick=0.6,
                zorder=3,
            )
    axes.axvline(0, color=figures.DARK, linewidth=0.6, zorder=2.5)
    axes.set_xlim(-0.02, 1.04)
    axes.set_xticks([0, 0.5, 1])
    axes.set_ylim(len(bars) - 0.45, -0.55)
    axes.set_yticks(range(len(bars)), [label for label, _ in bars])
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", length=2, pad=2)
    axes.spines["left"].set_visible(False)
    shown = {colour for _, own in bars for colour, _ in own}
    named = {c: f"{label} states" if mode == "both" else label for mode, (label, c) in MODES.items()}
    handles = [axes.barh([0], [0], color=c, label=label) for c, label in named.items() if c in shown]
    axes.legend(handles=handles, loc="lower right", bbox_to_anchor=(1.02, 1.06), ncols=3, columnspacing=0.8)


# -- (c) what the Address needs ----------------------------------------------------------------------------------------
def _needed(rows: pd.DataFrame, view: dict[str, Any], address: list[str]) -> Panel | None:
    """Donors as they are, without each block before the Address, and without several of them."""
    rows = metrics.select(rows, experiment="upstream", donor="same-dictionary")
    blocks = [block["name"] for block in (view.get("layout") or {}).get("blocks") or []]
    if rows.empty or address[0] not in blocks:
        return None
    after = blocks[blocks.index(address[0]) :]
    names = [name for name in dict.fromkeys(rows["without"]) if name not in after]
    wrapped = [name.replace(" ", "\n" if len(names) <= CROWDED else " ") or "none" for name in names]
    slots = [Slot(name, i, 0, (label, "")) for i, (name, label) in enumerate(zip(names, wrapped))]
    shares = [upstream.redirected(rows, name) for name in names]
    return {
        "slots": slots,
        "series": [Series("redirected", figures.GREEN, shares)],
        "label": "share of pairs",
        "below": f"removed in the donor\nof {gathered.short(address)} (n = {rows['pair'].nunique()} pairs)",
    }


def _redirected(rows: pd.DataFrame) -> Estimate:
    rows = gathered.once(rows) if len(rows) else rows
    return estimate(rows["redirected"], rows["pair"]) if len(rows) else NOTHING


if __name__ == "__main__":
    figures.main(draw, gathered.gathered)
