"""Rows of the grid: one per (pair, site, patch layer, readout layer), and one per (pair, site) about what the model then answers.

Three values may become readable in a target (z = K, its table maps K to v):

    address      the donor's key K'
    redirected   what the *target's* table has for K': the value that a lookup of K' finds here
    carried      what the *donor's* table has for K': the value that the donor's own lookup found

and two may cease to be: `own key` K and `own value` v. Each has a margin over the others of its kind, and a rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from encode_address.errors import RunError
from encode_address.gathering import lenses
from encode_address.gathering import sites as places
from encode_address.gathering.sites import Site
from encode_address.gathering.traced import patch_batches
from encode_address.lens import Lens
from encode_address.run.batch import ids_of, noise_seed
from encode_address.run.plan import JOB_TOKENS
from encode_address.run.reading import Reading, jobs_of
from encode_address.tasks.arms import ArmPair, Arms

CONCEPTS = ("address", "redirected", "carried", "own key", "own value")
CLEAN = "none"
DONOR_RUNS = {
    "donor": True,
    "placebo": True,
    "random": True,
    "identity": False,
    "mean": False,
}  # whether the donor runs


def tokens_of(pair: ArmPair) -> tuple[dict[str, int], dict[str, int]]:
    """The token of each label and of each value of a pair's tables (both have the same words)."""
    label, value = pair.target["report"], pair.target["flexible"]
    return dict(zip(label.candidates, label.prompt.choices)), dict(zip(value.candidates, value.prompt.choices))


def concepts_of(pair: ArmPair) -> list[tuple[int, list[int]]]:
    """Per concept its token and its rivals'."""
    labels, values = tokens_of(pair)
    z, donor = pair.target["flexible"].latent, pair.donor["flexible"].latent
    wanted = [
        (labels, donor), (values, pair.target.table[donor]), (values, pair.donor.table[donor]),
        (labels, z), (values, pair.target.table[z]),
    ]  # fmt: skip
    return [(among[word], [token for other, token in among.items() if other != word]) for among, word in wanted]


def outcomes_of(pair: ArmPair, arm: str) -> dict[str, int | None]:
    """The answers that are told apart. Where an arm answers with values whatever z is, `redirected` is what flexible would imply;
    where no answer could be the donor's (the control), it is None."""
    record, donor = pair.target[arm], pair.donor["flexible"].latent
    _, values = tokens_of(pair)
    redirected = record.implied_token(donor) if record.implied else values[pair.target.table[donor]]
    carried = pair.donor[arm].prompt.answer
    if arm == "control" or redirected == record.prompt.answer:
        redirected = None
    known = carried in record.prompt.choices and carried not in (record.prompt.answer, redirected)
    return {"kept": record.prompt.answer, "redirected": redirected, "carried": carried if known else None}


def grid_readings(
    model: Any,
    task: Arms,
    pairs: Sequence[ArmPair],
    arm: str,
    sites: Sequence[Site],
    donor: str,
    lens: Any,
    labels: Mapping[str, Any],
    span: int = 1,
    where: str = "final",
    seed: int = 0,
) -> Iterator[Reading]:
    """The grid of one arm under one sort of donor: a reading for sites of the forward, and one for states. Without sites, and with the
    donor "none", it is the unpatched model alone.

    `lens` is a function without arguments that gives it, called only when rows are missing. `span`: the last k positions are patched; `where`
    names another span of the prompts ("passage", "asked") instead of the last positions.
    """
    groups = {"full": [s for s in sites if s.kind != "state"], "state": [s for s in sites if s.kind == "state"]}
    for path, some in groups.items():
        if (sites and not some) or (path == "state" and (not sites or where != "final")):
            continue
        prompts = [p for pair in pairs for p in (pair.target[arm].prompt, pair.donor[arm].prompt)]
        own = {
            **labels,
            "arm": arm,
            "donor": donor,
            "path": path,
            "position": where if where != "final" else f"last {span}",
        }
        read = partial(
            read_grid, pairs=pairs, arm=arm, sites=some, donor=donor, lens=lens, span=span, where=where, seed=seed
        )
        forwards = sum(tokens_for(sum(map(len, prompts[::2])), len(pairs), len(some), path, donor))
        settings = (tuple(site.name for site in some), lens.settings, span, seed)
        yield Reading("grid", prompts, read, own, settings, forwards)


def tokens_for(tokens: int, n: int, sites: int, path: str, donor: str) -> list[int]:
    """Tokens of each trace for `n` targets of `tokens` in all: what is exchanged is read once, then the targets run without a patch and once
    per site. Of states, only the last token runs again."""
    captured = [tokens * (2 if DONOR_RUNS[donor] else 1)] if sites else []
    return captured + [n if path == "state" else tokens] * (1 + sites)


