"""A fitted lens: one matrix per layer, what it was fitted on, and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch

from encode_address.errors import RunError
from encode_address.models.hybrid import HybridModel

KINDS = ("jacobian", "rows", "logit")


@dataclass(frozen=True)
class Lens:
    """Matrices that carry a layer's residual stream to the last layer's output, before the final norm.

    `sums`: per layer (parts, rows, d_model), float32: sums over prompts. There are two parts, of the prompts at even and at odd
    places, so that a fit says how far its halves agree; a lens from elsewhere has one. `counts`: prompts per part.
    `about`: what JSON keeps of the fit: `kind`, `model`, `fingerprint`, `d_model`, `target` (the last layer), `skip` (positions
    that the fit left out at the start), `tokens` (of a row lens), `prompts` (digests of all that are to be fitted), `settings`, `data`.
    `directions` (rows, d_model): the cotangents of a row lens. The kinds:

    * jacobian: rows are the d_model directions of the target's output. `read` gives logits over the vocabulary.
    * rows: one row per token of `tokens`, the norm's gain times the head's row, times J. Its scores are those tokens' logits
      without soft cap, up to one positive factor per read position (the norm's scale and the model's own logits scaling).
    * logit: J = I.

    Raises RunError for numbers that are not finite.
    """

    sums: dict[int, torch.Tensor]
    counts: tuple[int, ...]
    about: dict[str, Any]
    directions: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for layer, values in self.sums.items():
            if not torch.isfinite(values).all():
                raise RunError(f"the lens of L{layer} is NaN or infinite: fit it in float32, or on other prompts")

    @property
    def kind(self) -> str:
        return self.about["kind"]

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers it was fitted at."""
        return tuple(self.about["layers"])

    @property
    def readable(self) -> tuple[int, ...]:
        """The layers it can be read at: the fitted ones, and the target, where J is I whatever the prompts."""
        return tuple(sorted({*self.layers, self.about["target"]}))

    @property
    def tokens(self) -> tuple[int, ...] | None:
        """The token ids of a row lens, in the order of its scores; None for a lens of the whole vocabulary."""
        return tuple(self.about["tokens"]) if self.kind == "rows" else None

    @property
    def n(self) -> int:
        """How many prompts are in it."""
        return sum(self.counts)

    @property
    def finished(self) -> bool:
        """Whether all prompts of its fit are in it."""
        return self.n == self.about["n_prompts"]

    def matrix(self, layer: int) -> torch.Tensor:
        """J of a layer, or its rows: (rows, d_model), float32. Raises RunError for a layer that was not fitted."""
        if layer not in self.readable:
            there = ", ".join(f"L{i}" for i in self.readable)
            raise RunError(f"this lens was not fitted at L{layer}: use one of {there}, or fit it there")
        if layer not in self.sums:
            return self._direct()
        return self.sums[layer].sum(0) / self.n

    def carrier(self, layer: int) -> torch.Tensor | None:
        """`matrix`, or None where it is the identity (a logit lens, and the target of any whole lens): what is sent to where the model is."""
        matrix = self.matrix(layer)
        return None if self.kind != "rows" and layer not in self.sums else matrix

    def scores(self, hidden: torch.Tensor, layer: int) -> torch.Tensor:
        """Of a row lens: its scores (..., tokens) of residuals (..., d_model) brought out of a trace; no model is needed."""
        if self.kind != "rows":
            raise RunError("only a row lens scores residuals without the model: use read, or fit with tokens=")
        return hidden.float() @ self.matrix(layer).T

    def require(self, model: HybridModel) -> None:
        """Raise RunError unless this is a finished lens of this model."""
        if self.about["fingerprint"] != model.fingerprint:
            raise RunError(
                f"this lens is of {self.about['model']} ({self.about['fingerprint']}), not of {model.name} "
                f"({model.fingerprint}): fit one for this model, in this precision"
            )
        if not self.finished:
            raise RunError(
                f"this lens has {self.n} of its {self.about['n_prompts']} prompts: run the fit again to finish it"
            )

    def require_position(self, position: int) -> None:
        """Raise RunError for a position, counted from 0 at the first token, that the fit left out."""
        if position < self.about["skip"]:
            raise RunError(
                f"position {position} cannot be read: the lens was fitted from position {self.about['skip']} on; "
                "read later positions, or longer prompts"
            )

    def reliability(self) -> pd.DataFrame:
        """How far the two halves of the prompts agree: one row per layer, with `n_even` and `n_odd` prompts.

        `cosine` of the two halves' matrices; `cosine_beyond` of the same without the direct path (the identity, or a row lens's own
        directions), which any two halves share; `difference`, the norm of their difference relative to the lens's. `cosine_beyond` is
        NaN where nothing is beyond. Raises RunError for a lens without two halves.
        """
        if len(self.counts) != 2 or min(self.counts) < 1:
            raise RunError("this lens has no two halves to compare: fit one here, on two prompts or more")
        direct, rows = self._direct(), []
        for layer in self.layers:
            even, odd = (part.double() / n for part, n in zip(self.sums[layer], self.counts))
            whole = self.matrix(layer).double()
            rows.append(
                {
                    "layer": layer,
                    "n_even": self.counts[0],
                    "n_odd": self.counts[1],
                    "cosine": _cosine(even, odd),
                    "cosine_beyond": _cosine(even - direct.double(), odd - direct.double()),
                    "difference": float((even - odd).norm() / whole.norm()),
                }
            )
        return pd.DataFrame(rows)

    def _direct(self) -> torch.Tensor:
        """What it would be if nothing lay between a layer and the target, with J = I."""
        return torch.eye(self.about["d_model"]) if self.directions is None else self.directions


def logit_lens(model: HybridModel, layers: Sequence[int] | None = None) -> Lens:
    """The lens with J = I at `layers` (default: all), to be read as any other. Nothing is fitted, so no position is refused."""
    chosen = layers_of(model, range(len(model.layers)) if layers is None else layers, last=True)
    return Lens({}, (0,), {**describe(model, "logit", chosen), "skip": 0, "n_prompts": 0})


def describe(model: HybridModel, kind: str, layers: Sequence[int]) -> dict[str, Any]:
    """What every lens says of its model."""
    return {
        "kind": kind,
        "model": model.name,
        "fingerprint": model.fingerprint,
        "d_model": model.config.hidden_size,
        "dtype": model.dtype,
        "target": len(model.layers) - 1,
        "layers": list(layers),
    }


def layers_of(model: HybridModel, layers: Sequence[int], last: bool = False) -> tuple[int, ...]:
    """Layers in order, each once. Raises RunError for none, or one that the model does not have (`last`: may have)."""
    chosen, top = tuple(sorted(set(layers))), len(model.layers) - (0 if last else 1)
    wrong = [f"L{i}" for i in chosen if not 0 <= i < top]
    if wrong or not chosen:
        raise RunError(f"a lens of {model.name} has layers L0 to L{top - 1}, not {', '.join(wrong) or 'none'}")
    return chosen


def _cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """The cosine of two matrices taken as vectors; NaN where one is zero."""
    norms = float(a.norm() * b.norm())
    return float((a * b).sum()) / norms if norms else float("nan")
