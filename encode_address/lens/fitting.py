"""Fitting a lens: one trace per prompt, sums that resume to the bit, shards that merge."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from encode_address.errors import ModelError, RunError
from encode_address.lens.files import beside, load, save
from encode_address.lens.fitted import Lens, describe, layers_of
from encode_address.lens.traced import read_head, summed_gradients
from encode_address.models.hybrid import HybridModel

SKIP, LONGEST, WIDTH = 16, 128, 32
_NORM = 0.05  # how far from x / rms(x) a norm may be: bfloat16 is 0.01 off


def fit(
    model: HybridModel,
    prompts: Sequence[Any],
    layers: Sequence[int] | None = None,
    *,
    tokens: Sequence[int] | None = None,
    skip: int = SKIP,
    longest: int = LONGEST,
    width: int = WIDTH,
    path: str | Path | None = None,
    every: int = 10,
    data: str = "",
) -> Lens:
    """Fit the Jacobian lens on prompts (each as `model.encode` takes it), or, with `tokens`, the row lens of these ids.

    J of a layer is the mean over prompts, and over source positions p of each, of the sum over target positions p' of d target[p']
    / d layer[p]; target is the last layer's output. Positions before `skip` (attention sinks) and the last one are neither
    source nor target; tokens after `longest` are cut off. `layers`: sources, by default all below the last. `width` directions are taken
    in one backward pass, as rows of one batch: memory grows with it, results differ by rounding. `path`: where the fit is kept
    every `every` prompts and from where it goes on, to the same bits as without the interruption. `data` says where prompts are from.

    A shard is a fit on some of the prompts; see `merge`. Raises RunError for prompts that are repeated or too short, gradients that are
    not finite, or a file at `path` that is of another fit; ModelError for a head that a row lens cannot be made of, or a model
    whose weights are not here: a fit needs gradients.
    """
    if model.elsewhere or model.weightless:
        raise ModelError(
            f"{model.name} runs elsewhere, and a lens is fitted where gradients are: use --lens logit, or give a published "
            "lens file of this model"
        )
    sources = layers_of(model, range(len(model.layers) - 1) if layers is None else layers)
    ids = [_one_prompt(model, prompt)[:, :longest] for prompt in prompts]
    digests = _digests(ids, skip)
    directions = None if tokens is None else _directions(model, tokens)
    about = describe(model, "jacobian" if tokens is None else "rows", sources)
    about |= {"skip": skip, "longest": longest, "width": width, "data": data, "n_prompts": len(ids), "prompts": digests}
    about["tokens"] = None if tokens is None else [int(token) for token in tokens]
    cotangents = torch.eye(about["d_model"]) if directions is None else directions
    lens = None if path is None else _unfinished(path, about)
    if lens is None:
        shape = (2, len(cotangents), about["d_model"])
        lens = Lens({layer: torch.zeros(shape) for layer in sources}, (0, 0), about, directions)
    with _frozen(model):
        for place in range(lens.n, len(ids)):
            rows = _gradients(model, ids[place], sources, cotangents, skip, min(width, len(cotangents)))
            lens = _with(lens, rows, place)
            if path is not None and ((place + 1) % every == 0 or lens.finished):
                save(lens, path)
    return lens


def rows_of(lens: Lens, model: HybridModel, tokens: Sequence[int]) -> Lens:
    """The row lens of `tokens` that a whole lens holds: the head's rows times its matrices, a d_model-th of it to send to where a model runs.

    Raises RunError for a lens that has no whole matrices, or ids the model does not have; ModelError for a head without rows.
    """
    lens.require(model)
    if lens.kind != "jacobian":
        raise RunError(f"a {lens.kind} lens has no matrices to take rows of: give a Jacobian lens")
    directions = _directions(model, tokens)
    about = {**lens.about, "kind": "rows", "tokens": [int(token) for token in tokens]}
    return Lens({layer: directions @ values for layer, values in lens.sums.items()}, lens.counts, about, directions)


def merge(shards: Sequence[Lens]) -> Lens:
    """One lens from finished fits of the same model with the same settings on different prompts; equal to one fit on all of them.

    Raises RunError for shards that differ, share prompts or are not finished.
    """
    if not shards:
        raise RunError("nothing to merge: give lenses fitted on different prompts")
    first = shards[0]
    prompts: list[str] = []
    for shard in shards:
        if shard.kind == "logit" or not shard.about.get("prompts"):
            raise RunError(
                "only lenses that were fitted here merge: a logit lens or an imported one has no prompts to tell apart"
            )
        if not shard.finished:
            raise RunError(f"a shard has {shard.n} of its {shard.about['n_prompts']} prompts: finish it before merging")
        for name in first.about.keys() - {"prompts", "n_prompts"}:
            if shard.about.get(name) != first.about[name]:
                raise RunError(
                    f"shards with different {name} do not merge: {first.about[name]} and {shard.about.get(name)}"
                )
        prompts += shard.about["prompts"]
    if len(set(prompts)) < len(prompts):
        raise RunError("shards share prompts: fit each on prompts of its own, or they count twice")
    sums = {layer: torch.stack([shard.sums[layer] for shard in shards]).sum(0) for layer in first.layers}
    counts = tuple(sum(shard.counts[part] for shard in shards) for part in range(2))
    about = {**first.about, "n_prompts": len(prompts), "prompts": prompts}
    return Lens(sums, counts, about, first.directions)


def _gradients(
    model: HybridModel, ids: torch.Tensor, sources: Sequence[int], cotangents: torch.Tensor, skip: int, width: int
) -> torch.Tensor:
    """One prompt's share: (layers, rows, d_model), on the CPU."""
    layers, target = [model.layers[i] for i in sources], model.layers[len(model.layers) - 1]
    with torch.enable_grad(), model.trace(ids.expand(width, -1)) as tracer:
        rows = summed_gradients(layers, target, cotangents, skip).save()
        tracer.stop()
    return rows.detach().cpu()


