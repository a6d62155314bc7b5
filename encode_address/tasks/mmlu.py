"""MMLU as pairs (paper section 1.1): four options in context, the answer is the letter of one of them.

    mmlu5        five solved questions of the same subject (its first five of the dev split), then the question
    mmlu_hint5   the same, with the line "Hint: the answer is <text of the right option>." before the question
    mmlu0, mmlu_hint0, ...   fewer solved questions, down to none

A prompt is plain text without a chat wrapper. With the options o_A ... o_D of a question q it ends

    q \\n A. o_A \\n B. o_B \\n C. o_C \\n D. o_D \\n Answer:

and the answer is the one token " A" ... " D"; chance is 1/4. In the corrupted form the right option and another of as many
tokens have changed places, so the right letter moves and nothing else does: a model that looks at letters alone gives both
forms the same answer, and cannot solve both.
"""

from __future__ import annotations

import csv
import json
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pandas as pd

from encode_address.errors import NameNotFound, TaskError
from encode_address.tasks.dictionary import Swap, exchanged
from encode_address.tasks.prompts import Piece, Prompt, assemble

HUB = "cais/mmlu"
LETTERS = ("A", "B", "C", "D")
SHOTS = 5
LIMIT, LONGEST = 1500, 600  # pairs at most; characters of a question at most (paper 1.1)
LAYOUT = "a folder with test/SUBJECT_test.csv and dev/SUBJECT_dev.csv, or one csv, jsonl or parquet file"
SPLITS = ("test", "dev", "val", "validation", "train")


@dataclass(frozen=True)
class Question:
    """One row of the data: `answer` is the index of the right option."""

    subject: str
    text: str
    options: tuple[str, ...]
    answer: int

    @property
    def usable(self) -> bool:
        """The paper's filter, and no option without text: its line would have no place to point at."""
        return len(self.text) <= LONGEST and all(o.strip() and "\n" not in o for o in self.options)

    def lines(self) -> str:
        """The question and its lettered options, a line each."""
        options = "".join(f"{letter}. {option}\n" for letter, option in zip(LETTERS, self.options))
        return f"{self.text}\n{options}"


@dataclass(frozen=True)
class Bank:
    """The questions that are asked, in their order, and those that are shown solved, by subject."""

    name: str
    test: tuple[Question, ...]
    dev: Mapping[str, tuple[Question, ...]]


