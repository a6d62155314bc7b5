"""A donor's block in place of the host's: what is left of retrieval and of text, beside the controls.

    python figures/replacement.py RESULTS_DIR

One figure per variant, a row per slot. Left: accuracy of the intact host, with the donor's block between two maps, and with each
control (of a stopped model: of the best among the dictionary's values). Right: perplexity of text (log scale). Bars have 95 % intervals
over prompts, or over text chunks; a dashed line is the intact host. "uninformative" stands over a slot whose best control is within .1 of the
donor's block, or where removal leaves .9 or more.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from encode_address import figures, metrics
from encode_address.cross.replaced import measure_of, rate
from encode_address.cross.stand_ins import DONOR, IDENTITY, INTACT, OWN
from encode_address.stats import Estimate, estimate

WIDTH, LEFT, RIGHT, BETWEEN = 7.0, 1.35, 0.12, 0.22  # inches
BAR, ABOVE, GAP, BELOW = 0.17, 0.36, 0.62, 0.36
TEXT_SHARE = 0.3  # of what is drawn goes to perplexity


def draw(table: pd.DataFrame, verdict: dict[str, Any] | None, folder: Path) -> list[Path]:
    """Write one figure per variant that has rows of `replace`; returns the files."""
    return figures.draw_each("replacement", _figure, table, verdict, folder)


def _figure(rows: pd.DataFrame, view: dict[str, Any], variant: str) -> Figure | None:
    own, text = metrics.select(rows, experiment="replace"), metrics.select(rows, experiment="replace-text")
    if own.empty:
        return None
    cut = next(iter(own["cut"].dropna().unique()), None) if "cut" in own else None
    slots = list(own["role"].unique())
    arms = {slot: list(dict.fromkeys(own[own["role"] == slot]["arm"])) for slot in slots}
    heights = [BAR * len(arms[slot]) for slot in slots]
    total = ABOVE + sum(heights) + GAP * (len(slots) - 1) + BELOW
    figure = Figure(figsize=(WIDTH, total))
    FigureCanvasAgg(figure)
    wide = WIDTH - LEFT - RIGHT - (BETWEEN if len(text) else 0)
    share = wide * (1 - TEXT_SHARE) if len(text) else wide
    top = ABOVE
    for number, (slot, height) in enumerate(zip(slots, heights)):
        some, lines = own[own["role"] == slot], metrics.select(text, role=slot)
        bottom = 1 - (top + height) / total
        axes = figure.add_axes((LEFT / WIDTH, bottom, share / WIDTH, height / total))
        measure = measure_of(None if cut is None else int(cut))
        _bars(axes, arms[slot], {arm: rate(some, arm, measure) for arm in arms[slot]}, zero=0.0)
        axes.set_xlim(0, 1.02)
        axes.set_yticks(range(len(arms[slot])), [_named(arm, some) for arm in arms[slot]])
        axes.set_title(_title(slot, some, view, number), loc="left", size=7, pad=4)
        last = number == len(slots) - 1
        if last:
            axes.set_xlabel("accuracy" if cut is None else f"choice accuracy, stopped after L{cut}")
        if len(lines):
            left = (LEFT + share + BETWEEN) / WIDTH
            beside = figure.add_axes((left, bottom, wide * TEXT_SHARE / WIDTH, height / total))
            _bars(beside, arms[slot], {arm: _perplexity(lines, arm) for arm in arms[slot]}, zero=1.0)
            beside.set_xscale("log")
            beside.set_xlim(1, None)
            beside.set_yticks([])
            if last:
                beside.set_xlabel("perplexity of text")
        top += height + GAP
    return figure


def _bars(axes: Any, arms: list[str], values: dict[str, Estimate], zero: float) -> None:
    """Horizontal bars from `zero`, the first arm on top, with intervals; a dashed line at the intact host's."""
    for place, arm in enumerate(arms):
        one = values[arm]
        if not one.n:
            continue
        axes.barh(place, one.value - zero, 0.74, left=zero, color=_colour(arm), zorder=2)
        ends = [[max(0.0, one.value - one.low)], [max(0.0, one.high - one.value)]]
        axes.errorbar(one.value, place, xerr=ends, fmt="none", ecolor=figures.DARK, elinewidth=0.6, capsize=1.2, capthick=0.6, zorder=3)  # fmt: skip
    if (intact := values.get(INTACT)) is not None and intact.n:
        axes.axvline(intact.value, color=figures.DARK, linestyle=(0, (3, 3)), linewidth=0.7, zorder=1)
    axes.set_ylim(len(arms) - 0.45, -0.55)


def _perplexity(text: pd.DataFrame, arm: str) -> Estimate:
    rows = metrics.select(text, arm=arm)
    return estimate(rows["loss"], rows["pair"]).exp()


def _colour(arm: str) -> str:
    if arm == DONOR:
        return figures.BLUE
    return {INTACT: figures.DARK, OWN: figures.GREEN, IDENTITY: figures.GREEN}.get(arm, figures.GREY)


def _named(arm: str, rows: pd.DataFrame) -> str:
    """An arm as the figure says it, with the donor's block where it is the donor's."""
    if arm == DONOR:
        return f"donor {metrics.select(rows, arm=DONOR)['source'].iloc[0]}"
    return {OWN: "own block, refitted maps", IDENTITY: "own block, no maps"}.get(arm, arm)


def _title(slot: str, rows: pd.DataFrame, view: dict[str, Any], number: int) -> str:
    model, donor = (rows[name].iloc[0] if name in rows else "" for name in ("model", "donor_model"))
    what = f"{slot} slot" if slot != "both" else "both slots"
    said = f"({chr(ord('a') + number)}) {what}: {rows['block'].iloc[0]} of {model} replaced, donor {donor}, "
    said += f"n = {rows['pair'].nunique()}"
    best = ((view.get("figures") or {}).get(slot) or {}).get("donor - best control") or {}
    if not best or not math.isfinite(best["value"]):
        return said
    gap = (
        f"donor's block - best control ({best['control']}): {best['value']:.2f} [{best['low']:.2f}, {best['high']:.2f}]"
    )
    return f"{said}\n{gap}" + (", uninformative" if best["note"] else "")


if __name__ == "__main__":
    figures.main(draw)
