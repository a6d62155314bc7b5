"""Query and key: what the reader's two sides lose without a block, and what a transplant's redirect goes through.

    python figures/query_key.py RESULTS_DIR

One figure per variant. (a) Selectivity of the reader head, with query and keys from the intact run or from one without the
block; the share of prompts in which the asked entry comes first is printed above. (b) Answers redirected by the Address's
transplant while one site of all readers is held at the host's, and by that site alone. 95 % intervals over prompt pairs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from encode_address import figures, metrics
from encode_address.experiments.query_key import SIDES, SITES, mediation, selectivity, top1
from encode_address.figures.bars import Series, Slot, draw_bars
from encode_address.stats import NOTHING, Estimate, estimate

COLOURS = (figures.BLUE, figures.SKY)
SAID = {
    ("intact", "intact"): "intact",
    ("without", "intact"): "query\nwithout",
    ("intact", "without"): "keys\nwithout",
    ("without", "without"): "both\nwithout",
}


def draw(table: pd.DataFrame, verdict: dict[str, Any] | None, folder: Path) -> list[Path]:
    """Write one figure per variant that has query-key rows; returns the files."""
    return figures.draw_each("query-key", _figure, table, verdict, folder)


def _figure(rows: pd.DataFrame, view: dict[str, Any], variant: str):
    sides = metrics.select(rows, experiment="query-key", ablation="zero")
    moved = metrics.select(rows, experiment="mediation")
    head = figures.reader(view, sides, "target") if len(sides) else None
    if head is None or moved.empty:
        return None
    figure, (top, bottom) = figures.panels(3.4, 2, 1.2, above=0.3, between=0.72, below=0.56, right=0.2, sharex=False)
    slots = [Slot(SAID[pair], i, i, (SAID[pair], "")) for i, pair in enumerate(SIDES)]
    blocks = list(dict.fromkeys(sides["block"]))
    series = [
        Series(f"without {block}", COLOURS[i % 2], [_selectivity(sides, block, pair, head) for pair in SIDES])
        for i, block in enumerate(blocks)
    ]
    draw_bars(top, slots, series, f"selectivity of L{head[0]}H{head[1]}", legend_at=8)
    _first(top, sides, blocks, head)
    sites = [site for site in (*SITES, "all") if site in set(moved["site"])]
    places = [Slot("", 0, 0, ("transplant", ""))] + [Slot(s, i, i, (s, "")) for i, s in enumerate(sites, 1)]
    arms = [mediation(rows, site) for site in sites]
    through = [
        Series("site held at the host's", figures.ORANGE, [NOTHING, *(arm["held"] for arm in arms)]),
        Series("as it is", figures.DARK, [arms[0]["transplant"], *[NOTHING] * len(sites)]),
        Series("site alone", figures.GREEN, [NOTHING, *(arm["alone"] for arm in arms)]),
    ]
    draw_bars(bottom, places, through, "redirected", legend_at=1)
    name = f"{rows['model'].iloc[0]}, " if "model" in rows else ""
    bottom.set_xlabel(f"site of the readers ({name}{variant}, n = {moved['pair'].nunique()} pairs)")
    for axes, letter in ((top, "a"), (bottom, "b")):
        axes.text(-0.02, 1.04, f"({letter})", transform=axes.transAxes, ha="right", va="bottom", weight="bold")
    return figure


def _selectivity(sides: pd.DataFrame, block: str, pair: tuple[str, str], head: tuple[int, int]) -> Estimate:
    rows = metrics.select(sides, block=block, query_from=pair[0], key_from=pair[1])
    return estimate(selectivity(rows, head), rows["pair"]) if len(rows) else NOTHING


def _first(axes: Any, sides: pd.DataFrame, blocks: list[str], head: tuple[int, int]) -> None:
    """Above each group of bars, how often the asked entry comes first: one number per block."""
    for i, (query, key) in enumerate(SIDES):
        some = [metrics.select(sides, block=block, query_from=query, key_from=key) for block in blocks]
        text = " / ".join(f"{top1(rows, head).mean():.2f}" for rows in some if len(rows))
        axes.annotate(
            text, (i, 1), (0, 1), xycoords=axes.get_xaxis_transform(), textcoords="offset points",
            ha="center", va="bottom", size=6,
        )  # fmt: skip


if __name__ == "__main__":
    figures.main(draw)
