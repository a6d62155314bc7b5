"""Writers (paper section 3.4): what writes the binding of key and value, and on which way is it read?

The clean prompt c and the corrupted one x have the values of two entries exchanged: target t, which is asked for, and distractor d.
D(run) = logit(c's answer) - logit(x's answer) at the last token T. Of a patched run of x, per pair,

    recovery = (D(patched) - D(x)) / (D(c) - D(x))              0: as corrupted, 1: as clean

with all three D of one path; pairs with D(c) <= D(x) have nothing to recover and are left out (n says so).

Scan. m^L(x, p) := m^L(c, p), the output of mixer L, (d_model,), for L in a block or a single linear layer, p at t's value token, at the
token after it ("delimiter"), at both, or T; also the token embeddings of the value (a ceiling). States: S^L(x) := S^L(c) after the value,
the delimiter or the dictionary ("both": recurrent and conv), or before T ("recurrent", "both"). The *writer* W, at site p, is the unit of
the scan with the highest recovery at the value or the delimiter.

Ways, for the softmax layers R after W, each and all together. Site of V and K: p, or "everywhere"; Q is that of T, also by head.

    open     x, in which R's V (K, Q) := that of the W-patched run of x
    block    the W-patched run, in which R's V (K, Q) := that of plain x
    screen   the W-patched run, in which a later mixer's outputs := those of plain x, at all positions. "clean screen": the same in c.
             A screen alone tells no mediator from a layer that c needs anyway: read it beside the clean one.

Controls: the patch from x itself (identity, 0 to rounding); W's outputs put at another entry's value; at d's value alone; at both exchanged
values; the reverse, c patched from x, with (D(c) - D(patched)) / (D(c) - D(x)); R's V opened at the other entry's value.

If no linear layer wrote the binding, recovery would be 0 at t's value; if it were read from states, states would recover it and blocking V
would cost nothing. A state after position q in the middle of the prompt is put there by means of inputs: linear layers get c's inputs at
positions <= q (those that are not to be swapped keep x's) and softmax layers keep x's keys and values there, so that what follows q is a
run of x that continues from c's states. This brings the conv window along; the paper's swap leaves it. MLPs are not screened, nor V by head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from encode_address.experiments.base import Conclusion, Setting, incapable
from encode_address.experiments.removal import FORMS, Unit, blocks, single_layers
from encode_address.metrics import select
from encode_address.models.layout import Layout
from encode_address.run.cells import EMBED, FINAL, FULL, Cell, Edit
from encode_address.stats import Estimate, difference, ratio
from encode_address.tasks import Prompt, Swap

SUMMARY = (
    "writers: what writes the binding of key and value (clean into corrupted), and whether readers take it as V, K or Q"
)
PAPER, N, QUICK_N = "3.4", 100, 24
NEEDS_CIRCUIT, ADAPTIVE = False, True
PLACES = ("value", "delimiter", "value and delimiter", "final")
WRITTEN = ("value", "delimiter")  # where a writer may be
STATES = (("value", "both"), ("delimiter", "both"), ("dictionary", "both"), ("final", "recurrent"), ("final", "both"))
ALL_STATES = "all linear"
WAYS = ("V", "K", "Q", "V everywhere", "K everywhere")
ALL_READERS = "all"
SCREENS = ("screen", "clean screen")
CONTROLS = ("identity", "elsewhere", "distractor", "exchanged", "reverse")
WRITES = 0.2  # recovery that a writer must exceed, and that what writes or carries nothing must stay below
HALF = 0.5  # recovery of the writer, and share of it through V, that the claim asks for


# -- cells ----------------------------------------------------------------------------------------------------------
def units(layout: Layout) -> list[Unit]:
    """Every block, and every linear layer that is not a block by itself."""
    known = [block.layers for block in layout.blocks]
    return blocks(layout) + [unit for unit in single_layers(layout) if unit[1] not in known]


def places(swap: Swap) -> dict[str, tuple[int, ...]]:
    """The positions of every place, and of those of controls; a pair's prompts have the same."""
    span = swap.clean.span
    value, other = span(f"value {swap.target}"), span(f"value {swap.distractor}")
    after = (value[-1] + 1,)
    count = len(swap.clean.keys)
    third = next(e for i in range(1, count) if (e := (swap.target + i) % count) != swap.distractor)
    return {
        "value": value, "delimiter": after, "value and delimiter": value + after, "final": swap.clean.final,
        "distractor": other, "exchanged": tuple(sorted(value + other)), "elsewhere": span(f"value {third}"),
        "dictionary": (span("question")[0] - 1,),
    }  # fmt: skip


