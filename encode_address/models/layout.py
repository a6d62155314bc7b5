"""Which layers a hybrid model has, and how they group into blocks. Pure: a config in, names out.

A *block* G0, G1, ... is a maximal run of consecutive linear layers; the softmax layer that follows it
is its *reader* layer. Linear layers after the last softmax layer form a last block without a reader
(paper section 2.2 leaves those out of its tables: see `Layout.tabled`). Where an MLP is a layer of its own, it mixes
no positions: it belongs to no block and ends none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from encode_address.errors import ModelError, NameNotFound

LINEAR = frozenset({"linear_attention", "mamba", "recurrent", "conv"})
SOFTMAX = frozenset({"full_attention", "attention", "sliding_attention"})
MLP = frozenset({"mlp", "moe"})


@dataclass(frozen=True)
class Block:
    """A maximal run of linear layers; `reader` is the softmax layer right after it, or None."""

    name: str
    layers: tuple[int, ...]
    reader: int | None

    @property
    def span(self) -> str:
        """The layers as text: "4-6", or "0" for a single one."""
        return layer_span(self.layers)


@dataclass(frozen=True)
class Layout:
    """The layers of a model by kind ("linear", "softmax" or "mlp"), and the blocks they form."""

    kinds: tuple[str, ...]
    blocks: tuple[Block, ...]

    @classmethod
    def from_config(cls, config: Any, name: str = "this model") -> Layout:
        """Read the layout from a transformers config (or a plain dict with `layer_types`).

        Raises ModelError for a model without linear layers, without softmax layers, or with a kind of
        layer that is neither.
        """
        get = config.get if isinstance(config, dict) else lambda key: getattr(config, key, None)
        types = get("layer_types")
        if not types:  # one kind of layer only: it has a recurrent state, or attention heads
            kind = "mamba" if get("state_size") is not None else "attention" if get("num_attention_heads") else None
            if kind is None:
                raise ModelError(f"{name}: its config has no layer_types, so it is not a hybrid model")
            types = [kind]
        kinds = []
        for index, kind in enumerate(types):
            if kind not in LINEAR | SOFTMAX | MLP:
                raise ModelError(f"{name}: layer {index} is of kind {kind!r}, which is neither linear nor softmax")
            kinds.append("linear" if kind in LINEAR else "softmax" if kind in SOFTMAX else "mlp")
        if "linear" not in kinds:
            raise ModelError(f"{name} has no linear layers: it is a pure transformer, not a hybrid model")
        if "softmax" not in kinds:
            raise ModelError(f"{name} has no softmax layers: it is a pure recurrent model, not a hybrid model")
        return cls(tuple(kinds), _blocks(kinds))

    @property
    def linear_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.kinds) if kind == "linear")

    @property
    def softmax_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.kinds) if kind == "softmax")

    @property
    def tabled(self) -> tuple[Block, ...]:
        """The blocks that the paper's tables show: those that a softmax layer follows."""
        return tuple(block for block in self.blocks if block.reader is not None)

    def block(self, name: str) -> Block:
        """The block called `name`. Raises NameNotFound, naming the blocks there are."""
        for block in self.blocks:
            if block.name == name:
                return block
        names = ", ".join(block.name for block in self.blocks)
        raise NameNotFound(f"no block {name!r}: this model has {len(self.blocks)} blocks ({names})")

    def layers_of(self, names: str) -> tuple[int, ...]:
        """The layers of a block or of a union: "G2", "G2+G3", or one layer, "L4"."""
        layers: list[int] = []
        for name in names.split("+"):
            if name[:1] == "L" and name[1:].isdecimal():
                if int(name[1:]) >= len(self.kinds):
                    raise NameNotFound(f"no layer {name}: this model has {len(self.kinds)} layers")
                layers.append(int(name[1:]))
            else:
                layers.extend(self.block(name).layers)
        return tuple(sorted(set(layers)))

    def readers_after(self, layers: tuple[int, ...]) -> tuple[int, ...]:
        """The softmax layers that come after the last of `layers`."""
        return tuple(i for i in self.softmax_layers if i > max(layers))


def layer_span(layers: tuple[int, ...]) -> str:
    """Layer indices as short text: (4, 5, 6) -> "4-6", (2, 4, 5) -> "2,4-5"."""
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs(layers))


def runs(numbers: Iterable[float]) -> list[list[float]]:
    """Maximal runs of numbers that follow one another by 1: (2, 4, 5) -> [[2], [4, 5]]."""
    out: list[list[float]] = []
    for number in numbers:
        if out and number == out[-1][-1] + 1:
            out[-1].append(number)
        else:
            out.append([number])
    return out


def _blocks(kinds: list[str]) -> tuple[Block, ...]:
    blocks: list[Block] = []
    current: list[int] = []
    for index, kind in enumerate([*kinds, "end"]):
        if kind == "linear":
            current.append(index)
        elif current and kind != "mlp":
            reader = index if kind == "softmax" else None
            blocks.append(Block(f"G{len(blocks)}", tuple(current), reader))
            current = []
    return tuple(blocks)
