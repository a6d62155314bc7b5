"""The tables of the paper's appendix that look at the whole model: every model has its own (specification 5.2, 5.4, 5.9, 5.10)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd

from encode_address import metrics
from encode_address.experiments import minimal as hybrid
from encode_address.experiments import pruning as depth
from encode_address.experiments import state_rank as ranks
from encode_address.metrics import select
from encode_address.models.layout import layer_span
from encode_address.stats import Estimate
from encode_address.tables.circuit import CIRCUIT
from encode_address.tables.results import INTACT, Results, block_columns, gap, mean, perplexity, removed, untouched
from encode_address.tables.table import Line, Table, build, number

CRITICAL = 0.6  # of the intact gap: a layer whose removal leaves less is critical (section 3.2)
POSITIONS = {
    "final": "final", "question": "question", "question but its last token": "question-before", "dictionary": "dictionary", "all": "all",
}  # fmt: skip


def removal(models: Sequence[Results]) -> Table:
    """Every variant: the intact model, accuracy without each block, and which single layers and heads matter."""

    def lines(model: Results) -> Iterator[Line]:
        for variant in model.variants("removal", "removal-mmlu"):
            rows, mmlu = (
                model.of(variant, "baseline", "removal", "removal-mmlu"),
                variant in model.variants("removal-mmlu"),
            )
            intact, layers, head = untouched(rows, mmlu), _critical_layers(rows), _worst_head(rows)
            yield (variant,), {
                "n": str(intact["pair"].nunique()), INTACT: metrics.accuracy(intact), "gap": gap(intact),
                **{block: metrics.accuracy(removed(rows, block, mmlu)) for block in model.blocks},
                "critical layers": None if layers is None else ", ".join(layers) or "none", "worst head of L0": next(iter(head), None),
            }  # fmt: skip

    caption = (
        "Removal by variant: pairs, accuracy and logit gap of the intact model, and accuracy without each block. Critical layers: single layers without "
        f"which the gap is below {CRITICAL} of the intact one; worst head of the first layer: the one without which accuracy is lowest."
    )
    columns = ["n", INTACT, "gap", *block_columns(models), "critical layers", "worst head of L0"]
    return build("appendix-removal", caption, ("variant",), columns, models, lines)


def critical(models: Sequence[Results]) -> Table:
    """The figures of the layers and heads that `removal` names."""

    def lines(model: Results) -> Iterator[Line]:
        for variant in model.variants("removal"):
            rows = model.of(variant, "baseline", "removal")
            units = {"intact": untouched(rows), **(_critical_layers(rows) or {}), **_worst_head(rows)}
            for name, some in units.items():
                yield (variant, name), {"accuracy": metrics.accuracy(some), "gap": gap(some)}

    caption = (
        f"Critical layers, without which the logit gap is below {CRITICAL} of the intact one, and the head of the first layer without which accuracy is "
        "lowest: accuracy and gap when it alone is removed."
    )
    return build("critical", caption, ("variant", "removed"), ["accuracy", "gap"], models, lines)


def _critical_layers(rows: pd.DataFrame) -> dict[str, pd.DataFrame] | None:
    """The single layers, linear or softmax, whose removal leaves less than CRITICAL of the gap; None if none was removed."""
    names = {name for name in select(rows, experiment="removal", intervention="remove")["block"] if _single(name)}
    without = {name: removed(rows, name) for name in sorted(names, key=lambda name: int(name[1:]))}
    least = CRITICAL * gap(untouched(rows)).value
    return {name: some for name, some in without.items() if gap(some).value < least} if names else None


def _single(name: str) -> bool:
    return name.startswith("L") and name[1:].isdecimal()


def _worst_head(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The head of the first layer whose removal leaves least accuracy (ties: least gap); none if no head was removed."""
    rows = select(rows, experiment="removal", intervention="heads", mode="zero")
    heads = {name: some for name, some in rows.groupby("block") if name.startswith("L0H")}
    kept = {name: (metrics.accuracy(some).value, gap(some).value) for name, some in heads.items()}
    return {name: heads[name] for name in sorted(kept, key=lambda name: kept[name])[:1]}


def removal_mmlu(models: Sequence[Results]) -> Table:
    """Choice accuracy, accuracy and gap on MMLU, intact and without each block."""

    def lines(model: Results) -> Iterator[Line]:
        for variant in model.variants("removal-mmlu"):
            rows = model.of(variant, "removal-mmlu")
            by_unit = {INTACT: untouched(rows, True), **{block: removed(rows, block, True) for block in model.blocks}}
            yield (variant, "choice accuracy"), {unit: mean(some, "choice_correct") for unit, some in by_unit.items()}
            yield (variant, "accuracy"), {unit: metrics.accuracy(some) for unit, some in by_unit.items()}
            yield (variant, "gap"), {unit: gap(some) for unit, some in by_unit.items()}

    caption = (
        "Removal on MMLU, on pairs of which the intact model solves both forms (so that its own 1.00 is no finding): choice accuracy among the four letters, "
        "accuracy over the vocabulary, logit gap."
    )
    return build("removal-mmlu", caption, ("variant", "measure"), [INTACT, *block_columns(models)], models, lines)


