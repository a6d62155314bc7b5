"""Five arms: one context, asked so that a latent value z is needed in five ways (arXiv 2608.15022, adapted to dictionaries).

An instance is a context and five records that share it byte for byte; they differ in the note of their instruction alone:

    context      a table, in the class family a passage, and a marker        "... Here : secret ."
    note         what to do, in equally many words in every arm               " Note : tell me the value ."
    question     the same text in every arm                                   " Question : tell me the mango . <assistant> it is"

| arm | what it asks | dictionary ("chat8", "list8", "rev8"; z = the key asked for) | class ("class4"; z = the passage's class) |
|---|---|---|---|
| automatic | use z, never expose it | the key listed after z | a further member of the class |
| report | state z | z | the class label |
| flexible | pass z to an operator | the value of z | the symbol of z in the table |
| control | the same form, z irrelevant | whether the marker is there, yes or no | the same |
| supplied | the operator's value or input is given | a given value, not that of z | the symbol of a given class, not z |

The class label is printed in the table only; the passage shows members. In the dictionary family the key is printed in the
question of every arm, so that only contrasts between arms and donors count. What a lens looks for are the record's `concepts`:
"address" (z) and "payload" (the table's value of z), each with its rivals.

`check` holds, for every instance, and raises TaskError with the record's name:
five arms, one context, one length, the same question in the same places; labels symmetric (a candidate for z, or for its value,
occurs equally often in every instruction, but for the given word); no leak (passage without labels, no answer in an instruction
unless its rivals are too, but for a key that is asked for and the given value); every label, answer and candidate one token,
different from its rivals; and each answer is what the table says.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from encode_address.errors import NameNotFound, TaskError
from encode_address.tasks.arm_records import (
    ADDRESS,
    PAYLOAD,
    Concept,
    Instance,
    Record,
    check,
    check_lengths,
    occurrences,
)
from encode_address.tasks.arm_words import ARMS, ArmLexicon, arm_lexicon
from encode_address.tasks.dictionary import entry_pieces
from encode_address.tasks.pools import one_token
from encode_address.tasks.prompts import Piece, Prompt, assemble, single_token

SIZES = {"dictionary": (4, 8, 16), "class": (4, 5, 6, 7, 8)}
CUES = 3  # members in a passage


@dataclass(frozen=True)
class ArmPair:
    """A target and a donor: the same labels in another order, with a table of their own in which no label keeps its value.

    Their z differ, and neither z has in the donor's table a value that one of them has in the target's, so that in the flexible
    arm "the donor's z was used", "the donor's value was carried" and "nothing happened" are three answers; in a dictionary the same
    holds of what is listed after z. A `placebo` pair has the same z, in other tables.
    """

    pair: int
    target: Instance
    donor: Instance
    placebo: bool = False

    def outcomes(self, arm: str) -> tuple[tuple[str, int], ...]:
        """(name, token) of what the target may answer: `kept` its own answer, and where the arm depends on z `redirected`, what
        it implies for the donor's z. A placebo redirects nothing."""
        record, label = self.target[arm], self.donor[arm].latent
        kept = (("kept", record.prompt.answer),)
        return kept if self.placebo or not record.implied else (("redirected", record.implied_token(label)), *kept)


@dataclass(frozen=True)
class _Draw:
    """Labels and values of a table in order, the index of z, the passage's words, and per label a member to continue with."""

    labels: tuple[str, ...]
    values: tuple[str, ...]
    index: int
    passage: tuple[str, ...] = ()
    further: tuple[str, ...] = ()


