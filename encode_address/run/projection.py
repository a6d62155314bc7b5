"""What stands in for layers: projections, which are linear maps of each token, fitted where the engine needs them (paper
section 3.6). The other kind, another model's block between two maps, is in `run.stitch`."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import nnsight
import torch

from encode_address.errors import RunError
from encode_address.interventions import mixer_output
from encode_address.maps import Moments, RidgeMap
from encode_address.run.edits import map_outputs, pass_on, pass_through
from encode_address.tasks.prompts import Prompt

HELD_OUT = 5  # every fifth prompt chooses the penalty: its tokens share no prompt with those that are fitted
UNITS = ("layers", "mixers")
KINDS = ("ridge", "mean", "shuffled")


class StandIn:
    """What `replace` puts in place of `layers`. `unit` says of what, `data` is a hash of what is fitted (those that share it are
    fitted together), `kind` tells them apart, `digest` is a hash of all that its values depend on, `under` stands in for
    layers below while it is fitted."""

    layers: tuple[int, ...]
    unit: str
    data: str
    kind: Any
    digest: str
    under: tuple[StandIn, ...] = ()

    def cost(self, tokens: int) -> tuple[int, int]:
        """Tokens x layers, and traces, that fitting it takes in traces of at most `tokens` tokens."""
        raise NotImplementedError

    def fit(self, engine: Any) -> dict[Any, Any]:
        """What it is once fitted, and all that share its data, by their kinds. Raises RunError."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Projection(StandIn):
    """What stands in for `layers`, which follow one another: linear maps of each token, fitted on `prompts`.

    unit "layers": all of them together, h_out = h_in + M(h_in), with h_in (d_model,) the residual stream that enters the first
    and M fitted to h_out - h_in; MLPs are replaced too. "mixers": each layer's mixer output = M_L(its input), MLPs stay.
    kind "ridge"; controls: "mean" (M is constant, the mean write), "shuffled" (fitted on rows whose targets are
    another row's of the same batch).
    """

    layers: tuple[int, ...]
    unit: str
    prompts: tuple[Prompt, ...]
    kind: str = "ridge"

    def __post_init__(self) -> None:
        if self.unit not in UNITS or self.kind not in KINDS:
            raise RunError(f"no projection of {self.unit!r}, {self.kind!r}: use {UNITS} and {KINDS}")
        if not self.layers or self.layers != tuple(range(self.layers[0], self.layers[-1] + 1)):
            raise RunError(f"layers {self.layers} do not follow one another, so no map stands in for them")

    @cached_property
    def data(self) -> str:
        """A hash of what is fitted: kinds share the run that reads it."""
        prompts = [prompt.digest for prompt in self.prompts]
        return hashlib.sha256(repr((self.layers, self.unit, prompts)).encode()).hexdigest()[:24]

    @property
    def digest(self) -> str:
        return f"{self.data} {self.kind}"

    @property
    def last(self) -> int:
        """The last layer that has to run to fit it."""
        return self.layers[-1]

    def batches(self, tokens: int) -> Iterator[tuple[list[Prompt], bool]]:
        """The prompts in batches of one length and at most `tokens` tokens: (prompts, whether they are held out)."""
        groups: dict[tuple[int, bool], list[Prompt]] = {}
        for i, prompt in enumerate(self.prompts):
            groups.setdefault((len(prompt), i % HELD_OUT == HELD_OUT - 1), []).append(prompt)
        for (length, held_out), prompts in groups.items():
            rows = max(1, tokens // length)
            for start in range(0, len(prompts), rows):
                yield prompts[start : start + rows], held_out

    def cost(self, tokens: int) -> tuple[int, int]:
        """Tokens x layers, and traces, that fitting it takes."""
        return sum(map(len, self.prompts)) * (1 + self.last), sum(1 for _ in self.batches(tokens))

    def fit(self, engine: Any) -> dict[str, Fitted]:
        return fit(engine, self)


@dataclass(frozen=True)
class Fitted:
    """A fitted projection: layer -> weight (d_model, d_model), bias (d_model,), and the worst map's held-out R^2."""

    maps: dict[int, tuple[torch.Tensor, torch.Tensor]]
    r2: float
    mixers: bool

    @property
    def columns(self) -> dict[str, float]:
        return {"map_r2": self.r2}

    def write(self, layer: int, returns: int = 0) -> tuple:
        """What it does to one of its layers, for `apply_edits`; `returns` is the family's `layer_returns`."""
        if self.mixers:
            return layer, "output", map_outputs, self.maps[layer]
        maps = self.maps.get(layer)
        if maps:
            return layer, "residual", pass_through, (*maps, returns)
        return layer, "residual", pass_on, (returns,)


def fit(engine: Any, projection: Projection) -> dict[str, Fitted]:
    """Every kind of a projection, by its name; one run over the prompts serves all of them."""
    model, unit = engine.model, projection.unit
    inner = projection.layers if unit == "mixers" else projection.layers[:1]
    first, last = projection.layers[0], projection.last
    sums = {(layer, paired, held): Moments() for layer in inner for paired in (True, False) for held in (True, False)}
    generator = torch.Generator().manual_seed(0)
    groups = list(projection.batches(engine.limits.tokens))
    each = 8 * len(inner) * model.config.hidden_size
    batches = (
        (ids.numel(), ids.numel() * each, (ids, unit, first, last, list(inner)))
        for ids in (torch.tensor([p.ids for p in prompts]) for prompts, _ in groups)
    )
    for (_, held_out), seen in zip(groups, engine.each(through_layers, batches, 1 + last)):
        for layer, pair in seen.items():
            x, y = (rows.flatten(0, 1).double().cpu() for rows in pair)
            sums[layer, True, held_out].add(x.numpy(), y.numpy())
            other = torch.randperm(len(y), generator=generator)
            sums[layer, False, held_out].add(x.numpy(), y[other].numpy())
    ridge = {layer: RidgeMap().fit_moments(sums[layer, True, False], sums[layer, True, True]) for layer in inner}
    mixed = {layer: RidgeMap().fit_moments(sums[layer, False, False], sums[layer, False, True]) for layer in inner}
    means = {layer: (_tensor(0 * found.coef_, model), _tensor(found.mean_y_, model)) for layer, found in ridge.items()}
    own = unit == "mixers"
    return {
        "ridge": _fitted(ridge, model, own),
        "shuffled": _fitted(mixed, model, own),
        "mean": Fitted(means, 0.0, own),
    }


def through_layers(model, ids, unit, first, last, inner):
    """Layer -> what enters it and what it adds, (batch, positions, d_model) each: of unit "layers" all of `first` to `last` as one,
    of "mixers" each mixer of `inner` by itself."""
    layers = model.layers
    with torch.no_grad(), model.trace(ids, logits_to_keep=1) as tracer:
        seen = nnsight.save({})
        if unit == "layers":
            entering = layers[first].input.clone()
            seen[first] = entering, mixer_output(layers[last]) - entering
        else:
            for layer in inner:
                entering = layers[layer].mixer.input.clone()
                seen[layer] = entering, mixer_output(layers[layer].mixer).clone()
        model.stop(tracer)
    return seen


def _fitted(found: dict[int, RidgeMap], model: Any, mixers: bool) -> Fitted:
    maps = {layer: (_tensor(one.coef_, model), _tensor(one.intercept_, model)) for layer, one in found.items()}
    return Fitted(maps, min(one.r2_ for one in found.values()), mixers)


def _tensor(array: Any, model: Any) -> torch.Tensor:
    return torch.tensor(array, dtype=torch.float32, device=model.device)


def costs(wanted: Sequence[StandIn], tokens: int, fitted: Collection[str] = ()) -> tuple[int, int]:
    """Tokens x layers, and traces, that fitting these takes, and what they are fitted under; `fitted` are there already."""
    needed: dict[str, StandIn] = {}

    def need(one: StandIn) -> None:
        if one.data not in fitted and one.data not in needed:
            needed[one.data] = one
            for below in one.under:
                need(below)

    for one in wanted:
        need(one)
    each = [one.cost(tokens) for one in needed.values()]
    return sum(cost for cost, _ in each), sum(traces for _, traces in each)
