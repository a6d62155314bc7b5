"""Values that come from elsewhere, as plain tensors: another model's, or what a map makes of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from encode_address.errors import RunError


@dataclass(frozen=True, eq=False)
class Given:
    """Mixer outputs to be written: layer -> (positions, d_model), a row for each patched position.

    `digest` stands for them in a row's key: a hash of the values, unless the caller names what they depend on, which it may where that
    is known before they are computed. Raises RunError for values that are not finite, or not of that shape.
    """

    values: Mapping[int, torch.Tensor]
    digest: str = ""

    def __post_init__(self) -> None:
        shapes = {tuple(rows.shape) for rows in self.values.values()}
        if len(shapes) != 1 or len(next(iter(shapes))) != 2:
            raise RunError(f"given values are (positions, d_model), alike in all layers; these are {sorted(shapes)}")
        if not all(bool(torch.isfinite(rows).all()) for rows in self.values.values()):
            raise RunError("given values are NaN or infinite; try --dtype float32")
        if not self.digest:
            digest = hashlib.sha256()
            for layer in sorted(self.values):
                rows = self.values[layer].detach().float().cpu().contiguous()
                digest.update(f"{layer} {tuple(rows.shape)}".encode() + rows.numpy().tobytes())
            object.__setattr__(self, "digest", digest.hexdigest()[:24])

    @property
    def positions(self) -> int:
        """How many positions they are for."""
        return len(next(iter(self.values.values())))