def base_cells(swaps: Sequence[Swap], labels: Mapping[str, Any]) -> list[Cell]:
    """Both forms of every pair as they are, on both paths: what recoveries are counted between."""
    said = {**labels, "arm": "none"}
    return [_cell(swap, form, (), said, path) for path in (FULL, FINAL) for form in FORMS for swap in swaps]


def scan_cells(swaps: Sequence[Swap], layout: Layout, labels: Mapping[str, Any]) -> list[Cell]:
    """Every unit's outputs at every place, the embeddings of the value, and the states of blocks and of all linear layers."""
    out = []
    sites = [(unit, place) for place in PLACES for unit in units(layout)] + [(("embed", (EMBED,)), "value")]
    for (name, layers), place in sites:
        said = {**labels, "arm": "patch", "block": name, "position": place, "donor": "clean"}
        out += [_cell(swap, "corrupted", (patch(swap, layers, place),), said) for swap in swaps]
    for place, mode in STATES:
        for name, layers in [*blocks(layout), (ALL_STATES, layout.linear_layers)]:
            said = {**labels, "arm": "state", "block": name, "position": place, "site": mode, "donor": "clean"}
            out += [_cell(swap, "corrupted", state_edits(swap, layout, layers, place, mode), said) for swap in swaps]
    return out


def patch(swap: Swap, layers: tuple[int, ...], place: str) -> Edit:
    """The corrupted prompt's outputs at a place := the clean one's."""
    where = places(swap)[place]
    return Edit("transplant", layers, where, swap.clean, where)


def state_edits(swap: Swap, layout: Layout, layers: tuple[int, ...], place: str, mode: str) -> tuple[Edit, ...]:
    """The edits of the corrupted prompt that give `layers` the clean states after a place ("final": before T)."""
    clean, corrupted = swap.clean, swap.corrupted
    if place == "final":
        return (Edit("state", layers, corrupted.final, clean, clean.final, mode=mode),)
    before = tuple(range(places(swap)[place][-1] + 1))
    first = min(layers)
    kept = tuple(layer for layer in layout.linear_layers if layer > first and layer not in layers)
    held = [("input", kept), *((verb, layout.readers_after((first,))) for verb in ("key", "value"))]
    own = [Edit(verb, some, before, corrupted, before) for verb, some in held if some]
    return (Edit("input", layers, before, clean, before), *own)


def control_cells(swaps: Sequence[Swap], writer: Unit, place: str, labels: Mapping[str, Any]) -> list[Cell]:
    """The writer's patch where, or from where, it should do nothing; at both values; and reversed."""
    (name, layers), out = writer, []
    for swap in swaps:
        clean, corrupted, at = swap.clean, swap.corrupted, places(swap)
        own, third = at[place], tuple(p + at["elsewhere"][0] - at["value"][0] for p in at[place])
        edits = {
            "identity": ("corrupted", Edit("transplant", layers, own, corrupted, own)),
            "elsewhere": ("corrupted", Edit("transplant", layers, third, clean, own)),
            "distractor": ("corrupted", Edit("transplant", layers, at["distractor"], clean, at["distractor"])),
            "exchanged": ("corrupted", Edit("transplant", layers, at["exchanged"], clean, at["exchanged"])),
            "reverse": ("clean", Edit("transplant", layers, own, corrupted, own)),
        }
        for arm, (form, edit) in edits.items():
            said = {**labels, "arm": arm, "block": name, "position": place}
            out.append(_cell(swap, form, (edit,), {**said, "donor": "clean" if edit.donor is clean else "corrupted"}))
    return out


