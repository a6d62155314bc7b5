"""The ridge map against scikit-learn's own, by rows and by sums, with its conventions."""

from __future__ import annotations

import json
import tracemalloc
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

from encode_address.errors import RunError, StoreError
from encode_address.maps import LEAST, MOST, NUMBERS, OUTPUT_GRID, TOKEN_GRID, Moments, RidgeMap, load, save


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
    first, last = min(0, ours.extended_), max(0, ours.extended_)
    tried = [10.0 ** (p / 2) for p in range(-12 + first - (first < 0), 5 + last + (last > 0))]
    fits = [Ridge(a * largest, solver="svd").fit(*train) for a in tried]
    errors = [((f.predict(held[0]) - held[1]) ** 2).sum() for f in fits]
    total = ((held[1] - train[1].mean(0)) ** 2).sum()
    best = int(np.argmin(np.abs(np.log(np.array(tried) * largest / ours.alpha_))))
    assert ours.alpha_ == pytest.approx(fits[best].alpha, rel=1e-9)
    assert errors[best] <= min(errors) + 1e-10 * total  # of penalties that differ by less, rounding decides
    assert np.abs(ours.predict(held[0]) - fits[best].predict(held[0])).max() <= 1e-8 * max(1, np.abs(y).max())
    assert ours.r2_ == pytest.approx(1 - errors[best] / total, abs=1e-8)
    assert ours.relative_error_ == pytest.approx((errors[best] / total) ** 0.5, abs=1e-4)


def test_it_keeps_scikit_learns_conventions():
    check_estimator(RidgeMap())
    x, y = data()
    given = {"grid": (1e-3,), "held_out": 0.5, "random_state": 3, "refit": True, "extend": False}
    given |= {"kind": "shuffled", "rows_per_feature": 2.0}
    assert clone(RidgeMap(**given)).get_params() == given
    scaled = make_pipeline(StandardScaler(), RidgeMap()).fit(x, y)
    assert scaled.score(x, y) > 0.99
    twice = make_pipeline(RidgeMap(), RidgeMap()).fit(x, y)  # the first one's transform is what the second gets
    assert twice.score(x, y) > 0.99
    single = RidgeMap().fit(x, y[:, 0])
    assert single.predict(x[:3]).shape == (3,)
    assert single.transform(x[:3]).shape == (3, 1)
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


# -- what chooses the penalty --------------------------------------------------------
def noisy(seed=0, n=400, features=30, noise=3.0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, features))
    return x, x[:, :1] + noise * rng.normal(size=(n, 3))


def test_a_penalty_at_the_edge_of_its_grid_extends_the_grid():
    x, y = noisy()
    wide = RidgeMap(grid=TOKEN_GRID).fit(x, y)
    narrow = RidgeMap(grid=(1e-6, 1e-5)).fit(x, y)
    assert wide.extended_ == 0
    assert not wide.at_edge_
    assert narrow.extended_ > 0
    assert not narrow.at_edge_
    assert narrow.relative_alpha_ == pytest.approx(wide.relative_alpha_)
    stuck = RidgeMap(grid=(1e-6, 1e-5), extend=False).fit(x, y)
    assert stuck.at_edge_
    assert stuck.extended_ == 0
    assert stuck.relative_alpha_ == 1e-5
    down = RidgeMap(grid=(1e3, 1e4)).fit(x, y)
    assert down.extended_ < 0
    assert not down.at_edge_
    assert down.relative_alpha_ == pytest.approx(wide.relative_alpha_)
    clean = RidgeMap().fit(*data(noise=0.0))
    assert clean.extended_ < 0
    assert clean.relative_alpha_ >= LEAST
    nothing = RidgeMap().fit(x, np.random.default_rng(1).normal(size=len(x)))
    assert nothing.relative_alpha_ <= MOST


def test_refit_takes_all_rows_and_the_penalty_that_was_chosen_without_them():
    x, y = data()
    part = RidgeMap().fit(x, y)
    whole = RidgeMap(refit=True).fit(x, y)
    assert (part.n_rows_, whole.n_rows_) == (240, 300)
    assert whole.relative_alpha_ == part.relative_alpha_
    assert whole.r2_ == part.r2_
    assert whole.mean_x_ == pytest.approx(x.mean(0))
    expected = Ridge(whole.alpha_, solver="svd").fit(x, y).predict(x)
    assert whole.predict(x) == pytest.approx(expected, abs=1e-8)


def test_the_controls_are_a_mean_and_pairs_that_do_not_belong_together():
    x, y = data()
    mean = RidgeMap(kind="mean", refit=True).fit(x, y)
    assert mean.predict(x[:2]) == pytest.approx(np.tile(y.mean(0), (2, 1)))
    assert (mean.r2_, mean.rank_, mean.relative_alpha_) == (0, 0, 0)
    shuffled = RidgeMap(kind="shuffled").fit(x, y)
    assert shuffled.r2_ < 0.1
    assert RidgeMap().fit(x, y).r2_ > 0.99
    streamed = [Moments(shuffle=0).add(*part) for part in ((x[:240], y[:240]), (x[240:], y[240:]))]
    assert RidgeMap(kind="shuffled").fit_moments(*streamed).r2_ < 0.1
    assert streamed[0].yy == pytest.approx(Moments().add(x[:240], y[:240]).yy)
    with pytest.raises(RunError, match="sums of shuffled pairs"):
        RidgeMap(kind="shuffled").fit_moments(Moments().add(x, y), Moments().add(x, y))
    with pytest.raises(RunError, match="no map of kind 'cubic'"):
        RidgeMap(kind="cubic").fit(x, y)


