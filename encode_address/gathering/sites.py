"""Where the grid patches, and how far a readout layer is from there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from encode_address.errors import NameNotFound
from encode_address.models.layout import Layout

OUTPUTS = ("residual", "mixer", "mlp")
ATTENTION = ("query", "key", "value")
KINDS = (*OUTPUTS, *ATTENTION, "state")


@dataclass(frozen=True)
class Site:
    """Values of one kind, of one layer or of several that are written together ("G2", the mixers of a block)."""

    kind: str
    layers: tuple[int, ...]
    block: str = ""

    @property
    def name(self) -> str:
        """ "mixer.L5", or "mixer.G2" for a block."""
        return f"{self.kind}.{self.block or f'L{self.layers[0]}'}"

    @property
    def layer(self) -> int:
        """The layer from which on it acts whole: the last of them."""
        return self.layers[-1]

    def reads(self, depth: int) -> range:
        """The layers that it can be read at. Where a residual stream was written it says what was written, nothing else."""
        return range(self.layer + (self.kind == "residual"), depth)


def sites_of(model: Any, kinds: Sequence[str] = KINDS) -> list[Site]:
    """Every site of these kinds that a model has, layer by layer.

    Linear layers have states where the family's cache can be continued, softmax layers a query, keys and values; an MLP that is a
    layer of its own has none beside it. Raises NameNotFound for an unknown kind.
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise NameNotFound(f"no site kind {unknown[0]!r}: use {', '.join(KINDS)}")
    states = model.family.continues and not model.family.held
    found = []
    for layer, mixer in enumerate(model.layout.kinds):
        has = {
            "residual": True,
            "mixer": mixer in ("linear", "softmax"),
            "mlp": hasattr(model.layers[layer], "mlp"),
            "state": mixer == "linear" and states,
            **dict.fromkeys(ATTENTION, mixer == "softmax"),
        }
        found += [Site(kind, (layer,)) for kind in kinds if has[kind]]
    return found


def plain(model: Any, sites: Sequence[Site]) -> list[tuple[str, str, tuple[int, ...], tuple[str, ...]]]:
    """Sites as `traced` takes them. The attention calls are named here, outside any trace."""
    return [
        (
            site.name,
            site.kind,
            site.layers,
            tuple(model.attention_op(i) if site.kind in ATTENTION else "" for i in site.layers),
        )
        for site in sites
    ]


def crossed(layout: Layout, patched: int, read: int) -> int:
    """How many softmax layers lie in (patched, read]."""
    return sum(patched < layer <= read for layer in layout.softmax_layers)
