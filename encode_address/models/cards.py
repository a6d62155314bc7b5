"""The bundled models in words, from their cards."""

from __future__ import annotations

import json
from typing import Any

from encode_address.models.layout import Layout
from encode_address.models.loading import BUNDLED_DIR, TRAINED, UNTRAINED, read_config

SHOWN = ("chat8", "list8", "rev8")


def listing() -> str:
    """One paragraph per bundled model: what it is, what it can do, what was imposed on it and what it falls short of."""
    parts = [_paragraph(name, *_read(name)) for name in TRAINED]
    controls = [
        f"{name}: {name.removesuffix('-untrained')} with random weights, a negative control" for name in UNTRAINED
    ]
    return "\n\n".join([*parts, "\n".join(controls)])


def _read(name: str) -> tuple[dict[str, Any], Layout]:
    folder = BUNDLED_DIR / name
    layout = Layout.from_config(read_config(name, str(folder), None), name)  # not every config file lists its layers
    return json.loads((folder / "card.json").read_text()), layout


def _paragraph(name: str, card: dict[str, Any], layout: Layout) -> str:
    blocks = ", ".join(
        f"{block.name} [{block.span}]" + (f" -> L{block.reader}" if block.reader is not None else "")
        for block in layout.blocks
    )
    right = ", ".join(f"{variant} {card['accuracy'][variant]:.3f}" for variant in SHOWN)
    finished = sum("accuracy" in row for row in card["seeds"])
    tried = len(card["seeds"])
    lines = [
        f"{name}: {card['architecture']}, {blocks}",
        card["purpose"],
        f"accuracy {right}; perplexity {card['perplexity']:.2f}; {card['parameters']:,} parameters",
        f"seed {card['seed']}; {tried} seed{'s' * (tried > 1)} tried, {finished} finished; {card['command']}",
        *(f"imposed in training: {line}" for line in card["imposed"]),
        *(f"falls short: {d['demand']}: {d['value']:.2f}" for d in card["demands"] if not d["met"]),
    ]
    return "\n  ".join(lines)