class MMLU:
    """One variant for one tokenizer: what `Dictionary` is for the dictionary task, as far as value swaps go.

    Prompts have the spans "entry i" (the line of option i), "key i" (its letter), "value i" (its text), "question" (from
    "Answer:" on: what follows the options, as in a dictionary prompt what follows the entries) and "final".

    Raises NameNotFound for an unknown variant, TaskError where a subject has too few solved questions.
    """

    size = len(LETTERS)

    def __init__(self, variant: str, tokenizer: Any, bank: Bank) -> None:
        match = re.fullmatch(rf"mmlu(_hint)?([0-{SHOTS}])", variant)
        if not match:
            raise NameNotFound(
                f"unknown variant {variant!r}: use mmlu5 or mmlu_hint5 (five solved questions), or mmlu0, mmlu_hint0"
            )
        self.variant, self.tokenizer, self.bank = variant, tokenizer, bank
        self.hint, self.shots = bool(match[1]), int(match[2])
        self.surface, self.pool = "hint" if self.hint else "plain", bank.name
        for subject in sorted({question.subject for question in bank.test}):
            if (found := len(bank.dev.get(subject, ()))) < self.shots:
                raise TaskError(
                    f"{variant} needs {self.shots} dev questions of {subject!r}, {bank.name} has {found}: add its dev split "
                    f"({LAYOUT} with a column split), or ask {variant[:-1]}0"
                )
        self._letters: tuple[int, ...] = ()

    def sister(self) -> None:
        """No other format has prompts of the same length."""
        return None

    def swaps(self, n: int, seed: int = 0) -> list[Swap]:
        """The first `n` pairs. Raises TaskError where the data gives fewer."""
        if n < 1:
            raise TaskError(f"n must be at least 1, not {n}")
        found = list(islice(self.pairs(seed), n))
        if len(found) < n:
            raise TaskError(f"n is too large: {self.pool} gives {len(found)} {self.variant} pairs, fewer than {n}")
        return found

    def pairs(self, seed: int = 0) -> Iterator[Swap]:
        """Clean/corrupted pairs, in the order of the questions shuffled with `seed`; 1500 at most.

        `target` is the index of the right option in the clean form, `distractor` in the corrupted one. Left out are
        questions that are no use (see `Question.usable`), that have no other option of as many tokens, or whose two forms
        the tokenizer cuts differently. Raises TaskError when nothing is left.
        """
        rng, count = random.Random(seed), 0
        for question in rng.sample(self.bank.test, len(self.bank.test)):
            others = self._others(question) if question.usable else []
            if not others:
                continue
            other = rng.choice(others)
            moved = exchanged(question.options, question.answer, other)
            clean = self.prompt(question)
            corrupted = self.prompt(replace(question, options=moved, answer=other))
            if not _comparable(clean, corrupted, (question.answer, other)):
                continue
            yield Swap(count, clean, corrupted, question.answer, other)
            count += 1
            if count == LIMIT:
                return
        if not count:
            raise TaskError(f"{self.variant}: no question of {self.pool} can be used (of {len(self.bank.test)})")

    def prompt(self, question: Question) -> Prompt:
        """One question as it is asked."""
        hint = f"Hint: the answer is {question.options[question.answer]}.\n" if self.hint else ""
        pieces = [Piece(self.prefix(question.subject) + hint + question.text + "\n")]
        for i, (letter, option) in enumerate(zip(LETTERS, question.options)):
            entry = f"entry {i}"
            pieces += [Piece(letter, (entry, f"key {i}")), Piece(". ", (entry,))]
            pieces += [Piece(option, (entry, f"value {i}")), Piece("\n", (entry,))]
        pieces.append(Piece("Answer:", ("question",)))
        text, ids, spans = assemble(pieces, self.tokenizer)
        spans["final"] = (len(ids) - 1,)
        letters = self._letters = self._letters or self._letter_tokens(text, ids)
        return Prompt(
            ids, spans, text, LETTERS, question.options, question.answer, letters[question.answer], letters
        )  # fmt: skip

    def prefix(self, subject: str) -> str:
        """The solved questions of a subject, under their heading; nothing for no shots."""
        if not self.shots:
            return ""
        heading = "The following are multiple choice questions (with answers) about"
        shown = self.bank.dev[subject][: self.shots]
        solved = "".join(f"{question.lines()}Answer: {LETTERS[question.answer]}\n\n" for question in shown)
        return f"{heading} {subject.replace('_', ' ')}.\n\n{solved}"

    # -- helpers -------------------------------------------------------------
    def _others(self, question: Question) -> list[int]:
        """The options that can change places with the right one: another text, as many tokens."""
        right = question.options[question.answer]
        length = self._length(right)
        return [i for i, o in enumerate(question.options) if o != right and self._length(o) == length]

    def _length(self, option: str) -> int:
        return len(self.tokenizer(f" {option}", add_special_tokens=False)["input_ids"])

    def _letter_tokens(self, text: str, ids: tuple[int, ...]) -> tuple[int, ...]:
        """The token of each letter after a prompt."""
        full = [tuple(self.tokenizer(f"{text} {x}", add_special_tokens=False)["input_ids"]) for x in LETTERS]
        letters = tuple(tokens[-1] for tokens in full)
        one_each = all(tokens[:-1] == ids for tokens in full) and len({*letters}) == len(LETTERS)
        if not one_each or self.tokenizer.unk_token_id in letters:
            raise TaskError(
                f"{self.variant}: ' A' to ' D' are not one token each in this tokenizer; MMLU needs a model of ordinary text"
            )
        return letters


def _comparable(a: Prompt, b: Prompt, options: tuple[int, int]) -> bool:
    """Whether two forms have the same length and differ in the lines of the exchanged options only."""
    if len(a) != len(b):
        return False
    inside = {position for i in options for position in a.span(f"entry {i}")}
    return all(a.ids[p] == b.ids[p] or p in inside for p in range(len(a)))


