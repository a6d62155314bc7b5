"""Prompts and cells as tensors: what goes into a trace."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from encode_address.run.cells import Cell
from encode_address.tasks.prompts import Prompt


def ids_of(prompts: Sequence[Prompt]) -> torch.Tensor:
    """(batch, positions) token ids of equally long prompts."""
    return torch.tensor([prompt.ids for prompt in prompts])


def entries_of(prompts: Sequence[Prompt]) -> torch.Tensor:
    """(batch, entries, positions): 1 where a token belongs to an entry of the prompt's dictionary."""
    out = torch.zeros(len(prompts), len(prompts[0].keys), len(prompts[0]))
    for row, prompt in enumerate(prompts):
        for entry in range(len(prompt.keys)):
            out[row, entry, list(prompt.span(f"entry {entry}"))] = 1
    return out


def asked(cells: Sequence[Cell]) -> torch.Tensor:
    """(batch, m): each cell's outcomes, then its host's choices; short rows are filled with token 0."""
    rows = [[token for _, token in cell.outcomes] + list(cell.host.choices) for cell in cells]
    width = max(len(row) for row in rows)
    return torch.tensor([row + [0] * (width - len(row)) for row in rows])


def watched(cells: Sequence[Cell]) -> list[int]:
    """The layers whose attention some cell wants."""
    return sorted({layer for cell in cells for layer, _ in cell.watch})


def noise_seed(seed: int, layer: int, ids: tuple[int, ...]) -> int:
    """The seed of the noise of one layer of one prompt."""
    return int.from_bytes(hashlib.sha256(f"{seed},{layer},{ids}".encode()).digest()[:6], "big")
