"""What rows of the grid say: shifts against the unpatched run, pooled with intervals over targets and donors. Pure: pandas and numpy.

Everything is recomputed from rows, never from earlier summaries: an average of several cells is the average of their rows, and its
interval is of that average.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd

from encode_address.metrics import select
from encode_address.stats import NOTHING, RESAMPLES, Estimate, wilson

MEASURES = ("M", "L", "R")
KEY = ["arm", "donor", "path", "position", "pair", "read"]
DESTROYED = 0.5  # accuracy below which a patch has destroyed the task
CLEAN = "none"


def readout(rows: pd.DataFrame, measure: str, concept: str, vocabulary: int) -> pd.Series:
    """R, L or M (see `readouts`) of a concept, per row of the grid. R and L are NaN where the lens knows no ranks."""
    if measure == "M":
        return rows[f"M.{concept}"].astype(float)
    rank = rows[f"rank.{concept}"].astype(float)
    return -np.log10(rank + 1) if measure == "L" else 1 - rank / max(1, vocabulary - 1)


def shifts(
    rows: pd.DataFrame, concepts: Sequence[str], vocabulary: int, measures: Sequence[str] = ("M",)
) -> pd.DataFrame:
    """The patched rows of a grid, with columns `dM.<concept>` (dL, dR): the readout minus that of the same target, unpatched, on the
    same path at the same layer, of the same run of the grid."""
    rows = select(rows, part="grid")
    names = [f"d{measure}.{concept}" for measure in measures for concept in concepts]
    values = pd.DataFrame(
        {f"d{m}.{c}": readout(rows, m, c, vocabulary) for m in measures for c in concepts}, index=rows.index
    )
    known = rows.drop(columns=[name for name in names if name in rows])
    clean = values[rows["site"] == CLEAN].set_axis(pd.MultiIndex.from_frame(rows.loc[rows["site"] == CLEAN, KEY]))
    patched = known[known["site"] != CLEAN]
    base = clean.reindex(pd.MultiIndex.from_frame(patched[KEY])).to_numpy()
    return pd.concat([patched, values.loc[patched.index] - base], axis=1)


def answers(rows: pd.DataFrame) -> pd.DataFrame:
    """The patched rows about the answer, with `transport` (donor minus distractor: 1 where the answer is the donor's, minus the
    share of each other wrong one; 0 in expectation if the patch only destroys), `carry` (the same of the value of the donor's own table),
    `d answer` (the margin of the donor's answer over the target's own, minus that of the unpatched run), and `d beyond others`, how
    much more the donor's answer gains than the other wrong ones: noise raises all of them."""
    rows = select(rows, part="answer")
    keys = [name for name in KEY if name != "read"]
    margins = ["margin.redirected", "margin.others"]
    clean = rows[rows["site"] == CLEAN]
    base = clean[margins].astype(float).set_axis(pd.MultiIndex.from_frame(clean[keys]))
    patched = rows[rows["site"] != CLEAN].copy()
    moved = patched[margins].astype(float).to_numpy() - base.reindex(pd.MultiIndex.from_frame(patched[keys])).to_numpy()
    patched["d answer"], patched["d beyond others"] = moved[:, 0], moved[:, 0] - moved[:, 1]
    patched["transport"] = patched["redirected"].astype(float) - patched["distracted"].astype(float)
    patched["carry"] = patched["carried"].astype(float) - patched["distracted"].astype(float)
    return patched


# -- intervals -------------------------------------------------------------------------------------
@lru_cache(maxsize=64)
def _weights(targets: tuple, donors: tuple, seed: int) -> np.ndarray:
    """(RESAMPLES, n): how often each row is drawn when targets and donors are drawn anew, each with replacement."""
    rng = np.random.default_rng(seed)
    total = np.ones((RESAMPLES, len(targets)))
    for ids in (targets, donors):
        names, place = np.unique(np.array(ids, dtype=str), return_inverse=True)
        total *= rng.multinomial(len(names), np.full(len(names), 1 / len(names)), RESAMPLES)[:, place]
    return total


def weights(rows: pd.DataFrame, seed: int = 0) -> np.ndarray:
    """The two-way bootstrap's weights: targets are pairs, donors are what they lend, the donor's z, which several pairs may share."""
    return _weights(tuple(rows["pair"]), tuple(rows["donor_z"]), seed)


def two_way(rows: pd.DataFrame, values: pd.Series, seed: int = 0, rate: bool = False) -> Estimate:
    """The mean over pairs with its interval, targets and donors drawn anew (several rows of a pair are averaged first).

    `rate`: the values lie in [-1, 1]; where all agree, Wilson's slack of n of n stands in for an interval without width.
    """
    table = pd.DataFrame({"pair": rows["pair"], "donor_z": rows["donor_z"], "value": values.astype(float)}).dropna()
    if table.empty:
        return NOTHING
    table = table.groupby(["pair", "donor_z"], sort=False, as_index=False)["value"].mean()
    return pooled([table["value"].to_numpy()], table, lambda means: means[0], seed, rate)


def pooled(
    columns: Sequence[np.ndarray], table: pd.DataFrame, of: Callable[[list], Any], seed: int = 0, rate: bool = False
) -> Estimate:
    """`of(means)` of the means of several columns (n,), with the same two-way resamples for all of them."""
    n, drawn = len(table), weights(table, seed)
    value = float(of([column.mean() for column in columns]))
    if n < 2:
        return Estimate(value, n, -np.inf, np.inf)
    if rate and len(columns) == 1 and np.ptp(columns[0]) == 0:
        slack = 1 - wilson(n, n).low
        return Estimate(value, n, max(-1.0, value - slack), min(1.0, value + slack))
    total = drawn.sum(1)
    some = drawn[total > 0]
    with np.errstate(divide="ignore", invalid="ignore"):
        found = of([some @ column / total[total > 0] for column in columns])
        low, high = np.nanpercentile(found, [2.5, 97.5], method="inverted_cdf" if np.isinf(found).any() else "linear")
    return Estimate(value, n, float(low), float(high))


def aligned(parts: Sequence[tuple[pd.DataFrame, str]]) -> tuple[list[np.ndarray], pd.DataFrame]:
    """Columns of several selections of rows, one value per pair, for the pairs that all of them have."""
    series = [rows.groupby(["pair", "donor_z"])[column].mean() for rows, column in parts]
    both = pd.concat([one.astype(float) for one in series], axis=1, join="inner").dropna()
    return [both.iloc[:, i].to_numpy() for i in range(len(parts))], both.index.to_frame(index=False)


def share(a: tuple[pd.DataFrame, str], b: tuple[pd.DataFrame, str], seed: int = 0) -> Estimate:
    """mean(a) / mean(b) over the pairs in both: each is (rows, column)."""
    columns, table = aligned([a, b])
    return pooled(columns, table, lambda means: means[0] / means[1], seed) if len(table) else NOTHING


def gap(a: tuple[pd.DataFrame, str], b: tuple[pd.DataFrame, str], seed: int = 0) -> Estimate:
    """mean(a) - mean(b) over the pairs in both."""
    columns, table = aligned([a, b])
    return pooled(columns, table, lambda means: means[0] - means[1], seed) if len(table) else NOTHING


# -- profiles --------------------------------------------------------------------------------------
def distances(depth: int) -> tuple[int, ...]:
    """The distances r - p that a profile averages: the paper's 3, 4, 5 in a deep model, 1, 2, 3 in a shallow one."""
    return (3, 4, 5) if depth >= 24 else (1, 2, 3)


def profile(moved: pd.DataFrame, column: str, depth: int) -> dict[int, Estimate]:
    """Per patch layer the mean shift at matched distance, re-pooled from rows."""
    near = moved[(moved["read"] - moved["layer"]).isin(distances(depth))]
    return {int(p): two_way(some, some[column]) for p, some in near.groupby("layer")}


def strata(moved: pd.DataFrame, column: str) -> pd.DataFrame:
    """The mean shift by site, mixer kind at p and number of softmax layers crossed in (p, r], with cells and interval."""
    out = []
    for (site, mixer, count), some in moved.groupby(["site", "mixer", "crossed"]):
        cells = some[["layer", "read"]].drop_duplicates()
        out.append(
            {
                "site": site,
                "mixer": mixer,
                "crossed": int(count),
                "cells": len(cells),
                **two_way(some, some[column]).as_dict(),
            }
        )
    return pd.DataFrame(out, columns=["site", "mixer", "crossed", "cells", "value", "n", "low", "high"])


def cells(moved: pd.DataFrame, column: str) -> pd.DataFrame:
    """The mean shift per (site, patch layer, readout layer), for a map."""
    return moved.groupby(["site", "layer", "read"])[column].mean().reset_index()


def concentration(
    moved: pd.DataFrame, column: str, depth: int, first: int, last: int, seed: int = 0
) -> tuple[Estimate, Estimate]:
    """The best patch layer in [first, last] over, and minus, the best shallower one, both at matched distance.

    The maxima are taken anew in every resample, so that the intervals know that they are maxima; a resample in which no shallower layer
    is above 0 has an infinite ratio. Nothing where no layer is shallower, or the window's best is not above 0.
    """
    near = moved[(moved["read"] - moved["layer"]).isin(distances(depth))]
    known = sorted(int(p) for p in near["layer"].unique())
    inside = [i for i, p in enumerate(known) if first <= p <= last]
    below = [i for i, p in enumerate(known) if p < first]
    if not inside or not below:
        return NOTHING, NOTHING
    columns, table = aligned([(near[near["layer"] == p], column) for p in known])

    def best(means: list, some: list[int]) -> Any:
        return np.max([means[i] for i in some], axis=0)

    def ratio(means: list) -> Any:
        base = best(means, below)
        return np.where(base > 0, best(means, inside) / np.where(base > 0, base, 1), np.inf)

    if not len(table) or not pooled(columns, table, lambda means: best(means, inside), seed).low > 0:
        return NOTHING, NOTHING
    gap_ = pooled(columns, table, lambda means: best(means, inside) - best(means, below), seed)
    return pooled(columns, table, ratio, seed), gap_
