"""Several models beside one another: the ranks of their states, and what their Addresses guide.

    python figures/models.py RESULTS_DIR

RESULTS_DIR holds one folder per model. *State rank*: columns are models, rows effective, significant and numerical rank; in each
panel linear layers, by block and its role, against heads, at the dictionary's end of the model's first variant; a cell is the median
over prompts, and every panel has its own scale, since states differ in size. *Scaling*: a row per model; which readers each set of
blocks guides, on its first variant; accuracy without the Address, and answers that the Address' transplant redirects, over all
variants. Bars have 95 % intervals over prompt pairs. A model without rows of the experiment is left out.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from encode_address import figures, metrics
from encode_address.experiments.scaling import table as guided_pairs
from encode_address.experiments.state_rank import END, MEASURES
from encode_address.figures import gathered, state_rank
from encode_address.figures.scaling import layout_of
from encode_address.stats import NOTHING, Estimate, estimate

WIDTH, LEAST = 7.0, 2  # inches; models, below which there is nothing to compare
# of the state ranks, in inches: models that fit side by side; beside each panel, its layers and its scale
ACROSS, LAYERS, SCALE, SIDE = 4, 0.85, 0.36, 0.12
ABOVE, BELOW, GAP, BETWEEN, TALL = 0.34, 0.28, 0.06, 0.44, 1.34
NAME = 22  # letters of a model's name in one line
LINE, TEXT, FOOT = 0.14, 3.0, 0.47  # of scaling: height of a line, the width that names take, room for the axis


def draw_models(tables: gathered.Tables, verdicts: gathered.Verdicts, folder: Path) -> list[Path]:
    """Write `state-rank-models` and `scaling-models`, each if at least two models have its rows; returns the files."""
    paths = []
    tables = {model: figures.shown(table) for model, table in tables.items()}
    with figures.style():
        ranks = {model: rows for model, table in tables.items() if len(rows := _states(table))}
        if len(ranks) >= LEAST:
            paths += figures.write(_ranks(ranks), Path(folder), "state-rank", "models")
        lines = {model: line for model, table in tables.items() if (line := _guided(table, verdicts.get(model)))}
        if len(lines) >= LEAST:
            paths += figures.write(_scaling(lines), Path(folder), "scaling", "models")
    return paths


# -- state rank --------------------------------------------------------------------------------------------------------
def _states(table: pd.DataFrame) -> pd.DataFrame:
    """The states at the dictionary's end, of the first variant that has them."""
    rows = metrics.select(table, experiment="state-rank", source="task", mark=END)
    rows = metrics.select(rows, variant=next(iter(figures.variants(rows)), None))
    return rows.astype({"layer": int, "head": int}) if len(rows) else rows  # other experiments have neither


def _ranks(ranks: dict[str, pd.DataFrame]) -> Figure:
    models = list(ranks)
    groups = [models[i : i + ACROSS] for i in range(0, len(models), ACROSS)]
    deep = len(MEASURES) * (TALL + GAP) + BETWEEN
    height = ABOVE + len(groups) * deep - BETWEEN + BELOW
    room = (WIDTH - SIDE) / min(len(models), ACROSS)
    across = min(room - LAYERS - SCALE, 2.2)
    figure = Figure(figsize=(WIDTH, height))
    figures.FigureCanvasAgg(figure)
    for g, group in enumerate(groups):
        for c, model in enumerate(group):
            rows = ranks[model]
            layers = sorted(rows["layer"].unique())
            for r, measure in enumerate(MEASURES):
                top = height - ABOVE - g * deep - r * (TALL + GAP)
                place = ((SIDE + c * room + LAYERS) / WIDTH, (top - TALL) / height, across / WIDTH, TALL / height)
                axes = figure.add_axes(place)
                state_rank.heat_maps(figure, [axes], rows, measure, [END], layers, across)
                state_rank.name_blocks([axes], rows, layers, state_rank.roles_of(rows))
                if r < len(MEASURES) - 1:
                    axes.set_xticklabels([])
                if r == 0:
                    axes.set_title(f"{_short(model)}\n(n = {rows['pair'].nunique()})", loc="right", size=6.5, pad=2)
                if c == 0:
                    figure.text(0.02, (top - TALL / 2) / height, state_rank.LABELS[measure], rotation=90, va="center")
    figure.text(0.5, 0.03 / height, f"head, after the {END} (n prompts)", ha="center", va="bottom")
    return figure