def way_cells(
    swaps: Sequence[Swap], writer: Unit, place: str, layout: Layout, heads: int, labels: Mapping[str, Any]
) -> list[Cell]:
    """Every way opened and blocked, per softmax layer after the writer and in all of them; Q also per head."""
    (name, layers), out = writer, []
    after = layout.readers_after(layers)
    singles = [(f"L{r}", (r,), -1) for r in after]
    by_head = [(f"L{r}H{head}", (r,), head) for r in after for head in range(heads)]
    readers = singles + ([(ALL_READERS, after, -1)] if after else [])
    for way in (*WAYS, "V elsewhere"):
        asked = readers + by_head if way == "Q" else readers[-1:] if way == "V elsewhere" else readers
        for reader, some, head in asked:
            said = {**labels, "block": name, "position": place, "site": way, "reader": reader, "donor": "clean"}
            for swap in swaps:
                opened, blocked = way_edits(swap, writer, place, way, some, head)
                # Q in whole forwards too: the final path keeps only the last token of what its donors' donors have.
                out.append(_cell(swap, "corrupted", opened, {**said, "arm": "open"}, FULL))
                if way != "V elsewhere":
                    out.append(_cell(swap, "corrupted", blocked, {**said, "arm": "block"}))
    return out


def way_edits(
    swap: Swap, writer: Unit, place: str, way: str, readers: tuple[int, ...], head: int = -1
) -> tuple[tuple[Edit, ...], tuple[Edit, ...]]:
    """The edits of the corrupted prompt that open a way, and those that block it."""
    corrupted, at, written = swap.corrupted, places(swap), patch(swap, writer[1], place)
    verb = {"V": "value", "K": "key", "Q": "query"}[way[0]]
    everywhere = tuple(range(len(corrupted)))
    where = {"Q": at["final"], "V elsewhere": at["elsewhere"]}.get(way, everywhere if "every" in way else at[place])
    opened = Edit(verb, readers, where, corrupted, where, head=head, under=(written,))
    return (opened,), (written, Edit(verb, readers, where, corrupted, where, head=head))


def screen_cells(
    swaps: Sequence[Swap], writer: Unit, place: str, layout: Layout, labels: Mapping[str, Any]
) -> list[Cell]:
    """Every later mixer held at the corrupted prompt's outputs, in the writer-patched run and in the clean one."""
    (name, layers), out = writer, []
    for layer in range(max(layers) + 1, len(layout.kinds)):
        said = {**labels, "block": name, "position": place, "reader": f"L{layer}", "donor": "clean"}
        for swap in swaps:
            everywhere = tuple(range(len(swap.corrupted)))
            held = Edit("transplant", (layer,), everywhere, swap.corrupted, everywhere)
            out.append(_cell(swap, "corrupted", (patch(swap, layers, place), held), {**said, "arm": "screen"}))
            out.append(_cell(swap, "clean", (held,), {**said, "arm": "clean screen", "donor": "corrupted"}))
    return out


def _cell(swap: Swap, form: str, edits: tuple[Edit, ...], labels: Mapping[str, Any], path: str = "") -> Cell:
    host: Prompt = getattr(swap, form)
    outcomes = (("restored", swap.clean.answer), ("kept", swap.corrupted.answer))  # so that the margin is D
    said = {"experiment": "writers", **labels, "pair": swap.pair, "form": form, "target": swap.target}
    if not edits:
        return Cell("none", host, path, outcomes=outcomes, labels=said)
    main, *also = edits
    what = {name: getattr(main, name) for name in ("layers", "where", "donor", "source", "mode", "head", "under")}
    return Cell(main.verb, host, path, outcomes=outcomes, labels=said, also=tuple(also), **what)


