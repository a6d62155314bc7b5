"""Output transplant (paper section 3.7): the host's mixer outputs of a block := the donor's.

The host asks key B of a dictionary. Donors:

* `same-dictionary` asks key A: if the block writes the address, the host answers with the value of A;
* `identity` is the host itself: nothing may change;
* `other-dictionary` asks the host's own key among other values: the answer must stay;
* `permuted` is another pair's donor: the redirect must vanish;
* `random` adds noise of the size of donor - host, layer by layer;
* `dissociation` asks A in a dictionary of the same keys in another order with other values. An address by key
  gives the host's value of A, an address by index its value at A's index there, a carried answer the donor's value.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from encode_address.errors import TaskError
from encode_address.experiments.base import Heads, run_cells
from encode_address.experiments.removal import Unit, blocks
from encode_address.run.cells import FINAL, FULL, Cell
from encode_address.tasks import Prompt, QuestionSwap, dictionary

DONORS = ("same-dictionary", "identity", "other-dictionary", "permuted", "random", "dissociation")
OTHER_VALUES = ("other-dictionary", "dissociation")  # column shared_values: 0 unless the pool is small
RANDOM_SEEDS = 5


def cells(
    items: Sequence[QuestionSwap],
    units: Sequence[Unit],
    donors: Sequence[str] = DONORS,
    position: str = "final",
    watch: Heads = (),
    labels: Mapping[str, Any] | None = None,
) -> list[Cell]:
    """Every host with each unit transplanted from each kind of donor; `position` is "final" or "question"."""
    partners = permuted(items) if "permuted" in donors else {}
    out = []
    for name, layers in units:
        for kind in donors:
            for item in items:
                for seed in range(RANDOM_SEEDS) if kind == "random" else (-1,):
                    donor = _donor(item, kind, partners)
                    out.append(_cell("transplant", item, position, watch, labels, name, layers, kind, donor, seed))
    return out


def host_cells(
    items: Sequence[QuestionSwap], position: str = "final", watch: Heads = (), labels: Mapping[str, Any] | None = None
) -> list[Cell]:
    """The hosts themselves, unpatched, on the same path as their transplants."""
    out = []
    for item in items:
        words = {"keys": list(item.host.keys), "values": list(item.host.values)}
        out.append(_cell("none", item, position, watch, {**(labels or {}), **words}))
    return out


def example_cells(
    items: Sequence[QuestionSwap], unit: Unit, watch: Heads = (), labels: Mapping[str, Any] | None = None
) -> list[Cell]:
    """The same hosts with a block removed, for the figure that shows one pair at a time."""
    name, layers = unit
    out = []
    for item in items:
        plain = _cell("remove", item, "question", watch, labels, name, layers)
        given = {**plain.labels, "experiment": "example", "position": "all"}
        out.append(replace(plain, mode="zero", labels=given))
    return out


def permuted(items: Sequence[QuestionSwap]) -> dict[int, Prompt]:
    """Another pair's donor for each pair, asking another key at another index."""
    rng = random.Random("permuted donors")
    out = {}
    for item in items:
        asked = item.donor.keys[item.donor_index]
        fits = [
            o.donor
            for o in items
            if o.donor_index != item.donor_index
            and o.donor.keys[o.donor_index] != asked
            and len(o.donor) == len(item.host)
        ]
        if not fits:
            raise TaskError(f"no other pair can lend pair {item.pair} its donor: use a larger --n")
        out[item.pair] = rng.choice(fits)
    return out


def run(
    model: Any, variant: str = "chat8", n: int = 100, seed: int = 0, position: str = "final", watch: Heads = ()
) -> pd.DataFrame:
    """The table of every block's transplant, with all donors, on `n` pairs of `variant`."""
    items, labels = dictionary(model, variant).questions(n, seed), {"variant": variant}
    plan = host_cells(items, position, watch, labels)
    return run_cells(model, plan + cells(items, blocks(model.layout), DONORS, position, watch, labels))


def _donor(item: QuestionSwap, kind: str, partners: Mapping[int, Prompt]) -> Prompt:
    if kind == "permuted":
        return partners[item.pair]
    return {
        "same-dictionary": item.donor,
        "random": item.donor,
        "identity": item.host,
        "other-dictionary": item.other_dictionary,
        "dissociation": item.dissociation,
    }[kind]


def _cell(
    intervention: str,
    item: QuestionSwap,
    position: str,
    watch: Heads,
    labels: Mapping[str, Any] | None,
    block: str = "",
    layers: tuple[int, ...] = (),
    kind: str = "",
    donor: Prompt | None = None,
    seed: int = -1,
) -> Cell:
    host = item.host
    outcomes = [("redirected", host.choices[item.donor_index]), ("kept", host.answer)]
    if kind == "dissociation":
        outcomes += [
            ("host_value_of_key_A", host.choices[item.donor_index]),
            ("host_value_at_index_j", host.choices[item.shifted_index]),
            ("donor_value", donor.answer),
            ("host_answer_kept", host.answer),
        ]
    where = host.span(position)
    return Cell(
        intervention,
        host,
        path=FINAL if position == "final" else FULL,
        layers=layers,
        where=where if donor else (),
        donor=donor,
        source=where if donor else (),
        mode="random" if kind == "random" else "outputs" if donor else "",
        seed=seed,
        outcomes=tuple(outcomes),
        watch=tuple(watch),
        labels={
            "experiment": "transplant",
            "position": position,
            **(labels or {}),
            "block": block,
            "donor": kind,
            "pair": item.pair,
            "shared_values": len({*host.values} & {*donor.values}) if kind in OTHER_VALUES else None,
            "host_index": item.host_index,
            "donor_index": item.donor_index,
        },
    )
