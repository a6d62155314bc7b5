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


def in_batches(prompts: Sequence[Prompt], tokens: int) -> list[list[int]]:
    """The places of prompts in batches of one length and at most `tokens` tokens, one prompt at least."""
    lengths: dict[int, list[int]] = {}
    for i, prompt in enumerate(prompts):
        lengths.setdefault(len(prompt), []).append(i)
    return [
        some[start : start + size]
        for length, some in lengths.items()
        for size in [max(1, tokens // length)]
        for start in range(0, len(some), size)
    ]


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


def watched(cells: Sequence[Cell]) -> dict[int, list[int]]:
    """Layer -> the heads whose attention some cell wants."""
    heads: dict[int, set[int]] = {}
    for cell in cells:
        for layer, head in cell.watch:
            heads.setdefault(layer, set()).add(head)
    return {layer: sorted(heads[layer]) for layer in sorted(heads)}


def noise_seed(seed: int, layer: int, ids: tuple[int, ...]) -> int:
    """The seed of the noise of one layer of one prompt."""
    return int.from_bytes(hashlib.sha256(f"{seed},{layer},{ids}".encode()).digest()[:6], "big")
