"""`load`: a bundled name, a hub name, a folder or a transformers module, as a HybridModel."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import httpx
import torch
from huggingface_hub.utils import logging as hub_logging
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import logging

from encode_address.errors import ModelError
from encode_address.models.families import family_of, refuse
from encode_address.models.hybrid import HybridModel
from encode_address.models.layout import Layout
from encode_address.remote.client import Client

BUNDLED_DIR = Path(__file__).parent / "bundled"
GROUND_TRUTH = ("tiny-gdn", "tiny-mamba2")
TRAINED = (*GROUND_TRUTH, "tiny-griffin", "tiny-gdn-negative")
UNTRAINED = tuple(f"{name}-untrained" for name in GROUND_TRUTH)
BUNDLED = TRAINED + UNTRAINED
HUB = "encode-address"  # whose models the bundled ones are on a hub
# Tokenizer files that say nothing about a class of their own: AutoTokenizer would go by the model type
# instead and silently replace the pre-tokenizer of a custom vocabulary.
_PLAIN_TOKENIZERS = ("TokenizersBackend", "PreTrainedTokenizerFast")


def load(
    model: Any,
    tokenizer: Any = None,
    *,
    device: str | None = None,
    dtype: str | None = None,
    revision: str | None = None,
    attn_implementation: str | None = None,
    remote: bool = False,
    deadline: float | None = None,
) -> HybridModel:
    """Load a hybrid model and verify that its names mean what they say.

    `model` is a bundled name ("tiny-gdn"), a hub name ("Qwen/Qwen3.5-9B"), a folder, or a transformers module
    (then pass its `tokenizer`). `device` defaults to cuda where there is one, `dtype` to float32 (the paper's),
    `attn_implementation` to sdpa: attention rows are recomputed from queries and keys, so eager is not needed.
    `remote=True` loads no weights: what is asked of the model runs on the NDIF server that nnsight is set to, which knows a
    bundled one as encode-address/NAME. A server finishes a job within `deadline` seconds, or it is given up (None: half an hour).

    Raises ModelError when the model is unknown, not a supported hybrid, or fails its checks.
    """
    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        logging.set_verbosity_error()
        hub_logging.set_verbosity_error()
    given = (device, dtype, revision, attn_implementation)
    if remote and any(option is not None for option in (device, dtype, attn_implementation)):
        raise ModelError("a remote model runs as its server has it: leave out device, dtype and attention")
    if deadline is not None and (not remote or deadline <= 0):
        raise ModelError("a deadline is for remote=True, in seconds above 0")
    device, torch_dtype = pick_device(device), pick_dtype(dtype)
    if isinstance(model, torch.nn.Module):
        if tokenizer is None:
            raise ModelError("a module needs its tokenizer: load(module, tokenizer=...)")
        if any(option is not None for option in given):
            raise ModelError("a module is taken as it is: set its device, dtype and attention before load(module)")
        name = getattr(model.config, "name_or_path", "") or type(model).__name__
        config, folder, source, module = model.config, None, None, model.eval()
        if remote:
            raise ModelError("a module object is local; for remote=True give the hub name that the server knows")
    else:
        name = str(model)
        if remote and (name in UNTRAINED or Path(name).is_dir()):
            raise ModelError(f"{name} is not on a server: with remote=True give a hub name, or {', '.join(TRAINED)}")
        folder = bundled_folder(name) or (Path(name) if (Path(name) / "task.json").is_file() else None)
        source = str(bundled_folder(name) or name)
        config = read_config(name, source, revision)
        module = None
    refuse(config, name)
    layout = Layout.from_config(config.get_text_config(), name)
    family = family_of(config, name)
    if tokenizer is None:
        tokenizer = read_tokenizer(name, source, revision)
    if remote:
        module = f"{HUB}/{name}" if name in TRAINED else name  # nnsight builds the module tree without weights
    elif module is None:
        attention = attn_implementation or "sdpa"
        if name in UNTRAINED:
            module = _untrained(config, attention, torch_dtype)
        else:
            module = _weights(name, source, revision, attention, torch_dtype)
        module = _move(module.eval(), device)
    known = {"family": family, "layout": layout, "folder": folder, "revision": revision, "remote": remote}
    if not remote:
        hybrid = HybridModel(module, tokenizer, name=name, **known)
        hybrid.check(full=False)
        return hybrid
    try:
        hybrid = HybridModel(module, tokenizer, name=name, **known)
    except (OSError, ValueError, httpx.HTTPError) as error:
        raise ModelError(f"{module}: the hub does not give its configuration: {_first(error)}") from error
    hybrid.where = Client() if deadline is None else Client(deadline)
    return hybrid


def card(model: HybridModel) -> dict[str, Any]:
    """The card of a bundled trained model; empty for any other model."""
    path = model.folder / "card.json" if model.folder and model.name in TRAINED else None
    return json.loads(path.read_text()) if path else {}


def bundled_folder(name: str) -> Path | None:
    return BUNDLED_DIR / name.removesuffix("-untrained") if name in BUNDLED else None


def read_config(name: str, source: str, revision: str | None) -> Any:
    path = Path(source)
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelError(f"{name} is a folder without a config.json, so it is not a model")
    if not path.is_dir() and ("/" not in name or name.startswith((".", "/")) or name.count("/") > 1):
        raise ModelError(
            f"unknown model {name!r}: the bundled ones are {', '.join(BUNDLED)}; else give a folder or a hub name"
        )
    try:
        return AutoConfig.from_pretrained(source, revision=revision)
    except (ValueError, TypeError, AttributeError) as error:
        kind = _model_type(path / "config.json")
        raise ModelError(
            f"{name}: transformers cannot read its config (model type {kind!r}): {_first(error)}"
        ) from error
    except OSError as error:
        raise ModelError(
            f"unknown model {name!r}: not bundled ({', '.join(BUNDLED)}), and the hub did not give it: {_first(error)}"
        ) from error


def _model_type(path: Path) -> str | None:
    """What a config file says it is, as far as it can be read."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return data.get("model_type") if isinstance(data, dict) else None


def read_tokenizer(name: str, source: str, revision: str | None) -> Any:
    settings = Path(source) / "tokenizer_config.json"
    plain = settings.is_file() and json.loads(settings.read_text()).get("tokenizer_class") in _PLAIN_TOKENIZERS
    loader = PreTrainedTokenizerFast if plain else AutoTokenizer
    try:
        tokenizer = loader.from_pretrained(source, revision=revision)
    except (OSError, ValueError) as error:
        raise ModelError(f"{name}: its tokenizer cannot be loaded: {_first(error)}") from error
    ordinary = {*tokenizer.get_vocab().values()} - {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    if not ordinary:  # what transformers makes up when a folder has no tokenizer files
        raise ModelError(f"{name}: its tokenizer cannot be loaded: there are no tokenizer files")
    if not tokenizer.is_fast:
        raise ModelError(f"{name}: its tokenizer gives no character offsets; a fast tokenizer is needed")
    return tokenizer


def _weights(name: str, source: str, revision: str | None, attention: str, dtype: torch.dtype) -> Any:
    if name in TRAINED or not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        return AutoModelForCausalLM.from_pretrained(
            source, revision=revision, dtype=dtype, attn_implementation=attention
        )
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"{name}: its weights cannot be loaded: {_first(error)}") from error
    finally:
        logging.enable_progress_bar()


def _untrained(config: Any, attention: str, dtype: torch.dtype) -> Any:
    """A negative control: the architecture with random weights, the same ones every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)


def pick_device(device: str | None) -> torch.device:
    """The device of that name; cuda where there is one when None. Raises ModelError when there is no such device."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ModelError(f"unknown device {device!r}: use cpu, cuda or cuda:N") from error
    if chosen.type not in ("cpu", "cuda", "mps"):
        raise ModelError(f"unknown device {device!r}: use cpu, cuda or cuda:N")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"device {device!r} was asked for, but torch sees no GPU here: use --device cpu")
    return chosen


def pick_dtype(dtype: str | None) -> torch.dtype:
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype is not None and dtype not in names:
        raise ModelError(f"unknown dtype {dtype!r}: use {', '.join(names)}")
    return names[dtype or "float32"]


def _move(module: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    try:
        return module.to(device)
    except RuntimeError as error:
        raise ModelError(f"the model does not fit on {device}: {_first(error)}") from error


def _first(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
