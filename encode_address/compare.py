"""`encode-address compare`: a table beside the published numbers, and the shapes of its results beside the paper's.

*Numbers.* `published/published.csv` has the numbers of the paper and its repository. Where the model (by name), experiment, variant, unit,
position, head, measure and condition are those of stored rows, ours is the estimate of the experiment's own functions (paper section 4), with
its 95 % interval [l, u] and n pairs. Of the published value p the interval [l', u'] is Wilson's, for a share of n pairs, or p -+ 1.96 SEM where
one was printed. The difference d = ours - p has the interval

    d - sqrt((ours - l)^2 + (u' - p)^2)   to   d + sqrt((u - ours)^2 + (p - l')^2),

which for two shares is Newcombe's hybrid score interval. Accuracy averages both forms of a pair, so n pairs make it too wide, never too narrow;
published values are rounded, mostly to .01, which it does not know of. Without n or SEM there is no test. With hundreds of rows, one in twenty
differs by chance.

*Shapes.* Per variant, a claim of the paper is a list of statements about intervals, each true, false or open: a share is "most" where its lower
bound is at least one half, "few" where its upper bound is below. All true: agrees; one false: disagrees; else undecided. Shapes say nothing of
numbers, and are all that is compared for models that the paper does not have. If a model had no such circuit, its shapes would disagree.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from encode_address import metrics
from encode_address.errors import EncodeAddressError
from encode_address.experiments import encode, encode_linear, pruning, query_key, state, upstream, writers
from encode_address.experiments.base import Circuit, incapable
from encode_address.metrics import select
from encode_address.models.layout import Layout
from encode_address.models.loading import BUNDLED
from encode_address.run.store import read, write_text
from encode_address.stats import NOTHING, Estimate, difference, estimate, per_pair, wilson

PUBLISHED = Path(__file__).parent / "published" / "published.csv"
FACTORS = ["experiment", "variant", "unit", "position", "reader", "measure", "condition"]
KEY = ["model", *FACTORS, "relation", "source"]
COLUMNS = [
    "kind", "model", *FACTORS, "ours", "low", "high", "n", "relation", "published", "published_n", "difference", "difference_low",
    "difference_high", "result", "sd", "source", "spec_section", "note", "setting",
]  # fmt: skip
SHARES = {"accuracy", "choice_accuracy", "redirected", "kept", "carried", "top1"}
MEAN_OF = {"pruning": pruning.VARIANTS, "scaling": ("chat8", "list8", "rev8")}  # the variants of variant "mean"
EXCLUDES, INCLUDES = "differs", "no difference seen"
HALF = 0.5


def published() -> pd.DataFrame:
    """The published numbers (columns: see `published/README.md`); what is empty is "" in words and NaN in numbers."""
    table = pd.read_csv(PUBLISHED, dtype=str, keep_default_na=False)
    return table.assign(**{column: pd.to_numeric(table[column]) for column in ("value", "n", "sem")})


# -- results folders ------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Source:
    """A finished run: its rows (of the confirmation split), the name of its experiment ("find"), and its model."""

    folder: Path
    model: str
    experiment: str
    rows: pd.DataFrame
    verdict: dict[str, Any] = field(default_factory=dict)


def sources(folder: str | Path) -> list[Source]:
    """The finished runs in a folder: a model's, an experiment's, or one that holds models'. Raises EncodeAddressError."""
    folder = Path(folder)
    places = [folder, *sorted(folder.glob("*")), *sorted(folder.glob("*/*"))] if folder.is_dir() else []
    found = [_source(place) for place in places if (place / "cells.parquet").is_file()]
    if not found:
        raise EncodeAddressError(
            f"no finished results in {folder}: give the folder that `encode-address find` or `run` wrote, or the one that holds it"
        )
    return found


def _source(folder: Path) -> Source:
    rows = read(folder / "cells.parquet").to_pandas()
    rows = rows[rows["split"].isna() | (rows["split"] == "confirmation")] if "split" in rows else rows
    if "dictionary_seed" in rows and rows["dictionary_seed"].nunique() > 1 and "pair" in rows:
        rows = rows.assign(pair=rows["dictionary_seed"].astype(str) + ":" + rows["pair"].astype(str))
    verdict, manifest = _json(folder / "verdict.json"), _json(folder / "manifest.json")
    named = verdict.get("model") or manifest.get("model")
    model = named or (str(rows["model"].iloc[0]) if "model" in rows and len(rows) else folder.name)
    return Source(folder, model, verdict.get("experiment", "find"), rows, verdict)


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise EncodeAddressError(f"{path} cannot be read; run again: {error}") from error


