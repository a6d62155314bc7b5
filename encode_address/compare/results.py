"""Finished runs, as folders hold them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from encode_address.errors import EncodeAddressError
from encode_address.run.store import read


@dataclass(frozen=True, eq=False)
class Source:
    """A finished run: its rows (of the confirmation split), the name of its experiment ("find"), and its model."""

    folder: Path
    model: str
    experiment: str
    rows: pd.DataFrame
    verdict: dict[str, Any] = field(default_factory=dict)


def sources(folder: str | Path) -> list[Source]:
    """The finished runs in a folder: a model's, an experiment's, or one that holds models'. Raises EncodeAddressError."""
    folder = Path(folder)
    places = [folder, *sorted(folder.glob("[!.]*")), *sorted(folder.glob("[!.]*/[!.]*"))] if folder.is_dir() else []
    found = [_source(place) for place in places if (place / "cells.parquet").is_file()]
    if not found:
        raise EncodeAddressError(
            f"no finished results in {folder}: give the folder that `encode-address find` or `run` wrote, or the one that holds it"
        )
    return found


def _source(folder: Path) -> Source:
    rows = read(folder / "cells.parquet").to_pandas()
    rows = rows[rows["split"].isna() | (rows["split"] == "confirmation")] if "split" in rows else rows
    if "dictionary_seed" in rows and rows["dictionary_seed"].nunique() > 1 and "pair" in rows:
        rows = rows.assign(pair=rows["dictionary_seed"].astype(str) + ":" + rows["pair"].astype(str))
    verdict, manifest = read_json(folder / "verdict.json"), read_json(folder / "manifest.json")
    named = verdict.get("model") or manifest.get("model")
    model = named or (str(rows["model"].iloc[0]) if "model" in rows and len(rows) else folder.name)
    return Source(folder, model, verdict.get("experiment", "find"), rows, verdict)


def read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise EncodeAddressError(f"{path} cannot be read; run again: {error}") from error


def setting(source: Source) -> str:
    """How our rows were made, where that may be why a number differs."""
    said = {name: source.rows[name].dropna().unique() for name in ("dtype", "pool", "dictionary_seed") if name in source.rows}  # fmt: skip
    words = [f"{name.replace('dictionary_', '')} {'/'.join(f'{v:g}' if isinstance(v, float) else str(v) for v in some)}" for name, some in said.items() if len(some)]  # fmt: skip
    return ", ".join([source.experiment, *words])
