"""Contrasts between arms of the unpatched model: entry effects, the two-by-two, and what each arm needs. Pure: rows in, figures out.

The measure of an arm is the band mean of z's readout at the last position, one value per instance; the arms of an instance share its context, so
all differences are paired by instance. An arm that is not solved is INVALID and nothing is read into it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from encode_address.gathering import pooling
from encode_address.gathering.rows import CLEAN
from encode_address.metrics import select
from encode_address.stats import NOTHING, Estimate, difference, per_pair, wilson
from encode_address.tasks.arms import ARMS

PAIRS = (
    ("flexible", "control"), ("report", "control"), ("flexible", "supplied"), ("supplied", "control"),
    ("report", "supplied"), ("flexible", "automatic"), ("report", "automatic"), ("control", "automatic"),
)  # fmt: skip
SATURATED, CONFOUND, SOLVED = 0.995, 0.15, 0.5


@dataclass(frozen=True)
class Contrast:
    """A verdict, the difference of two arms' readouts, and that of their accuracies."""

    verdict: str
    why: str
    shift: Estimate
    accuracy: Estimate

    def as_dict(self) -> dict[str, Any]:
        said = {"verdict": self.verdict, "why": self.why}
        return said | ({"shift": str(self.shift), "accuracy": str(self.accuracy)} if self.shift.n else {})


def band(depth: int) -> range:
    """The layers that a summary averages: .38 to .92 of the depth, the last layer left out where that leaves any."""
    first = round(0.38 * depth)
    return range(first, max(first + 1, min(round(0.92 * depth) + 1, depth - 1)))


def accuracies(rows: pd.DataFrame) -> dict[str, tuple[Estimate, float]]:
    """Per arm the forced-choice accuracy of the unpatched model, with Wilson's interval, and its chance."""
    clean = select(rows, part="answer", site=CLEAN, donor="none")
    out = {}
    for arm in ARMS:
        some = select(clean, arm=arm)
        if len(some):
            out[arm] = wilson(int(some["kept"].sum()), len(some)), float(some["chance"].iloc[0])
    return out


def invalid(accuracy: Estimate, chance: float) -> str:
    """Why an arm is not to be interpreted, or ""."""
    if accuracy.low <= chance:
        return f"accuracy {accuracy} is not above its chance {chance:.2f}"
    return f"accuracy {accuracy} is below {SOLVED}: most answers are wrong" if accuracy.value < SOLVED else ""


def invalid_arms(rows: pd.DataFrame) -> dict[str, str]:
    """The arms that the model does not solve, and why."""
    found = {arm: invalid(*known) for arm, known in accuracies(rows).items()}
    return {arm: why for arm, why in found.items() if why}


def entries(rows: pd.DataFrame, measure: str, depth: int, vocabulary: int, concept: str = "own key") -> pd.DataFrame:
    """(instances, arms): the band mean of z's readout in the unpatched model."""
    clean = select(rows, part="grid", site=CLEAN, donor="none")
    clean = clean[clean["read"].isin(band(depth))]
    values = pooling.readout(clean, measure, concept, vocabulary)
    table = clean.assign(value=values).pivot_table(
        index="pair", columns="arm", values="value", aggfunc="mean", dropna=False
    )
    return table.reindex(columns=[arm for arm in ARMS if arm in table])


