"""What tables are made from: the rows of one model, and the estimates that several tables share."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from encode_address import metrics
from encode_address.errors import EncodeAddressError
from encode_address.experiments.base import Circuit
from encode_address.metrics import select
from encode_address.models.layout import Layout
from encode_address.stats import Estimate, difference, estimate, per_pair

CELL = [*metrics.FACTORS, "seed", "draw", "last", "candidate"]  # with pair and form: one run of the model
ONCE = ["pair", "form"]
NEEDED = [*CELL, *ONCE, "prompt", "correct", "choice_correct", "margin", "redirected", "kept", "carried", "loss"]
INTACT = "intact"
CROSS = ("transfer", "replace", "replace-text")


@dataclass(frozen=True, eq=False)
class Results:
    """One model: its rows (of the confirmation split, `find`'s first), and the verdict of `find` ({} if it has not run).

    Pair 3 of 60 is not pair 3 of 100. Where rows are of several draws of pairs, column `drawn` names the draw of each (as in
    `figures.gathered`); a row that several draws share is there once for each.
    """

    name: str
    rows: pd.DataFrame
    verdict: Mapping[str, Any]

    @cached_property
    def table(self) -> pd.DataFrame:
        """The rows, for each setting those of the draw with most pairs, each run of the model once."""
        own = self.rows[~self.rows["experiment"].isin(CROSS)]  # what is of two models has tables of its own
        return _once(own.assign(**{column: None for column in NEEDED if column not in own}), self.name)

    @cached_property
    def layout(self) -> Layout | None:
        """The model's layers, as the verdict states them."""
        facts = self.verdict.get("layout")
        if not facts:
            return None
        linear = {layer for block in facts["blocks"] for layer in block["layers"]}
        layers = range(len(linear) + len(facts["softmax"]))
        return Layout.from_config(
            {"layer_types": ["linear_attention" if i in linear else "full_attention" for i in layers]}
        )

    @cached_property
    def blocks(self) -> tuple[str, ...]:
        """The blocks that the paper's tables have, those with a reader; then unions that are an Address."""
        if self.layout:
            single = [block.name for block in self.layout.tabled]
        else:
            single = [name for name in self.table["block"].dropna().unique() if re.fullmatch(r"G\d+", name)]
        addresses = ("+".join(self.circuit(variant).address) for variant in self.verdict.get("variants") or ())
        return tuple(in_order([*single, *(name for name in addresses if "+" in name)]))

    def of(self, variant: str | None, *experiments: str) -> pd.DataFrame:
        """The rows of these experiments and of a variant, or of none (texts); None: of all. Columns that they leave empty go,
        but for those that estimates ask for."""
        rows = self.table[self.table["experiment"].isin(experiments)]
        if variant is not None:
            rows = rows[(rows["variant"] == variant) | rows["variant"].isna()]
        return rows.drop(columns=[column for column in rows if column not in NEEDED and rows[column].isna().all()])

    def variants(self, *experiments: str) -> list[str]:
        """The variants that these experiments ran; MMLU with five solved questions stands instead of MMLU with none."""
        rows = self.table[self.table["experiment"].isin(experiments)]
        names = list(rows["variant"].dropna().unique())
        return [
            name for name in names if not (name.startswith("mmlu") and name.endswith("0") and f"{name[:-1]}5" in names)
        ]

    def circuit(self, variant: str = "") -> Circuit:
        """What `find` said of a variant; of one that it did not ask, what it said of all."""
        return Circuit.of((self.verdict.get("variants") or {}).get(variant) or self.verdict)


def in_order(names: Sequence[str]) -> list[str]:
    """Blocks by number, then unions, each once."""
    return sorted(set(names), key=lambda name: (name.count("+"), [int(part[1:]) for part in name.split("+")]))


def block_columns(models: Sequence[Results]) -> list[str]:
    """The blocks of all models."""
    return in_order([name for model in models for name in model.blocks])


def _once(rows: pd.DataFrame, name: str) -> pd.DataFrame:
    """Rows of the largest draw of each setting; runs that differ in the heads that were watched become one row with all."""
    known = rows[CELL].astype(object).where(rows[CELL].notna(), "")
    rows = rows.assign(_cell=known.groupby(CELL, sort=False).ngroup())
    if "drawn" in rows and len(rows):
        sizes = rows.groupby(["_cell", "drawn"], sort=False)["pair"].nunique().rename("size").reset_index()
        best = sizes.loc[sizes.groupby("_cell")["size"].idxmax(), ["_cell", "drawn"]]
        rows = rows.merge(best, on=["_cell", "drawn"])
    twins = rows.duplicated(["_cell", *ONCE], keep=False)
    runs = rows[twins].groupby(["_cell", *ONCE], sort=False, dropna=False)
    if (runs["prompt"].nunique() > 1).any():
        raise EncodeAddressError(
            f"{name}: rows of several draws have the same pair numbers: name the draw of each row in the column `drawn`"
        )
    merged = [rows[~twins], runs.first().reset_index()] if twins.any() else [rows]
    return pd.concat(merged, ignore_index=True).drop(columns="_cell")


# -- estimates that several tables share --------------------------------------------------------------------------------
def untouched(rows: pd.DataFrame, mmlu: bool = False) -> pd.DataFrame:
    """The intact model's rows on the task."""
    return select(rows, experiment="removal-mmlu" if mmlu else "baseline", intervention="none")


def removed(rows: pd.DataFrame, unit: str, mmlu: bool = False) -> pd.DataFrame:
    """The rows with a block's or layer's outputs at all positions set to zero."""
    experiment = "removal-mmlu" if mmlu else "removal"
    return select(rows, experiment=experiment, intervention="remove", mode="zero", position="all", block=unit)


def mean(rows: pd.DataFrame, column: str) -> Estimate:
    return estimate(rows[column], rows["pair"])


def gap(rows: pd.DataFrame) -> Estimate:
    """The mean logit gap."""
    gaps = metrics.gap(rows)
    return estimate(gaps, gaps.index.to_series())


def perplexity(rows: pd.DataFrame) -> Estimate:
    """exp of the mean loss per token, with an interval over chunks of text."""
    return mean(rows, "loss").exp()


def perplexity_ratio(text: pd.DataFrame, unit: str) -> Estimate:
    """How many times the intact perplexity that without a block is, from paired losses."""
    plain, changed = select(text, intervention="none"), select(text, intervention="remove", mode="zero", block=unit)
    return difference(per_pair(changed, "loss"), per_pair(plain, "loss"), unit=False).exp()
