"""Writers: whose outputs bring the binding back, whether readers take it as V, K or Q, and which later mixers it needs.

    python figures/writers.py RESULTS_DIR

One figure per variant; all values are recoveries, means over prompt pairs: 0 as in the corrupted run, 1 as in the clean one. (a) Outputs
(rows: where; T is the last token) and states (rows: after, or before, what) of each unit (columns) := the clean prompt's; the writer is framed. (b) A way of the
writer's patch opened alone, per later softmax layer and in all; (c) blocked under the patch; the dashed line is the patch itself. (d) A
later mixer held at the corrupted prompt's outputs, under the patch and in the clean run. (e) Controls. Bars have 95 % intervals.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from encode_address import figures, metrics
from encode_address.experiments.writers import (
    ALL_READERS,
    ALL_STATES,
    PLACES,
    SCREENS,
    STATES,
    WAYS,
    recovered,
    screen_figures,
    way_figures,
    writer_of,
)
from encode_address.figures.bars import Series, Slot, draw_bars
from encode_address.stats import NOTHING, Estimate

COLOURS = dict(zip(WAYS, (figures.BLUE, figures.ORANGE, figures.GREEN, figures.SKY, "#F0D9A8")))
MAP = LinearSegmentedColormap.from_list("recovery", [figures.ORANGE, "white", figures.BLUE])
OUTPUTS = {"value and delimiter": "both", "final": "T"}
AFTER = {
    ("final", "recurrent"): "recurrent, before T", ("final", "both"): "state before T",
}  # fmt: skip
CONTROLS = {
    "patch": "patch", "exchanged": "both\nvalues", "reverse": "reversed", "identity": "own\noutputs",
    "elsewhere": "another\nentry", "distractor": "other\nvalue",
}  # fmt: skip
SHORT = {"embed": "emb", ALL_STATES: "all"}
ROW = 0.16


def draw(table: pd.DataFrame, verdict: dict[str, Any] | None, folder: Path) -> list[Path]:
    """Write one figure per variant that has rows of `writers`; returns the files."""
    return figures.draw_each("writers", _figure, table, verdict, folder)


def _figure(rows: pd.DataFrame, _view: dict[str, Any], variant: str) -> Figure | None:
    rows = metrics.select(rows, experiment="writers")
    if rows.empty:
        return None
    units, found = _units(rows), writer_of(rows)
    screen = screen_figures(rows, *found) if found else {}
    ways = way_figures(rows, *found) if found else {}
    parts = [bool(ways and ways["open"]), bool(ways and ways["open"]), bool(screen), bool(found)]
    width = min(7.0, max(4.6, 1.9 + 0.28 * len(units), 1.0 + 0.26 * len(screen)))
    count = 1 + sum(parts)
    grid = ROW * (len(PLACES) + len(STATES))
    figure, axes = figures.panels(width, count, 0.95, above=0.3 + grid - 0.95, between=0.62, below=0.42, right=0.2, left=0.55, sharex=False)  # fmt: skip
    _taller(axes[0], grid, left=1.35)
    _matrix(axes[0], rows, units, found)
    name = f"{rows['model'].iloc[0]}, " if "model" in rows else ""
    axes[0].set_title(f"{name}{variant}, n = {rows['pair'].nunique()} pairs", loc="left", fontsize=7)
    rest = iter(axes[1:])
    if parts[0]:
        own = recovered(rows, *found).value
        for arm, label in (("open", "opened alone"), ("block", "blocked")):
            _ways(panel := next(rest), ways[arm], label, own)
            panel.set_xlabel("softmax layer", labelpad=1)
    if parts[2]:
        slots = [Slot(layer, i, i, (layer, "")) for i, layer in enumerate(_thinned(screen, width))]
        bars = zip(SCREENS, ("under the patch", "in the clean run"), (figures.BLUE, figures.GREY))
        draw_bars(next(rest), slots, [Series(said, colour, [e[arm] for e in screen.values()]) for arm, said, colour in bars], "mixer held", 1)  # fmt: skip
    if parts[3]:
        _controls(next(rest), rows, found)
    for panel, letter in zip(axes, "abcde"):
        panel.annotate(
            f"({letter})", (0, 1), (-6, 4), xycoords="axes fraction", textcoords="offset points", weight="bold", ha="right"
        )  # fmt: skip
    return figure


def _units(rows: pd.DataFrame) -> list[str]:
    """The embeddings, every block after its layers, and all linear layers."""
    known = metrics.select(rows, arm="patch")[["block", "layers"]].drop_duplicates("block")
    last = {
        block: (int(layers.split("-")[-1]), block[0] == "G") for block, layers in known.to_numpy() if block != "embed"
    }
    return ["embed", *sorted(last, key=last.get), ALL_STATES]


def _matrix(axes: Any, rows: pd.DataFrame, units: list[str], found: tuple[str, str] | None) -> None:
    outputs = [[recovered(rows, unit, place).value for unit in units] for place in PLACES]
    states = [[recovered(rows, unit, place, "state", site=mode).value for unit in units] for place, mode in STATES]
    values = np.ma.masked_invalid(np.array(outputs + states, dtype=float))
    axes.imshow(values, cmap=MAP, vmin=-1, vmax=1, aspect="auto")
    for (y, x), value in np.ndenumerate(values.filled(np.nan)):
        if np.isfinite(value) and len(units) <= 16:
            axes.text(x, y, f"{value + 0.0:.2f}".replace("-0.00", "0.00"), ha="center", va="center", size=5.5, color="white" if value > 0.6 else figures.DARK)  # fmt: skip
    if found:
        x, y = units.index(found[0]), PLACES.index(found[1])
        axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, edgecolor=figures.DARK, linewidth=1.2, clip_on=False, zorder=3))  # fmt: skip
    axes.axhline(len(PLACES) - 0.5, color=figures.DARK, linewidth=0.6)
    labels = [f"output, {OUTPUTS.get(place, place)}" for place in PLACES]
    labels += [AFTER.get(state, f"state after {state[0]}") for state in STATES]
    axes.set_yticks(range(len(labels)), labels)
    width = axes.figure.get_size_inches()[0]
    axes.set_xticks(range(len(units)), _thinned([SHORT.get(unit, unit) for unit in units], width - 1.9))
    axes.tick_params(length=0, labelsize=6, rotation=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _ways(axes: Any, by_reader: dict[str, dict[str, Estimate]], label: str, own: float) -> None:
    readers = [r for r, some in by_reader.items() if "V" in some]
    gap = [0.3 * (r == ALL_READERS) for r in readers]
    slots = [Slot(r, i + more, i, (r, "")) for (i, r), more in zip(enumerate(readers), gap)]
    series = [Series(way, COLOURS[way], [by_reader[r].get(way, NOTHING) for r in readers]) for way in WAYS]
    draw_bars(axes, slots, series, label, 1)
    axes.axhline(own, color=figures.DARK, linestyle=(0, (3, 3)), linewidth=0.8, zorder=1.5)


def _controls(axes: Any, rows: pd.DataFrame, found: tuple[str, str]) -> None:
    values = {said: recovered(rows, *found, arm) for arm, said in CONTROLS.items()}
    values["V at\nanother"] = recovered(rows, *found, "open", site="V elsewhere", reader=ALL_READERS)
    known = {said: value for said, value in values.items() if value.n}
    slots = [Slot(said, i, i, (said, "")) for i, said in enumerate(known)]
    draw_bars(axes, slots, [Series(f"{found[0]} at the {found[1]}", figures.BLUE, [*known.values()])], "controls", 1)


def _thinned(names: Any, width: float) -> list[str]:
    """Names of which every second, third, … stays, so that they do not touch."""
    step = max(1, math.ceil(len(names) * 0.19 / width))
    return [name if i % step == 0 else "" for i, name in enumerate(names)]


def _taller(axes: Any, height: float, left: float) -> None:
    """The first panel with its own height and left margin, in inches; the others keep theirs."""
    width, total = axes.figure.get_size_inches()
    box = axes.get_position()
    axes.set_position((left / width, box.y0, box.x1 - left / width, height / total))


if __name__ == "__main__":
    figures.main(draw)
