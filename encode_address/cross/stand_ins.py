"""What is put in place of the host's blocks, and the cells that ask what is left of retrieval (paper 3.13, 3.14).

With `slots` the blocks of the host that are replaced, each with the donor's layers meant for it, the arms are

    intact      nothing is replaced                       donor            the donor's own block, between two fitted maps
    removed     h passes the block by, MLPs and all       donor G0, ...    every other block of the donor, likewise
    linear      h + a fitted linear map of h              zeroed           the donor's block with mixers that give zero
    mean        h + the mean of what the block adds       shuffled         both maps fitted on rows that do not belong together
    identity    the host's own block, without maps        own, refitted    the host's own block, between two fitted maps

All fitted maps of a slot have the same rows, penalty search and seed. `identity` must equal `intact` to the bit; `own, refitted` is
what two fitted maps lose by themselves. Of several slots each is fitted with what stands in for the earlier ones. In slot
"both" the donor's Encode stands in for the host's in every arm, and the arms are about the Address; "both removed" and
"both linear" are about the two together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from encode_address.cross.alignment import align, report
from encode_address.cross.pairs import Both, Pairs, text_pairs
from encode_address.errors import RunError
from encode_address.experiments.base import Circuit, Heads
from encode_address.models.layout import Layout
from encode_address.run.cells import FULL, Cell, Edit
from encode_address.run.projection import StandIn
from encode_address.run.stitch import Arm, Row, Slot, Stitch
from encode_address.tasks import Prompt, Text

INTACT, REMOVED, LINEAR, MEAN = "intact", "removed", "linear", "mean"
DONOR, ZEROED, SHUFFLED, IDENTITY, OWN = "donor", "zeroed", "shuffled", "identity", "own, refitted"
BOTH_REMOVED, BOTH_LINEAR = "both removed", "both linear"
SLOTS = ("address", "encode", "both")
LINES, SHORTEST, CUT = 200, 700, 600  # text lines of the fit, and their characters (paper 3.6)


@dataclass(frozen=True)
class Place:
    """A block of the host that is replaced, and the donor's unit that is meant for it, by name and layers."""

    target: str
    layers: tuple[int, ...]
    source: str
    donor_layers: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """One slot setting: the blocks replaced before (by the donor's, in every arm), and those that the arms are about."""

    name: str
    before: tuple[Place, ...]
    places: tuple[Place, ...]

    @property
    def every(self) -> tuple[Place, ...]:
        return self.before + self.places

    @property
    def targets(self) -> str:
        return "+".join(place.target for place in self.places)

    @property
    def sources(self) -> str:
        return "+".join(dict.fromkeys(place.source for place in self.places))


def plan(name: str, donor: Any, host: Any, circuits: tuple[Circuit | None, Circuit | None], source: str | None, target: str | None) -> Plan:  # fmt: skip
    """The blocks of a slot setting. `circuits` (donor's, host's) name what is not given by `source` and `target`, which
    list blocks with commas; a source may be a union, "G2+G3". Raises NameNotFound, RunError."""
    own, other = circuits[1] or Circuit(), circuits[0] or Circuit()
    if name == "both":
        address = plan("address", donor, host, circuits, source, target)
        before = plan("encode", donor, host, circuits, None, None).places
        lowest = min(place.layers[0] for place in address.places)
        if any(place.layers[-1] >= lowest for place in before):
            raise RunError("slot both: the host's Encode must lie below the blocks that are replaced after it")
        return Plan(name, before, address.places)
    targets = target.split(",") if target else list(getattr(own, name))
    sources = source.split(",") if source else list(getattr(other, name))
    for model, names, option in ((host, targets, "target"), (donor, sources, "source")):
        if not names:
            raise RunError(f"find names no {name.capitalize()} of {model.name}: say which block with --{option}")
    if len(sources) != len(targets):
        sources = ["+".join(sources)] * len(targets)
    places = [
        Place(t, host.layout.layers_of(t), s, donor.layout.layers_of(s)) for t, s in zip(targets, sources, strict=True)
    ]
    return Plan(name, (), tuple(sorted(places, key=lambda place: place.layers)))


def controls(donor: Layout, setting: Plan) -> list[str]:
    """The arms that stand for "something else would do as well", in the order in which they are shown."""
    return [REMOVED, LINEAR, MEAN, ZEROED, SHUFFLED, *others(donor, setting)]


def others(donor: Layout, setting: Plan) -> list[str]:
    """ "donor G1", ... for each block of the donor that no place has for its source."""
    used = {place.donor_layers for place in setting.places}
    return [f"{DONOR} {block.name}" for block in donor.blocks if block.layers not in used]


def arms(donor: Any, host: Any, setting: Plan, rows: Sequence[Row], seed: int) -> dict[str, tuple[StandIn | None, ...]]:
    """What stands in for every block of `setting.every`, by arm; None: nothing, what enters leaves."""
    make = _Maker(donor, host, tuple(rows), seed)
    before: tuple[StandIn, ...] = ()
    for place in setting.before:
        before += (make.one(place, DONOR, before, ()),)
    others_ = others(donor.layout, setting)
    together = (LINEAR, MEAN, DONOR, ZEROED, SHUFFLED, *others_)
    out: dict[str, tuple[StandIn | None, ...]] = {}
    for arm in (REMOVED, *together, OWN):
        under = before
        for number, place in enumerate(setting.places):
            # Where a first place is replaced, all arms are fitted on the same activations, and so in the same runs.
            if arm == REMOVED:
                continue
            under += (make.one(place, arm, under, together if number == 0 else ()),)
        out[arm] = under if arm != REMOVED else (*before, *(None for _ in setting.places))
    out[IDENTITY] = tuple(make.one(place, IDENTITY, (), ()) for place in setting.every)
    if setting.before:
        out[BOTH_REMOVED] = tuple(None for _ in setting.every)
        under = ()
        for place in setting.every:
            under += (make.one(place, LINEAR, under, ()),)
        out[BOTH_LINEAR] = under
    return out


