"""The lens that a grid is read through: fitted once per model and variant on the arms' own prompts and text, then kept; or a published one.

What a fitted one says holds for such prompts. It lies in `<results>/<model>/.lens/`, resumes there, and serves every experiment.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from encode_address.errors import RunError, StoreError
from encode_address.lens import Lens, fit, import_published, logit_lens, rows_of
from encode_address.run.reading import Reading
from encode_address.tasks.arms import Arms
from encode_address.tasks.prompts import Prompt
from encode_address.tasks.text import Text

LENSES = ("jacobian", "rows", "logit")
INSTANCES, LINES, SEED = 6, 18, 7_000_000  # 30 prompts of the arms and up to 18 pieces of text; a seed of its own
SKIP, LONGEST = 16, 128
SMALL = 10_000  # words below which R cannot saturate and L has few decades


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


def lens_for(model: Any, task: Arms, text: Text, kind: str, folder: Path | None, file: str | None = None) -> Lens:
    """The lens of a model and variant: a published one in `file`, or from `folder` if it is there, else fitted and kept there (in memory
    only where there is none). Raises RunError for a whole lens of a model that runs elsewhere: its matrices would be sent with every job."""
    if kind == "logit":
        return logit_lens(model)
    tokens = candidates(task) if kind == "rows" else None
    if file is not None:
        whole = import_published(file, model)
        if tokens is None and model.elsewhere:
            raise RunError(f"{model.name} runs elsewhere, and {file} is large: send its rows alone, with --lens rows")
        return whole if tokens is None else rows_of(whole, model, tokens)
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


class KeptLens:
    """Gives the lens of a task when it is first asked for. `settings` tells one lens from another before that.

    `file`: a published lens file; raises StoreError where it cannot be read, RunError for a logit lens beside it.
    """

    def __init__(
        self, model: Any, task: Arms, text: Text, kind: str, folder: Path | None, file: str | None = None
    ) -> None:
        self._made = (model, task, text, kind, folder, file)
        self._lens: Lens | None = None
        if file is None:
            self.settings = (kind, task.variant, text.sha256, INSTANCES, LINES, SKIP, LONGEST)
            return
        if kind == "logit":
            raise RunError("a logit lens has no file: leave out --lens-file, or --lens logit")
        try:
            with open(file, "rb") as opened:
                self.settings = (kind, hashlib.file_digest(opened, "sha256").hexdigest())
        except OSError as error:
            raise StoreError(f"{file} cannot be read ({error.strerror}): give a published lens file") from error

    @classmethod
    def of(cls, setting: Any) -> KeptLens:
        """The lens that the options of an experiment's setting ask for."""
        made, options = setting.task, setting.options
        return cls(setting.model, made, setting.text, options["lens"], setting.folder, options["lens_file"])

    def readings(self, labels: Mapping[str, Any]) -> Iterator[Reading]:
        """How far the halves of its fit agree, a row per layer; nothing for one that is not fitted here."""
        _, task, text, kind, _, file = self._made
        if kind == "logit" or file is not None:
            return
        prompts = [Prompt(ids) for ids in prompts_for(task, text)]
        yield Reading("lens", prompts, self._reliability, {**labels, "part": "lens", "lens": kind}, self.settings)

    def _reliability(self, engine: Any, prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
        for prompt in prompts:  # one trace each; its backward passes are not forwarded tokens
            engine.count(len(prompt))
        return self().reliability().to_dict("records")

    def __call__(self) -> Lens:
        if self._lens is None:
            self._lens = lens_for(*self._made)
        return self._lens


def limits(setting: Any) -> list[str]:
    """What the model and the lens of an experiment's setting cannot show."""
    words, kind, found = setting.model.config.vocab_size, setting.options["lens"], []
    if words < SMALL:
        found.append(
            f"with {words} words R cannot saturate and L spans {len(str(words)) - 1} decades, so how far they differ from M is not testable"
        )
    if setting.model.folder is not None:
        found.append(
            "what an arm demands was installed by training: the instrument is checked, not the claim about trained language models"
        )
    if kind != "logit" and setting.options["lens_file"] is None:
        found.append(f"the lens is fitted on prompts of these arms and {setting.text.name}, and speaks of such prompts")
    if kind == "rows":
        found.append("a row lens knows no ranks, and its M is up to a factor per row")
    return found
