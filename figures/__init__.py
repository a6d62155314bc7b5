"""Figures of a result folder. They read tables only: no figure loads or runs a model.

Each figure is a file with `draw(table, verdict, folder) -> paths`, and runs alone as `python figures/circuit.py
RESULTS_DIR`. Every name in a figure - blocks, layers, heads, words - comes from the table and the verdict. What
they share is here: reading the folder, choosing rows and the reader, and writing the files.
"""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import matplotlib.style
import pandas as pd
import pyarrow as pa
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from encode_address import metrics
from encode_address.errors import EncodeAddressError
from encode_address.run.store import write_whole

Draw = Callable[[pd.DataFrame, "dict[str, Any] | None", Path], "list[Path]"]

# Okabe and Ito's colours: told apart by readers of every colour vision, and by their lightness in print.
BLUE, SKY, ORANGE, GREEN, GREY, DARK = "#0072B2", "#56B4E9", "#E69F00", "#009E73", "#BBBBBB", "#333333"
BANDS = {"Encode": "#DCE9F5", "Address": "#FBEBC8"}


def draw_all(folder: Path) -> list[Path]:
    """Draw every figure whose rows `folder/cells.parquet` has; returns the files.

    Raises EncodeAddressError when the table or the verdict cannot be read, or a figure cannot be written.
    """
    table, verdict = read(Path(folder))
    for name in DRAWN:  # an earlier run may have drawn variants that this table lacks
        for stale in Path(folder, "figures").glob(f"{name}-*.p[nd][gf]"):
            stale.unlink()
    return [path for figure in DRAWN.values() for path in figure.draw(table, verdict, Path(folder))]


def draw_paper(folder: Path, tables: gathered.Tables, verdicts: gathered.Verdicts) -> list[Path]:
    """Draw the figures that need several experiments or several models, from `gathered.gathered_models(folder)`; returns the files."""
    paths = models.draw_models(tables, verdicts, folder)
    for name, place in gathered.model_folders(folder).items():
        for figure in (overview, construction, two_readers):
            paths += figure.draw(tables[name], verdicts[name], place)
    return paths


def draw_each(
    name: str, make: Callable[..., Figure | None], table: pd.DataFrame, verdict: dict[str, Any] | None, folder: Path
) -> list[Path]:
    """Write the figure that `make(rows, verdict, variant)` gives for each variant; it gives None where rows are missing."""
    paths: list[Path] = []
    table = shown(table)
    for variant in variants(table):
        with style():
            figure = make(metrics.select(table, variant=variant), verdict_of(verdict, variant), variant)
            if figure is not None:
                paths += write(figure, folder, name, variant)
    return paths


def draw_first(
    name: str, make: Callable[..., Figure | None], table: pd.DataFrame, verdict: dict[str, Any] | None, folder: Path
) -> list[Path]:
    """`draw_each` of the first variant alone."""
    first = variants(shown(table))[:1]
    rows = table[table["variant"].isin(first)] if first else table.iloc[:0]
    return draw_each(name, make, rows, verdict, folder)


def read(folder: Path) -> tuple[pd.DataFrame, dict[str, Any] | None]:
    """The table of a result folder, and its verdict if it has one."""
    cells, verdict = folder / "cells.parquet", folder / "verdict.json"
    if not cells.is_file():
        raise EncodeAddressError(f"no {cells}: give the folder of a finished run")
    try:
        table = pd.read_parquet(cells)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise EncodeAddressError(f"{cells} cannot be read ({_first_line(error)}): run again to rebuild it") from error
    if not verdict.is_file():
        return table, None
    try:
        content = json.loads(verdict.read_text())
    except (OSError, ValueError) as error:
        raise EncodeAddressError(f"{verdict} cannot be read ({_first_line(error)}): run again to rebuild it") from error
    return table, content if isinstance(content, dict) else None


def shown(table: pd.DataFrame) -> pd.DataFrame:
    """The rows that figures show: the confirmation split, or all rows where a table has no splits."""
    return metrics.select(table, split="confirmation") if "split" in table else table


def variants(table: pd.DataFrame) -> list[str]:
    """The variants of the task in the table, in its order."""
    return list(table["variant"].dropna().unique()) if "variant" in table else []


