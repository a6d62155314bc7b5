"""Claims of the paper as statements about intervals, each true, false or open."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from encode_address import metrics
from encode_address.compare.numbers import SIDES
from encode_address.compare.results import Source, read_json, setting
from encode_address.experiments import encode, pruning, query_key, state
from encode_address.experiments.base import Circuit, incapable
from encode_address.metrics import select
from encode_address.models.layout import Layout
from encode_address.stats import NOTHING, Estimate, difference, estimate, per_pair

HALF = 0.5
Parts = list[tuple[str, bool | None]]  # a statement with its figures, and whether it is true, false or open (None)


@dataclass(frozen=True, eq=False)
class Known:
    """What a claim is judged on: one variant's rows of one run, the model's layout, and what `find` said of it."""

    rows: pd.DataFrame
    layout: Layout
    circuit: Circuit

    @property
    def first(self) -> str:
        return self.layout.blocks[0].name

    @property
    def address(self) -> str:
        """Empty if `find` named none."""
        return "+".join(self.circuit.address)

    def others(self, *names: str) -> list[str]:
        """All blocks but these, and but the members of these unions."""
        known = {block for name in names for block in name.split("+")}
        return [block.name for block in self.layout.blocks if block.name not in known]


def most(what: str, share: Estimate) -> tuple[str, bool | None]:
    """At least one half."""
    return f"{what} {share}", True if share.low >= HALF else False if share.high < HALF else None


def few(what: str, share: Estimate) -> tuple[str, bool | None]:
    """Less than one half."""
    said, true = most(what, share)
    return said, None if true is None else not true


def unable(hosts: pd.DataFrame, column: str = "kept") -> Parts:
    """An open statement, if the unedited model does not do the task: what it seems to do is no evidence."""
    problem = incapable(hosts, column)
    return [(problem.why, None)] if problem else []


def _encode_first(known: Known) -> Parts:
    hosts = select(known.rows, experiment="encode", intervention="none")
    shares = {swap: encode.carried(known.rows, known.first, swap) for swap in encode.SWAPS}
    return unable(hosts) or [most(f"{known.first} carries {swap} swaps", share) for swap, share in shares.items()]


def _encode_only(known: Known) -> Parts:
    hosts = select(known.rows, experiment="encode", intervention="none")
    pairs = [(block, swap) for block in known.others(known.first) for swap in encode.SWAPS]
    return unable(hosts) or [few(f"{block} {swap}", encode.carried(known.rows, block, swap)) for block, swap in pairs]


def _lost(known: Known, block: str) -> Estimate:
    """How much accuracy the removal of a block costs, paired."""
    intact = select(known.rows, experiment="baseline")
    removed = select(known.rows, experiment="removal", block=block, mode="zero", position="all")
    return difference(per_pair(intact, "correct"), per_pair(removed, "correct"))


def _removal_first(known: Known) -> Parts:
    hosts = select(known.rows, experiment="baseline")
    return unable(hosts, "correct") or [most(f"accuracy lost without {known.first}", _lost(known, known.first))]


def _removal_address(known: Known) -> Parts:
    hosts = select(known.rows, experiment="baseline")
    if problem := unable(hosts, "correct") or _nameless(known):
        return problem
    own, others = _lost(known, known.address), known.others(known.first, known.address)
    rest = [few(f"without {block}", _lost(known, block)) for block in others]
    return [most(f"accuracy lost without {known.address}", own), *rest] if own.n else []


def _nameless(known: Known) -> Parts:
    unnamed = "no Address is known: `encode-address find` names none here, or has not run"
    return [] if known.address else [(unnamed, None)]


def _transplants(known: Known) -> Parts:
    rows = select(known.rows, experiment="transplant", position="final")
    own = select(rows, intervention="transplant", donor="same-dictionary")
    shares = {name: estimate(some["redirected"], some["pair"]) for name, some in own.groupby("block")}
    name = _mover(known, shares)
    return unable(select(rows, intervention="none")) or _alone(known, name, name, shares)


def _states(known: Known) -> Parts:
    rows = select(known.rows, experiment="state")
    shares, both = (
        {block.name: state.redirected(rows, block.name, what) for block in known.layout.blocks}
        for what in ("recurrent", "both")
    )
    name = _mover(known, both)
    says = f"{name} (with its convolutional state {both.get(name, NOTHING)})"
    return unable(select(rows, intervention="none")) or _alone(known, name, says, shares)


def _mover(known: Known, shares: dict[str, Estimate]) -> str:
    """The Address; where none is known, the block that redirects most."""
    single = [name for name in known.others() if name in shares and shares[name].n]
    return known.address or max(single, key=lambda block: shares[block].value, default="")


def _alone(known: Known, name: str, says: str, shares: dict[str, Estimate]) -> Parts:
    """It redirects, and no other block does; nothing, if it was not run."""
    others = [other for other in known.others(name) if other in shares]
    return [most(says, shares[name]), *(few(other, shares[other]) for other in others)] if name in shares else []


def _inputs(known: Known) -> Parts:
    rows = select(known.rows, experiment="state")
    shares = {what: state.redirected(rows, known.address, what) for what in ("input", "residual")}
    problem = unable(select(rows, intervention="none")) or _nameless(known)
    return problem or [few(f"{what} of {known.address}", share) for what, share in shares.items() if share.n]


def _query_side(known: Known) -> Parts:
    rows = select(known.rows, experiment="query-key", block=known.address, ablation="zero")
    heads = [head for head in known.circuit.readers if head in metrics.heads(rows)]
    if rows.empty or not heads:
        return []
    key, query = (query_key.side(rows, *sides, heads[0]) for sides in (SIDES["K ablated"], SIDES["Q ablated"]))
    more = difference(key, query, unit=False)
    said = f"without {known.address} the query of L{heads[0][0]}H{heads[0][1]} loses more selectivity than its keys, by {more}"  # fmt: skip
    return [(said, True if more.low > 0 else False if more.high < 0 else None)]


def _jumps(known: Known) -> Parts:
    layers = sorted({layer for layer, _ in known.circuit.readers})
    full = pruning.choice(known.rows, len(known.layout.kinds) - 1)
    if not layers or full.low <= 2 * known.rows["chance"].dropna().max():
        return [(f"the full model chooses right in {full}; readers known: {layers or 'none'}", None)]
    layer, rise = pruning.jump(known.rows)
    named = ", ".join(f"L{layer}" for layer in layers)
    if layer is None:
        return [(f"no jump, largest increment {rise}", False if rise.high < pruning.JUMP_LOW else None)]
    return [(f"jumps at L{layer} by {rise}, readers at {named}", layer in layers)]


# (what is claimed, the experiment whose rows say it, statements, which published models have this shape)
CLAIMS: list[tuple[str, str, Callable[[Known], Parts], str]] = [
    ("Encode is the first block", "encode", _encode_first, "0.8B, 9B; in no Granite (5.5)"),
    ("no other block carries swapped values or keys", "encode", _encode_only, "all four (5.5)"),
    ("removing the first block breaks accuracy", "removal", _removal_first, "all four (5.2)"),
    ("removing the Address breaks accuracy, other blocks do not", "removal", _removal_address, "0.8B; in 9B accuracy survives, Granite needs others too (chat8, 5.2)"),
    ("only the Address's output at the last token redirects", "transplant", _transplants, "0.8B, 9B, 1B; the 7B needs two blocks (5.4)"),
    ("the Address builds the query, not the keys", "query-key", _query_side, "all four (5.3)"),
    ("only the Address's recurrent state before the last token redirects", "state", _states, "9B; others not published (5.1)"),
    ("the Address's input at the last token does not redirect", "state", _inputs, "9B; others not published (5.1)"),
    ("retrieval jumps at a reader's layer", "pruning", _jumps, "all four, among the cuts shown (5.9)"),
]  # fmt: skip


def shapes(own: Sequence[Source]) -> Iterator[dict[str, Any]]:
    layout, circuits = _layout(own), _circuits(own)
    for says, experiment, statements, paper in CLAIMS:
        shared = {"experiment": experiment, "measure": "claim", "condition": says, "source": paper}
        judged: dict[str, dict[str, Any]] = {}
        for source in sorted(own, key=lambda s: (s.experiment != experiment, s.experiment != "find")):
            some = select(source.rows, experiment=experiment)
            for variant in some["variant"].dropna().unique() if layout and len(some) else ():
                known = Known(select(source.rows, variant=variant), layout, circuits.get(variant, Circuit()))
                if variant not in judged and (parts := statements(known)):
                    said = "; ".join(figures for figures, _ in parts)
                    judged[variant] = {"variant": variant, "result": _result(parts), "note": said, "setting": setting(source)}  # fmt: skip
        yield from ({**shared, **line} for line in judged.values() or ({"result": "not run"},))


def _result(parts: Parts) -> str:
    true = [is_true for _, is_true in parts]
    return "disagrees" if False in true else "undecided" if None in true else "agrees"


def _verdicts(own: Sequence[Source]) -> list[dict[str, Any]]:
    """What was said of these runs; of an experiment by itself, what `find` said in the folder above too."""
    above = [read_json(source.folder.parent / "verdict.json") for source in own if source.experiment != "find"]
    return [*(source.verdict for source in own), *(v for v in above if v.get("model") == own[0].model)]


def _layout(own: Sequence[Source]) -> Layout | None:
    for verdict in _verdicts(own):
        if facts := verdict.get("layout"):
            linear = {layer for block in facts["blocks"] for layer in block["layers"]}
            kinds = ["linear_attention" if i in linear else "full_attention" for i in range(len(linear) + len(facts["softmax"]))]  # fmt: skip
            return Layout.from_config({"layer_types": kinds})
    return None


def _circuits(own: Sequence[Source]) -> dict[str, Circuit]:
    """variant -> what `find` said the circuit is, in its own verdict or in that of an experiment that took it."""
    found: dict[str, Circuit] = {}
    for verdict in _verdicts(own):
        for name, said in (verdict.get("variants") or {}).items():
            if "address" in said:
                found.setdefault(name, Circuit.of(said))
    return found
