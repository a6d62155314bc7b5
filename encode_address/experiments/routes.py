"""Routes (paper section 3.18): does the bound value reach the answer by keys and values, or by recurrent states?

The clean prompt c and the corrupted one x have the values of two entries exchanged, one of them the asked one; D(run) = logit(c's answer)
- logit(x's answer) at the last token T. What comes after a cut sees what came before it in two ways only: by the softmax layers' keys
and values KV there (KV heads, positions, head_dim), and by the linear layers' states S (recurrent and convolutional). In a run of x let

    arm      KV before the cut    S at the cut             KV'/S' := those of
    kv       KV(c)                S(x)
    state    KV(x)                S(c)
    both     KV(c)                S(c)                     a control: 1, if nothing passes by another way
    both     KV(x)                S(x)                     "identity", a control: 0
    kv       KV(c')               S(x)                     "permuted", a control: c' is the clean prompt of another pair
    state    KV(x)                S(c')                    "permuted"

    recovery = mean over pairs of D(run) - D(x), over the mean of D(c) - D(x)      0: as corrupted, 1: as clean

(a ratio of means: one pair of small gap does not outweigh the rest, as it can in a mean of ratios). About .5 is also what a run has that
knows neither answer, so `carried` and `kept`, the shares that answer as c and as x, stand beside it.

Two cuts. "dictionary", the paper's: everything after the dictionary is recomputed from KV and S of the dictionary. All of this is
one full forward of x: for every position p of the dictionary the softmax layers' k^L(x, p), v^L(x, p), after norm and position encoding,
are put, and so is the input of every linear mixer, (d_model,), which makes S at the cut exactly what a run has that has these
inputs; so no layer's S follows a softmax layer whose KV were changed. "final": T alone is recomputed, from c's cache with x's states (kv), or from
x's cache with c's (state); T is the same token in both. There "both" is c's own cache, and 1 by construction.

Half-lives. A linear layer's state is multiplied at each token by a forget gate per head, exp(g): g = -exp(A_log) softplus(a + dt_bias) in
Gated DeltaNet, g = -exp(A_log) clamp(softplus(dt + dt_bias)) in Mamba-2. Half-life: ln 2 / -mean(g) tokens. The delta rule also
overwrites, so a value can be gone earlier; what is written again can last longer.

Probes: what can be read off the states, used or not (see `probes`).

If the value travelled by states, state would recover it and kv would not. A probe that reads it off the state at the dictionary's end
would show that it is there, not that the answer comes from it. After the last token only the states of linear layers behind a reader
can have it, so the 1.0 that the paper has there is not to be expected of a model whose reader is its last layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import nnsight
import numpy as np
import pandas as pd
import torch
from torch.nn.functional import softplus

from encode_address.errors import RunError
from encode_address.experiments import probes
from encode_address.experiments.base import Conclusion, Setting, incapable
from encode_address.experiments.removal import places
from encode_address.metrics import select
from encode_address.models.layout import Layout
from encode_address.run.batch import ids_of, in_batches
from encode_address.run.cells import FINAL, FULL, Cell, Edit
from encode_address.run.reading import Reading
from encode_address.stats import Estimate, estimate, per_pair, ratio
from encode_address.tasks import Prompt, Swap

SUMMARY = "routes: whether the bound value reaches the answer by keys and values or by states; half-lives; state probes"
PAPER, N, QUICK_N = "3.18", 100, 24
NEEDS_CIRCUIT, ADAPTIVE = False, False
CUTS = ("dictionary", "final")
HALF = 0.5  # recovery of a run that knows neither answer
HALF_LIFE_PROMPTS = 24


# -- routes ------------------------------------------------------------------------------------------------------------
def cells(
    swaps: Sequence[Swap], layout: Layout, cuts: Sequence[str] = CUTS, labels: Mapping[str, Any] | None = None
) -> list[Cell]:
    """Both prompts of every pair as they are, and the corrupted one with each arm, at each cut."""
    out = []
    for cut in cuts:
        for i, swap in enumerate(swaps):
            x, path = swap.corrupted, FULL if cut == "dictionary" else FINAL
            outcomes = (("carried", swap.clean.answer), ("kept", x.answer))
            shared = {
                "experiment": "routes", "part": "routes", **(labels or {}), "position": cut, "pair": swap.pair,
                "target": swap.target,
            }  # fmt: skip
            for arm, prompt in (("corrupted", x), ("clean", swap.clean)):
                own = {**shared, "arm": arm, "donor": ""}
                out.append(Cell("none", prompt, path, outcomes=outcomes, labels=own))
            for arm, donor, kv, states in arms(swap, another(swaps, i)):
                given = {"outcomes": outcomes, "labels": {**shared, "arm": arm, "donor": donor}}
                if cut == "final":
                    out.append(Cell("state", kv, path, layout.linear_layers, donor=states, mode="both", **given))
                    continue
                here = places(x, "dictionary")
                also = (
                    Edit("value", layout.softmax_layers, here, kv, here),
                    Edit("input", layout.linear_layers, here, states, here),
                )
                out.append(Cell("key", x, path, layout.softmax_layers, here, kv, here, also=also, **given))
    return out


def arms(swap: Swap, other: Prompt | None) -> Iterator[tuple[str, str, Prompt, Prompt]]:
    """(arm, donor, whose keys and values, whose states)."""
    c, x = swap.clean, swap.corrupted
    yield "kv", "clean", c, x
    yield "state", "clean", x, c
    yield "both", "clean", c, c
    yield "both", "identity", x, x
    if other is not None:
        yield "kv", "permuted", other, x
        yield "state", "permuted", x, other


def another(swaps: Sequence[Swap], i: int) -> Prompt | None:
    """The clean prompt of the next pair that can stand in for this one's: of its length, with its last token."""
    own = swaps[i].corrupted
    others = (swap.clean for swap in (*swaps[i + 1 :], *swaps[:i]))
    return next((p for p in others if len(p) == len(own) and p.ids[-1] == own.ids[-1]), None)


