"""Query and key (paper section 3.8): does the Address build what the reader asks with, or what it is asked about?

Of a prompt x, q and k are the query at the last token, (heads, head_dim), and the keys at all tokens, (tokens, kv_heads,
head_dim), that a reader layer receives, after norm and position encoding. "Without" a block they are those of a run of x in
which that block's outputs are removed. In the otherwise intact model the reader gets (q, k) of either kind:

    selectivity = s_target - mean over other entries of s_j,   s_j = ln(attention mass on entry j)
    Q-side loss = selectivity(q, k) - selectivity(q without, k);   K-side loss = selectivity(q, k) - selectivity(q, k without)

*Rescue* runs the other way round: in the model without the block the reader gets the intact q, k or both. Rescuing q reads the
same attention as inserting k without, exactly; rescuing both reads the intact attention. The output gate is never touched.

*Mediation* of the transplant (section 3.7): the donor's Address is transplanted at the last token while a site of the readers -
query, key, value or gate at the last token - is held at the host's own; and that site alone is taken from the transplanted run.
Mediated share = 1 - redirected(held) / redirected(transplant). If the Address did not act through the reader's query, holding
the query would leave the redirect as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from encode_address.experiments.base import Conclusion, Heads, Setting
from encode_address.experiments.removal import Unit
from encode_address.metrics import heads, select
from encode_address.run.cells import FULL, Cell, Edit
from encode_address.stats import Estimate, difference, estimate, per_pair
from encode_address.tasks import Prompt, QuestionSwap, Swap

SUMMARY = "query and key: which of the reader's two sides the Address builds, and whether its transplant acts through the query"
PAPER, N, QUICK_N = "3.8", 100, 24
NEEDS_CIRCUIT, ADAPTIVE = True, False
ABLATIONS = ("zero", "mean", "resampled")
SIDES = (("intact", "intact"), ("without", "intact"), ("intact", "without"), ("without", "without"))  # (query, key)
SITES = ("query", "key", "value", "gate")
TINY = 1e-30  # attention mass below which its logarithm is cut


def ablation(layers: tuple[int, ...], mode: str, other: Prompt) -> Edit:
    """The removal of a block: by zero, by its mean over a text, or by its outputs on another prompt of equal length."""
    if mode == "resampled":
        everywhere = tuple(range(len(other)))
        return Edit("transplant", layers, everywhere, other, everywhere)
    return Edit("remove", layers, mode=mode)


def side_cells(
    swaps: Sequence[Swap], unit: Unit, readers: Sequence[int], watch: Heads, mode: str, labels: Mapping[str, Any]
) -> list[Cell]:
    """Clean prompts whose readers get query and keys of either kind; and the model without the block, rescued."""
    name, layers = unit
    out = []
    for i, swap in enumerate(swaps):
        host = swap.clean
        others = [o.clean for o in (*swaps[i + 1 :], *swaps[:i]) if len(o.clean) == len(host)]
        if not others:
            continue
        gone = ablation(layers, mode, others[0])

        def put(site: str, under: tuple[Edit, ...], host: Prompt = host) -> Edit:
            where = host.final if site == "query" else tuple(range(len(host)))
            return Edit(site, tuple(readers), where, host, where, under=under)

        def cell(kind: str, query: str, key: str, edits: list[Edit], host: Prompt = host, swap: Swap = swap) -> Cell:
            return Cell(
                "none",
                host,
                FULL,
                also=tuple(edits),
                watch=tuple(watch),
                outcomes=(("correct", host.answer), ("swapped", swap.corrupted.answer)),
                labels={
                    "experiment": kind, **labels, "position": "all", "block": name, "ablation": mode, "query_from": query,
                    "key_from": key, "pair": swap.pair, "form": "clean", "target": swap.target,
                },
            )  # fmt: skip

        for query, key in SIDES:
            sides = {"query": query, "key": key}
            insert = [put(site, (gone,)) for site in ("query", "key") if sides[site] == "without"]
            restore = [put(site, ()) for site in ("query", "key") if sides[site] == "intact"]
            out.append(cell("query-key", query, key, insert))
            out.append(cell("rescue", query, key, [gone, *restore]))
    return out


def mediation_cells(
    items: Sequence[QuestionSwap],
    unit: Unit,
    readers: Sequence[int],
    sites: Sequence[str],
    watch: Heads,
    labels: Mapping[str, Any],
) -> list[Cell]:
    """The transplant as it is; with a site of the readers held at the host's; and with that site alone taken from it.

    Sites are edited in each reader layer by itself and in all of them together, and "all" sites together.
    """
    name, layers = unit
    out = []
    groups = [("+".join(f"L{r}" for r in some), some) for some in _groups(readers)]
    for item in items:
        host, end = item.host, item.host.final
        moved = Edit("transplant", layers, end, item.donor, end)

        def cell(
            arm: str, reader: str, site: str, edits: list[Edit], host: Prompt = host, item: QuestionSwap = item
        ) -> Cell:
            return Cell(
                "none",
                host,
                "final",
                also=tuple(edits),
                watch=tuple(watch),
                outcomes=(("redirected", host.choices[item.donor_index]), ("kept", host.answer)),
                labels={
                    "experiment": "mediation", **labels, "position": "final", "block": name, "arm": arm, "site": site,
                    "reader": reader, "donor": "same-dictionary", "pair": item.pair, "host_index": item.host_index,
                    "donor_index": item.donor_index,
                },
            )  # fmt: skip

        out.append(cell("host", "", "", []))
        out.append(cell("transplant", "", "", [moved]))
        for reader, some in groups:
            for site in (*sites, "all"):
                chosen = sites if site == "all" else (site,)
                held = [Edit(s, some, end, host, end) for s in chosen]
                alone = [Edit(s, some, end, host, end, under=(moved,)) for s in chosen]
                out.append(cell("held", reader, site, [moved, *held]))
                out.append(cell("alone", reader, site, alone))
    return out


def steps(setting: Setting) -> Iterator[list[Cell]]:
    """Both sides of the Address and of the block before it; then the mediation of the Address's transplant."""
    layout, circuit = setting.layout, setting.circuit
    if not circuit or not circuit.address or not circuit.readers:
        return
    labels = {**setting.labels, "split": "confirmation"}
    swaps, items = setting.task.swaps(setting.n, setting.seed), setting.task.questions(setting.n, setting.seed)
    address = ("+".join(circuit.address), layout.layers_of("+".join(circuit.address)))
    before = [block for block in layout.tabled if block.layers[-1] < address[1][0]][-1:]
    readers = sorted({layer for layer, _ in circuit.readers if layer > address[1][0]})
    plan: list[Cell] = []
    for unit in [address, *((block.name, block.layers) for block in before)]:
        for mode in ABLATIONS:
            plan += side_cells(swaps, unit, readers, circuit.readers, mode, labels)
    sites = [site for site in SITES if site != "gate" or setting.model.gated]
    yield plan + mediation_cells(items, address, readers, sites, circuit.readers, labels)


