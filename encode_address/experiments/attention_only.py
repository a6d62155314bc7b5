"""Attention-only retrieval (arXiv 2510.19861): what becomes of retrieval when attention, and nothing else, is edited by phase?

That paper says: with attention off (k = 0 heads) retrieval is zero; the sharpest 15 % of the heads of each layer, chosen anew by every query, keep it
nearly whole; what was said twice (Just Read Twice) is not retrieved either when few heads are left; and the needle must be attendable while
the answer is said, with enough other context attendable before or then. Here each prompt is prompt[:-1] | last token: all before the
last token is *prefill*, the last token and the answer's *generation* (`boundary`: hf puts the whole prompt into the prefill).

    sweep    the k best heads of every layer and query speak, by negative entropy (sharp), L2, the worst (bottom), at random (>= 5 seeds), or
             a fixed list (the k heads of a layer with the highest retrieval score on other prompts); in prefill, generation or both. k = 0: none
    twice    the same by sharpness, on prompts that state context and question twice
    grid     the needle's keys omitted, alone visible, or balanced (see `interventions.attention.exposed`), or none visible, by phase; weights as they are,
             or renormalised; spans as long as the needle elsewhere, and the question, instead
    heads    of each head, on other prompts: sharpness, needle mass, retrieval score, and what silencing it alone costs
    curve    the first n heads of each ranking everywhere, in both phases or in generation; five random rankings, and the worst first
    overlap  how far the k sharpest heads of one query are those of the next
    linear   the linear mixers zeroed (all, each block, random layers), frozen at the last prefill token, or another prompt's
    decoded  greedy decoding, where an answer has several tokens: does it contain the needle, and how much of it?

Removing all attention takes retrieval to zero in any model whose answer is read by attention at the end, and so does removing all linear
layers: neither says that the other kind contributes nothing. If retrieval were the recurrence's work, k = 0 would leave it; if any few
heads did, random ones would do as well as the sharpest. Keys that a sliding window does not reach are apart (`reach`): no edit of attention acts on them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd

from encode_address.attention import arms as plan
from encode_address.attention.arms import Arm, Edit, Head
from encode_address.attention.measured import (
    BOUNDARIES,
    decoded_rows,
    head_rows,
    measured,
    overlap_rows,
    tokens_of,
)
from encode_address.experiments.base import TASK_LOW, Conclusion, Setting, incapable
from encode_address.metrics import select
from encode_address.run.reading import Reading
from encode_address.stats import NOTHING, Estimate, difference, estimate, per_pair, ratio
from encode_address.tasks import dictionary
from encode_address.tasks.mmlu import MMLU, mmlu_source
from encode_address.tasks.mqar import MQAR
from encode_address.tasks.needle import Needle
from encode_address.tasks.probes import DictionaryProbes, MMLUProbes, Probe

SUMMARY = "attention-only: what is left of retrieval when few heads, or few keys, are left, by phase?"
PAPER, N, QUICK_N = "arXiv 2510.19861", 100, 40
NEEDS_CIRCUIT, ADAPTIVE = False, True
VARIANTS = ("chat8", "needle", "mqar")
OPTIONS = {"boundary": BOUNDARIES, "lengths": (), "data": ()}
NAME = "attention-only"
SHARE = 0.15  # of a layer's heads: the headline
SEEDS = tuple(range(5))
ALL_KS = 8  # of a model with no more heads a layer than this, every k is run
GONE, KEPT = 0.1, 0.8  # of the intact accuracy: at most, and at least
MOST = 0.25  # of a layer's heads: more than that is not "15 %", rounded up


def task(
    model: Any, variant: str, boundary: str = "split", lengths: str | None = None, data: str | None = None
) -> DictionaryProbes | Needle | MQAR | MMLUProbes:
    """The task of a variant: needle, mqar (mqarNxD), mmlu5 and the like, else the dictionary."""
    if variant.startswith("needle"):
        return Needle(variant, model.tokenizer, model.folder, lengths)
    if variant.startswith("mqar"):
        return MQAR(variant, model.tokenizer, model.folder)
    if variant.startswith("mmlu"):
        return MMLUProbes(MMLU(variant, model.tokenizer, mmlu_source(data)))
    return DictionaryProbes(dictionary(model, variant), model.tokenizer, model.folder)


def headline(heads: int) -> int:
    """k = 15 % of a layer's heads, rounded up."""
    return math.ceil(SHARE * heads)