# -- the experiment -------------------------------------------------------------------------------------------------
def steps(setting: Setting) -> Iterator[list[Cell]]:
    """The scan; then controls, ways and screen of the writer that it found."""
    layout, labels = setting.layout, {**setting.labels, "split": "confirmation"}
    swaps = setting.task.swaps(setting.n, setting.seed)
    rows = yield base_cells(swaps, labels) + scan_cells(swaps, layout, labels)
    found = writer_of(rows)
    if found is None:
        return
    name, place = found
    writer = (name, layout.layers_of(name))
    yield (
        control_cells(swaps, writer, place, labels)
        + way_cells(swaps, writer, place, layout, setting.model.heads, labels)
        + screen_cells(swaps, writer, place, layout, labels)
    )


def writer_of(rows: pd.DataFrame) -> tuple[str, str] | None:
    """(unit, place) of the highest recovery at the value or the delimiter; None if its lower bound is not above WRITES."""
    scan = select(rows, experiment="writers", arm="patch")
    tried = scan.loc[scan["position"].isin(WRITTEN) & (scan["block"] != "embed"), ["block", "position"]]
    known = [(unit, place) for unit, place in tried.drop_duplicates().itertuples(index=False)]
    best = max(known, key=lambda one: recovered(rows, one[0], one[1]).value, default=None)
    return best if best and recovered(rows, *best).low > WRITES else None


def recovered(rows: pd.DataFrame, block: str, place: str, arm: str = "patch", **more: str) -> Estimate:
    """The mean recovery of a setting; of the reverse, the share of D that it takes."""
    return mean(recovery(rows, arm=arm, block=block, position=place, **more))


def mean(values: pd.Series) -> Estimate:
    """The mean of one value per pair; these are no shares, so that the interval knows no bounds."""
    return difference(values, 0 * values, unit=False)


def recovery(rows: pd.DataFrame, **setting: str) -> pd.Series:
    """Recovery per pair of the rows of a setting, each against the unpatched prompts of its own path."""
    rows = select(rows, experiment="writers")
    plain = select(rows, arm="none").pivot_table(index=["pair", "path"], columns="form", values="margin")
    some = select(rows, **setting).set_index(["pair", "path"])
    if some.empty or plain.empty:
        return pd.Series(dtype=float)
    base = plain.reindex(some.index)
    effect = base["clean"] - base["corrupted"]
    start, sign = (base["clean"], -1) if setting.get("arm") == "reverse" else (base["corrupted"], 1)
    values = sign * (some["margin"] - start) / effect.where(effect > 0)
    return values.groupby(level="pair").mean().dropna()


