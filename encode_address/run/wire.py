"""What a plan would send to a server and bring back."""

from __future__ import annotations

from typing import Any

import cloudpickle
import torch
import zstandard

from encode_address.run.cells import Cell
from encode_address.run.paths import PATHS
from encode_address.run.plan import Plan
from encode_address.run.steps import run_bundles

NUMBER = 4  # bytes of one that comes back


class _Unfitted:
    """An engine for which nothing has run: means are zeros, and what maps would write is left out."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        size = engine.model.config.hidden_size
        self._means = {layer: torch.zeros(size) for layer in range(engine.depth)}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def means(self) -> dict[int, torch.Tensor]:
        return self._means

    def fitted(self, _: Any) -> _Unfitted:
        return self

    def write(self, layer: int, _: int) -> tuple:
        return layer, "output", None, ()


def wire(engine: Any, plan: Plan) -> tuple[int, int, int]:
    """(jobs, bytes up, most bytes down) of running `plan` on a server; fitted maps come on top."""
    jobs, planned, up = plan.jobs(), _Unfitted(engine), 0
    for job in jobs:
        steps = [[step.data for step in PATHS[bundle.path](planned, bundle)] for bundle in job]
        up += len(zstandard.ZstdCompressor(level=6).compress(cloudpickle.dumps((run_bundles, steps))))
    down = sum(_answer(cell, engine.model.heads) for bundle in plan.bundles for cell in bundle.pending)
    shared = (1, 0, engine.depth * engine.model.config.hidden_size * 8) if plan.shared[1] else (0, 0, 0)
    return len(jobs) + shared[0], up + shared[1], down + shared[2]


def _answer(cell: Cell, heads: int) -> int:
    """Bytes of what is measured of one cell: the answer with the tokens of interest, and attention on entries."""
    if cell.text:
        return 3 * NUMBER
    watched = len({layer for layer, _ in cell.watch}) * heads * len(cell.host.keys)
    return NUMBER * (4 + len(cell.outcomes) + len(cell.host.choices) + watched)
