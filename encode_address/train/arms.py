"""Batches of the five arms (`tasks.arms`), and how often a model answers them: for the models that continue a bundled one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from encode_address.models.loading import BUNDLED_DIR, GROUND_TRUTH
from encode_address.tasks.arm_records import Instance
from encode_address.tasks.arm_words import ARMS, arm_lexicon
from encode_address.tasks.arms import Arms
from encode_address.train.words import POOLS, tokenizer

MEASURED = ("chat8", "list8", "rev8", "class4")  # what a card says
POOL, N, SEED = "A", 256, 12_345
TRAINING_SEEDS = 2**32  # seeds of training are larger, so that nobody else draws its tables


@dataclass(frozen=True)
class Armed:
    """Prompts of one length, five of each instance in the order of ARMS: (batch, positions) ids, (batch,) answers, and per
    prompt the tokens to choose from, by arm (instances, candidates)."""

    ids: torch.Tensor
    answers: torch.Tensor
    choices: dict[str, torch.Tensor]

    def right(self, logits: torch.Tensor) -> dict[str, float]:
        """The share of forced choices that are right, by arm. `logits` (batch, vocabulary) are those of the last position."""
        out = {}
        for i, (arm, choices) in enumerate(self.choices.items()):
            chosen = choices.gather(1, logits[i :: len(ARMS)].gather(1, choices).argmax(1, keepdim=True))[:, 0]
            out[arm] = float((chosen == self.answers[i :: len(ARMS)]).float().mean())
        return out

    def mass(self, weights: torch.Tensor, separators: bool) -> torch.Tensor:
        """Attention (batch, heads, positions, positions) of the last position on where its answer is printed, and with
        `separators` on the token after it; mean over heads, of the prompts that print it."""
        at = self.ids == self.answers[:, None]
        printed = at.any(1)
        if separators:
            at[:, 1:] |= at[:, :-1].clone()
        return (weights[:, :, -1].mean(1) * at).sum(1)[printed]


def armed(instances: Sequence[Instance]) -> Armed:
    """The batch of these instances, which are of one variant."""
    prompts = [instance[arm].prompt for instance in instances for arm in ARMS]
    return Armed(
        torch.tensor([prompt.ids for prompt in prompts]),
        torch.tensor([prompt.answer for prompt in prompts]),
        {arm: torch.tensor([instance[arm].prompt.choices for instance in instances]) for arm in ARMS},
    )


def drawn(variant: str, n: int, rng: random.Random) -> Armed:
    """`n` fresh instances for training, of one word pool drawn."""
    pool = rng.choice(list(POOLS))
    return armed(_arms(variant, pool).instances(n, TRAINING_SEEDS + rng.randrange(2**32)))


@torch.no_grad()
def arm_accuracy(
    model: nn.Module, variants: Sequence[str] = MEASURED, pool: str = POOL, n: int = N, seed: int = SEED
) -> dict[str, dict[str, float]]:
    """Forced-choice accuracy by variant and arm, on `n` instances each."""
    out = {}
    for variant in variants:
        batch = armed(_arms(variant, pool).instances(n, seed))
        logits = model(input_ids=batch.ids, use_cache=False, logits_to_keep=1).logits[:, -1]
        out[variant] = {arm: round(right, 4) for arm, right in batch.right(logits).items()}
    return out


def measured(model: nn.Module) -> dict[str, Any]:
    """The accuracies of a card, and on how many instances, of which word pool and seed."""
    return {"accuracy": arm_accuracy(model), "instances": N, "pool": POOL, "seed": SEED}


@lru_cache
def _arms(variant: str, pool: str) -> Arms:
    own = tokenizer()
    return Arms(variant, own, arm_lexicon(own, BUNDLED_DIR / GROUND_TRUTH[0]), pool)
