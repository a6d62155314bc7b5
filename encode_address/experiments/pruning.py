"""Pruning (paper section 3.1): at which layer does retrieval appear, and at which knowledge of text?

The model stops after layer L: the layers above do not run, the final norm and the head read h^(L+1), the residual stream that
leaves layer L, (tokens, d_model). On the dictionary task: *choice accuracy*, the answer has the highest logit among the
dictionary's own values (chance 1/N, N of this variant), and full-vocabulary accuracy beside it. On text: the language-model score

    (ln V - loss(L)) / (ln V - loss(last)),   V words in the vocabulary, loss in nats per token: 0 at chance, 1 for the full model.

Normalised retrieval is (x(L) - chance) / (x(last) - chance), not clipped; over variants, the mean of these. `normalisation="paper"` is the
published one: x(L) averaged over variants first, chance 1/8 for all of them, negative values cut to 0. With `knowledge`, six question
sets are asked too (see `knowledge`), and stand where the language-model score stands otherwise.

The *jump* is the largest increment of choice accuracy from one layer to the next, paired by prompt pair; it is "none" unless its lower
bound reaches .2. If the readers looked nothing up, retrieval would rise with the language-model score, and not at their layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from encode_address import knowledge
from encode_address.experiments.base import Conclusion, Setting, swap_cell
from encode_address.metrics import select
from encode_address.run.cells import Cell
from encode_address.run.reading import Reading
from encode_address.stats import Estimate, difference, estimate, per_pair
from encode_address.tasks import Prompt, Swap

SUMMARY = "pruning: at which layer the model, stopped there, begins to retrieve, and what it knows of text by then"
PAPER, N, QUICK_N = "3.1", 100, 24
NEEDS_CIRCUIT, ADAPTIVE = True, False
CIRCUIT_OF = "chat8"  # whose readers the jump is held against, in every variant
VARIANTS = ("chat8", "chat16", "list8", "rev8", "long512")
OPTIONS = {"knowledge": (False, True), "normalisation": ("own", "paper")}
JUMP_LOW = 0.2


def cells(swaps: Sequence[Swap], layers: Sequence[int], labels: Mapping[str, Any] | None = None) -> list[Cell]:
    """Both forms of every pair, the model stopped after each layer: one forward per prompt serves all of them."""
    shared = {"experiment": "pruning", **(labels or {})}
    return [
        swap_cell("truncate", swap, form, {**shared, "last": layer}, layers=(layer,))
        for layer in layers
        for swap in swaps
        for form in ("clean", "corrupted")
    ]


def text_cells(chunks: Sequence[Prompt], layers: Sequence[int], labels: Mapping[str, Any] | None = None) -> list[Cell]:
    """The loss on text chunks, the model stopped after each layer."""
    shared = {"experiment": "pruning-text", "position": "all", **(labels or {})}
    return [
        Cell("truncate", chunk, layers=(layer,), text=True, labels={**shared, "last": layer, "pair": i})
        for layer in layers
        for i, chunk in enumerate(chunks)
    ]


def steps(setting: Setting) -> Iterator[list[Cell]]:
    """Every layer, on the task and on text."""
    layers, text = range(len(setting.layout.kinds)), setting.text
    labels = {**setting.labels, "split": "confirmation"}
    swaps = setting.task.swaps(setting.n, setting.seed)
    chunks = text.chunks(setting.model.tokenizer, "test", n=text.count)
    yield cells(swaps, layers, labels) + text_cells(chunks, layers, {"split": "confirmation"})


def common(setting: Setting) -> list[Reading]:
    """The six question sets, if they are asked. Raises TaskError where the package or the questions are missing."""
    if not setting.options.get("knowledge"):
        return []
    return knowledge.readings(setting.model, labels={"split": "confirmation"})


def conclude(rows: pd.DataFrame, setting: Setting) -> Conclusion:
    """Retrieval must appear at a reader's layer, in one jump."""
    last = len(setting.layout.kinds) - 1
    whole, chance = choice(rows, last), 1 / setting.task.size
    if whole.low <= 2 * chance:
        return Conclusion("undecided", f"the full model chooses right in {whole} only (chance {chance:.3f})")
    layer, rise = jump(rows)
    measure, curve = beside(rows, len(setting.model.tokenizer), paper_of(setting.options))
    shares = dict(zip(curve["last"], curve["value"]))
    figures = _figures(rows, setting)
    if layer is None:
        return Conclusion("does not hold", f"no jump: the largest increment is {rise}", figures)
    before, after = choice(rows, layer - 1) if layer else None, choice(rows, layer)
    readers = sorted({head[0] for head in setting.circuit.readers}) if setting.circuit else []
    start = f"{before.value:.2f}" if before else f"chance {chance:.2f}"
    why = f"choice accuracy jumps at L{layer}, {start} to {after.value:.2f} (increment {rise}; {measure} there {shares.get(layer, math.nan):.2f})"
    if not readers:
        return Conclusion("undecided", f"{why}; `find` names no reader", figures)
    named = ", ".join(f"L{reader}" for reader in readers)
    if layer in readers:
        return Conclusion("holds", f"{why}, a reader's layer", figures)
    return Conclusion("does not hold", f"{why}, not at a reader's layer ({named})", figures)


