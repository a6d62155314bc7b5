"""Address and payload on one grid: when does a donor's key become readable, and when its value (arXiv 2608.15022, with our sites)?

Targets ask for K, donors for K', in the flexible arm: a lookup in a table that is printed in the prompt. At the last token one layer's
mixer output, or those of the whole Address block, := the donor's; then the last position is read through a lens at every layer r from
the patched one (p) on, r = p included. Read are the donor's key K' ("address"), what the *target's* table has for K' ("redirected": the value
that a lookup of K' finds here) and what the *donor's* table has for it ("carried": the value that the donor's own lookup had found).

    shift of x at r = M(x; patched, r) - M(x; clean, r),     M = log p(x) - mean log p(others of its kind)

The claim: the Address builds the query, the reader looks up. Then the Address' patch must leave the redirected value unreadable
until the next reader l (share of the shift at l: below a quarter at every r in [p, l)), and readable at l; the reader's patch must
make the carried value readable at l itself, where it is written. If softmax layers only gathered what is there already, the first would
rise where it is written, at p; if the Address carried values, "carried" would rise with it. Controls: a donor that asks the same key of another
table (placebo), a random direction as long as the donor's difference. Intervals draw targets and donors' keys anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from encode_address.errors import TaskError
from encode_address.experiments.base import Conclusion, Setting, incapable
from encode_address.gathering import lenses, pooling
from encode_address.gathering.rows import CLEAN, CONCEPTS, grid_readings
from encode_address.gathering.sites import Site, sites_of
from encode_address.metrics import select
from encode_address.run.reading import Reading
from encode_address.stats import NOTHING, Estimate
from encode_address.tasks.arms import Arms, arms

SUMMARY = "address and payload: whether the Address' patch makes the donor's value readable only at the next reader"
PAPER, N, QUICK_N = "-", 100, 24
NEEDS_CIRCUIT, ADAPTIVE = True, False
VARIANTS = ("chat8", "list8", "rev8")
OPTIONS = {"lens": lenses.LENSES, "lens_file": ()}
ARM = "flexible"
DONORS = ("donor", "placebo", "random")
LITTLE, MOST = 0.25, 0.5  # shares of the final shift
RELIABLE = 0.9  # split-half cosine below which a lens says nothing


def task(model: Any, variant: str, **_options: Any) -> Arms:
    """The arms of a dictionary. Raises TaskError for another family, whose tables no circuit was found on."""
    made = arms(model, variant)
    if made.family != "dictionary":
        raise TaskError(f"address-payload asks dictionaries (chat8, list8, rev8), not {variant}: use gathering")
    return made


def steps(setting: Setting) -> Iterator[Reading]:
    """The lens, then single layers' mixers and the Address block under each donor."""
    model, made = setting.model, setting.task
    labels = labels_of(setting)
    lens = lenses.KeptLens.of(setting)
    yield from lens.readings(labels)
    sites = sites_of(model, ("mixer",))
    block = address_of(setting)
    sites += [block] if block is not None and len(block.layers) > 1 else []
    for donor in DONORS:
        pairs = made.pairs(setting.n, setting.seed, placebo=donor == "placebo")
        yield from grid_readings(model, made, pairs, ARM, sites, donor, lens, labels, seed=setting.seed)


def labels_of(setting: Setting, experiment: str = "address-payload") -> dict[str, Any]:
    """The columns that all rows share."""
    shared = {"variant": setting.variant, "pool": setting.task.pool, "dictionary_seed": setting.seed}
    return {"experiment": experiment, "split": "confirmation", **shared}


def address_of(setting: Setting) -> Site | None:
    """The mixers of the Address, written together."""
    named = "+".join(setting.circuit.address) if setting.circuit else ""
    return Site("mixer", setting.layout.layers_of(named), named) if named else None


def reader_of(setting: Setting) -> int | None:
    """The first reader layer above the Address."""
    block = address_of(setting)
    above = (
        sorted(layer for layer, _ in setting.circuit.readers if block and layer > block.layer)
        if setting.circuit
        else []
    )
    return above[0] if above else None


def moved(rows: pd.DataFrame, vocabulary: int) -> pd.DataFrame:
    """The grid's shifts, in M."""
    return pooling.shifts(select(rows, experiment="address-payload"), CONCEPTS, vocabulary)


def patched(shifts: pd.DataFrame, site: Site, donor: str = "donor") -> pd.DataFrame:
    """The rows of one site under one sort of donor."""
    return select(shifts, site=site.kind, layers="-".join(map(str, site.layers)), donor=donor)


def curve(shifts: pd.DataFrame, concept: str) -> dict[int, Estimate]:
    """Readout layer -> mean shift, of the rows of one patch."""
    return {int(r): pooling.two_way(some, some[f"dM.{concept}"]) for r, some in shifts.groupby("read")}


def conclude(rows: pd.DataFrame, setting: Setting) -> Conclusion:
    """See above. Undecided where the arm is not solved, the circuit or a reader above it is missing, the lens is not reliable, or
    the patch moves nothing that could be timed."""
    found = _concluded(rows, setting)
    said = "; ".join(found.figures["limits"])
    return replace(found, why=f"{found.why}. Limits: {said}") if said else found


