"""What `transfer` runs: the maps it fits, and a host's cells under each condition (paper 3.11, 3.12).

A *draw* is a set of fit dictionaries, a *fit* one map from a draw, an *arm* what a fit does to the test's hosts. At the last token T,
with x the donor's mixer outputs at T over the layers of a block, side by side, and M a map to those of the host's Address:

    mapped          y := M(x), donor asks A            mapped-self    donor asks B, as the host: it must stay
    shuffled        M of pairs that do not belong together            mean           M constant
    other-source    x of another block of the donor     embedding      x the static embedding of key A
    same-model      y the host's own, asked A           host           nothing is done
    mapped-by-key   as mapped, but the penalty is chosen on rows that ask keys which no fitted row asks; then all are fitted

Arms of the mapped condition come with fewer fit prompts, with fewer distinct fit keys, with fit keys that the test shares, and fitted in
another template.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from encode_address.cross.outputs import Outputs
from encode_address.cross.pairs import Both, Question
from encode_address.errors import RunError
from encode_address.experiments.base import Heads
from encode_address.maps import OUTPUT_GRID, Moments, RidgeMap
from encode_address.run.cells import EMBED, FINAL, Cell
from encode_address.run.given import Given

HOST, SAME, MAPPED, SELF = "host", "same-model", "mapped", "mapped-self"
SHUFFLED, MEAN, OTHER, EMBEDDING = "shuffled", "mean", "other-source", "embedding"
BY_KEY = "mapped-by-key"
CONDITIONS = (HOST, SAME, MAPPED, BY_KEY, SELF, SHUFFLED, MEAN, OTHER, EMBEDDING)
CURVE = (25, 50, 100, 200, 400, 800, 1600)  # fit prompts
DISTINCT = (8, 16, 32)  # fit keys
HELD_OUT_MOST, HELD_OUT_LEAST, HELD_OUT_SHARE = 500, 5, 5  # paper 3.11: min(500, max(5, n / 5)) rows choose the penalty
ROWS_PER_FEATURE = 0.1  # the paper's own fits have .13 (9B: 1,600 rows, 12,288 features)
SHUFFLE_SEED = 1


@dataclass(frozen=True)
class Site:
    """Blocks of a model, by name, and their layers; EMBED alone is the token embeddings."""

    name: str
    layers: tuple[int, ...]


EMBEDDINGS = Site("embedding", (EMBED,))


@dataclass(frozen=True)
class Draw:
    """Fit dictionaries. `keys` says whether the test shares theirs, `distinct` how many there are, `limited` whether fewer than
    there could be."""

    variant: str
    seed: int
    keys: str
    distinct: int
    fit: tuple[Both, ...]
    limited: bool = False

    @cached_property
    def digest(self) -> str:
        return _hash([(both.donor.digest, both.host.digest) for both in self.fit])


@dataclass(frozen=True)
class Fit:
    """A map from the donor's `source` to the host's `target`, on the first `n` of a draw."""

    draw: Draw
    source: Site
    target: Site
    kind: str = "ridge"
    n: int = 0
    by_key: bool = False

    def id(self, context: str) -> str:
        """A hash of what determines it; `context` is that of both models."""
        what = (context, self.draw.digest, self.source.layers, self.target.layers, self.kind, self.n, OUTPUT_GRID)
        return _hash((*what, "by key") if self.by_key else what)

    @property
    def held_out(self) -> int:
        """The first rows, which choose the penalty."""
        return min(HELD_OUT_MOST, max(HELD_OUT_LEAST, self.n // HELD_OUT_SHARE))

    @property
    def kept(self) -> bool:
        """Whether the map is one to keep in a file: of all fit prompts and keys, and no control."""
        whole = self.kind == "ridge" and self.n == len(self.draw.fit) and not self.draw.limited
        return whole and self.source != EMBEDDINGS and not self.by_key

    def map(self, x: np.ndarray, y: np.ndarray) -> RidgeMap:
        """x (rows, features) and y (rows, targets) of the draw, in its order. Raises RunError for too few rows."""
        if self.by_key:
            asked = [both.donor.keys[both.index] for both in self.draw.fit[: self.n]]
            keys = sorted({*asked})
            out = {*random.Random(self.draw.seed).sample(keys, max(1, len(keys) // HELD_OUT_SHARE))}
            held = np.array([key in out for key in asked])
            parts = [Moments().add(x[: self.n][rows], y[: self.n][rows]) for rows in (~held, held)]
            return RidgeMap(OUTPUT_GRID, refit=True, rows_per_feature=ROWS_PER_FEATURE).fit_moments(*parts)
        seed = SHUFFLE_SEED if self.kind == "shuffled" else None
        chosen = Moments(seed).add(x[: self.held_out], y[: self.held_out])
        fitted = Moments(seed).add(x[self.held_out : self.n], y[self.held_out : self.n])
        return RidgeMap(OUTPUT_GRID, kind=self.kind, rows_per_feature=ROWS_PER_FEATURE).fit_moments(fitted, chosen)

    def enough(self, features: int) -> bool:
        """Whether that many rows are no error."""
        return self.n >= HELD_OUT_LEAST + 2 and self.n - self.held_out >= ROWS_PER_FEATURE * features


@dataclass(frozen=True)
class Arm:
    """One condition of the test. `fit` is None where nothing is mapped."""

    condition: str
    fit: Fit | None = None

    def lent(self, question: Question) -> Any:
        """The donor's prompt."""
        return question.donor_asks_b if self.condition == SELF else question.donor