def _with(lens: Lens, rows: torch.Tensor, place: int) -> Lens:
    """The lens with one more prompt; its sums are added to in place, since they may be large."""
    for layer, values in zip(lens.layers, rows):
        if not torch.isfinite(values).all():
            raise RunError(
                f"gradients at L{layer} of prompt {place} are NaN or infinite: fit in float32, or leave the prompt out"
            )
    half = place % 2
    for layer, values in zip(lens.layers, rows):
        lens.sums[layer][half] += values
    counts = tuple(n + (part == half) for part, n in enumerate(lens.counts))
    return Lens(lens.sums, counts, lens.about, lens.directions)


def _unfinished(path: str | Path, about: dict[str, Any]) -> Lens | None:
    """What an earlier run of the same fit left at `path`, if anything."""
    if not beside(path, "safetensors").exists():
        return None
    lens = load(path)
    for name, value in about.items():
        if lens.about.get(name) != value:
            raise RunError(
                f"{beside(path, 'safetensors')} is of a fit with another {name}: choose another path, or delete it to start over"
            )
    return lens


def _directions(model: HybridModel, tokens: Sequence[int]) -> torch.Tensor:
    """The cotangents of a row lens, (tokens, d_model)."""
    wanted = torch.tensor([int(token) for token in tokens])
    if (
        not len(wanted)
        or len(wanted.unique()) < len(wanted)
        or wanted.min() < 0
        or wanted.max() >= model.config.vocab_size
    ):
        raise RunError("a row lens needs different token ids of the model's vocabulary")
    found = model.ask(read_head, wanted)
    if not found["off"] <= _NORM:
        raise ModelError(
            f"{model.name}: its head is more than an RMS norm and a matrix, so it has no row lens: fit without tokens"
        )
    return found["rows"]


@contextlib.contextmanager
def _frozen(model: HybridModel) -> Iterator[None]:
    """No weight wants a gradient meanwhile, so the graph holds activations from the lowest source on and nothing else."""
    wanting = [p for p in model.module.parameters() if p.requires_grad]
    try:
        for parameter in wanting:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in wanting:
            parameter.requires_grad_(True)


def _one_prompt(model: HybridModel, prompt: Any) -> torch.Tensor:
    return model.encode([prompt])["input_ids"]


def _digests(ids: Sequence[torch.Tensor], skip: int) -> list[str]:
    """A hash per prompt. Raises RunError for prompts that cannot be fitted on."""
    if not ids:
        raise RunError("a lens needs prompts to be fitted on")
    for place, row in enumerate(ids):
        if row.shape[1] < skip + 2:
            raise RunError(
                f"prompt {place} has {row.shape[1]} tokens, and the fit leaves out the first {skip} and the last: "
                f"give prompts of {skip + 2} tokens or more, or a smaller skip"
            )
    digests = [hashlib.sha256(repr(row[0].tolist()).encode()).hexdigest()[:16] for row in ids]
    if len(set(digests)) < len(digests):
        raise RunError("prompts are repeated, which adds nothing but a larger n: give each once")
    return digests