def matched(model: str, names: Sequence[str]) -> str | None:
    """The hub name that a model's name, or that of its folder, ends in ("/data/my-qwen3.5-9b": Qwen/Qwen3.5-9B)."""
    own = Path(model).name.casefold()
    for name in names:
        last = name.rpartition("/")[2].casefold()
        if last and own.endswith(last) and not own.removesuffix(last)[-1:].isalnum():
            return name
    return None


# -- ours, of a published row: (rows of the variant, row) -> Estimate ------------------------------------------------
def _removal(rows: pd.DataFrame, row: pd.Series) -> Estimate:
    name, unit = row["experiment"], row["unit"]
    if unit == "intact":
        some = select(rows, experiment="baseline" if name == "removal" else name, intervention="none")
    else:
        some = select(rows, experiment=name, block=unit, position="all", mode="zero")
    if some.empty:
        return NOTHING
    if row["measure"] == "accuracy":
        return metrics.accuracy(some)
    if row["measure"] == "gap":
        gaps = metrics.gap(some)
        return estimate(gaps, gaps.index.to_series())
    return _attention(select(some, form="clean"), row, "target")


def _attention(rows: pd.DataFrame, row: pd.Series, index: str) -> Estimate:
    """Of a reader that was watched: its attention on the entry of column `index`, or on all others."""
    head = _head(row["reader"])
    if head not in metrics.heads(rows):
        return NOTHING
    on = metrics.attention(rows, head, index)
    if row["measure"] == "attention_others":
        return estimate(rows[f"attn.{row['reader']}"].map(np.sum) - on, rows["pair"])
    return estimate(on, rows["pair"]) if row["measure"] in ("attention_target", "attention_donor") else NOTHING


def _transplant(rows: pd.DataFrame, row: pd.Series) -> Estimate:
    rows = select(rows, experiment="transplant", position=row["position"])
    if row["unit"] == "intact":
        some = select(rows, intervention="none")
    else:
        some = select(rows, intervention="transplant", block=row["unit"], donor=row["condition"])
    if row["measure"] == "attention_donor":
        return _attention(some, row, "donor_index")
    return estimate(some[row["measure"]], some["pair"]) if row["measure"] in some else NOTHING


SIDES = dict(zip(("intact", "Q ablated", "K ablated", "Q+K ablated"), query_key.SIDES))


def _query_key(rows: pd.DataFrame, row: pd.Series) -> Estimate:
    head, (query, key) = _head(row["reader"]), SIDES.get(row["condition"], ("", ""))
    some = select(rows, experiment="query-key", ablation="zero", query_from=query, key_from=key)
    some = some.drop_duplicates("pair") if row["unit"] == "intact" else select(some, block=row["unit"])
    if head not in metrics.heads(some):
        return NOTHING
    measures = {"selectivity": query_key.selectivity, "top1": query_key.top1}
    return estimate(measures[row["measure"]](some, head), some["pair"]) if row["measure"] in measures else NOTHING


def _pruning(rows: pd.DataFrame, row: pd.Series) -> Estimate:
    layer = int(row["unit"][1:])
    some = select(rows, experiment="pruning", last=layer)
    if some.empty:
        return NOTHING
    if row["measure"] == "accuracy":
        return metrics.accuracy(some)
    if row["measure"] == "choice_accuracy":
        return pruning.choice(rows, layer)
    curve = select(pruning.normalised(rows, paper=True), last=layer)
    if row["measure"] != "normalised_choice_accuracy" or curve.empty:
        return NOTHING
    value, low, high = curve.iloc[0][["value", "low", "high"]]
    return Estimate(float(value), some["pair"].nunique(), float(low), float(high))


def _scaling(rows: pd.DataFrame, row: pd.Series) -> Estimate:
    if row["measure"] == "accuracy":
        some = select(rows, experiment="removal", block=row["unit"])
        return metrics.accuracy(some) if len(some) else NOTHING
    some = select(rows, experiment="scaling", block=row["unit"], arm="transplant").drop_duplicates("pair")
    return estimate(some["redirected"], some["pair"]) if row["measure"] == "redirected" else NOTHING


def _encode_linear(rows: pd.DataFrame, row: pd.Series) -> Estimate:
    whole = (row["measure"], row["condition"]) == ("accuracy", "linear")
    return encode_linear.kept(rows, row["unit"], encode_linear.LINEAR, "layers") if whole else NOTHING


def _writers(rows: pd.DataFrame, row: pd.Series) -> Estimate:
    return writers.recovered(rows, row["unit"], row["position"]) if row["condition"] == "output" else NOTHING


