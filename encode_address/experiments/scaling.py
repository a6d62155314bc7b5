"""Scaling (paper section 3.15): which readers does the address reach, and on which way?

The paper prints, per model, address blocks -> guided readers, and reports that in larger models the query no longer passes between
readers. No code for it is public; these are this project's definitions. d_R(run) is the attention of reader layer R's head from the
last token on the donor's entry minus that on the host's, per pair.

A set of blocks G *guides* R if its transplant at the last token (section 3.7) gives d_R > 0 and more attention on the donor's entry
than half of what the intact host gives its own (both lower bounds). A reader that no block guides alone gets the blocks added that
raise d_R most, one at a time, until a set guides it.

Between G and R lie softmax layers S and linear layers M. m^L(x, T) is a mixer's output at the last token, (d_model,). Arms, of which each
keeps the share  (mean d_R(arm) - mean d_R(host)) / (mean d_R(transplant) - mean d_R(host)):

    softmax held    transplant of G, and for L in S      m^L := the host's own
    linear held     transplant of G, and for L in M      m^L := the host's own
    both held       both of these
    earlier alone   no transplant, and for L in S        m^L := that of the transplanted run
    payload         no transplant, and for L in S        m^L := that of a run that asks the *host's* key where its value is the donor's

The way from G to R (`path_of`) is direct if the shift survives both being held; via attention if it is lost with S held and there with S
alone - of a query, unless the payload does the same; via linear if it is lost with M held only; mixed if nothing alone is the way.
If the query passed between readers, later readers would lose it with S held and have it with S alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from encode_address.experiments import baseline, readers, removal, transplant
from encode_address.experiments.base import Conclusion, Heads, Setting, incapable
from encode_address.metrics import accuracy, attention, heads, select
from encode_address.models.layout import Layout
from encode_address.run.cells import FINAL, Cell, Edit
from encode_address.stats import Estimate, difference, estimate, ratio
from encode_address.tasks import Dictionary, Prompt, QuestionSwap
from encode_address.tasks.dictionary import exchanged

SUMMARY = (
    "scaling: which readers each block guides, and whether the address reaches them directly or through earlier readers"
)
PAPER, N, QUICK_N = "3.15", 100, 40
NEEDS_CIRCUIT, ADAPTIVE = True, True
HELD = ("softmax held", "linear held", "both held")
EARLIER = ("earlier alone", "payload")
KEEPS = 0.5  # the share of the shift that an arm must keep to be a way of it
SENSITIVITY = (0.3, 0.5, 0.7)
OWN_SHARE = 0.5  # of the attention that a host's own entry has without a patch
READS = 0.1  # attention on the asked entry below which a layer reads nothing


# -- the rule -------------------------------------------------------------------------------------------------------
def path_of(kept: Mapping[str, Estimate], keeps: float = KEEPS) -> str:
    """direct | via attention (query) | via attention (payload) | via linear | mixed | undecided.

    `kept` are the shares of arms that were run; without layers of a kind in between, their arms are missing, and hold nothing.
    """

    def said(arm: str) -> bool | None:
        """Whether an arm keeps the shift; None where its interval does not say. What holds nothing keeps everything."""
        share = kept.get(arm)
        if share is None:
            return arm in HELD
        return True if share.low >= keeps else False if share.high < keeps else None

    softmax, linear, both, earlier, payload = map(said, (*HELD, *EARLIER))
    if HELD[2] not in kept:  # layers of one kind only: holding both is holding these
        both = linear if softmax else softmax
    if None in (softmax, linear, both):
        return "undecided"
    if both:
        return "direct" if softmax and linear else "mixed"
    if softmax:
        return "mixed" if linear else "via linear"
    if earlier is None or (earlier and payload is None):
        return "undecided"
    if not earlier:
        return "mixed"
    return "via attention (payload)" if payload else "via attention (query)"


def guides(shift: pd.Series, attended: pd.Series, own: pd.Series) -> bool | None:
    """Whether a transplant guides a head: per pair, d_R, its attention on the donor's entry, and the intact host's on its
    own. None: the intervals do not say."""
    bounds = difference(shift, 0 * shift), difference(attended, OWN_SHARE * own)
    if all(bound.low > 0 for bound in bounds):
        return True
    return False if any(bound.high <= 0 for bound in bounds) else None


# -- cells ----------------------------------------------------------------------------------------------------------
def between(layout: Layout, layers: Sequence[int], reader: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The softmax and the linear layers strictly between a set's last layer and a reader."""
    inside = range(max(layers) + 1, reader)
    return tuple(i for i in layout.softmax_layers if i in inside), tuple(i for i in layout.linear_layers if i in inside)


def payloads(items: Sequence[QuestionSwap], task: Dictionary) -> dict[int, Prompt]:
    """For each pair, a prompt that asks the host's key in a dictionary that gives it the donor's value."""
    out = {}
    for item in items:
        values = exchanged(item.host.values, item.host_index, item.donor_index)
        out[item.pair] = task.prompt(item.host.keys, values, item.host_index)
    return out


