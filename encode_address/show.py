"""One screen about a results folder, from its files alone: no model is loaded, torch is not needed.

Whatever a file or a table lacks is left out of the screen: tables of other experiments, and of versions to come,
are shown as far as they go.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from encode_address.errors import StoreError
from encode_address.run.store import FINISHED, PARTS, read, refuse_other_version
from encode_address.verdict import sentence

HOW = ("dtype", "attn_implementation", "device", "where")
FACTS = ("model", "revision", "fingerprint", *HOW, "text_source", "versions")
COUNTED = ("experiment", "variant", "intervention")
FLUSH = 15  # where the text of a labelled line starts


def show(folder: str | Path) -> Iterator[str]:
    """A screen for each folder of results: `folder` itself, a model's, and those of its experiments, below.

    Raises StoreError if there is none, or a file of it cannot be read.
    """
    folder = Path(folder)
    places = [folder, *folder.glob("[!.]*"), *folder.glob("[!.]*/[!.]*")] if folder.is_dir() else []
    found = sorted(path for path in places if _has_results(path))
    if not found:
        raise StoreError(f"no results in {folder}: give the results folder of a model, or the folder that holds it")
    yield from map(screen, found)


def screen(folder: Path) -> str:
    """What was run with which model, how far it is, what it cost, and the verdict."""
    manifest, verdict = _json(folder / "manifest.json"), _json(folder / "verdict.json")
    parts = sorted((folder / PARTS).glob("*.parquet"), key=lambda part: part.stat().st_mtime_ns)
    finished = (folder / "cells.parquet").exists()
    rows = _rows([folder / "cells.parquet"] if finished else parts)
    stored = sum(read(part, ["key"]).num_rows for part in parts) if finished else len(rows)
    facts = {name: _distinct(rows[name]) for name in FACTS if name in rows} | manifest
    blocks = [
        [str(folder), *_facts(facts)],
        _counts(rows),
        _cost(manifest.get("this_run") or {}) + _labelled("path gap", _said(manifest.get("path_gap"))),
        _progress(folder, len(rows) if finished else None, stored),
        [f"  {verdict.get('sentence') or sentence(verdict)}"] if {"status", "sentence"} & {*verdict} else [],
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _facts(facts: dict[str, Any]) -> list[str]:
    model = ", ".join(_said(facts[name]) for name in ("model", *HOW) if facts.get(name))
    return [
        *_labelled("model", model),
        *_labelled("revision", _said(facts.get("revision"))),
        *_labelled("fingerprint", _said(facts.get("fingerprint"))),
        *_labelled("command", _said(facts.get("command"))),
        *_labelled("text", "" if facts.get("command") else _said(facts.get("text_source"))),
        *_labelled("versions", _said(facts.get("versions"))),
        *_labelled("git", _said(facts.get("git"))),
    ]


def _counts(rows: pd.DataFrame) -> list[str]:
    """Rows by experiment (a line each) and variant (a column each), and the interventions in them."""
    if not len(rows):
        return []
    rows = rows.reindex(columns=list(COUNTED)).fillna("-").replace("", "-")
    variants = list(dict.fromkeys(rows["variant"]))
    lines = [["experiment", *variants, "all", "interventions"]]
    for experiment, group in rows.groupby("experiment", sort=False):
        counts = [int((group["variant"] == variant).sum()) for variant in variants]
        numbers = [f"{count:,}" if count else "" for count in (*counts, len(group))]
        lines.append([experiment, *numbers, ", ".join(dict.fromkeys(group["intervention"]))])
    lines.append(["all", *(f"{(rows['variant'] == v).sum():,}" for v in variants), f"{len(rows):,}", ""])
    return _aligned(lines)


def _cost(run: dict[str, Any]) -> list[str]:
    """What the last run took; what it did not have to compute again is not in it."""

    def there(**formats: str) -> list[str]:
        return [form.format(run[name]) for name, form in formats.items() if run.get(name) is not None]

    tokens = there(tokens_forwarded="{:,} forwarded", floor="floor {:,}", tokens_planned="{:,} planned")
    if run.get("tokens_forwarded") and run.get("floor"):
        tokens.append(f"{run['tokens_forwarded'] / run['floor']:.2f} x the floor")
    how = there(seconds="{:.1f} s", traces="{:,} traces", threads="threads {}", batch_tokens="batches of {:,} tokens")
    how += there(peak_rss_mb="peak {:,} MB")
    stages = [f"{name} {seconds:.1f} s" for name, seconds in (run.get("stages") or {}).items()]
    return [
        *_labelled("last run", ", ".join(how)),
        *_labelled("tokens", ", ".join(tokens)),
        *_labelled("stages", ", ".join(stages)),
    ]


def _progress(folder: Path, finished: int | None, stored: int) -> list[str]:
    """What is stored beyond the table, and what becomes of it."""
    try:
        refuse_other_version(folder)
    except StoreError as error:
        return [f"  {error}"]
    if finished is None and (folder / PARTS).is_dir():
        return [f"  unfinished: {_count(stored)} stored; the same command continues"]
    if finished is not None and stored > finished:
        more = f"{_count(stored)} stored, {stored - finished:,} more than the table has"
        return [f"  {more}: of other options, or of an unfinished run, which the same command continues"]
    return []


def _count(rows: int) -> str:
    return "1 row is" if rows == 1 else f"{rows:,} rows are"


def _has_results(folder: Path) -> bool:
    return folder.is_dir() and ((folder / PARTS).is_dir() or any((folder / name).is_file() for name in FINISHED))


def _rows(paths: Sequence[Path]) -> pd.DataFrame:
    """The few columns that the screen needs, of all rows."""
    tables = [read(path, ["key", *COUNTED, *FACTS]) for path in paths]
    return pa.concat_tables(tables, promote_options="permissive").to_pandas() if tables else pd.DataFrame()


def _json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty if there is no file."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise StoreError(f"{path} cannot be read; run again: {error}") from error
    if not isinstance(content, dict):
        raise StoreError(f"{path} holds no object; run again")
    return content


def _distinct(column: pd.Series) -> str:
    return " or ".join(str(value) for value in column.dropna().unique() if value != "")


def _said(value: Any) -> str:
    """A value in words, whatever its shape."""
    if isinstance(value, dict):
        pairs = ((name, _said(content)) for name, content in value.items())
        return ", ".join(f"{name} {content}" for name, content in pairs if content)
    if isinstance(value, (list, tuple)):
        return "/".join(map(_said, value))
    if value is None or value == "":
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _labelled(label: str, text: str) -> list[str]:
    return [f"  {label:<{FLUSH - 2}}{text}"] if text else []


def _aligned(lines: list[list[str]]) -> list[str]:
    """Columns: the first and the last flush left, numbers flush right."""
    widths = [max(map(len, column)) for column in zip(*lines)]
    return [
        "  ".join([f"  {first:<{widths[0]}}", *(f"{n:>{w}}" for n, w in zip(numbers, widths[1:])), last]).rstrip()
        for first, *numbers, last in lines
    ]