def transplant(models: Sequence[Results]) -> Table:
    """The share redirected by each block's output, by the positions at which it is put."""

    def lines(model: Results) -> Iterator[Line]:
        for variant in model.variants("transplant"):
            rows = model.of(variant, "transplant")
            own = select(rows, intervention="transplant", donor="same-dictionary")
            by_unit = {
                "no patch": select(rows, intervention="none"),
                **{name: select(own, block=name) for name in model.blocks},
            }
            for unit, some in by_unit.items():
                yield (
                    (variant, unit),
                    {said: mean(select(some, position=at), "redirected") for said, at in POSITIONS.items()},
                )

    caption = (
        "Output transplant by position: the share of hosts that answer with the donor's entry. Over the dictionary it is an exact no-op, because host and "
        "donor share every token before the question, and over all positions the same as over the question."
    )
    return build("appendix-transplant", caption, ("variant", "block"), list(POSITIONS), models, lines)


def minimal(models: Sequence[Results]) -> Table:
    """Section 5.9: what is left of retrieval, memory and text with few linear layers."""

    def lines(model: Results) -> Iterator[Line]:
        for variant in model.variants("minimal"):
            rows = model.of(variant, "minimal", "minimal-text", "minimal-kv20")
            named = select(rows, experiment="minimal", arm="named")
            for (cut, gone, name), some in named.groupby(["cut", "removal", "kept_set"], sort=False):
                kept = list(some["kept_layers"].unique())
                cells = {"accuracy": metrics.accuracy(some), "choice accuracy": mean(some, "choice_correct")}
                if len(kept) == 1:
                    text = select(rows, experiment="minimal-text", kept_layers=kept[0], removal=gone, cut=cut)
                    cells["layers"] = layer_span(hybrid.layers_in(kept[0])) or "none"
                    cells["kv20"] = hybrid.memory_accuracy(rows, kept[0]) if (cut, gone) == ("full", "mean") else None
                    cells["perplexity"] = perplexity(text)
                else:
                    each = [hybrid.text_perplexity(rows, one, gone, cut) for one in kept]
                    cells |= {
                        "layers": f"{len(kept)} draws",
                        "perplexity": f"{number(min(each))} to {number(max(each))}",
                        "kv20": None,
                    }
                yield (variant, cut, gone, name), cells

    caption = (
        "The minimal hybrid: of the linear layers up to the cut only the kept ones run, the others give their mean over a text, or zero. Accuracy over the "
        "vocabulary and among the dictionary's values, accuracy on the KV-memory task (full depth and mean only), perplexity on text."
    )
    columns = ["layers", "accuracy", "choice accuracy", "kv20", "perplexity"]
    return build("minimal", caption, ("variant", "cut", "removal", "kept set"), columns, models, lines)


def state_rank(models: Sequence[Results]) -> Table:
    """Section 5.10: the effective rank of the recurrent states, by the role of their block."""

    def lines(model: Results) -> Iterator[Line]:
        if model.layout is None:
            return
        rows = model.of(None, "state-rank")
        sources = {variant: select(rows, source="task", variant=variant) for variant in model.variants("state-rank")}
        for source, some in {**sources, "text": select(rows, source="text")}.items():
            known = ranks.roles(model.layout, model.circuit(source))  # of the text: what all variants agree on
            some = some.assign(role=some["block"].map(known))
            for mark, own in some.groupby("mark", sort=False):
                said = mark if source != "text" else f"{mark} tokens"
                present = [role for role in ranks.ROLES if role in known.values()]
                yield (source, said), {role: ranks.median(ranks.by_head(own, role)) for role in present}

    caption = (
        "Effective rank of the recurrent states, the median over prompts and heads, by the role of the block in the variant's circuit (for text: in the circuit "
        "of all variants) and by the token after which the state is read."
    )
    return build("state-rank", caption, ("source", "read after"), list(ranks.ROLES), models, lines)


def pruning(models: Sequence[Results]) -> Table:
    """Section 5.9: what a model that stops after a layer answers, by variant."""
    variants = list(dict.fromkeys(variant for model in models for variant in model.variants("pruning")))

    def lines(model: Results) -> Iterator[Line]:
        own = {
            variant: select(model.table, experiment="pruning", variant=variant) for variant in model.variants("pruning")
        }
        curve = depth.normalised(model.table).set_index(["variant", "last"]) if own else None
        text = select(model.table, experiment="pruning-text")
        for layer in sorted({int(last) for rows in own.values() for last in rows["last"].unique()}):
            kind = model.layout.kinds[layer] if model.layout else ""
            shares = {variant: depth.choice(rows, layer) for variant, rows in own.items()}
            yield (
                (f"L{layer}", kind, "choice accuracy"),
                {**shares, "perplexity on text": perplexity(select(text, last=layer))},
            )
            yield (f"L{layer}", kind, "normalised"), {
                variant: Estimate(*(float(curve.loc[(variant, layer), of]) if of != "n" else share.n for of in ("value", "n", "low", "high")))
                if (variant, layer) in curve.index else None
                for variant, share in shares.items()
            }  # fmt: skip

    caption = (
        "Pruning: the model stops after a layer. Choice accuracy among the dictionary's values; normalised, 0 is the chance of the variant and 1 the full "
        "model; perplexity on text of the model so stopped."
    )
    return build(
        "pruning", caption, ("last layer", "kind", "measure"), [*variants, "perplexity on text"], models, lines
    )


APPENDIX = (removal, critical, removal_mmlu, transplant, minimal, state_rank, pruning, *CIRCUIT)
