"""Recurrent state (paper sections 3.9, 3.10): is the query written into the state before it is read at the last token?

S^L is the state of linear layer L after the token before the last one: recurrent, (heads, key, value) in Gated DeltaNet and
(heads, value, state) in Mamba-2, and convolutional, (channels, taps). For L in a block, S^L(host) := S^L(donor); then the last
token alone runs. Redirected: the share of hosts that answer with the donor's entry. The softmax layers' keys and values stay the
host's. Two counterparts at the last token, with the host's state kept: each mixer's *input* of the block := the donor's, and the
*residual* stream that enters the block := the donor's.

Where the asked key is one of the last few tokens, the convolutional state holds it as well (its window is the kernel's), and the swap of
the recurrent state alone acts against the host's key in that window. The claim is of the recurrent state alone; `chat8/far` asks it
where the key is out of the window's reach.

If the address were made from what the last token brings along, and not from the state, the counterparts would redirect and the
state would not. The rows without a patch run in two parts as well, so that nothing is compared with another path.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from encode_address.experiments import transplant
from encode_address.experiments.base import Conclusion, Setting, incapable
from encode_address.experiments.removal import Unit, blocks
from encode_address.metrics import select
from encode_address.rule import CONTROL_LOW, REDIRECT_LOW
from encode_address.run.cells import FINAL, MODES, Cell
from encode_address.stats import Estimate, difference, estimate, per_pair
from encode_address.tasks import Prompt, QuestionSwap

SUMMARY = (
    "state transplant: whether a block's recurrent state before the last token carries the address, or its input does"
)
PAPER, N, QUICK_N = "3.9", 100, 40
NEEDS_CIRCUIT, ADAPTIVE = False, False
DONORS = ("same-dictionary", "identity", "other-dictionary", "permuted", "dissociation")
COUNTERPARTS = ("transplant", "input", "residual")


def cells(
    items: Sequence[QuestionSwap],
    units: Sequence[Unit],
    modes: Sequence[str] = MODES["state"],
    donors: Sequence[str] = DONORS,
    labels: Mapping[str, Any] | None = None,
) -> list[Cell]:
    """Every host with each unit's states taken from each kind of donor."""
    partners = transplant.permuted(items) if "permuted" in donors else {}
    return [
        _cell("state", item, name, layers, kind, transplant.donor(item, kind, partners), labels, mode)
        for name, layers in units
        for mode in modes
        for kind in donors
        for item in items
    ]


def head_cells(items: Sequence[QuestionSwap], model: Any, labels: Mapping[str, Any] | None = None) -> list[Cell]:
    """Every host with the recurrent state of one head of one linear layer taken from the donor."""
    return [
        _cell(
            "state", item, f"L{layer}H{head}", (layer,), "same-dictionary", item.donor, labels, "recurrent", head
        )
        for layer in model.linear_layers
        if layer in model.headed
        for head in range(model.heads_of(layer))
        for item in items
    ]  # fmt: skip


def counterpart_cells(
    items: Sequence[QuestionSwap], units: Sequence[Unit], labels: Mapping[str, Any] | None = None
) -> list[Cell]:
    """Every host with what a block writes, what its mixers get, or what enters it, at the last token := the donor's."""
    out = []
    for name, layers in units:
        for verb in COUNTERPARTS:
            touched = layers[:1] if verb == "residual" else layers
            for kind in ("same-dictionary", "identity"):
                out += [
                    _cell(verb, item, name, touched, kind, transplant.donor(item, kind, {}), labels) for item in items
                ]
    return out


def steps(setting: Setting) -> Iterator[list[Cell]]:
    """Hosts on the same path; every block and all linear layers together; the counterparts."""
    layout, labels = setting.layout, {**setting.labels, "split": "confirmation"}
    items = setting.task.questions(setting.n, setting.seed)
    units = blocks(layout)
    plan = [_cell("none", item, "", (), "", None, labels) for item in items]
    plan += cells(items, units, labels=labels)
    plan += cells(items, [("all linear", layout.linear_layers)], donors=("same-dictionary", "identity"), labels=labels)
    plan += head_cells(items, setting.model, labels)
    yield plan + counterpart_cells(items, units, labels)


def conclude(rows: pd.DataFrame, setting: Setting) -> Conclusion:
    """The block whose recurrent state redirects, if one does, and more than every other block's and every control."""
    if problem := incapable(select(rows, experiment="state", intervention="none")):
        return problem
    shares = {b.name: {mode: redirected(rows, b.name, mode) for mode in MODES["state"]} for b in setting.layout.blocks}
    figures = {name: {mode: str(share) for mode, share in some.items()} for name, some in shares.items()}
    best = max(shares, key=lambda name: (shares[name]["both"].value, shares[name]["recurrent"].value))
    inputs = {verb: redirected(rows, best, verb) for verb in ("input", "residual")}
    why = (
        f"the recurrent state of {best} redirects {shares[best]['recurrent']}, with its convolutional state {shares[best]['both']}; "
        f"its mixers' input at the last token {inputs['input']}, what enters the block there {inputs['residual']}"
    )
    if max(share.high for share in shares[best].values()) < REDIRECT_LOW:
        return Conclusion("does not hold", f"no block's state redirects half of the answers; at most, {why}", figures)
    modes = [mode for mode in ("recurrent", "both") if shares[best][mode].low >= REDIRECT_LOW]
    if not modes:
        return Conclusion("undecided", why, figures)
    own = _per_pair(rows, best, modes[0], "same-dictionary")
    others = {name: _per_pair(rows, name, modes[0], "same-dictionary") for name in shares if name != best}
    others |= {donor: _per_pair(rows, best, modes[0], donor) for donor in ("other-dictionary", "permuted")}
    close = [name for name, moved in others.items() if not difference(own, moved).low >= CONTROL_LOW]
    if close:
        return Conclusion("does not hold", f"{why}; {', '.join(close)} as much", figures)
    if modes[0] == "both":
        said = "what it carries is in the convolutional state, which has the asked key in its window"
        return Conclusion("does not hold", f"{why}; {said}: ask where the key is farther away, e.g. chat8/far", figures)
    return Conclusion("holds", why, figures)


def redirected(rows: pd.DataFrame, block: str, what: str, donor: str = "same-dictionary") -> Estimate:
    """The share redirected by a block's state (recurrent, conv, both), or by a counterpart (transplant, input, residual)."""
    some = _rows(rows, block, what, donor)
    return estimate(some["redirected"], some["pair"])


def _per_pair(rows: pd.DataFrame, block: str, what: str, donor: str) -> pd.Series:
    return per_pair(_rows(rows, block, what, donor), "redirected")


def _rows(rows: pd.DataFrame, block: str, what: str, donor: str) -> pd.DataFrame:
    how = {"intervention": what} if what in COUNTERPARTS else {"intervention": "state", "mode": what}
    return select(rows, experiment="state", block=block, donor=donor, **how)


def _cell(
    verb: str,
    item: QuestionSwap,
    block: str,
    layers: tuple[int, ...],
    kind: str,
    donor: Prompt | None,
    labels: Mapping[str, Any] | None,
    mode: str = "",
    head: int = -1,
) -> Cell:
    where = item.host.final if donor else ()
    return Cell(
        verb,
        item.host,
        FINAL,
        layers,
        where,
        donor,
        where,
        mode,
        head,
        outcomes=transplant.outcomes(item, kind, donor),
        labels={
            "experiment": "state",
            "position": "final",
            **(labels or {}),
            "block": block,
            "donor": kind,
            "pair": item.pair,
            "host_index": item.host_index,
            "donor_index": item.donor_index,
        },
    )