def conclude(rows: pd.DataFrame, setting: Setting) -> Conclusion:
    """Holds if the writer is in the first block and recovers .5; V at its place, in all readers, keeps half of that when opened and
    no half when blocked; the states of all linear layers recover less than .2, and so do the writer's outputs at another entry.
    If states right after the value or the delimiter do recover more, their conv windows may have done it: undecided."""
    hosts = select(rows, experiment="writers", arm="none")
    hosts = hosts.assign(right=hosts["restored"].where(hosts["form"] == "clean", hosts["kept"]))
    if problem := incapable(hosts, "right"):
        return problem
    layout, found = setting.layout, writer_of(rows)
    figures: dict[str, Any] = {"scan": scan_figures(rows, layout), "states": state_figures(rows, layout)}
    if found is None:
        return Conclusion("undecided", f"no writer: no linear layer's output recovers more than {WRITES}", figures)
    own, ways = recovery(rows, arm="patch", block=found[0], position=found[1]), way_figures(rows, *found)
    whole, controls = mean(own), {arm: recovered(rows, *found, arm) for arm in CONTROLS}
    figures |= {
        "writer": {"block": found[0], "position": found[1], "recovery": str(whole)},
        "ceiling": str(recovered(rows, "embed", "value")),
        "controls": _said(controls),
        **{arm: {reader: _said(by_way) for reader, by_way in ways[arm].items()} for arm in ways},
        "screen": _said(screen_figures(rows, *found)),
    }
    why = f"{found[0]} at the {found[1]} recovers {whole} of D"
    if not ways["open"]:
        return Conclusion("undecided", f"{why}, and no softmax layer comes after it", figures)
    shares = {arm: ratio(_way(rows, *found, arm), own) for arm in ways}
    states = {state: recovered(rows, ALL_STATES, state[0], "state", site=state[1]) for state in STATES}
    carried = {state: _above(share, WRITES) for state, share in states.items()}
    asked = (
        {*layout.layers_of(found[0])} <= {*layout.blocks[0].layers},
        _above(whole, HALF),
        _above(shares["open"], HALF),
        _not(_above(shares["block"], HALF)),
        # What a state right after the value carries may be the conv window's, which still holds the value: no verdict.
        *((known is False) or None if place in WRITTEN else _not(known) for (place, _), known in carried.items()),
        _not(_above(controls["elsewhere"], WRITES)),
    )
    by_layer = {
        reader: by_way["V"] for reader, by_way in ways["open"].items() if "V" in by_way and reader != ALL_READERS
    }
    opened, blocked = ways["open"][ALL_READERS], ways["block"][ALL_READERS]
    why += "; opened / blocked in all later softmax layers: "
    why += ", ".join(f"{way} {opened[way]} / {blocked[way]}" for way in WAYS[:3])
    why += f"; V opened in {', '.join(f'{r} {e}' for r, e in by_layer.items())}"
    why += "; all states " + ", ".join(f"{_when(*state)} {share}" for state, share in states.items())
    why += f"; at another entry {controls['elsewhere']}"
    status = "does not hold" if False in asked else "undecided" if None in asked else "holds"
    return Conclusion(status, why, {**figures, "share of the recovery": _said(shares)})


def _above(share: Estimate, bound: float) -> bool | None:
    """Whether an estimate is above a bound; None where its interval does not say."""
    return True if share.low >= bound else False if share.high < bound else None


def _not(known: bool | None) -> bool | None:
    return None if known is None else not known


def _when(place: str, mode: str) -> str:
    return f"before T ({mode})" if place == "final" else f"after the {place}"


def _said(estimates: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _said(some) if isinstance(some, Mapping) else str(some) for name, some in estimates.items()}


def _way(rows: pd.DataFrame, block: str, place: str, arm: str) -> pd.Series:
    return recovery(rows, arm=arm, block=block, position=place, site="V", reader=ALL_READERS)


def scan_figures(rows: pd.DataFrame, layout: Layout) -> dict[str, dict[str, str]]:
    """unit -> place -> recovery, as text."""
    return {name: {place: str(recovered(rows, name, place)) for place in PLACES} for name, _ in units(layout)}


def state_figures(rows: pd.DataFrame, layout: Layout) -> dict[str, dict[str, str]]:
    """unit -> "place, which state" -> recovery, as text."""
    names = [block.name for block in layout.blocks] + [ALL_STATES]
    return {
        name: {f"{place}, {mode}": str(recovered(rows, name, place, "state", site=mode)) for place, mode in STATES}
        for name in names
    }


def way_figures(rows: pd.DataFrame, block: str, place: str) -> dict[str, dict[str, dict[str, Estimate]]]:
    """arm -> reader (a layer, a head, all) -> way -> recovery."""
    out: dict[str, dict[str, dict[str, Estimate]]] = {"open": {}, "block": {}}
    for arm, by_reader in out.items():
        some = select(rows, experiment="writers", arm=arm, block=block, position=place)
        for reader, way in some[["reader", "site"]].drop_duplicates().itertuples(index=False):
            by_reader.setdefault(reader, {})[way] = recovered(rows, block, place, arm, reader=reader, site=way)
    return out


def screen_figures(rows: pd.DataFrame, block: str, place: str) -> dict[str, dict[str, Estimate]]:
    """layer -> screen, clean screen -> recovery."""
    layers = select(rows, experiment="writers", arm="screen", block=block, position=place)["reader"].unique()
    return {layer: {arm: recovered(rows, block, place, arm, reader=layer) for arm in SCREENS} for layer in layers}
