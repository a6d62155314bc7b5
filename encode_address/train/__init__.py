"""How the bundled models are trained: words and tokenizer, batches, construction and growth, the loop, the card."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from encode_address.errors import NameNotFound
from encode_address.run.engine import versions
from encode_address.run.store import locked
from encode_address.train.export import scores, write_model
from encode_address.train.loop import Run
from encode_address.train.recipe import imposed, stages

ARCHITECTURES = {"tiny-gdn": "gdn", "tiny-mamba2": "mamba2"}
CLASSES = {"gdn": "Qwen3_5ForCausalLM (Gated DeltaNet)", "mamba2": "GraniteMoeHybridForCausalLM (Mamba-2)"}


def train(
    name: str, seed: int = 0, out: str | Path = "trained", on_line: Callable[[dict[str, Any]], Any] = lambda line: None
) -> Path:
    """Train a model from nothing, or go on where a stopped run of the same seed was; returns its folder, for `load`.

    OUT/<name>-seed<N>/ holds a checkpoint and a log per stage, and `model/`. One thread: with the same seed the same
    machine gives the same weights. `on_line` is called with each line of the log. Raises NameNotFound.
    """
    if name not in ARCHITECTURES:
        raise NameNotFound(f"no recipe for {name!r}: there is one for {', '.join(ARCHITECTURES)}")
    architecture, folder = ARCHITECTURES[name], Path(out) / f"{name}-seed{seed}"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with locked(folder):
            model, seconds, steps = None, 0.0, {}
            for stage in stages():
                run = Run(stage, architecture, seed, folder, model)
                run.resume()
                model = run.train(on_line)
                seconds, steps[stage.name] = seconds + run.seconds, stage.steps
            card = {
                "name": name,
                "architecture": CLASSES[architecture],
                "purpose": "A tiny trained hybrid with a known circuit: ground truth for this toolkit, not evidence for the paper.",
                "command": f"encode-address train {name} --seed {seed}",
                "seed": seed,
                "steps": steps,
                "wall_seconds": round(seconds),
                "trained": time.strftime("%Y-%m-%d"),
                "versions": versions(),
                "parameters": sum(p.numel() for p in model.parameters()),
                "imposed": imposed(stages()),
                **scores(model),
            }
            write_model(model, folder / "model", card)
    finally:
        torch.set_num_threads(threads)
    return folder / "model"
