"""Linear maps between activations: ridge regression on token rows, its penalty chosen on held-out rows (paper 3.6, 3.11).

A map is M(x) = (x - mean_x) W + mean_y, with W minimising ||Y - M(X)||^2 + alpha ||W||^2, in float64. The penalty is chosen
from a grid, in units of the largest eigenvalue of the centred X'X, by the squared error on rows that were held out. One
eigendecomposition serves the whole grid. What the fit needs of its rows are sums (`Moments`), so rows can come in a stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from sklearn.base import BaseEstimator, MultiOutputMixin, RegressorMixin
from sklearn.model_selection import train_test_split
from sklearn.utils.validation import check_is_fitted, validate_data

from encode_address.errors import RunError

OUTPUT_GRID = tuple(10.0 ** (p / 2 - 6) for p in range(-6, 13))  # rows are prompts (paper 3.11, ridge A)
TOKEN_GRID = tuple(10.0 ** (p / 2) for p in range(-12, 5))  # rows are tokens (paper 3.11, ridge B)


class Moments:
    """Sums of rows (x, y) that a ridge fit and its error need, in float64; memory does not grow with rows.

    `add` merges means and centred sums, which keeps the precision that plain sums of squares lose.
    """

    def __init__(self) -> None:
        self.n = 0

    def add(self, x: np.ndarray, y: np.ndarray) -> Moments:
        """Take in rows: x (n, features), y (n, targets)."""
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        n, mean_x, mean_y = len(x), x.mean(0), y.mean(0)
        x, y = x - mean_x, y - mean_y
        sums = x.T @ x, x.T @ y, (y * y).sum()
        if not self.n:
            self.n, self.mean_x, self.mean_y = n, mean_x, mean_y
            self.xx, self.xy, self.yy = sums
            return self
        total = self.n + n
        off_x, off_y, weight = mean_x - self.mean_x, mean_y - self.mean_y, self.n * n / total
        self.xx += sums[0] + weight * np.outer(off_x, off_x)
        self.xy += sums[1] + weight * np.outer(off_x, off_y)
        self.yy += sums[2] + weight * (off_y @ off_y)
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


class RidgeMap(MultiOutputMixin, RegressorMixin, BaseEstimator):
    """Ridge regression with the paper's choice of penalty, as a scikit-learn estimator.

    `grid`: penalties, in units of the largest eigenvalue of the centred X'X of the fitted rows. `held_out`: the share of
    rows that `fit` holds out (at random, from `random_state`) to choose among them; `fit_moments` is told which.

    Fitted: `coef_` (features, targets) and `intercept_`, `mean_x_`, `mean_y_`, `alpha_` (the penalty, absolute), `relative_alpha_` (in
    units of the grid), `r2_` (on the held-out rows, 1 - SSE / total about the fitted mean), `relative_error_` (the root of
    SSE / total), `rank_` (directions of X that the penalty leaves more than half of), `n_rows_`.
    """

    def __init__(self, grid: Sequence[float] = TOKEN_GRID, held_out: float = 0.2, random_state: int = 0) -> None:
        self.grid, self.held_out, self.random_state = grid, held_out, random_state

    def fit(self, X: np.ndarray, y: np.ndarray) -> RidgeMap:
        """X (rows, features), y (rows, targets)."""
        X, y = validate_data(self, X, y, multi_output=True, y_numeric=True, dtype=np.float64)
        self._single = y.ndim == 1
        y = y.reshape(len(y), -1)
        parts = train_test_split(X, y, test_size=self.held_out, random_state=self.random_state)
        return self.fit_moments(Moments().add(parts[0], parts[2]), Moments().add(parts[1], parts[3]))

    def fit_moments(self, rows: Moments, held_out: Moments) -> RidgeMap:
        """Fit from the sums of the fitted rows and of those that choose the penalty. Raises RunError without rows."""
        if rows.n < 2 or not held_out.n:
            raise RunError("a map needs two rows to be fitted on, and one held out")
        values, vectors = np.linalg.eigh(rows.xx)
        values = np.clip(values, 0, None)
        largest = values[-1] or 1.0
        rotated = vectors.T @ rows.xy
        xx, xy, total = held_out.about(rows.mean_x, rows.mean_y)
        inner, cross = vectors.T @ xx @ vectors, vectors.T @ xy
        # With W = V diag(d) V'X'Y, the error on held-out rows is total - 2 sum d_i (A C')_ii + sum d_i d_j G_ij (A A')_ij.
        linear, square = (rotated * cross).sum(1), inner * (rotated @ rotated.T)
        errors = [
            float(total - 2 * d @ linear + d @ square @ d) for d in (1 / (values + a * largest) for a in self.grid)
        ]
        best = int(np.argmin(errors))
        self.relative_alpha_, self.alpha_ = self.grid[best], self.grid[best] * largest
        self.coef_ = vectors @ (rotated / (values + self.alpha_)[:, None])
        self.mean_x_, self.mean_y_ = rows.mean_x, rows.mean_y
        self.intercept_ = rows.mean_y - rows.mean_x @ self.coef_
        self.r2_ = 1 - errors[best] / total if total else float("nan")
        self.relative_error_ = max(0.0, errors[best] / total) ** 0.5 if total else float("nan")
        self.rank_ = int((values > self.alpha_).sum())
        self.n_rows_, self.n_features_in_ = rows.n, len(rows.mean_x)
        return self

    def predict(self, X: np.ndarray) -> np.ndarray:
        """(rows, targets)."""
        check_is_fitted(self)
        out = validate_data(self, X, reset=False, dtype=np.float64) @ self.coef_ + self.intercept_
        return out[:, 0] if getattr(self, "_single", False) else out