def arms(draw: Draw, source: Site, target: Site, others: Sequence[Site], features: int) -> list[Arm]:
    """What is asked of a draw: all conditions where its keys are the test's others, else the mapped ones and their controls."""
    n = len(draw.fit)
    whole = Fit(draw, source, target, n=n)
    if not whole.enough(features):
        least = next(k for k in range(HELD_OUT_LEAST, 10**9) if Fit(draw, source, target, n=k).enough(features))
        raise RunError(f"too few fit prompts: {n} for {features} features of {source.name}; it takes {least} or more")
    out = [Arm(MAPPED, whole), Arm(SELF, whole)]
    out += [Arm(kind, Fit(draw, source, target, kind, n)) for kind in (SHUFFLED, MEAN)]
    if draw.keys == "shared":
        return out
    out += [Arm(OTHER, Fit(draw, other, target, n=n)) for other in others]
    out += [
        Arm(EMBEDDING, Fit(draw, EMBEDDINGS, target, n=n)),
        Arm(BY_KEY, Fit(draw, source, target, n=n, by_key=True)),
    ]
    curve = [Fit(draw, source, target, n=k) for k in CURVE if k < n]
    return out + [Arm(MAPPED, fit) for fit in curve if fit.enough(features)]


def host_cells(questions: Sequence[Question], target: Site, watch: Heads, labels: Mapping[str, Any]) -> list[Cell]:
    """The hosts alone, and, where there is a target, with their own outputs of the run that asks A there."""
    out = []
    for question in questions:
        given = {**labels, "condition": HOST, "keys": ""}
        out.append(_cell("none", question, watch, given))
        if not target.layers:
            continue
        lent = {"layers": target.layers, "where": question.host.final, "source": question.host.final}
        given = {**labels, "condition": SAME, "source": target.name, "block": target.name, "keys": ""}
        out.append(_cell("transplant", question, watch, given, donor=question.host_asks_a, **lent))
    return out


def donor_cells(questions: Sequence[Question], labels: Mapping[str, Any]) -> list[Cell]:
    """The donor alone, asked A: whether it can do the task."""
    return [
        Cell(
            "none",
            q.donor,
            path=FINAL,
            outcomes=(("kept", q.donor.answer),),
            labels={**labels, "experiment": "transfer", "condition": "donor", "position": "final", "pair": q.pair},
        )
        for q in questions
    ]


def mapped_cells(
    arm: Arm,
    questions: Sequence[Question],
    width: int,
    context: str,
    watch: Heads,
    labels: Mapping[str, Any],
    values: Callable[[Fit, Any], np.ndarray] | None = None,
) -> list[Cell]:
    """The hosts under one mapped arm. `values(fit, prompts)` gives (prompts, layers x d_model); None: zeros stand for them, in
    cells of the same keys, to be planned and looked up. `width` is the host's d_model, `context` that of both models."""
    fit = arm.fit
    name, layers = fit.id(context), fit.target.layers
    lent = [arm.lent(question) for question in questions]
    if values is None:
        rows = torch.zeros(1, 1).expand(len(lent), len(layers) * width)  # takes no memory
    else:
        rows = torch.tensor(values(fit, lent), dtype=torch.float32)
    given = {
        **labels,
        "condition": arm.condition,
        "source": fit.source.name,
        "block": fit.target.name,
        "keys": fit.draw.keys,
        "fit_variant": fit.draw.variant,
        "fit_prompts": fit.n,
        "fit_keys": fit.draw.distinct,
        "map": name,
    }
    out = []
    for question, prompt, row in zip(questions, lent, rows):
        each = {layer: row[i * width : (i + 1) * width][None] for i, layer in enumerate(layers)}
        put = Given(each, _hash((name, prompt.digest)))
        out.append(_cell("transplant", question, watch, given, layers=layers, where=question.host.final, given=put))
    return out


def fitted(fit: Fit, donor: Outputs, host: Outputs) -> RidgeMap:
    """The map, from plain tensors of both models."""
    x = donor.rows([both.donor for both in fit.draw.fit], fit.source.layers)
    y = host.rows([both.host for both in fit.draw.fit], fit.target.layers)
    return fit.map(x, y)


def facts(found: RidgeMap, fresh: Moments, test: Moments) -> dict[str, Any]:
    """What a map is: its errors on the rows that chose the penalty, on further dictionaries of fit keys, and on the test's."""
    return {
        "map_r2": found.r2_,
        "map_r2_fresh": found.error_on(fresh).r2,
        "map_r2_test": found.error_on(test).r2,
        "map_relative_error_test": found.error_on(test).relative_error,
        "map_rank": found.rank_,
        "map_penalty": found.relative_alpha_,
        "map_extended": found.extended_,
        "map_at_edge": found.at_edge_,
        "map_rows": found.n_rows_,
        "map_features": found.n_features_in_,
    }


def _cell(verb: str, question: Question, watch: Heads, labels: Mapping[str, Any], **kwargs: Any) -> Cell:
    host = question.host
    return Cell(
        verb,
        host,
        path=FINAL,
        outcomes=(("redirected", host.choices[question.donor_index]), ("kept", host.answer)),
        watch=tuple(watch),
        labels={
            "experiment": "transfer",
            "position": "final",
            **labels,
            "pair": question.pair,
            "host_index": question.host_index,
            "donor_index": question.donor_index,
        },
        **kwargs,
    )


def _hash(what: Any) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()[:24]
