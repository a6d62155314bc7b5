"""The ridge map against scikit-learn's own, by rows and by sums, with its conventions."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.base import clone
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from encode_address.errors import RunError
from encode_address.maps import OUTPUT_GRID, TOKEN_GRID, Moments, RidgeMap


def data(seed=0, n=300, features=6, targets=4, noise=0.3):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, features)) * rng.uniform(0.1, 10, features) + rng.normal(size=features) * 5
    return x, x @ rng.normal(size=(features, targets)) + noise * rng.normal(size=(n, targets)) + 7


def test_the_grids_are_the_papers():
    assert (OUTPUT_GRID[0], OUTPUT_GRID[-1], len(OUTPUT_GRID)) == pytest.approx((1e-9, 1, 19))
    assert (TOKEN_GRID[0], TOKEN_GRID[-1], len(TOKEN_GRID)) == pytest.approx((1e-6, 1e2, 17))


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6), cuts=st.lists(st.integers(1, 239), max_size=6), noise=st.sampled_from([0.0, 0.3, 30])
)
def test_it_is_ridge_with_the_penalty_that_errs_least_on_held_out_rows(seed, cuts, noise):
    x, y = data(seed, noise=noise)
    train, held = (x[:240], y[:240]), (x[240:], y[240:])
    pieces = sorted({0, *cuts, 240})
    stream = Moments()
    for start, end in pairwise(pieces):
        stream.add(train[0][start:end], train[1][start:end])
    ours = RidgeMap().fit_moments(stream, Moments().add(*held))
    largest = np.linalg.eigvalsh((c := train[0] - train[0].mean(0)).T @ c)[-1]
    fits = [Ridge(a * largest).fit(*train) for a in TOKEN_GRID]
    errors = [((f.predict(held[0]) - held[1]) ** 2).sum() for f in fits]
    best = fits[int(np.argmin(errors))]
    assert ours.alpha_ == pytest.approx(best.alpha, rel=1e-9)
    assert np.abs(ours.predict(held[0]) - best.predict(held[0])).max() <= 1e-8 * max(1, np.abs(y).max())
    total = ((held[1] - train[1].mean(0)) ** 2).sum()
    assert ours.r2_ == pytest.approx(1 - min(errors) / total, abs=1e-8)
    assert ours.relative_error_ == pytest.approx((min(errors) / total) ** 0.5, abs=1e-4)


def test_it_keeps_scikit_learns_conventions():
    check_estimator(RidgeMap())
    x, y = data()
    assert clone(RidgeMap(grid=(1e-3,), held_out=0.5)).get_params() == {
        "grid": (1e-3,),
        "held_out": 0.5,
        "random_state": 0,
    }
    scaled = make_pipeline(StandardScaler(), RidgeMap()).fit(x, y)
    assert scaled.score(x, y) > 0.99
    assert RidgeMap().fit(x, y).r2_ > 0.99


def test_shuffled_pairs_are_not_mapped_and_a_constant_target_is_its_mean():
    x, y = data()
    rng = np.random.default_rng(0)
    shuffled = RidgeMap().fit(x, rng.permutation(y))
    assert shuffled.r2_ < 0.1
    constant = RidgeMap().fit(x, np.ones((len(x), 2)))
    assert np.isnan(constant.r2_)
    assert constant.predict(x[:3]) == pytest.approx(np.ones((3, 2)))


def test_without_rows_it_says_so():
    one = Moments().add(np.ones((1, 2)), np.ones((1, 2)))
    with pytest.raises(RunError, match="two rows"):
        RidgeMap().fit_moments(one, one)
    with pytest.raises(RunError, match="one held out"):
        RidgeMap().fit_moments(Moments().add(*data()), Moments())
