"""The same dictionaries asked of two models, each in its own wrapper, with words that both have (paper 1.2, 3.11, 3.12).

Words are split in two: maps are fitted on dictionaries of some keys and tested on dictionaries of others. With
`keys="disjoint"` no key of a test dictionary, target or distractor, is in a fit dictionary; with "shared" the fit has the
test's keys in other dictionaries, which says how much of a success is remembered keys. Only "disjoint" supports a claim.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from encode_address.errors import TaskError
from encode_address.tasks import Prompt, Text, dictionary
from encode_address.tasks.lexicon import lexicon_for
from encode_address.tasks.pools import one_token
from encode_address.tasks.prompts import equal_length

SPLITS = ("disjoint", "shared")
SHOWN = 12  # missing words that the error names


@dataclass(frozen=True)
class Both:
    """One dictionary, asked at entry `index`, as the donor and as the host read it."""

    pair: int
    donor: Prompt
    host: Prompt
    index: int


@dataclass(frozen=True)
class Question:
    """One dictionary asked twice of each model: at `donor_index` (key A) and at `host_index` (key B).

    `donor`, `host_asks_a` ask A; `donor_asks_b`, `host` ask B. The host's two are of one length.
    """

    pair: int
    donor: Prompt
    donor_asks_b: Prompt
    host: Prompt
    host_asks_a: Prompt
    donor_index: int
    host_index: int


@dataclass(frozen=True)
class Words:
    """What dictionaries of fit and test are made of."""

    fit_keys: tuple[str, ...]
    fit_values: tuple[str, ...]
    test_keys: tuple[str, ...]
    test_values: tuple[str, ...]


class Pairs:
    """One variant for two models. `donor` and `host` are its tasks, `words` what both have, split by `keys` and `seed`.

    Where both models bring two pools without a common key, seed 0 tests on `pool` and fits on the other, and further
    seeds shuffle the words of both and halve them; where pools overlap (the paper's), every seed shuffles and
    halves the keys of all, and values serve both. Raises TaskError, which lists what is missing, when too few words are shared.
    """

    def __init__(
        self,
        donor: Any,
        host: Any,
        variant: str = "chat8",
        *,
        keys: str = "disjoint",
        seed: int = 0,
        text: Text | None = None,
        pool: str = "A",
    ) -> None:
        if keys not in SPLITS:
            raise TaskError(f"no split of keys {keys!r}: use one of {', '.join(SPLITS)}")
        self.donor, self.host = dictionary(donor, variant, text, pool), dictionary(host, variant, text, pool)
        self.variant, self.keys, self.seed, self.size = variant, keys, seed, self.host.size
        self.words = _split(donor, host, self.size, keys, seed, pool)
        # One rendering serves both where they read the same: most of the time goes into building prompts.
        self._alike = (
            self.donor.wording == self.host.wording
            and self.donor.filler == self.host.filler
            and donor.tokenizer.backend_tokenizer.to_str() == host.tokenizer.backend_tokenizer.to_str()
        )

    def fit(self, n: int, distinct: int | None = None) -> list[Both]:
        """`n` dictionaries of fit words, each asked at a random entry.

        `distinct` limits the keys to so many of them. Raises TaskError for fewer than a dictionary has.
        """
        keys = self.words.fit_keys
        if distinct is not None:
            if not self.size <= distinct <= len(keys):
                raise TaskError(
                    f"{self.variant}: {distinct} distinct fit keys, of {self.size} to {len(keys)} there are"
                )
            keys = tuple(random.Random(f"distinct keys {self.seed}").sample(keys, len(keys)))[:distinct]
        return self._draw(n, keys, self.words.fit_values, f"fit {self.seed}")

    def test(self, n: int) -> list[Both]:
        """`n` dictionaries of test words, each asked at a random entry."""
        return self._draw(n, self.words.test_keys, self.words.test_values, f"test {self.seed}")

    def fresh(self, n: int) -> list[Both]:
        """`n` further dictionaries of fit words: for the error of a map on rows that took no part in its fit."""
        return self._draw(n, self.words.fit_keys, self.words.fit_values, f"fresh {self.seed}")

    def questions(self, n: int) -> list[Question]:
        """`n` dictionaries of test words with two questions each, spread over the paper's configurations."""
        rng, places, out = random.Random(f"questions {self.seed}"), self.host.configurations, []
        for pair in range(n):
            a, b = places[pair * len(places) // n if n >= len(places) else pair]
            keys, values = self._sample(rng, self.words.test_keys, self.words.test_values)
            (donor, host_asks_a), (donor_asks_b, host) = self._both(keys, values, a), self._both(keys, values, b)
            equal_length((host, host_asks_a))
            out.append(Question(pair, donor, donor_asks_b, host, host_asks_a, a, b))
        return out

    def _draw(self, n: int, keys: Sequence[str], values: Sequence[str], stream: str) -> list[Both]:
        if n < 1:
            raise TaskError(f"the number of dictionaries must be at least 1, not {n}")
        rng, out = random.Random(stream), []
        for pair in range(n):
            words = self._sample(rng, keys, values)
            index = rng.randrange(self.size)
            out.append(Both(pair, *self._both(*words, index), index))
        return out

    def _sample(self, rng: random.Random, keys: Sequence[str], values: Sequence[str]) -> tuple:
        return tuple(rng.sample(keys, self.size)), tuple(rng.sample(values, self.size))

    def _both(self, keys: Sequence[str], values: Sequence[str], index: int) -> tuple[Prompt, Prompt]:
        host = self.host.prompt(keys, values, index)
        return (host if self._alike else self.donor.prompt(keys, values, index)), host


def text_pairs(donor: Any, host: Any, text: Text, n: int, part: str = "train") -> list[tuple[Prompt, Prompt]]:
    """The first `n` lines of a text that have two tokens or more, as both models read them (donor's, host's)."""
    out = []
    for line in {"train": text.train, "test": text.test}[part].splitlines():
        if len(out) == n:
            break
        ids = [tuple(m.tokenizer(line, add_special_tokens=False)["input_ids"]) for m in (donor, host)]
        if line.strip() and min(map(len, ids)) > 1:
            out.append((Prompt(ids[0], text=line), Prompt(ids[1], text=line)))
    if not out:
        raise TaskError(f"text {text.name} has no line in its {part} part")
    return out


def _split(donor: Any, host: Any, size: int, keys: str, seed: int, pool: str) -> Words:
    lexicons = [lexicon_for(model.tokenizer, model.folder) for model in (donor, host)]
    shared: dict[str, list[str]] = {}
    missing: dict[str, list[str]] = {}
    for kind in ("keys", "values"):
        shared[kind], missing[kind] = _shared(lexicons, (donor, host), kind)
    named = seed == 0
    pools = [lexicon.pools for lexicon in lexicons]
    others = [p for p in pools[0] if p != pool and p in pools[1]]
    apart = bool(others) and all(
        {*own[pool][kind]}.isdisjoint(own[others[0]][kind]) for own in pools for kind in ("keys", "values")
    )
    halves: dict[str, tuple[list[str], list[str]]] = {}
    for kind in ("keys", "values"):
        words = shared[kind]
        if apart and named:
            test = [w for w in words if all(w in own[pool][kind] for own in pools)]
            halves[kind] = [w for w in words if w not in {*test}], test
        elif apart or kind == "keys":
            order = list(words)
            random.Random(seed).shuffle(order)
            halves[kind] = order[: len(order) // 2], order[len(order) // 2 :]
        else:
            halves[kind] = words, words
    if any(len(half) < size for pair in halves.values() for half in pair):
        counts = ", ".join(f"{len(shared[kind])} {kind}" for kind in shared)
        lost = "; ".join(f"{kind}: {_listed(missing[kind])}" for kind in missing)
        raise TaskError(
            f"{donor.name} and {host.name} share {counts} as single tokens; fit and test need {size} of each apart. "
            f"Missing in one of them: {lost}"
        )
    fit, test = halves["keys"]
    return Words(
        tuple(test if keys == "shared" else fit), *map(tuple, (halves["values"][0], test, halves["values"][1]))
    )


def _shared(lexicons: Sequence[Any], models: Sequence[Any], kind: str) -> tuple[list[str], list[str]]:
    """Words of a kind that both models' pools have and both tokenizers keep in one token, and those that one lacks."""
    kept = []
    everything: dict[str, None] = {}
    for lexicon, model in zip(lexicons, models):
        words = list(dict.fromkeys(word for pool in lexicon.pools.values() for word in pool[kind]))
        everything |= dict.fromkeys(words)
        kept.append({*one_token(words, model.tokenizer, bare=kind == "values")[0]})
    both = [word for word in everything if word in kept[0] & kept[1]]
    return both, [word for word in everything if word not in kept[0] & kept[1]]


def _listed(words: Sequence[str]) -> str:
    more = f" and {len(words) - SHOWN} more" if len(words) > SHOWN else ""
    return (", ".join(words[:SHOWN]) or "none") + more