def test_the_error_on_a_third_set_of_rows():
    x, y = data(n=500, noise=5.0)
    found = RidgeMap(refit=True).fit(x[:300], y[:300])
    third = Moments().add(x[300:350], y[300:350]).add(x[350:], y[350:])
    error = found.error_on(third)
    sse = ((found.predict(x[300:]) - y[300:]) ** 2).sum()
    total = ((y[300:] - y[:300].mean(0)) ** 2).sum()
    assert error.r2 == pytest.approx(1 - sse / total, abs=1e-10)
    assert error.n_rows == 200
    assert error.relative_error == pytest.approx((sse / total) ** 0.5)
    assert error.r2 != found.r2_


def test_too_few_rows_for_the_features_is_refused_with_the_number():
    x, y = data(n=100, features=50)
    assert RidgeMap(held_out=0.6).fit(x, y).underdetermined_
    assert not RidgeMap().fit(x, y).underdetermined_
    with pytest.raises(RunError, match="40 for 50 features, it needs 100 or more"):
        RidgeMap(held_out=0.6, rows_per_feature=2).fit(x, y)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_numbers_that_are_not_finite_are_refused(value, side):
    rows = [array.copy() for array in data(n=5)]
    rows[side][2, 1] = value
    with pytest.raises(RunError, match="NaN or infinite"):
        Moments().add(*rows)


# -- size ----------------------------------------------------------------------------
def test_at_size_the_sums_equal_the_fit_in_memory_and_memory_does_not_grow_with_rows():
    """300,000 rows x 512, which are six blocks ten times each: in memory they are six blocks that weigh ten."""
    rng, features, targets, block = np.random.default_rng(0), 512, 8, 5_000
    weight = rng.normal(size=(features, targets))
    x = rng.normal(size=(6 * block, features)) + 3
    y = x @ weight + 5 * rng.normal(size=(6 * block, targets))
    held = Moments().add(x[:500] * 1.1, y[:500])
    tracemalloc.start()
    sums, peaks = Moments(), []
    for number in range(60):
        rows = slice(number % 6 * block, (number % 6 + 1) * block)
        sums.add(x[rows], y[rows])
        if number in (5, 59):
            peaks.append(tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()
    assert sums.n == 300_000
    assert peaks[1] <= peaks[0] * 1.01
    ours = RidgeMap().fit_moments(sums, held)
    theirs = Ridge(ours.alpha_).fit(x, y, sample_weight=np.full(len(x), 10.0))
    assert np.abs(ours.coef_ - theirs.coef_.T).max() <= 1e-8
    assert np.abs(ours.predict(x[:100]) - theirs.predict(x[:100])).max() <= 1e-8


# -- files ---------------------------------------------------------------------------
ABOUT = {"donor": {"fingerprint": "d1", "site": "G2 output"}, "host": {"fingerprint": "h1", "site": "G3"}, "data": "x"}


def test_a_map_that_was_saved_is_the_same_map(tmp_path):
    x, y = data(noise=5.0)
    found = RidgeMap(grid=(1e-3, 1e-2), held_out=0.3, refit=True).fit(x, y)
    described = save(found, tmp_path / "maps" / "chat8.0", ABOUT)
    assert described.name == "chat8.0.json"
    again = load(tmp_path / "maps" / "chat8.0", ABOUT)
    assert (again.predict(x) == found.predict(x)).all()
    assert again.get_params() == found.get_params()
    for name in NUMBERS:
        assert getattr(again, name) == getattr(found, name)
    content = json.loads(described.read_text())
    assert content["about"] == ABOUT
    assert content["fitted"]["alpha"] == found.alpha_
    mean = RidgeMap(kind="mean").fit(x, np.ones(len(x)))
    save(mean, tmp_path / "mean", {})
    assert np.isnan(load(tmp_path / "mean", {}).r2_)
    assert "NaN" not in (tmp_path / "mean.json").read_text()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"donor": {"fingerprint": "d2"}}, "donor fingerprint d1, not d2"),
        ({"host": {"site": "G0"}}, "host site G3, not G0"),
        ({"data": "y"}, "data x, not y"),
        ({"variant": "chat8"}, "variant None, not chat8"),
    ],
)
def test_a_map_for_another_model_or_site_is_refused_by_name(tmp_path, changed, said):
    save(RidgeMap().fit(*data()), tmp_path / "map", ABOUT)
    with pytest.raises(RunError, match=said):
        load(tmp_path / "map", changed)


def test_files_that_are_no_map_are_refused(tmp_path):
    with pytest.raises(StoreError, match="fit it again"):
        load(tmp_path / "map", {})
    save(RidgeMap().fit(*data()), tmp_path / "map", {})
    save(RidgeMap().fit(*data(seed=1)), tmp_path / "other", {})
    (tmp_path / "map.safetensors").write_bytes((tmp_path / "other.safetensors").read_bytes())
    with pytest.raises(StoreError, match="not of one map"):
        load(tmp_path / "map", {})
    (tmp_path / "map.json").write_text("{")
    with pytest.raises(StoreError, match="fit it again"):
        load(tmp_path / "map", {})