def read_grid(
    engine: Any,
    _prompts: Any,
    pairs: Sequence[ArmPair],
    arm: str,
    sites: Sequence[Site],
    donor: str,
    lens: Any,
    span: int,
    where: str,
    seed: int,
) -> list[dict[str, Any]]:
    """Run one arm's grid under one sort of donor; see the module for its rows."""
    model, fitted = engine.model, lens()
    length, path = len(pairs[0].target[arm].prompt), "state" if sites and sites[0].kind == "state" else "full"
    if fitted.n:
        fitted.require_position(length - 1)
    # A mean is that of all other prompts, whatever fits; else a batch is also no more than one job.
    most = min(engine.limits.tokens // 2, JOB_TOKENS // (len(sites) + 3)) // length
    size = len(pairs) if donor == "mean" else max(1, most)
    groups = [pairs[start : start + size] for start in range(0, len(pairs), size)]
    costs = [tokens_for(length * len(some), len(some), len(sites), path, donor) for some in groups]
    given = (places.plain(model, sites), lenses.plain(fitted), "donor" if donor == "placebo" else donor)
    seen: list[dict[str, Any]] = []
    for job in jobs_of(range(len(groups)), [sum(cost) for cost in costs]):
        seen += model.ask(
            patch_batches, [_inputs(groups[i], arm, sites, fitted, span, where, seed) for i in job], *given
        )
        for tokens in (tokens for i in job for tokens in costs[i]):
            engine.count(tokens)
    return [row for some, one in zip(groups, seen) for row in _rows(model, some, arm, sites, one, fitted)]


def _inputs(
    pairs: Sequence[ArmPair], arm: str, sites: Sequence[Site], lens: Lens, span: int, where: str, seed: int
) -> dict[str, Any]:
    """What a batch's forwards are given, as `traced` has it."""
    target, donor = ([getattr(p, side)[arm].prompt for p in pairs] for side in ("target", "donor"))
    if where == "final":
        if not 0 < span <= min(len(p) for p in (*target, *donor)):
            raise RunError(
                f"a span of {span} positions does not fit prompts of {len(target[0])} tokens: use a smaller --span"
            )
        at = [[[len(p) - span + i for i in range(span)] for p in some] for some in (target, donor)]
    else:
        at = [[list(p.span(where)) for p in some] for some in (target, donor)]
    every = [concepts_of(pair) for pair in pairs]
    concepts = torch.tensor(lenses.columns(lens, [[token for token, _ in one] for one in every]))
    rivals = torch.tensor([lenses.columns(lens, [against for _, against in one]) for one in every])
    written = sorted({layer for site in sites for layer in site.layers})
    return {
        "hosts": ids_of(target),
        "donors": ids_of(donor),
        "places": tuple(torch.tensor(one) for one in at),
        "concepts": concepts,
        "rivals": rivals,
        "asked": torch.tensor([p.choices for p in target]),
        "seeds": {layer: [noise_seed(seed, layer, p.ids) for p in target] for layer in written},
    }


def _rows(
    model: Any, pairs: Sequence[ArmPair], arm: str, sites: Sequence[Site], seen: Mapping[str, Any], lens: Lens
) -> list[dict[str, Any]]:
    rows, layout, depth = [], model.layout, len(model.layers)
    readable = list(lens.readable)
    for site in (None, *sites):
        found = seen["clean" if site is None else site.name]
        name = model.name if site is None else f"{site.name} of {model.name}"
        if not all(found["landed"]):
            raise RunError(f"the intervention did not fire: what was written at {name} does not stand")
        if not (torch.isfinite(found["margin"]).all() and found["answer"]["finite"].all()):
            raise RunError(f"NaN or infinite logits: {name}; try --dtype float32")
        reads = range(depth) if site is None else site.reads(depth)
        margin, rank, said = found["margin"].tolist(), found["rank"].tolist(), found["answer"]["logits"].tolist()
        where = {"site": CLEAN, "block": "", "layer": -1, "layers": ""}
        if site is not None:
            where = {
                "site": site.kind,
                "block": site.block,
                "layer": site.layer,
                "layers": "-".join(map(str, site.layers)),
            }
            where["mixer"] = layout.kinds[site.layer]
        for i, pair in enumerate(pairs):
            who = {"pair": pair.pair, "z": pair.target["flexible"].latent, "donor_z": pair.donor["flexible"].latent}
            rows.append({"part": "answer", **who, **where, **_answered(pair, arm, said[i])})
            for at, r in enumerate(readable):
                if r not in reads:
                    continue
                far = {} if site is None else {"crossed": places.crossed(layout, site.layer, r)}
                values = {f"M.{c}": margin[at][i][j] for j, c in enumerate(CONCEPTS)}
                values |= {f"rank.{c}": rank[at][i][j] for j, c in enumerate(CONCEPTS)}
                rows.append({"part": "grid", **who, **where, "read": r, **far, **values})
    return rows


def _answered(pair: ArmPair, arm: str, logits: Sequence[float]) -> dict[str, Any]:
    """What the model chose among the arm's candidates. `distracted` is the share of the other wrong answers: 1 / how many there
    are, if one of them was chosen. `margin.<outcome>`: its logit, or the mean of the others', minus that of the target's own answer."""
    choices, known = pair.target[arm].prompt.choices, outcomes_of(pair, arm)
    best = max(logits)
    chosen = choices[logits.index(best)] if sum(logit == best for logit in logits) == 1 else None
    named = {token for token in known.values() if token is not None}
    others = [token for token in choices if token not in named]
    row: dict[str, Any] = {"chance": 1 / len(choices)}
    for name, token in known.items():
        row[name] = None if token is None else float(chosen == token)
        if name != "kept":
            own = choices.index(known["kept"])
            row[f"margin.{name}"] = None if token is None else logits[choices.index(token)] - logits[own]
    mean = sum(logits[choices.index(token)] for token in others) / len(others) if others else None
    row["margin.others"] = None if mean is None else mean - logits[choices.index(known["kept"])]
    row["distracted"] = float(chosen in others) / len(others) if others else None
    return row
