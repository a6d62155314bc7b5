"""`encode-address compare`: a table beside the published numbers, and the shapes of its results beside the paper's.

*Numbers.* `published.csv` has the numbers of the paper and its repository. Where the model (by name), experiment, variant, unit,
position, head, measure and condition are those of stored rows, ours is the estimate of the experiment's own functions (paper section 4), with
its 95 % interval [l, u] and n pairs. Of the published value p the interval [l', u'] is Wilson's, for a share of n pairs, or p -+ 1.96 SEM where
one was printed. The difference d = ours - p has the interval

    d - sqrt((ours - l)^2 + (u' - p)^2)   to   d + sqrt((u - ours)^2 + (p - l')^2),

which for two shares is Newcombe's hybrid score interval. Accuracy averages both forms of a pair, so n pairs make it too wide, never too narrow;
published values are rounded, mostly to .01, which it does not know of. Without n or SEM there is no test. With hundreds of rows, one in twenty
differs by chance.

*Shapes.* Per variant, a claim of the paper is a list of statements about intervals, each true, false or open: a share is "most" where its lower
bound is at least one half, "few" where its upper bound is below. All true: agrees; one false: disagrees; else undecided. Shapes say nothing of
numbers, and are all that is compared for models that the paper does not have. If a model had no such circuit, its shapes would disagree.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from encode_address.compare.numbers import numbers
from encode_address.compare.published import FACTORS
from encode_address.compare.results import sources
from encode_address.compare.seeds import between_seeds
from encode_address.compare.shapes import shapes
from encode_address.compare.text import as_text
from encode_address.run.store import write_text

__all__ = ["as_text", "compare", "write"]

COLUMNS = [
    "kind", "model", *FACTORS, "ours", "low", "high", "n", "relation", "published", "published_n", "difference", "difference_low",
    "difference_high", "result", "sd", "source", "spec_section", "note", "setting",
]  # fmt: skip


def compare(folder: str | Path, *more: str | Path, seeds: int | None = None) -> pd.DataFrame:
    """Numbers and shapes of the results in `folder`; with `seeds`, also the spread of its and `more` folders' rates over that
    many seeds of the dictionaries. One row per number, claim or rate (column `kind`: number, shape, seeds).

    Raises EncodeAddressError for a folder without results, and for fewer seeds than asked for.
    """
    found = sources(folder)
    rows: list[dict[str, Any]] = []
    for model in dict.fromkeys(source.model for source in found):
        own = [source for source in found if source.model == model]
        rows += [{"kind": "number", "model": model, **row} for row in numbers(own)]
        rows += [{"kind": "shape", "model": model, **row} for row in shapes(own)]
    if seeds is not None:
        rows += [{"kind": "seeds", **row} for row in between_seeds([*found, *(s for f in more for s in sources(f))], seeds)]  # fmt: skip
    return pd.DataFrame(rows, columns=COLUMNS)


def write(frame: pd.DataFrame, folder: str | Path) -> Path:
    """Write DIR/compare.csv, whole or not at all. Raises StoreError."""
    path = Path(folder) / "compare.csv"
    write_text(path, frame.dropna(axis=1, how="all").to_csv(index=False, float_format="%.6g"))
    return path
