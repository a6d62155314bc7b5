"""The tables of two models each: what a donor's block does in a host (specification 5.6, 5.7). A host holds the rows of all its donors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pandas as pd

from encode_address import metrics
from encode_address.cross import replaced, stand_ins
from encode_address.cross.transferred import by_seed, rate, whole
from encode_address.cross.transplants import MAPPED, MEAN, OTHER, SAME, SELF, SHUFFLED
from encode_address.metrics import select
from encode_address.stats import NOTHING, Estimate, estimate
from encode_address.tables.results import INTACT, Results
from encode_address.tables.table import DASH, Line, Table, build, number

SPLITS = ("disjoint", "shared")  # whether the test asks keys of the fit


def cross_transplant(models: Sequence[Results]) -> Table:
    """Section 5.6: the share of hosts that a donor's Address redirects through a linear map, beside the map's controls."""

    def lines(model: Results) -> Iterator[Line]:
        for donor, rows in by_donor(model.rows, "transfer"):
            for variant in rows["variant"].unique():
                some = select(rows, variant=variant)
                if not len(select(some, condition=MAPPED)):
                    yield (
                        (donor, variant, DASH, DASH),
                        {**dict.fromkeys(columns), "same model": rate(whole(some, SAME))},
                    )
                    continue
                found = {keys: whole(some, MAPPED, keys) for keys in SPLITS}
                for keys in [keys for keys in SPLITS if len(found[keys])]:
                    yield (donor, variant, blocks(found[keys]), keys), _moved(model, some, variant, found[keys], keys)
                across = select(some, condition=MAPPED, keys="disjoint").query("fit_variant != variant")
                for name, mapped in across.groupby("fit_variant", sort=False):
                    known = _mapped(model, some, variant, mapped)
                    controls = dict.fromkeys(
                        ("self map", "shuffled map", "mean vector", "best other block", "that block")
                    )
                    yield (donor, variant, blocks(mapped), f"disjoint, fit on {name}"), {**controls, **known}

    columns = [
        "cross-model", "seeds", "same model", "self map", "shuffled map", "mean vector", "best other block", "that block", "reader",
        "attention on donor's entry", "map R2 on the test",
    ]  # fmt: skip
    caption = (
        "Output transplant between two models: the share of hosts that answer with the entry A which the donor's prompt asks, with the host's Address "
        "outputs at the last token made by a linear map of the donor's; of the map's seeds, the lowest and the highest. Keys: whether the test asks keys "
        "that the fit asked; only disjoint keys support a claim of transfer, shared ones may be remembered. Same model: the host's own outputs of a run "
        "that asks A, without a map. Self map: the donor asks what the host asks, and the share is of those that keep their answer. Shuffled: a map of "
        "pairs that do not belong together; mean: a constant. Best other block: a map from another block of the donor. Attention is the reader's, of "
        "the cross-model run; R2 that of the map on the test's dictionaries, a mean over seeds."
    )
    return build("cross-transplant", caption, ("donor", "variant", "blocks", "keys"), columns, models, lines)


def _moved(model: Results, rows: pd.DataFrame, variant: str, mapped: pd.DataFrame, keys: str) -> dict[str, Estimate | str | None]:  # fmt: skip
    """The cells of a variant whose maps were fitted in it, on keys of one split."""
    others = {name: rate(whole(some, OTHER, keys)) for name, some in select(rows, condition=OTHER).groupby("source")}
    best, value = best_of(others)
    return {
        **_mapped(model, rows, variant, mapped),
        "self map": rate(whole(rows, SELF, keys), "kept"),
        "shuffled map": rate(whole(rows, SHUFFLED, keys)),
        "mean vector": rate(whole(rows, MEAN, keys)),
        "best other block": value,
        "that block": best,
    }


def _mapped(model: Results, rows: pd.DataFrame, variant: str, mapped: pd.DataFrame) -> dict[str, Estimate | str | None]:
    """The cells about mapped runs, and the host's own outputs."""
    watched = metrics.heads(mapped)
    head = next((head for head in model.circuit(variant).readers if head in watched), next(iter(watched), None))
    seeds = by_seed(mapped)
    fit = by_seed(mapped, "map_r2_test") if "map_r2_test" in mapped else []
    return {
        "cross-model": rate(mapped),
        "seeds": f"{number(min(seeds))} to {number(max(seeds))}" if len(seeds) > 1 else None,
        "same model": rate(whole(rows, SAME)),
        "reader": _name(head) if head else None,
        "attention on donor's entry": estimate(metrics.attention(mapped, head, "donor_index"), mapped["pair"]) if head else None,
        "map R2 on the test": number(sum(fit) / len(fit)) if fit else None,
    }  # fmt: skip


