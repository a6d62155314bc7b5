"""From trained seeds to bundled models: which seed is shipped, and what its card says of the others.

    python -m encode_address.train.ship trained [NAME ...]

takes every TRAINED/<name>-seed<N>/card.json, chooses one seed per model (of those named, or of all) by the rule below, and
writes it to the package with a card that lists all seeds, and the held-out and training text that perplexity is measured on.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from encode_address.errors import StoreError
from encode_address.models.loading import BUNDLED_DIR
from encode_address.train.data import story
from encode_address.train.recipe import RECIPES

RULE = (
    "of the finished seeds, the one that meets most demands; of equals, the lowest seed. The figures are those of the card, on "
    "dictionaries and texts that `find` never draws."
)
TEXT_SEEDS = {"train": 7, "test": 8}
STORIES, STORY_WORDS = 128, 56
PLAIN = ("chat8", "list8", "rev8")


def demands(card: dict[str, Any]) -> list[dict[str, Any]]:
    """What a ground-truth model should do, with this one's figures."""
    blocks, address = card["circuit"]["blocks"], card["circuit"]["address"]
    redirects = {name: block["redirected"].values() for name, block in blocks.items()}
    others = max(max(values) for name, values in redirects.items() if name != address)
    carries = {name: min(min(by.values()) for by in block["carried"].values()) for name, block in blocks.items()}
    outside = {  # of the circuit: what retrieval survives
        name: block for name, block in blocks.items() if name != address and min(block["removed"].values()) >= 0.5
    }
    found = [
        ("answers chat8, list8 and rev8 (accuracy at least .99)", min(card["accuracy"][v] for v in PLAIN), 0.99),
        ("one block redirects at least .9 of the answers in every format", min(redirects[address]), 0.9),
        ("every other block redirects at most .1", 1 - others, 0.9),
        ("one block carries value and key swaps (at least .5 in every format)", max(carries.values()), 0.5),
        ("the reader's keys work without that block (accuracy at least .95)",
         min(card["circuit"]["accuracy_without_address_in"]["keys"].values()), 0.95),
        ("retrieval survives the removal of any block outside the circuit (accuracy at least .95)",
         min((min(block["removed"].values()) for block in outside.values()), default=0.0), 0.95),
        ("each of them is needed for text (perplexity without it at least 1.2 times)",
         min((block["perplexity_ratio"] for block in outside.values()), default=0.0), 1.2),
    ]  # fmt: skip
    return [{"demand": demand, "value": round(value, 4), "met": value >= bound} for demand, value, bound in found]


def negative_demands(card: dict[str, Any]) -> list[dict[str, Any]]:
    """What the trained negative should do: look up, without any set of linear blocks that redirects."""
    best = max(card["circuit"]["sets"].values())
    return [
        {
            "demand": "answers chat8, list8 and rev8 (accuracy at least .95)",
            "value": (value := min(card["accuracy"][v] for v in PLAIN)),
            "met": value >= 0.95,
        },
        {"demand": "no set of linear blocks redirects half of the answers", "value": best, "met": best < 0.4},
    ]


def row(card: dict[str, Any]) -> dict[str, Any]:
    """One seed in the table of all seeds."""
    out = {key: card[key] for key in ("seed", "status", "wall_seconds", "base")}
    if "circuit" not in card:
        return out
    return out | {
        "accuracy": {v: card["accuracy"][v] for v in PLAIN},
        "perplexity": card["perplexity"],
        "redirected": {name: min(b["redirected"].values()) for name, b in card["circuit"]["blocks"].items()},
        "demands_met": sum(d["met"] for d in card["demands"]),
    }


def ship(trained: Path, target: Path = BUNDLED_DIR, names: Sequence[str] = ()) -> list[str]:
    """Choose and copy; returns a line per model. Raises StoreError when a model has no finished seed."""
    lines = []
    for name in names or RECIPES:
        cards = [json.loads(path.read_text()) for path in trained.glob(f"{name}-seed*/card.json")]
        cards.sort(key=lambda card: card["seed"])
        for card in cards:
            if "circuit" in card:
                card["demands"] = negative_demands(card) if name.endswith("-negative") else demands(card)
        chosen = choose(cards)
        if chosen is None:
            raise StoreError(f"no finished seed of {name} in {trained}: run encode-address train {name} --seed N")
        folder = target / name
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(trained / f"{name}-seed{chosen['seed']}" / "model", folder)
        card = chosen | {"selection": RULE, "seeds": [row(c) for c in cards]}
        (folder / "card.json").write_text(json.dumps(card, indent=1) + "\n")
        unmet = [d["demand"] for d in chosen["demands"] if not d["met"]]
        lines.append(f"{name}: seed {chosen['seed']} of {len(cards)}; not met: {'; '.join(unmet) or 'nothing'}")
    for part, seed in TEXT_SEEDS.items():
        rng = random.Random(seed)
        stories = [" ".join(["<s>", *story(rng, STORY_WORDS, part == "test")]) for _ in range(STORIES)]
        (target / f"text-{part}.txt").write_text("\n".join(stories) + "\n")
    return lines


def choose(cards: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The seed to ship (see RULE), or None."""
    finished = [card for card in cards if "circuit" in card]
    return max(finished, key=lambda card: (sum(d["met"] for d in card["demands"]), -card["seed"]), default=None)


if __name__ == "__main__":
    print("\n".join(ship(Path(sys.argv[1]), names=sys.argv[2:])))