@dataclass(frozen=True)
class _Maker:
    donor: Any
    host: Any
    rows: tuple[Row, ...]
    seed: int

    def one(self, place: Place, arm: str, under: tuple[StandIn, ...], together: Sequence[str]) -> Stitch:
        """What stands in for one place in one arm; arms that are fitted `together` share their runs."""
        if arm in (IDENTITY, OWN):
            kind: Arm = ("identity" if arm == IDENTITY else "block", place.layers)
            rows = () if arm == IDENTITY else self._own
            return Stitch(Slot(self.host, place.layers, self.host, rows, (kind,), under, self.seed), kind)
        kinds = [self._kind(place, name) for name in (together if arm in together else (arm,))]
        return Stitch(
            Slot(self.host, place.layers, self.donor, self.rows, tuple(kinds), under, self.seed), self._kind(place, arm)
        )

    @property
    def _own(self) -> tuple[Row, ...]:
        """The same rows for the host in the donor's place: the same tokens of the same prompts."""
        return tuple(Row(row.host, row.host, tuple((h, h) for h, _ in row.at)) for row in self.rows)

    def _kind(self, place: Place, arm: str) -> Arm:
        if arm in (LINEAR, MEAN):
            return arm, ()
        if arm in (ZEROED, SHUFFLED):
            return arm, place.donor_layers
        name = arm.removeprefix(f"{DONOR} ")
        return "block", place.donor_layers if name == DONOR else self.donor.layout.layers_of(name)


# -- rows that maps are fitted on --------------------------------------------------------
def fit_rows(donor: Any, host: Any, pairs: Pairs, n: int, text: Text) -> tuple[tuple[Row, ...], dict[str, Any]]:
    """`n` dictionaries of fit words and text lines, as both read them, and how many of their tokens align."""
    both = [(one.donor, one.host) for one in pairs.fit(n)]
    lines = text if text.lines else _cut(text)
    both += text_pairs(donor, host, lines, LINES)
    aligned = [align(a, donor.tokenizer, b, host.tokenizer) for a, b in both]
    rows = [Row(b, a, tuple(zip(one.b, one.a))) for (a, b), one in zip(both, aligned)]
    return tuple(rows), report(aligned)


def _cut(text: Text) -> Text:
    """A text whose train part has its long lines only, cut to the paper's length."""
    train = "\n".join(line[:CUT] for line in text.train.splitlines() if len(line) > SHORTEST)
    return Text(text.name, text.test, train)


# -- cells -----------------------------------------------------------------------------
def cells(
    items: Sequence[Both],
    setting: Plan,
    standing: Mapping[str, tuple[StandIn | None, ...]],
    labels: Mapping[str, Any],
    watch: Heads = (),
    truncate: int | None = None,
) -> list[Cell]:
    """Every test prompt intact and under every arm; with `truncate` of the host stopped after that layer."""
    out = []
    for arm in (INTACT, *standing):
        done = _edits(setting, standing[arm]) if arm != INTACT else []
        for item in items:
            prompt = item.host
            other = (prompt.query + len(prompt.keys) // 2) % len(prompt.keys)
            given = {
                "outcomes": (("correct", prompt.answer), ("swapped", prompt.choices[other])),
                "labels": {**_labels(labels, "replace", setting, arm), "pair": item.pair, "target": prompt.query},
                "watch": tuple(watch) if truncate is None else (),
            }
            out.append(_cell(prompt, done, truncate, **given))
    return out


def text_cells(
    chunks: Sequence[Prompt],
    setting: Plan,
    standing: Mapping[str, tuple[StandIn | None, ...]],
    labels: Mapping[str, Any],
) -> list[Cell]:
    """The loss on text chunks, intact and under every arm."""
    out = []
    for arm in (INTACT, *standing):
        done = _edits(setting, standing[arm]) if arm != INTACT else []
        for i, chunk in enumerate(chunks):
            out.append(
                _cell(chunk, done, None, text=True, labels={**_labels(labels, "replace-text", setting, arm), "pair": i})
            )
    return out


def _labels(labels: Mapping[str, Any], experiment: str, setting: Plan, arm: str) -> dict[str, Any]:
    source = arm.removeprefix(f"{DONOR} ") if arm.startswith(f"{DONOR} ") else setting.sources
    where = {"role": setting.name, "block": setting.targets, "source": source if arm != INTACT else ""}
    return {"experiment": experiment, **labels, **where, "arm": arm, "position": "all"}


def _edits(setting: Plan, standing: Sequence[StandIn | None]) -> list[dict[str, Any]]:
    """One edit per replaced block, as fields of `Edit`, the last block's first."""
    made = [
        {"verb": "replace", "layers": place.layers, "map": one}
        if one is not None
        else {"verb": "remove", "layers": place.layers, "mode": "layer"}
        for place, one in zip(setting.every, standing, strict=True)
    ]
    return made[::-1]


def _cell(prompt: Prompt, done: Sequence[Mapping[str, Any]], truncate: int | None, **given: Any) -> Cell:
    if truncate is not None:
        also = tuple(Edit(**one) for one in done)
        return Cell("truncate", prompt, path=FULL, layers=(truncate,), also=also, **given)
    if not done:
        return Cell("none", prompt, path=FULL, **given)
    (first, *rest) = done
    main = {name: value for name, value in first.items() if name != "verb"}
    return Cell(first["verb"], prompt, also=tuple(Edit(**one) for one in rest), **main, **given)
