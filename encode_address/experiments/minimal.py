"""The minimal hybrid (paper section 3.16): how few linear layers does retrieval need, and which?

A configuration is (cut, kept, removal). Layers above the cut do not run: the final norm and the head read what leaves it. Of the
linear layers up to the cut those not kept are constant: at every position p of prompt x the mixer's output, (d_model,), is

    m^L(x, p) := E[m^L] over the text's train part  ("mean"),  or 0  ("zero").

Softmax layers and all MLPs stay. Four parts, the first three on `dev` dictionaries (another seed, none shared with the test):

1. truncation    after each softmax layer and after the last; cut* is the first with choice accuracy >= .95 of the full model's.
2. single layers each linear layer alone removed (mean): accuracy, and perplexity on text, by which layers are ranked.
3. elimination   greedy, from all linear layers: drop the layer without which accuracy is highest (ties: the higher margin), until
                 the best falls below .9 of the intact model's. The greedy set is what is then left. Its first step is part 2. The
                 paper eliminates on its three formats together; here every variant has its own set, on its own dev.
4. named sets    all, none, Encode ("bind"), Address ("query"), both, all before the first reader, greedy; and of equal size k to
                 both and to greedy: those whose removal costs most perplexity, the first, the last, five random ones (drawn
                 without the set that they are compared with). Each at full depth and at cut*, mean and zero, on new dictionaries.

Perplexity has no discovery split; it ranks layers and never decides whether retrieval is kept. At cut* read the choice accuracy:
a truncated model has often not yet turned the value into a word. `kv20` (tasks.memory) scores the sets of part 4, but for the
random, first and last ones, at full depth with mean removal; a tokenizer that cannot write it is said in the conclusion.

Controls: all layers kept is the intact model, and a cut after the last layer changes nothing (self-test; the conclusion is refused
where it does). If any few layers would do, perplexity-ranked and random sets of size k would keep what the greedy set keeps; if
Encode and Address were all that is needed, keeping these two would be enough. The greedy set was chosen for accuracy and its rivals
were not: what it beats is other ways to choose, on dictionaries that none of them saw. An interval of random sets is over pairs; how
far the draws lie apart is said beside it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from encode_address.errors import TaskError
from encode_address.experiments.base import Conclusion, Setting, incapable, swap_cell
from encode_address.metrics import accuracy, perplexity, select
from encode_address.models.layout import Layout, layer_span
from encode_address.run.cells import Cell, Edit
from encode_address.stats import NOTHING, Estimate, estimate
from encode_address.tasks import Prompt, Swap
from encode_address.tasks.memory import Item, Memory

SUMMARY = "minimal hybrid: how few linear layers, and which, keep retrieval when the others give a constant"
PAPER, N, QUICK_N = "3.16", 100, 24
NEEDS_CIRCUIT, ADAPTIVE = True, True
LEAST_DEV = 20  # pairs
CUT_SHARE, STOP_SHARE = 0.95, 0.9  # of the intact model's accuracy on dev
KEPT_SHARE = 0.8  # of the intact model's accuracy on the test: what "keeps the task" means
DRAWS = 5
MODES = ("mean", "zero")
SELF_TEST = 0.1  # of the logits' spread: more than rounding, in any precision
BOTH = "Encode+Address"
Layers = tuple[int, ...]


@dataclass(frozen=True)
class Configuration:
    """What is left of a model of `layout`: the layers up to `cut`, and of the linear ones those `kept` (all are below)."""

    layout: Layout
    kept: Layers
    cut: int
    removal: str = "mean"

    @property
    def removed(self) -> Layers:
        return tuple(layer for layer in self.layout.linear_layers if layer <= self.cut and layer not in self.kept)

    @property
    def whole(self) -> bool:
        return self.cut == last_layer(self.layout)

    @property
    def labels(self) -> dict[str, Any]:
        cut = "full" if self.whole else f"L{self.cut}"
        return {"kept_layers": said(self.kept), "k": len(self.kept), "removal": self.removal, "cut": cut}


@dataclass(frozen=True)
class Step:
    """A step of the elimination: the best set of its size, what it answers on dev, and whether that was enough."""

    kept: Layers
    dev: Estimate
    accepted: bool


def last_layer(layout: Layout) -> int:
    return len(layout.kinds) - 1


def said(layers: Sequence[int]) -> str:
    """Layers as the table has them: "0,4,5", "none"."""
    return ",".join(map(str, layers)) or "none"


def layers_in(text: str) -> Layers:
    """The reverse of `said`."""
    return () if text == "none" else tuple(map(int, text.split(",")))


# -- cells --------------------------------------------------------------------------------------------------------
def configured(layout: Layout, kept: Sequence[int], cut: int | None = None, removal: str = "mean") -> Configuration:
    """A configuration; of `kept` only what lies below the cut (default: full depth) is left."""
    cut = last_layer(layout) if cut is None else cut
    return Configuration(layout, tuple(layer for layer in sorted(kept) if layer <= cut), cut, removal)


def task_cells(swaps: Sequence[Swap], left: Configuration, labels: Mapping[str, Any], stop: bool = False) -> list[Cell]:
    """Both forms of every pair in a configuration; `stop`: read the answer at the cut even if that is the last layer."""
    gone = left.removed
    if stop or not left.whole:
        also = (Edit("remove", gone, mode=left.removal),) if gone else ()
        verb, how = "truncate", {"layers": (left.cut,), "also": also}
    else:
        verb, how = ("remove", {"layers": gone, "mode": left.removal}) if gone else ("none", {})
    shared = {"experiment": "minimal", **labels, **left.labels}
    return [swap_cell(verb, swap, form, shared, **how) for swap in swaps for form in ("clean", "corrupted")]


def text_cells(texts: Sequence[Prompt], left: Configuration, labels: Mapping[str, Any]) -> list[Cell]:
    """The loss on texts in a configuration. The layers above the cut pass on what enters them, which is the same."""
    edits = [Edit("remove", left.removed, mode=left.removal)] if left.removed else []
    if not left.whole:
        edits.append(Edit("remove", tuple(range(left.cut + 1, len(left.layout.kinds))), mode="layer"))
    shared = {"experiment": "minimal-text", "position": "all", "split": "confirmation", **labels, **left.labels}
    return [
        Cell("none", text, also=tuple(edits), text=True, labels={**shared, "pair": i}) for i, text in enumerate(texts)
    ]


def memory_cells(items: Sequence[Item], left: Configuration, name: str) -> list[Cell]:
    """The loss on every continuation of every item of the KV-memory task `name`, in a configuration."""
    out = []
    for item in items:
        labels = {"experiment": f"minimal-{name}", "target": item.target, "chance": 1 / len(item.continued)}
        for candidate, cell in enumerate(text_cells(item.continued, left, labels)):
            own = {"pair": item.pair, "candidate": candidate, "tokens": len(cell.host)}
            out.append(replace(cell, labels={**cell.labels, **own}))
    return out


def _distinct(configurations: Sequence[Configuration]) -> list[Configuration]:
    return list(dict.fromkeys(configurations))


# -- sets ---------------------------------------------------------------------------------------------------------
def named_sets(setting: Setting, greedy: Layers, ranked: Sequence[int]) -> list[tuple[str, int, Layers]]:
    """(name, draw, layers) of every set of part 4. `ranked`: linear layers, the one that perplexity needs most first."""
    layout, circuit, linear = setting.layout, setting.circuit, setting.layout.linear_layers
    sets = [("all", 0, linear), ("none", 0, ())]
    parts = {"Encode": circuit.encode, "Address": circuit.address} if circuit else {}
    found = {name: layout.layers_of("+".join(blocks)) for name, blocks in parts.items() if blocks}
    if len(found) == len(parts) == 2:
        found[BOTH] = tuple(sorted({*found["Encode"], *found["Address"]}))
    if circuit and circuit.readers:
        first = min(layer for layer, _ in circuit.readers)
        found["pre-reader"] = tuple(layer for layer in linear if layer < first)
    sets += [(name, 0, layers) for name, layers in found.items()] + [("greedy", 0, greedy)]
    compared = [greedy, *([found[BOTH]] if BOTH in found else [])]
    for k in sorted({len(layers) for layers in compared} - {0, len(linear)}):
        sets += [
            (f"PPL top-{k}", 0, tuple(sorted(ranked[:k]))), (f"first-{k}", 0, linear[:k]), (f"last-{k}", 0, linear[-k:])
        ]  # fmt: skip
        sets += [(f"random-{k}", i, drawn) for i, drawn in enumerate(draws(linear, k, compared, setting.seed), 1)]
    return sets


def draws(linear: Layers, k: int, but: Sequence[Layers], seed: int) -> list[Layers]:
    """Distinct random sets of k layers that are none of `but`: DRAWS of them, or as many as there are."""
    rng, found, possible = random.Random(f"minimal {k} {seed}"), [], math.comb(len(linear), k)
    possible -= sum(len(layers) == k for layers in {*but})
    while len(found) < min(DRAWS, possible):
        drawn = tuple(sorted(rng.sample(linear, k)))
        if drawn not in found and drawn not in but:
            found.append(drawn)
    return found


# -- reading the table ----------------------------------------------------------------------------------------------
def truncations(rows: pd.DataFrame) -> dict[int, Estimate]:
    """Choice accuracy on dev by the layer after which the model stops."""
    some = select(rows, experiment="minimal", arm="truncation")
    return {int(at): estimate(r["choice_correct"], r["pair"]) for at, r in some.groupby("last")}


def cut_star(rows: pd.DataFrame) -> int:
    """The first layer after which choice accuracy on dev is .95 of that after the last."""
    shares = truncations(rows)
    return min(layer for layer, share in shares.items() if share.value >= CUT_SHARE * shares[max(shares)].value)


def elimination(rows: pd.DataFrame) -> list[Step]:
    """The steps of the elimination that the dev rows hold: all linear layers first, the last one possibly refused."""
    some = select(rows, experiment="minimal", arm="elimination")
    path: list[Step] = []
    for _, tried in sorted(some.groupby("k"), reverse=True):
        means = tried.groupby("kept_layers", sort=False)[["correct", "margin"]].mean()
        best = max(means.index, key=lambda kept: tuple(means.loc[kept]))
        dev = accuracy(select(tried, kept_layers=best))
        enough = not path or dev.value >= STOP_SHARE * path[0].dev.value > 0
        path.append(Step(layers_in(best), dev, enough))
    return path


def text_perplexity(rows: pd.DataFrame, kept: str, removal: str = "mean", cut: str = "full") -> float:
    """Perplexity on the text in a configuration; NaN where it was not run."""
    some = select(rows, experiment="minimal-text", kept_layers=kept, removal=removal, cut=cut)
    return perplexity(some["loss"]) if len(some) else math.nan


def ranking(rows: pd.DataFrame, linear: Layers) -> list[int]:
    """Linear layers, the one whose removal alone costs most perplexity first."""
    without = {layer: said([other for other in linear if other != layer]) for layer in linear}
    return sorted(linear, key=lambda layer: -text_perplexity(rows, without[layer]))


def memory_accuracy(rows: pd.DataFrame, kept: str, name: str = "kv20") -> Estimate:
    """The share of items of the KV-memory task that a kept set (full depth, mean) answers right."""
    some = select(rows, experiment=f"minimal-{name}", kept_layers=kept)
    if some.empty:
        return NOTHING
    best = some.loc[(some["loss"] * (some["tokens"] - 1)).groupby(some["pair"]).idxmin()]
    return estimate(best["candidate"] == best["target"], best["pair"])


def draw_range(rows: pd.DataFrame) -> str:
    """The accuracies of the lowest and the highest of several draws, "0.00 to 0.50"; "" for a single set."""
    each = [accuracy(some).value for _, some in rows.groupby("draw")]
    return f"{min(each):.2f} to {max(each):.2f}" if len(each) > 1 else ""


def self_test(rows: pd.DataFrame) -> float:
    """How far a cut after the last layer moves the margin, in spreads of the logits: the largest difference on dev."""
    last = select(rows, arm="truncation", last=max(truncations(rows)))
    whole = select(rows, arm="elimination", intervention="none")
    both = last.merge(whole, on=["pair", "form"], suffixes=("", "_whole"))
    return float(((both["margin"] - both["margin_whole"]).abs() / both["spread_whole"]).max())


# -- the experiment -------------------------------------------------------------------------------------------------
def steps(setting: Setting) -> Iterator[list[Cell]]:
    """Truncation and single layers; then the elimination, a step at a time; then the named sets on new dictionaries."""
    layout, linear, text = setting.layout, setting.layout.linear_layers, setting.text
    seen: set = set()
    dev = setting.task.swaps(max(LEAST_DEV, setting.n // 2), setting.seed + 1, seen)
    test = setting.task.swaps(setting.n, setting.seed, seen)
    texts = text.chunks(setting.model.tokenizer, "test", n=text.count)
    labels = {**setting.labels, "split": "dev"}

    def tried(kept: Layers) -> list[Configuration]:
        return [configured(layout, [other for other in kept if other != layer]) for layer in kept]

    def on_dev(configurations: Sequence[Configuration]) -> list[Cell]:
        return [c for left in configurations for c in task_cells(dev, left, {**labels, "arm": "elimination"})]

    start = [configured(layout, linear), *tried(linear)]
    plan = on_dev(start) + [cell for left in start for cell in text_cells(texts, left, {})]
    for layer in sorted({*layout.softmax_layers, last_layer(layout)}):
        given = {**labels, "arm": "truncation", "last": layer}
        plan += task_cells(dev, configured(layout, linear, layer), given, stop=True)
    first = rows = yield plan
    while (path := elimination(rows))[-1].accepted and path[-1].kept:
        rows = pd.concat([rows, (yield on_dev(tried(path[-1].kept)))], ignore_index=True)
    greedy = [step.kept for step in path if step.accepted][-1]

    sets = named_sets(setting, greedy, ranking(first, linear))
    cuts = sorted({cut_star(first), last_layer(layout)})
    labels = {**setting.labels, "split": "confirmation", "arm": "named"}
    plan, texted = [], [configured(layout, step.kept) for step in path]
    for cut in cuts:
        for removal in MODES:
            for name, draw, layers in sets:
                left = configured(layout, layers, cut, removal)
                plan += task_cells(test, left, {**labels, "kept_set": name, "draw": draw})
                texted.append(left)
    plan += [cell for left in _distinct(texted) for cell in text_cells(texts, left, {})]
    try:
        memory = Memory(setting.model.tokenizer)
    except TaskError:
        yield plan  # `conclude` says what this tokenizer lacks
        return
    items = memory.items(setting.n, setting.seed)
    scored = [configured(layout, layers) for name, _, layers in sets if _in_memory(name)]
    yield plan + [cell for left in _distinct(scored) for cell in memory_cells(items, left, memory.name)]


def _in_memory(name: str) -> bool:
    return not name.startswith(("random-", "first-", "last-"))


def conclude(rows: pd.DataFrame, setting: Setting) -> Conclusion:
    """The greedy set must keep the task (lower bound .8 of the intact accuracy), other sets of its size must not (upper)."""
    linear = setting.layout.linear_layers
    task = select(rows, experiment="minimal", arm="named", cut="full", removal="mean")
    intact, path, gap = select(task, kept_set="all"), elimination(rows), self_test(rows)
    kept = [step.kept for step in path if step.accepted][-1]
    share, k = {name: accuracy(some) for name, some in task.groupby("kept_set", sort=False)}, len(kept)
    figures = _figures(rows, setting, share, path, gap)
    if problem := incapable(intact, "correct"):
        return replace(problem, figures=figures)
    if not gap <= SELF_TEST:
        return Conclusion("undecided", f"a cut after the last layer moves the margin by {gap:.2g} spreads", figures)
    rivals = {name: share[name] for name in (f"PPL top-{k}", f"random-{k}") if name in share}
    greedy, needed, both = share["greedy"], KEPT_SHARE * share["all"].value, share.get(BOTH)
    why = (
        f"greedy on this variant's dev keeps {k} of {len(linear)} linear layers ({layer_span(kept) or 'none'}) and "
        f"{greedy} (intact {share['all']}); "
        + "; ".join(_with_draws(task, name, value) for name, value in rivals.items())
        + f"; {BOTH} (bind+query) alone "
        + (f"{figures['sets'][BOTH]['layers']}: {both}" if both else "unknown, `find` names no such circuit")
    )
    if isinstance(figures["kv20"], str):
        why += f"; {figures['kv20']}"
    if not k:
        return Conclusion("does not hold", f"retrieval needs no linear layer: {why}", figures)
    if k == len(linear):
        return Conclusion("does not hold", f"no linear layer can be removed: {why}", figures)
    if greedy.low >= needed and all(value.high < needed for value in rivals.values()):
        return Conclusion("holds", why, figures)
    if greedy.high < needed or any(value.low >= needed for value in rivals.values()):
        return Conclusion("does not hold", why, figures)
    return Conclusion("undecided", why, figures)


def _with_draws(task: pd.DataFrame, name: str, value: Estimate) -> str:
    own, greedy = select(task, kept_set=name), select(task, kept_set="greedy")
    apart, same = draw_range(own), set(own["kept_layers"]) == set(greedy["kept_layers"])
    return f"{name} {value}" + (f", draws {apart}" if apart else ", which is the same set" if same else "")


def _figures(
    rows: pd.DataFrame, setting: Setting, share: Mapping[str, Estimate], path: Sequence[Step], gap: float
) -> dict[str, Any]:
    named = select(rows, experiment="minimal", arm="named")
    sets = {name: _set_figures(rows, select(named, kept_set=name)) for name in share}
    memory = {kept: memory_accuracy(rows, kept) for kept in select(named, cut="full")["kept_layers"].unique()}
    scored = {layer_span(layers_in(kept)) or "none": str(value) for kept, value in memory.items() if value.n}
    cut = cut_star(rows)
    return {
        "cut": "full" if cut == last_layer(setting.layout) else f"L{cut}",
        "truncation": {f"L{layer}": str(value) for layer, value in truncations(rows).items()},
        "elimination": [
            f"{len(step.kept)} layers ({layer_span(step.kept) or 'none'}): {step.dev}, perplexity "
            f"{text_perplexity(rows, said(step.kept)):.3g}" + ("" if step.accepted else ", refused")
            for step in path
        ],
        "sets": sets,
        "self-test": f"a cut after the last layer moves the margin by {gap:.1g} spreads of the logits at most",
        "kv20": scored or _unwritten(setting.model.tokenizer),
    }


def _set_figures(rows: pd.DataFrame, some: pd.DataFrame) -> dict[str, Any]:
    """What there is to say of a named set: its layers, accuracies by cut and removal, perplexity at full depth."""
    layers = list(select(some, cut="full")["kept_layers"].unique())
    perplexities = "; ".join(f"{text_perplexity(rows, kept):.3g}" for kept in layers)
    out = {"layers": "; ".join(layer_span(layers_in(kept)) or "none" for kept in layers), "perplexity": perplexities}
    for (cut, removal), one in some.groupby(["cut", "removal"], sort=False):
        apart = draw_range(one)
        choice = estimate(one["choice_correct"], one["pair"])
        out[f"{cut}, {removal}"] = f"accuracy {accuracy(one)}, choice {choice}" + (f", draws {apart}" if apart else "")
    return out


def _unwritten(tokenizer: Any) -> str:
    """Why the KV-memory task was not run."""
    try:
        Memory(tokenizer)
    except TaskError as error:
        return str(error)
    return "kv20: not run"