def _concluded(rows: pd.DataFrame, setting: Setting) -> Conclusion:
    rows = select(rows, experiment="address-payload")
    answered = select(rows, part="answer")
    figures: dict[str, Any] = {"lens": setting.options["lens"], "limits": lenses.limits(setting)}
    halves = select(rows, part="lens")
    if len(halves):
        figures["lens split-half cosine, lowest"] = round(float(halves["cosine"].min()), 4)
    hosts = select(answered, site=CLEAN, donor="donor")
    low = incapable(hosts, "kept")
    if low is not None:
        return Conclusion(low.status, f"INVALID: {low.why}", figures)
    block, reader = address_of(setting), reader_of(setting)
    if block is None or reader is None:
        missing = "no Address" if block is None else f"no reader above the Address {block.block}"
        return Conclusion("undecided", f"`find` names {missing} here: there is nothing to patch", figures)
    if len(halves) and halves["cosine"].min() < RELIABLE:
        return Conclusion(
            "undecided", f"the lens is not reliable: split halves agree to {halves['cosine'].min():.2f}", figures
        )
    grid, said = moved(rows, setting.model.config.vocab_size), pooling.answers(answered)
    at = Site("mixer", (reader,))
    address, payload = patched(grid, block), patched(grid, at)
    figures |= _figures(grid, said, block, at)
    for name, shifts, site, concept in (("Address", address, block, "redirected"), ("reader", payload, at, "carried")):
        problem = _nothing(shifts, patched(grid, site, "random"), f"dM.{concept}", reader)
        if problem:
            return Conclusion(
                "undecided", f"the {name}'s patch does not make its value readable at L{reader}: {problem}", figures
            )
    return _timed(setting, address, payload, block, reader, figures)


def _timed(
    setting: Setting, address: pd.DataFrame, payload: pd.DataFrame, block: Site, reader: int, figures: dict[str, Any]
) -> Conclusion:
    """What is readable when."""
    there = (select(address, read=reader), "dM.redirected")
    before = {r: pooling.share((select(address, read=r), "dM.redirected"), there) for r in range(block.layer, reader)}
    figures["share readable before the reader"] = {f"L{r}": str(e) for r, e in before.items()}
    key = {r: pooling.two_way(some, some["dM.address"]) for r in before if len(some := select(address, read=r))}
    rises = [f"L{r}" for r, e in key.items() if e.low > 0]
    falls = [f"L{r}" for r, e in key.items() if e.high < 0]
    last = len(setting.layout.kinds) - 1
    kept = pooling.share((select(payload, read=reader), "dM.carried"), (select(payload, read=last), "dM.carried"))
    figures["share of the reader's value readable at once"] = (
        str(kept) if last > reader else "the reader is the last layer"
    )
    said = (
        f"the Address {block.block}'s patch moves the looked-up value by {pooling.two_way(*_column(there))} nats at the reader L{reader}, "
        f"and before it by at most {max(e.value for e in before.values()):.3f} of that; the reader's own patch moves the value it carries by "
        f"{pooling.two_way(select(payload, read=reader), select(payload, read=reader)['dM.carried'])} at L{reader}; the key itself "
        + (f"becomes readable before the reader ({', '.join(rises)})" if rises else "does not become readable through the lens before it")
        + (f" and less so at {', '.join(falls)}" if falls else "")
        + ("" if last > reader else f"; L{reader} is the last layer, where the readout is the model's own answer and no longer a lens")
    )  # fmt: skip
    problems = [f"at L{r} {e} of it is readable already" for r, e in before.items() if e.low > LITTLE]
    open_ = [f"L{r} {e}" for r, e in before.items() if e.high > LITTLE >= e.low]
    if last > reader and kept.high < MOST:
        problems.append(f"only {kept} of what the reader's patch brings is readable at once")
    elif last > reader and kept.low < MOST:
        open_.append(f"at once {kept}")
    if problems:
        return Conclusion("does not hold", f"{'; '.join(problems)} ({said})", figures)
    if open_:
        return Conclusion("undecided", f"too few pairs to place it: {', '.join(open_)} ({said})", figures)
    return Conclusion("holds", said, figures)


def _column(part: tuple[pd.DataFrame, str]) -> tuple[pd.DataFrame, pd.Series]:
    return part[0], part[0][part[1]]


def _nothing(shifts: pd.DataFrame, noise: pd.DataFrame, column: str, reader: int) -> str:
    """Why a patch has no effect that could be timed, or ""."""
    real, random = select(shifts, read=reader), select(noise, read=reader)
    effect = pooling.two_way(real, real[column]) if len(real) else NOTHING
    if not effect.low > 0:
        return f"{effect} nats"
    beyond = pooling.gap((real, column), (random, column))
    return "" if beyond.low > 0 else f"{effect} nats, and beyond a random direction of that length {beyond}"


def _figures(grid: pd.DataFrame, said: pd.DataFrame, block: Site, at: Site) -> Mapping[str, Any]:
    out: dict[str, Any] = {}
    for name, site in ((f"Address {block.block}", block), (f"reader L{at.layer}", at)):
        for donor in DONORS:
            some, shifts = patched(said, site, donor), patched(grid, site, donor)
            own = {
                "accuracy": str(pooling.two_way(some, some["kept"], rate=True)),
                "redirected": str(pooling.two_way(some, some["redirected"], rate=True)),
                "carried": str(pooling.two_way(some, some["carried"], rate=True)),
            }
            own |= {c: {f"L{r}": str(e) for r, e in curve(shifts, c).items()} for c in CONCEPTS}
            out[f"{name}, {donor}"] = own
    return out