def transplant_cells(
    items: Sequence[QuestionSwap], units: Sequence[removal.Unit], watch: Heads, labels: Mapping[str, Any]
) -> list[Cell]:
    """Every host with each unit of the donor at the last token; with no unit, as it is."""
    out = []
    for name, layers in units:
        for item in items:
            end = item.host.final
            moved = (Edit("transplant", layers, end, item.donor, end),) if layers else ()
            out.append(_cell(item, name, "transplant" if layers else "host", "", moved, watch, labels))
    return out


def chain_cells(
    items: Sequence[QuestionSwap],
    unit: removal.Unit,
    head: tuple[int, int],
    layout: Layout,
    payload: Mapping[int, Prompt],
    labels: Mapping[str, Any],
) -> list[Cell]:
    """The arms of one set and one reader; those of layers that do not lie in between are left out."""
    name, layers = unit
    softmax, linear = between(layout, layers, head[0])
    held = {HELD[0]: softmax, HELD[1]: linear, HELD[2]: tuple(sorted(softmax + linear)) if softmax and linear else ()}
    out = []
    for item in items:
        host, end = item.host, item.host.final
        moved = Edit("transplant", layers, end, item.donor, end)
        arms = {arm: (moved, Edit("transplant", some, end, host, end)) for arm, some in held.items() if some}
        if softmax:
            arms[EARLIER[0]] = (Edit("transplant", softmax, end, host, end, under=(moved,)),)
            arms[EARLIER[1]] = (Edit("transplant", softmax, end, payload[item.pair], end),)
        out += [_cell(item, name, arm, head, edits, (head,), labels) for arm, edits in arms.items()]
    return out


def _cell(
    item: QuestionSwap,
    block: str,
    arm: str,
    head: Any,
    edits: tuple[Edit, ...],
    watch: Heads,
    labels: Mapping[str, Any],
) -> Cell:
    return Cell(
        "none",
        item.host,
        FINAL,
        also=edits,
        watch=tuple(watch),
        outcomes=transplant.outcomes(item, "same-dictionary", item.donor),
        labels={
            "experiment": "scaling", **labels, "position": "final", "block": block, "arm": arm,
            "reader": _name(head) if head else "", "donor": "" if arm == "host" else "same-dictionary", "pair": item.pair,
            "host_index": item.host_index, "donor_index": item.donor_index,
        },
    )  # fmt: skip


# -- the experiment -------------------------------------------------------------------------------------------------
def steps(setting: Setting) -> Iterator[list[Cell]]:
    """One head per softmax layer, chosen on other dictionaries; each block's transplant; sets for readers that no block
    guides; the arms of every pair of a set and a reader that it guides; and the removal of the Address."""
    task, layout, labels = setting.task, setting.layout, setting.labels
    chosen = {**labels, "split": "discovery"}
    swaps = task.swaps(transplant.WATCH_PAIRS, setting.seed + transplant.WATCH_SEED)
    rows = yield baseline.cells(swaps, readers.all_heads(setting.model), chosen)
    watch = readers.top_per_layer(rows)
    labels = {**labels, "split": "confirmation"}
    items = task.questions(setting.n, setting.seed)
    units = removal.blocks(layout)
    rows = yield transplant_cells(items, [("", ()), *units], watch, labels)
    tried = rows
    while sets := next_sets(tried, layout, watch):
        rows = yield transplant_cells(items, [(name, layout.layers_of(name)) for name in sets], watch, labels)
        tried = pd.concat([tried, rows], ignore_index=True)
    lent = payloads(items, task)
    plan = []
    for name, head in guided(tried, layout, watch):
        plan += chain_cells(items, (name, layout.layers_of(name)), head, layout, lent, labels)
    address = "+".join(setting.circuit.address) if setting.circuit else ""
    if address:
        unit = (address, layout.layers_of(address))
        swaps = task.swaps(setting.n, setting.seed)
        plan += baseline.cells(swaps, (), labels) + removal.cells(swaps, [unit], labels=labels)
        plan += transplant_cells(items, [unit], watch, labels)
    if plan:
        yield plan


def next_sets(rows: pd.DataFrame, layout: Layout, watch: Heads) -> list[str]:
    """The sets to transplant next: for each reader that reads and that nothing guides yet, the set that moved it most with
    one more block. [] when there is nothing to add."""
    out = set()
    for head in watch:
        names = _sets_before(rows, layout, head[0])
        own = _own(rows, head)
        if not names or own.mean() < READS or any(_guides(rows, name, head) for name in names):
            continue
        size = max(name.count("+") for name in names) + 1
        best = max((n for n in names if n.count("+") + 1 == size), key=lambda n: shift(rows, n, head).mean()).split("+")
        blocks = [block.name for block in layout.blocks if block.layers[-1] < head[0]]
        out |= {"+".join(b for b in blocks if b in (*best, more)) for more in blocks if more not in best}
    return sorted(out)