def verdict_of(verdict: dict[str, Any] | None, variant: str) -> dict[str, Any]:
    """The verdict on one variant: its own entries, and the common ones where it has none."""
    common = verdict or {}
    return {**common, **((common.get("variants") or {}).get(variant) or {})}


def reader(verdict: dict[str, Any], rows: pd.DataFrame, index: str) -> tuple[int, int] | None:
    """The reader head (layer, head) to show: the first of the verdict's that was watched in `rows`, else the
    watched head with most attention on the entry that column `index` names; None where none was watched."""
    watched = metrics.heads(rows)
    for layer, head in map(head_of, verdict.get("readers") or []):
        if (layer, head) in watched:
            return layer, head
    return max(watched, key=lambda head: metrics.attention(rows, head, index).mean(), default=None)


def head_of(name: str) -> tuple[int, int]:
    """(7, 1) for "L7H1"."""
    match = re.fullmatch(r"L(\d+)H(\d+)", name)
    if not match:
        raise EncodeAddressError(f"{name!r} is not a head: the verdict's readers are written like L7H1")
    return int(match[1]), int(match[2])


def style() -> AbstractContextManager:
    """The look of every figure, for the time of a `with`; nothing global stays changed, the backend included."""
    return matplotlib.style.context(Path(__file__).parent / "style.mplstyle")


def panels(
    width: float,
    count: int,
    height: float,
    above: float,
    between: float,
    below: float,
    right: float,
    left: float = 0.45,
    sharex: bool = True,
) -> tuple[Figure, list[Any]]:
    """A figure that no window system and no pyplot knows of, with `count` panels in a column.

    All sizes are in inches, so that text, which is of one size, has the room it needs whatever the model.
    """
    total = above + count * height + (count - 1) * between + below
    figure = Figure(figsize=(width, total))
    FigureCanvasAgg(figure)
    axes = figure.subplots(count, 1, sharex=sharex, squeeze=False)[:, 0]
    figure.subplots_adjust(left / width, below / total, 1 - right / width, 1 - above / total, hspace=between / height)
    return figure, list(axes)


def write(figure: Figure, folder: Path, name: str, variant: str) -> list[Path]:
    """Write `figures/<name>-<variant>.png` and `.pdf`. The same table gives the same bytes: no dates inside."""
    paths = []
    for kind, undated in (("png", {}), ("pdf", {"CreationDate": None})):
        path = folder / "figures" / f"{name}-{variant.replace('/', '-')}.{kind}"
        content = io.BytesIO()
        figure.savefig(content, format=kind, metadata=undated)
        write_whole(path, lambda temporary, content=content: temporary.write_bytes(content.getvalue()))
        paths.append(path)
    return paths


def main(draw: Callable[..., list[Path]], load: Callable[[Path], tuple[Any, Any]] = read) -> None:
    """What a figure does when it is run as a script: draw from what `load` reads in the folder that is named, print the files."""
    if len(sys.argv) != 2:
        sys.exit(f"usage: python {sys.argv[0]} RESULTS_DIR")
    folder = Path(sys.argv[1])
    try:
        paths = draw(*load(folder), folder)
    except EncodeAddressError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print("\n".join(map(str, paths)) or f"nothing drawn: {folder} lacks the rows of this figure")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


from encode_address.figures import (  # noqa: E402  they use what is above
    address_payload,
    attention_example,
    circuit,
    construction,
    encode,
    encode_linear,
    gathered,
    gathering,
    minimal,
    models,
    overview,
    pruning,
    query_key,
    removal,
    replacement,
    routes,
    scaling,
    state,
    state_rank,
    steer,
    transfer,
    transplant,
    two_readers,
    upstream,
    writers,
)

DRAWN = {
    "circuit": circuit,
    "attention_example": attention_example,
    "removal": removal,
    "transplant": transplant,
    "query-key": query_key,
    "state": state,
    "encode": encode,
    "pruning": pruning,
    "upstream": upstream,
    "scaling": scaling,
    "steer": steer,
    "encode-linear": encode_linear,
    "minimal": minimal,
    "writers": writers,
    "routes": routes,
    "state-rank": state_rank,
    "gathering": gathering,
    "address-payload": address_payload,
    "transfer": transfer,
    "replacement": replacement,
}
