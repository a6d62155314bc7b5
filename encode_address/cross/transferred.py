"""What the rows of `transfer` say: rates by condition, and the conclusion of a variant. Tables only, no models.

Only maps whose fit shares no key with the test decide. It holds where
    - the mapped output redirects: lower bound >= .5; more than the shuffled and the mean map (paired difference, lower bound >= .2);
    - the map of the donor's run that asks what the host asks leaves the answer: lower bound >= .8;
    - a head of a later softmax layer comes to attend more to A's entry than to B's (as in `rule`).
Nothing is concluded where donor or host cannot do the task, or where the host's own output of the run that asks A does not redirect it: then
the target is not its Address. How many seeds of split and map there are is said; pairs of all seeds count, and the seeds' own rates
stand beside them, since the pairs of a seed share its map.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd

from encode_address import rule
from encode_address.cross.transplants import (
    BY_KEY,
    CONDITIONS,
    EMBEDDING,
    HOST,
    MAPPED,
    MEAN,
    OTHER,
    SAME,
    SELF,
    SHUFFLED,
)
from encode_address.experiments.base import TASK_LOW, Conclusion, incapable
from encode_address.metrics import attention, heads, select
from encode_address.stats import Estimate, difference, estimate, per_pair

FACTORS = ["variant", "condition", "source", "block", "keys", "fit_variant", "fit_prompts", "fit_keys"]
MAP = [
    "map_r2", "map_r2_fresh", "map_r2_test", "map_relative_error_test", "map_rank", "map_penalty", "map_extended",
    "map_at_edge", "map_rows", "map_features",
]  # fmt: skip


def whole(rows: pd.DataFrame, condition: str, keys: str = "disjoint", source: str | None = None) -> pd.DataFrame:
    """The rows of a condition whose map has all fit prompts and keys, fitted in the template that is tested."""
    found = select(rows, condition=condition)
    if condition in (HOST, SAME) or found.empty:
        return found
    found = select(found, keys=keys, **({} if source is None else {"source": source}))
    found = found[found["fit_variant"] == found["variant"]]
    return found[(found["fit_prompts"] == found["fit_prompts"].max()) & (found["fit_keys"] == found["fit_keys"].max())]


def rate(rows: pd.DataFrame, column: str = "redirected") -> Estimate:
    """Over all pairs of all seeds."""
    return estimate(rows[column], rows["pair"]) if len(rows) else estimate(pd.Series(dtype=float), pd.Series(dtype=int))


def by_seed(rows: pd.DataFrame, column: str = "redirected") -> list[float]:
    """The rate of each seed of split and map."""
    return [float(some[column].astype(float).mean()) for _, some in rows.groupby("dictionary_seed")]


def conclude(table: pd.DataFrame, setting: Any, donor: Any, host: Any) -> Conclusion:
    """The conclusion of one variant; `setting` says the sites, `donor` and `host` are asked for their names and the layout."""
    rows = select(table, experiment="transfer", variant=setting.variant)
    for model, condition in ((donor, "donor"), (host, HOST)):
        if problem := incapable(select(rows, condition=condition)):
            return Conclusion("undecided", f"{condition} {model.name}: {problem.why}")
    for model, site, option in ((donor, setting.source, "--source"), (host, setting.target, "--target")):
        if site is None:
            return Conclusion("undecided", f"`find` names no Address of {model.name}: name a block with {option}")
    intact, same, mapped = whole(rows, HOST), whole(rows, SAME), whole(rows, MAPPED)
    controls = {name: whole(rows, name) for name in (SHUFFLED, MEAN)}
    others = {name: whole(rows, OTHER, source=name) for name in (site.name for site in setting.others)}
    others[EMBEDDING] = whole(rows, EMBEDDING)
    stays, shared = rate(whole(rows, SELF), "kept"), rate(whole(rows, MAPPED, "shared"))
    readers = host.layout.readers_after(setting.target.layers)
    moved = list(rule.moved_heads(mapped, intact, readers))
    best = max(others, key=lambda name: rate(others[name]).value)
    figures = {
        HOST: str(rate(intact)), SAME: str(rate(same)), MAPPED: str(rate(mapped)), f"{SELF} stays": str(stays),
        **{name: str(rate(some)) for name, some in (controls | others).items()}, "keys shared": str(shared),
        "penalty chosen by key": str(rate(whole(rows, BY_KEY))),
        "seeds": by_seed(mapped), "map R2 on the test": by_seed(mapped, "map_r2_test"), "reader attention moved": moved,
    }  # fmt: skip
    why = (
        f"{setting.source.name} of {donor.name} in {setting.target.name}, test keys not in the fit: mapped {rate(mapped)} "
        f"(seeds {', '.join(f'{value:.2f}' for value in by_seed(mapped))}), same-model {rate(same)}, "
        f"shuffled {rate(controls[SHUFFLED])}, mean {rate(controls[MEAN])}, mapped-self stays {stays}; "
        f"best other source {best} {rate(others[best])}; with shared keys {shared}; "
        f"reader attention {'moved' if moved else 'did not move'}"
    )
    if not rate(same).low >= rule.REDIRECT_LOW:
        return Conclusion("undecided", f"the host's own output does not redirect, so it is no Address: {why}", figures)
    redirected = per_pair(mapped, "redirected")
    close = [
        name
        for name, some in controls.items()
        if not difference(redirected, per_pair(some, "redirected")).low >= rule.CONTROL_LOW
    ]
    problems = [f"a map of {' and '.join(close)} moves as much"] if close else []
    problems += [] if stays.low >= TASK_LOW else ["the map alone moves the answer (mapped-self)"]
    problems += [] if moved else ["no reader's attention moves"]
    if rate(mapped).low >= rule.REDIRECT_LOW:
        status = "does not hold" if problems else "holds"
        return Conclusion(status, "; ".join([*problems, why]), figures)
    status = "does not hold" if rate(mapped).high < rule.REDIRECT_LOW else "undecided"
    return Conclusion(status, why, figures)


def summary(table: pd.DataFrame, settings: Iterable[Any], host: Any) -> pd.DataFrame:
    """Rates and reader attention of every arm with intervals over pairs, the seeds' range, and what its maps are (means over seeds)."""
    targets = {setting.variant: setting.target for setting in settings}
    out = []
    rows = select(table, experiment="transfer")
    rows = rows[rows["condition"].isin(CONDITIONS)]
    filled = rows.assign(**{name: rows[name].fillna("") for name in FACTORS if name in rows})
    for setting, some in filled.groupby([name for name in FACTORS if name in rows], sort=False):
        factors = dict(zip(FACTORS, setting))
        mapped = {name: some[name].astype(float).mean() for name in MAP if name in some and some[name].notna().any()}
        intact = select(rows, variant=factors["variant"], condition=HOST)
        target = targets.get(factors["variant"])
        if factors["condition"] != HOST and target is not None:
            after = host.layout.readers_after(target.layers)
            mapped["attention_moved"] = " ".join(rule.moved_heads(some, intact, after))
        measures = {"redirected": some["redirected"], "kept": some["kept"], "choice_correct": some["choice_correct"]}
        for head in heads(some):
            for index in ("donor_index", "host_index"):
                name = f"attention of L{head[0]}H{head[1]} on {index.removesuffix('_index')}"
                measures[name] = attention(some, head, index)
        for name, values in measures.items():
            seeds = values.astype(float).groupby(some["dictionary_seed"]).mean()
            spread = {"seeds": len(seeds), "seed_low": seeds.min(), "seed_high": seeds.max()}
            out.append({**factors, "measure": name, **estimate(values, some["pair"]).as_dict(), **spread, **mapped})
    return pd.DataFrame(out)
