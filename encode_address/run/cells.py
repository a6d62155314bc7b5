"""A cell: one intervention on one prompt (pair), one row of the result table."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from encode_address.errors import RunError
from encode_address.models.layout import layer_span
from encode_address.tasks.prompts import Prompt, equal_length

INTERVENTIONS = ("none", "remove", "transplant", "state", "query", "key", "heads", "truncate", "replace")
EMBED = -1  # stands for the token embeddings where a layer index is expected

FINAL, FULL, READ = "final", "full", "read"
# What each path can run. A `none` cell exists on each, so that a patched row has a baseline of its own path.
ON_PATH = {
    FINAL: ("none", "transplant", "query", "state"),
    FULL: ("none", "remove", "transplant", "query", "key", "heads"),
    READ: ("none", "truncate"),
}
MODES = {  # how a verb is done; the first is what it means when nothing is said
    "remove": ("zero", "mean"),
    "transplant": ("outputs", "embeddings", "random"),
    "state": ("recurrent", "conv", "both"),
    "heads": ("zero",),
}


@dataclass(frozen=True, eq=False)
class Cell:
    """What is done to which prompt, and what is read.

    `layers` are those whose mixer is touched (query, key: softmax layers; truncate: the last layer that runs);
    `where` the patched host positions, `source` the donor's (a state is always the one before the last token).
    `mode` refines the verb (see MODES), `head` narrows heads and query to one softmax head.

    `outcomes` names token ids: each becomes a true/false column, and `margin` is the logit of the first minus
    that of the second. `watch` lists heads (layer, head) whose attention from the last position is read, as mass
    per entry of the host's dictionary. `labels` are further columns. `text=True` measures the loss on a text.

    `path` is chosen by what is touched, unless given: *final* when nothing before the last position is touched,
    *read* when no more than attention or a truncated model's answer is asked for, else *full*. A `none` cell is
    compared with cells of one path, so say which.
    """

    intervention: str
    host: Prompt
    path: str = ""
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
        if self.intervention == "state":
            object.__setattr__(self, "where", self.host.final)
            object.__setattr__(self, "source", self.host.final)
        if not self.mode and self.intervention in MODES:
            embedded = self.intervention == "transplant" and EMBED in self.layers
            object.__setattr__(self, "mode", "embeddings" if embedded else MODES[self.intervention][0])
        if not self.path:
            object.__setattr__(self, "path", self._fitting_path())
        self._validate()

    def _fitting_path(self) -> str:
        if self.intervention == "truncate" or (self.intervention == "none" and not self.outcomes and not self.text):
            return READ
        return FINAL if self.intervention in ("transplant", "query", "state") and self._at_the_end else FULL

    @property
    def _at_the_end(self) -> bool:
        """Whether every edit is at the last position, after a prefix that a cache can hold."""
        return self.where == self.source == self.host.final and EMBED not in self.layers and len(self.host) > 1

    def _validate(self) -> None:
        problem = next((text for wrong, text in self._rules() if wrong), "")
        if problem:
            raise RunError(f"{problem}: {self.columns()}")

    def _rules(self) -> Iterator[tuple[bool, str]]:
        """What a cell must not be, in pairs (whether it is, what to say)."""
        verb, length, places = self.intervention, len(self.host), (*self.where, *self.source)
        patches = verb in ("transplant", "state", "query", "key")
        modes = MODES.get(verb, ("",))
        embedded = EMBED in self.layers
        yield self.path not in ON_PATH, f"unknown path {self.path!r}: use one of {', '.join(ON_PATH)}"
        yield verb not in ON_PATH[self.path], f"the {self.path} path does not run {verb}"
        yield self.path == FINAL and length < 2, "the final path needs prompts of two tokens or more"
        yield self.path == FINAL and patches and not self._at_the_end, "the final path edits the last position only"
        yield self.text and bool(self.watch or self.outcomes or self.path != FULL), "a text gives its loss alone"
        if self.path == READ and verb == "none":
            yield bool(self.outcomes), "the read path reads attention, not answers"
            yield not self.watch, "nothing is asked: give outcomes, watch or text"
        yield patches and (self.donor is None or not self.where), f"{verb} needs a donor, and positions"
        yield not patches and bool(self.donor is not None or places), f"{verb} takes no donor and no positions"
        yield len(self.where) != len(self.source), "where and source must be equally many positions"
        yield not all(0 <= p < length for p in places), f"a position is outside the prompt of {length} tokens"
        yield len({*self.where}) != len(self.where) or len({*self.layers}) != len(self.layers), "named twice"
        yield verb in ("query", "key") and self.where != self.source, f"{verb} keeps its position: where and source"
        yield verb == "query" and self.where != self.host.final, "query is edited at the last position"
        yield self.mode not in modes, f"{verb} has no mode {self.mode!r}"
        yield verb == "heads" and (self.head < 0 or len(self.layers) != 1), "heads takes one layer and one head"
        yield verb not in ("heads", "query") and self.head != -1, f"{verb} takes no head"
        yield verb == "truncate" and (len(self.layers) != 1 or bool(self.watch)), "truncate takes one layer, no watch"
        yield min(self.layers, default=0) < EMBED, "layers count from 0"
        yield embedded and verb != "transplant", f"{verb} does not run on the embeddings"
        yield embedded != (self.mode == "embeddings"), "the mode embeddings and the layer of embeddings go together"

    @property
    def start(self) -> int:
        """The first decoder layer that runs otherwise than in the intact model (full path)."""
        return max(0, min(self.layers, default=0))

    def columns(self) -> dict[str, Any]:
        """The cell's factors, as they appear in the table."""
        numbered = tuple(layer for layer in self.layers if layer != EMBED)
        return {
            **self.labels,
            "intervention": self.intervention,
            "mode": self.mode,
            "layers": ",".join(["embed"] * (EMBED in self.layers) + [layer_span(numbered)] * bool(numbered)),
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

    def key(self, context: str) -> str:
        """A hash of all that determines the row: the cell, its labels, and `context` (see `context_of`)."""
        content = repr((context, sorted(self.labels.items()), self.work))
        return hashlib.sha256(content.encode()).hexdigest()[:24]


def context_of(facts: Mapping[str, Any]) -> str:
    """A hash of what determines the rows of all cells: model, precision, versions, text."""
    return hashlib.sha256(json.dumps(dict(facts), sort_keys=True, default=str).encode()).hexdigest()
