"""How the bundled models are trained: words and tokenizer, batches, construction and growth, the loop, the card."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from encode_address.errors import ModelError, NameNotFound
from encode_address.models.layout import Layout
from encode_address.run.engine import versions
from encode_address.run.store import locked
from encode_address.train.export import write_model
from encode_address.train.loop import Run
from encode_address.train.measure import PLACES, circuit, redirected, scores
from encode_address.train.recipe import RECIPES

CLASSES = {
    "gdn": "Qwen3_5ForCausalLM (Gated DeltaNet)",
    "mamba2": "GraniteMoeHybridForCausalLM (Mamba-2)",
    "griffin": "RecurrentGemmaForCausalLM (RG-LRU)",
}
DATA = (
    "dictionaries of random key-value pairs (4, 8 or 16 entries of 128 keys and 64 values, three formats, seven surfaces) asked "
    "several times over, and stories of a small grammar; what is measured is drawn with another seed"
)
SCREEN_LATE, SCREEN_FIRST = 0.9, 0.1


def train(
    name: str, seed: int = 0, out: str | Path = "trained", on_line: Callable[[dict[str, Any]], Any] = lambda line: None
) -> Path:
    """Train a model from nothing, or go on where a stopped run of the same seed was; returns its folder, for `load`.

    OUT/<name>-seed<N>/ holds a checkpoint and a log per stage, `card.json`, and `model/`. One thread: with the same
    seed the same machine gives the same weights. `on_line` is called with each line of the log.

    Only a base whose late block builds the query is grown: transplanted at the last token it must redirect at least
    .9 of the answers in every format, and the first block at most .1. Raises NameNotFound for an unknown name, and
    ModelError for a seed whose base fails that screen.
    """
    if name not in RECIPES:
        raise NameNotFound(f"no recipe for {name!r}: there is one for {', '.join(RECIPES)}")
    recipe, folder = RECIPES[name], Path(out) / f"{name}-seed{seed}"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with locked(folder):
            card = {
                "name": name,
                "status": "finished",
                "architecture": CLASSES[recipe.architecture],
                "purpose": recipe.purpose,
                "command": f"encode-address train {name} --seed {seed}",
                "data": DATA,
                "seed": seed,
                "steps": {stage.name: stage.steps for stage in recipe.stages},
                "wall_seconds": {},
                "trained": time.strftime("%Y-%m-%d"),
                "versions": versions(),
                "imposed": list(recipe.imposed),
            }
            model = None
            for stage in recipe.stages:
                run = Run(stage, recipe.architecture, seed, folder, model)
                run.resume()
                model = run.train(on_line)
                card["wall_seconds"][stage.name] = round(run.seconds)
                if stage is recipe.stages[0]:
                    card["base"] = screen(model)
                    if problem := _problem(card["base"]):
                        card["status"] = f"not grown: {problem}"
                        _write(folder, card)
                        raise ModelError(f"{name}, seed {seed}: {problem}; take another seed")
            card |= {"parameters": sum(p.numel() for p in model.parameters()), **scores(model)}
            card["circuit"] = circuit(model)
            write_model(model, folder / "model", card)
            _write(folder, card)
    finally:
        torch.set_num_threads(threads)
    return folder / "model"


def screen(model: nn.Module) -> dict[str, float]:
    """Of a base: what its first and its late block redirect at the last token, at worst over formats (late: the least,
    first: the most)."""
    first, late = Layout.from_config(model.config).tabled
    return {
        "late_redirects": min(redirected(model, late.layers, *place) for place in PLACES),
        "first_redirects": max(redirected(model, first.layers, *place) for place in PLACES),
    }


def _problem(seen: dict[str, float]) -> str:
    late, first = seen["late_redirects"], seen["first_redirects"]
    if late >= SCREEN_LATE and first <= SCREEN_FIRST:
        return ""
    return (
        f"the base's late block redirects {late:.2f} of the answers (needs {SCREEN_LATE}), its first block {first:.2f} "
        f"(at most {SCREEN_FIRST})"
    )


def _write(folder: Path, card: dict[str, Any]) -> None:
    (folder / "card.json").write_text(json.dumps(card, indent=1) + "\n")
