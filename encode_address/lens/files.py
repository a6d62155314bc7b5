"""A lens on disk: one safetensors file that holds its metadata too, with a readable copy beside it; and published lenses."""

from __future__ import annotations

import hashlib
import json
import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from encode_address.errors import RunError, StoreError
from encode_address.lens.fitted import KINDS, Lens, describe, layers_of
from encode_address.models.hybrid import HybridModel
from encode_address.run.store import write_text, write_whole


def save(lens: Lens, path: str | Path) -> Path:
    """Write `path`.safetensors, whole or not at all, and `path`.json with the same metadata to be read by people.

    The first is what `load` reads: a kill between the two leaves a lens that loads. Returns its path. Raises StoreError.
    """
    content = json.dumps({**lens.about, "counts": list(lens.counts)})
    tensors = {f"L{layer}": values.contiguous() for layer, values in lens.sums.items()}
    if lens.directions is not None:
        tensors["directions"] = lens.directions.contiguous()
    stored = beside(path, "safetensors")
    write_whole(stored, lambda temporary: save_file(tensors, temporary, {"lens": content}))
    write_text(beside(path, "json"), json.dumps(json.loads(content), indent=1) + "\n")
    return stored


def load(path: str | Path, model: HybridModel | None = None) -> Lens:
    """The lens that `save` wrote; with `model`, if it is a finished one of that model.

    Raises StoreError for a file that is missing, broken or no lens; RunError for another model's, an unfinished or a non-finite one.
    """
    stored = beside(path, "safetensors")
    try:
        with safe_open(stored, "pt") as file:
            about = json.loads((file.metadata() or {})["lens"])
            names = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
        counts = tuple(about.pop("counts"))
        directions = tensors.pop("directions", None)
        sums = {int(name[1:]): values for name, values in tensors.items()}
        _check(about, counts, sums, directions)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise StoreError(f"{stored} is not a lens that can be read ({error}): fit it again") from error
    lens = Lens(sums, counts, about, directions)
    if model is not None:
        lens.require(model)
    return lens


def import_published(path: str | Path, model: HybridModel, skip: int = 16) -> Lens:
    """A lens file as published on the hub (a torch file with J, n_prompts, source_layers and d_model), for `model`.

    Such a file does not say which model it is of, nor which positions its fit left out: whoever imports it vouches for the
    first and gives the second (`skip`; 16 in the published fits). Loaded with weights_only, so no code in it runs. Raises StoreError for a
    file that is missing, broken or otherwise made, RunError where its shapes do not fit the model or numbers are not finite.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            sha = hashlib.file_digest(file, "sha256").hexdigest()
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise StoreError(f"{path} is not a lens file that can be loaded safely: {first}") from error
    try:
        matrices = {int(layer): values for layer, values in content["J"].items()}
        listed = sorted(int(layer) for layer in content["source_layers"])
        n, width = int(content["n_prompts"]), int(content["d_model"])
        shapes = {layer: tuple(values.shape) for layer, values in matrices.items() if values.is_floating_point()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoreError(
            f"{path} is not a published lens: it needs J by layer, n_prompts, source_layers, d_model ({error!r})"
        ) from error
    d = model.config.hidden_size
    wrong = [layer for layer in matrices if shapes.get(layer) != (d, d)]
    if width != d or wrong:
        found = f"d_model {width}" if width != d else f"L{wrong[0]} of shape {shapes.get(wrong[0], 'not of floats')}"
        raise RunError(f"{path} does not fit {model.name}, whose width is {d}: it has {found}")
    if listed != sorted(matrices) or n < 1:
        raise RunError(f"{path} contradicts itself: source_layers and the layers of J differ, or n_prompts is below 1")
    about = describe(model, "jacobian", layers_of(model, listed))
    about |= {"skip": skip, "tokens": None, "n_prompts": n, "prompts": [], "data": "published"}
    about["imported"] = {"file": path.name, "sha256": sha}
    return Lens({layer: values.float()[None] * n for layer, values in matrices.items()}, (n,), about)


def beside(path: str | Path, kind: str) -> Path:
    """The file of that kind of the lens at `path`, given with or without a suffix of ours."""
    path = Path(path)
    plain = path.with_suffix("") if path.suffix in (".json", ".safetensors") else path
    return plain.with_name(f"{plain.name}.{kind}")


def _check(
    about: dict[str, Any], counts: tuple[int, ...], sums: dict[int, torch.Tensor], directions: torch.Tensor | None
) -> None:
    """Raise ValueError where the tensors are not those that the metadata speaks of."""
    if about["kind"] not in KINDS or {"fingerprint", "model", "skip", "n_prompts", "target"} - about.keys():
        raise ValueError("its metadata is not a lens's")
    rows = len(about["tokens"]) if about["kind"] == "rows" else about["d_model"]
    layers = [] if about["kind"] == "logit" else about["layers"]
    if sorted(sums) != sorted(layers) or (about["kind"] == "rows") != (directions is not None):
        raise ValueError("its layers are not those of its metadata")
    shape = (len(counts), rows, about["d_model"])
    if any(tuple(values.shape) != shape for values in sums.values()):
        raise ValueError(f"a layer is not of shape {shape}")
    if directions is not None and tuple(directions.shape) != shape[1:]:
        raise ValueError(f"its directions are not of shape {shape[1:]}")
