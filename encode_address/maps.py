"""Linear maps between activations: ridge regression on token rows, its penalty chosen on held-out rows (paper 3.6, 3.11).

A map is M(x) = (x - mean_x) W + mean_y, with W minimising ||Y - M(X)||^2 + alpha ||W||^2, in float64. The penalty is chosen
from a grid, in units of the largest eigenvalue of the centred X'X, by the squared error on rows that were held out; where
the best is the grid's first or last, the grid goes on. One eigendecomposition serves the whole grid. What the fit needs of
its rows are sums (`Moments`), so rows can come in a stream.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors
from sklearn.base import BaseEstimator, MultiOutputMixin, RegressorMixin, TransformerMixin
from sklearn.model_selection import train_test_split
from sklearn.utils.validation import check_is_fitted, validate_data

from encode_address.errors import RunError, StoreError
from encode_address.run.store import write_text, write_whole

OUTPUT_GRID = tuple(10.0 ** (p / 2 - 6) for p in range(-6, 13))  # rows are prompts (paper 3.11, ridge A)
TOKEN_GRID = tuple(10.0 ** (p / 2) for p in range(-12, 5))  # rows are tokens (paper 3.11, ridge B)
KINDS = ("ridge", "shuffled", "mean")
LEAST, MOST = 1e-12, 1e6  # a grid goes on within these; below, the sums themselves are rounded


class Moments:
    """Sums of rows (x, y) that a ridge fit and its error need, in float64; memory does not grow with rows.

    `add` merges means and centred sums, which keeps the precision that plain sums of squares lose. `shuffle`, a seed,
    pairs each x with the y of another row of the same `add`: the control of pairs that do not belong together.
    """

    def __init__(self, shuffle: int | None = None) -> None:
        self.n, self.shuffled = 0, shuffle is not None
        self._rng = np.random.default_rng(shuffle) if shuffle is not None else None

    def add(self, x: np.ndarray, y: np.ndarray) -> Moments:
        """Take in rows: x (n, features), y (n, targets). Raises RunError for numbers that are not finite."""
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        if not len(x):
            return self
        if self._rng is not None:
            y = y[self._rng.permutation(len(y))]
        mean_x, mean_y = x.mean(0), y.mean(0)
        if not (np.isfinite(x).all() and np.isfinite(y).all()):
            raise RunError("activations that a map is fitted on are NaN or infinite; try --dtype float32")
        x, y = x - mean_x, y - mean_y
        return self._join(len(x), mean_x, mean_y, x.T @ x, x.T @ y, float((y * y).sum()))

    def merge(self, other: Moments) -> Moments:
        """Take in the rows of another; it stays as it is."""
        if not other.n:
            return self
        return self._join(other.n, other.mean_x, other.mean_y, other.xx, other.xy, other.yy)

    def _join(
        self, n: int, mean_x: np.ndarray, mean_y: np.ndarray, xx: np.ndarray, xy: np.ndarray, yy: float
    ) -> Moments:
        if not self.n:
            self.n, self.mean_x, self.mean_y = n, mean_x, mean_y
            self.xx, self.xy, self.yy = xx.copy(), xy.copy(), yy
            return self
        total = self.n + n
        off_x, off_y, weight = mean_x - self.mean_x, mean_y - self.mean_y, self.n * n / total
        self.xx += xx
        self.xy += xy
        self.xx += weight * np.outer(off_x, off_x)
        self.xy += weight * np.outer(off_x, off_y)
        self.yy += yy + weight * (off_y @ off_y)
        self.mean_x = self.mean_x + off_x * (n / total)
        self.mean_y = self.mean_y + off_y * (n / total)
        self.n = total
        return self

    def about(self, mean_x: np.ndarray, mean_y: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
        """X'X, X'Y and the sum of Y^2 about other means than its own."""
        off_x, off_y = self.mean_x - mean_x, self.mean_y - mean_y
        return (
            self.xx + self.n * np.outer(off_x, off_x),
            self.xy + self.n * np.outer(off_x, off_y),
            float(self.yy + self.n * (off_y @ off_y)),
        )


@dataclass(frozen=True)
class Error:
    """How far a map is off on some rows: 1 - SSE / total, with total about the mean of the fitted rows, and the root of
    SSE / total. NaN where the total is zero."""

    r2: float
    relative_error: float
    n_rows: int

    @classmethod
    def of(cls, sse: float, total: float, n: int) -> Error:
        if not total:
            return cls(math.nan, math.nan, n)
        return cls(1 - sse / total, max(0.0, sse / total) ** 0.5, n)


class RidgeMap(TransformerMixin, MultiOutputMixin, RegressorMixin, BaseEstimator):
    """Ridge regression with the paper's choice of penalty, as a scikit-learn estimator.

    `grid`: penalties in ascending order, in units of the largest eigenvalue of the centred X'X of the fitted rows; with
    `extend` it goes on past its ends, half a decade a step (no further than 1e-12 and 1e6), as long as its end is the best.
    `held_out`: the share of rows that `fit` holds out (at random, from `random_state`) to choose among them; `fit_moments` is
    told which. `refit`: once it is chosen, all rows are fitted. `kind`: "ridge", or a control, "shuffled" (fitted on pairs
    that do not belong together) and "mean" (the mean target, whatever comes in). `rows_per_feature`: with fewer fitted
    rows per feature it refuses. A ridge has a solution for any number of rows, but of at most as many directions as there are rows, so
    with fewer rows than features what it does in the others is the penalty's choice, not the data's; see `underdetermined_`.

    Fitted: `coef_` (features, targets) and `intercept_`, `mean_x_`, `mean_y_`, `alpha_` (the penalty, absolute), `relative_alpha_` (in
    units of the grid), `r2_` and `relative_error_` (see `Error`, on the held-out rows, which chose the penalty: for rows that
    took no part see `error_on`), `rank_` (directions of X that the penalty leaves more than half of), `n_rows_` (fitted),
    `extended_` (steps past the grid's end, negative below its first), `at_edge_` (the best is still the last one tried),
    `underdetermined_`. `transform` is `predict` that always gives (rows, targets).
    """

    def __init__(
        self,
        grid: Sequence[float] = TOKEN_GRID,
        held_out: float = 0.2,
        random_state: int = 0,
        refit: bool = False,
        extend: bool = True,
        kind: str = "ridge",
        rows_per_feature: float = 0.0,
    ) -> None:
        self.grid, self.held_out, self.random_state = grid, held_out, random_state
        self.refit, self.extend, self.kind, self.rows_per_feature = refit, extend, kind, rows_per_feature

    def fit(self, X: np.ndarray, y: np.ndarray) -> RidgeMap:
        """X (rows, features), y (rows, targets)."""
        X, y = validate_data(self, X, y, multi_output=True, y_numeric=True, dtype=np.float64)
        self._single = y.ndim == 1
        y = y.reshape(len(y), -1)
        parts = train_test_split(X, y, test_size=self.held_out, random_state=self.random_state)
        seed = self.random_state if self.kind == "shuffled" else None
        return self.fit_moments(Moments(seed).add(parts[0], parts[2]), Moments(seed).add(parts[1], parts[3]))

    def fit_moments(self, rows: Moments, held_out: Moments) -> RidgeMap:
        """Fit from the sums of the fitted rows and of those that choose the penalty; both stay as they are.

        Raises RunError without rows, or with fewer than `rows_per_feature` demands.
        """
        self._check(rows, held_out)
        values, vectors = _eigen(rows.xx)
        self.relative_alpha_, self.alpha_ = 0.0, 0.0
        if self.kind != "mean":
            error = self._choose(rows, held_out, values, vectors)
        else:
            _, _, total = held_out.about(rows.mean_x, rows.mean_y)
            error, self.extended_, self.at_edge_ = Error.of(total, total, held_out.n), 0, False
        self.r2_, self.relative_error_ = error.r2, error.relative_error
        if self.refit:
            rows = Moments().merge(rows).merge(held_out)
            values, vectors = _eigen(rows.xx)
        self.alpha_ = self.relative_alpha_ * (values[-1] or 1.0)
        if self.kind == "mean":
            self.coef_, self.rank_ = np.zeros_like(rows.xy), 0
        else:
            self.coef_ = vectors @ ((vectors.T @ rows.xy) / (values + self.alpha_)[:, None])
            self.rank_ = int((values > self.alpha_).sum())
        self.mean_x_, self.mean_y_ = rows.mean_x, rows.mean_y
        self.intercept_ = rows.mean_y - rows.mean_x @ self.coef_
        self.n_rows_, self.n_features_in_ = rows.n, len(rows.mean_x)
        self.underdetermined_ = rows.n <= len(rows.mean_x)
        return self

    def predict(self, X: np.ndarray) -> np.ndarray:
        """(rows, targets)."""
        out = self.transform(X)
        return out[:, 0] if getattr(self, "_single", False) else out

    def transform(self, X: np.ndarray) -> np.ndarray:
        """(rows, targets), also of a map that was fitted to one target."""
        check_is_fitted(self)
        return validate_data(self, X, reset=False, dtype=np.float64) @ self.coef_ + self.intercept_

    def error_on(self, rows: Moments) -> Error:
        """The error on rows that took no part in the fit, from their sums."""
        check_is_fitted(self)
        xx, xy, total = rows.about(self.mean_x_, self.mean_y_)
        sse = total - 2 * (self.coef_ * xy).sum() + ((xx @ self.coef_) * self.coef_).sum()
        return Error.of(float(sse), total, rows.n)

    def _check(self, rows: Moments, held_out: Moments) -> None:
        if self.kind not in KINDS:
            raise RunError(f"no map of kind {self.kind!r}: use one of {', '.join(KINDS)}")
        if rows.n < 2 or not held_out.n:
            raise RunError("a map needs two rows to be fitted on, and one held out")
        if self.kind == "shuffled" and not rows.shuffled:
            raise RunError("a shuffled map needs sums of shuffled pairs: Moments(shuffle=seed)")
        features = len(rows.mean_x)
        least = math.ceil(self.rows_per_feature * features)
        if rows.n < least:
            raise RunError(f"too few rows for a map: {rows.n} for {features} features, it needs {least} or more")

    def _choose(self, rows: Moments, held_out: Moments, values: np.ndarray, vectors: np.ndarray) -> Error:
        """Set the relative penalty that errs least on the held-out rows; returns that error."""
        largest = values[-1] or 1.0
        rotated = vectors.T @ rows.xy
        xx, xy, total = held_out.about(rows.mean_x, rows.mean_y)
        # With W = V diag(d) V'X'Y, the error on held-out rows is total - 2 sum d_i (A C')_ii + sum d_i d_j G_ij (A A')_ij.
        linear = (rotated * (vectors.T @ xy)).sum(1)
        square = vectors.T @ xx @ vectors
        square *= rotated @ rotated.T

        def error(penalty: float) -> float:
            d = 1 / (values + penalty * largest)
            return float(total - 2 * d @ linear + d @ square @ d)

        tried = {penalty: error(penalty) for penalty in self.grid}
        best = min(tried, key=lambda penalty: tried[penalty])
        self.extended_, self.at_edge_ = 0, False
        ends = (self.grid[0], -1), (self.grid[-1], 1)
        for end, sign in ends if self.extend else ():
            for penalty in _further(end, sign) if best == end else ():
                tried[penalty] = error(penalty)
                if tried[penalty] >= tried[best]:
                    break
                best, self.extended_ = penalty, self.extended_ + sign
        self.at_edge_ = best in (min(tried), max(tried))
        self.relative_alpha_ = best
        return Error.of(tried[best], total, held_out.n)


def _eigen(xx: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues, ascending and not negative, and eigenvectors in columns."""
    values, vectors = np.linalg.eigh(xx)
    return np.clip(values, 0, None), vectors


def _further(end: float, sign: int) -> Iterator[float]:
    """Half decades past the end of a grid."""
    step = 1
    while LEAST <= (penalty := end * 10 ** (sign * step / 2)) <= MOST:
        yield penalty
        step += 1


ARRAYS = ("coef_", "intercept_", "mean_x_", "mean_y_")
NUMBERS = (
    "alpha_", "relative_alpha_", "r2_", "relative_error_", "rank_", "n_rows_", "n_features_in_", "extended_", "at_edge_",
    "underdetermined_",
)  # fmt: skip


def save(fitted: RidgeMap, path: str | Path, about: Mapping[str, Any]) -> Path:
    """Write `path`.safetensors (the arrays) and `path`.json (what it maps, its penalty and its errors).

    `about` says what the map is for, as plain values that JSON keeps: both models' fingerprints, their sites, the data. Returns
    the path of the JSON. Raises StoreError.
    """
    check_is_fitted(fitted)
    arrays = save_tensors({name: np.ascontiguousarray(getattr(fitted, name)) for name in ARRAYS})
    numbers = {name.rstrip("_"): _plain(getattr(fitted, name)) for name in NUMBERS}
    settings = {name: list(value) if name == "grid" else value for name, value in fitted.get_params().items()}
    content = {"about": dict(about), "sha256": _sha(arrays), "fitted": numbers, "settings": settings}
    path = Path(path)
    write_whole(_beside(path, "safetensors"), lambda temporary: temporary.write_bytes(arrays))
    write_text(_beside(path, "json"), json.dumps(content, indent=1) + "\n")
    return _beside(path, "json")


def load(path: str | Path, about: Mapping[str, Any]) -> RidgeMap:
    """The map that `save` wrote, if it is for what `about` says (all that is named there must agree).

    Raises RunError for a map of another model, site or data, naming which; StoreError for files that are missing or broken.
    """
    described, stored = _beside(Path(path), "json"), _beside(Path(path), "safetensors")
    try:
        content, arrays = json.loads(described.read_text()), stored.read_bytes()
        if _sha(arrays) != content["sha256"]:
            raise ValueError("the two files are not of one map")
        tensors = load_tensors(arrays)
        fitted = RidgeMap(**{**content["settings"], "grid": tuple(content["settings"]["grid"])})
        for name in NUMBERS:
            value = content["fitted"][name.rstrip("_")]
            setattr(fitted, name, math.nan if value is None else value)
        for name in ARRAYS:
            setattr(fitted, name, tensors[name])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise StoreError(f"{described} is not a map that can be read ({error}): fit it again") from error
    for name, (wanted, found) in _differences(about, content["about"]).items():
        raise RunError(f"{described}: this map was fitted for {name} {found}, not {wanted}: fit it again")
    return fitted


def _differences(wanted: Mapping[str, Any], found: Mapping[str, Any], within: str = "") -> dict[str, tuple[Any, Any]]:
    """What of `wanted` is otherwise in `found`, by its name ("donor fingerprint")."""
    out: dict[str, tuple[Any, Any]] = {}
    for name, value in json.loads(json.dumps(dict(wanted))).items():
        other = found.get(name)
        if isinstance(value, dict) and isinstance(other, dict):
            out |= _differences(value, other, f"{within}{name} ")
        elif value != other:
            out[f"{within}{name}"] = value, other
    return out


def _beside(path: Path, kind: str) -> Path:
    plain = path.with_suffix("") if path.suffix in (".json", ".safetensors") else path
    return plain.with_name(f"{plain.name}.{kind}")


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _plain(value: Any) -> Any:
    """A number as JSON keeps it; NaN is null."""
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and math.isnan(value) else value
