"""What `find` and all experiments have measured of a model, in one table: for figures that need several of them.

A pair has its number within one draw of pairs only (pair 3 of 60 is not pair 3 of 100), so every row carries its draw in the
column `drawn`, and a figure takes what it compares from one draw.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from encode_address import figures, metrics
from encode_address.errors import EncodeAddressError

Tables, Verdicts = dict[str, pd.DataFrame], dict[str, "dict[str, Any] | None"]


def gathered(folder: Path) -> tuple[pd.DataFrame, dict[str, Any] | None]:
    """The rows that figures show of a model's folder and of the experiments' beneath it, `find`'s first; and `find`'s verdict.

    A row that several of them hold is there once per draw. What another model did by itself (`transfer` keeps what the donor answers) is
    left out. Raises EncodeAddressError where there is no table, or one cannot be read.
    """
    folder = Path(folder)
    folders = [one for one in (folder, *sorted(folder.glob("*/"))) if (one / "cells.parquet").is_file()]
    if not folders:
        raise EncodeAddressError(
            f"no cells.parquet in {folder} or right beneath it: give the results folder of a model"
        )
    tables, verdict = [], None
    for one in folders:
        table, said = figures.read(one)
        tables.append(figures.shown(_of_model(table, said)).assign(split="confirmation", drawn=_drawn(one)))
        verdict = said if one == folder else verdict
    table = pd.concat([some.dropna(axis=1, how="all") for some in tables], ignore_index=True)
    return (table.drop_duplicates(["key", "drawn"], ignore_index=True) if "key" in table else table), verdict


def gathered_models(folder: Path) -> tuple[Tables, Verdicts]:
    """`gathered` of every model beneath a folder, by model name. Raises EncodeAddressError where there is none."""
    tables: Tables = {}
    verdicts: Verdicts = {}
    for name, one in model_folders(folder).items():
        tables[name], verdicts[name] = gathered(one)
    return tables, verdicts


def model_folders(folder: Path) -> dict[str, Path]:
    """The folder of every model beneath a folder, by model name. Raises EncodeAddressError where there is none."""
    found = {}
    for one in sorted(Path(folder).glob("*/")):
        for table in (one / "cells.parquet", *sorted(one.glob("*/cells.parquet"))):
            if table.is_file():
                rows = _of_model(*figures.read(table.parent))
                found[str(rows["model"].iloc[0]) if "model" in rows and len(rows) else one.name] = one
                break
    if not found:
        raise EncodeAddressError(
            f"no model's results beneath {folder}: give the folder that holds one folder per model"
        )
    return found


def of_one_draw(rows: pd.DataFrame, *needed: Mapping[str, Any]) -> pd.DataFrame:
    """The rows of the first draw of pairs that has rows of each of `needed` (factors, see `metrics.select`); else none."""
    draws = rows.groupby("drawn", sort=False) if "drawn" in rows else [("", rows)]
    for _, some in draws:
        if all(len(metrics.select(some, **factors)) for factors in needed):
            return some
    return rows.iloc[:0]


def once(rows: pd.DataFrame, head: tuple[int, int] | None = None) -> pd.DataFrame:
    """One row per pair and form, where two experiments ran the same cell: one that watched `head`, if there is one."""
    column = f"attn.L{head[0]}H{head[1]}" if head else ""
    if column in rows:
        rows = rows.sort_values(column, key=lambda masses: masses.isna(), kind="stable")
    return rows.drop_duplicates([column for column in ("pair", "form") if column in rows])


def short(address: list[str]) -> str:
    """The Address as a label says it: a union of many blocks has no room there."""
    return "+".join(address) if len(address) <= 2 else "Address"


def _of_model(rows: pd.DataFrame, verdict: dict[str, Any] | None) -> pd.DataFrame:
    """The rows of the model that the verdict is about; all, where it names none."""
    name = (verdict or {}).get("model")
    return rows[rows["model"] == name] if name and "model" in rows else rows


def _drawn(folder: Path) -> str:
    """Which pairs a folder's rows are of: how many, the seed, the pool. Without a manifest, they are the folder's own."""
    manifest = folder / "manifest.json"
    if not manifest.is_file():
        return folder.name
    try:
        command = json.loads(manifest.read_text())["command"]
        return ", ".join(f"{name} {command[name]}" for name in ("n", "seed", "pool", "donor") if name in command)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EncodeAddressError(f"{manifest} cannot be read ({error}): run again to rebuild it") from error
