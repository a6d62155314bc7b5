"""Encode swaps (paper section 3.5): do a block's outputs at the swapped tokens carry the swap?

Donor and host differ by one exchange in the dictionary. The block's mixer outputs at the exchanged tokens :=
the donor's, everything after is recomputed. The token embeddings, patched likewise, are the ceiling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from encode_address.experiments.base import run_cells
from encode_address.experiments.removal import Unit, blocks
from encode_address.run.cells import EMBED, Cell
from encode_address.tasks import EntrySwap, dictionary

SWAPS = ("value", "key")


def cells(items: Sequence[EntrySwap], units: Sequence[Unit], labels: Mapping[str, Any] | None = None) -> list[Cell]:
    """Every item unpatched, with each unit's outputs patched, and with the token embeddings patched."""
    shared = {"experiment": "encode", "position": "swapped", **(labels or {})}
    out = []
    settings = [("none", "", "", ())] + [("transplant", "outputs", name, layers) for name, layers in units]
    settings += [("transplant", "embeddings", "embed", (EMBED,))]
    for intervention, mode, block, layers in settings:
        for item in items:
            patched = intervention == "transplant"
            out.append(
                Cell(
                    intervention,
                    item.host,
                    layers=layers,
                    mode=mode,
                    where=item.positions if patched else (),
                    donor=item.donor if patched else None,
                    source=item.positions if patched else (),
                    outcomes=(("carried", item.carried), ("kept", item.host.answer)),
                    labels={**shared, "block": block, "swap": item.swap, "pair": item.pair},
                )
            )
    return out


def run(model: Any, variant: str = "chat8", n: int = 200, seed: int = 0) -> pd.DataFrame:
    """The table of both swaps on `n` items each."""
    task = dictionary(model, variant)
    items = [item for swap in SWAPS for item in task.entries(n, swap, seed)]
    return run_cells(model, cells(items, blocks(model.layout), {"variant": variant}))
