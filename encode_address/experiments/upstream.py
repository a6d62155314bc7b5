"""Upstream (paper section 3.10): which earlier blocks does the Address need to write its address?

The donor d runs with another unit U removed (outputs := 0 at all positions); the Address block's outputs at its last token,
m^L(d without U, T), (d_model,) per layer, are transplanted into the *intact* host: m^L(h, T) := m^L(d without U, T). Redirected: the
share of hosts that answer with the donor's entry. Nothing is removed in the host, so what fails is the address, not the reader.
U is each other block by itself (leave one out), all *feeders* together (blocks between Encode and Address), and all blocks before
the Address. A block after the Address cannot matter and is the control: its row equals the plain transplant.

If the Address built the query from the token embeddings alone, every row would be the plain transplant's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from encode_address.experiments import transplant
from encode_address.experiments.base import Conclusion, Setting, incapable
from encode_address.experiments.removal import Unit, blocks
from encode_address.metrics import select
from encode_address.models.layout import Layout
from encode_address.rule import REDIRECT_LOW, REMOVAL_DROP
from encode_address.run.cells import FINAL, FULL, Cell, Edit
from encode_address.stats import Estimate, difference, estimate, per_pair
from encode_address.tasks import QuestionSwap

SUMMARY = "upstream: which earlier blocks the Address needs to write its address (its output from donors without them)"
PAPER, N, QUICK_N = "3.10", 100, 40
NEEDS_CIRCUIT, ADAPTIVE = True, False


def units(layout: Layout, encode: Sequence[str], address: Sequence[str]) -> list[Unit]:
    """What is removed from donors: each block but the Address, the feeders together, all blocks before the Address."""
    own = layout.layers_of("+".join(address))
    before = [block for block in layout.blocks if block.layers[-1] < own[0]]
    feeders = [block for block in before if block.name not in encode]
    sets = [unit for unit in blocks(layout) if unit[0] not in address]
    if len(feeders) > 1:
        sets.append(("feeders", tuple(layer for block in feeders for layer in block.layers)))
    if len(before) > 1:
        sets.append(("all before", tuple(layer for block in before for layer in block.layers)))
    return sets


def cells(
    items: Sequence[QuestionSwap], address: Unit, removed: Sequence[Unit], labels: Mapping[str, Any] | None = None
) -> list[Cell]:
    """Every host with the Address from a plain donor and from donors without each unit; and what those donors answer."""
    name, layers = address
    out = []
    for without, gone in [("", ()), *removed]:
        edits = (Edit("remove", gone),) if gone else ()
        for item in items:
            host, end = item.host, item.host.final
            shared = {
                "experiment": "upstream", "position": "final", **(labels or {}), "block": name, "without": without,
                "pair": item.pair, "host_index": item.host_index, "donor_index": item.donor_index,
            }  # fmt: skip
            moved = {"donor": item.donor, "where": end, "source": end, "under": edits}
            outcomes = transplant.outcomes(item, "same-dictionary", item.donor)
            given = {**shared, "donor": "same-dictionary"}
            out.append(Cell("transplant", host, FINAL, layers, outcomes=outcomes, labels=given, **moved))
            answer = (("correct", item.donor.answer), ("swapped", host.answer))
            out.append(
                Cell("none", item.donor, FULL, also=edits, outcomes=answer, labels={**shared, "donor": "itself"})
            )
    return out


def steps(setting: Setting) -> Iterator[list[Cell]]:
    """All at once, of the circuit's Address."""
    circuit, layout = setting.circuit, setting.layout
    if not circuit or not circuit.address:
        return
    address = ("+".join(circuit.address), layout.layers_of("+".join(circuit.address)))
    items = setting.task.questions(setting.n, setting.seed)
    labels = {**setting.labels, "split": "confirmation"}
    yield cells(items, address, units(layout, circuit.encode, circuit.address), labels)


def conclude(rows: pd.DataFrame, setting: Setting) -> Conclusion:
    """The claim is that the Address needs its feeders: without them the redirect falls by half or more (lower bound)."""
    circuit = setting.circuit
    if not circuit or not circuit.address:
        return Conclusion("undecided", "`find` names no Address here")
    if problem := incapable(select(rows, experiment="upstream", donor="itself", without=""), "correct"):
        return problem
    plain = redirected(rows, "")
    names = [name for name, _ in units(setting.layout, circuit.encode, circuit.address)]
    shares = {name: redirected(rows, name) for name in names}
    figures = {"plain": str(plain), **{f"without {name}": str(share) for name, share in shares.items()}}
    why = f"the Address of donors redirects {plain}; " + "; ".join(f"without {n} {s}" for n, s in shares.items())
    if plain.low < REDIRECT_LOW:
        return Conclusion("undecided", why, figures)
    own = setting.layout.layers_of("+".join(circuit.address))
    feeders = [b.name for b in setting.layout.blocks if b.layers[-1] < own[0] and b.name not in circuit.encode]
    asked = "feeders" if len(feeders) > 1 else next(iter(feeders), None)
    if asked is None:
        return Conclusion("does not hold", f"no block lies between Encode and Address: {why}", figures)
    drop = difference(_pairs(rows, ""), _pairs(rows, asked))
    if drop.low >= REMOVAL_DROP:
        return Conclusion("holds", f"the Address needs its feeders: {why}", figures)
    status = "does not hold" if drop.high < REMOVAL_DROP else "undecided"
    return Conclusion(status, f"the Address does without its feeders: {why}" if status != "undecided" else why, figures)


def redirected(rows: pd.DataFrame, without: str) -> Estimate:
    """The share redirected by the Address of donors without that unit ("": plain donors)."""
    some = select(rows, experiment="upstream", donor="same-dictionary", without=without)
    return estimate(some["redirected"], some["pair"])


def _pairs(rows: pd.DataFrame, without: str) -> pd.Series:
    return per_pair(select(rows, experiment="upstream", donor="same-dictionary", without=without), "redirected")
