"""Metrics over rows of a result table, and its summary. Pure pandas: knows columns, no models."""

from __future__ import annotations

import math
import re

import pandas as pd

from encode_address.stats import Estimate, estimate, per_pair

FACTORS = [
    "experiment", "variant", "split", "intervention", "mode", "block", "layers", "position", "donor", "swap",
    "reader", "path", "without", "ablation", "query_from", "key_from", "arm", "site", "unit",
    "kept_set", "kept_layers", "removal", "cut", "role", "source", "mark", "part", "layer", "head",
    "phase", "k", "by", "size", "prefill", "generation", "renorm", "span", "linear", "twice", "reach", "boundary",
]  # fmt: skip
ATTENDED = ["target", "host_index", "donor_index"]  # columns that name an entry of the dictionary
MEASURES = [
    "accuracy", "choice_accuracy", "gap", "redirected", "kept", "carried", "host_value_of_key_A",
    "host_value_at_index_j", "donor_value", "host_answer_kept", "loss", "loss_without", "kl",
    "effective_rank", "numerical_rank", "significant_rank", "top_share", "map_r2",
    "restored", "floor_correct", "shuffled_correct", "log_decay", "entry_r2", "exit_r2",
    "right", "recall", "choice_right", "log_prob", "sharpness", "mass", "retrieval", "jaccard", "overlap_chance",
    "contains", "word_recall",
]  # fmt: skip


def select(rows: pd.DataFrame, **factors: object) -> pd.DataFrame:
    """The rows whose columns have these values; a missing column selects nothing."""
    for column, value in factors.items():
        rows = rows[rows[column] == value] if column in rows else rows.iloc[:0]
    return rows


def heads(rows: pd.DataFrame) -> list[tuple[int, int]]:
    """The heads (layer, head) whose attention some of these rows hold."""
    found = (re.fullmatch(r"attn\.L(\d+)H(\d+)", column) for column in rows.columns)
    return sorted((int(m[1]), int(m[2])) for m in found if m and rows[m[0]].notna().any())


def attention(rows: pd.DataFrame, head: tuple[int, int], index: str) -> pd.Series:
    """Attention mass of a head on the entry that column `index` names ("host_index", "donor_index", "target").

    Rows that did not watch this head give NaN.
    """
    column = f"attn.L{head[0]}H{head[1]}"
    values = [
        float(masses[int(entry)]) if hasattr(masses, "__len__") else float("nan")
        for masses, entry in zip(rows[column], rows[index])
    ]
    return pd.Series(values, index=rows.index)


def accuracy(rows: pd.DataFrame) -> Estimate:
    """Full-vocabulary accuracy over both forms of each pair (paper section 4)."""
    return estimate(rows["correct"], rows["pair"])


def gap(rows: pd.DataFrame) -> pd.Series:
    """Logit gap per pair: D(clean) - D(corrupted), the sum of both forms' own-minus-other margins (paper section 4)."""
    return 2 * per_pair(rows, "margin")


def perplexity(loss: pd.Series) -> float:
    """exp of the mean loss per token; chunks are equally long."""
    return math.exp(loss.mean())


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Every rate and mean of a table with its interval and n, in long form: one row per setting and measure."""
    factors = [column for column in FACTORS if column in table]
    filled = table.assign(**{column: table[column].fillna("") for column in factors})
    out = []
    for setting, rows in filled.groupby(factors, sort=False):
        for measure in MEASURES:
            value = _measure(rows, measure)
            if value is not None and value.n:
                out.append({**dict(zip(factors, setting)), "measure": measure, **value.as_dict()})
        for head in heads(rows):
            for index in ATTENDED:
                known = rows[rows[index].notna()] if index in rows else rows.iloc[:0]
                if len(known):
                    value = estimate(attention(known, head, index), known["pair"])
                    name = f"attention of L{head[0]}H{head[1]} on {index.removesuffix('_index')}"
                    out.append({**dict(zip(factors, setting)), "measure": name, **value.as_dict()})
    return pd.DataFrame(out)


def _measure(rows: pd.DataFrame, measure: str) -> Estimate | None:
    if measure in ("accuracy", "gap", "choice_accuracy") and ("correct" not in rows or rows["correct"].isna().all()):
        return None
    if measure == "accuracy":
        return accuracy(rows)
    if measure == "choice_accuracy":
        return estimate(rows["choice_correct"], rows["pair"])
    if measure == "gap":
        gaps = gap(rows)
        return estimate(gaps, pd.Series(gaps.index, index=gaps.index))
    return estimate(rows[measure], rows["pair"]) if measure in rows else None