OURS: dict[str, Callable[[pd.DataFrame, pd.Series], Estimate]] = {
    "removal": _removal,
    "removal-mmlu": _removal,
    "transplant": _transplant,
    "query-key": _query_key,
    "state": lambda rows, row: state.redirected(rows, row["unit"], row["condition"]),
    "encode": lambda rows, row: encode.carried(rows, row["unit"], row["condition"]),
    "encode-linear": _encode_linear,
    "upstream": lambda rows, row: upstream.redirected(select(rows, block=row["unit"]), row["condition"].removeprefix("without ")),
    "pruning": _pruning,
    "scaling": _scaling,
    "writers": _writers,
}  # fmt: skip


def _head(name: str) -> tuple[int, int]:
    layer, _, head = name.removeprefix("L").partition("H")
    return (int(layer), int(head)) if layer and head else (-1, -1)


# -- the comparison ---------------------------------------------------------------------------------------------------
def compare(folder: str | Path, *more: str | Path, seeds: int | None = None) -> pd.DataFrame:
    """Numbers and shapes of the results in `folder`; with `seeds`, also the spread of its and `more` folders' rates over that
    many seeds of the dictionaries. One row per number, claim or rate (column `kind`: number, shape, seeds).

    Raises EncodeAddressError for a folder without results, and for fewer seeds than asked for.
    """
    found = sources(folder)
    rows: list[dict[str, Any]] = []
    for model in dict.fromkeys(source.model for source in found):
        own = [source for source in found if source.model == model]
        rows += [{"kind": "number", "model": model, **row} for row in _numbers(own)]
        rows += [{"kind": "shape", "model": model, **row} for row in _shapes(own)]
    if seeds is not None:
        rows += [{"kind": "seeds", **row} for row in _between_seeds([*found, *(s for f in more for s in sources(f))], seeds)]  # fmt: skip
    return pd.DataFrame(rows, columns=COLUMNS)


def _numbers(own: Sequence[Source]) -> Iterator[dict[str, Any]]:
    table = published()
    table = table[table["model"] == (matched(own[0].model, table["model"].unique()) or "no model")]
    cut: dict[tuple[int, str], pd.DataFrame] = {}
    for _, row in table[table["experiment"].isin(OURS)].iterrows():
        # An experiment's own run first; then `find`, which has several experiments' rows; then those that share rows.
        for source in sorted(own, key=lambda s: (s.experiment != row["experiment"], s.experiment != "find")):
            names = {row["experiment"], "baseline"} if row["experiment"] == "removal" else {row["experiment"]}
            if not names & set(source.rows.get("experiment", ())):
                continue
            place = id(source), row["variant"] + row["experiment"] * (row["variant"] == "mean")
            if place not in cut:
                cut[place] = _of_variant(source.rows, row)
            ours = OURS[row["experiment"]](cut[place], row) if len(cut[place]) else NOTHING
            if ours.n:
                yield {**{name: row[name] for name in (*FACTORS, "source", "spec_section", "note")}, "setting": _setting(source), **beside(ours, row)}  # fmt: skip
                break


def _of_variant(rows: pd.DataFrame, row: pd.Series) -> pd.DataFrame:
    """The rows of a variant; for a mean over variants those of all of them, as one, if they are all there."""
    if row["variant"] != "mean" or "variant" not in rows:
        return select(rows, variant=row["variant"])
    names = MEAN_OF.get(row["experiment"], ())
    some = rows[rows["variant"].isin(names)]
    some = some if set(some["variant"]) == set(names) else some.iloc[:0]
    return some.assign(pair=some["variant"].astype(str) + ":" + some["pair"].astype(str), variant="mean")


def _setting(source: Source) -> str:
    """How our rows were made, where that may be why a number differs."""
    said = {name: source.rows[name].dropna().unique() for name in ("dtype", "pool", "dictionary_seed") if name in source.rows}  # fmt: skip
    words = [f"{name.replace('dictionary_', '')} {'/'.join(f'{v:g}' if isinstance(v, float) else str(v) for v in some)}" for name, some in said.items() if len(some)]  # fmt: skip
    return ", ".join([source.experiment, *words])


