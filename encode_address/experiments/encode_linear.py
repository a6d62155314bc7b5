"""Encode as a linear projection (paper section 3.6): is what the Encode block does a linear map of each token?

With h_in(p) the residual stream that enters the first layer of a block at position p, (d_model,), and h_out(p) what leaves its last:

    layers     h_out := h_in + M(h_in), M fitted to h_out - h_in; mixers *and* MLPs are replaced
    mixers     m^L := M_L(x^L) for each layer L of the block, x^L what enters its mixer; MLPs stay

M(x) = (x - mean_x) W + mean_y is a ridge map (`encode_address.maps`), applied to each position by itself, at all of them; everything after is
recomputed. It is fitted on dictionaries of other words than are asked, and on text. Arms, for the Encode block and every other:

    linear      the map                          mean       the constant mean_y
    text only   the map, fitted on text alone    shuffled   the map, fitted on pairs that do not belong together
                                                 zeroed     mixers := 0

A map that never saw the template's tokens has to guess there: "text only" shows what that costs. If Encode did more than project each token,
retrieval would be lost under "linear" as under "mean"; if any block could be replaced so, the Address would be too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from encode_address.experiments import baseline
from encode_address.experiments.base import Conclusion, Setting, incapable, swap_cell
from encode_address.experiments.removal import FORMS, Unit, blocks
from encode_address.metrics import accuracy, select
from encode_address.rule import REMOVAL_DROP
from encode_address.run.cells import Cell
from encode_address.run.projection import UNITS, Projection
from encode_address.stats import Estimate, difference, per_pair
from encode_address.tasks import Prompt, Swap, dictionary

SUMMARY = "encode-linear: does retrieval survive when a block is replaced by a linear map of each token?"
PAPER, N, QUICK_N = "3.6", 200, 24
NEEDS_CIRCUIT, ADAPTIVE = True, False
FIT_PER_PAIR = 7.5  # the paper: 1500 dictionaries for the fit, 200 for the test
LINEAR, TEXT_ONLY, MEAN, SHUFFLED, ZEROED = ARMS = ("linear", "text only", "mean", "shuffled", "zeroed")
KEPT = 0.8  # of the intact accuracy: the map does the block's work


def fit_prompts(setting: Setting) -> tuple[Prompt, ...]:
    """Dictionaries of words that the test does not use: the other pool's, less what the pools share."""
    task = setting.task
    others = [pool for pool in task.pools if pool != task.pool]
    fit = dictionary(setting.model, setting.variant, setting.text, others[0] if others else task.pool)
    fit.keys = [key for key in fit.keys if key not in task.keys] or fit.keys
    count = round(setting.n * FIT_PER_PAIR)
    return tuple(swap.clean for swap in fit.swaps(count, setting.seed + 1))


def arms(layers: tuple[int, ...], task: Sequence[Prompt], text: Sequence[Prompt]) -> dict[tuple[str, str], Projection]:
    """(arm, unit) -> what stands in for a block's layers."""
    both = (*task, *text)
    out = {}
    for unit in UNITS:
        for arm, kind in ((LINEAR, "ridge"), (MEAN, "mean"), (SHUFFLED, "shuffled")):
            out[arm, unit] = Projection(layers, unit, both, kind)
        out[TEXT_ONLY, unit] = Projection(layers, unit, tuple(text))
    return out


def cells(
    swaps: Sequence[Swap],
    units: Sequence[Unit],
    fits: Mapping[str, Mapping[tuple[str, str], Projection]],
    labels: Mapping[str, Any],
) -> list[Cell]:
    """Both forms of every pair, under every arm of every block."""
    out = []
    for name, layers in units:
        for (arm, unit), projection in fits[name].items():
            given = {"experiment": "encode-linear", **labels, "block": name, "arm": arm, "unit": unit}
            out += [
                swap_cell("replace", swap, form, given, layers=layers, map=projection)
                for swap in swaps
                for form in FORMS
            ]
        given = {"experiment": "encode-linear", **labels, "block": name, "arm": ZEROED, "unit": "mixers"}
        out += [swap_cell("remove", swap, form, given, layers=layers) for swap in swaps for form in FORMS]
    return out


