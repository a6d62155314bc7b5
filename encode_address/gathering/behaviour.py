"""What patches do to the answer: transport by depth and its edges, calibration of the readout, arm specificity. Pure: rows in, figures out.

`transport` is donor minus distractor: the share of answers that are the donor's minus the mean share of each other wrong one. It is 0 in
expectation where a patch only destroys. Accuracy stands beside it; a layer where it is below .5 is in the destroyed zone, unless the answer is
the donor's: a patch that redirects every answer leaves no accuracy, and destroys nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from encode_address.gathering import pooling
from encode_address.gathering.pooling import DESTROYED
from encode_address.metrics import select
from encode_address.stats import NOTHING, Estimate

COUNTERFACTUAL, CARRIED, REVERSED = "COUNTERFACTUAL", "CARRIED", "REVERSED"
DESTRUCTION, SUBTHRESHOLD, NONE = "DESTRUCTION", "SUBTHRESHOLD", "NONE"


def depth_profile(said: pd.DataFrame) -> pd.DataFrame:
    """Per patch layer (rows of one site, arm and sort of donor): `transport`, `carry`, `accuracy` and `beyond` (how much more the donor's answer
    gains than other wrong ones) with intervals, `destroyed` (accuracy below .5 and the answer not the donor's) and the verdict."""
    out = []
    for layer, some in said.groupby("layer"):
        known = {name: pooling.two_way(some, some[name], rate=True) for name in ("transport", "carry")}
        known["accuracy"] = pooling.two_way(some, some["kept"], rate=True)
        known["beyond"] = pooling.two_way(some, some["d beyond others"])
        found = verdict(**known)
        destroyed = known["accuracy"].value < DESTROYED and found != COUNTERFACTUAL
        out.append({"layer": int(layer), **known, "destroyed": destroyed, "verdict": found})
    return pd.DataFrame(out, columns=["layer", "transport", "carry", "accuracy", "beyond", "destroyed", "verdict"])


def verdict(transport: Estimate, carry: Estimate, accuracy: Estimate, beyond: Estimate) -> str:
    """What a patch did: made the answer what the donor's z implies here (COUNTERFACTUAL), or the donor's own value (CARRIED), destroyed the
    task, moved the donor's answer below the threshold, or nothing."""
    if transport.low > 0:
        return COUNTERFACTUAL
    if carry.low > 0:
        return CARRIED
    if transport.high < 0:
        return REVERSED
    if accuracy.value < DESTROYED:
        return DESTRUCTION
    return SUBTHRESHOLD if beyond.low > 0 else NONE


def edges(profile: pd.DataFrame) -> dict[str, Any]:
    """The window of layers where a patch installs the donor's answer, and its edges, each of which may not be there.

    Survival: below `lower` an installed value does not reach the answer. Destruction: from `upper` on the patch no longer substitutes, and
    the task is destroyed. A window that begins at the first patched layer has no lower edge, one that ends with the last no upper one.
    """
    good = profile["verdict"] == COUNTERFACTUAL
    if not good.any():
        return {"window": "not found", "lower": "not found", "upper": "not found"}
    layers = profile["layer"].tolist()
    first, last = (int(profile.loc[good, "layer"].iloc[i]) for i in (0, -1))
    above = profile[profile["layer"] > last]
    broken = above[above["destroyed"]]
    return {
        "window": [first, last],
        "lower": first if first > layers[0] else "not found: the first layer installs it",
        "upper": (
            int(broken["layer"].iloc[0]) if len(broken)
            else "not found: the last layer installs it" if last == layers[-1]
            else "not found: nothing is destroyed above"
        ),
    }  # fmt: skip


def calibration(
    shifts: pd.DataFrame, said: pd.DataFrame, layer: int, concept: str, depth: int
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Readout against behaviour on the same trials, per component at one patch layer.

    Returns a row per component (`readout`: the shift of the concept at matched distance, `answer`: that of the answer's margin towards the donor's,
    `ratio` answer / readout with its interval, `r`), and the trials. The last layer is left out: its readout is the answer itself. The ratio
    is NaN where the readout's interval holds 0; nothing is returned where no layer lies in between.
    """
    between = (shifts["read"] - layer).isin(pooling.distances(depth)) & (shifts["read"] < depth - 1)
    near = shifts[(shifts["layer"] == layer) & between]
    out, trials = [], []
    for site, some in near.groupby("site"):
        readout = some.groupby(["pair", "donor_z"])[f"dM.{concept}"].mean().rename("readout")
        here = select(said, site=site, layer=layer).groupby(["pair", "donor_z"])["d answer"].mean().rename("answer")
        both = pd.concat([readout, here], axis=1, join="inner").dropna().reset_index().assign(site=site)
        if both.empty:
            continue
        moved, answer = (pooling.two_way(both, both[name]) for name in ("readout", "answer"))
        known = moved.low > 0 or moved.high < 0
        ratio = pooling.share((both, "answer"), (both, "readout")) if known else NOTHING
        flat = both["readout"].std() == 0 or both["answer"].std() == 0 or len(both) < 3
        r = float("nan") if flat else float(np.corrcoef(both["readout"], both["answer"])[0, 1])
        out.append({"site": site, "layer": layer, "readout": moved, "answer": answer, "ratio": ratio, "r": r})
        trials.append(both)
    columns = ["site", "layer", "readout", "answer", "ratio", "r"]
    return pd.DataFrame(out, columns=columns), pd.concat(trials, ignore_index=True) if trials else pd.DataFrame()


def specificity(said: pd.DataFrame, site: str, layer: int, arms: Sequence[str], main: str) -> Mapping[str, Any]:
    """Transport of one site in each arm: specific to the main arm if no other's interval reaches the main one's."""
    out = {}
    for arm in arms:
        some = select(said, arm=arm, site=site, layer=layer)
        some = some[some["transport"].notna()] if len(some) else some
        out[arm] = pooling.two_way(some, some["transport"], rate=True) if len(some) else NOTHING
    known = {arm: e for arm, e in out.items() if e.n and arm != main}
    rival = max((e.high for e in known.values()), default=float("nan"))
    specific = "not measurable: no other arm is solved" if not known else str(bool(rival < out[main].low))
    return {"by arm": {arm: str(e) for arm, e in out.items() if e.n}, "specific": specific}
