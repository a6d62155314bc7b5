"""State rank: of what rank the recurrent state of each linear head is.

    python figures/state_rank.py RESULTS_DIR

One figure per variant of the task, and one of the text. Rows: effective, significant and numerical rank, each with a colour scale of its
own; columns: after which token the states are read. In each panel linear layers are rows, by block and its role in the circuit, and
heads are columns; a cell is the median over prompts. Grey: a state that is zero for more than half of the prompts, or a head that
the layer lacks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from encode_address import figures, metrics
from encode_address.experiments.state_rank import MEASURES, TASK_MARKS
from encode_address.models.layout import layer_span

LABELS = dict(zip(MEASURES, ("effective", "significant", "numerical")))
MAP = LinearSegmentedColormap.from_list("rank", ["#E3EEF7", figures.BLUE, "#001D33"]).with_extremes(bad=figures.GREY)
# inches; layers of a deep model are drawn thinner, so that three rows fit on a page
LEFT, RIGHT, ABOVE, BELOW, GAP, LAYER, TALLEST = 1.08, 0.42, 0.34, 0.36, 0.09, 0.13, 1.7


def draw(table: pd.DataFrame, verdict: dict[str, Any] | None, folder: Path) -> list[Path]:
    """Write a figure per variant that has rows of `state-rank`, and one of the text's rows; returns the files."""
    paths = figures.draw_each("state-rank", _figure, table, verdict, folder)
    rows = metrics.select(figures.shown(table), experiment="state-rank")
    text = metrics.select(rows, source="text")
    if len(text):
        with figures.style():
            paths += figures.write(_panels(text, roles_of(rows), "text"), folder, "state-rank", "text")
    return paths


def _figure(rows: pd.DataFrame, _view: dict[str, Any], variant: str) -> Figure | None:
    rows = metrics.select(rows, experiment="state-rank", source="task")
    return _panels(rows, roles_of(rows), variant) if len(rows) else None


def roles_of(rows: pd.DataFrame) -> dict[str, str]:
    """The role of each block, where all variants give it the same one."""
    known = rows[["block", "role"]].dropna().drop_duplicates()
    return dict(known.drop_duplicates("block", keep=False).itertuples(index=False))


def _panels(rows: pd.DataFrame, roles: dict[str, str], what: str) -> Figure:
    marks = [mark for mark in TASK_MARKS if mark in set(rows["mark"])] or sorted(rows["mark"].unique(), key=int)
    layers = sorted(rows["layer"].unique())
    height = min(TALLEST, max(0.5, LAYER * len(layers)))
    width = 3.4 if len(marks) <= 3 else 7.0
    total = ABOVE + len(MEASURES) * (height + GAP) - GAP + BELOW
    figure = Figure(figsize=(width, total))
    figures.FigureCanvasAgg(figure)
    grid = figure.subplots(len(MEASURES), len(marks), sharex=True, sharey=True, squeeze=False)
    across = (width - LEFT - RIGHT - GAP * (len(marks) - 1)) / len(marks)
    figure.subplots_adjust(
        LEFT / width, BELOW / total, 1 - RIGHT / width, 1 - ABOVE / total, wspace=GAP / across, hspace=GAP / height
    )
    for measure, line in zip(MEASURES, grid):
        heat_maps(figure, line, rows, measure, marks, layers, across)
        line[0].annotate(
            LABELS[measure], (0, 0.5), (6 - 72 * LEFT, 0), xycoords="axes fraction", textcoords="offset points", rotation=90,
            ha="center", va="center",
        )  # fmt: skip
        name_blocks(line, rows, layers, roles)
    for axes, mark in zip(grid[0], marks):
        axes.set_title(_title(mark), size=6.5, pad=2)
    name = f"{rows['model'].iloc[0]}, " if "model" in rows else ""
    figure.text(
        0.5, 0.03 / total, f"head ({name}{what}, n = {rows['pair'].nunique()} prompts)", ha="center", va="bottom"
    )
    return figure


def heat_maps(
    figure: Figure, line: Any, rows: pd.DataFrame, measure: str, marks: list[str], layers: list[int], across: float
) -> None:
    """The panels of one measure, on one colour scale."""
    medians = rows.groupby(["mark", "layer", "head"])[measure].median()
    heads = range(int(rows["head"].max()) + 1)
    highest = max(medians.max(), 2.0)
    for axes, mark in zip(line, marks):
        values = medians[mark].unstack().reindex(index=layers, columns=heads).to_numpy(float)
        image = axes.imshow(np.where(values > 0, values, np.nan), cmap=MAP, vmin=1, vmax=highest, aspect="auto")
        axes.set_xticks([-0.5, heads[-1] + 0.5], ["0", str(heads[-1])])
        for label, at in zip(axes.get_xticklabels(), ("left", "right")):
            label.set_horizontalalignment(at)  # within the panel: the next one is close
        axes.tick_params(length=0)
        for spine in axes.spines.values():
            spine.set_visible(False)
    place = line[-1].get_position()
    inch = place.width / across
    bar = figure.colorbar(image, cax=figure.add_axes((place.x1 + 0.06 * inch, place.y0, 0.07 * inch, place.height)))
    bar.outline.set_visible(False)
    bar.set_ticks([1, highest], labels=["1", f"{highest:.3g}"])
    for label, at in zip(bar.ax.get_yticklabels(), ("bottom", "top")):
        label.set_verticalalignment(at)  # within the bar's own height: bars of two rows lie close to one another


def name_blocks(line: Any, rows: pd.DataFrame, layers: list[int], roles: dict[str, str]) -> None:
    """Each block's layers and role beside its rows, and a line between blocks."""
    own = rows.drop_duplicates("layer").set_index("layer")["block"]
    runs = {block: [i for i, layer in enumerate(layers) if own[layer] == block] for block in own[layers].unique()}
    for run in list(runs.values())[1:]:
        for axes in line:
            axes.axhline(run[0] - 0.5, color="white", linewidth=1.2)
    said = {
        block: f"{roles.get(block, '')} L{layer_span(tuple(layers[i] for i in run))}" for block, run in runs.items()
    }
    line[0].set_yticks([(run[0] + run[-1]) / 2 for run in runs.values()], list(said.values()), size=6)


def _title(mark: str) -> str:
    if not mark.isdecimal():
        return mark.replace(" ", "\n", 1)
    return f"{int(mark) // 1024}K tokens" if int(mark) >= 1024 else f"{mark} tokens"


if __name__ == "__main__":
    figures.main(draw)
