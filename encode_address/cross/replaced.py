"""What the rows of a block replacement say (paper 3.13, 5.7): the donor's Address against the best of its controls.

A control that does as well, or a block that is not needed, makes a success worthless: such a row is UNINFORMATIVE. Where the
donor's block fails, the row says where: in a map (its R^2 on prompts that took no part in its fit), before the reader (its
attention did not come back), at some class of positions (the squared error over what the block's write varies there), or in the maps
as such (the host's own block between two fitted maps loses as much).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from encode_address.cross.stand_ins import BOTH_LINEAR, BOTH_REMOVED, DONOR, IDENTITY, INTACT, OWN, REMOVED
from encode_address.experiments.base import Conclusion, Heads, incapable
from encode_address.metrics import attention, perplexity, select
from encode_address.run.stitch import CLASSES
from encode_address.stats import Estimate, difference, estimate, per_pair

MARGIN, NOT_NEEDED = 0.1, 0.9  # a control within the margin, or removal that leaves so much: the row says nothing
KEPT = 0.8  # of the intact accuracy: the donor's block does the work
UNINFORMATIVE = "UNINFORMATIVE"


def measure_of(truncate: int | None) -> str:
    """What a hit is: the full vocabulary's best, or of a truncated model the best of the dictionary's values."""
    return "correct" if truncate is None else "choice_correct"


def rate(rows: pd.DataFrame, arm: str, measure: str) -> Estimate:
    """A share of hits under an arm."""
    some = select(rows, experiment="replace", arm=arm)
    return estimate(some[measure], some["pair"])


def on_target(rows: pd.DataFrame, arm: str, head: tuple[int, int]) -> pd.Series:
    """The reader's attention on the entry asked for, by pair."""
    some = select(rows, experiment="replace", arm=arm)
    return attention(some, head, "target").groupby(some["pair"]).mean()


def comparison(rows: pd.DataFrame, controls: Sequence[str], measure: str) -> dict[str, Any]:
    """The donor's block minus the best control: the paired difference, which control, and whether that says something."""
    done = select(rows, experiment="replace")
    rates = {arm: rate(rows, arm, measure).value for arm in controls if (done["arm"] == arm).any()}
    best = max(rates, key=lambda arm: rates[arm])
    a, b = (per_pair(select(done, arm=arm), measure) for arm in (DONOR, best))
    gap, left = difference(a, b), rates[REMOVED]
    why = []
    if gap.value <= MARGIN:
        why.append(f"{best} is within {MARGIN:g} of it" if gap.value >= 0 else f"{best} does better")
    if left >= NOT_NEEDED:
        why.append(f"removal leaves {left:.2f}")
    return {"control": best, **gap.as_dict(), "note": UNINFORMATIVE if why else "", "because": ", ".join(why)}


def diagnosis(rows: pd.DataFrame, head: tuple[int, int] | None, measure: str) -> dict[str, Any]:
    """Where the donor's block falls short."""
    donor = select(rows, experiment="replace", arm=DONOR)
    known = [column for column in ("entry_r2", "exit_r2") if column in donor]
    out: dict[str, Any] = {column: float(donor[column].iloc[0]) for column in known}
    missed = {name: float(donor[f"error_{name}"].iloc[0]) for name in CLASSES if f"error_{name}" in donor}
    missed = {name: value for name, value in missed.items() if value == value}
    if missed:
        worst = max(missed, key=lambda name: missed[name])
        out |= {"missed": missed, "worst_positions": worst}
    if head is not None and f"attn.L{head[0]}H{head[1]}" in donor:
        moved = difference(on_target(rows, DONOR, head), on_target(rows, REMOVED, head))
        out |= {"attention_gained": moved.as_dict(), "attention_moved": bool(moved.low > 0)}
    out["own_refitted"] = rate(rows, OWN, measure).value
    return out


