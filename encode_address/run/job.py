"""A job: cells of one model run into one store, stage by stage, with a progress bar and an account of what it took."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import pandas as pd
from tqdm import tqdm

from encode_address.run.cells import Cell, context_of
from encode_address.run.engine import Engine, own_threads, threads
from encode_address.run.memory import peak_bytes
from encode_address.run.reading import Reading
from encode_address.run.store import Store
from encode_address.tasks.text import Text

JOBS = "jobs.json"  # in a store's parts: the ids of jobs on a server


class Job:
    """Runs the cells of one model into one store, and remembers the tables."""

    def __init__(self, model: Any, text: Text | None, store: Store | None, batch_tokens: int | None = None) -> None:
        self.model, self.source, self.store = model, text, store
        if store is not None and model.remote:
            model.where.notes = store.parts / JOBS
        self.engine = Engine(model, text, batch_tokens)
        self.tables: list[pd.DataFrame] = []
        self.seconds: dict[str, float] = {}

    def run(self, what: str, work: Sequence[Cell] | Reading) -> pd.DataFrame:
        """Run cells under a progress bar (on a terminal only), or a reading; the rows join the table."""
        started = time.monotonic()
        if isinstance(work, Reading):
            rows = self._read(work)
        else:
            with progress(f"{self.model.name} {what}", work) as bar:
                self.engine.on_rows = bar.update
                if self.model.remote:
                    self.model.where.told = bar.set_postfix_str
                rows = self.engine.run(work, self.store)
        self.tables.append(rows)
        self.seconds[what] = self.seconds.get(what, 0.0) + time.monotonic() - started
        return rows

    def _read(self, reading: Reading) -> pd.DataFrame:
        """The rows of a reading; those in the store are not read again."""
        context = context_of(self.engine.facts())
        if self.store and (keys := reading.done(context, self.store.keys())):
            return self.store.table(keys)
        with own_threads(self.model):
            rows = reading.rows(self.engine, context)
        self.engine.foresee(reading.tokens)
        if self.store:
            self.store.append(rows)
            return self.store.table([row["key"] for row in rows])
        return pd.DataFrame(rows)

    def table(self) -> pd.DataFrame:
        """All rows so far."""
        empty = pd.DataFrame(columns=["key", "variant", "split", "pair"])
        return pd.concat(self.tables, ignore_index=True) if self.tables else empty

    def account(self) -> dict[str, Any]:
        """What this run took: wall time per stage, tokens against their floor, threads, memory."""
        engine = self.engine
        return {
            "stages": {stage: round(seconds, 2) for stage, seconds in self.seconds.items()},
            "threads": threads(self.model),
            "batch_tokens": engine.limits.tokens,
            "tokens_forwarded": engine.tokens,
            "tokens_planned": engine.planned,
            "floor": engine.floor,
            "traces": engine.traces,
            "peak_rss_mb": round(peak_bytes() / 1e6),
            **({name: getattr(self.model.where, name) for name in ("jobs", "up", "down")} if self.model.remote else {}),
        }


def progress(what: str, cells: Sequence[Cell]) -> tqdm:
    """A bar over cells that is seen on a terminal only and leaves nothing behind."""
    return tqdm(total=len(cells), desc=what, unit="cell", leave=False, disable=not sys.stderr.isatty())