def recovery(rows: pd.DataFrame, arm: str, donor: str = "clean", cut: str = "dictionary") -> Estimate:
    """The share of the gap between corrupted and clean that an arm recovers, with a bootstrap over pairs."""
    rows = select(rows, part="routes", position=cut)
    margin = {a: per_pair(select(rows, arm=a), "margin") for a in ("corrupted", "clean")}
    given = per_pair(select(rows, arm=arm, donor=donor), "margin")
    return ratio((given - margin["corrupted"]).dropna(), margin["clean"] - margin["corrupted"])


def carried(rows: pd.DataFrame, arm: str, donor: str = "clean", cut: str = "dictionary") -> Estimate:
    """The share that answers with the clean answer."""
    some = select(rows, part="routes", arm=arm, donor=donor, position=cut)
    return estimate(some["carried"], some["pair"])


# -- half-lives --------------------------------------------------------------------------------------------------------
def gate_projection(model: Any, layer: int) -> str:
    """The name of the projection, in a linear mixer, that its forget gate is made from."""
    mixer = model.layers[layer].mixer._module
    names = ("in_proj_a", "in_proj_ba", "in_proj") if hasattr(mixer, "A_log") and hasattr(mixer, "dt_bias") else ()
    for name in names:
        if hasattr(mixer, name) and (name != "in_proj" or hasattr(mixer, "time_step_limit")):
            return name
    raise RunError(
        f"{model.name}: no forget gate is known in L{layer} ({type(mixer).__name__}); half-lives are those of Gated "
        "DeltaNet and Mamba-2"
    )


def log_decay(mixer: torch.nn.Module, name: str, projected: torch.Tensor) -> torch.Tensor:
    """g, (batch, positions, heads), from what the projection `name` gave, as the module's own forward computes it."""
    bias, heads = mixer.dt_bias, mixer.A_log.shape[0]
    if name == "in_proj":  # the last of its parts; the kernel adds the bias in the projection's precision
        step = softplus(projected[..., -heads:] + bias.to(projected.dtype)).clamp(*mixer.time_step_limit)
    else:
        if name == "in_proj_ba":  # per key head: b of its value heads, then a
            projected = projected.unflatten(-1, (mixer.num_k_heads, 2, -1))[..., 1, :].flatten(-2)
        step = softplus(projected.float() + bias)
    return -mixer.A_log.float().exp() * step.float()


def mean_log_decay(model, ids, names):
    """Layer -> (batch, heads), float64: the mean of g over the tokens of `ids` (batch, positions). Needs values of parameters, which
    a sandboxed job cannot read."""
    layers = model.layers
    with torch.no_grad(), model.trace(ids, logits_to_keep=1) as tracer:
        seen = nnsight.save({})
        for layer, name in names.items():
            mixer = layers[layer].mixer
            seen[layer] = log_decay(mixer._module, name, getattr(mixer, name).output).double().mean(1)
        model.stop(tracer)
    return seen


