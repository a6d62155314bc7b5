"""The dictionary task (paper section 1): prompts, and the pairs that are patched into one another.

A variant is a format and a size, "chat8", "list8", "rev8" (also 4 and 16 entries), "perm8" (every index asked
for), "long512" (512 tokens of text between dictionary and question), with an optional surface: "chat8/far".
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from encode_address.errors import NameNotFound, TaskError
from encode_address.tasks.lexicon import Lexicon, Wording
from encode_address.tasks.pools import one_token
from encode_address.tasks.prompts import Piece, Prompt, assemble, equal_length, single_token
from encode_address.tasks.text import Text

# (entry asked for, other entry) by dictionary size; 25 items each make the paper's 100.
CONFIGURATIONS = {
    4: ((0, 3), (3, 0), (1, 2), (2, 1)),
    8: ((2, 5), (5, 2), (1, 6), (6, 1)),
    16: ((3, 12), (12, 3), (6, 9), (9, 6)),
}
FORMATS = ("chat", "list", "rev", "perm", "long")
Words = tuple[tuple[str, ...], tuple[str, ...]]


@dataclass(frozen=True)
class Swap:
    """Clean and corrupted prompt: the values of entries `target` and `distractor` are exchanged (paper 1.3 a)."""

    pair: int
    clean: Prompt
    corrupted: Prompt
    target: int
    distractor: int


@dataclass(frozen=True)
class QuestionSwap:
    """A host that asks one key of a dictionary, and the donors that ask another (paper 1.3 b, and controls).

    The host asks entry `host_index`. Donors: `donor` asks entry `donor_index` of the same dictionary;
    `other_dictionary` asks the *host's* key, at the host's index, in a dictionary of the same keys with other
    values; `dissociation` asks the donor's key in a dictionary of the same keys in another order with other
    values, where it stands at index `shifted_index` - so that an address by key, an address by index, and a
    carried answer give three different answers.
    """

    pair: int
    host: Prompt
    donor: Prompt
    other_dictionary: Prompt
    dissociation: Prompt
    host_index: int
    donor_index: int
    shifted_index: int


@dataclass(frozen=True)
class EntrySwap:
    """Donor and host that differ by one exchange in the dictionary (paper 1.3 c, 3.5).

    `swap` is "value" (the host has the two values exchanged; patched at the target's value) or "key" (the donor
    has the two keys exchanged; patched at both keys). `positions` are the patched ones, `carried` the token id
    that the host answers if those positions carry the swap.
    """

    pair: int
    swap: str
    host: Prompt
    donor: Prompt
    positions: tuple[int, ...]
    carried: int


class Dictionary:
    """One variant of the task for one tokenizer.

    Raises NameNotFound for an unknown variant, TaskError when the pool is too small; `dropped` lists the words
    that this tokenizer splits.
    """

    def __init__(self, variant: str, tokenizer: Any, lexicon: Lexicon, text: Text | None = None, pool: str = "A"):
        match = re.fullmatch(rf"({'|'.join(FORMATS)})(\d+)(/\w+)?", variant)
        if not match or (match[1] != "long" and int(match[2]) not in CONFIGURATIONS):
            raise NameNotFound(
                f"unknown variant {variant!r}: use chat, list, rev or perm with 4, 8 or 16 (chat8), or long with a "
                "number of tokens (long512)"
            )
        if pool not in lexicon.pools:
            raise NameNotFound(f"unknown pool {pool!r}: this model has {', '.join(lexicon.pools)}")
        self.variant, self.tokenizer, self.pool, self._lexicon, self._text = variant, tokenizer, pool, lexicon, text
        self.format, self.surface = match[1], (match[3] or "").removeprefix("/")
        self.size = 8 if self.format == "long" else int(match[2])
        self.wording = lexicon.wording(
            {"perm": "chat", "long": "chat"}.get(self.format, self.format) + (match[3] or "")
        )
        self.filler = ""
        if self.format == "long":
            if text is None:
                raise TaskError(f"{variant} needs a text to fill in: pass --text")
            self.filler = lexicon.filler_joint + text.opening(tokenizer, int(match[2])).strip() + lexicon.filler_joint
        words = lexicon.pools[pool]
        self.keys, lost_keys = one_token(words["keys"], tokenizer, bare=False)
        self.values, lost_values = one_token(words["values"], tokenizer, bare=True)
        self.dropped = tuple(lost_keys + lost_values)
        if min(len(self.keys), len(self.values)) < self.size + 1:
            raise TaskError(
                f"{variant} needs {self.size + 1} keys and values; pool {pool} has {len(self.keys)} and {len(self.values)} "
                f"words of one token in this tokenizer (dropped: {', '.join(self.dropped) or 'none'})"
            )
        self._answers: dict[str, int] = {}

    def sister(self) -> Dictionary | None:
        """The same task in another format or surface whose prompts have the same length, or None."""
        words = self.keys[: self.size], self.values[: self.size]
        length = len(self.prompt(*words, 0))
        size = re.search(r"\d+", self.variant)[0]
        for name in self._lexicon.wordings if self.format != "long" else ():
            form, _, surface = name.partition("/")
            other = f"{form}{size}" + (f"/{surface}" if surface else "")
            if self._lexicon.wordings[name] != self.wording:
                task = Dictionary(other, self.tokenizer, self._lexicon, self._text, self.pool)
                if len(task.prompt(*words, 0)) == length:
                    return task
        return None

    @property
    def pools(self) -> tuple[str, ...]:
        """The pools of words that this model has."""
        return tuple(self._lexicon.pools)

    @property
    def configurations(self) -> tuple[tuple[int, int], ...]:
        return CONFIGURATIONS[self.size]

    # -- pairs ---------------------------------------------------------------
    def swaps(self, n: int, seed: int = 0, avoid: set[Words] | None = None) -> list[Swap]:
        """`n` clean/corrupted value swaps, spread over the configurations (perm: over the indices)."""
        rng, items = random.Random(seed), []
        for target, distractor, (keys, values) in self._draws(n, rng, avoid):
            clean = self.prompt(keys, values, target)
            corrupted = self.prompt(keys, exchanged(values, target, distractor), target)
            self._comparable(clean, corrupted, (target, distractor))
            items.append(Swap(len(items), clean, corrupted, target, distractor))
        return items

    def questions(self, n: int, seed: int = 0, avoid: set[Words] | None = None) -> list[QuestionSwap]:
        """`n` question swaps with all their donors. A configuration is (donor's entry, host's entry)."""
        rng, items = random.Random(seed), []
        extra = random.Random(f"donors {seed}")  # leaves the paper's own draws untouched
        for ia, ib, (keys, values) in self._draws(n, rng, avoid):
            host, donor = self.prompt(keys, values, ib), self.prompt(keys, values, ia)
            j = extra.choice([i for i in range(self.size) if i not in (ia, ib)])
            dissociation = self._other_dictionary(keys, values, {ia: j}, extra)
            same_key = self._other_dictionary(keys, values, {ib: ib}, extra)
            equal_length((host, donor, dissociation, same_key))
            items.append(QuestionSwap(len(items), host, donor, same_key, dissociation, ib, ia, j))
        return items

    def entries(self, n: int, swap: str, seed: int = 0, avoid: set[Words] | None = None) -> list[EntrySwap]:
        """`n` entry swaps of one kind, "value" or "key"."""
        rng, items = random.Random(seed), []
        for t, d, (keys, values) in self._draws(n, rng, avoid):
            plain = self.prompt(keys, values, t)
            if swap == "value":
                host, donor = self.prompt(keys, exchanged(values, t, d), t), plain
                positions, carried = host.span(f"value {t}"), plain.answer
            else:
                host = plain
                donor = self.prompt(exchanged(keys, t, d), values, d, other=self._other(keys, t))
                positions, carried = host.span(f"key {t}") + host.span(f"key {d}"), self.answer(values[d])
            self._comparable(host, donor, (t, d))
            items.append(EntrySwap(len(items), swap, host, donor, positions, carried))
        return items

    def prompt(self, keys: Sequence[str], values: Sequence[str], query: int, other: str | None = None) -> Prompt:
        """One prompt that asks entry `query`; `other` is the key that a distracting surface mentions."""
        word = self.wording
        asked = keys[query]
        other = self._other(keys, query) if other is None else other
        pieces = [Piece(word.opening)]
        for i, (key, value) in enumerate(zip(keys, values)):
            pieces += entry_pieces(word.entry, i, key, value)
            delimiter = word.separator if i < self.size - 1 else word.end
            pieces.append(Piece(delimiter, (f"entry {i}",) if word.delimited else ()))
        pieces.append(Piece(self.filler))
        question = word.question.replace("{key}", asked).replace("{other}", other)
        pieces.append(Piece(question, ("question",)))
        text, ids, spans = assemble(pieces, self.tokenizer)
        for i, (key, value) in enumerate(zip(keys, values)):
            single_token(key, ids, spans[f"key {i}"], self.tokenizer)
            single_token(value, ids, spans[f"value {i}"], self.tokenizer)
        spans["final"] = (len(ids) - 1,)
        answers = tuple(self._answer(text, ids, value) for value in values)
        return Prompt(ids, spans, text, tuple(keys), tuple(values), query, answers[query], answers)

    def answer(self, value: str) -> int:
        """The token id of a value as an answer; known once a prompt with that value was built."""
        return self._answers[value]

    def _other(self, keys: Sequence[str], query: int) -> str:
        return keys[(query + self.size // 2) % self.size]

    # -- helpers -------------------------------------------------------------
    def _draws(self, n: int, rng: random.Random, avoid: set[Words] | None):
        """Yield (entry, other entry, words) in the paper's order: configuration by configuration."""
        if n < 1:
            raise TaskError(f"n must be at least 1, not {n}")
        seen = avoid if avoid is not None else set()
        if self.format == "perm":
            indices = [i * self.size // n for i in range(n)] if n >= self.size else list(range(n))
        else:
            places = self.configurations
            indices = [i * len(places) // n for i in range(n)] if n >= len(places) else list(range(n))
        for index in indices:
            words = self._draw(rng, seen)
            if self.format == "perm":
                target, other = index, rng.choice([i for i in range(self.size) if i != index])
            else:
                target, other = places[index]
            yield target, other, words

    def _draw(self, rng: random.Random, seen: set[Words]) -> Words:
        for _ in range(1000):
            words = tuple(rng.sample(self.keys, self.size)), tuple(rng.sample(self.values, self.size))
            if words not in seen:
                seen.add(words)
                return words
        raise TaskError(
            f"n is too large: pool of {len(self.keys)} keys and {len(self.values)} values gives no further {self.variant} "
            f"dictionary after {len(seen)}"
        )

    def _other_dictionary(
        self, keys: Sequence[str], values: Sequence[str], moved: dict[int, int], rng: random.Random
    ) -> Prompt:
        """The same keys in another order, the asked one moved from index to index, with other values.

        Values are disjoint from `values` as far as the pool allows; the asked one's always is, and no key keeps its.
        """
        ((index, query),) = moved.items()
        order = _reorder(keys, moved, rng)
        own = dict(zip(keys, values))
        fresh = [value for value in self.values if value not in values]
        for _ in range(1000):
            rng.shuffle(fresh)
            chosen = [*fresh, *rng.sample(list(values), len(values))][: self.size]
            chosen[0], chosen[query] = chosen[query], chosen[0]
            if all(own[key] != value for key, value in zip(order, chosen)):
                return self.prompt(order, chosen, query)
        raise TaskError(f"{self.variant}: no other dictionary of the keys of entry {index} could be drawn")

    def _answer(self, text: str, ids: tuple[int, ...], value: str) -> int:
        if value not in self._answers:
            full = self.tokenizer(text + self.wording.answer.replace("{value}", value), add_special_tokens=False)
            tokens = tuple(full["input_ids"])
            if tokens[:-1] != ids:
                raise TaskError(
                    f"the answer {value!r} is not one token after {text[-20:]!r} ({len(tokens) - len(ids)} tokens)"
                )
            self._answers[value] = tokens[-1]
        return self._answers[value]

    def _comparable(self, a: Prompt, b: Prompt, entries: tuple[int, int]) -> None:
        """Donor and host may differ only inside the two exchanged entries (paper 1.4)."""
        equal_length((a, b))
        inside = {p for e in entries for p in a.span(f"entry {e}")}
        outside = [p for p in range(len(a)) if a.ids[p] != b.ids[p] and p not in inside]
        if outside:
            raise TaskError(
                f"{self.variant}: donor and host differ at position {outside[0]}, outside the exchanged entries"
            )


def entry_pieces(template: str, index: int, key: str, value: str) -> list[Piece]:
    """An entry's template as pieces; a leading space belongs to the entry, not to the word."""
    pieces = []
    for part in re.split(r"(\{key\}|\{value\})", template):
        if part == "{key}":
            pieces.append(Piece(key, (f"entry {index}", f"key {index}")))
        elif part == "{value}":
            pieces.append(Piece(value, (f"entry {index}", f"value {index}")))
        elif part:
            pieces.append(Piece(part, (f"entry {index}",)))
    return pieces


def exchanged(words: Sequence[str], i: int, j: int) -> tuple[str, ...]:
    """The words with those at `i` and `j` in each other's place."""
    out = list(words)
    out[i], out[j] = out[j], out[i]
    return tuple(out)


def _reorder(words: Sequence[str], fixed: dict[int, int], rng: random.Random) -> tuple[str, ...]:
    """The words in another order, with word `i` at index `fixed[i]`."""
    out: dict[int, str] = {place: words[i] for i, place in fixed.items()}
    free = [i for i in range(len(words)) if i not in out]
    rest = [w for i, w in enumerate(words) if i not in fixed]
    for _ in range(100):
        rng.shuffle(rest)
        if any(words[i] != w for i, w in zip(free, rest)):
            break
    out.update(zip(free, rest))
    return tuple(out[i] for i in range(len(words)))


__all__ = ["CONFIGURATIONS", "Dictionary", "EntrySwap", "QuestionSwap", "Swap", "Wording"]