def figures(rows: pd.DataFrame, controls: Sequence[str], heads: Heads, truncate: int | None) -> dict[str, Any]:
    """Every number of one slot setting."""
    measure, head = measure_of(truncate), next(iter(heads), None) if truncate is None else None
    done, text = select(rows, experiment="replace"), select(rows, experiment="replace-text")
    out: dict[str, Any] = {"arms": {}}
    for arm in dict.fromkeys(done["arm"]):
        said: dict[str, Any] = {"accuracy": rate(rows, arm, "correct").as_dict()}
        said["choice_accuracy"] = rate(rows, arm, "choice_correct").as_dict()
        if head is not None:
            values = on_target(rows, arm, head)
            said["attention"] = estimate(values, pd.Series(values.index, index=values.index)).as_dict()
        if len(loss := select(text, arm=arm)):
            said["perplexity"] = perplexity(loss["loss"])
        out["arms"][arm] = said
    out["donor - best control"] = comparison(rows, controls, measure)
    out["diagnosis"] = diagnosis(rows, head, measure)
    pair = [per_pair(select(done, arm=arm), "margin") for arm in (INTACT, IDENTITY)]
    out["identity_off_by"] = float((pair[0] - pair[1]).abs().max())
    return out


def conclude(rows: pd.DataFrame, controls: Sequence[str], heads: Heads, truncate: int | None) -> Conclusion:
    """Holds where the donor's block keeps what the host's gives (at most .2 of accuracy lost, upper bound) and beats every
    control by more than .1; does not hold where it loses more (lower bound); undecided else, or where it is not needed."""
    measure, told = measure_of(truncate), figures(rows, controls, heads, truncate)
    intact, donor = rate(rows, INTACT, measure), rate(rows, DONOR, measure)
    done = select(rows, experiment="replace")
    if truncate is None and (problem := incapable(select(done, arm=INTACT), "correct")):
        return Conclusion(problem.status, problem.why, told)
    best, where = told["donor - best control"], told["diagnosis"]
    gap = Estimate(*(best[name] for name in ("value", "n", "low", "high")))
    said = [
        f"intact {intact.value:.2f}, donor's block {donor}, removed {rate(rows, REMOVED, measure).value:.2f}, "
        f"best control {best['control']} {rate(rows, best['control'], measure).value:.2f}, difference {gap}"
    ]
    said += [
        f"{arm} {rate(rows, arm, measure).value:.2f}"
        for arm in (BOTH_REMOVED, BOTH_LINEAR)
        if (done["arm"] == arm).any()
    ]
    if best["note"]:
        said.append(f"{best['note']}: {best['because']}")
    loss = difference(*(per_pair(select(done, arm=arm), measure) for arm in (INTACT, DONOR)))
    if loss.low > 1 - KEPT:
        said.append(_where(where))
    status = "undecided"
    if rate(rows, REMOVED, measure).value < NOT_NEEDED:
        if loss.low > 1 - KEPT:
            status = "does not hold"
        elif loss.high <= 1 - KEPT and not best["note"] and gap.low > 0:
            status = "holds"
    if told["identity_off_by"] > 1e-6:
        said.append(f"the host's own block without maps is off by {told['identity_off_by']:.2g}: the plumbing is wrong")
        status = "undecided"
    return Conclusion(status, "; ".join(said), told)


def _where(diagnosis: dict[str, Any]) -> str:
    """The diagnosis in words."""
    said = [
        f"{name.removesuffix('_r2')} map R2 {diagnosis[name]:.2f}"
        for name in ("entry_r2", "exit_r2")
        if name in diagnosis
    ]
    if "attention_moved" in diagnosis:
        said.append(f"reader attention {'came back in part' if diagnosis['attention_moved'] else 'did not come back'}")
    if "worst_positions" in diagnosis:
        worst = diagnosis["worst_positions"]
        times = diagnosis["missed"][worst]
        said.append(f"at {worst} positions the error is {times:.3g} times what the block's write varies there")
    said.append(f"the host's own block through fitted maps {diagnosis['own_refitted']:.2f}")
    return "where: " + ", ".join(said)
