"""What each family of models supports, as found out by running it: the table behind `encode-address models`.

`supported.json` is written by `python -m tests.family_row`, which runs every check and every verb on each family's tiny
model against an independent implementation; a test runs them again and compares. Nothing here is claimed by hand.
"""

from __future__ import annotations

import json
from pathlib import Path

from encode_address.models.families import FAMILIES, REFUSED

SUPPORTED = Path(__file__).parent / "supported.json"
_FACTS = ("family", "model type", "class")  # of a row; what follows are findings


def rows() -> dict[str, dict[str, str]]:
    """The tiny model's name -> its row: facts, and per finding "yes" or "no: why"."""
    return json.loads(SUPPORTED.read_text())


def findings(row: dict[str, str]) -> dict[str, str]:
    """The findings of a row, without its facts."""
    return {what: found for what, found in row.items() if what not in _FACTS}


def listing() -> str:
    """One line per class of models: what it supports, and what it refuses; then the architectures that are refused."""
    lines = ["families, on tiny random models, against an independent implementation (docs/families.md):"]
    for name, row in rows().items():
        missing = [what for what, found in findings(row).items() if found.startswith("no")]
        lines.append(f"  {name:<16} {row['class']:<32} all" + (f" but {', '.join(missing)}" if missing else ""))
    lines += ["refused by name:", *(f"  {model_type}: {why}" for model_type, why in REFUSED.items())]
    return "\n".join(lines)


def document() -> str:
    """The same as a Markdown document, with the engine's own words for each refusal and the notes of the records."""
    known = rows()
    columns = [*findings(next(iter(known.values())))]
    lines = [
        "# Families",
        "",
        _INTRODUCTION,
        "",
        "| | " + " | ".join(columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    refusals: dict[str, list[str]] = {}
    for name, row in known.items():
        cells = [found.partition(":")[0] for found in findings(row).values()]
        lines.append(f"| {name} ({row['class']}) | " + " | ".join(cells) + " |")
        for what, found in findings(row).items():
            if found.startswith("no: "):
                refusals.setdefault(f"{what}: {found.removeprefix('no: ')}", []).append(name)
    lines += ["", "## What is refused, in the engine's words", ""]
    lines += [f"* {refusal} ({', '.join(names)})" for refusal, names in refusals.items()]
    lines += ["", "## What to know of each", ""]
    for family in FAMILIES:
        lines.append(f"* {family.name} ({', '.join(family.model_types)}): {family.notes}")
    lines += ["", "## Architectures that are refused", ""]
    lines += [f"* {model_type}: {why}" for model_type, why in REFUSED.items()]
    return "\n".join(lines) + "\n"


_INTRODUCTION = """Written by `python -m tests.family_row`: every row comes from running the checks of `encode-address check` and every verb on
a tiny random model of that class, and from comparing each result with an independent implementation in plain torch
(`tests/oracle.py`, `tests/oracle_runs.py`). "yes": equal, and the edit moved the answer. Weights, kernels and sizes of real
checkpoints are not part of it: run `encode-address check MODEL` on yours."""