def overall(rows: pd.DataFrame, setting: Setting) -> dict[str, Any]:
    """By last layer: retrieval over all variants and knowledge, as normalised; and how many questions knowledge is of."""
    paper = paper_of(setting.options)
    curves = {"retrieval": mean(rows, paper), "knowledge": known(rows, paper)}
    said = {
        name: {f"L{row.last}": f"{row.value:.2f} [{row.low:.2f}, {row.high:.2f}]" for row in curve.itertuples()}
        for name, curve in curves.items()
        if len(curve)
    }
    return said | ({"questions": questions(rows)} if "knowledge" in said else {})


def _figures(rows: pd.DataFrame, setting: Setting) -> dict[str, str]:
    """By last layer: choice accuracy, and what it and text are as normalised."""
    curve, scores = normalised(rows, paper_of(setting.options)), score(rows, len(setting.model.tokenizer))
    values = dict(zip(curve["last"], curve["value"]))
    parts = {"normalised": values, "text": scores}
    return {
        f"L{i}": ", ".join([str(choice(rows, i)), *(f"{name} {by[i]:.2f}" for name, by in parts.items() if i in by)])
        for i in range(len(setting.layout.kinds))
    }


def paper_of(options: Mapping[str, Any] | None) -> bool:
    """Whether these options ask for the published normalisation."""
    return (options or {}).get("normalisation") == "paper"


def choice(rows: pd.DataFrame, layer: int) -> Estimate:
    """Choice accuracy of the model that stops after a layer."""
    some = select(rows, experiment="pruning", last=layer)
    return estimate(some["choice_correct"], some["pair"])


def jump(rows: pd.DataFrame) -> tuple[int | None, Estimate]:
    """The layer at which choice accuracy rises most, if the rise is one (lower bound .2), and that paired increment."""
    task = select(rows, experiment="pruning")
    by_layer = {int(layer): per_pair(some, "choice_correct") for layer, some in task.groupby("last")}
    first = min(by_layer)
    chance = by_layer[first] * 0 + float(task["chance"].iloc[0])
    rises = {layer: difference(values, by_layer.get(layer - 1, chance)) for layer, values in by_layer.items()}
    best = max(rises, key=lambda layer: rises[layer].value)
    return best if rises[best].low >= JUMP_LOW else None, rises[best]


def score(rows: pd.DataFrame, words: int) -> dict[int, float]:
    """The language-model score by last layer; empty where no text was run."""
    text = select(rows, experiment="pruning-text")
    losses = {int(layer): float(some["loss"].mean()) for layer, some in text.groupby("last")}
    if not losses:
        return {}
    whole = math.log(words) - losses[max(losses)]
    return {layer: (math.log(words) - loss) / whole for layer, loss in losses.items()}


def normalised(rows: pd.DataFrame, paper: bool = False) -> pd.DataFrame:
    """Retrieval by variant and last layer: `value` with `low` and `high`, over this variant's chance and full model.
    Variants on which the full model is not above chance (lower bound) have none.

    `paper`: the published normalisation, chance 1/8 for every variant and negative values cut to 0.
    """
    out = []
    for variant, some in select(rows, experiment="pruning").groupby("variant", sort=False):
        layers = sorted(int(layer) for layer in some["last"].unique())
        chance = 1 / 8 if paper else float(some["chance"].iloc[0])
        full = choice(some, layers[-1])
        whole = full.value
        for layer in layers if full.low > chance else ():
            share = choice(some, layer)
            value, low, high = ((x - chance) / (whole - chance) for x in (share.value, share.low, share.high))
            cut = (max(0.0, x) if paper else x for x in (value, low, high))
            out.append((variant, layer, *cut))
    return pd.DataFrame(out, columns=["variant", "last", "value", "low", "high"])


def mean(rows: pd.DataFrame, paper: bool = False) -> pd.DataFrame:
    """Retrieval over all variants by last layer: `last`, `value`, `low`, `high`.

    The mean of `normalised`, and of its bounds: variants share dictionaries, so what is off in one may be off in all. `paper`: choice
    accuracy averaged over variants first, then normalised, as published; the bounds are over pairs.
    """
    if paper:
        return normalised(select(rows, experiment="pruning").assign(variant="mean"), paper=True).drop(columns="variant")
    return normalised(rows).groupby("last", as_index=False)[["value", "low", "high"]].mean()


def beside(rows: pd.DataFrame, words: int | None, paper: bool = False) -> tuple[str, pd.DataFrame]:
    """What else the model knows by last layer (`last`, `value`), and what that is: "knowledge", with `low` and `high`, where
    questions were asked and the full model is above chance in them, else "language-model score" with `words` in the vocabulary."""
    curve = known(rows, paper)
    if len(curve):
        return "knowledge", curve
    scores = score(rows, words) if words else {}
    return "language-model score", pd.DataFrame({"last": list(scores), "value": list(scores.values())})


def known(rows: pd.DataFrame, paper: bool = False) -> pd.DataFrame:
    """Knowledge by last layer, as `knowledge.normalised` gives it; empty where no questions were asked."""
    asked = select(rows, experiment="pruning-knowledge")
    return knowledge.normalised(asked, paper) if len(asked) else asked


def questions(rows: pd.DataFrame) -> int:
    """How many questions each truncated model was asked."""
    asked = select(rows, experiment="pruning-knowledge")
    return int(asked.drop_duplicates("task")["n"].sum())