def read_gates(engine: Any, prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
    """A row per prompt, linear layer and head: the mean of g over the prompt's tokens."""
    model, rows, groups = engine.model, [], in_batches(prompts, engine.limits.tokens)
    names = {layer: gate_projection(model, layer) for layer in model.linear_layers}
    block_of = {layer: block.name for block in model.layout.blocks for layer in block.layers}
    batches = ((ids.numel(), 0, (ids, names)) for ids in (ids_of([prompts[i] for i in one]) for one in groups))
    for which, seen in zip(groups, engine.each(mean_log_decay, batches)):
        for layer, g in seen.items():
            rows += [
                {"pair": pair, "block": block_of[layer], "layer": layer, "head": head, "log_decay": value, "tokens": len(prompts[pair])}
                for pair, values in zip(which, g.tolist())
                for head, value in enumerate(values)
            ]  # fmt: skip
    return rows


def half_lives(rows: pd.DataFrame) -> dict[tuple[int, int], Estimate]:
    """(layer, head) -> tokens after which the gate has halved what a state held; the interval is over prompts."""
    out = {}
    for (layer, head), some in select(rows, part="half-life").groupby(["layer", "head"]):
        rate = estimate(-some["log_decay"], some["pair"])
        with np.errstate(divide="ignore"):
            value, low, high = (math.log(2) / np.float64(max(0.0, r)) for r in (rate.value, rate.high, rate.low))
        out[int(layer), int(head)] = Estimate(float(value), rate.n, float(low), float(high))
    return out


# -- all of it ---------------------------------------------------------------------------------------------------------
def steps(setting: Setting) -> Iterator[list[Cell] | Reading]:
    """The routes; the gates; the probes. What needs a cache is left out where one cannot be continued from."""
    labels = {**setting.labels, "split": "confirmation"}
    swaps, continues = setting.task.swaps(setting.n, setting.seed), not setting.model.uncontinued
    yield cells(swaps, setting.layout, CUTS if continues else CUTS[:1], labels)
    labels = {"experiment": "routes", **labels}
    hosts = [swap.clean for swap in swaps[:: -(-len(swaps) // HALF_LIFE_PROMPTS)]]
    yield Reading("half-life", hosts, read_gates, {**labels, "part": "half-life"})
    if continues:
        yield from probes.readings(probes.prompts(setting.task, setting.n, setting.seed), labels, setting.seed)


def conclude(rows: pd.DataFrame, setting: Setting) -> Conclusion:
    """The value travels by keys and values if these recover more than half at the dictionary's end, and states less."""
    rows = select(rows, experiment="routes")
    for arm, column in (("clean", "carried"), ("corrupted", "kept")):
        if problem := incapable(select(rows, part="routes", arm=arm, position="dictionary"), column):
            return problem
    kv, state, both = (recovery(rows, arm) for arm in ("kv", "state", "both"))
    figures: dict[str, Any] = {"recovery": _recoveries(rows)}
    why = f"of the gap keys and values of the dictionary recover {kv}, its states {state}, both {both}"
    if setting.model.uncontinued:
        reason = f"not run: {setting.model.uncontinued}"
        figures |= {"states before the last token": reason, "probes": reason}
    else:
        why += (
            f" (before the last token {recovery(rows, 'kv', cut='final')} and {recovery(rows, 'state', cut='final')})"
        )
    lives = half_lives(rows)
    figures["half-life in tokens"] = {
        f"L{layer}H{head}": f"{life.value:.3g} [{life.low:.3g}, {life.high:.3g}]"
        for (layer, head), life in lives.items()
    }
    longest = max(lives, key=lambda head: lives[head].value)
    why += (
        f"; gates halve a state in {np.median([life.value for life in lives.values()]):.2g} tokens (median of heads), the slowest "
        f"in {lives[longest].value:.3g} (L{longest[0]}H{longest[1]})"
    )
    if known := probed(rows):
        figures["probe"] = {mark: {f"L{la}": str(e) for la, e in some.items()} for mark, some in known.items()}
        floor, chance = floors(rows)
        figures |= {"presence floor": str(floor["floor_correct"]), "shuffled": str(floor["shuffled_correct"]), "chance": round(chance, 3)}  # fmt: skip
        best = {mark: max(some, key=lambda layer: some[layer].value) for mark, some in known.items()}
        told = ", ".join(f"{mark} {known[mark][layer]} (L{layer})" for mark, layer in best.items())
        why += f"; the best layer's state tells the value: {told}; knowing which values are present {floor['floor_correct']}"
    if kv.low >= HALF and state.high < HALF:
        return Conclusion("holds", why, figures)
    return Conclusion("does not hold" if kv.high < HALF or state.low >= HALF else "undecided", why, figures)


def probed(rows: pd.DataFrame) -> dict[str, dict[int, Estimate]]:
    """mark -> layer -> the share of prompts whose bound value the probe of that layer's state told."""
    rows = select(rows, part="probes")
    return {
        mark: {
            int(layer): estimate(some["correct"], some["pair"])
            for layer, some in select(rows, mark=mark).groupby("layer")
        }
        for mark in probes.MARKS
        if len(select(rows, mark=mark))
    }


def floors(rows: pd.DataFrame) -> tuple[dict[str, Estimate], float]:
    """What presence tells, and what shuffled labels give over all layers and marks; and the share of the largest class."""
    rows = select(rows, part="probes")
    one = select(rows, mark=rows["mark"].iloc[0], layer=rows["layer"].iloc[0])  # presence is the same everywhere
    return {
        "floor_correct": estimate(one["floor_correct"], one["pair"]),
        "shuffled_correct": estimate(rows["shuffled_correct"], rows["pair"]),
    }, float(one["chance"].iloc[0])


def _recoveries(rows: pd.DataFrame) -> dict[str, str]:
    """Every arm's recovery and share of clean answers, in words."""
    told = select(rows, part="routes")
    told = told[told["donor"] != ""].drop_duplicates(["position", "arm", "donor"])
    return {
        f"{cut}: {arm}, {donor}": f"{recovery(rows, arm, donor, cut)}, answers as clean {carried(rows, arm, donor, cut)}"
        for cut, arm, donor in zip(told["position"], told["arm"], told["donor"])
    }