def beside(ours: Estimate, row: pd.Series) -> dict[str, Any]:
    """Ours, the published value of a row, their difference with its interval, and what that says."""
    value, out = float(row["value"]), {"ours": ours.value, "low": ours.low, "high": ours.high, "n": ours.n}
    out |= {"relation": row["relation"], "published": value, "published_n": row["n"]}
    if row["relation"] in ("<=", ">="):
        beyond = ours.low > value if row["relation"] == "<=" else ours.high < value
        return {**out, "result": f"a bound: {'beyond it' if beyond else 'not beyond it'}"}
    out["difference"] = ours.value - value
    if row["relation"] == "~":
        return {**out, "result": "printed as about: no test"}
    share = row["measure"] in SHARES
    if share and row["n"] > 0:
        other = wilson(round(value * row["n"]), int(row["n"]))
        low, high = min(other.low, value), max(other.high, value)
    elif not share and row["sem"] > 0:
        low, high = value - 1.96 * row["sem"], value + 1.96 * row["sem"]
    else:
        return {**out, "result": "n unknown: no test" if share else "no spread published: no test"}
    below = out["difference"] - math.hypot(ours.value - ours.low, high - value)
    above = out["difference"] + math.hypot(ours.high - ours.value, value - low)
    result = INCLUDES if below <= 0 <= above else EXCLUDES
    return {**out, "difference_low": below, "difference_high": above, "result": result}


# -- shapes -----------------------------------------------------------------------------------------------------------
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


def _shapes(own: Sequence[Source]) -> Iterator[dict[str, Any]]:
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
                    judged[variant] = {"variant": variant, "result": _result(parts), "note": said, "setting": _setting(source)}  # fmt: skip
        yield from ({**shared, **line} for line in judged.values() or ({"result": "not run"},))


def _result(parts: Parts) -> str:
    true = [is_true for _, is_true in parts]
    return "disagrees" if False in true else "undecided" if None in true else "agrees"


def _verdicts(own: Sequence[Source]) -> list[dict[str, Any]]:
    """What was said of these runs; of an experiment by itself, what `find` said in the folder above too."""
    above = [_json(source.folder.parent / "verdict.json") for source in own if source.experiment != "find"]
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


# -- seeds ------------------------------------------------------------------------------------------------------------
def _between_seeds(found: Sequence[Source], k: int) -> list[dict[str, Any]]:
    """Of every rate that k seeds have: mean and standard deviation over seeds, and what drawing pairs alone would give."""
    if k < 2:
        raise EncodeAddressError("a spread needs two seeds or more: --seeds 2")
    columns = {"accuracy": "correct", "choice_accuracy": "choice_correct", **{name: name for name in ("redirected", "kept", "carried")}}  # fmt: skip
    out, few = [], []
    for model, name in dict.fromkeys((source.model, source.experiment) for source in found):
        rows = [s.rows for s in found if (s.model, s.experiment) == (model, name) and "dictionary_seed" in s.rows]
        table = pd.concat(rows, ignore_index=True).drop_duplicates("key") if rows else pd.DataFrame()
        seeds = sorted(table["dictionary_seed"].dropna().unique()) if len(table) else []
        if len(seeds) < k:
            few.append((model, name, seeds))
            continue
        factors = [f for f in metrics.FACTORS if f in table and f != "split"]
        table = table.assign(**{f: table[f].astype(object).fillna("").astype(str) for f in factors})
        for measure, column in columns.items():
            if column not in table:
                continue
            some = table[table[column].notna()].assign(value=lambda t, c=column: t[c].astype(float))
            each = some.groupby([*factors, "dictionary_seed"], sort=False).agg(value=("value", "mean"), n=("pair", "nunique")).reset_index()  # fmt: skip
            for setting, group in each.groupby(factors, sort=False):
                if len(group) >= k:
                    out.append({"model": model, "measure": measure, **_spread(dict(zip(factors, setting)), group)})
    if not out:
        nothing = (found[0].model, found[0].experiment, [])
        model, name, seeds = max(few, key=lambda one: len(one[2]), default=nothing)
        job = f"find --model {model}" if name == "find" else f"run {name} --model {model}"
        new = next(seed for seed in range(k + len(seeds)) if seed not in seeds)
        raise EncodeAddressError(
            f"--seeds {k} needs rows of {k} seeds and {model} has {len(seeds)} ({', '.join(f'{s:g}' for s in seeds) or 'none'}): run `encode-address {job} "
            f"--seed {new} --out results-seed{new}`, and name results-seed{new} after the first folder"
        )
    return out


def _spread(setting: dict[str, str], group: pd.DataFrame) -> dict[str, Any]:
    value, pairs = group["value"], int(group["n"].min())
    chance = math.sqrt((value * (1 - value) / group["n"]).mean())
    own = {"experiment": setting.pop("experiment"), "variant": setting.pop("variant", ""), "unit": setting.pop("block", "") or "intact", "position": setting.pop("position", ""), "reader": setting.pop("reader", "")}  # fmt: skip
    how = ", ".join(v for name, v in setting.items() if v and name not in ("layers", "path"))
    seeds = ", ".join(f"{seed:g}" for seed in group["dictionary_seed"])
    note = f"seeds {seeds}; lowest {value.min():.3f}, highest {value.max():.3f}; drawing pairs alone gives an sd of up to {chance:.3f}"
    return {**own, "condition": how, "ours": value.mean(), "sd": value.std(ddof=1), "n": pairs, "note": note}


