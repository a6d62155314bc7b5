"""Batches of the five arms (`tasks.arms`), and how often a model answers them: for the models that continue a bundled one."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from encode_address.models.loading import BUNDLED_DIR, GROUND_TRUTH
from encode_address.tasks.arm_records import Instance
from encode_address.tasks.arm_words import ARMS, ArmLexicon, arm_lexicon
from encode_address.tasks.arms import Arms
from encode_address.train.data import NEW_TURN
from encode_address.train.words import POOLS, tokenizer

MEASURED = ("chat8", "list8", "rev8", "class4")  # what a card says
POOL, N, SEED = "A", 256, 12_345
TRAINING_SEEDS = 2**32  # seeds of training are larger, so that nobody else draws its tables


@dataclass(frozen=True)
class Armed:
    """Instances of one variant, each asked in some of its arms one after the other, every answer given before the next note.

    `ids` (instances, positions); `turns`: by arm the position whose next token is its answer; `choices`: by arm the tokens to
    choose from (instances, candidates); `marker`: the marker's position; `passage`: those of a class's members.
    """

    ids: torch.Tensor
    turns: dict[str, int]
    choices: dict[str, torch.Tensor]
    marker: int
    passage: tuple[int, ...]

    @property
    def at(self) -> list[int]:
        return [*self.turns.values()]

    @property
    def answers(self) -> torch.Tensor:
        """(instances, turns)"""
        return self.ids[:, [position + 1 for position in self.at]]

    def right(self, logits: torch.Tensor) -> dict[str, float]:
        """The share of forced choices that are right, by arm. `logits` are those of `at`: (instances, turns, vocabulary)."""
        out = {}
        for i, (arm, choices) in enumerate(self.choices.items()):
            chosen = choices.gather(1, logits[:, i].gather(1, choices).argmax(1, keepdim=True))[:, 0]
            out[arm] = float((chosen == self.answers[:, i]).float().mean())
        return out

    def mass(self, weights: torch.Tensor, separators: bool) -> torch.Tensor:
        """Attention (instances, heads, positions, positions) of `at` on what the answer is read from: where it is printed up to
        there, or the marker (control), or the passage (a class reported or continued); with `separators` on the token after it too.
        Mean over heads, of the answers that can be read: (answers,)."""
        rows = weights[:, :, self.at].mean(1)
        past = torch.arange(rows.shape[-1]) <= torch.tensor(self.at)[:, None]
        on = (self.ids[:, None, : rows.shape[-1]] == self.answers[..., None]) & past
        if "control" in self.turns:
            on[:, [*self.turns].index("control"), self.marker] = True
        for arm in {"automatic", "report"} & {*self.turns}:
            on[:, [*self.turns].index(arm), list(self.passage)] = True
        printed = on.any(-1)
        if separators:
            on[..., 1:] |= on[..., :-1].clone()
        return (rows * on).sum(-1)[printed]


def armed(instances: Sequence[Instance], order: Sequence[str]) -> Armed:
    """These instances, asked in the arms of `order`. Every arm has the same length, so that all have their turns in the same places."""
    first = instances[0][order[0]].prompt
    start, length = min(first.span("instruction")), len(first)
    between = tokenizer()(NEW_TURN, add_special_tokens=False)["input_ids"]
    rows = []
    for instance in instances:
        row = list(instance[order[0]].prompt.ids[:start])
        for arm in order:
            prompt = instance[arm].prompt
            row += [*prompt.ids[start:], prompt.answer, *between]
        rows.append(row[: -len(between)])
    step = length - start + 1 + len(between)
    return Armed(
        torch.tensor(rows),
        {arm: length - 1 + turn * step for turn, arm in enumerate(order)},
        {arm: torch.tensor([instance[arm].prompt.choices for instance in instances]) for arm in order},
        min(first.span("marker")),
        first.spans.get("passage", ()),
    )


def drawn(variant: str, n: int, rng: random.Random) -> Armed:
    """`n` fresh instances for training, of one word pool drawn, in all arms in an order drawn."""
    pool = rng.choice(list(POOLS))
    instances = _arms(variant, pool).instances(n, TRAINING_SEEDS + rng.randrange(2**32))
    return armed(instances, rng.sample(ARMS, len(ARMS)))


def class_words() -> tuple[Mapping[str, tuple[str, ...]], tuple[str, ...]]:
    """Of the class family: the members of every label, and the symbols."""
    lexicon = _lexicon()
    return lexicon.classes, lexicon.symbols


@torch.no_grad()
def arm_accuracy(
    model: nn.Module, variants: Sequence[str] = MEASURED, pool: str = POOL, n: int = N, seed: int = SEED
) -> dict[str, dict[str, float]]:
    """Forced-choice accuracy by variant and arm, on `n` instances each."""
    out = {}
    for variant in variants:
        instances, out[variant] = _arms(variant, pool).instances(n, seed), {}
        for arm in ARMS:
            batch = armed(instances, [arm])
            logits = model(input_ids=batch.ids[:, :-1], use_cache=False, logits_to_keep=1).logits
            out[variant] |= {arm: round(right, 4) for arm, right in batch.right(logits).items()}
    return out


def measured(model: nn.Module) -> dict[str, Any]:
    """The accuracies of a card, and on how many instances, of which word pool and seed."""
    return {"accuracy": arm_accuracy(model, n=N), "instances": N, "pool": POOL, "seed": SEED}


@lru_cache
def _arms(variant: str, pool: str) -> Arms:
    return Arms(variant, tokenizer(), _lexicon(), pool)


@lru_cache
def _lexicon() -> ArmLexicon:
    return arm_lexicon(tokenizer(), BUNDLED_DIR / GROUND_TRUTH[0])
