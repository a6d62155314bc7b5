"""Records of the five arms (`tasks.arms`): what they hold, and what must be true of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from encode_address.errors import NameNotFound, TaskError
from encode_address.tasks.arm_words import ARMS, ArmWording
from encode_address.tasks.prompts import Prompt

ADDRESS, PAYLOAD = "address", "payload"


@dataclass(frozen=True)
class Concept:
    """What may become readable: a label, its token as a continuation, and the tokens of its rivals in this instance."""

    name: str
    label: str
    token: int
    rivals: tuple[int, ...]


@dataclass(frozen=True)
class Record:
    """One arm of one instance. `prompt.query` is the table's entry of z, `prompt.answer` the token to answer, `prompt.choices`
    those to choose from (words: `candidates`). `given` is the supplied arm's word, "" elsewhere. `implied` says what would be
    answered if z were another label of this table: {} where the answer does not depend on z."""

    id: str
    family: str
    instance: str
    arm: str
    context: str
    instruction: str
    passage: str
    concepts: Mapping[str, Concept]
    answer: str
    candidates: tuple[str, ...]
    given: str
    implied: Mapping[str, str]
    prompt: Prompt

    @property
    def latent(self) -> str:
        """The label of z."""
        return self.concepts[ADDRESS].label

    def implied_token(self, label: str) -> int:
        """The token that this arm answers if z is `label`. Raises TaskError where that is not defined."""
        if label not in self.implied:
            raise TaskError(f"{self.id}: the {self.arm} arm has no answer for {label!r}")
        return self.prompt.choices[self.candidates.index(self.implied[label])]

    def as_dict(self) -> dict[str, Any]:
        """As plain values, for a line of JSON."""
        address, payload = self.concepts[ADDRESS], self.concepts[PAYLOAD]
        return {
            "id": self.id, "family": self.family, "condition": self.arm, "semantic_instance_id": self.instance,
            "context": self.context, "instruction": self.instruction, "latent_value": address.label,
            "latent_token_id": address.token, "control_token_ids": list(address.rivals), "payload_value": payload.label,
            "payload_token_id": payload.token, "payload_control_token_ids": list(payload.rivals),
            "gold_answer": self.answer, "candidate_answers": list(self.candidates),
            "candidate_token_ids": list(self.prompt.choices),
            "meta": {"table": dict(zip(self.prompt.keys, self.prompt.values)), "given": self.given},
        }  # fmt: skip


@dataclass(frozen=True)
class Instance:
    """The five records of one context, by arm."""

    id: str
    records: Mapping[str, Record]

    def __getitem__(self, arm: str) -> Record:
        if arm not in self.records:
            raise NameNotFound(f"unknown arm {arm!r}: use one of {', '.join(ARMS)}")
        return self.records[arm]

    @property
    def table(self) -> dict[str, str]:
        prompt = self[ARMS[0]].prompt
        return dict(zip(prompt.keys, prompt.values))


# -- invariants ------------------------------------------------------------------------------------
def check(records: Sequence[Record], wording: ArmWording) -> None:
    """Raise TaskError, with the record's name, unless the five records of an instance keep the invariants of `tasks.arms`."""
    check_lengths(records)
    for record in records:
        problem = next((text for wrong, text in _problems(record, records, wording) if wrong), "")
        if problem:
            raise TaskError(f"{record.id}: {problem}")


def check_lengths(records: Sequence[Record]) -> None:
    """Raise TaskError, with the record's name, unless all have the length, and the places of the question, of the first."""
    first = records[0]
    for record in records:
        if len(record.prompt) != len(first.prompt):
            raise TaskError(f"{record.id}: {len(record.prompt)} tokens, but {first.id} has {len(first.prompt)}")
        if record.prompt.span("question") != first.prompt.span("question"):
            raise TaskError(f"{record.id}: the question has other positions than that of {first.id}")


def occurrences(word: str, text: str) -> int:
    """How often a whole word occurs, in any case."""
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


Problems = Iterator[tuple[bool, str]]  # whether a record is wrong, and what to say


def _problems(record: Record, records: Sequence[Record], wording: ArmWording) -> Problems:
    yield from _of_the_instance(record, records)
    yield from _of_tokens(record)
    yield from _of_the_answer(record)
    yield from _of_symmetry(record, records[0])
    yield from _of_leaks(record)
    marked = [word for word in wording.markers if occurrences(word, record.context)]
    yield len(marked) != 1, "its context has not exactly one marker"


