"""The tables of the paper's main part (specification 7): all models in each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd

from encode_address import metrics
from encode_address.compare.numbers import MEAN_OF
from encode_address.experiments import encode as encode_swaps
from encode_address.experiments import query_key as sides
from encode_address.experiments import scaling as chain
from encode_address.metrics import select
from encode_address.stats import NOTHING, Estimate, estimate
from encode_address.tables.cross import cross_transplant, replacement
from encode_address.tables.results import (
    INTACT,
    Results,
    block_columns,
    gap,
    mean,
    perplexity,
    perplexity_ratio,
    removed,
    untouched,
)  # fmt: skip
from encode_address.tables.table import DASH, Line, Table, build

ABLATED = {
    "intact": ("intact", "intact"), "K ablated": ("intact", "without"), "Q ablated": ("without", "intact"),
    "both": ("without", "without"),
}  # fmt: skip


def removal(models: Sequence[Results]) -> Table:
    """Section 5.2: accuracy and gap per variant, intact and without each block, and what the blocks' removal costs on text."""

    def lines(model: Results) -> Iterator[Line]:
        variants = model.variants("removal")
        for variant in variants:
            rows = model.of(variant, "baseline", "removal")
            by_unit = {INTACT: untouched(rows), **{block: removed(rows, block) for block in model.blocks}}
            yield (variant, "accuracy"), {unit: metrics.accuracy(some) for unit, some in by_unit.items()}
            yield (variant, "gap"), {unit: gap(some) for unit, some in by_unit.items()}
        text = model.of(None, "text")
        if variants:
            ratios = {block: perplexity_ratio(text, block) for block in model.blocks}
            yield ("text", "perplexity"), {INTACT: perplexity(select(text, intervention="none")), **ratios}

    caption = (
        "Removal of each block (mixer outputs set to zero at all positions): accuracy over both forms of a pair, logit gap, and perplexity on text, "
        "which is given for the intact model and, for blocks, as a multiple of it."
    )
    return build("removal", caption, ("variant", "measure"), [INTACT, *block_columns(models)], models, lines)


def encode(models: Sequence[Results]) -> Table:
    """Section 5.5: the share of value and key swaps carried by each block's outputs, and by the embeddings."""

    def lines(model: Results) -> Iterator[Line]:
        for variant in model.variants("encode"):
            rows = model.of(variant, "encode")
            hosts = select(rows, experiment="encode", intervention="none")
            for swap in encode_swaps.SWAPS:
                units = {block: encode_swaps.carried(rows, block, swap) for block in model.blocks if "+" not in block}
                ends = {
                    "no patch": mean(select(hosts, swap=swap), "carried"),
                    "embeddings": encode_swaps.carried(rows, "embed", swap),
                }
                yield (variant, swap, "+".join(model.circuit(variant).encode) or "none"), {**units, **ends}

    caption = (
        "Encode: the share of hosts that answer as if the swap of two values, or of two keys, were theirs, with one block's outputs at the swapped "
        "tokens taken from the donor; the token embeddings so patched are the ceiling, and every block but Encode is a control."
    )
    blocks = [name for name in block_columns(models) if "+" not in name]
    return build("encode", caption, ("variant", "swap", "Encode"), ["no patch", *blocks, "embeddings"], models, lines)


def query_key(models: Sequence[Results]) -> Table:
    """Section 5.3: selectivity and top-1 rate of each reader whose query, keys or both lack a block."""

    def lines(model: Results) -> Iterator[Line]:
        for variant in model.variants("query-key"):
            rows = select(model.of(variant, "query-key"), ablation="zero")
            watched = metrics.heads(rows)
            for block in rows["block"].unique():
                some = select(rows, block=block)
                for head in (head for head in model.circuit(variant).readers if head in watched):
                    about = (variant, f"L{head[0]}H{head[1]}", block)
                    by_side = {name: select(some, query_from=q, key_from=k) for name, (q, k) in ABLATED.items()}
                    for measure, values in (("selectivity", sides.selectivity), ("top-1", sides.top1)):
                        yield (
                            (*about, measure),
                            {
                                side: estimate(values(own, head), own["pair"]) if len(own) else NOTHING
                                for side, own in by_side.items()
                            },
                        )

    caption = (
        "Query and keys: selectivity of a reader head (log attention on the asked entry minus its mean over the others) and the share of prompts in "
        "which that entry comes first, with the reader's query, keys or both from a run without the block."
    )
    return build("query-key", caption, ("variant", "reader", "block", "measure"), list(ABLATED), models, lines)


