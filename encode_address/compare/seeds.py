"""How far rates are apart over seeds of the dictionaries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from encode_address import metrics
from encode_address.compare.results import Source
from encode_address.errors import EncodeAddressError


def between_seeds(found: Sequence[Source], k: int) -> list[dict[str, Any]]:
    """Of every rate that k seeds have: mean and standard deviation over seeds, and what drawing pairs alone would give."""
    if k < 2:
        raise EncodeAddressError("a spread needs two seeds or more: --seeds 2")
    columns = {"accuracy": "correct", "choice_accuracy": "choice_correct", **{name: name for name in ("redirected", "kept", "carried")}}  # fmt: skip
    out, few = [], []
    found = [
        source for source in found if "donor" not in source.verdict
    ]  # of two models: what seeds are, its own table says
    for model, name in dict.fromkeys((source.model, source.experiment) for source in found):
        rows = [s.rows for s in found if (s.model, s.experiment) == (model, name) and "dictionary_seed" in s.rows]
        table = pd.concat(rows, ignore_index=True).drop_duplicates("key") if rows else pd.DataFrame()
        seeds = sorted(table["dictionary_seed"].dropna().unique()) if len(table) else []
        if len(seeds) < k:
            few.append((model, name, seeds))
            continue
        factors = [f for f in metrics.FACTORS if f in table and f != "split"]
        table = table.assign(**{f: table[f].astype(object).fillna("").astype(str) for f in factors})
        for measure, column in columns.items():
            if column not in table:
                continue
            some = table[table[column].notna()].assign(value=lambda t, c=column: t[c].astype(float))
            each = some.groupby([*factors, "dictionary_seed"], sort=False).agg(value=("value", "mean"), n=("pair", "nunique")).reset_index()  # fmt: skip
            for setting, group in each.groupby(factors, sort=False):
                if len(group) >= k:
                    out.append({"model": model, "measure": measure, **_spread(dict(zip(factors, setting)), group)})
    if not out:
        nothing = (found[0].model, found[0].experiment, []) if found else ("M", "find", [])
        model, name, seeds = max(few, key=lambda one: len(one[2]), default=nothing)
        job = f"find --model {model}" if name == "find" else f"run {name} --model {model}"
        new = next(seed for seed in range(k + len(seeds)) if seed not in seeds)
        raise EncodeAddressError(
            f"--seeds {k} needs rows of {k} seeds and {model} has {len(seeds)} ({', '.join(f'{s:g}' for s in seeds) or 'none'}): run `encode-address {job} "
            f"--seed {new} --out results-seed{new}`, and name results-seed{new} after the first folder"
        )
    return out


def _spread(setting: dict[str, str], group: pd.DataFrame) -> dict[str, Any]:
    value, pairs = group["value"], int(group["n"].min())
    chance = math.sqrt((value * (1 - value) / group["n"]).mean())
    own = {"experiment": setting.pop("experiment"), "variant": setting.pop("variant", ""), "unit": setting.pop("block", "") or "intact", "position": setting.pop("position", ""), "reader": setting.pop("reader", "")}  # fmt: skip
    how = ", ".join(v for name, v in setting.items() if v and name not in ("layers", "path"))
    seeds = ", ".join(f"{seed:g}" for seed in group["dictionary_seed"])
    note = f"seeds {seeds}; lowest {value.min():.3f}, highest {value.max():.3f}; drawing pairs alone gives an sd of up to {chance:.3f}"
    return {**own, "condition": how, "ours": value.mean(), "sd": value.std(ddof=1), "n": pairs, "note": note}