def ks_of(heads: int) -> list[int]:
    """The numbers of heads a layer keeps in the sweep, without none and all."""
    if heads <= ALL_KS:
        return list(range(1, heads))
    return sorted({headline(heads), *plan.sizes(heads, ALL_KS)})


# -- steps ------------------------------------------------------------------------------------------------------------
def steps(setting: Setting) -> Iterator[Reading]:
    """Is the task done at all? Then which heads, on other prompts; then everything."""
    model, work = setting.model, _Work(setting)
    intact = [arm for twice in (False, True) for arm in plan.sweep(model.heads, (), {}, (), twice)[:1]]
    rows = yield work.measured("intact", work.probes, intact)
    if estimate(*_of(select(rows, twice=False))).high < TASK_LOW:
        return
    found = yield work.reading("heads", work.others, partial(head_rows, probes=work.others))
    every = [(layer, head) for layer in model.softmax_layers for head in range(model.heads)]
    silenced = yield work.measured("drop", work.others, [Arm("drop").labelled(phase=""), *plan.drops(every)])
    orders = rankings(found, silenced, every)
    fixed = {k: best_per_layer(found, k) for k in ks_of(model.heads)}
    ks = ks_of(model.heads)
    yield work.measured("sweep", work.probes, plan.sweep(model.heads, ks, fixed, SEEDS)[1:])
    yield work.measured("twice", work.probes, plan.sweep(model.heads, ks, {}, (), True)[1:])
    yield work.measured("grid", work.probes, plan.grid())
    yield work.measured("curve", work.probes, plan.curves(orders))
    yield work.reading("overlap", work.probes, partial(overlap_rows, probes=work.probes, ks=ks), (tuple(ks),))
    blocks = {block.name: block.layers for block in setting.layout.blocks}
    matched = random_layers(model.linear_layers, [len(layers) for layers in blocks.values()])
    yield work.measured("linear", work.probes, plan.linear(model.linear_layers, blocks, matched))
    if max(len(probe.answer) for probe in work.probes) > 1:
        few = headline_arms(model.heads, fixed)
        read = partial(decoded_rows, probes=work.probes, arms=few, boundary=work.boundary)
        yield work.reading("decoded", work.probes, read, (few, work.boundary))


class _Work:
    """Probes of a setting, and readings of them."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.boundary = setting, setting.options.get("boundary") or BOUNDARIES[0]
        self.probes, self.others = setting.task.probes(setting.n, max(8, setting.n // 2), setting.seed, setting.text)

    def measured(self, part: str, probes: Sequence[Probe], arms: Sequence[Arm]) -> Reading:
        read = partial(measured, probes=probes, arms=arms, boundary=self.boundary)
        tokens = tokens_of(self.setting.model, probes, arms, self.boundary)
        return self.reading(part, probes, read, (tuple(arms), self.boundary), tokens)

    def reading(self, part: str, probes: Sequence[Probe], read: Any, settings: tuple = (), tokens: int = -1) -> Reading:
        split = "confirmation" if probes is self.probes else "discovery"
        labels = {"experiment": NAME, **self.setting.labels, "split": split, "part": part, "boundary": self.boundary}
        answers = tuple((probe.answer, tuple(probe.labels.items())) for probe in probes)
        prompts = [probe.prompt for probe in probes]
        return Reading(part, prompts, lambda engine, _: read(engine), labels, (*settings, answers), tokens)


def rankings(found: pd.DataFrame, silenced: pd.DataFrame, every: Sequence[Head]) -> dict[str, list[Head]]:
    """Orders of all heads, the best first: by sharpness, needle mass, retrieval score (among equal ones by mass), by what silencing a head alone
    costs (log-probability of the answer, both phases), the last one's inverse, and five at random."""
    scores = {name: found.groupby(["layer", "head"])[name].mean() for name in ("sharpness", "mass", "retrieval")}
    scores["drop"] = drop_of(silenced, "both")
    mass = scores["mass"]
    out = {
        name: sorted(every, key=lambda head, s=score: (-s[head], -mass[head], head)) for name, score in scores.items()
    }
    out["inverse"] = out["drop"][::-1]
    return out | {f"random {seed}": random.Random(f"heads {seed}").sample(every, len(every)) for seed in SEEDS}


