"""The numbers of the paper and its repository, and which of them a model's name stands for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

PUBLISHED = Path(__file__).parent / "published.csv"
FACTORS = ["experiment", "variant", "unit", "position", "reader", "measure", "condition"]
KEY = ["model", *FACTORS, "relation", "source"]


def published() -> pd.DataFrame:
    """The published numbers (columns: see `README.md`); what is empty is "" in words and NaN in numbers."""
    table = pd.read_csv(PUBLISHED, dtype=str, keep_default_na=False)
    return table.assign(**{column: pd.to_numeric(table[column]) for column in ("value", "n", "sem")})


def matched(model: str, names: Sequence[str]) -> str | None:
    """The hub name that a model's name, or that of its folder, ends in ("/data/my-qwen3.5-9b": Qwen/Qwen3.5-9B)."""
    own = Path(model).name.casefold()
    for name in names:
        last = name.rpartition("/")[2].casefold()
        if last and own.endswith(last) and not own.removesuffix(last)[-1:].isalnum():
            return name
    return None
