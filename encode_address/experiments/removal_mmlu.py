"""Removal on MMLU (paper sections 3.2, 5.2): does a task of ordinary text need the blocks that the dictionary needs?

Prompts are those of `tasks.mmlu`: four options in context, the letter of the right one is asked for, in two forms between which
the right option and another change places. Only pairs whose *both* forms the intact model answers right, by argmax over the
whole vocabulary, are used, the first n of them in the order of drawing; how many were asked for that stands beside it. For L in
a unit, m^L(x, p) := 0, or := its mean over a text, at all positions p (see `removal`). Measured: accuracy over the vocabulary,
choice accuracy (argmax over the four letters, chance 1/4), logit gap, and, beside every unit, perplexity on text.

On such pairs the intact model is right by construction, so 1.00 is no finding, and luck is selected too: a model that guesses
letters solves both forms of 1/16 at most, which bounds the lucky share of what is kept (`luck`). What counts is how blocks
compare. The claim is the dictionary's: without the Address the answer is lost (choice accuracy falls by half or more, lower
bound). Choice, not vocabulary, decides: a model that no longer says letters has lost the form, not yet the answer. If MMLU did
not use the Address, its removal would cost what that of the blocks after the readers costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pandas as pd

from encode_address.experiments import baseline, removal
from encode_address.experiments.base import Conclusion, Setting, run_cells
from encode_address.metrics import accuracy, perplexity, select
from encode_address.run.cells import Cell
from encode_address.stats import Estimate, estimate, wilson
from encode_address.tasks import Swap
from encode_address.tasks.mmlu import MMLU, mmlu_source

SUMMARY = "removal-mmlu: which blocks MMLU needs, on the questions that the intact model solves in two forms"
PAPER, N, QUICK_N = "3.2", 200, 24
NEEDS_CIRCUIT, ADAPTIVE = True, True
VARIANTS = ("mmlu5", "mmlu_hint5")
CIRCUIT_OF = "chat8"  # whose Address is asked about
OPTIONS = {"data": ()}  # a file or folder; None: the hub's
NAME = "removal-mmlu"
LUCK = 1 / 16  # the share of pairs that guessing solves at most: sum over t != d of p_t p_d / 12


def task(model: Any, variant: str, data: str | None = None) -> MMLU:
    """The variant for a model, from a local file or folder, or from the hub."""
    return MMLU(variant, model.tokenizer, mmlu_source(data))


def both_right(rows: pd.DataFrame) -> pd.Series:
    """Per pair, whether the unedited model answers both forms right: true/false, indexed by pair."""
    return rows.groupby("pair")["correct"].all()


def solved(model: Any, items: list[Swap]) -> list[bool]:
    """Whether `model` solves both forms of each pair."""
    right = both_right(run_cells(model, baseline.cells(items)))
    return [bool(right[item.pair]) for item in items]


def steps(setting: Setting) -> Iterator[list[Cell]]:
    """Ask until n pairs are solved or none are left; then remove."""
    labels = {**setting.labels, "experiment": NAME}
    waiting, kept = setting.task.pairs(setting.seed), []
    while len(kept) < setting.n and (asked := list(islice(waiting, setting.n))):
        right = both_right((yield baseline.cells(asked, (), {**labels, "split": "screen"})))
        kept += [swap for swap in asked if right[swap.pair]]
    kept = kept[: setting.n]
    if not kept:
        return
    model, text, layout = setting.model, setting.text, setting.layout
    labels = {**labels, "split": "confirmation"}
    units = removal.blocks(layout) + removal.named_sets(layout, setting.circuit.address if setting.circuit else ())
    plan = baseline.cells(kept, (), labels)
    for mode in ("zero", "mean"):
        plan += removal.cells(kept, units, mode, (), labels)
    chunks = text.chunks(model.tokenizer, "test", n=text.count)
    yield plan + removal.text_cells(chunks, units, {"split": "confirmation"})  # of no variant: all share the text


def conclude(rows: pd.DataFrame, setting: Setting) -> Conclusion:
    """The Address must be needed here too; refused where the intact model does no better than guessing."""
    own = select(rows, experiment=NAME)
    share = share_kept(own)
    beginning = f"the intact model solves both forms of {share} ({round(share.value * share.n)} of {share.n} asked)"
    if not share.low > LUCK:
        return Conclusion("undecided", f"{beginning}; guessing letters solves up to {LUCK:.3f}")
    own, text = select(own, split="confirmation"), select(rows, experiment="text")
    intact, plain = select(own, intervention="none"), perplexity(select(text, intervention="none")["loss"])
    figures: dict[str, Any] = {"kept": str(share), "luck": f"{LUCK / share.value:.2f} of these at most"}
    needs = {}
    for block in setting.layout.blocks:
        removed = select(own, block=block.name, mode="zero")
        choice = estimate(removed["choice_correct"], removed["pair"])
        ratio = perplexity(select(text, block=block.name, mode="zero")["loss"]) / plain
        figures[block.name] = f"choice {choice}, accuracy {accuracy(removed)}, perplexity x {ratio:.3g}"
        needs[block.name] = removal.needed(intact, removed, "choice_correct")
    blocks = "; ".join(f"without {b.name} {figures[b.name]}" for b in setting.layout.blocks)
    why = f"{beginning}, up to {LUCK / share.value:.2f} of these by luck, n = {intact['pair'].nunique()}; {blocks}"
    return removal.about_the_address("MMLU", needs, setting.circuit, why, figures)


def share_kept(rows: pd.DataFrame) -> Estimate:
    """The share of the asked pairs whose both forms the intact model solves."""
    right = both_right(select(rows, split="screen"))
    return wilson(int(right.sum()), len(right))