def drop_of(silenced: pd.DataFrame, phase: str, column: str = "log_prob") -> pd.Series:
    """What silencing each head alone costs, on average over probes: indexed by (layer, head)."""
    before = select(silenced, phase="")[column].astype(float).mean()
    own = select(silenced, phase=phase)
    own = own.assign(layer=own["layer"].astype(int), head=own["head"].astype(int), value=own[column].astype(float))
    return before - own.groupby(["layer", "head"])["value"].mean()


def best_per_layer(found: pd.DataFrame, k: int) -> tuple[Head, ...]:
    """The k heads of each layer with the highest mean retrieval score, then needle mass."""
    mean = found.groupby(["layer", "head"])[["retrieval", "mass"]].mean().reset_index()
    order = mean.sort_values(["layer", "retrieval", "mass", "head"], ascending=[True, False, False, True])
    return tuple((int(layer), int(head)) for layer, head in order.groupby("layer").head(k)[["layer", "head"]].values)


def random_layers(layers: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Five sets of linear layers as large as the largest block, without that which all layers would be."""
    size = min(max(sizes), len(layers) - 1)
    return [tuple(sorted(random.Random(f"layers {seed}").sample(list(layers), size))) for seed in SEEDS] if size else []


def headline_arms(heads: int, fixed: Mapping[int, tuple[Head, ...]]) -> tuple[Arm, ...]:
    """Intact, none, and the headline's k by each rule, at generation."""
    k = headline(heads)
    rules = {
        "none": Edit(k=0),
        "sharp": Edit(k=k),
        "bottom": Edit(k=k, by="bottom"),
        "fixed": Edit(heads=fixed.get(k, ())),
    }
    rules |= {f"random {seed}": Edit(k=k, by="random", seed=seed) for seed in SEEDS}
    edited = [Arm("decoded", None, edit).labelled(phase="generation", by=by) for by, edit in rules.items()]
    return (Arm("decoded").labelled(phase="", by="intact"), *edited)


# -- conclusion -------------------------------------------------------------------------------------------------------
def conclude(rows: pd.DataFrame, setting: Setting) -> Conclusion:
    """The paper's headline, at generation: nothing with no heads, nearly all with the sharpest 15 %, and no rescue by a second statement.

    GONE and KEPT are shares of the intact accuracy, on needles that attention reaches. Undecided where the model does not do the task, where
    a layer has so few heads that the least number of them is more than MOST, and where random heads do as well as the sharpest.
    """
    rows = select(rows, experiment=NAME)
    found, rows = select(rows, part="heads"), select(rows, split="confirmation")
    outside, rows = select(rows, reach="outside"), rows[~rows["reach"].isin(["outside", "edge"])]
    plain = select(rows, part="sweep", by="intact")
    if plain.empty:
        return Conclusion("undecided", "no needle is within the attention window: pass shorter --lengths")
    if problem := incapable(plain, "right"):
        return Conclusion(problem.status, f"INVALID task: {problem.why}")
    heads = setting.model.heads
    k, figures = headline(heads), {"k": f"{headline(heads)} of {heads} heads a layer ({headline(heads) / heads:.0%})"}
    if len(outside):
        own = select(outside, part="sweep", by="intact")
        figures["outside the window"] = f"{own['pair'].nunique()} probes, intact {estimate(own['right'], own['pair'])}"
    shares = {name: relative(rows, name, k) for name in ("none", "sharp", "bottom", "random", "fixed")}
    figures |= {f"relative to intact, {name}": str(share) for name, share in shares.items()}
    figures |= {f"{name}, {phase}": str(at(rows, name, k, phase)) for name in shares for phase in plan.PHASES}
    again = at(rows, "none", k, "generation", "twice")
    doubled = estimate(*_of(select(rows, part="twice", by="intact")))
    figures["stated twice"] = f"no heads {again}, intact {doubled}"
    still = select(rows, part="linear", linear="zero", block="all", phase="generation")
    linear = estimate(*_of(still))
    figures["linear mixers zeroed at generation"] = str(linear)
    for by, own in select(rows, part="decoded").groupby("by", sort=False):
        figures[f"greedy decoding contains the needle, {by}"] = str(estimate(own["contains"], own["pair"]))
    if len(found):
        scores = found.groupby(["layer", "head"])["retrieval"].mean()
        layer, head = map(int, scores.idxmax())
        figures["highest retrieval score"] = f"{scores.max():.2f} (L{layer}H{head})"
    over = ahead(rows, k)
    figures["sharpest minus random"] = str(over)
    why = (
        f"at generation, of the intact accuracy {estimate(*_of(plain))}: no heads {shares['none']}, the sharpest {k} of {heads} {shares['sharp']}, "
        f"random {shares['random']}, bottom {shares['bottom']}, fixed list {shares['fixed']}; stated twice, no heads {again}; "
        f"linear mixers zeroed instead {linear}, so that this alone does not say which kind does the work"
    )
    if setting.options.get("boundary") == "hf" and rows["answer_tokens"].max() == 1:
        return Conclusion("undecided", f"boundary hf: an answer of one token is said by the prefill; {why}", figures)
    against = [shares["none"].low > GONE, shares["sharp"].high < KEPT, doubled.n > 0 and again.low > GONE]
    if any(against):
        return Conclusion("does not hold", why, figures)
    open_ = {
        f"{k} of {heads} heads are {k / heads:.0%} of a layer's, not {SHARE:.0%}": k / heads > MOST,
        "random heads do as well as the sharpest": not over.low > 0,
        "the intervals are too wide": not (
            shares["none"].high <= GONE and shares["sharp"].low >= KEPT and (doubled.n == 0 or again.high <= GONE)
        ),
    }
    reasons = [reason for reason, is_so in open_.items() if is_so]
    return Conclusion("undecided" if reasons else "holds", "; ".join([*reasons, why]), figures)


def at(rows: pd.DataFrame, by: str, k: int, phase: str, part: str = "sweep") -> Estimate:
    """Accuracy with the k heads of a rule, or none; random: all seeds together."""
    return estimate(*_of(chosen(rows, by, k, phase, part)))


def chosen(rows: pd.DataFrame, by: str, k: int, phase: str, part: str = "sweep") -> pd.DataFrame:
    """The rows of a rule, of its k and phase; for k = all heads those of the intact model, for none of them those without any."""
    own = select(rows, part=part)
    if by == "none" or k == 0:
        return select(own, k=0, phase=phase)
    own = select(own, k=k, phase=phase)
    return own[own["by"].str.startswith("random")] if by == "random" else select(own, by=by)


def relative(rows: pd.DataFrame, by: str, k: int, phase: str = "generation") -> Estimate:
    """Accuracy over the intact model's, by pair."""
    own, intact = chosen(rows, by, k, phase), select(rows, part="sweep", by="intact")
    value = ratio(per_pair(own, "right"), per_pair(intact, "right"))
    if own.empty or value.low < value.high:
        return value
    bounds = estimate(*_of(own))  # all pairs agree: Wilson's bound stands in
    return Estimate(value.value, value.n, bounds.low, bounds.high)


def ahead(rows: pd.DataFrame, k: int, phase: str = "generation") -> Estimate:
    """Accuracy with the sharpest k heads minus that with random ones."""
    sharp, drawn = (chosen(rows, by, k, phase) for by in ("sharp", "random"))
    return difference(per_pair(sharp, "right"), per_pair(drawn, "right")) if len(sharp) and len(drawn) else NOTHING


def _of(rows: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    if rows.empty:
        return pd.Series(dtype=float), pd.Series(dtype=float)
    return rows["right"], rows["pair"]
