"""What the experiments share: the cell of a clean/corrupted pair, and running cells with a progress bar."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from tqdm import tqdm

from encode_address.run.cells import Cell
from encode_address.run.engine import Engine
from encode_address.tasks import Swap
from encode_address.tasks.text import Text

Heads = Sequence[tuple[int, int]]


def swap_cell(intervention: str, swap: Swap, form: str, labels: Mapping[str, Any], **kwargs: Any) -> Cell:
    """One form ("clean" or "corrupted") of a value-swap pair under an intervention."""
    host, other = (swap.clean, swap.corrupted) if form == "clean" else (swap.corrupted, swap.clean)
    kwargs["watch"] = tuple(kwargs.get("watch", ()))
    return Cell(
        intervention,
        host,
        outcomes=(("correct", host.answer), ("swapped", other.answer)),
        labels={"position": "all", **labels, "pair": swap.pair, "form": form, "target": swap.target},
        **kwargs,
    )


def run_cells(model: Any, cells: Sequence[Cell], text: Text | None = None) -> pd.DataFrame:
    """Run cells and return their table, with a progress bar on a terminal."""
    with progress(model.name, cells) as bar:
        return Engine(model, text, on_rows=bar.update).run(cells)


def progress(what: str, cells: Sequence[Cell]) -> tqdm:
    """A bar over cells that is seen on a terminal only and leaves nothing behind."""
    return tqdm(total=len(cells), desc=what, unit="cell", leave=False, disable=not sys.stderr.isatty())
