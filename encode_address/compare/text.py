"""The comparison as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from encode_address.compare.numbers import EXCLUDES, INCLUDES
from encode_address.compare.published import FACTORS, matched, published
from encode_address.models.loading import BUNDLED


def as_text(frame: pd.DataFrame) -> str:
    """What there is to read: per model, whose numbers these are; numbers, shapes and seeds as tables."""
    return "\n\n".join(
        block for model, rows in frame.groupby("model", sort=False) for block in _model_text(model, rows)
    )


def _model_text(model: str, rows: pd.DataFrame) -> Iterator[str]:
    numbers, shapes, seeds = (rows[rows["kind"] == kind] for kind in ("number", "shape", "seeds"))
    table = published()
    names = [name for name in table["model"].unique() if name]
    name = matched(model, names)
    if name is None and model in BUNDLED:
        yield f"{model} is a bundled model and none of the paper's: what is compared are shapes of results, not numbers."
    elif name is None:
        yield f"no published numbers for {model}; published are: {', '.join(names)}. What is compared are shapes of results."
    else:
        tested = numbers["result"].isin((EXCLUDES, INCLUDES)).sum()
        apart = (numbers["result"] == EXCLUDES).sum()
        there, here = (t["experiment"].value_counts() for t in (table[table["model"] == name], numbers))
        more = ", ".join(f"{e} {int(c)}" for e, c in there.sub(here, fill_value=0).items() if c > 0)
        yield (
            f"{model} beside the published numbers of {name} (matched by name): {len(numbers)} numbers, {tested} tested, "
            f"{apart} differ (the 95 % interval of the difference leaves out 0)."
        )
        if len(numbers):
            yield _numbers_text(numbers)
        if more:
            yield f"published, with nothing here to put beside: {more}"
    lines = [["shape of results", "here", "on", "in the paper"]]
    for (says, paper, result), some in shapes.groupby(["condition", "source", "result"], sort=False):
        lines.append([says, result, ", ".join(some["variant"].dropna()), paper])
    yield _aligned(lines)
    yield (
        "\n".join(
            f"  {row['condition']} ({row['variant']}): {row['note']}"
            for _, row in shapes[shapes["note"].notna()].iterrows()
        )
        or "  none of this was run here"
    )
    if len(seeds):
        moved = seeds[seeds["sd"] > 0]
        yield f"rates over seeds of the dictionaries (one model; not seeds of its training): {len(seeds)}, of which {len(seeds) - len(moved)} are the same for every seed"  # fmt: skip
        yield _aligned([["experiment", "variant", "unit", "position", "condition", "measure", "mean", "sd", "n", "seeds"], *([_plain(r[c]) for c in ("experiment", "variant", "unit", "position", "condition", "measure")] + [f"{r['ours']:.3f}", f"{r['sd']:.3f}", f"{r['n']:g}", r["note"]] for _, r in moved.iterrows())])  # fmt: skip


def _numbers_text(numbers: pd.DataFrame) -> str:
    lines = [["experiment", "variant", "unit", "position", "reader", "measure", "condition", "ours", "n", "published", "n", "difference", "result", "source"]]  # fmt: skip
    for _, r in numbers.iterrows():
        between = f" [{r['difference_low']:+.2f}, {r['difference_high']:+.2f}]" if pd.notna(r["difference_low"]) else ""
        lines.append([
            *(_plain(r[c]) for c in FACTORS), f"{r['ours']:.2f} [{r['low']:.2f}, {r['high']:.2f}]", f"{r['n']:g}",
            f"{'' if r['relation'] == '=' else r['relation'] + ' '}{r['published']:g}", "" if pd.isna(r["published_n"]) else f"{r['published_n']:g}",
            "" if pd.isna(r["difference"]) else f"{r['difference']:+.2f}{between}", r["result"], f"{r['source']} ({r['spec_section']})",
        ])  # fmt: skip
    return _aligned(lines)


def _plain(value: Any) -> str:
    return "" if pd.isna(value) else str(value)


def _aligned(lines: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths)).rstrip() for line in lines)
