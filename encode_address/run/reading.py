"""A reading: rows about what the unedited model holds (its states, its gates), where a cell is about an intervention."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from encode_address.run.plan import JOB_TOKENS
from encode_address.tasks.prompts import Prompt


@dataclass(frozen=True, eq=False)
class Reading:
    """`read(engine, prompts)` runs the model on `prompts`, counts what it forwards (`engine.count`), and returns rows.

    `labels` are columns of every row; with the name, the prompts and `settings` (whatever else the rows depend on)
    they tell one reading from another. `tokens` is what it takes, in whole forwards: by default each prompt once.
    Its rows are stored all at once or not at all.
    """

    name: str
    prompts: Sequence[Prompt]
    read: Callable[[Any, Sequence[Prompt]], list[dict[str, Any]]]
    labels: dict[str, Any] = field(default_factory=dict)
    settings: tuple = ()
    forwards: int = -1

    @property
    def tokens(self) -> int:
        return sum(map(len, self.prompts)) if self.forwards == -1 else self.forwards

    def key(self, context: str) -> str:
        """What the keys of its rows begin with."""
        what = (context, self.name, sorted(self.labels.items()), self.settings, [p.digest for p in self.prompts])
        return hashlib.sha256(repr(what).encode()).hexdigest()[:24]

    def done(self, context: str, keys: Collection[str]) -> list[str]:
        """Those of `keys` that are its rows', in their order."""
        own = self.key(context)
        return sorted((key for key in keys if key.startswith(f"{own}-")), key=lambda key: int(key.rpartition("-")[2]))

    def rows(self, engine: Any, context: str) -> list[dict[str, Any]]:
        """Run it."""
        own, facts = self.key(context), engine.facts()
        measured = self.read(engine, self.prompts)
        return [{"key": f"{own}-{i}", **self.labels, **row, **facts} for i, row in enumerate(measured)]


def jobs_of(batches: Sequence[Any], tokens: Sequence[int]) -> list[list[Any]]:
    """Batches of a reading, with what each forwards, in groups of at most JOB_TOKENS, at least one each: what `model.ask` gets at once."""
    groups: list[list[Any]] = []
    room = 0
    for batch, cost in zip(batches, tokens):
        if not groups or cost > room:
            groups.append([])
            room = JOB_TOKENS
        groups[-1].append(batch)
        room -= cost
    return groups