def guided(rows: pd.DataFrame, layout: Layout, watch: Heads) -> list[tuple[str, tuple[int, int]]]:
    """(set, reader head): every single block that guides a reader; where none does, the smallest set, that moved it most."""
    out = []
    for head in watch:
        names = [name for name in _sets_before(rows, layout, head[0]) if _guides(rows, name, head)]
        single = [name for name in names if "+" not in name]
        least = min((name.count("+") for name in names), default=0)
        best = sorted((n for n in names if n.count("+") == least), key=lambda n: -shift(rows, n, head).mean())[:1]
        out += [(name, head) for name in single or best]
    return out


def table(rows: pd.DataFrame, layout: Layout) -> pd.DataFrame:
    """A row per guided reader: the set, the shift, the share that each arm keeps, the way at each threshold."""
    rows = select(rows, experiment="scaling")
    watch = heads(rows)
    out = []
    for name, head in guided(rows, layout, watch):
        kept, moved = kept_by_arm(rows, name, head), difference(shift(rows, name, head), shift(rows, "", head))
        line = {"block": name, "reader": _name(head), "shift": str(moved), "path": path_of(kept)}
        line |= {f"path at {t}": path_of(kept, t) for t in SENSITIVITY}
        out.append(line | {"kept": kept})
    return pd.DataFrame(
        out, columns=["block", "reader", "shift", "path", *(f"path at {t}" for t in SENSITIVITY), "kept"]
    )


def kept_by_arm(rows: pd.DataFrame, block: str, head: tuple[int, int]) -> dict[str, Estimate]:
    """The share of a set's shift of a reader that each arm keeps; arms that were not run are missing."""
    before, arms = shift(rows, "", head), select(rows, experiment="scaling", block=block, reader=_name(head))
    whole = shift(rows, block, head) - before
    found = {arm: select(arms, arm=arm) for arm in (*HELD, *EARLIER)}
    return {arm: ratio(_shift(some, head) - before, whole) for arm, some in found.items() if len(some)}


def conclude(rows: pd.DataFrame, setting: Setting) -> Conclusion:
    """Holds if the address reaches every guided reader directly, past layers that could carry it; does not if it passes
    through an earlier reader or a linear layer."""
    rows = rows[rows["split"] == "confirmation"]
    if problem := incapable(select(rows, experiment="scaling", arm="host")):
        return problem
    figures: dict[str, Any] = {}
    said, ways = [], []
    for pair in table(rows, setting.layout).to_dict("records"):
        kept, name = pair.pop("kept"), f"{pair.pop('block')} -> {pair.pop('reader')}"
        figures[name] = {**pair, **{arm: str(share) for arm, share in kept.items()}}
        said.append(f"{name.replace('->', 'guides')} ({pair['path'] if kept else 'nothing lies between'})")
        ways += [pair["path"]] if kept else []
    if not said:
        said.append("no set of blocks guides any reader")
    if address := "+".join(setting.circuit.address) if setting.circuit else "":
        moved = _moved(rows, address)
        shares = {
            "intact": accuracy(select(rows, experiment="baseline")),
            "removal": accuracy(select(rows, experiment="removal", block=address)),
            "transplant": estimate(moved["redirected"], moved["pair"]),
        }
        figures["Address"] = {"block": address, **{name: str(share) for name, share in shares.items()}}
        said.append(f"without {address} accuracy {shares['removal']}, its transplant redirects {shares['transplant']}")
    status = "undecided" if {*ways} <= {"undecided"} else "holds" if {*ways} == {"direct"} else "does not hold"
    if status == "does not hold" and {*ways} <= {"direct", "undecided"}:
        status = "undecided"
    return Conclusion(status, "; ".join(said), figures)


def shift(rows: pd.DataFrame, block: str, head: tuple[int, int]) -> pd.Series:
    """d_R per pair, of the hosts with that set transplanted ("": as they are)."""
    return _shift(_moved(rows, block), head)


def _shift(rows: pd.DataFrame, head: tuple[int, int]) -> pd.Series:
    values = attention(rows, head, "donor_index") - attention(rows, head, "host_index")
    return values.groupby(rows["pair"]).mean()


def _moved(rows: pd.DataFrame, block: str) -> pd.DataFrame:
    rows = select(rows, experiment="scaling", block=block, arm="transplant" if block else "host")
    return rows.drop_duplicates("pair")


def _own(rows: pd.DataFrame, head: tuple[int, int]) -> pd.Series:
    host = _moved(rows, "")
    return attention(host, head, "host_index").groupby(host["pair"]).mean()


def _guides(rows: pd.DataFrame, block: str, head: tuple[int, int]) -> bool:
    own = _own(rows, head)
    moved = _moved(rows, block)
    attended = attention(moved, head, "donor_index").groupby(moved["pair"]).mean()
    return own.mean() >= READS and guides(shift(rows, block, head), attended, own) is True


def _sets_before(rows: pd.DataFrame, layout: Layout, reader: int) -> list[str]:
    """The sets that were transplanted and lie before a reader layer."""
    names = select(rows, experiment="scaling", arm="transplant")["block"].unique()
    return [name for name in names if max(layout.layers_of(name)) < reader]


def _name(head: tuple[int, int]) -> str:
    return f"L{head[0]}H{head[1]}"
