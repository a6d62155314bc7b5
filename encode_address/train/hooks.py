"""What training and its measures do to mixers, with plain torch hooks: silence them, watch them, put outputs in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from encode_address.train.build import mixer

Positions = slice | list[int]


@contextmanager
def silenced(model: nn.Module, positions: Mapping[int, Iterable[Positions]]) -> Iterator[None]:
    """The mixers of these layers write nothing at these positions."""

    def silence(where: list[Positions]) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
            values = _values(output)
            mask = torch.ones(values.shape[1])
            for part in where:
                mask[part] = 0
            return _with(output, values * mask[None, :, None])

        return hook

    with _hooked(model, {i: silence(list(where)) for i, where in positions.items()}):
        yield


@contextmanager
def captured(model: nn.Module, layers: Iterable[int]) -> Iterator[dict[int, torch.Tensor]]:
    """The mixer outputs of these layers, (batch, positions, width) each, once the model has run."""
    seen: dict[int, torch.Tensor] = {}

    def capture(i: int) -> Any:
        return lambda module, inputs, output: seen.__setitem__(i, _values(output))

    with _hooked(model, {i: capture(i) for i in layers}):
        yield seen


@contextmanager
def replaced(model: nn.Module, outputs: Mapping[int, torch.Tensor], positions: torch.Tensor) -> Iterator[None]:
    """The mixer outputs at `positions` (batch, k) are those of `outputs` there."""
    rows = torch.arange(len(positions))[:, None]

    def replace(new: torch.Tensor) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
            values = _values(output).clone()
            values[rows, positions] = new[rows, positions]
            return _with(output, values)

        return hook

    with _hooked(model, {i: replace(new) for i, new in outputs.items()}):
        yield


@contextmanager
def attention(model: nn.Module, layers: Iterable[int]) -> Iterator[dict[int, torch.Tensor]]:
    """The attention weights of these softmax layers, once the model (eager) has run."""
    weights: dict[int, torch.Tensor] = {}

    def keep(i: int) -> Any:
        return lambda module, inputs, output: weights.__setitem__(i, output[1])

    with _hooked(model, {i: keep(i) for i in layers}):
        yield weights


@contextmanager
def _hooked(model: nn.Module, hooks: Mapping[int, Any]) -> Iterator[None]:
    handles = [mixer(model.model.layers[i]).register_forward_hook(hook) for i, hook in hooks.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _values(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


def _with(output: Any, values: torch.Tensor) -> Any:
    return (values, *output[1:]) if isinstance(output, tuple) else values
