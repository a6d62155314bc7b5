"""Multi-query associative recall (Zoology, arXiv 2312.04927), on a model's own vocabulary.

D pairs k_1 v_1 ... k_D v_D, then (N - 2D) / 2 cells of two slots. D of the cells are drawn without replacement, cell j with weight
a j^(a - 1); each has one of the keys in its first slot, and its value is what follows. All else is the filler, one token. Keys are distinct ids of
the first half of the vocabulary, values of the second; a bundled model's are its own words for keys and values.

A sequence has D queries; a probe is a sequence up to one of them, drawn at random: what comes later cannot change what is said there.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

from encode_address.errors import NameNotFound, TaskError
from encode_address.tasks.lexicon import lexicon_for
from encode_address.tasks.pools import one_token
from encode_address.tasks.probes import Probe
from encode_address.tasks.prompts import Prompt
from encode_address.tasks.text import Text

POWER = 0.01


class MQAR:
    """Variant "mqar", (N, D) = (64, 4), or "mqarNxD" ("mqar128x8").

    Raises NameNotFound for another variant, TaskError where N < 4D, N is odd, or the vocabulary is too small.
    """

    surface, pool = "zoology", "vocabulary"

    def __init__(self, variant: str, tokenizer: Any, folder: Path | None) -> None:
        match = re.fullmatch(r"mqar(?:(\d+)x(\d+))?", variant)
        if not match:
            raise NameNotFound(f"unknown variant {variant!r}: use mqar or mqarNxD, such as mqar128x8")
        self.variant = variant
        self.length, self.pairs = int(match[1] or 64), int(match[2] or 4)
        if self.length < 4 * self.pairs or self.length % 2 or not self.pairs:
            raise TaskError(f"{variant}: N must be even and at least four times D")
        self.keys, self.values, self.filler = _words(tokenizer, folder)
        if min(len(self.keys), len(self.values)) < self.pairs:
            raise TaskError(f"{variant}: {len(self.keys)} keys and {len(self.values)} values for {self.pairs} pairs")

    def probes(self, n: int, other: int, seed: int, text: Text | None = None) -> tuple[list[Probe], list[Probe]]:
        """`n` probes, and `other` ones to choose by."""
        rng = random.Random(f"mqar {seed}")
        made = [self.probe(i, rng) for i in range(n + other)]
        return made[:n], [Probe(p.pair - n, p.prompt, p.answer, p.labels, p.repeated) for p in made[n:]]

    def sequence(self, rng: random.Random) -> tuple[list[int], dict[int, int]]:
        """N token ids, and position of a query -> number of its pair."""
        keys, values = rng.sample(self.keys, self.pairs), rng.sample(self.values, self.pairs)
        ids = [token for pair in zip(keys, values) for token in pair]
        cells = (self.length - len(ids)) // 2
        free, weights, where = list(range(cells)), [POWER * (j + 1) ** (POWER - 1) for j in range(cells)], {}
        for number in range(self.pairs):
            (cell,) = rng.choices(free, [weights[j] for j in free])
            free.remove(cell)
            where[2 * self.pairs + 2 * cell] = number
        ids += [self.filler] * (2 * cells)
        for place, number in where.items():
            ids[place] = keys[number]
        return ids, where

    def probe(self, pair: int, rng: random.Random) -> Probe:
        """One sequence, up to one of its queries."""
        ids, where = self.sequence(rng)
        place, number = rng.choice(sorted(where.items()))
        answer, choices = ids[2 * number + 1], tuple(ids[1 : 2 * self.pairs : 2])
        until, known = tuple(ids[: place + 1]), 2 * self.pairs
        spans = {"needle": (2 * number, 2 * number + 1), "question": tuple(range(known, place + 1)), "final": (place,)}
        prompt = Prompt(until, spans, answer=answer, query=number, choices=choices)
        again = Prompt(until[:known] + until, {"final": (place + known,)}, answer=answer, query=number, choices=choices)
        return Probe(pair, prompt, (answer,), {"chance": 1 / self.pairs}, again)


def _words(tokenizer: Any, folder: Path | None) -> tuple[list[int], list[int], int]:
    """Token ids for keys, for values, and the filler: the vocabulary's first that is none of these, nor special."""
    special = set(tokenizer.all_special_ids)
    plain = [token for token in range(len(tokenizer)) if token not in special]
    if folder is None:
        half = len(tokenizer) // 2
        return [t for t in plain[1:] if t < half], [t for t in plain if t >= half], plain[0]
    pool = next(iter(lexicon_for(tokenizer, folder).pools.values()))
    words = (one_token(pool[kind], tokenizer, bare=kind == "values")[0] for kind in ("keys", "values"))
    keys, values = ([tokenizer(f" {w}", add_special_tokens=False)["input_ids"][-1] for w in some] for some in words)
    return keys, values, next(t for t in plain if t not in {*keys, *values} and "<" not in tokenizer.decode([t]))
