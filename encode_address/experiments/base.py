"""What the experiments share: the setting they run in, the cell of a clean/corrupted pair, what a conclusion is."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from encode_address.models.layout import Layout
from encode_address.run.cells import Cell
from encode_address.run.job import Job
from encode_address.stats import estimate
from encode_address.tasks import Dictionary, Swap
from encode_address.tasks.text import Text

Heads = Sequence[tuple[int, int]]


def swap_cell(intervention: str, swap: Swap, form: str, labels: Mapping[str, Any], **kwargs: Any) -> Cell:
    """One form ("clean" or "corrupted") of a value-swap pair under an intervention."""
    host, other = (swap.clean, swap.corrupted) if form == "clean" else (swap.corrupted, swap.clean)
    kwargs["watch"] = tuple(kwargs.get("watch", ()))
    return Cell(
        intervention,
        host,
        outcomes=(("correct", host.answer), ("swapped", other.answer)),
        labels={"position": "all", **labels, "pair": swap.pair, "form": form, "target": swap.target},
        **kwargs,
    )


def run_cells(model: Any, cells: Sequence[Cell], text: Text | None = None) -> pd.DataFrame:
    """Run cells and return their table, with a progress bar on a terminal."""
    return Job(model, text, None).run("", cells)


@dataclass(frozen=True)
class Circuit:
    """What `find` says of one variant: names of blocks, and reader heads, each possibly none."""

    encode: tuple[str, ...] = ()
    address: tuple[str, ...] = ()
    readers: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, verdict: Mapping[str, Any]) -> Circuit:
        """From one variant's part of a verdict ("readers": ["L7H0"])."""
        heads = (re.fullmatch(r"L(\d+)H(\d+)", name) for name in verdict.get("readers") or ())
        readers = tuple((int(m[1]), int(m[2])) for m in heads if m)
        return cls(tuple(verdict.get("encode") or ()), tuple(verdict.get("address") or ()), readers)

    def as_dict(self) -> dict[str, list[str]]:
        """As a verdict says it."""
        readers = [f"L{layer}H{head}" for layer, head in self.readers]
        return {"encode": list(self.encode), "address": list(self.address), "readers": readers}


@dataclass(frozen=True)
class Setting:
    """One variant of an experiment on one model: what its cells are made from."""

    model: Any
    variant: str
    task: Dictionary
    n: int
    seed: int
    text: Text
    circuit: Circuit | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # those of this experiment alone, by name
    folder: Path | None = (
        None  # the model's folder of results, for what experiments share; None where nothing is written
    )

    @property
    def layout(self) -> Layout:
        return self.model.layout

    @property
    def labels(self) -> dict[str, Any]:
        """The columns that all its rows share."""
        task = self.task
        return {
            "variant": self.variant,
            "surface": task.surface or "restate",
            "pool": task.pool,
            "dictionary_seed": self.seed,
        }

    def within(self, circuit: Circuit | None) -> Setting:
        """The same with a circuit."""
        return replace(self, circuit=circuit)


@dataclass(frozen=True)
class Conclusion:
    """What the rows of one variant say: "holds", "does not hold" or "undecided", and why, with the figures."""

    status: str
    why: str
    figures: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.status} - {self.why}"

    def as_dict(self) -> dict[str, Any]:
        return {"status": self.status, "why": self.why, "figures": dict(self.figures)}


TASK_LOW = 0.8


def incapable(hosts: pd.DataFrame, column: str = "kept") -> Conclusion | None:
    """Undecided, if the unpatched hosts do not answer right often enough (lower bound .8); else None."""
    right = estimate(hosts[column], hosts["pair"])
    if right.low >= TASK_LOW:
        return None
    return Conclusion("undecided", f"the intact model answers {right} right: what it seems to do is no evidence")