def _of_the_instance(record: Record, records: Sequence[Record]) -> Problems:
    first, prompt, said = records[0], record.prompt, [r.arm for r in records]
    yield sorted(said) != sorted(ARMS), f"its instance has the arms {', '.join(said)}, not each of the five once"
    yield record.instance != first.instance, f"it is of instance {record.instance}, {first.id} of {first.instance}"
    yield record.context != first.context, f"its context differs from that of {first.id}"
    yield prompt.text != record.context + record.instruction, "its prompt is not its context and its instruction"
    start = min(prompt.span("instruction"))
    yield prompt.ids[:start] != first.prompt.ids[:start], f"its context has other tokens than that of {first.id}"
    mine, other = ([r.prompt.ids[p] for p in r.prompt.span("question")] for r in (record, first))
    yield mine != other, f"its question has other tokens than that of {first.id}"
    yield record.latent != first.latent, f"its latent value is {record.latent!r}, that of {first.id} {first.latent!r}"


def _of_tokens(record: Record) -> Problems:
    prompt = record.prompt
    yield len({*prompt.keys}) != len(prompt.keys), "its table has a label twice"
    yield len({*prompt.values}) != len(prompt.values), "its table has a value twice"
    yield len({*prompt.choices}) != len(prompt.choices), "two of its candidates are one token"
    yield len(prompt.choices) != len(record.candidates), "its candidates and their tokens are not equally many"
    for concept in record.concepts.values():
        yield concept.token in concept.rivals, f"{concept.label!r} is the token of a rival"


def _of_the_answer(record: Record) -> Problems:
    """What the table says."""
    prompt, z, answer = record.prompt, record.latent, record.answer
    table, supplied = dict(zip(prompt.keys, prompt.values)), record.arm == "supplied"
    yield prompt.keys[prompt.query] != z, f"it asks for {prompt.keys[prompt.query]!r}, and its latent value is {z!r}"
    yield record.concepts[PAYLOAD].label != table[z], f"its payload is not the table's value of {z!r}"
    yield answer not in record.candidates, f"the answer {answer!r} is no candidate"
    expected = prompt.choices[record.candidates.index(answer)]
    yield expected != prompt.answer, f"{answer!r} is not the token that its prompt expects"
    yield bool(record.implied) and record.implied.get(z) != answer, f"{answer!r} is not what {z!r} implies"
    yield record.arm == "flexible" and answer != table[z], f"{answer!r} is not the table's value of {z!r}"
    yield record.arm == "report" and answer != z, f"its answer {answer!r} is not {z!r}"
    yield supplied != bool(record.given), "the supplied arm, and no other, has a given word"
    yield supplied and record.given in (z, table[z]), f"the given word {record.given!r} is that of z"
    yield supplied and answer != table.get(record.given, record.given), f"{answer!r} is not that of {record.given!r}"


def _of_symmetry(record: Record, first: Record) -> Problems:
    for word in (*record.prompt.keys, *record.prompt.values):
        here, there = (occurrences(word, r.instruction) - (word == r.given) for r in (record, first))
        yield here != there, f"its instruction has the label {word!r} {here} times, that of {first.id} {there} times"
        yield occurrences(word, record.context) != 1, f"the label {word!r} is not exactly once in its context"
    given = record.given
    yield bool(given) and not occurrences(given, record.instruction), f"{given!r} is not in its instruction"


def _of_leaks(record: Record) -> Problems:
    prompt, z, answer = record.prompt, record.latent, record.answer
    payload = prompt.values[prompt.query]
    for word in (*prompt.keys, *prompt.values, *record.candidates):
        part = word in prompt.keys and word.lower() in record.passage.lower()  # a label may not even be part of a word
        yield part or occurrences(word, record.passage) > 0, f"the passage contains {word!r}"
    shown = {word: occurrences(word, record.instruction) for word in record.candidates}
    meant = answer == record.given or (record.family == "dictionary" and record.arm == "report")
    yield not meant and shown[answer] > min(shown.values()), f"its instruction says the answer {answer!r}"
    yield occurrences(payload, record.instruction) > 0, f"its instruction says the value {payload!r} of {z!r}"
    yield record.family == "class" and occurrences(z, record.instruction) > 0, f"its instruction says the class {z!r}"
