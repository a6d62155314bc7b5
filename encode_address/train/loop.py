"""The training loop: one stage of a recipe, from the weights of the stage before, resumable to the bit."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from encode_address.run.store import write_whole
from encode_address.train.build import build, grow
from encode_address.train.data import FORMATS, Asked, ask, text_batch
from encode_address.train.hooks import Positions, attention, silenced
from encode_address.train.recipe import Drop, Stage
from encode_address.train.scan import use_recurrence

SAVE_EVERY, LOG_EVERY = 50, 25
OTHERS = 0.1  # weight of the loss on tokens that are no answers
MEMORY = 0.9  # of the running accuracy


class Run:
    """The state of one stage. `folder` holds its checkpoint `<stage>.pt` and its log `<stage>.jsonl`."""

    def __init__(self, stage: Stage, architecture: str, seed: int, folder: Path, before: nn.Module | None) -> None:
        self.stage, self.folder = stage, folder
        if stage.origin:
            self.model = grow(before, architecture, stage.pattern, stage.origin, seed)
        else:
            self.model = before or build(architecture, stage.pattern, seed)
        self.model.set_attn_implementation("eager")  # its weights are read by the auxiliary loss
        use_recurrence(self.model)
        self.generator, self.rng = torch.Generator().manual_seed(seed + 1), random.Random(f"{stage.name} {seed}")
        self.step, self.level, self.seconds = 0, 0, 0.0
        self.accuracy: float | None = None  # running, on the last level so far
        self.keyless_accuracy: float | None = None
        self.text_loss: float | None = None
        matrices = {
            id(p): p for n, p in self.model.named_parameters() if p.ndim == 2 and not re.search("embed|bias", n)
        }
        others = [p for p in self.model.parameters() if id(p) not in matrices]
        self.optimizers = [
            torch.optim.Muon(
                list(matrices.values()), lr=stage.muon, momentum=0.95, weight_decay=0.01, adjust_lr_fn="original"
            ),
            torch.optim.AdamW(others, lr=stage.adam, betas=(0.9, 0.95), weight_decay=0.0),
        ]

    # -- resuming ------------------------------------------------------------------
    @property
    def checkpoint(self) -> Path:
        return self.folder / f"{self.stage.name}.pt"

    def save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        names = ("step", "level", "seconds", "accuracy", "keyless_accuracy", "text_loss")
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "generator": self.generator.get_state(),
            "rng": self.rng.getstate(),
            **{name: getattr(self, name) for name in names},
        }
        write_whole(self.checkpoint, lambda path: torch.save(state, path))

    def resume(self) -> bool:
        """Take up the checkpoint, if there is one."""
        if not self.checkpoint.is_file():
            return False
        state = torch.load(self.checkpoint, weights_only=False)
        self.model.load_state_dict(state.pop("model"))
        for optimizer, saved in zip(self.optimizers, state.pop("optimizers")):
            optimizer.load_state_dict(saved)
        self.generator.set_state(state.pop("generator"))
        self.rng.setstate(state.pop("rng"))
        vars(self).update(state)
        return True

    # -- training ------------------------------------------------------------------
    def train(self, on_step: Callable[[dict[str, Any]], Any] = lambda line: None) -> nn.Module:
        """Run to the end of the stage; `on_step` is given each line of the log."""
        self.model.train()
        while self.step < self.stage.steps:
            started = time.monotonic()
            line = self._step()
            self.step += 1
            self.seconds += time.monotonic() - started
            if self.step % LOG_EVERY == 0 or self.step == self.stage.steps:
                line |= {"stage": self.stage.name, "step": self.step, "seconds": round(self.seconds, 1)}
                with open(self.folder / f"{self.stage.name}.jsonl", "a") as log:
                    print(json.dumps(line), file=log)
                on_step(line)
            if self.step % SAVE_EVERY == 0 or self.step == self.stage.steps:
                self.save()
        return self.model.eval()

    def _step(self) -> dict[str, Any]:
        stage, share = self.stage, self.step / self.stage.steps
        rate = min(1.0, (self.step + 1) / stage.warmup) * min(1.0, max(0.02, (1 - share) / stage.decay) ** stage.power)
        for optimizer, full in zip(self.optimizers, (stage.muon, stage.adam)):
            for group in optimizer.param_groups:
                group["lr"] = full * rate
        last = self.level == len(self.stage.levels) - 1
        if last and self.rng.random() < self.stage.text:
            loss, line = self._text(share)
        else:
            loss, line = self._lookup(share)
        loss.backward()
        line["norm"] = round(float(nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)), 2)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return line

    def _text(self, share: float) -> tuple[torch.Tensor, dict[str, Any]]:
        ids = text_batch(self.stage.rows, self.rng)
        with self._silenced(self._drawn(share, ("text",)), None):
            logits = self.model(input_ids=ids[:, :-1], use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        self.text_loss = _running(self.text_loss, loss.item())
        return loss, self._line()

    def _lookup(self, share: float) -> tuple[torch.Tensor, dict[str, Any]]:
        stage, rng = self.stage, self.rng
        level = self.level if rng.random() < 0.85 else rng.randrange(self.level + 1)
        size, words = stage.levels[level]
        surfaces = [rng.choice(stage.surfaces) for _ in range(stage.questions)]
        if self.stage.sizes and level == len(stage.levels) - 1:
            size = rng.choice(stage.sizes)
        batch = ask(rng.choice(FORMATS), size, surfaces, stage.rows, self.generator, words)
        drops = self._drawn(share, ("dictionary", "question", "answer", "lookup"))
        guided = [guide.layer for guide in stage.guides]
        with self._silenced(drops, batch), attention(self.model, guided) as weights:
            logits = self.model(input_ids=batch.ids[:, :-1], use_cache=False).logits
        target = batch.ids[:, 1:]
        each = cross_entropy(logits.transpose(1, 2), target, reduction="none")
        answers = torch.zeros(each.shape[1], dtype=torch.bool)
        answers[batch.answers] = True
        answer = each[:, answers].mean()
        loss = answer + OTHERS * each[:, ~answers].mean()
        masses = {}
        for guide in stage.guides:
            mass = _mass_on(guide.target, weights[guide.layer], batch)
            masses[guide.target] = round(mass.mean().item(), 3)
            loss = loss - guide.weight * _fade(share, stage.guide_fade) * torch.log(mass + 1e-3).mean()
        right = (logits[:, answers].argmax(-1) == target[:, answers]).float().mean().item()
        if any(drop.where == "dictionary" for drop in drops):
            self.keyless_accuracy = _running(self.keyless_accuracy, right)
        elif level == self.level:
            self.accuracy = _running(self.accuracy, right)
            if self.accuracy > stage.advance and self.level < len(stage.levels) - 1:
                self.level, self.accuracy = self.level + 1, None
        return loss, {**self._line(), "answer_loss": round(answer.item(), 4), "attention": masses}

    def _line(self) -> dict[str, Any]:
        size, words = self.stage.levels[self.level]
        running = {n: getattr(self, n) for n in ("accuracy", "keyless_accuracy", "text_loss")}
        return {"entries": size, "words": words, **{n: v and round(v, 4) for n, v in running.items()}}

    def _drawn(self, share: float, where: tuple[str, ...]) -> list[Drop]:
        """The drops of this batch: none before the last level."""
        last = self.level == len(self.stage.levels) - 1
        fade = _fade(share, self.stage.drop_fade) if last else 0.0
        return [drop for drop in self.stage.drops if drop.where in where and self.rng.random() < drop.often * fade]

    def _silenced(self, drops: list[Drop], batch: Asked | None) -> AbstractContextManager:
        where: dict[int, list[Positions]] = {}
        for drop in drops:
            for i in drop.layers:
                where.setdefault(i, []).append(_positions(drop.where, batch))
        return silenced(self.model, where)


def _positions(where: str, batch: Asked | None) -> Positions:
    """Where a drop of this name acts (see `Drop`)."""
    if where == "dictionary":
        return slice(0, batch.question)
    if where == "question":
        return slice(batch.question, None)
    if where == "answer":
        return batch.answers + [p - 1 for p in batch.answers if p - 1 not in batch.asked]
    return slice(None)


def _mass_on(target: str, weights: torch.Tensor, batch: Asked) -> torch.Tensor:
    """Attention from each answer's position on a guide's target, mean over heads: (batch, questions).

    In the reversed format the value comes first, and an entry is read after its key, whatever the target.
    """
    rows = weights[:, :, batch.answers].mean(1)
    if target != "key":
        at = torch.tensor(batch.ends)[batch.targets][..., None]
        at_word, at_separator = (rows.gather(2, at + after)[..., 0] for after in (0, 1))
        return at_word if target == "value" and batch.ends == batch.values else at_word + at_separator
    spans = zip([batch.question, *batch.answers], batch.answers)
    asked = [[p for p in batch.asked if start <= p <= end] for start, end in spans]
    return torch.stack([rows[:, turn, positions].sum(-1) for turn, positions in enumerate(asked)], 1)


def _fade(share: float, span: tuple[float, float]) -> float:
    """1 up to the first share of the steps, 0 from the second."""
    return max(0.0, min(1.0, (span[1] - share) / (span[1] - span[0])))


def _running(old: float | None, new: float) -> float:
    return new if old is None else MEMORY * old + (1 - MEMORY) * new
