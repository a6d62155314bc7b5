"""The KV-memory task (paper section 3.16, `kv20`): a plain-text dictionary of words and numbers, without a chat wrapper.

    Memorize the following dictionary:
    river:41
    ...
    The value of the key 'river' is

Keys are distinct random words (the paper draws them from a package of English nouns; here: this package's longer word pool, in
any number of tokens), values distinct numbers 0-99, 20 entries unless said otherwise. A number may be several tokens, so nothing
is read off one position: every value of the dictionary is written behind the prompt, and the answer is the value whose string
has the highest summed log-probability,

    argmax_v sum_i log p(t_i | t_<i),   t the tokens of "<prompt> <v>".

The sum runs over the whole text; what precedes the value is the same for all values and cancels, a token for the space before
the number (the paper's "trailing space") included. Chance is 1/20.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from encode_address.errors import TaskError
from encode_address.tasks.pools import PAPER_POOLS
from encode_address.tasks.prompts import Prompt

OPENING = "Memorize the following dictionary:\n"
WORDS = tuple(PAPER_POOLS["B"]["keys"])
NUMBERS = range(100)
SHOWN = 3  # unknown words that the error names


@dataclass(frozen=True)
class Item:
    """A prompt that asks entry `target`, and the same followed by each of the dictionary's values."""

    pair: int
    prompt: Prompt
    continued: tuple[Prompt, ...]
    target: int


class Memory:
    """The task for one tokenizer, with `size` entries. Raises TaskError where this tokenizer cannot write it, or for a
    size that words and numbers do not give."""

    def __init__(self, tokenizer: Any, size: int = 20) -> None:
        self.tokenizer, self.size, self.name = tokenizer, size, f"kv{size}"
        if not 2 <= size <= len(NUMBERS):
            raise TaskError(f"{self.name}: a dictionary of distinct numbers 0-99 has 2 to {len(NUMBERS)} entries")
        if missing := lacking(tokenizer):
            raise TaskError(f"{self.name}: this tokenizer lacks {missing}")

    def items(self, n: int, seed: int = 0) -> list[Item]:
        """`n` items; the entry asked for is random."""
        rng, out = random.Random(f"{self.name} {seed}"), []
        for pair in range(n):
            keys, values = rng.sample(WORDS, self.size), [str(v) for v in rng.sample(NUMBERS, self.size)]
            out.append(self.item(pair, keys, values, rng.randrange(self.size)))
        return out

    def item(self, pair: int, keys: list[str], values: list[str], target: int) -> Item:
        """One item. Raises TaskError when a value's tokens merge with the prompt's."""
        text = _text(keys, values, keys[target])
        prompt = self._prompt(text)
        continued = tuple(self._prompt(f"{text} {value}") for value in values)
        for value, whole in zip(values, continued):
            if whole.ids[: len(prompt)] != prompt.ids or len(whole) == len(prompt):
                raise TaskError(f"{self.name}: this tokenizer merges {value!r} with the prompt before it")
        return Item(pair, prompt, continued, target)

    def _prompt(self, text: str) -> Prompt:
        return Prompt(tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"]), {}, text)


def lacking(tokenizer: Any) -> str:
    """What a tokenizer cannot write of the task, in words; "" if nothing: line breaks, words it does not know."""

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    missing = ["line breaks"] if ids("a\nb") == ids("a b") else []
    said = [*OPENING.split(), f"{WORDS[0]}:0", *f"The value of the key '{WORDS[0]}' is".split(), *map(str, NUMBERS)]
    unknown = [word for word in said if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids(word)]
    unknown = list(dict.fromkeys(unknown))
    missing += [repr(word) for word in unknown[:SHOWN]]
    return ", ".join(missing) + (f" and {len(unknown) - SHOWN} more" if len(unknown) > SHOWN else "")


def _text(keys: list[str], values: list[str], asked: str) -> str:
    lines = "".join(f"{key}:{value}\n" for key, value in zip(keys, values))
    return f"{OPENING}{lines}The value of the key '{asked}' is"
