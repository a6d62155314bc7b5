"""The lens that a grid is read through: fitted once per model and variant on the arms' own prompts and text, then kept.

What it says holds for such prompts. It lies in `<results>/<model>/.lens/`, resumes there, and serves every experiment.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from encode_address.lens import Lens, fit, logit_lens
from encode_address.tasks.arms import Arms
from encode_address.tasks.text import Text

LENSES = ("jacobian", "rows", "logit")
INSTANCES, LINES, SEED = 6, 18, 7_000_000  # 30 prompts of the arms and up to 18 pieces of text; a seed of its own
SKIP, LONGEST = 16, 128


def prompts_for(task: Arms, text: Text) -> list[tuple[int, ...]]:
    """What a lens is fitted on: every arm of `INSTANCES` instances that no grid asks, and pieces of the text's train part."""
    asked = [record.prompt.ids for one in task.instances(INSTANCES, SEED) for record in one.records.values()]
    pieces = [chunk.ids[:LONGEST] for chunk in text.chunks(task.tokenizer, "train", LINES)]
    long_enough = [ids for ids in pieces if len(ids) >= SKIP + 2]
    return list(dict.fromkeys([*asked, *long_enough]))  # halves are even and odd places: both get both sorts


def candidates(task: Arms) -> tuple[int, ...]:
    """The tokens of a row lens: every label, value and answer of the task."""
    instance = task.instances(1, SEED)[0]
    text, ids = instance["flexible"].prompt.text, instance["flexible"].prompt.ids
    words = dict.fromkeys((*task.labels, *task.values, *task.wording.answers))
    if task.family == "class":
        words |= dict.fromkeys(word for members in task.members.values() for word in members)
    return tuple(dict.fromkeys(task._token(word, text, ids, task.variant) for word in words))


def lens_for(model: Any, task: Arms, text: Text, kind: str, folder: Path | None) -> Lens:
    """The lens of a model and variant, from `folder` if it is there, else fitted and kept there (in memory only where there is none)."""
    if kind == "logit":
        return logit_lens(model)
    tokens = candidates(task) if kind == "rows" else None
    prompts = prompts_for(task, text)
    # A name of its own for whatever it depends on, so that no fit finds another's file.
    said = repr((model.fingerprint, kind, tokens, prompts, SKIP, LONGEST))
    name = f"{task.variant.replace('/', '-')}-{task.pool}-{kind}-{hashlib.sha256(said.encode()).hexdigest()[:8]}"
    data = f"arms of {task.variant}, pool {task.pool}, and {text.name}"
    path = None if folder is None else folder / ".lens" / name
    return fit(model, prompts, tokens=tokens, skip=SKIP, longest=LONGEST, path=path, data=data)


def plain(lens: Lens) -> tuple[bool, dict[int, torch.Tensor | None]]:
    """A lens as `traced` takes it."""
    return lens.kind == "rows", {layer: lens.carrier(layer) for layer in lens.readable}


def columns(lens: Lens, ids: Sequence[Sequence[int]]) -> list[list[int]]:
    """Token ids as what a lens's logits have in their columns."""
    if lens.tokens is None:
        return [list(row) for row in ids]
    place = {token: i for i, token in enumerate(lens.tokens)}
    return [[place[token] for token in row] for row in ids]
