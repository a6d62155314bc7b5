"""A trained model as a folder that `load` takes: weights, configuration, tokenizer, `task.json`, `card.json`."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from encode_address.train.data import FORMATS, ask, text_batch
from encode_address.train.words import SURFACES, task, tokenizer

FRESH = 512  # dictionaries per format and surface, drawn with a seed of their own
FRESH_SEED = 12_345


def write_model(model: nn.Module, folder: Path, card: dict[str, Any]) -> None:
    """Write the folder. The attention implementation of training (eager) is not kept."""
    model.set_attn_implementation("sdpa")
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    for name, content in (("task", task()), ("card", card)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")


@torch.no_grad()
def accuracy(model: nn.Module, form: str, surface: str, size: int = 8, rows: int = FRESH) -> float:
    """The share of fresh dictionaries of which the model gives the entry asked for, against the whole vocabulary."""
    batch = ask(form, size, [surface], rows, torch.Generator().manual_seed(FRESH_SEED))
    position = batch.answers[0]
    logits = model(input_ids=batch.ids[:, : position + 1], use_cache=False, logits_to_keep=1).logits[:, -1]
    return float((logits.argmax(-1) == batch.ids[:, position + 1]).float().mean())


@torch.no_grad()
def perplexity(model: nn.Module, rows: int = 192) -> float:
    """Of stories about topics and places that were kept apart in training."""
    ids = text_batch(rows, random.Random(FRESH_SEED), test=True)
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return math.exp(float(cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())))


def scores(model: nn.Module, rows: int = FRESH) -> dict[str, Any]:
    """Accuracy per format and surface (of plain variants, of 4 and 16 entries too), and perplexity."""
    table = {f"{f}8" + (f"/{s}" if s else ""): accuracy(model, f, s, rows=rows) for f in FORMATS for s in SURFACES}
    sizes = {f"{form}{size}": accuracy(model, form, "", size, rows) for form in FORMATS for size in (4, 16)}
    rounded = {name: round(value, 4) for name, value in {**table, **sizes}.items()}
    return {"accuracy": rounded, "perplexity": round(perplexity(model), 3)}
