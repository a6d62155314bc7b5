"""Intervals: against closed formulas, against simulated truth, and where the data leave nothing to resample."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from encode_address.stats import Estimate, difference, estimate, per_pair, wilson

Z = 1.959963984540054  # the normal quantile at 0.975


def pairs_of(values) -> pd.Series:
    return pd.Series(range(len(values)))


def width(interval: Estimate) -> float:
    return interval.high - interval.low


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_is_the_closed_formula(case):
    successes, n = case
    share = successes / n
    middle = (share + Z**2 / (2 * n)) / (1 + Z**2 / n)
    half = Z / (1 + Z**2 / n) * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    got = wilson(successes, n)
    assert (got.value, got.n) == (share, n)
    assert got.low == pytest.approx(middle - half, abs=1e-9)
    assert got.high == pytest.approx(middle + half, abs=1e-9)


@pytest.mark.parametrize("values", [[True, False, True, True], [1, 0, 1, 1], [1.0, 0.0, 1.0, 1.0]])
def test_one_true_or_false_per_pair_is_a_rate(values):
    assert estimate(pd.Series(values), pairs_of(values)) == wilson(3, 4)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 1)), min_size=1, max_size=30))
def test_an_interval_of_shares_holds_its_value_and_stays_a_share(rows):
    pairs, values = (pd.Series(column) for column in zip(*rows))
    got = estimate(values, pairs)
    assert got.n == pairs.nunique()
    assert got.value == pytest.approx(values.groupby(pairs).mean().mean())
    assert 0 <= got.low <= got.value + 1e-12
    assert got.value - 1e-12 <= got.high <= 1


def test_rows_of_one_pair_count_once():
    """Twenty copies of every row are no new evidence: value, n and interval stay as they were."""
    values = pd.Series(np.random.default_rng(0).normal(size=12))
    once = estimate(values, pairs_of(values))
    copies = estimate(pd.concat([values] * 20, ignore_index=True), pd.Series(list(range(12)) * 20))
    assert copies.n == once.n == 12
    assert [copies.value, copies.low, copies.high] == pytest.approx([once.value, once.low, once.high])


def test_a_pair_with_many_rows_weighs_as_much_as_one_with_few():
    values, pairs = pd.Series([1.0, 0.0, 0.0, 0.0, 0.0]), pd.Series([0, 1, 1, 1, 1])
    assert estimate(values, pairs).value == 0.5


def test_both_forms_of_a_pair_give_a_clustered_interval():
    """Accuracy has two rows per pair. Where both forms agree, the interval is that of n pairs, not of 2n rows."""
    outcome = np.random.default_rng(1).random(100) < 0.7
    rows = estimate(pd.Series(np.repeat(outcome, 2)), pd.Series(np.repeat(range(100), 2)))
    assert rows.n == 100
    assert width(rows) == pytest.approx(width(wilson(int(outcome.sum()), 100)), rel=0.15)
    assert width(rows) > 1.2 * width(wilson(2 * int(outcome.sum()), 200))


def test_the_bootstrap_covers_the_truth():
    """200 samples of 40 from a normal: about 95 % of the intervals hold the mean, at about the textbook width."""
    rng = np.random.default_rng(2)
    intervals = [estimate(pd.Series(sample), pairs_of(sample)) for sample in rng.normal(3.0, 1.0, (200, 40))]
    assert 0.88 <= np.mean([i.low <= 3.0 <= i.high for i in intervals]) <= 0.99
    assert np.mean([width(i) for i in intervals]) == pytest.approx(2 * Z / math.sqrt(40), rel=0.1)


def test_the_bootstrap_is_the_same_every_time_and_another_with_another_seed():
    values = pd.Series(np.random.default_rng(3).normal(size=20))
    assert estimate(values, pairs_of(values)) == estimate(values, pairs_of(values))
    assert estimate(values, pairs_of(values)) != estimate(values, pairs_of(values), seed=1)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("n", [1, 20])
def test_shares_that_all_agree_still_have_an_interval(share, n):
    """Two rows per pair, all pairs alike: nothing to resample, yet n pairs do not make a certainty."""
    form = {0.0: [0, 0], 0.5: [0, 1], 1.0: [1, 1]}[share]
    got = estimate(pd.Series(form * n, dtype=float), pd.Series(np.repeat(range(n), 2)))
    assert (got.value, got.n) == (share, n)
    assert 0 <= got.low <= share <= got.high <= 1
    assert width(got) >= 1 - wilson(n, n).low - 1e-12


def test_a_single_pair_of_logits_is_not_a_certainty():
    """One logit gap says nothing about its spread: its interval must not be the point itself."""
    got = estimate(pd.Series([7.3]), pd.Series([0]))
    assert (got.value, got.n) == (7.3, 1)
    assert got.low != got.high


# -- paired differences ----------------------------------------------------------------
def test_a_paired_difference_is_narrower_than_the_spread_of_its_sides():
    rng = np.random.default_rng(4)
    a = pd.Series(rng.normal(0, 5, 50))
    b = a - 1 + rng.normal(0, 0.1, 50)
    got = difference(a, b, unit=False)
    assert got.low < got.value == pytest.approx((a - b).mean())
    assert got.high == pytest.approx(1, abs=0.1)
    assert width(got) < 0.1 * width(estimate(a, pairs_of(a)))


def test_only_pairs_on_both_sides_count():
    a = pd.Series([1.0, 0.0, 1.0, 1.0], index=[3, 1, 2, 9])
    b = pd.Series([0.0, 0.0, 1.0, float("nan")], index=[1, 2, 3, 9])
    got = difference(a, b)
    assert got.n == 3
    assert got.value == pytest.approx(((0 - 0) + (1 - 0) + (1 - 1)) / 3)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=20))
@settings(max_examples=30)
def test_a_difference_turns_round_with_its_sides(rows):
    """a - b is -(b - a), interval and all: neither side may be favoured by a bound."""
    a, b = (pd.Series(side) for side in zip(*rows))
    there, back = difference(a, b), difference(b, a)
    assert there.value == pytest.approx(-back.value)
    assert -1 <= there.low <= there.value + 1e-12
    assert there.value - 1e-12 <= there.high <= 1
    if (a.astype(float) - b.astype(float)).nunique() == 1:  # else the resamples are drawn anew
        assert [there.low, there.high] == pytest.approx([-back.high, -back.low])


@pytest.mark.parametrize("shift", [-1.0, 0.0, 0.25, 1.0])
def test_differences_of_shares_that_all_agree_still_have_an_interval(shift):
    a, b = pd.Series([max(shift, 0.0)] * 20), pd.Series([max(-shift, 0.0)] * 20)
    got = difference(a, b)
    assert -1 <= got.low <= got.value == shift <= got.high <= 1
    assert width(got) >= 1 - wilson(20, 20).low - 1e-12


def test_differences_of_logits_that_all_agree_lie_in_their_interval():
    got = difference(pd.Series([9.0] * 5), pd.Series([4.0] * 5), unit=False)
    assert got.low <= got.value == 5.0 <= got.high


# -- missing values -----------------------------------------------------------------------
def test_missing_values_are_left_out_with_their_pairs():
    values = pd.Series([True, None, False, float("nan"), True], dtype=object)
    assert estimate(values, pairs_of(values)) == wilson(2, 3)


def test_nothing_gives_nothing():
    for got in (
        estimate(pd.Series([], dtype=float), pd.Series([], dtype=int)),
        estimate(pd.Series([float("nan")] * 3), pd.Series(range(3))),
        difference(pd.Series([1.0], index=[0]), pd.Series([1.0], index=[1])),
    ):
        assert got.n == 0
        assert all(math.isnan(x) for x in (got.value, got.low, got.high))


def test_per_pair_averages_the_rows_of_a_pair():
    rows = pd.DataFrame({"pair": [4, 4, 7], "margin": [1.0, 2.0, 5.0]})
    assert per_pair(rows, "margin").to_dict() == {4: 1.5, 7: 5.0}
