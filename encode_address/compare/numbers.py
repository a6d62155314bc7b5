"""Our estimate of each published number, and their difference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from encode_address import metrics
from encode_address.compare.published import FACTORS, matched, published
from encode_address.compare.results import Source, setting
from encode_address.experiments import encode, encode_linear, pruning, query_key, state, upstream, writers
from encode_address.metrics import select
from encode_address.stats import NOTHING, Estimate, estimate, wilson

SHARES = {"accuracy", "choice_accuracy", "redirected", "kept", "carried", "top1"}
MEAN_OF = {"pruning": pruning.VARIANTS, "scaling": ("chat8", "list8", "rev8")}  # the variants of variant "mean"
EXCLUDES, INCLUDES = "differs", "no difference seen"


# -- ours, of a published row: (rows of the variant, row) -> Estimate ------------------------------------------------
def _removal(rows: pd.DataFrame, row: pd.Series) -> Estimate:
    name, unit = row["experiment"], row["unit"]
    if unit == "intact":
        some = select(rows, experiment="baseline" if name == "removal" else name, intervention="none")
    else:
        some = select(rows, experiment=name, block=unit, position="all", mode="zero")
    if some.empty:
        return NOTHING
    if row["measure"] == "accuracy":
        return metrics.accuracy(some)
    if row["measure"] == "gap":
        gaps = metrics.gap(some)
        return estimate(gaps, gaps.index.to_series())
    return _attention(select(some, form="clean"), row, "target")


def _attention(rows: pd.DataFrame, row: pd.Series, index: str) -> Estimate:
    """Of a reader that was watched: its attention on the entry of column `index`, or on all others."""
    head = _head(row["reader"])
    if head not in metrics.heads(rows):
        return NOTHING
    on = metrics.attention(rows, head, index)
    if row["measure"] == "attention_others":
        return estimate(rows[f"attn.{row['reader']}"].map(np.sum) - on, rows["pair"])
    return estimate(on, rows["pair"]) if row["measure"] in ("attention_target", "attention_donor") else NOTHING


def _transplant(rows: pd.DataFrame, row: pd.Series) -> Estimate:
    rows = select(rows, experiment="transplant", position=row["position"])
    if row["unit"] == "intact":
        some = select(rows, intervention="none")
    else:
        some = select(rows, intervention="transplant", block=row["unit"], donor=row["condition"])
    if row["measure"] == "attention_donor":
        return _attention(some, row, "donor_index")
    return estimate(some[row["measure"]], some["pair"]) if row["measure"] in some else NOTHING


SIDES = dict(zip(("intact", "Q ablated", "K ablated", "Q+K ablated"), query_key.SIDES))


def _query_key(rows: pd.DataFrame, row: pd.Series) -> Estimate:
    head, (query, key) = _head(row["reader"]), SIDES.get(row["condition"], ("", ""))
    some = select(rows, experiment="query-key", ablation="zero", query_from=query, key_from=key)
    some = some.drop_duplicates("pair") if row["unit"] == "intact" else select(some, block=row["unit"])
    if head not in metrics.heads(some):
        return NOTHING
    measures = {"selectivity": query_key.selectivity, "top1": query_key.top1}
    return estimate(measures[row["measure"]](some, head), some["pair"]) if row["measure"] in measures else NOTHING


def _pruning(rows: pd.DataFrame, row: pd.Series) -> Estimate:
    layer = int(row["unit"][1:])
    some = select(rows, experiment="pruning", last=layer)
    if some.empty:
        return NOTHING
    if row["measure"] == "accuracy":
        return metrics.accuracy(some)
    if row["measure"] == "choice_accuracy":
        return pruning.choice(rows, layer)
    curve = select(pruning.normalised(rows, paper=True), last=layer)
    if row["measure"] != "normalised_choice_accuracy" or curve.empty:
        return NOTHING
    value, low, high = curve.iloc[0][["value", "low", "high"]]
    return Estimate(float(value), some["pair"].nunique(), float(low), float(high))


def _scaling(rows: pd.DataFrame, row: pd.Series) -> Estimate:
    if row["measure"] == "accuracy":
        some = select(rows, experiment="removal", block=row["unit"])
        return metrics.accuracy(some) if len(some) else NOTHING
    some = select(rows, experiment="scaling", block=row["unit"], arm="transplant").drop_duplicates("pair")
    return estimate(some["redirected"], some["pair"]) if row["measure"] == "redirected" else NOTHING


def _encode_linear(rows: pd.DataFrame, row: pd.Series) -> Estimate:
    whole = (row["measure"], row["condition"]) == ("accuracy", "linear")
    return encode_linear.kept(rows, row["unit"], encode_linear.LINEAR, "layers") if whole else NOTHING


def _writers(rows: pd.DataFrame, row: pd.Series) -> Estimate:
    return writers.recovered(rows, row["unit"], row["position"]) if row["condition"] == "output" else NOTHING


OURS: dict[str, Callable[[pd.DataFrame, pd.Series], Estimate]] = {
    "removal": _removal,
    "removal-mmlu": _removal,
    "transplant": _transplant,
    "query-key": _query_key,
    "state": lambda rows, row: state.redirected(rows, row["unit"], row["condition"]),
    "encode": lambda rows, row: encode.carried(rows, row["unit"], row["condition"]),
    "encode-linear": _encode_linear,
    "upstream": lambda rows, row: upstream.redirected(select(rows, block=row["unit"]), row["condition"].removeprefix("without ")),
    "pruning": _pruning,
    "scaling": _scaling,
    "writers": _writers,
}  # fmt: skip


def _head(name: str) -> tuple[int, int]:
    layer, _, head = name.removeprefix("L").partition("H")
    return (int(layer), int(head)) if layer and head else (-1, -1)


# -- beside the published ones ------------------------------------------------------------------------------------------
def numbers(own: Sequence[Source]) -> Iterator[dict[str, Any]]:
    table = published()
    table = table[table["model"] == (matched(own[0].model, table["model"].unique()) or "no model")]
    cut: dict[tuple[int, str], pd.DataFrame] = {}
    for _, row in table[table["experiment"].isin(OURS)].iterrows():
        # An experiment's own run first; then `find`, which has several experiments' rows; then those that share rows.
        for source in sorted(own, key=lambda s: (s.experiment != row["experiment"], s.experiment != "find")):
            names = {row["experiment"], "baseline"} if row["experiment"] == "removal" else {row["experiment"]}
            if not names & set(source.rows.get("experiment", ())):
                continue
            place = id(source), row["variant"] + row["experiment"] * (row["variant"] == "mean")
            if place not in cut:
                cut[place] = _of_variant(source.rows, row)
            ours = OURS[row["experiment"]](cut[place], row) if len(cut[place]) else NOTHING
            if ours.n:
                yield {**{name: row[name] for name in (*FACTORS, "source", "spec_section", "note")}, "setting": setting(source), **beside(ours, row)}  # fmt: skip
                break


def _of_variant(rows: pd.DataFrame, row: pd.Series) -> pd.DataFrame:
    """The rows of a variant; for a mean over variants those of all of them, as one, if they are all there."""
    if row["variant"] != "mean" or "variant" not in rows:
        return select(rows, variant=row["variant"])
    names = MEAN_OF.get(row["experiment"], ())
    some = rows[rows["variant"].isin(names)]
    some = some if set(some["variant"]) == set(names) else some.iloc[:0]
    return some.assign(pair=some["variant"].astype(str) + ":" + some["pair"].astype(str), variant="mean")


def beside(ours: Estimate, row: pd.Series) -> dict[str, Any]:
    """Ours, the published value of a row, their difference with its interval, and what that says."""
    value, out = float(row["value"]), {"ours": ours.value, "low": ours.low, "high": ours.high, "n": ours.n}
    out |= {"relation": row["relation"], "published": value, "published_n": row["n"]}
    if row["relation"] in ("<=", ">="):
        beyond = ours.low > value if row["relation"] == "<=" else ours.high < value
        return {**out, "result": f"a bound: {'beyond it' if beyond else 'not beyond it'}"}
    out["difference"] = ours.value - value
    if row["relation"] == "~":
        return {**out, "result": "printed as about: no test"}
    share = row["measure"] in SHARES
    if share and row["n"] > 0:
        other = wilson(round(value * row["n"]), int(row["n"]))
        low, high = min(other.low, value), max(other.high, value)
    elif not share and row["sem"] > 0:
        low, high = value - 1.96 * row["sem"], value + 1.96 * row["sem"]
    else:
        return {**out, "result": "n unknown: no test" if share else "no spread published: no test"}
    below = out["difference"] - math.hypot(ours.value - ours.low, high - value)
    above = out["difference"] + math.hypot(ours.high - ours.value, value - low)
    result = INCLUDES if below <= 0 <= above else EXCLUDES
    return {**out, "difference_low": below, "difference_high": above, "result": result}
