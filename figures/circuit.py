"""The circuit of one model, block by block: what removal breaks, and what a transplant moves.

    python figures/circuit.py RESULTS_DIR

One figure per variant. (a) Each block removed: accuracy, logit gap relative to the intact model's, and attention
of the reader on the asked entry. (b) Each block transplanted at the last token: share of hosts that answer with the
donor's entry, and attention of the reader on that entry; markers are donors that should not redirect. Bars have
95 % intervals over prompt pairs. An Address of several blocks is also shown transplanted as a whole.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from encode_address import figures, metrics
from encode_address.figures.bars import Series, Slot, draw_bars, draw_controls, draw_landmarks, slots_of
from encode_address.stats import NOTHING, Estimate, estimate, per_pair


def draw(table: pd.DataFrame, verdict: dict[str, Any] | None, folder: Path) -> list[Path]:
    """Write one figure per variant that has removal and transplant rows; returns the files."""
    return figures.draw_each("circuit", _figure, table, verdict, folder)


def _figure(rows: pd.DataFrame, view: dict[str, Any], variant: str):
    intact = metrics.select(rows, experiment="baseline", intervention="none")
    removed = metrics.select(rows, experiment="removal", intervention="remove", mode="zero")
    moved = metrics.select(rows, experiment="transplant", intervention="transplant", position="final")
    own = metrics.select(moved, donor="same-dictionary")
    slots = slots_of(removed, own, view)
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
    draw_bars(top, slots, after_removal, "after removal", legend_at=12)
    draw_bars(bottom, slots, after_transplant, "after transplant", legend_at=23)
    draw_controls(bottom, slots, moved)
    draw_landmarks([top, bottom], slots, view)
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


if __name__ == "__main__":
    figures.main(draw)