# -- as text ----------------------------------------------------------------------------------------------------------
def write(frame: pd.DataFrame, folder: str | Path) -> Path:
    """Write DIR/compare.csv, whole or not at all. Raises StoreError."""
    path = Path(folder) / "compare.csv"
    write_text(path, frame.dropna(axis=1, how="all").to_csv(index=False, float_format="%.6g"))
    return path


def as_text(frame: pd.DataFrame) -> str:
    """What there is to read: per model, whose numbers these are; numbers, shapes and seeds as tables."""
    return "\n\n".join(
        block for model, rows in frame.groupby("model", sort=False) for block in _model_text(model, rows)
    )


def _model_text(model: str, rows: pd.DataFrame) -> Iterator[str]:
    numbers, shapes, seeds = (rows[rows["kind"] == kind] for kind in ("number", "shape", "seeds"))
    table = published()
    names = [name for name in table["model"].unique() if name]
    name = matched(model, names)
    if name is None and model in BUNDLED:
        yield f"{model} is a bundled model and none of the paper's: what is compared are shapes of results, not numbers."
    elif name is None:
        yield f"no published numbers for {model}; published are: {', '.join(names)}. What is compared are shapes of results."
    else:
        tested = numbers["result"].isin((EXCLUDES, INCLUDES)).sum()
        apart = (numbers["result"] == EXCLUDES).sum()
        there, here = (t["experiment"].value_counts() for t in (table[table["model"] == name], numbers))
        more = ", ".join(f"{e} {int(c)}" for e, c in there.sub(here, fill_value=0).items() if c > 0)
        yield (
            f"{model} beside the published numbers of {name} (matched by name): {len(numbers)} numbers, {tested} tested, "
            f"{apart} differ (the 95 % interval of the difference leaves out 0)."
        )
        if len(numbers):
            yield _numbers_text(numbers)
        if more:
            yield f"published, with nothing here to put beside: {more}"
    lines = [["shape of results", "here", "on", "in the paper"]]
    for (says, paper, result), some in shapes.groupby(["condition", "source", "result"], sort=False):
        lines.append([says, result, ", ".join(some["variant"].dropna()), paper])
    yield _aligned(lines)
    yield (
        "\n".join(
            f"  {row['condition']} ({row['variant']}): {row['note']}"
            for _, row in shapes[shapes["note"].notna()].iterrows()
        )
        or "  none of this was run here"
    )
    if len(seeds):
        moved = seeds[seeds["sd"] > 0]
        yield f"rates over seeds of the dictionaries (one model; not seeds of its training): {len(seeds)}, of which {len(seeds) - len(moved)} are the same for every seed"  # fmt: skip
        yield _aligned([["experiment", "variant", "unit", "position", "condition", "measure", "mean", "sd", "n", "seeds"], *([_plain(r[c]) for c in ("experiment", "variant", "unit", "position", "condition", "measure")] + [f"{r['ours']:.3f}", f"{r['sd']:.3f}", f"{r['n']:g}", r["note"]] for _, r in moved.iterrows())])  # fmt: skip


def _numbers_text(numbers: pd.DataFrame) -> str:
    lines = [["experiment", "variant", "unit", "position", "reader", "measure", "condition", "ours", "n", "published", "n", "difference", "result", "source"]]  # fmt: skip
    for _, r in numbers.iterrows():
        between = f" [{r['difference_low']:+.2f}, {r['difference_high']:+.2f}]" if pd.notna(r["difference_low"]) else ""
        lines.append([
            *(_plain(r[c]) for c in FACTORS), f"{r['ours']:.2f} [{r['low']:.2f}, {r['high']:.2f}]", f"{r['n']:g}",
            f"{'' if r['relation'] == '=' else r['relation'] + ' '}{r['published']:g}", "" if pd.isna(r["published_n"]) else f"{r['published_n']:g}",
            "" if pd.isna(r["difference"]) else f"{r['difference']:+.2f}{between}", r["result"], f"{r['source']} ({r['spec_section']})",
        ])  # fmt: skip
    return _aligned(lines)


def _plain(value: Any) -> str:
    return "" if pd.isna(value) else str(value)


def _aligned(lines: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths)).rstrip() for line in lines)