# -- scaling -----------------------------------------------------------------------------------------------------------
def _guided(table: pd.DataFrame, verdict: dict[str, Any] | None) -> tuple[list[str], Estimate, Estimate] | None:
    """(what guides which readers, accuracy without the Address, redirected by its transplant); None without rows."""
    rows = metrics.select(table, experiment="scaling")
    names = figures.variants(rows)
    if not names or "layout" not in (verdict or {}):
        return None
    pairs = guided_pairs(metrics.select(rows, variant=names[0]), layout_of(verdict["layout"]))
    removed, moved = [], []
    for variant in names:
        address = "+".join(figures.verdict_of(verdict, variant).get("address") or [])
        lost = {"experiment": "removal", "block": address, "mode": "zero", "position": "all"}
        lent = {"experiment": "scaling", "block": address, "arm": "transplant"}
        own = metrics.select(table, variant=variant)
        drawn = gathered.of_one_draw(own, lost, lent)
        for kept, factors in ((removed, lost), (moved, lent)):
            some = drawn if len(drawn) else gathered.of_one_draw(own, factors)
            kept.append(gathered.once(metrics.select(some, **factors)))
    said = _said(pairs[["block", "reader"]].itertuples(index=False)) or ["no reader is guided"]
    return said, _over(removed, "correct"), _over(moved, "redirected")


def _said(pairs: Any) -> list[str]:
    """Lines like "G2 → L7, L11": blocks that guide the same readers share one."""
    readers: dict[str, dict[str, None]] = {}
    for block, reader in pairs:
        readers.setdefault(block, {})[f"L{figures.head_of(reader)[0]}"] = None
    blocks: dict[str, list[str]] = {}
    for block, layers in readers.items():
        blocks.setdefault(", ".join(layers), []).append(block)
    return [f"{', '.join(names)} → {layers}" for layers, names in blocks.items()]


def _over(parts: Sequence[pd.DataFrame], column: str) -> Estimate:
    """The mean over all variants' pairs: pair 3 of one variant is another pair than pair 3 of the next."""
    rows = pd.concat([part for part in parts if len(part)]) if any(map(len, parts)) else None
    if rows is None or column not in rows:
        return NOTHING
    return estimate(rows[column], rows["variant"] + " " + rows["pair"].astype(int).astype(str))


def _scaling(lines: dict[str, tuple[list[str], Estimate, Estimate]]) -> Figure:
    starts, tall, at = [], [], 0.0  # in lines
    for model, (said, *_) in lines.items():
        starts.append(at)
        tall.append(max(len(said), _short(model).count("\n") + 2))
        at += tall[-1] + 0.4
    high = LINE * at
    figure = Figure(figsize=(WIDTH, 0.3 + high + FOOT))
    figures.FigureCanvasAgg(figure)
    height, across = figure.get_figheight(), (WIDTH - TEXT - 0.35) / 2
    middles = [start + count / 2 for start, count in zip(starts, tall)]
    columns = {"accuracy without\nthe Address": figures.BLUE, "redirected by\nits transplant": figures.GREEN}
    for i, (what, colour) in enumerate(columns.items()):
        axes = figure.add_axes(((TEXT + i * (across + 0.2)) / WIDTH, FOOT / height, across / WIDTH, high / height))
        for y, line in zip(middles, lines.values()):
            value = line[1 + i]
            if not value.n:
                axes.text(0.02, y, "–", va="center")
                continue
            spread = [[max(0.0, value.value - value.low)], [max(0.0, value.high - value.value)]]
            axes.barh(y, value.value, 1.1, color=colour)
            axes.errorbar(
                value.value, y, xerr=spread, fmt="none", ecolor=figures.DARK, elinewidth=0.6, capsize=1.2, capthick=0.6
            )
        axes.axvline(0, color=figures.DARK, linewidth=0.6)
        axes.set(xlim=(-0.02, 1.04), ylim=(at, 0), xticks=[0, 0.5, 1], yticks=[], xlabel=what)
        axes.tick_params(axis="x", length=2, pad=2)
        axes.spines["left"].set_visible(False)
    for middle, (model, (said, removed, moved)) in zip(middles, lines.items()):
        y = 1 - (0.3 + LINE * middle) / height
        counts = " and ".join(dict.fromkeys(str(e.n) for e in (removed, moved) if e.n)) or "–"
        figure.text(0.02, y, f"{_short(model)}\nn = {counts} pairs", va="center", size=6.5)
        figure.text(1.35 / WIDTH, y, "\n".join(said), va="center", size=6.5)
    for x, title in ((0.02, "model"), (1.35 / WIDTH, "blocks → layers of the readers they guide")):
        figure.text(x, 1 - 0.06 / height, title, va="top", size=6.5, weight="bold")
    return figure


def _short(model: str) -> str:
    """A hub's model without its owner, in lines of a column's width."""
    return "\n".join(textwrap.wrap(model.rsplit("/", 1)[-1], NAME))


if __name__ == "__main__":
    figures.main(draw_models, gathered.gathered_models)
