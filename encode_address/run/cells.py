"""A cell: what is done to one prompt (pair), one row of the result table."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from encode_address.errors import RunError
from encode_address.models.layout import layer_span
from encode_address.run.given import Given
from encode_address.run.projection import UNITS, StandIn
from encode_address.tasks.prompts import Prompt, equal_length

INTERVENTIONS = (
    "none", "remove", "transplant", "state", "query", "key", "value", "gate", "input", "residual", "heads", "truncate",
    "replace",
)  # fmt: skip
EMBED = -1  # stands for the token embeddings where a layer index is expected

FINAL, FULL, READ = "final", "full", "read"
# What each path can run. A `none` cell exists on each, so that a patched row has a baseline of its own path.
PATCHES = ("transplant", "query", "key", "value", "gate", "input", "residual")  # := what a donor has at that site
ON_PATH = {
    FINAL: ("none", "state", "remove", *PATCHES),
    FULL: ("none", "remove", "heads", "truncate", "replace", *PATCHES),
    READ: ("none", "truncate"),
}
MODES = {  # how a verb is done; the first is what it means when nothing is said
    "remove": ("zero", "mean", "layer"),  # layer: the whole decoder layer passes on what enters it
    "transplant": ("outputs", "embeddings", "random", "given"),
    "state": ("recurrent", "conv", "both"),
    "heads": ("zero",),
    "replace": UNITS,
}
SAME_POSITION = ("query", "key", "value", "gate")  # they carry their position, or belong to it
BY_HEAD = ("heads", "query", "gate", "state")  # may be narrowed to one head


@dataclass(frozen=True, eq=False)
class Edit:
    """One intervention on a prompt: `verb` at the mixers of `layers`.

    `where` are the patched positions (none: all of them, for `remove`), `source` those of the `donor` that values are
    taken from; a state is always the one before the last token. Instead of a donor, a transplant may have `given` values, of
    another model or of a map: a row for each of `where`. `under` are edits of the donor's own run: its values
    are then those that it has under these. `mode` refines the verb (see MODES), `head` narrows it to one head. `map` is what
    stands in for replaced layers.
    """

    verb: str
    layers: tuple[int, ...]
    where: tuple[int, ...] = ()
    donor: Prompt | None = None
    source: tuple[int, ...] = ()
    mode: str = ""
    head: int = -1
    seed: int = -1
    under: tuple[Edit, ...] = ()
    map: StandIn | None = None
    given: Given | None = None

    def __post_init__(self) -> None:
        if self.map is not None:
            object.__setattr__(self, "mode", self.map.unit)
        if self.given is not None and not self.mode:
            object.__setattr__(self, "mode", "given")
        if not self.mode and self.verb in MODES:
            embedded = self.verb == "transplant" and EMBED in self.layers
            object.__setattr__(self, "mode", "embeddings" if embedded else MODES[self.verb][0])

    @cached_property
    def work(self) -> tuple:
        """All that it says, as plain values."""
        donor = self.donor.digest if self.donor else None
        what = (self.verb, self.layers, self.where, donor, self.source, self.mode, self.head, self.seed)
        given = (self.given.digest,) if self.given else ()
        return (*what, tuple(edit.work for edit in self.under), self.map.digest if self.map else None, *given)

    @property
    def shape(self) -> tuple:
        """What edits have in common that one write can serve."""
        return self.verb, self.mode, self.layers, self.head, len(self.where), self.map.digest if self.map else None

    @property
    def run(self) -> Run | None:
        """The run that its values come from. A state comes with its prefix's cache."""
        return Run(self.donor, self.under) if self.donor is not None and self.verb != "state" else None

    def at_the_end(self, host: Prompt) -> bool:
        """Whether it changes nothing before the last position of `host`, which has something before it."""
        patched = self.verb in PATCHES or self.verb == "state"
        return (
            self.verb in ON_PATH[FINAL]
            and self.where == host.final
            and (self.source == host.final or not patched or self.given is not None)
            and EMBED not in self.layers
            and len(host) > 1
        )

    def rules(self, host: Prompt, path: str) -> Iterator[tuple[bool, str]]:
        """What an edit of `host` must not be, in pairs (whether it is, what to say)."""
        verb, length, places = self.verb, len(host), (*self.where, *self.source)
        patches, embedded = verb in PATCHES or verb == "state", EMBED in self.layers
        yield verb not in ON_PATH[path], f"the {path} path does not run {verb}"
        yield path == FINAL and length < 2, "the final path needs prompts of two tokens or more"
        yield path == FINAL and not self.at_the_end(host), "the final path edits the last position only"
        given = self.given is not None
        yield (self.mode == "given") != given, "given values are those of a transplant, and of the mode given"
        yield given and (self.donor is not None or bool(self.source)), "given values have no donor and no source"
        if given:
            yield {*self.given.values} != {*self.layers}, "given values are those of the layers that are patched"
            yield self.given.positions != len(self.where), "given values are a row for each patched position"
        yield patches and (not (given or self.donor) or not self.where), f"{verb} needs a donor, and positions"
        yield not patches and bool(self.donor is not None or self.source), f"{verb} takes no donor"
        yield verb not in ("remove", *PATCHES, "state") and bool(places), f"{verb} takes no positions"
        yield (
            patches and not given and len(self.where) != len(self.source),
            "where and source must be equally many positions",
        )
        yield not all(0 <= p < length for p in places), f"a position is outside the prompt of {length} tokens"
        yield len({*self.where}) != len(self.where) or len({*self.layers}) != len(self.layers), "named twice"
        yield verb in SAME_POSITION and self.where != self.source, f"{verb} keeps its position: where and source"
        yield verb in ("query", "gate") and self.where != host.final, f"{verb} is edited at the last position"
        yield self.mode not in MODES.get(verb, ("",)), f"{verb} has no mode {self.mode!r}"
        yield self.mode == "layer" and bool(self.where), "a whole layer is removed at all positions"
        yield verb == "heads" and (self.head < 0 or len(self.layers) != 1), "heads takes one layer and one head"
        yield (verb == "replace") != (self.map is not None), "replace, and nothing else, takes a map"
        yield self.map is not None and self.map.layers != self.layers, "a map stands in for the layers it was made for"
        yield verb not in BY_HEAD and self.head != -1, f"{verb} takes no head"
        yield verb == "state" and self.head != -1 and self.mode != "recurrent", "only recurrent states have heads"
        yield min(self.layers, default=0) < EMBED, "layers count from 0"
        yield embedded and verb != "transplant", f"{verb} does not run on the embeddings"
        yield embedded != (self.mode == "embeddings"), "the mode embeddings and the layer of embeddings go together"
        yield bool(self.under) and self.run is None, f"{verb} has no donor's run that could be edited"
        yield bool(self.under) and self.mode == "random", "noise is scaled by a donor's plain run"
        for edit in self.under:
            yield edit.verb in ("state", "truncate"), f"a donor's run cannot be under {edit.verb}"
            yield from edit.rules(self.donor, FULL)


