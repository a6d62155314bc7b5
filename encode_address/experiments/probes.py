"""Probes (paper section 3.18): can the value that is bound to a key be read off a layer's recurrent state?

S^L(x, q) is the recurrent state of linear layer L after the tokens before position q of prompt x, all heads, flattened: (d,). Where
d > 2,048 it is projected there by a fixed sparse random matrix. A probe is StandardScaler, PCA to at most 96 whitened dimensions,
multinomial logistic regression; it is trained on four fifths of the prompts and predicts the others (five stratified folds), so that every
prompt has one prediction of a probe that has not seen it.

The prompts are drawn for this. All ask the same key, which is at the same entry; the other keys are drawn from the pool. The values come
from k fixed ones: the asked key's is each of them in turn, so that the classes are equally frequent, and the others are drawn from the
rest. With a fixed key at a fixed place "which value is bound to it" is one question about S, whose answer is linear in S if S
stores keys and values as outer products: where this probe fails, a harder one fails as well. k is the prompts per ten, between one more
than the dictionary has entries and 20.

Marks, in order: after the asked entry ("entry": whether the probe could read a value at all), after the dictionary, before the last
token, after it. Floors: the largest class ("chance", 1/k); *presence*, the same probe of which of the k values are in the dictionary
at all, (k,) of 0 and 1, which knows as much as a bag of values can (at best 1 / entries); and the state with shuffled labels.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.random_projection import SparseRandomProjection
from threadpoolctl import threadpool_limits

from encode_address.errors import RunError
from encode_address.run.reading import Reading
from encode_address.run.steps import states_after
from encode_address.tasks import Dictionary, Prompt

ENTRY, END, BEFORE, FINAL = MARKS = ("entry", "dictionary end", "before final", "final")
PROBES_PER_PAIR = 6  # 600 prompts for the paper's 100 pairs
CLASSES, PER_CLASS, FOLDS = 20, 10, 5
WIDTH, COMPONENTS = 2048, 96
SETTINGS = (FOLDS, WIDTH, COMPONENTS, "whitened")


def prompts(task: Dictionary, pairs: int, seed: int = 0) -> list[Prompt]:
    """Six prompts per pair, and at least one of every class in every fold; see above for how they are drawn."""
    rng, n = random.Random(f"probes {seed}"), PROBES_PER_PAIR * pairs
    classes = min(CLASSES, len(task.values), max(task.size + 1, n // PER_CLASS))
    target, key, values = task.configurations[0][0], rng.choice(task.keys), rng.sample(task.values, classes)
    out = []
    for i in range(max(n, FOLDS * classes)):
        bound = values[i % classes]
        keys = rng.sample([k for k in task.keys if k != key], task.size - 1)
        others = rng.sample([v for v in values if v != bound], task.size - 1)
        keys.insert(target, key)
        others.insert(target, bound)
        out.append(task.prompt(keys, others, target))
    return out


def until(prompt: Prompt, mark: str) -> Prompt:
    """The part of a prompt that a state at `mark` has seen."""
    end = {
        ENTRY: max(prompt.span(f"key {prompt.query}") + prompt.span(f"value {prompt.query}")) + 1,
        END: prompt.span("question")[0],
        BEFORE: len(prompt) - 1,
        FINAL: len(prompt),
    }[mark]
    return replace(prompt, ids=prompt.ids[:end])


def readings(some: Sequence[Prompt], labels: Mapping[str, Any], seed: int = 0) -> Iterator[Reading]:
    """One reading per mark."""
    for mark in MARKS:
        own = {**labels, "part": "probes", "mark": mark}
        yield Reading("probes", [until(p, mark) for p in some], read, own, (seed, *SETTINGS))


def read(engine: Any, some: Sequence[Prompt]) -> list[dict[str, Any]]:
    """A row per linear layer and prompt: whether the probe of its state, and those of the floors, were right about it."""
    labels = np.array([prompt.values[prompt.query] for prompt in some])
    shuffled = np.random.default_rng(0).permutation(labels)
    seen = presence(some)
    rows = []
    with threadpool_limits(torch.get_num_threads()):
        (floor,) = right(seen, labels)
        chance = max(Counter(labels).values()) / len(labels)
        for layer, features in states(engine, some).items():
            known, none = right(features, labels, shuffled)
            rows += [
                {
                    "pair": i, "layer": layer, "label": str(labels[i]), "classes": seen.shape[1], "chance": chance,
                    "correct": bool(known[i]), "floor_correct": bool(floor[i]), "shuffled_correct": bool(none[i]),
                }
                for i in range(len(some))
            ]  # fmt: skip
    return rows


def presence(some: Sequence[Prompt]) -> np.ndarray:
    """(prompts, values): 1 where a value is in the prompt's dictionary."""
    every = sorted({value for prompt in some for value in prompt.values})
    return np.array([[float(value in prompt.values) for value in every] for prompt in some])


def right(features: np.ndarray, *labellings: np.ndarray) -> list[np.ndarray]:
    """Of each labelling (n,): whether a probe of `features` (n, d) that has not seen an item is right about it, (n,)."""
    n, d = features.shape
    found = [np.zeros(n, bool) for _ in labellings]
    kept = min(COMPONENTS, d, n - -(-n // FOLDS) - 1)
    for known, new in StratifiedKFold(FOLDS, shuffle=True, random_state=0).split(features, labellings[0]):
        pca = PCA(kept, whiten=True, svd_solver="randomized", iterated_power=2, random_state=0)
        reduced = make_pipeline(StandardScaler(), pca)
        with np.errstate(invalid="ignore"):  # a state that has forgotten all prompts alike has no variance to share out
            seen = reduced.fit_transform(features[known])
        unseen = reduced.transform(features[new])
        for labels, hits in zip(labellings, found):
            probe = LogisticRegression(max_iter=1000).fit(seen, labels[known])
            hits[new] = probe.predict(unseen) == labels[new]
    return found


def states(engine: Any, some: Sequence[Prompt]) -> dict[int, np.ndarray]:
    """layer -> (prompts, at most WIDTH): each linear layer's recurrent state after prompts of one length."""
    model, length = engine.model, len(some[0])
    size, chunks = max(1, engine.limits.tokens // length), {layer: [] for layer in model.linear_layers}
    projections: dict[int, SparseRandomProjection] = {}
    each = model.cache_bytes(0)
    ids = [torch.tensor([prompt.ids for prompt in some[start : start + size]]) for start in range(0, len(some), size)]
    batches = ((one.numel(), len(one) * each, (one,)) for one in ids)
    for saved in engine.each(states_after, batches):
        for layer, kept in chunks.items():
            if layer not in saved:
                raise RunError(f"{model.name}: L{layer} has no recurrent state in the cache: it cannot be probed")
            flat = saved[layer].flatten(1).float().cpu().numpy()
            if not np.isfinite(flat).all():
                raise RunError(f"NaN or infinite state at layer {layer} ({model.name}): try --dtype float32")
            kept.append(projected(flat, projections))
    return {layer: np.concatenate(kept) for layer, kept in chunks.items()}


def projected(flat: np.ndarray, projections: dict[int, SparseRandomProjection]) -> np.ndarray:
    """(n, d) -> (n, at most WIDTH); `projections` keeps the matrix of each d."""
    d = flat.shape[1]
    if d <= WIDTH:
        return flat
    if d not in projections:
        projections[d] = SparseRandomProjection(WIDTH, random_state=0).fit(np.zeros((1, d), np.float32))
    return projections[d].transform(flat)
