"""Where the reader looks, on one prompt: intact, Address removed, Address transplanted.

    python figures/attention_example.py RESULTS_DIR

One figure per variant. The host asks one entry of the dictionary, the donor another. The pair is the first that the
intact host answers right and that the transplant redirects; where there is none, the first pair, and the caption
says so. Without an Address block in the verdict there is nothing to show.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from encode_address import figures, metrics


def draw(table: pd.DataFrame, verdict: dict[str, Any] | None, folder: Path) -> list[Path]:
    """Write one figure per variant with an Address block and the rows of its transplant; returns the files."""
    return figures.draw_each("attention_example", _figure, table, verdict, folder)


def _figure(rows: pd.DataFrame, view: dict[str, Any], variant: str):
    address = "+".join(view.get("address") or [])
    intact = metrics.select(rows, experiment="transplant", intervention="none", position="final")
    moved = metrics.select(
        rows, experiment="transplant", intervention="transplant", position="final",
        donor="same-dictionary", block=address,
    )  # fmt: skip
    removed = metrics.select(rows, experiment="example", intervention="remove", block=address)
    head = figures.reader(view, intact, "host_index")
    if intact.empty or moved.empty or head is None:
        return None
    pair, why = _pair(intact, moved)
    shown = {"intact": intact, "Address removed": removed, "Address transplanted": moved}
    # Removal rows of the `removal` experiment have other prompts, so they never stand in for missing example rows.
    one = {title: metrics.select(r, pair=pair) for title, r in shown.items()}
    one = {title: r.iloc[0] for title, r in one.items() if len(r) and head in metrics.heads(r)}
    if not {"intact", "Address transplanted"} <= one.keys():
        return None
    host = one["intact"]
    words = _words(host, len(host[f"attn.L{head[0]}H{head[1]}"]))
    reach = 0.7 * 0.055 * max(map(len, words))  # of the slanted words, down and to the left, in inches
    left = max(0.45, reach - 0.2)
    width = max(3.4, left + 0.35 * len(words))
    figure, panels = figures.panels(width, len(one), 0.5, 0.36, 0.2, below=reach + 0.34, right=0.08, left=left)
    for axes, (title, row) in zip(panels, one.items()):
        _panel(axes, title, row, f"attn.L{head[0]}H{head[1]}", host)
    _entries(panels[-1], words, host)
    middle = (panels[0].get_position().y1 + panels[-1].get_position().y0) / 2
    at = (left - 0.28) / width
    figure.text(at, middle, f"attention of L{head[0]}H{head[1]}", rotation=90, ha="center", va="center", size=7)
    colours = (figures.BLUE, "entry the host asks for"), (figures.GREEN, "entry the donor asks for")
    handles = [panels[0].bar([0], [0], color=colour, label=label) for colour, label in colours]
    figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(left / width, 0.99), ncols=2)
    name = f"{host['model']}, " if "model" in host else ""
    figure.text(0.03, 0.02, f"{name}{variant}, pair {pair}: {why}", size=6, va="bottom", color="#777777")
    return figure


def _pair(intact: pd.DataFrame, moved: pd.DataFrame) -> tuple[Any, str]:
    """The pair to show, and why this one."""
    right, redirected = (set(r["pair"][r[c].eq(True)]) for r, c in ((intact, "kept"), (moved, "redirected")))
    for pair in sorted(right & redirected):
        return pair, "the first that is answered right and then redirected"
    return min(set(intact["pair"]) & set(moved["pair"]), default=None), (
        "the first (none is answered right and then redirected)"
    )


def _words(host: pd.Series, size: int) -> list[str]:
    keys, values = host.get("keys"), host.get("values")
    if not hasattr(keys, "__len__") or not hasattr(values, "__len__"):
        return [f"entry {i}" for i in range(size)]
    return [f"{key} = {value}" for key, value in zip(keys, values)]


def _panel(axes: Any, title: str, row: pd.Series, column: str, host: pd.Series) -> None:
    """Bars of one row's attention, one per entry, and what the model said."""
    colours = [figures.GREY] * len(row[column])
    colours[int(host["host_index"])], colours[int(host["donor_index"])] = figures.BLUE, figures.GREEN
    axes.bar(range(len(colours)), row[column], 0.7, color=colours)
    axes.axhline(0, color="#333333", linewidth=0.6)
    axes.spines["bottom"].set_visible(False)
    axes.set_ylim(0, 1)
    axes.set_yticks([0, 0.5, 1], ["0", "", "1"])
    axes.set_title(title, loc="left", size=6.5, pad=2.5, weight="bold")
    if isinstance(row.get("said"), str):
        # A token may carry its tokenizer's mark of a leading space.
        axes.set_title(f"answers “{row['said'].strip(' Ġ▁')}”", loc="right", size=6.5, pad=2.5)


def _entries(axes: Any, words: list[str], host: pd.Series) -> None:
    """The dictionary's entries under the last panel; the host's and the donor's are emphasised."""
    axes.set_xticks(range(len(words)), words, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_xlim(-0.6, len(words) - 0.4)
    for index, colour in ((host["host_index"], figures.BLUE), (host["donor_index"], figures.GREEN)):
        label = axes.get_xticklabels()[int(index)]
        label.set_color(colour)
        label.set_weight("bold")


if __name__ == "__main__":
    figures.main(draw)