class Arms:
    """The arms of one variant ("chat8", "list4", "rev16", "class4", ...) for one tokenizer.

    `dropped` lists the words that this tokenizer splits, or that the wording itself uses. Raises NameNotFound for an unknown
    variant or pool, TaskError when too few words are left.
    """

    def __init__(self, variant: str, tokenizer: Any, lexicon: ArmLexicon, pool: str = "A") -> None:
        match = re.fullmatch(r"(chat|list|rev|class)(\d+)", variant)
        self.family = "class" if match and match[1] == "class" else "dictionary"
        if not match or int(match[2]) not in SIZES[self.family]:
            raise NameNotFound(
                f"unknown variant {variant!r} of the arms: use chat, list or rev with 4, 8 or 16 (chat8), or class with "
                f"{SIZES['class'][0]} to {SIZES['class'][-1]} (class4)"
            )
        if pool not in lexicon.words.pools:
            raise NameNotFound(f"unknown pool {pool!r}: this model has {', '.join(lexicon.words.pools)}")
        self.variant, self.tokenizer, self.pool, self.size = variant, tokenizer, pool, int(match[2])
        self.wording = lexicon.inferred if self.family == "class" else lexicon.of_dictionary(match[1])
        words = lexicon.words.pools[pool]
        self._dropped: list[str] = []
        self.members: dict[str, tuple[str, ...]] = {}
        if self.family == "class":
            among = {*words["keys"], *words["values"]} if lexicon.pooled else None
            for label in self._usable(tuple(lexicon.classes), bare=False):
                some = [word for word in lexicon.classes[label] if among is None or word in among]
                members = self._usable(some, bare=False)
                if len(members) > CUES:
                    self.members[label] = members
            self.labels, self.values = tuple(self.members), self._usable(lexicon.symbols, bare=True)
        else:
            self.labels, self.values = self._usable(words["keys"], bare=False), self._usable(words["values"], bare=True)
        self.dropped = tuple(self._dropped)
        if min(len(self.labels), len(self.values)) < self.size:
            raise TaskError(
                f"{variant} needs {self.size} labels and values; {len(self.labels)} and {len(self.values)} are one token in "
                f"this tokenizer and not words of the instructions (dropped: {', '.join(self.dropped) or 'none'})"
            )
        self._tokens: dict[str, int] = {}

    @property
    def chance(self) -> dict[str, float]:
        """Of a forced choice, by arm."""
        return {arm: 1 / (2 if arm == "control" else self.size) for arm in ARMS}

    def instances(self, n: int, seed: int = 0, avoid: set | None = None) -> list[Instance]:
        """`n` instances, z's entry spread evenly over those that have a next. Tables in `avoid` are not drawn, and it is added
        to. Marker and given word come from generators of their own, so that they shift no other draw."""
        rng = random.Random(f"{self.variant} {seed}")
        return [self._instance(draw, f"{seed}-{i:05d}") for i, draw in enumerate(self._draws(n, rng, avoid))]

    def pairs(self, n: int, seed: int = 0, placebo: bool = False, avoid: set | None = None) -> list[ArmPair]:
        """`n` pairs of target and donor. The targets are those of `instances`."""
        rng = random.Random(f"{self.variant} {seed}")
        extra = random.Random(f"{self.variant} donors {seed} {placebo}")
        out = []
        for i, draw in enumerate(self._draws(n, rng, avoid)):
            donor = self._donor(draw, placebo, extra)
            kind = "placebo" if placebo else "donor"
            made = self._instance(draw, f"{seed}-{i:05d}"), self._instance(donor, f"{seed}-{i:05d}-{kind}")
            check_lengths([record for instance in made for record in instance.records.values()])
            out.append(ArmPair(i, *made, placebo))
        return out

    # -- draws -----------------------------------------------------------------------------------
    def _draws(self, n: int, rng: random.Random, avoid: set | None) -> Iterator[_Draw]:
        if n < 1:
            raise TaskError(f"n must be at least 1, not {n}")
        seen = set() if avoid is None else avoid
        places = self.size - 1 if self.family == "dictionary" else self.size
        for i in range(n):
            for _ in range(1000):
                labels, values = rng.sample(self.labels, self.size), rng.sample(self.values, self.size)
                draw = self._with_passage(_Draw(tuple(labels), tuple(values), i % places), rng)
                content = (draw.labels, draw.values, draw.passage)
                if content not in seen:
                    break
            else:
                raise TaskError(f"n is too large: the pools give no further {self.variant} table after {len(seen)}")
            seen.add(content)
            yield draw

    def _with_passage(self, draw: _Draw, rng: random.Random) -> _Draw:
        """The draw with members of its class, and of every class one that they leave out; a dictionary has none."""
        if self.family == "dictionary":
            return draw
        passage, further = (), []
        for i, label in enumerate(draw.labels):
            some = rng.sample(self.members[label], CUES + 1)
            further.append(some[CUES])
            if i == draw.index:
                passage = tuple(some[:CUES])
        return _Draw(draw.labels, draw.values, draw.index, passage, tuple(further))

    def _donor(self, target: _Draw, placebo: bool, rng: random.Random) -> _Draw:
        """The donor of a pair (see ArmPair)."""
        own, last = dict(zip(target.labels, target.values)), self.size - 1
        own_next = dict(zip(target.labels, target.labels[1:]))
        asked = target.labels[target.index]
        keyed = self.family == "dictionary"  # what is listed after z must exist in both tables
        others = [label for i, label in enumerate(target.labels) if label != asked and not (keyed and i == last)]
        z = asked if placebo else rng.choice(others)
        for _ in range(10000):
            labels, values = (rng.sample(words, self.size) for words in (target.labels, target.values))
            table, index = dict(zip(labels, values)), labels.index(z)
            if keyed and (index == last or labels[index + 1] in (own_next[z], own_next[asked])):
                continue
            if all(table[label] != own[label] for label in labels) and {table[z], table[asked]}.isdisjoint(
                {own[z], own[asked]}
            ):
                return self._with_passage(_Draw(tuple(labels), tuple(values), index), rng)
        raise TaskError(f"{self.variant}: no donor for {asked!r} in {own} was found")

    # -- prompts ---------------------------------------------------------------------------------
    def _instance(self, draw: _Draw, number: str) -> Instance:
        name, word = f"{self.variant}-{number}", self.wording
        rng = random.Random(f"marker {name}")
        marked = rng.random() < 0.5
        marker = word.markers[0 if marked else 1]
        z, table = draw.labels[draw.index], dict(zip(draw.labels, draw.values))
        given = random.Random(f"given {name}").choice([label for label in draw.labels if label != z])
        following = draw.further or draw.labels[1:]  # of each label; the last key of a dictionary has none
        identity = {label: label for label in draw.labels}
        if self.family == "class":
            said, supplied = given, table[given]
        else:
            said = supplied = table[given]
        automatic = dict(zip(draw.labels, following))
        asked = {  # arm: answer, candidates, what other z imply
            "automatic": (automatic[z], draw.further or draw.labels, automatic),
            "report": (z, draw.labels, identity),
            "flexible": (table[z], draw.values, table),
            "control": (word.answers[0 if marked else 1], word.answers, {}),
            "supplied": (supplied, draw.values, {}),
        }
        records = {}
        for arm, (answer, candidates, implied) in asked.items():
            context, instruction = self._pieces(draw, arm, marker, said, z)
            text, ids, spans = assemble([*context, *instruction], self.tokenizer)
            self._locate(name, arm, draw, ids, spans)
            tokens = {w: self._token(w, text, ids, f"{name}-{arm}") for w in (*draw.labels, *draw.values, *candidates)}
            concepts = {
                kind: Concept(kind, labels[draw.index], tokens[labels[draw.index]],
                              tuple(tokens[w] for i, w in enumerate(labels) if i != draw.index))
                for kind, labels in ((ADDRESS, draw.labels), (PAYLOAD, draw.values))
            }  # fmt: skip
            choices = tuple(tokens[w] for w in candidates)
            prompt = Prompt(ids, spans, text, draw.labels, draw.values, draw.index, tokens[answer], choices)
            records[arm] = Record(
                f"{name}-{arm}", self.family, name, arm, "".join(p.text for p in context),
                "".join(p.text for p in instruction), word.joint.join(draw.passage), concepts, answer, tuple(candidates),
                said if arm == "supplied" else "", implied, prompt,
            )  # fmt: skip
        check(tuple(records.values()), word)
        return Instance(name, records)

    def _pieces(self, draw: _Draw, arm: str, marker: str, given: str, key: str) -> tuple[list[Piece], list[Piece]]:
        word, pieces = self.wording, [Piece(self.wording.opening, ("context",))]
        for i, (label, value) in enumerate(zip(draw.labels, draw.values)):
            entry = entry_pieces(word.entry, i, label, value)
            own = (f"entry {i}",) if word.delimited else ()
            entry.append(Piece(word.separator if i < self.size - 1 else word.end, own))
            pieces += [Piece(piece.text, ("context", *piece.names)) for piece in entry]
        slots = {"words": (word.joint.join(draw.passage), "passage"), "marker": (marker, "marker")}
        pieces += _fill(word.text, slots, ("context",)) + _fill(word.marker, slots, ("context",))
        note = word.note.replace("{note}", word.notes[arm])
        slots = {"given": (given, "given"), "key": (key, "asked")}
        instruction = _fill(note, slots, ("instruction", "note"))
        return pieces, instruction + _fill(word.question, slots, ("instruction", "question"))

    def _locate(self, name: str, arm: str, draw: _Draw, ids: Sequence[int], spans: dict[str, tuple[int, ...]]) -> None:
        """Add the spans of single words; each label and value in the table must be one token."""
        spans["final"] = (len(ids) - 1,)
        try:
            for i, (label, value) in enumerate(zip(draw.labels, draw.values)):
                single_token(label, ids, spans[f"key {i}"], self.tokenizer)
                single_token(value, ids, spans[f"value {i}"], self.tokenizer)
        except TaskError as error:
            raise TaskError(f"{name}-{arm}: {error}") from None

    def _token(self, word: str, text: str, ids: tuple[int, ...], record: str) -> int:
        """The token of a word as the continuation; every prompt of a variant ends alike, so it is looked up once."""
        if word not in self._tokens:
            tokens = tuple(self.tokenizer(f"{text} {word}", add_special_tokens=False)["input_ids"])
            if tokens[:-1] != ids or tokens[-1] == self.tokenizer.unk_token_id:
                raise TaskError(f"{record}: {word!r} is not one token after {text[-20:]!r}")
            self._tokens[word] = tokens[-1]
        return self._tokens[word]

    def _usable(self, words: Sequence[str], *, bare: bool) -> tuple[str, ...]:
        kept, lost = one_token(words, self.tokenizer, bare=bare)
        unknown = self.tokenizer.unk_token_id
        said = self.wording.said
        wrong = {
            w
            for w in kept
            if occurrences(w, said) or unknown in self.tokenizer(f" {w}", add_special_tokens=False)["input_ids"]
        }
        self._dropped += [*lost, *(w for w in kept if w in wrong)]
        return tuple(w for w in kept if w not in wrong)


def arms(model: Any, variant: str = "chat8", pool: str = "A") -> Arms:
    """The arms of `variant` as `model` is asked them: in a bundled model's own words, or in plain English."""
    return Arms(variant, model.tokenizer, arm_lexicon(model.tokenizer, model.folder), pool)


def _fill(template: str, slots: Mapping[str, tuple[str, str]], names: tuple[str, ...]) -> list[Piece]:
    """A template as pieces that carry `names`; a slot `{word}` is filled with slots[word][0] and carries slots[word][1] too."""
    pieces = []
    for part in re.split(r"(\{\w+\})", template):
        if part.startswith("{"):
            text, name = slots[part[1:-1]]
            pieces.append(Piece(text, (*names, name)))
        elif part:
            pieces.append(Piece(part, names))
    return pieces
