"""Removal (paper section 3.2): what does retrieval need?

m^L(x, p) is the output of layer L's mixer at position p of prompt x, (d_model,). For L in a unit, m^L(x, p) := 0, or := its
mean over a text ("mean"), or := that of another prompt of the same length ("resampled"), at all positions, or only at the
dictionary's, the question's or the last. MLPs, norms and the other layers are recomputed. Units are blocks, single layers,
single heads, and named sets; with mode "layer" the whole decoder layers pass on what enters them, MLPs and all. Where a block or a set
is removed at all positions, and in the intact model, the circuit's reader heads are watched: their attention from the last position
on the asked entry.

Zeroing the first layer wrecks any model, so removal alone proves nothing about retrieval: the loss on a text stands beside
every row. If the Address were not needed, its removal would cost what the removal of any other block costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from encode_address.experiments import baseline
from encode_address.experiments.base import Circuit, Conclusion, Heads, Setting, incapable, swap_cell
from encode_address.metrics import accuracy, attention, gap, heads, perplexity, select
from encode_address.models.layout import Layout
from encode_address.rule import REMOVAL_DROP
from encode_address.run.cells import Cell
from encode_address.stats import difference, estimate, per_pair
from encode_address.tasks import Prompt, Swap

SUMMARY = "removal: which blocks, layers and heads retrieval needs, and what their removal costs on text"
PAPER, N, QUICK_N = "3.2", 100, 24
NEEDS_CIRCUIT, ADAPTIVE = True, False
POSITIONS = ("all", "dictionary", "question", "final")
FORMS = ("clean", "corrupted")

Unit = tuple[str, tuple[int, ...]]


def blocks(layout: Layout) -> list[Unit]:
    """Every block, by name."""
    return [(block.name, block.layers) for block in layout.blocks]


def single_layers(layout: Layout) -> list[Unit]:
    """Every linear layer, as "L4"."""
    return [(f"L{layer}", (layer,)) for layer in layout.linear_layers]


def named_sets(layout: Layout, address: Sequence[str] = ()) -> list[Unit]:
    """All linear layers, all softmax layers, all linear layers but the first block, and all but the Address."""
    first, linear = layout.blocks[0].layers, layout.linear_layers
    kept = layout.layers_of("+".join(address)) if address else ()
    sets = {
        "all linear": linear,
        "all softmax": layout.softmax_layers,
        "all but first": tuple(layer for layer in linear if layer not in first),
        "all but Address": tuple(layer for layer in linear if layer not in kept) if kept else (),
    }
    return [(name, tuple(layers)) for name, layers in sets.items() if layers]


def cells(
    swaps: Sequence[Swap],
    units: Sequence[Unit],
    mode: str = "zero",
    watch: Heads = (),
    labels: Mapping[str, Any] | None = None,
    position: str = "all",
) -> list[Cell]:
    """Both forms of every pair with each unit removed; `mode` is "zero", "mean" or "layer", `position` one of POSITIONS."""
    shared = {"experiment": "removal", **(labels or {}), "position": position}
    return [
        swap_cell(
            "remove", swap, form, {**shared, "block": name}, layers=layers, mode=mode, watch=watch,
            where=places(swap.clean, position),
        )
        for name, layers in units
        for swap in swaps
        for form in FORMS
    ]  # fmt: skip


def places(prompt: Prompt, position: str) -> tuple[int, ...]:
    """The positions of that name; none for "all"."""
    if position == "all":
        return ()
    return tuple(range(prompt.span("question")[0])) if position == "dictionary" else prompt.span(position)


def resampled_cells(
    swaps: Sequence[Swap], units: Sequence[Unit], labels: Mapping[str, Any] | None = None
) -> list[Cell]:
    """Both forms of every pair with each unit's outputs taken from the next pair's prompt, at all positions."""
    shared = {"experiment": "removal", **(labels or {}), "donor": "resampled"}
    out = []
    for name, layers in units:
        for i, swap in enumerate(swaps):
            others = (*swaps[i + 1 :], *swaps[:i])
            other = next((o for o in others if len(o.clean) == len(swap.clean)), None)
            for form in FORMS if other else ():
                donor, everywhere = getattr(other, form), tuple(range(len(swap.clean)))
                given = {"layers": layers, "donor": donor, "where": everywhere, "source": everywhere, "mode": "outputs"}
                out.append(swap_cell("transplant", swap, form, {**shared, "block": name}, **given))
    return out


def head_cells(swaps: Sequence[Swap], model: Any, labels: Mapping[str, Any] | None = None) -> list[Cell]:
    """Both forms of every pair with each head of each mixer that has heads, softmax or linear, removed at all positions."""
    shared = {"experiment": "removal", **(labels or {})}
    return [
        swap_cell("heads", swap, form, {**shared, "block": f"L{layer}H{head}"}, layers=(layer,), head=head, mode="zero")
        for layer in model.headed
        for head in range(model.heads_of(layer))
        for swap in swaps
        for form in FORMS
    ]


def text_cells(
    chunks: Sequence[Prompt],
    units: Sequence[Unit],
    labels: Mapping[str, Any] | None = None,
    modes: Sequence[str] = ("zero", "mean"),
) -> list[Cell]:
    """The loss on text chunks, intact and with each unit removed."""
    shared = {"experiment": "text", "position": "all", **(labels or {})}
    out = [Cell("none", chunk, text=True, labels={**shared, "pair": i}) for i, chunk in enumerate(chunks)]
    for mode in modes:
        for name, layers in units:
            for i, chunk in enumerate(chunks):
                given = {**shared, "block": name, "pair": i}
                out.append(Cell("remove", chunk, layers=layers, mode=mode, text=True, labels=given))
    return out


def head_text_cells(chunks: Sequence[Prompt], model: Any, labels: Mapping[str, Any] | None = None) -> list[Cell]:
    """The loss on text chunks with each head removed."""
    shared = {"experiment": "text", "position": "all", **(labels or {})}
    return [
        Cell(
            "heads", chunk, layers=(layer,), head=head, text=True,
            labels={**shared, "block": f"L{layer}H{head}", "pair": i},
        )
        for layer in model.headed
        for head in range(model.heads_of(layer))
        for i, chunk in enumerate(chunks)
    ]  # fmt: skip


def steps(setting: Setting) -> Iterator[list[Cell]]:
    """Everything at once: nothing here depends on a result."""
    model, layout, text = setting.model, setting.layout, setting.text
    labels = {**setting.labels, "split": "confirmation"}
    swaps = setting.task.swaps(setting.n, setting.seed)
    circuit = setting.circuit or Circuit()
    units, sets, watch = blocks(layout), named_sets(layout, circuit.address), circuit.readers
    single = [(f"L{layer}", (layer,)) for layer in range(len(layout.kinds))]
    chunks = text.chunks(model.tokenizer, "test", n=text.count)
    plan = baseline.cells(swaps, watch, labels)
    for mode in ("zero", "mean"):
        plan += cells(swaps, units + sets, mode, watch, labels)
    plan += cells(swaps, units, "layer", (), labels) + cells(swaps, single, "zero", (), labels)
    for position in POSITIONS[1:]:
        plan += cells(swaps, units, "zero", (), labels, position)
    plan += resampled_cells(swaps, units, labels) + head_cells(swaps, model, labels)
    text_labels = {"split": "confirmation"}  # of no variant: all of them share the text
    plan += text_cells(chunks, units + sets, text_labels) + head_text_cells(chunks, model, text_labels)
    more = [*text_cells(chunks, single, text_labels, ("zero",)), *text_cells(chunks, units, text_labels, ("layer",))]
    yield plan + [cell for cell in more if cell.intervention != "none"]


def conclude(rows: pd.DataFrame, setting: Setting) -> Conclusion:
    """The Address must be needed (accuracy falls by half or more, lower bound), and not every block may be."""
    intact = select(rows, experiment="baseline")
    if problem := incapable(intact, "correct"):
        return problem
    text = select(rows, experiment="text")
    plain = perplexity(select(text, intervention="none")["loss"])
    figures: dict[str, Any] = {"intact": shares(intact)}
    said, needs = [], {}
    for block in setting.layout.blocks:
        removed = select(rows, experiment="removal", block=block.name, mode="zero", position="all")
        ratio = perplexity(select(text, block=block.name, mode="zero")["loss"]) / plain
        figures[block.name] = {**shares(removed), "perplexity": f"x {ratio:.3g}"}
        said.append(f"without {block.name} accuracy {accuracy(removed)}, perplexity x {ratio:.3g}")
        needs[block.name] = needed(intact, removed, "correct")
    return about_the_address("retrieval", needs, setting.circuit, "; ".join(said), figures)


def shares(rows: pd.DataFrame) -> dict[str, str]:
    """Accuracy, logit gap, and each watched head's attention on the asked entry, of the clean prompts as in the paper."""
    gaps, clean = gap(rows), select(rows, form="clean")
    seen = {f"attention of L{head[0]}H{head[1]}": attention(clean, head, "target") for head in heads(clean)}
    return {
        "accuracy": str(accuracy(rows)),
        "gap": str(estimate(gaps, gaps.index.to_series())),
        **{name: str(estimate(masses, clean["pair"])) for name, masses in seen.items()},
    }


def needed(intact: pd.DataFrame, removed: pd.DataFrame, column: str) -> bool | None:
    """Whether `column`, a share, falls by half or more without what was removed, paired; None: the interval does not say."""
    drop = difference(per_pair(intact, column), per_pair(removed, column))
    return True if drop.low >= REMOVAL_DROP else False if drop.high < REMOVAL_DROP else None


def about_the_address(
    task: str, needs: Mapping[str, bool | None], circuit: Circuit | None, why: str, figures: Mapping[str, Any]
) -> Conclusion:
    """Holds where `task` needs every block of the Address, does not where it needs none; `needs` is what `needed` says, by block."""
    if not (circuit and circuit.address):
        return Conclusion("undecided", f"no Address is known to ask about; {why}", figures)
    name, own = "+".join(circuit.address), [needs[block] for block in circuit.address]
    if all(own):
        return Conclusion("holds", f"{task} needs {name}: {why}", figures)
    if all(need is False for need in own):
        return Conclusion("does not hold", f"{task} survives without {name}: {why}", figures)
    return Conclusion("undecided", why, figures)
