"""Availability: can z be decoded from the last position's residual stream, whatever the arm asks?

Multinomial logistic regression on standardised residuals. Joint: one probe per layer, fitted on all arms of some instances and scored per arm on the
others'. The split is by instance, and so are the permuted labels of the floor: all arms of an instance get the same wrong label. Both take the best layer
within a seed, before seeds are averaged: the floor knows what choosing the best of many layers is worth, which plain chance does not.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from encode_address.gathering.traced import final_residuals
from encode_address.run.batch import ids_of
from encode_address.run.reading import Reading, jobs_of
from encode_address.tasks.arms import ARMS, Instance

SEEDS, SHARE, LEAST = 3, 0.6, 3  # splits, the training share, training records that a class needs
LAYERS = 6  # at most so many, evenly spread over the depth


def probe_reading(instances: Sequence[Instance], labels: Mapping[str, Any]) -> Reading:
    """One row per (layer, seed, arm, kind): the accuracy of the probe ("z") or of the floor ("permuted") on unseen instances."""
    prompts = [one[arm].prompt for one in instances for arm in ARMS]
    z = tuple(one["flexible"].latent for one in instances)
    return Reading(
        "probe", prompts, partial(read_probe, z=z), {**labels, "part": "probe"}, (z, SEEDS, SHARE, LEAST, LAYERS)
    )


def probed_layers(depth: int) -> list[int]:
    """Which layers are probed."""
    return (
        sorted({round(i * (depth - 1) / (LAYERS - 1)) for i in range(LAYERS)}) if depth > LAYERS else list(range(depth))
    )


def read_probe(engine: Any, prompts: Sequence[Any], z: Sequence[str]) -> list[dict[str, Any]]:
    """Read the residuals of prompts, instance by instance in the order of ARMS, and score the probes; see above."""
    model = engine.model
    layers = probed_layers(len(model.layers))
    size = max(1, engine.limits.tokens // len(prompts[0]))
    batches = [ids_of(prompts[start : start + size]) for start in range(0, len(prompts), size)]
    for ids in batches:
        engine.count(ids.numel())
    found = [model.ask(final_residuals, job, layers) for job in jobs_of(batches, [ids.numel() for ids in batches])]
    hidden = torch.cat(found, 1).numpy().reshape(len(layers), len(z), len(ARMS), -1)
    rows = []
    for kind in ("z", "permuted"):
        for seed in range(SEEDS):
            for at, layer in enumerate(layers):
                right, classes = score(hidden[at], np.array(z), seed, kind == "permuted")
                for arm, value in right.items():
                    rows.append(
                        {"probe": kind, "layer": layer, "seed": seed, "arm": arm, "hits": value, "classes": classes}
                    )
    return rows


def score(hidden: np.ndarray, z: np.ndarray, seed: int, permuted: bool = False) -> tuple[dict[str, float], int]:
    """Accuracy per arm on unseen instances of known classes, and how many classes there are. `hidden` (instances, arms, d).

    NaN where no unseen instance has a class that was trained on, or fewer than two classes have enough training records.
    """
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(z))
    labels = rng.permutation(z) if permuted else z
    cut = round(SHARE * len(z))
    train, test = order[:cut], order[cut:]
    names, counts = np.unique(labels[train], return_counts=True)
    known = names[counts * hidden.shape[1] >= LEAST]
    train, test = (some[np.isin(labels[some], known)] for some in (train, test))
    if len(known) < 2 or not len(test):
        return dict.fromkeys(ARMS, float("nan")), len(known)
    arms = hidden.shape[1]
    probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=200))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # separable classes have no optimum to converge to
        probe.fit(hidden[train].reshape(len(train) * arms, -1), np.repeat(labels[train], arms))
    return {arm: float((probe.predict(hidden[test, i]) == labels[test]).mean()) for i, arm in enumerate(ARMS)}, len(
        known
    )


def summarise(rows: Any) -> dict[str, dict[str, float]]:
    """Per arm: `accuracy` and `floor`, each the best layer within a seed, averaged over seeds, and their `ratio`."""
    best = rows.groupby(["probe", "arm", "seed"])["hits"].max().groupby(["probe", "arm"]).mean()
    out = {}
    for arm in [arm for arm in ARMS if ("z", arm) in best.index]:
        hit, floor = float(best["z", arm]), float(best["permuted", arm])
        out[arm] = {"accuracy": hit, "floor": floor, "ratio": hit / floor if floor else float("nan")}
    return out