def conclude(rows: pd.DataFrame, setting: Setting) -> Conclusion:
    """The Address builds the query if removal costs the query's side more than the keys', and its transplant is lost when
    the readers' query is held and is there when it alone is taken."""
    circuit = setting.circuit
    if not circuit or not circuit.address or not circuit.readers:
        return Conclusion("undecided", "`find` names no Address with a reader here")
    name, head = "+".join(circuit.address), circuit.readers[0]
    sides = select(rows, experiment="query-key", block=name, ablation="zero")
    intact = side(sides, "intact", "intact", head)
    losses = {
        "Q": difference(intact, side(sides, "without", "intact", head), unit=False),
        "K": difference(intact, side(sides, "intact", "without", head), unit=False),
    }
    apart = difference(side(sides, "intact", "without", head), side(sides, "without", "intact", head), unit=False)
    arms = mediation(rows)
    whole, held, alone = (arms[arm] for arm in ("transplant", "held", "alone"))
    share = 1 - held.value / whole.value if whole.value else float("nan")
    figures = {
        "selectivity": str(estimate(intact, intact.index.to_series())),
        **{f"{s}-side loss": str(v) for s, v in losses.items()},
        "redirected": str(whole),
        "redirected, query held": str(held),
        "redirected, query alone": str(alone),
        "mediated share": round(share, 3),
    }
    why = (
        f"without {name} the query of L{head[0]}H{head[1]} loses {losses['Q']} of selectivity {figures['selectivity']}, its keys "
        f"{losses['K']}; the transplant redirects {whole}, with the readers' query held {held}, by their query alone {alone}"
    )
    if whole.low < 0.5:
        return Conclusion("undecided", why, figures)
    if apart.low > 0 and held.high < whole.low and alone.low >= 0.5:
        return Conclusion("holds", f"{name} builds the query: {why}", figures)
    if apart.high < 0 or held.low >= 0.5:
        return Conclusion("does not hold", why, figures)
    return Conclusion("undecided", why, figures)


def mediation(rows: pd.DataFrame, site: str = "query") -> dict[str, Estimate]:
    """Redirected, of the transplant as it is, and with `site` held in, or taken by, all readers together."""
    rows = select(rows, experiment="mediation")
    joint = max(rows["reader"].unique(), key=lambda name: name.count("+") + bool(name))
    chosen = {"transplant": select(rows, arm="transplant")}
    chosen |= {arm: select(rows, arm=arm, site=site, reader=joint) for arm in ("held", "alone")}
    return {arm: estimate(some["redirected"], some["pair"]) for arm, some in chosen.items()}


def side(rows: pd.DataFrame, query: str, key: str, head: tuple[int, int]) -> pd.Series:
    """Per pair, the selectivity of a head that gets this query and these keys."""
    some = select(rows, query_from=query, key_from=key)
    return per_pair(some.assign(selectivity=selectivity(some, head)), "selectivity")


def selectivity(rows: pd.DataFrame, head: tuple[int, int]) -> pd.Series:
    """s_target - mean of the other entries' s, per row."""
    target, others = _scores(rows, head)
    return pd.Series(target - others.mean(1), index=rows.index)


def top1(rows: pd.DataFrame, head: tuple[int, int]) -> pd.Series:
    """Whether the asked entry gets more attention than any other, per row (chance: 1 / entries)."""
    target, others = _scores(rows, head)
    return pd.Series(target > others.max(1), index=rows.index)


def _scores(rows: pd.DataFrame, head: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    if head not in heads(rows):
        raise KeyError(f"L{head[0]}H{head[1]} was not watched")
    scores = np.log(np.maximum(np.stack(rows[f"attn.L{head[0]}H{head[1]}"].to_list()), TINY))
    target = rows["target"].astype(int).to_numpy()
    chosen = np.arange(scores.shape[1]) == target[:, None]
    return scores[chosen], scores[~chosen].reshape(len(rows), -1)


def _groups(readers: Sequence[int]) -> list[tuple[int, ...]]:
    """Each reader layer by itself, and all of them."""
    single = [(reader,) for reader in readers]
    return single + [tuple(readers)] * (len(readers) > 1)