def replacement(models: Sequence[Results]) -> Table:
    """Section 5.7: accuracy with a donor's block in place of the host's, beside everything else that might stand there."""

    def lines(model: Results) -> Iterator[Line]:
        for donor, rows in by_donor(model.rows, "replace"):
            for (variant, slot), some in rows.groupby(["variant", "role"], sort=False):
                cut = stopped_after(some)
                about = slot if cut is None else f"{slot}, stopped after L{cut}"
                own = select(some, arm=stand_ins.DONOR)
                yield (donor, variant, blocks(own), about), _stood_in(model, variant, some, replaced.measure_of(cut))

    columns = [
        INTACT, "removed", "linear projection", "donor's block", "reader", "attention", "mixers zeroed", "best other block", "that block",
        "own block, refitted", "donor - best control", "best control", "note", "R2 of the maps", "worst positions",
    ]  # fmt: skip
    caption = (
        "Block replacement: accuracy (of a host that is stopped after a layer: among the dictionary's values) with the donor's block between two linear maps "
        "in place of the host's, and with each control, whose maps are fitted likewise; the test's keys are not those of the fit. In the slot both, the "
        "donor's Encode stands in for the host's in every arm but intact. Attention is the reader's on the asked entry, with the donor's block. Own block, refitted: the host's "
        "own block between two fitted maps, which is what maps lose by themselves. Donor - best control: the paired difference from the best of removal, "
        f"linear projection, mean, zeroed mixers, shuffled maps and other blocks. {replaced.UNINFORMATIVE}: a control comes within {replaced.MARGIN:g} of the "
        f"donor's block, or removal leaves {replaced.NOT_NEEDED:g}. R2 is that of the donor's entry and exit map on prompts without part in their fit; worst positions: "
        "where what the block writes is missed most."
    )
    return build("replacement", caption, ("donor", "variant", "blocks", "slot"), columns, models, lines)


def _stood_in(model: Results, variant: str, rows: pd.DataFrame, measure: str) -> dict[str, Estimate | str | None]:
    """The cells of one slot setting."""
    arms = {arm: replaced.rate(rows, arm, measure) for arm in rows["arm"].unique()}
    watched = metrics.heads(select(rows, arm=stand_ins.DONOR))
    head = next((head for head in model.circuit(variant).readers if head in watched), next(iter(watched), None))
    best, value = best_of({arm: one for arm, one in arms.items() if arm.startswith(f"{stand_ins.DONOR} ")})
    compared = compare(rows, measure)
    where = replaced.diagnosis(rows, head, measure) if stand_ins.DONOR in arms else {}
    maps = [where.get(f"{side}_r2", math.nan) for side in ("entry", "exit")]
    looked = replaced.on_target(rows, stand_ins.DONOR, head) if head else None
    return {
        INTACT: arms.get(stand_ins.INTACT), "removed": arms.get(stand_ins.REMOVED), "linear projection": arms.get(stand_ins.LINEAR),
        "donor's block": arms.get(stand_ins.DONOR), "reader": _name(head) if head else None,
        "attention": estimate(looked, looked.index.to_series()) if looked is not None else None,
        "mixers zeroed": arms.get(stand_ins.ZEROED), "best other block": value,
        "that block": best and best.removeprefix(f"{stand_ins.DONOR} "), "own block, refitted": arms.get(stand_ins.OWN),
        "donor - best control": compared and Estimate(*(compared[of] for of in ("value", "n", "low", "high"))),
        "best control": compared and compared["control"], "note": compared["note"] if compared else None,
        "R2 of the maps": ", ".join(number(one) for one in maps if not math.isnan(one)) or None,
        "worst positions": where.get("worst_positions"),
    }  # fmt: skip


# -- what the figure of several models shares --------------------------------------------------------------------------
def by_donor(rows: pd.DataFrame, experiment: str) -> Iterator[tuple[str, pd.DataFrame]]:
    """(donor, its rows) of a host's table; columns that they leave empty go. A donor has a folder, and a draw of pairs, of its own:
    pair 3 of one is not pair 3 of the next, so donors are never pooled."""
    own = select(rows, experiment=experiment)
    for donor, some in own.groupby("donor_model", sort=False) if "donor_model" in own else ():
        yield str(donor), some.dropna(axis=1, how="all")


def blocks(rows: pd.DataFrame) -> str:
    """ "G3 → G2": the donor's and the host's."""
    said = [" / ".join(map(str, rows[side].dropna().unique())) for side in ("source", "block") if side in rows]
    return " → ".join(said) if len(rows) else DASH


def best_of(rates: dict[str, Estimate]) -> tuple[str | None, Estimate]:
    """The highest of some rates, and its name; of none, nothing."""
    known = {name: one for name, one in rates.items() if one.n}
    best = max(known, key=lambda name: known[name].value, default=None)
    return best, known[best] if best else NOTHING


def compare(rows: pd.DataFrame, measure: str) -> dict[str, object] | None:
    """`replaced.comparison` with every control that these rows of one slot have; None without the two that it needs."""
    arms = list(rows["arm"].unique())
    fixed = [stand_ins.REMOVED, stand_ins.LINEAR, stand_ins.MEAN, stand_ins.ZEROED, stand_ins.SHUFFLED]
    controls = [*fixed, *(arm for arm in arms if arm.startswith(f"{stand_ins.DONOR} "))]
    return replaced.comparison(rows, controls, measure) if {stand_ins.DONOR, stand_ins.REMOVED} <= {*arms} else None


def stopped_after(rows: pd.DataFrame) -> int | None:
    """The layer after which the host stopped, or None."""
    cut = next(iter(rows["cut"].dropna().unique()), None) if "cut" in rows else None
    return None if cut is None else int(cut)


def _name(head: tuple[int, int]) -> str:
    return f"L{head[0]}H{head[1]}"
