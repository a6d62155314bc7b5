"""A cell: one intervention on one prompt (pair), one row of the result table."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from encode_address.errors import RunError
from encode_address.models.layout import layer_span
from encode_address.tasks.prompts import Prompt, equal_length

INTERVENTIONS = ("none", "remove", "transplant", "state", "query", "key", "heads", "truncate", "replace")
EMBED = -1  # stands for the token embeddings where a layer index is expected

FULL, FINAL = "full", "final"


@dataclass(frozen=True, eq=False)
class Cell:
    """What is done to which prompt, and what is read.

    `layers` are those whose mixer is touched; `where` the patched host positions, `source` the donor's (both
    equally many); `mode` refines the verb (remove: zero, mean; transplant: outputs, embeddings, random).
    `outcomes` names token ids: each becomes a true/false column, and `margin` is the logit of the first minus
    that of the second. `watch` lists heads (layer, head) whose attention from the last position is read, as mass
    per entry of the host's dictionary. `labels` are further columns. `text=True` measures the loss on a text.
    """

    intervention: str
    host: Prompt
    path: str = FULL
    layers: tuple[int, ...] = ()
    where: tuple[int, ...] = ()
    donor: Prompt | None = None
    source: tuple[int, ...] = ()
    mode: str = ""
    head: int = -1
    seed: int = -1
    outcomes: tuple[tuple[str, int], ...] = ()
    watch: tuple[tuple[int, int], ...] = ()
    text: bool = False
    labels: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.intervention not in INTERVENTIONS:
            raise RunError(f"unknown intervention {self.intervention!r}: use one of {', '.join(INTERVENTIONS)}")
        if bool(self.layers) != (self.intervention != "none"):
            raise RunError(
                f"{self.intervention} with layers {self.layers or 'none'}: an edit needs layers, and none has none"
            )
        if self.donor is not None:
            equal_length((self.host, self.donor))
        if self.path == FINAL:
            at_the_end = not self.layers or self.where == self.source == self.host.final
            if self.intervention not in ("none", "transplant") or EMBED in self.layers or not at_the_end:
                raise RunError(
                    f"the final path runs transplants of mixer outputs at the last position, not {self.columns()}"
                )

    @property
    def is_null(self) -> bool:
        """Whether the written values equal the host's own, so that the edit must change nothing."""
        if self.donor is None or self.mode == "random":
            return self.intervention == "none"
        last = max(self.where, default=-1) + 1
        return self.donor.ids[:last] == self.host.ids[:last] and self.source == self.where

    def columns(self) -> dict[str, Any]:
        """The cell's factors, as they appear in the table."""
        return {
            **self.labels,
            "intervention": self.intervention,
            "mode": self.mode,
            "layers": layer_span(self.layers).replace(str(EMBED), "embed"),
            "head": self.head,
            "seed": self.seed,
            "path": self.path,
            "prompt": self.host.digest,
            "donor_prompt": self.donor.digest if self.donor else "",
        }

    @cached_property
    def work(self) -> str:
        """A hash of what has to be computed: the cell without its labels."""
        prompts = (self.host.digest, self.donor.digest if self.donor else None)
        edit = (self.intervention, self.path, self.layers, self.where, self.source, self.mode, self.head, self.seed)
        return hashlib.sha256(repr((prompts, edit, self.outcomes, self.watch, self.text)).encode()).hexdigest()[:24]

    def key(self, context: Mapping[str, Any]) -> str:
        """A hash of all that determines the row: the cell, and `context` (model, precision, versions, text)."""
        content = json.dumps([dict(context), self.columns(), self.work], sort_keys=True, default=str)
        return hashlib.sha256(content.encode()).hexdigest()[:24]


def slices(cells: Sequence[Cell], batch_tokens: int) -> Iterator[list[Cell]]:
    """Cut full-path cells into batches that one trace can run: same edit, same shape, at most `batch_tokens` tokens.

    Batches over the same donors follow one another, so that donors are captured once.
    """
    groups: dict[tuple, dict[tuple, list[Cell]]] = {}
    for cell in cells:
        shape = (
            len(cell.host),
            len(cell.where),
            cell.donor is None,
            cell.text,
            len(cell.host.choices),
            len(cell.outcomes),
        )
        edit = (cell.intervention, cell.mode, cell.layers, cell.head, tuple(sorted({layer for layer, _ in cell.watch})))
        groups.setdefault((shape, cell.intervention, cell.mode == "embeddings"), {}).setdefault(edit, []).append(cell)
    for (shape, *_), edits in groups.items():
        # A text needs the logits of every token, not of the last one: an eighth of the rows.
        size = max(1, batch_tokens // shape[0] // (8 if shape[3] else 1))
        longest = max(len(group) for group in edits.values())
        for start in range(0, longest, size):
            for group in edits.values():
                if group[start : start + size]:
                    yield group[start : start + size]


def bundles(cells: Sequence[Cell], batch_tokens: int) -> Iterator[list[Cell]]:
    """Cut final-path cells into bundles of one prompt length whose distinct prompts fit one prefix run."""
    lengths: dict[int, list[Cell]] = {}
    for cell in cells:
        lengths.setdefault(len(cell.host), []).append(cell)
    for length, group in lengths.items():
        limit = max(2, batch_tokens // length)
        order = sorted(range(len(group)), key=lambda i: (group[i].labels.get("pair", 0), i))
        bundle: list[Cell] = []
        prompts: set[tuple[int, ...]] = set()
        for i in order:
            cell = group[i]
            needed = prompts | {cell.host.ids} | ({cell.donor.ids} if cell.donor else set())
            if bundle and len(needed) > limit:
                yield bundle
                bundle, needed = [], {cell.host.ids} | ({cell.donor.ids} if cell.donor else set())
            bundle.append(cell)
            prompts = needed
        if bundle:
            yield bundle