def contrast(rows: pd.DataFrame, a: str, b: str, measure: str, depth: int, vocabulary: int) -> Contrast:
    """The entry effect a - b: INVALID, CONFOUNDED, ENTRY EFFECT, REVERSED or NO ENTRY EFFECT."""
    right, table = accuracies(rows), entries(rows, measure, depth, vocabulary)
    if a not in right or b not in right or a not in table or b not in table:
        return Contrast("INVALID", "an arm was not run", NOTHING, NOTHING)
    clean = select(rows, part="answer", site=CLEAN, donor="none")
    hits = difference(*(per_pair(select(clean, arm=arm), "kept") for arm in (a, b)))
    shift = difference(table[a], table[b], unit=False)
    for arm in (a, b):
        why = invalid(*right[arm])
        if why:
            return Contrast("INVALID", f"{arm}: {why}", NOTHING, NOTHING)
    if shift.n == 0:
        return Contrast("INVALID", f"the lens knows no {measure}", shift, hits)
    if measure == "R" and table[a].mean() > SATURATED and table[b].mean() > SATURATED:
        return Contrast("INVALID", "R is saturated in both arms", shift, hits)
    if abs(hits.value) > CONFOUND:
        return Contrast("CONFOUNDED", f"the arms differ in accuracy by {hits}", shift, hits)
    if shift.low > 0:
        return Contrast("ENTRY EFFECT", f"{shift}", shift, hits)
    verdict = "REVERSED" if shift.high < 0 else "NO ENTRY EFFECT"
    return Contrast(
        verdict, f"{shift}: effects up to {max(abs(shift.low), abs(shift.high)):.2f} are not excluded", shift, hits
    )


def two_by_two(rows: pd.DataFrame, measure: str, depth: int, vocabulary: int) -> dict[str, Any]:
    """Latent demand, operator, inference, their interaction (one quantity per instance), and the operator's share of flexible - control.

    `verdict` is INVALID, with the reason, where one of the four arms is not solved; the figures are then left out.
    """
    table, right = entries(rows, measure, depth, vocabulary), accuracies(rows)
    four = ("flexible", "supplied", "report", "control")
    missing = [arm for arm in four if arm not in table or arm not in right]
    wrong = [f"{arm}: {why}" for arm in four if arm not in missing and (why := invalid(*right[arm]))]
    if missing or wrong:
        return {"verdict": "INVALID", "why": "; ".join([*(f"{arm} was not run" for arm in missing), *wrong])}
    flexible, supplied, report, control = (table[arm] for arm in four)
    whole = difference(flexible, control, unit=False)
    operator = difference(supplied, control, unit=False)
    out: dict[str, Any] = {
        "verdict": "MEASURED",
        "latent demand": difference(flexible, supplied, unit=False),
        "operator": operator,
        "inference": difference(report, control, unit=False),
        "interaction": difference(flexible - supplied, report - control, unit=False),
    }
    share = _share(supplied - control, flexible - control) if whole.low > 0 else None
    return out | {"confound share": share or f"not measurable: flexible - control is {whole}"}


def _share(a: pd.Series, b: pd.Series) -> Estimate:
    rows = pd.DataFrame({"pair": a.index, "donor_z": a.index, "a": a.to_numpy(), "b": b.to_numpy()}).dropna()
    drawn = np.random.default_rng(0).integers(0, len(rows), (pooling.RESAMPLES, len(rows)))
    means = rows["a"].to_numpy()[drawn].mean(1) / rows["b"].to_numpy()[drawn].mean(1)
    low, high = np.percentile(means, [2.5, 97.5])
    return Estimate(float(rows["a"].mean() / rows["b"].mean()), len(rows), float(low), float(high))


# -- necessity -------------------------------------------------------------------------------------
def necessity(rows: pd.DataFrame, arms: Sequence[str]) -> pd.DataFrame:
    """Mean ablation (the mean of the other prompts' values at the last positions) per component and arm: the change of accuracy, and
    `beyond`, that minus the control arm's where the control is solved (NaN where it is not: selectivity is then not known)."""
    said = pooling.answers(select(rows, donor="mean"))
    clean = select(rows, part="answer", site=CLEAN, donor="mean")
    out = []
    for (site, layer), some in said.groupby(["site", "layer"]):
        lost: Mapping[str, pd.Series] = {
            arm: per_pair(select(some, arm=arm), "kept") - per_pair(select(clean, arm=arm), "kept")
            for arm in arms if len(select(some, arm=arm))
        }  # fmt: skip
        for arm, change in lost.items():
            beyond = difference(change, lost["control"]) if "control" in lost and arm != "control" else NOTHING
            effect = difference(change, change * 0)
            out.append({"site": site, "layer": int(layer), "arm": arm, "effect": effect, "beyond": beyond})
    return pd.DataFrame(out, columns=["site", "layer", "arm", "effect", "beyond"])
