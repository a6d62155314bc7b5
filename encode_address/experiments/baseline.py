"""The intact model on clean and corrupted prompts (paper section 4): accuracy, choice accuracy, gap, attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from encode_address.experiments.base import Heads, run_cells, swap_cell
from encode_address.run.cells import Cell
from encode_address.tasks import Swap, dictionary


def cells(swaps: Sequence[Swap], watch: Heads = (), labels: Mapping[str, Any] | None = None) -> list[Cell]:
    """Both forms of every pair, nothing done to the model; `watch` lists the heads whose attention is read."""
    shared = {"experiment": "baseline", **(labels or {})}
    return [swap_cell("none", swap, form, shared, watch=watch) for swap in swaps for form in ("clean", "corrupted")]


def run(model: Any, variant: str = "chat8", n: int = 100, seed: int = 0, watch: Heads = ()) -> pd.DataFrame:
    """The table of the intact model on `n` pairs of `variant`."""
    return run_cells(model, cells(dictionary(model, variant).swaps(n, seed), watch, {"variant": variant}))
