"""Where rows live: one part file per finished batch, and one table rebuilt from them.

`DIR/.parts/*.parquet` are written to a temporary name and renamed, so a kill at any moment leaves whole parts
only, and loses at most the batch in flight. `cells.parquet` is rebuilt the same way. A lock on `DIR/.lock`
(flock: it dies with its process) keeps a second process out. `DIR/.parts/written-by.json` names the version of
this package that wrote the parts; no other version adds to them or reads them.

In memory is which part holds which key, never the rows.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from encode_address.errors import StoreError

PARTS, WRITTEN_BY = ".parts", "written-by.json"
FINISHED = ("cells.parquet", "summary.csv", "verdict.json", "manifest.json")  # what a finished run writes


class Store:
    """The rows of one output folder. Use as a context manager: it holds the folder's lock.

    `fresh` forgets the rows and the finished files of earlier runs, and nothing else in the folder. Entering
    raises StoreError, before anything is changed, if another run has the lock or another version wrote the rows.
    """

    def __init__(self, folder: str | Path, fresh: bool = False) -> None:
        self.folder, self.fresh = Path(folder), fresh
        self.parts = self.folder / PARTS
        self._lock = contextlib.ExitStack()
        self._places: dict[str, Path] | None = None  # key -> the part that holds its row

    def __enter__(self) -> Store:
        with contextlib.ExitStack() as entered:
            entered.enter_context(locked(self.folder))
            self._claim()
            self._lock = entered.pop_all()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._lock.close()

    def keys(self) -> set[str]:
        """Keys of the rows that are here."""
        return set(self._where())

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        """Add rows (each with its `key`) as one part, written whole or not at all."""
        places, part = self._where(), self.parts / f"{uuid.uuid4().hex}.parquet"
        if not places:  # before the first part, so that no kill leaves parts that nobody signed
            write_text(self.parts / WRITTEN_BY, json.dumps({"encode_address": _version()}) + "\n")
        self._write(part, pa.Table.from_pandas(pd.DataFrame(rows)))
        places.update(dict.fromkeys((row["key"] for row in rows), part))

    def table(self, keys: Sequence[str]) -> pd.DataFrame:
        """The rows with these keys, in this order. Raises StoreError if one is missing."""
        places = self._where()
        missing = [key for key in keys if key not in places]
        if missing:
            raise StoreError(f"{self.folder} lacks {len(missing)} rows that should be there")
        wanted, rows = set(keys), {}
        for part in dict.fromkeys(places[key] for key in keys):
            rows.update({row["key"]: row for row in read(part).to_pylist() if row["key"] in wanted})
        return pd.DataFrame([rows[key] for key in keys])

    def finish(self, table: pd.DataFrame, **files: dict[str, Any] | str) -> None:
        """Write `cells.parquet`, and each of `files` (name with `__` for the dot) as JSON or text."""
        self._write(self.folder / "cells.parquet", pa.Table.from_pandas(table, preserve_index=False))
        for name, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content, indent=1, default=str) + "\n"
            write_text(self.folder / name.replace("__", "."), text)

    def _claim(self) -> None:
        """Under the lock: see to it that what is in the folder is ours."""
        self._places = None
        try:
            if self.fresh:
                self._forget()
            refuse_other_version(self.folder)
            self.parts.mkdir(exist_ok=True)
            for temporary in (*self.folder.glob(".*.tmp"), *self.parts.glob(".*.tmp")):
                temporary.unlink(missing_ok=True)  # what a killed run was writing; the lock says that none writes now
        except OSError as error:
            raise StoreError(f"cannot write to {self.folder}: {error.strerror}") from error

    def _forget(self) -> None:
        """Delete what earlier runs wrote. Who wrote the parts goes last: a kill on the way leaves a store."""
        for name in FINISHED:
            (self.folder / name).unlink(missing_ok=True)
        for part in self.parts.glob("*.parquet"):
            part.unlink(missing_ok=True)
        if self.parts.exists():
            shutil.rmtree(self.parts)

    def _where(self) -> dict[str, Path]:
        if self._places is None:
            self._places = _places(self.parts)
        return self._places

    def _write(self, path: Path, table: pa.Table) -> None:
        write_whole(path, lambda temporary: pq.write_table(table, temporary))


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which is made where there is none. It dies with its process.

    Raises StoreError if another run has it, or the folder cannot be written to.
    """
    with contextlib.ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = held.enter_context(open(folder / ".lock", "w"))
        except OSError as error:
            raise StoreError(f"cannot write to {folder}: {error.strerror}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StoreError(f"{folder} is in use by another run: wait for it, or choose another --out") from error
        yield


def stored_keys(folder: str | Path) -> set[str]:
    """The keys that a later run in `folder` would reuse. Takes no lock and creates nothing."""
    return set(_places(Path(folder) / PARTS)) if written_by(folder) == _version() else set()


def written_by(folder: str | Path) -> str | None:
    """The version that wrote the rows in `folder`; "" if it cannot be told, None if there are no rows."""
    parts = Path(folder) / PARTS
    try:
        return str(json.loads((parts / WRITTEN_BY).read_text())["encode_address"])
    except (FileNotFoundError, NotADirectoryError):
        return "" if any(parts.glob("*.parquet")) else None
    except (ValueError, KeyError, TypeError):
        return ""


def refuse_other_version(folder: Path) -> None:
    """Raise StoreError if the rows in `folder` are not of this version."""
    wrote, ours = written_by(folder), _version()
    if wrote not in (None, ours):
        raise StoreError(
            f"{folder} holds rows of {f'encode_address {wrote}' if wrote else 'an unknown version of encode_address'}, "
            f"and this is {ours}: start over with --fresh, or choose another --out"
        )


def read(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """A parquet file, or those of `columns` that it has. Raises StoreError."""
    try:
        with pq.ParquetFile(path) as file:  # half the time of pq.read_table for a small file
            return file.read(columns=columns)
    except (OSError, pa.ArrowException) as error:
        raise StoreError(f"{path} cannot be read; delete it and run again: {error}") from error


def _places(parts: Path) -> dict[str, Path]:
    places: dict[str, Path] = {}
    for path in sorted(parts.glob("*.parquet")):
        table = read(path, ["key"])
        if not table.column_names:
            raise StoreError(f"{path} has no keys, so no run wrote it; delete it and run again")
        places.update(dict.fromkeys(table.column("key").to_pylist(), path))
    return places


def _version() -> str:
    from encode_address import __version__  # not at the top: the package imports this module

    return __version__


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