# -- data ------------------------------------------------------------------------
def mmlu_source(data: str | Path | None = None) -> Bank:
    """The questions of a local folder or file; of the hub's `cais/mmlu` (needs the `text` extra) when None.

    A folder holds csv, jsonl or parquet files with "test" or "dev" in their names; other splits are passed over. One file
    is a test split, unless it has a column `split`. Csv files have the columns question, A, B, C, D, answer (and subject,
    split), named in the first row or in this order; other files may have `choices` instead of A to D. The answer is a letter or
    an index. Without a column `subject`, a file's name is its subject. Raises TaskError when there are no questions.
    """
    if data is None:
        return _hub()
    path = Path(data)
    if not path.exists():
        raise TaskError(f"no MMLU data {str(data)!r}: give {LAYOUT}")
    files = sorted(p for p in path.rglob("*") if p.suffix in _ROWS) if path.is_dir() else [path]
    found: list[tuple[str, Question]] = []
    for file in files:
        named = str(file.relative_to(path) if path.is_dir() else file.name).lower()
        words = [word for word in re.split(r"[^a-z]+", named) if word in SPLITS]
        split = words[-1] if words else "" if path.is_dir() else "test"
        subject = re.sub(rf"[_-]({'|'.join(SPLITS)})$", "", file.stem)
        for i, row in enumerate(_read(file)):
            where = row.get("split", split)
            if where in ("test", "dev"):
                found.append((where, _question(row, subject, f"{file}, row {i + 1}")))
    return _bank(path.name, found)


def _bank(name: str, found: list[tuple[str, Question]]) -> Bank:
    test = tuple(question for split, question in found if split == "test")
    if not test:
        raise TaskError(f"{name} has no questions in a test split: give {LAYOUT}")
    dev: dict[str, list[Question]] = {}
    for split, question in found:
        if split == "dev":
            dev.setdefault(question.subject, []).append(question)
    return Bank(name, test, {subject: tuple(questions) for subject, questions in dev.items()})


def _hub() -> Bank:
    hint = f"install the extra (pip install 'encode-address[text]') where the hub can be reached, or pass --data PATH: {LAYOUT}"
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise TaskError(f"MMLU needs the package datasets: {hint}") from error
    try:
        data = {split: load_dataset(HUB, "all", split=split) for split in ("test", "dev")}
    except Exception as error:  # whatever the hub client raises, the user can do one of two things
        raise TaskError(f"{HUB} could not be loaded ({type(error).__name__}): {hint}") from error
    return _bank(HUB, [(split, _question(row, "", HUB)) for split, rows in data.items() for row in rows])


def _question(row: Mapping[str, Any], subject: str, where: str) -> Question:
    try:
        given = row["choices"] if "choices" in row else [row[letter] for letter in LETTERS]
        options, answer = tuple(map(str, given)), str(row["answer"]).strip()
        index = LETTERS.index(answer) if answer in LETTERS else int(answer)
        if len(options) == len(LETTERS) and 0 <= index < len(LETTERS):
            return Question(str(row.get("subject") or subject), str(row["question"]), options, index)
    except (KeyError, TypeError, ValueError):
        pass
    raise TaskError(f"{where}: a question needs its text, four options, and an answer that is A to D or 0 to 3")


def _read(file: Path) -> list[dict[str, Any]]:
    if file.suffix not in _ROWS:
        raise TaskError(f"MMLU data in {file.name}: give {LAYOUT}")
    try:
        return _ROWS[file.suffix](file)
    except (OSError, ValueError, csv.Error) as error:
        raise TaskError(f"{file} cannot be read: {(str(error).splitlines() or [type(error).__name__])[0]}") from error


def _csv(file: Path) -> list[dict[str, Any]]:
    with file.open(newline="", encoding="utf-8") as stream:
        rows = [row for row in csv.reader(stream) if row]
    named = bool(rows) and "question" in rows[0] and "answer" in rows[0]
    columns = rows.pop(0) if named else ("question", *LETTERS, "answer")
    return [dict(zip(columns, row)) if len(row) == len(columns) else {} for row in rows]  # {}: refused as a question


def _jsonl(file: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError("a line is not an object with named values")
    return rows


_ROWS = {".csv": _csv, ".jsonl": _jsonl, ".parquet": lambda file: pd.read_parquet(file).to_dict("records")}
