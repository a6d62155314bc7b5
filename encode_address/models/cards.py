"""The bundled models in words, from their cards."""

from __future__ import annotations

import json
from typing import Any

from encode_address.models.layout import Layout
from encode_address.models.loading import BUNDLED_DIR, TRAINED, UNTRAINED

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
    config = json.loads((folder / "config.json").read_text())
    return json.loads((folder / "card.json").read_text()), Layout.from_config(config, name)


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
        *_arms(card),
        *(f"imposed in training: {line}" for line in card["imposed"]),
        *(f"falls short: {d['demand']}: {d['value']:.2f}" for d in card["demands"] if not d["met"]),
    ]
    return "\n  ".join(lines)


def _arms(card: dict[str, Any]) -> list[str]:
    """What a card says of the five arms, a line per variant."""
    if "arms" not in card:
        return []
    return [
        f"arms of {variant} (n = {card['arms']['instances']}, forced choice): "
        + ", ".join(f"{arm} {right:.3f}" for arm, right in by.items())
        for variant, by in card["arms"]["accuracy"].items()
    ]