def text_cells(
    chunks: Sequence[Prompt],
    units: Sequence[Unit],
    fits: Mapping[str, Mapping[tuple[str, str], Projection]],
    labels: Mapping[str, Any],
) -> list[Cell]:
    """The loss on text chunks, intact and under every arm of every block."""
    shared = {"experiment": "encode-linear-text", "position": "all", **labels}
    out = [Cell("none", chunk, text=True, labels={**shared, "pair": i}) for i, chunk in enumerate(chunks)]
    for name, layers in units:
        made = [("replace", arm, unit, projection) for (arm, unit), projection in fits[name].items()]
        for verb, arm, unit, projection in [*made, ("remove", ZEROED, "mixers", None)]:
            for i, chunk in enumerate(chunks):
                given = {**shared, "block": name, "arm": arm, "unit": unit, "pair": i}
                out.append(Cell(verb, chunk, layers=layers, map=projection, text=True, labels=given))
    return out


def steps(setting: Setting) -> Iterator[list[Cell]]:
    """Everything at once: the maps are fitted when a cell first needs one."""
    model, text = setting.model, setting.text
    units = blocks(setting.layout)
    lines = text.chunks(model.tokenizer, "train", n=200)
    task = fit_prompts(setting)
    fits = {name: arms(layers, task, lines) for name, layers in units}
    labels = {**setting.labels, "split": "confirmation"}
    swaps = setting.task.swaps(setting.n, setting.seed)
    chunks = text.chunks(model.tokenizer, "test", n=8 if not text.lines else text.count)
    yield (
        baseline.cells(swaps, (), labels) + cells(swaps, units, fits, labels) + text_cells(chunks, units, fits, labels)
    )


def kept(rows: pd.DataFrame, block: str, arm: str, unit: str) -> Estimate:
    """Accuracy under an arm."""
    return accuracy(select(rows, experiment="encode-linear", block=block, arm=arm, unit=unit))


def perplexity_ratio(rows: pd.DataFrame, block: str, arm: str, unit: str) -> Estimate:
    """Perplexity under an arm over the intact model's, with an interval over chunks."""
    text = select(rows, experiment="encode-linear-text")
    plain, changed = select(text, intervention="none"), select(text, block=block, arm=arm, unit=unit)
    more = difference(per_pair(changed, "loss"), per_pair(plain, "loss"), unit=False)
    return more.exp()


def conclude(rows: pd.DataFrame, setting: Setting) -> Conclusion:
    """Encode's whole layers must be replaceable (at most .2 of accuracy lost, upper bound), and not by a constant or a
    shuffled map. How other blocks fare is said beside it and decides nothing."""
    intact = select(rows, experiment="baseline")
    if problem := incapable(intact, "correct"):
        return problem
    circuit = setting.circuit
    names = [block.name for block in setting.layout.blocks]
    figures = {
        f"{name} {arm} ({unit})": f"accuracy {kept(rows, name, arm, unit)}, perplexity x {perplexity_ratio(rows, name, arm, unit).value:.3g}"
        for name in names
        for arm in ARMS
        for unit in UNITS
        if (arm, unit) != (ZEROED, "layers")
    }
    if not circuit or not circuit.encode:
        return Conclusion("undecided", "`find` names no Encode here", figures)
    encode = circuit.encode[0]
    parts = [f"{unit}: linear {figures[f'{encode} {LINEAR} ({unit})']}, mean {kept(rows, encode, MEAN, unit)}, fitted on text only {kept(rows, encode, TEXT_ONLY, unit)}" for unit in UNITS]  # fmt: skip
    others = ", ".join(f"{name} {kept(rows, name, LINEAR, 'layers')}" for name in names if name != encode)
    why = f"{encode} as a map of each token - {'; '.join(parts)}; other blocks so replaced (layers): {others or 'none'}"
    linear = select(rows, experiment="encode-linear", block=encode, arm=LINEAR, unit="layers")
    loss = difference(per_pair(intact, "correct"), per_pair(linear, "correct"))
    broken = all(kept(rows, encode, arm, "layers").high < REMOVAL_DROP for arm in (MEAN, SHUFFLED))
    if loss.high <= 1 - KEPT:
        if broken:
            return Conclusion("holds", why, figures)
        return Conclusion("does not hold", f"a constant does as well: {why}", figures)
    return Conclusion("does not hold" if loss.low > 1 - KEPT else "undecided", why, figures)
