"""Batches: dictionaries asked several times over, and text of a small grammar.

A sequence is one dictionary and a few questions about it, each followed by its answer, so that one forward trains
several lookups. Keys are asked with replacement: without it, a model may guess by elimination.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from encode_address.train.words import KEYS, VALUES, WORDINGS, vocabulary

FORMATS = ("chat", "list", "rev")
BETWEEN = {"equals": " .", "is": " ."}  # after an answer and before the next question, where that is not a new turn
NEW_TURN = " . <user>"

_IDS = {word: i for i, word in enumerate(vocabulary())}


@dataclass(frozen=True)
class Asked:
    """A batch of questioned dictionaries: (batch, positions) ids, and where things are.

    `answers`: the positions whose next token is an answer; `targets` (batch, questions): the index of the entry asked
    for; `keys` and `values`: where each entry has them; `question`: the first position after the dictionary; `asked`: the
    positions of the asked keys.
    """

    ids: torch.Tensor
    answers: list[int]
    targets: torch.Tensor
    keys: list[int]
    values: list[int]
    question: int
    asked: list[int]

    @property
    def ends(self) -> list[int]:
        """The position of each entry's later word; its separator is the next."""
        return [max(pair) for pair in zip(self.keys, self.values)]


def ask(
    form: str,
    size: int,
    surfaces: Sequence[str],
    rows: int,
    generator: torch.Generator,
    words: int = len(KEYS),
    lists: tuple[Sequence[str], Sequence[str]] = (KEYS, VALUES),
    members: Mapping[str, Sequence[str]] | None = None,
) -> Asked:
    """Random dictionaries of `size` entries, from the first `words` keys and values of `lists`, asked once in each of `surfaces`.

    With `members` (some words for each key), half of the questions name one of these instead of the key.
    """
    keys, values = (torch.tensor([_IDS[word] for word in some[:words]]) for some in lists)
    own = torch.stack([keys[torch.randperm(len(keys), generator=generator)[:size]] for _ in range(rows)])
    theirs = torch.stack([values[torch.randperm(len(values), generator=generator)[:size]] for _ in range(rows)])
    targets = torch.randint(size, (rows, len(surfaces)), generator=generator)
    shift = torch.randint(1, size, targets.shape, generator=generator)  # the distractor is another entry
    others = (targets + shift) % size
    columns: list[torch.Tensor] = []
    places: dict[str, list[int]] = {"key": [], "value": [], "asked": [], "answer": []}

    def write(text: str, slots: dict[str, tuple[torch.Tensor, str]]) -> None:
        for word in text.split():
            slot = re.fullmatch(r"\{(\w+)\}", word)
            if slot is None:
                columns.append(torch.full((rows,), _IDS[word]))
                continue
            column, place = slots[slot[1]]
            if place:
                places[place].append(len(columns))
            columns.append(column)

    wording = WORDINGS[form]
    write(wording.opening, {})
    for entry in range(size):
        write(wording.entry, {"key": (own[:, entry], "key"), "value": (theirs[:, entry], "value")})
        write(wording.separator if entry < size - 1 else wording.end, {})
    question = len(columns)
    for turn, surface in enumerate(surfaces):
        key, other, value = (
            table.gather(1, chosen[:, turn : turn + 1])[:, 0]
            for table, chosen in ((own, targets), (own, others), (theirs, targets))
        )
        if members is not None:
            key = _instead(key, members, generator)
        asking = WORDINGS[f"{form}/{surface}" if surface else form].question
        write(asking, {"key": (key, "asked"), "other": (other, "")})
        write("{value}", {"value": (value, "answer")})
        if turn < len(surfaces) - 1:
            write(BETWEEN.get(surface, NEW_TURN), {})
    return Asked(
        ids=torch.stack(columns, 1),
        answers=[position - 1 for position in places["answer"]],
        targets=targets,
        keys=places["key"],
        values=places["value"],
        question=question,
        asked=places["asked"],
    )


def _instead(keys: torch.Tensor, members: Mapping[str, Sequence[str]], generator: torch.Generator) -> torch.Tensor:
    """Half of these keys (rows,), and of the others a member each."""
    ids = {_IDS[label]: [_IDS[word] for word in some] for label, some in members.items()}
    drawn = torch.randint(2**31, keys.shape, generator=generator).tolist()
    kept = torch.rand(keys.shape, generator=generator) < 0.5
    named = torch.tensor([ids[key][number % len(ids[key])] for key, number in zip(keys.tolist(), drawn)])
    return torch.where(kept, keys, named)


# -- text -------------------------------------------------------------------------------------
_TOPICS = {
    "animal": ("horse dog cat bird fish".split(), "walks runs sits stands".split(), "near in on at".split()),
    "object": ("door chair boat window letter story song".split(), "falls opens closes".split(), "in at near".split()),
    "matter": (
        "water fire wind rain snow cloud bread milk salt sugar honey".split(),
        "grows falls holds".split(),
        "on from in".split(),
    ),
}
_TOPIC = {noun: kind for kind, (nouns, *_) in _TOPICS.items() for noun in nouns}
_PLACES = "river house road garden market school forest island mountain valley tower bridge".split()
_QUALITIES = "good bad big small old new red blue green dark light".split()
_PEOPLE, _SEEING = "I you we they".split(), "know like see want find take".split()


def held_out(topic: str, place: str) -> bool:
    """Whether a topic and its place are kept for the test text: a fifth of the combinations."""
    return (list(_TOPIC).index(topic) * 7 + _PLACES.index(place) * 3) % 5 == 0


def story(rng: random.Random, length: int, test: bool = False) -> list[str]:
    """Words of one text about one topic and one place.

    What may be said of a topic depends on its kind, and much of it on what was said before: the topic does one thing
    after the other in a fixed order, keeps its quality, and each person has one way of seeing it. So the text cannot be
    told from the last few words alone.
    """
    while held_out(topic := rng.choice(list(_TOPIC)), place := rng.choice(_PLACES)) != test:
        pass
    _, verbs, joints = _TOPICS[_TOPIC[topic]]
    elsewhere = [other for other in _PLACES if test or not held_out(topic, other)]
    deed, quality = rng.randrange(len(verbs)), rng.choice(_QUALITIES)
    habits = {person: rng.choice(_SEEING) for person in _PEOPLE}
    words: list[str] = []
    while len(words) < length:
        where = place if rng.random() < 0.7 else rng.choice(elsewhere)
        kind = rng.random()
        if kind < 0.65:
            subject = ["the", *([quality] if rng.random() < 0.4 else []), topic] if kind < 0.4 else ["it"]
            words += [*subject, verbs[deed], rng.choice(joints), "the", where, "."]
            deed = (deed + 1) % len(verbs)
        elif kind < 0.85:
            person = rng.choice(_PEOPLE)
            words += [person, habits[person], "the", topic, rng.choice(["and", "or"]), "the", where, "."]
        else:
            words += ["there", "here", "the", topic, "and", "the", where, "are", quality, "."]
    return words[:length]


def text_batch(rows: int, rng: random.Random, length: int = 56, test: bool = False) -> torch.Tensor:
    """(rows, 1 + length) ids of stories, each after <s>."""
    stories = [["<s>", *story(rng, length, test)] for _ in range(rows)]
    return torch.tensor([[_IDS[word] for word in words] for words in stories])