def transplant(models: Sequence[Results]) -> Table:
    """Section 5.4: what each block's output at the last token moves."""

    def lines(model: Results) -> Iterator[Line]:
        for variant in model.variants("transplant"):
            rows = select(model.of(variant, "transplant"), position="final")
            own = select(rows, intervention="transplant", donor="same-dictionary")
            watched = metrics.heads(rows)
            head = next((head for head in model.circuit(variant).readers if head in watched), None)
            by_unit = {
                "no patch": select(rows, intervention="none"),
                **{name: select(own, block=name) for name in model.blocks},
            }
            for unit, some in by_unit.items():
                attended = estimate(metrics.attention(some, head, "donor_index"), some["pair"]) if head else None
                yield (variant, f"L{head[0]}H{head[1]}" if head else DASH, unit), {
                    "redirected": mean(some, "redirected"), "attention on donor's entry": attended, "D(A-B)": mean(some, "margin"),
                }  # fmt: skip

    caption = (
        "Output transplant at the last token: the share of hosts that answer with the donor's entry A, the reader's attention on it, and the logit of "
        "A's value minus that of the host's own B."
    )
    columns = ["redirected", "attention on donor's entry", "D(A-B)"]
    return build("transplant", caption, ("variant", "reader", "block"), columns, models, lines)


def scaling(models: Sequence[Results]) -> Table:
    """Section 5.8: a row per model, means over the three formats."""

    def lines(model: Results) -> Iterator[Line]:
        asked = [v for v in MEAN_OF["scaling"] if v in model.variants("removal", "transplant", "scaling")]
        named = {variant: "+".join(model.circuit(variant).address) for variant in asked}
        known = [variant for variant in asked if named[variant]]
        gone, moved = (
            {v: rows(model.of(v, "removal", "transplant", "scaling"), named[v]) for v in known}
            for rows in (removed, _moved)
        )
        if asked:
            yield (
                (),
                {
                    "Address": _by_variant(named) or "none",
                    "guides": _by_variant({v: _guided(model, v) for v in asked}) or None,
                    "removal": _pooled(gone, "correct"),
                    "transplant": _pooled(moved, "redirected"),
                    "mean over": ", ".join(v for v in known if len(gone[v]) and len(moved[v])) or DASH,
                },
            )

    caption = (
        "Scaling: the Address, the reader layers that each set of blocks guides, accuracy after the Address is removed, and the share that its transplant "
        "at the last token redirects; means over the pairs of the variants named."
    )
    return build("scaling", caption, (), ["Address", "guides", "removal", "transplant", "mean over"], models, lines)


def _moved(rows: pd.DataFrame, address: str) -> pd.DataFrame:
    """The rows with the Address transplanted at the last token: those of `scaling`, else those of `transplant`."""
    own = select(rows, experiment="scaling", arm="transplant", block=address)
    if len(own):
        return own
    final = {"position": "final", "donor": "same-dictionary", "intervention": "transplant"}
    return select(rows, experiment="transplant", block=address, **final)


def _pooled(by_variant: dict[str, pd.DataFrame], column: str) -> Estimate:
    """The mean over variants, whose pairs are separate ones."""
    apart = [some.assign(pair=f"{variant}:" + some["pair"].astype(str)) for variant, some in by_variant.items()]
    return mean(pd.concat(apart), column) if apart else NOTHING


def _guided(model: Results, variant: str) -> str:
    """ "G2 → L7, L11; G3 → L15": the reader layers that each set guides; "" where that was not run."""
    rows = model.of(variant, "scaling")
    if rows.empty or model.layout is None:
        return ""
    layers: dict[str, list[str]] = {}
    for block, (layer, _) in chain.guided(rows, model.layout, metrics.heads(rows)):
        layers.setdefault(block, []).append(f"L{layer}")
    return "; ".join(f"{block} → {', '.join(some)}" for block, some in layers.items()) or "none"


def _by_variant(said: dict[str, str]) -> str:
    """What is said of all variants; where they differ, of which."""
    held: dict[str, list[str]] = {}
    for variant, text in said.items():
        held.setdefault(text, []).append(variant)
    if len(held) == 1:
        return next(iter(held))
    return "; ".join(f"{text} ({', '.join(on)})" for text, on in held.items() if text)


MAIN = (removal, encode, query_key, transplant, cross_transplant, replacement, scaling)
