"""Encode swaps (paper section 3.5): do a block's outputs at the swapped tokens carry the swap?

Donor d and host h differ by one exchange in the dictionary. *Value swap*: h has the values of entries t and i exchanged;
patched at the value of t; carried if h, asked for t, answers d's value. *Key swap*: d has the keys of t and i exchanged;
patched at both keys (not the one in the question); carried if h, asked for t, answers the value of i. For L in a block and p a
patched position, m^L(h, p) := m^L(d, p), with m^L the output of layer L's mixer, (d_model,); everything after is recomputed.

The token embeddings, patched likewise, are the ceiling; every other block is a control. If no block encoded what the tokens
are, a block's patch would change nothing: the share carried would be 0 and the host's own answer kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from encode_address import rule
from encode_address.experiments.base import Conclusion, Setting, incapable
from encode_address.experiments.removal import Unit, blocks, single_layers
from encode_address.metrics import select
from encode_address.run.cells import EMBED, Cell
from encode_address.stats import Estimate, estimate
from encode_address.tasks import EntrySwap

SUMMARY = "encode swaps: which block's outputs at swapped keys and values carry the swap"
PAPER, N, QUICK_N = "3.5", 200, 40
NEEDS_CIRCUIT, ADAPTIVE = False, False
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


def steps(setting: Setting) -> Iterator[list[Cell]]:
    """Both swaps, `n` items each: every block, every linear layer, and the embeddings."""
    labels = {**setting.labels, "split": "confirmation"}
    items = [item for swap in SWAPS for item in setting.task.entries(setting.n, swap, setting.seed)]
    single = [
        unit for unit in single_layers(setting.layout) if unit[1] not in [b.layers for b in setting.layout.blocks]
    ]
    yield cells(items, blocks(setting.layout) + single, labels)


def conclude(rows: pd.DataFrame, setting: Setting) -> Conclusion:
    """One block carries both swaps (lower bounds .5), every other block neither (upper bounds .1), as in `rule`."""
    if problem := incapable(select(rows, experiment="encode", intervention="none")):
        return problem
    chosen = rule.select_encode(rows, setting.layout)
    claim = rule.judge_encode(rows, setting.layout, chosen)
    units = [block.name for block in setting.layout.blocks] + ["embed"]
    figures = {name: {swap: str(carried(rows, name, swap)) for swap in SWAPS} for name in units}
    said = "; ".join(f"{name} {' / '.join(share.values())}" for name, share in figures.items())
    if claim.holds:
        return Conclusion("holds", f"{chosen} alone carries both swaps (value / key: {said})", figures)
    ceiling = min(carried(rows, "embed", swap).low for swap in SWAPS)
    if ceiling < rule.ENCODE_LOW:
        return Conclusion("undecided", f"not even the embeddings carry the swaps ({said})", figures)
    small = "too small" in claim.reason
    return Conclusion("undecided" if small else "does not hold", f"{claim.reason} (value / key: {said})", figures)


def carried(rows: pd.DataFrame, block: str, swap: str) -> Estimate:
    """The share of hosts that answer as if the swap were theirs, patched at `block` ("embed": the embeddings)."""
    some = select(rows, experiment="encode", intervention="transplant", block=block, swap=swap)
    return estimate(some["carried"], some["pair"])
