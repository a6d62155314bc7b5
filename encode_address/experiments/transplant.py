"""Output transplant (paper section 3.7): the host's mixer outputs of a block := the donor's.

The host asks key B of a dictionary. Donors:

* `same-dictionary` asks key A: if the block writes the address, the host answers with the value of A;
* `identity` is the host itself: nothing may change;
* `other-dictionary` asks the host's own key among other values: the answer must stay;
* `permuted` is another pair's donor: the redirect must vanish;
* `random` adds noise of the size of donor - host, layer by layer;
* `dissociation` asks A in a dictionary of the same keys in another order with other values. An address by key
  gives the host's value of A, an address by index its value at A's index there, a carried answer the donor's value;
* `other-format` asks A of the same dictionary in another wording of equal length, where the model has one.

m^L(x, p) is the output of layer L's mixer at position p of prompt x, (d_model,). For L in a block and p in a set of
positions of the host h, m^L(h, p) := m^L(d, p), with d the donor; all else is recomputed. Redirected: the share of hosts
whose answer, argmax over the vocabulary, is the value of A. If the block wrote no address, the share would be that of the
other blocks and of the controls: none.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pandas as pd

from encode_address import rule
from encode_address.errors import TaskError
from encode_address.experiments import baseline, readers
from encode_address.experiments.base import Conclusion, Heads, Setting, incapable
from encode_address.experiments.removal import Unit, blocks, single_layers
from encode_address.metrics import select
from encode_address.models.layout import Layout
from encode_address.run.cells import FINAL, FULL, Cell
from encode_address.tasks import Dictionary, Prompt, QuestionSwap

SUMMARY = "output transplant: which block's output at the last token moves the lookup to the donor's key"
PAPER, N, QUICK_N = "3.7", 100, 40
NEEDS_CIRCUIT, ADAPTIVE = False, True
WATCH_PAIRS, WATCH_SEED = 20, 10_000  # dictionaries of their own, on which the heads to watch are chosen
POSITIONS = ("final", "question", "question-before")  # the last is the question without its last token
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
    """Every host with each unit transplanted from each kind of donor; `position` is one of POSITIONS."""
    partners = permuted(items) if "permuted" in donors else {}
    out = []
    for name, layers in units:
        for kind in donors:
            for item in items:
                for seed in range(RANDOM_SEEDS) if kind == "random" else (-1,):
                    lent = donor(item, kind, partners)
                    out.append(_cell("transplant", item, position, watch, labels, name, layers, kind, lent, seed))
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


def steps(setting: Setting) -> Iterator[list[Cell]]:
    """Heads to watch, from other dictionaries; then single blocks with every donor at the last token, and, with few donors,
    single layers and neighbouring blocks together there, and single blocks over the question."""
    task, layout, labels = setting.task, setting.layout, setting.labels
    chosen = {**labels, "split": "discovery"}
    rows = yield baseline.cells(
        task.swaps(WATCH_PAIRS, setting.seed + WATCH_SEED), readers.all_heads(setting.model), chosen
    )
    watch = sorted({*readers.candidates(rows), *readers.top_per_layer(rows)})
    labels = {**labels, "split": "confirmation"}
    items = task.questions(setting.n, setting.seed)
    few = ("same-dictionary", "identity")
    plan = host_cells(items, watch=watch, labels=labels) + cells(items, blocks(layout), watch=watch, labels=labels)
    plan += cells(items, single_layers(layout) + neighbours(layout), few, watch=watch, labels=labels)
    for position in POSITIONS[1:]:
        plan += host_cells(items, position, watch, labels)
        plan += cells(items, blocks(layout), few, position, watch, labels)
    sister = task.sister()
    yield plan + (other_format(items, sister, blocks(layout), watch, labels) if sister else [])


def conclude(rows: pd.DataFrame, setting: Setting) -> Conclusion:
    """One block, or none, must redirect by itself: more than half (lower bound), more than every control, with a later
    head's attention, and not by carrying the answer (see `rule`)."""
    rows = rows[rows["split"] == "confirmation"]
    if problem := incapable(select(rows, experiment="transplant", intervention="none", position="final")):
        return problem
    found = {block.name: rule.address_evidence(rows, setting.layout, block.name) for block in setting.layout.blocks}
    shares = {name: str(evidence.redirect) for name, evidence in found.items()}
    best = max(found.values(), key=lambda evidence: evidence.redirect.value)
    strong = [evidence.name for evidence in found.values() if evidence.redirects]
    pairs = rows[rows["block"].astype(str).str.contains("+", regex=False)]
    unions = [name for name in pairs["block"].unique() if rule.address_evidence(rows, setting.layout, name).redirects]
    if len(strong) > 1:
        return Conclusion(
            "does not hold", f"{' and '.join(strong)} each redirect alone: the address is redundant", shares
        )
    if best.passes:
        outcomes = ", ".join(f"{name.replace('_', ' ')} {value.value:.2f}" for name, value in best.outcomes.items())
        return Conclusion(
            "holds",
            f"{best.name} moves an address (by {best.kind}): redirects {best.redirect}; of dissociation donors {outcomes}",
            shares,
        )
    if best.redirects:
        return Conclusion(
            "does not hold", f"{best.name} redirects {best.redirect}, but {'; '.join(best.problems)}", shares
        )
    together = f"; neighbours together: {', '.join(unions)}" if unions else ""
    status = "does not hold" if best.redirect.high < rule.REDIRECT_LOW else "undecided"
    return Conclusion(
        status, f"no single block redirects half of the answers (most: {best.name} {best.redirect}){together}", shares
    )


def neighbours(layout: Layout) -> list[Unit]:
    """Every two blocks that follow one another and have a reader."""
    named = layout.tabled
    return [(f"{a.name}+{b.name}", a.layers + b.layers) for a, b in pairwise(named)]


def other_format(
    items: Sequence[QuestionSwap], task: Dictionary, units: Sequence[Unit], watch: Heads, labels: Mapping[str, Any]
) -> list[Cell]:
    """Donors that ask the same dictionary for A in the wording of `task`, of equal length."""
    out = []
    for name, layers in units:
        for item in items:
            lent = task.prompt(item.host.keys, item.host.values, item.donor_index)
            out.append(_cell("transplant", item, "final", watch, labels, name, layers, "other-format", lent))
    return out


def donor(item: QuestionSwap, kind: str, partners: Mapping[int, Prompt]) -> Prompt:
    """The donor of that kind (see above) of a pair; `partners` as `permuted` gives them."""
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
    where = host.span("question")[:-1] if position == "question-before" else host.span(position)
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
        outcomes=outcomes(item, kind, donor),
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


def outcomes(item: QuestionSwap, kind: str, donor: Prompt | None) -> tuple[tuple[str, int], ...]:
    """What a host may answer: the donor's entry, its own; with a dissociation donor, by key, by index, or the payload."""
    host = item.host
    named = [("redirected", host.choices[item.donor_index]), ("kept", host.answer)]
    if kind == "dissociation":
        named += [
            ("host_value_of_key_A", host.choices[item.donor_index]),
            ("host_value_at_index_j", host.choices[item.shifted_index]),
            ("donor_value", donor.answer),
            ("host_answer_kept", host.answer),
        ]
    return tuple(named)