@dataclass(frozen=True, eq=False)
class Run:
    """A prompt, and what is done to it while it runs: where donors' values come from."""

    prompt: Prompt
    edits: tuple[Edit, ...] = ()

    @cached_property
    def key(self) -> tuple:
        """Equal for runs that give the same values."""
        return self.prompt.ids, tuple(edit.work for edit in self.edits)

    @property
    def at_the_end(self) -> bool:
        """Whether it is one token that continues from its prompt's own prefix."""
        return all(edit.at_the_end(self.prompt) for edit in self.edits)

    @property
    def depth(self) -> int:
        """How many runs must come before it, one after the other."""
        return max((1 + edit.run.depth for edit in self.edits if edit.run), default=0)


@dataclass(frozen=True, eq=False)
class Cell:
    """What is done to which prompt, and what is read.

    The main edit is said in the cell's own fields (see `Edit`): `intervention`, its `layers`, `where`, `donor`, `source`,
    `mode`, `head`, `seed`, `under`, the edits of the donor's run, `map`, and `given`. `also` are further edits of the same host. `truncate`
    stops after its layer.

    `outcomes` names token ids: each becomes a true/false column, and `margin` is the logit of the first minus
    that of the second. `watch` lists heads (layer, head) whose attention from the last position is read, as mass
    per entry of the host's dictionary. `labels` are further columns. `text=True` measures the loss on a text; with
    `after`, a position, the loss on what follows it, with the edits and without (`loss`, `loss_without`), and `kl`, how far
    the edits move what is said there.

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
    under: tuple[Edit, ...] = ()
    map: StandIn | None = None
    given: Given | None = None
    also: tuple[Edit, ...] = ()
    outcomes: tuple[tuple[str, int], ...] = ()
    watch: tuple[tuple[int, int], ...] = ()
    text: bool = False
    after: int = -1
    labels: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.intervention not in INTERVENTIONS:
            raise RunError(f"unknown intervention {self.intervention!r}: use one of {', '.join(INTERVENTIONS)}")
        if bool(self.layers) != (self.intervention != "none"):
            raise RunError(
                f"{self.intervention} with layers {self.layers or 'none'}: an edit needs layers, and none has none"
            )
        for edit in (self, *self.also):
            if edit.donor is not None:
                equal_length((self.host, edit.donor))
        if self.intervention == "state":
            object.__setattr__(self, "where", self.host.final)
            object.__setattr__(self, "source", self.host.final)
        object.__setattr__(self, "mode", self._main.mode)
        if not self.path:
            object.__setattr__(self, "path", self._fitting_path())
        self._validate()

    @cached_property
    def _main(self) -> Edit:
        said = (self.layers, self.where, self.donor, self.source, self.mode, self.head, self.seed, self.under, self.map)
        return Edit(self.intervention, *said, self.given)

    @cached_property
    def edits(self) -> tuple[Edit, ...]:
        """Everything that is done to the host."""
        return (() if self.intervention in ("none", "truncate") else (self._main,)) + self.also

    @property
    def exit(self) -> int | None:
        """The last layer that runs, of a truncated model."""
        return self.layers[0] if self.intervention == "truncate" else None

    def _fitting_path(self) -> str:
        reads = not self.outcomes and not self.text if self.intervention == "none" else self.exit is not None
        if reads and not self.also:
            return READ
        if self.edits and self.exit is None and all(edit.at_the_end(self.host) for edit in self.edits) and self._late:
            return FINAL
        return FULL

    @property
    def _late(self) -> bool:
        """Whether no run is patched from a donor before its last position: the final path keeps no other values."""
        return all(edit.donor is None or edit.at_the_end(prompt) for prompt, edit in self.every_edit)

    def _validate(self) -> None:
        problem = next((text for wrong, text in self._rules() if wrong), "")
        if problem:
            raise RunError(f"{problem}: {self.columns()}")

    def _rules(self) -> Iterator[tuple[bool, str]]:
        """What a cell must not be, in pairs (whether it is, what to say)."""
        verb = self.intervention
        yield self.path not in ON_PATH, f"unknown path {self.path!r}: use one of {', '.join(ON_PATH)}"
        yield verb not in ON_PATH[self.path], f"the {self.path} path does not run {verb}"
        yield self.path == FINAL and len(self.host) < 2, "the final path needs prompts of two tokens or more"
        read = FULL if self.exit is None or self.also else READ
        yield self.text and bool(self.watch or self.outcomes or self.path != read), "a text gives its loss alone"
        if self.after != -1:
            yield (
                not self.text or not 0 <= self.after < len(self.host) - 1,
                "after is a position of a text, not its last",
            )
            yield not self.edits or not all(edit.where for edit in self.edits), "after compares edits at some positions"
        if self.path == READ:
            yield bool(self.also), "the read path edits nothing"
            if verb == "none":
                yield bool(self.outcomes), "the read path reads attention, not answers"
                yield not self.watch, "nothing is asked: give outcomes, watch or text"
        if self.exit is not None:
            yield len(self.layers) != 1 or bool(self.watch), "truncate takes one layer, no watch"
            yield self.text and bool(self.also), "the loss of a truncated model is that of an unedited one"
            yield (
                max((layer for edit in self.also for layer in edit.layers), default=EMBED) > self.exit,
                ("an edit above the layer that the model stops at"),
            )
        yield (
            self.path == FINAL and all(edit.at_the_end(self.host) for edit in self.edits) and not self._late,
            "a donor's run is patched before its last position: use the full path",
        )
        if verb != "none" or self.where or self.donor is not None or self.given is not None:
            yield from self._main.rules(self.host, self.path)
        for edit in self.also:
            yield edit.verb not in INTERVENTIONS or edit.verb in ("none", "truncate"), f"no further edit {edit.verb!r}"
            yield from edit.rules(self.host, self.path)
        gone = {layer for edit in self.edits if edit.mode in ("layer", "layers") for layer in edit.layers}
        yield not gone.isdisjoint(layer for layer, _ in self.watch), "a removed layer has no attention to watch"
        touched = [(edit.verb, layer, edit.head) for edit in self.edits for layer in edit.layers]
        yield len({*touched}) != len(touched), "the same layer is edited twice in the same way"

    @property
    def start(self) -> int:
        """The first decoder layer that runs otherwise than in the intact model (full path)."""
        return max(0, min((layer for edit in self.edits for layer in edit.layers), default=self.exit or 0))

    @property
    def rows(self) -> int:
        """Rows that it takes in a trace: one more, without its edits, where it is compared with that."""
        return 2 if self.after != -1 else 1

    @property
    def end(self) -> int | None:
        """How many layers run; None: all."""
        return None if self.exit is None else self.exit + 1

    @cached_property
    def every_edit(self) -> list[tuple[Prompt, Edit]]:
        """Its edits and those of its donors' runs, innermost first, each with the prompt that it edits."""

        def within(host: Prompt, edits: tuple[Edit, ...]) -> Iterator[tuple[Prompt, Edit]]:
            for edit in edits:
                if edit.donor is not None:
                    yield from within(edit.donor, edit.under)
                yield host, edit

        return list(within(self.host, self.edits))

    @cached_property
    def sources(self) -> list[tuple[Run, Edit]]:
        """The runs that values come from, those first that others need, each with the edit that takes them. Noise
        needs what it is added to as well."""
        found = [(edit.run, edit) for _, edit in self.every_edit if edit.run is not None]
        return found + [(Run(host), edit) for host, edit in self.every_edit if edit.mode == "random"]

    @cached_property
    def prompts(self) -> list[Prompt]:
        """Every prompt that has to run: the host first."""
        donors = (edit.donor for _, edit in self.every_edit if edit.donor is not None)
        return list({prompt.digest: prompt for prompt in (self.host, *donors)}.values())

    def columns(self) -> dict[str, Any]:
        """The cell's factors, as they appear in the table."""
        return {
            **self.labels,
            "intervention": self.intervention,
            "mode": self.mode,
            "layers": layers_said(self.layers),
            "head": self.head,
            "seed": self.seed,
            "path": self.path,
            "prompt": self.host.digest,
            "donor_prompt": self.donor.digest if self.donor else self.given.digest if self.given else "",
        }

    @cached_property
    def work(self) -> str:
        """A hash of what has to be computed: the cell without its labels."""
        also = tuple(edit.work for edit in self.also)
        done = (self.host.digest, self.path, self._main.work, also)
        return hashlib.sha256(repr((done, self.outcomes, self.watch, self.text, self.after)).encode()).hexdigest()[:24]

    def key(self, context: str) -> str:
        """A hash of all that determines the row: the cell, its labels, and `context` (see `context_of`)."""
        content = repr((context, sorted(self.labels.items()), self.work))
        return hashlib.sha256(content.encode()).hexdigest()[:24]


def layers_said(layers: tuple[int, ...]) -> str:
    """Layers as text: "4-6", "embed" for the embeddings."""
    numbered = tuple(layer for layer in layers if layer != EMBED)
    return ",".join(["embed"] * (EMBED in layers) + [layer_span(numbered)] * bool(numbered))


def context_of(facts: Mapping[str, Any]) -> str:
    """A hash of what determines the rows of all cells: model, precision, versions, text."""
    return hashlib.sha256(json.dumps(dict(facts), sort_keys=True, default=str).encode()).hexdigest()
