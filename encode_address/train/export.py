"""A trained model as a folder that `load` takes: weights, configuration, tokenizer, `task.json`, `card.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from encode_address.train.words import task, tokenizer


def write_model(model: nn.Module, folder: Path, card: dict[str, Any]) -> None:
    """Write the folder. The attention implementation of training (eager) is not kept."""
    model.set_attn_implementation("sdpa")
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    for name, content in (("task", task()), ("card", card)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
