"""Where rows live: one part file per finished batch, and one table rebuilt from them.

`DIR/.parts/*.parquet` are written to a temporary name and renamed, so a kill at any moment leaves whole parts
only, and loses at most the batch in flight. `cells.parquet` is rebuilt the same way. A lock on `DIR/.lock`
(flock: it dies with its process) keeps a second process out.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from encode_address.errors import StoreError


class Store:
    """The rows of one output folder. Use as a context manager: it holds the folder's lock."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.parts = self.folder / ".parts"
        self._lock: Any = None
        self._rows: dict[str, dict[str, Any]] | None = None

    def __enter__(self) -> Store:
        try:
            self.parts.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.folder / ".lock", "w")
        except OSError as error:
            raise StoreError(f"cannot write to {self.folder}: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise StoreError(f"{self.folder} is in use by another run: wait for it, or choose another --out") from error
        for temporary in (*self.folder.glob(".*.tmp"), *self.parts.glob(".*.tmp")):
            temporary.unlink(missing_ok=True)  # what a killed run was writing; the lock says that none writes now
        return self

    def __exit__(self, *exc: Any) -> None:
        self._lock.close()

    def keys(self) -> set[str]:
        """Keys of the rows that are here."""
        return set(self._load())

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        """Add rows (each with its `key`) as one part, written whole or not at all."""
        part = pa.Table.from_pandas(pd.DataFrame(rows))
        self._write(self.parts / f"{uuid.uuid4().hex}.parquet", part)
        self._load().update({row["key"]: row for row in part.to_pylist()})

    def table(self, keys: Sequence[str]) -> pd.DataFrame:
        """The rows with these keys, in this order. Raises StoreError if one is missing."""
        rows = self._load()
        missing = [key for key in keys if key not in rows]
        if missing:
            raise StoreError(f"{self.folder} lacks {len(missing)} rows that should be there")
        return pd.DataFrame([rows[key] for key in keys])

    def finish(self, table: pd.DataFrame, **files: dict[str, Any] | str) -> None:
        """Write `cells.parquet`, and each of `files` (name with `__` for the dot) as JSON or text."""
        self._write(self.folder / "cells.parquet", pa.Table.from_pandas(table, preserve_index=False))
        for name, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content, indent=1, default=str) + "\n"
            write_text(self.folder / name.replace("__", "."), text)

    def _load(self) -> dict[str, dict[str, Any]]:
        if self._rows is None:
            self._rows = {}
            for path in sorted(self.parts.glob("*.parquet")):
                try:
                    rows = pq.read_table(path).to_pylist()
                except (OSError, pa.ArrowException) as error:
                    raise StoreError(f"{path} cannot be read; delete it and run again: {error}") from error
                self._rows.update({row["key"]: row for row in rows})
        return self._rows

    def _write(self, path: Path, table: pa.Table) -> None:
        write_whole(path, lambda temporary: pq.write_table(table, temporary))


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all. Raises StoreError."""
    write_whole(path, lambda temporary: temporary.write_text(text))


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` fill a temporary file, and rename it; whatever happens, Ctrl-C included, no temporary file is left.

    Raises StoreError.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        os.replace(temporary, path)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror or error}; what was finished is kept") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
