"""Estimates with intervals. The unit is the prompt pair; several rows of one pair are averaged first.

A rate with one true/false row per pair gets the Wilson interval; anything else a bootstrap over pairs. Where all
pairs agree the bootstrap has no width, so Wilson's bound for n of n stands in.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats as scipy_stats

RESAMPLES = 2000


@dataclass(frozen=True)
class Estimate:
    """A value with its number of pairs and its 95 % interval."""

    value: float
    n: int
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def exp(self) -> Estimate:
        """Of a difference of logarithms (losses per token): the ratio (of perplexities)."""
        return Estimate(math.exp(self.value), self.n, math.exp(self.low), math.exp(self.high))


NOTHING = Estimate(float("nan"), 0, float("nan"), float("nan"))


def wilson(successes: int, n: int) -> Estimate:
    """A proportion with its Wilson interval."""
    interval = scipy_stats.binomtest(successes, n).proportion_ci(method="wilson")
    return Estimate(successes / n, n, float(interval.low), float(interval.high))


def estimate(values: pd.Series, pairs: pd.Series, seed: int = 0) -> Estimate:
    """The mean of `values` over pairs. True/false values, one per pair, are a rate."""
    present = values.notna()
    values, pairs = values[present].astype(float), pairs[present]
    if values.empty:
        return NOTHING
    binary = bool(values.isin([0.0, 1.0]).all())
    if binary and not pairs.duplicated().any():
        return wilson(int(values.sum()), len(values))
    return _bootstrap(values.groupby(pairs).mean().to_numpy(), seed, (0.0, 1.0) if values.between(0, 1).all() else None)


def difference(a: pd.Series, b: pd.Series, seed: int = 0, unit: bool = True) -> Estimate:
    """The paired difference a - b: both hold one value per pair, indexed by pair; pairs in both count.

    `unit`: a and b are shares, so that the difference lies in [-1, 1].
    """
    both = pd.concat([a.astype(float), b.astype(float)], axis=1, join="inner").dropna()
    if both.empty:
        return NOTHING
    return _bootstrap((both.iloc[:, 0] - both.iloc[:, 1]).to_numpy(), seed, (-1.0, 1.0) if unit else None)


def ratio(a: pd.Series, b: pd.Series, seed: int = 0) -> Estimate:
    """mean(a) / mean(b) over the pairs in both, with a bootstrap over pairs: what share of an effect b is left in a."""
    both = pd.concat([a.astype(float), b.astype(float)], axis=1, join="inner").dropna().to_numpy()
    if len(both) == 0 or both[:, 1].mean() == 0:
        return NOTHING
    drawn = np.random.default_rng(seed).integers(0, len(both), (RESAMPLES, len(both)))
    top, bottom = both[drawn].mean(1).T
    with np.errstate(divide="ignore", invalid="ignore"):
        low, high = np.nanpercentile(top / bottom, [2.5, 97.5])
    return Estimate(float(both[:, 0].mean() / both[:, 1].mean()), len(both), float(low), float(high))


def per_pair(rows: pd.DataFrame, column: str) -> pd.Series:
    """One value of `column` per pair, indexed by pair: the mean over the pair's rows."""
    return rows[column].astype(float).groupby(rows["pair"]).mean()


def _bootstrap(values: np.ndarray, seed: int, bounds: tuple[float, float] | None) -> Estimate:
    """Percentile bootstrap of the mean; `bounds` are those of shares or of their differences."""
    n, mean = len(values), float(np.mean(values))
    if n == 1 or np.ptp(values) == 0:
        if bounds is None:
            return Estimate(mean, n, mean, mean) if n > 1 else Estimate(mean, n, -np.inf, np.inf)
        slack = 1 - wilson(n, n).low
        return Estimate(mean, n, max(bounds[0], mean - slack), min(bounds[1], mean + slack))
    interval = scipy_stats.bootstrap(
        (values,), np.mean, n_resamples=RESAMPLES, method="percentile", rng=np.random.default_rng(seed)
    ).confidence_interval
    return Estimate(mean, n, float(interval.low), float(interval.high))
