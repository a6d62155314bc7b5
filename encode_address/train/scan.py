"""The recurrence of RG-LRU layers in training: the same numbers as the class's own loop, its gradient in a second loop.

Autograd through the class's loop keeps and adds up a slice per token, which one operation with its own gradient need not.
It is only used while training: what a saved model computes is its class's own.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn

from encode_address.train.build import linear


class Recurrence(torch.autograd.Function):
    """states[:, t] = kept[:, t] * states[:, t - 1] + inputs[:, t], from zero; all of shape (batch, positions, width)."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        inputs, kept = (x.transpose(0, 1).contiguous() for x in (inputs, kept))
        states = inputs.clone()
        for t in range(1, len(states)):
            states[t].addcmul_(kept[t], states[t - 1])
        ctx.save_for_backward(kept, states)
        return states.transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept, states = ctx.saved_tensors
        to_inputs = gradient.transpose(0, 1).contiguous().clone()
        for t in range(len(states) - 2, -1, -1):
            to_inputs[t].addcmul_(kept[t + 1], to_inputs[t + 1])
        to_kept = torch.zeros_like(kept)
        to_kept[1:] = to_inputs[1:] * states[:-1]
        return to_inputs.transpose(0, 1), to_kept.transpose(0, 1)


def use_recurrence(model: nn.Module) -> None:
    """Let the RG-LRU layers of a model in training (no cache, positions from 0) use `Recurrence`."""

    def scan(module: nn.Module, hidden_states: Any, recurrent_gate: Any, reset: Any, recurrent_states: Any) -> Any:
        states = Recurrence.apply(hidden_states, recurrent_gate * ~reset)
        return states, states[:, -1].detach()

    for layer in model.model.layers:
        rg_lru = getattr(linear(layer), "rg_lru", None)
        if rg_lru is not None:
            rg_lru._rnn_scan = MethodType(scan, rg_lru)
