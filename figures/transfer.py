"""Output transplant between two models: what a donor's block does in a host through a linear map.

    python figures/transfer.py RESULTS_DIR

One figure per variant. (a) Shares of hosts that answer with the donor's entry, and with their own, under each condition; maps have all fit
prompts, and, unless said, no key of the test among their fit keys. (b) The mapped condition against the number of fit prompts,
and (c) against the number of distinct fit keys. Intervals are 95 % over prompt pairs; dots are single seeds of split and map.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from encode_address import figures, metrics
from encode_address.cross.transferred import by_seed, whole
from encode_address.cross.transplants import BY_KEY, EMBEDDING, HOST, MAPPED, MEAN, OTHER, SAME, SELF, SHUFFLED
from encode_address.stats import Estimate, estimate

WIDTH, BARS, ABOVE, BETWEEN, CURVES, BELOW = 3.4, 1.25, 0.34, 0.88, 1.0, 0.42  # inches
LEFT, RIGHT = 0.46, 0.12


def draw(table: pd.DataFrame, verdict: dict[str, Any] | None, folder: Path) -> list[Path]:
    """Write one figure per variant that has mapped rows of its own; returns the files."""
    return figures.draw_each("transfer", _figure, table, verdict, folder)


def _figure(rows: pd.DataFrame, view: dict[str, Any], variant: str) -> Figure | None:
    rows = metrics.select(rows, experiment="transfer")
    if rows.empty or whole(rows, MAPPED).empty:
        return None
    total = ABOVE + BARS + BETWEEN + CURVES + BELOW
    figure = Figure(figsize=(WIDTH, total))
    FigureCanvasAgg(figure)
    wide = (WIDTH - LEFT - RIGHT) / WIDTH
    top = figure.add_axes((LEFT / WIDTH, (BELOW + CURVES + BETWEEN) / total, wide, BARS / total))
    prompts, keys = (
        figure.add_axes((LEFT / WIDTH + side * wide * 0.56, BELOW / total, wide * 0.44, CURVES / total))
        for side in (0, 1)
    )
    _bars(top, bars(rows))
    host = metrics.select(rows, condition=HOST)
    same = estimate(*_column(whole(rows, SAME)))
    curve = metrics.select(rows, condition=MAPPED, keys="disjoint", fit_variant=variant)
    all_keys = curve["fit_keys"].max()
    few = curve[curve["fit_keys"] < all_keys]
    matched = curve[curve["fit_keys"] == all_keys]
    if len(few):  # the point of all keys that has as many prompts as those of fewer
        many = few["fit_prompts"].max()
        matched = matched[matched["fit_prompts"] == many]
    seeds = few["dictionary_seed"].unique() if len(few) else curve["dictionary_seed"].unique()
    matched = matched[matched["dictionary_seed"].isin(seeds)]
    _curve(prompts, curve[curve["fit_keys"] == all_keys], "fit_prompts", f"fit prompts ({all_keys:.0f} keys)", same)
    said = f"fit keys ({int(few['fit_prompts'].max()):,} prompts)" if len(few) else "fit keys"
    _curve(keys, pd.concat([few, matched]), "fit_keys", said, same)
    prompts.set_ylabel("redirected")
    for axes, letter, x in ((top, "a", -0.06), (prompts, "b", -0.14), (keys, "c", -0.12)):
        axes.text(x, 1.06, f"({letter})", transform=axes.transAxes, ha="right", va="bottom", weight="bold")
    donor = rows["donor_model"].iloc[0]
    sites = (
        f"{view['source']} of {donor} in {view['target']} of {host['model'].iloc[0]}" if view.get("source") else donor
    )
    top.set_title(f"{sites}, {variant}, n = {host['pair'].nunique()} pairs", size=6.5, loc="left", pad=13)
    prompts.annotate("dashed: same model", (0, 1), (2, 2), xycoords="axes fraction", textcoords="offset points", size=6)
    return figure


def bars(rows: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """(label, rows) of every condition that was run, in order."""
    own = whole(rows, MAPPED)
    across = metrics.select(rows, condition=MAPPED, keys="disjoint")
    across = across[across["fit_variant"] != across["variant"]]
    others = metrics.select(rows, condition=OTHER)["source"].unique()
    out = [
        ("host", whole(rows, HOST)),
        ("same model", whole(rows, SAME)),
        ("mapped", own),
        ("penalty by key", whole(rows, BY_KEY)),
        ("keys shared", whole(rows, MAPPED, "shared")),
        *((f"fit on {name}", across[across["fit_variant"] == name]) for name in across["fit_variant"].unique()),
        ("mapped self", whole(rows, SELF)),
        ("shuffled map", whole(rows, SHUFFLED)),
        ("mean map", whole(rows, MEAN)),
        *((f"source {name}", whole(rows, OTHER, source=name)) for name in others),
        ("embedding", whole(rows, EMBEDDING)),
    ]
    return [(label, some) for label, some in out if len(some)]


def _bars(axes: Any, found: list[tuple[str, pd.DataFrame]]) -> None:
    handles = []
    for i, (column, label, colour) in enumerate(
        (("redirected", "answers the donor's entry", figures.GREEN), ("kept", "answers its own", figures.GREY))
    ):
        estimates = [estimate(*_column(some, column)) for _, some in found]
        at = [x + (i - 0.5) * 0.38 for x in range(len(found))]
        handles.append(axes.bar(at, [e.value for e in estimates], 0.35, color=colour, label=label, zorder=2))
        _errors(axes, at, estimates)
        for x, (_, some) in zip(at, found):
            seeds = by_seed(some, column)
            if len(seeds) > 1:
                axes.plot([x] * len(seeds), seeds, ".", color=figures.DARK, markersize=2.2, zorder=4, clip_on=False)
    axes.set_xticks(range(len(found)), [label for label, _ in found], rotation=40, ha="right", rotation_mode="anchor")
    axes.set_xlim(-0.6, len(found) - 0.4)
    axes.set_ylim(0, 1.04)
    axes.set_yticks([0, 0.5, 1])
    axes.set_ylabel("share of hosts")
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 0.99), ncols=2, borderaxespad=0.1)


def _curve(axes: Any, rows: pd.DataFrame, column: str, label: str, same: Estimate) -> None:
    points = [(x, estimate(*_column(some))) for x, some in rows.groupby(column)]
    at, estimates = [x for x, _ in points], [e for _, e in points]
    axes.plot(at, [e.value for e in estimates], "-o", color=figures.GREEN, markersize=2.6, linewidth=0.9)
    _errors(axes, at, estimates)
    if same.n:
        axes.axhline(same.value, color=figures.DARK, linestyle=(0, (3, 3)), linewidth=0.7, zorder=1)
    axes.set_xscale("log", base=2)
    shown = at if len(at) <= 5 else at[:: -(-len(at) // 4)]
    axes.set_xticks(shown, [f"{x:g}" for x in shown])
    axes.minorticks_off()
    axes.set_ylim(-0.03, 1.06)
    axes.set_yticks([0, 0.5, 1])
    axes.set_xlabel(label)


def _errors(axes: Any, at: list[float], estimates: list[Estimate]) -> None:
    spread = [[max(0.0, e.value - e.low) for e in estimates], [max(0.0, e.high - e.value) for e in estimates]]
    values = [e.value for e in estimates]
    axes.errorbar(
        at, values, yerr=spread, fmt="none", ecolor=figures.DARK, elinewidth=0.6, capsize=0.9, capthick=0.6, zorder=3
    )


def _column(rows: pd.DataFrame, column: str = "redirected") -> tuple[pd.Series, pd.Series]:
    return rows[column], rows["pair"]


if __name__ == "__main__":
    figures.main(draw)
