"""Probes: a prompt, the tokens that answer it, and where what it asks for lies; the tasks of the attention-only experiments as such."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from encode_address.errors import TaskError
from encode_address.tasks.dictionary import Dictionary
from encode_address.tasks.lexicon import chat_wrapper, lexicon_for
from encode_address.tasks.mmlu import MMLU
from encode_address.tasks.prompts import Prompt
from encode_address.tasks.text import Text


@dataclass(frozen=True, eq=False)
class Probe:
    """`prompt` has the spans "needle" (what must be found), "question" (what follows the context) and "final"; `answer` are the token ids
    that follow it, all of which must be said. `labels` are columns of its rows. `repeated` states context and question twice, where
    the task can; it has no spans but the final one."""

    pair: int
    prompt: Prompt
    answer: tuple[int, ...]
    labels: Mapping[str, Any] = field(default_factory=dict)
    repeated: Prompt | None = None


class DictionaryProbes:
    """The dictionary task: the needle is the asked entry."""

    def __init__(self, task: Dictionary, tokenizer: Any, folder: Any) -> None:
        self.task, self.tokenizer = task, tokenizer
        self.variant, self.surface, self.pool = task.variant, task.surface, task.pool
        self.turn = turn(tokenizer, folder)

    def probes(self, n: int, other: int, seed: int, text: Text | None = None) -> tuple[list[Probe], list[Probe]]:
        """`n` probes to measure on, and `other` ones, of other dictionaries, to choose by."""
        seen: set = set()
        parts = (self.task.swaps(n, seed, seen), self.task.swaps(other, seed + 1000, seen))
        measured, chosen = ([self._probe(item.pair, item.clean) for item in part] for part in parts)
        return measured, chosen

    def _probe(self, pair: int, prompt: Prompt) -> Probe:
        spans = {**prompt.spans, "needle": prompt.span(f"entry {prompt.query}")}
        repeated = twice(prompt, self.tokenizer, self.turn)
        return Probe(pair, replace(prompt, spans=spans), (prompt.answer,), {"chance": 1 / len(prompt.keys)}, repeated)


class MMLUProbes:
    """MMLU: the needle is the line of the right option; the answer is its letter."""

    def __init__(self, task: MMLU) -> None:
        self.task = task
        self.variant, self.surface, self.pool = task.variant, task.surface, task.pool

    def probes(self, n: int, other: int, seed: int, text: Text | None = None) -> tuple[list[Probe], list[Probe]]:
        """The first `n` questions, and the `other` ones after them."""
        items = self.task.swaps(n + other, seed)
        made = [self._probe(item.pair, item.clean) for item in items]
        return made[:n], made[n:]

    def _probe(self, pair: int, prompt: Prompt) -> Probe:
        spans = {**prompt.spans, "needle": prompt.span(f"entry {prompt.query}")}
        return Probe(pair, replace(prompt, spans=spans), (prompt.answer,), {"chance": 1 / len(prompt.choices)})


@dataclass(frozen=True)
class Turn:
    """What stands before the user's text, what begins the answer after it, and what joins two statements of it."""

    before: str
    answer: str
    joint: str


def turn(tokenizer: Any, folder: Any) -> Turn:
    """A chat model's from its template; a bundled model's from its wordings: what all openings share, and its mark of a role."""
    if folder is None:
        before, answer = chat_wrapper(tokenizer)
        return Turn(before, answer, "\n\n")
    wordings = lexicon_for(tokenizer, folder).wordings.values()
    first, last = min(wording.opening for wording in wordings), max(wording.opening for wording in wordings)
    before = first[: next((i for i, (a, b) in enumerate(zip(first, last)) if a != b), len(first))]
    marks = {mark for wording in wordings for mark in re.findall(r" <\w+>", wording.question)}
    if len(marks) != 1:
        raise TaskError(f"the wordings in {folder} do not show where an answer begins: {sorted(marks)}")
    return Turn(before, marks.pop(), " ")


def twice(prompt: Prompt, tokenizer: Any, own: Turn) -> Prompt | None:
    """The prompt with context and question stated twice before one beginning of an answer (Just Read Twice, arXiv 2407.05483); None
    where the answer does not begin with a turn of its own."""
    end = prompt.text.rfind(own.answer, len(own.before))
    if not prompt.text.startswith(own.before) or end < 0:
        return None
    body = prompt.text[len(own.before) : end]
    text = own.before + body + own.joint + body + prompt.text[end:]
    ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    return replace(prompt, ids=ids, text=text, spans={"final": (len(ids) - 1,)})


def elsewhere(prompt: Prompt, number: int, pair: int) -> tuple[int, ...]:
    """Consecutive positions of the context, as many as the needle's, that are not the needle's: the `number`-th at random.

    Raises TaskError where the context has no room.
    """
    needle, end = prompt.span("needle"), min(prompt.span("question"))
    taken, length = set(needle), len(needle)
    starts = [s for s in range(1, end - length + 1) if not taken & set(range(s, s + length))]
    if not starts:
        raise TaskError(f"no span of {length} tokens beside the needle in a context of {end} tokens")
    start = random.Random(f"elsewhere {number} {pair} {prompt.digest}").choice(starts)
    return tuple(range(start, start + length))


def reach(prompt: Prompt, window: int | None) -> str:
    """Whether a sliding window of that many keys (None: all) sees the needle from the last token: inside, edge (a part) or outside."""
    seen = [window is None or len(prompt) - 1 - place < window for place in prompt.span("needle")]
    return "inside" if all(seen) else "edge" if any(seen) else "outside"


def by_length(probes: Sequence[Probe]) -> list[list[Probe]]:
    """Probes whose prompts and answers are equally long, together."""
    groups: dict[tuple[int, int], list[Probe]] = {}
    for probe in probes:
        groups.setdefault((len(probe.prompt), len(probe.answer)), []).append(probe)
    return list(groups.values())
