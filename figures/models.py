"""Several models beside one another: the ranks of their states, what their Addresses guide, what their blocks do in each other.

    python figures/models.py RESULTS_DIR

RESULTS_DIR holds one folder per model. *State rank*: columns are models, rows effective, significant and numerical rank; in each
panel linear layers, by block and its role, against heads, at the dictionary's end of the model's first variant; a cell is the median
over prompts, and every panel has its own scale, since states differ in size. *Scaling*: a row per model; which readers each set of
blocks guides, on its first variant; accuracy without the Address, and answers that the Address' transplant redirects, over all
variants. *Transfer*: (a) rows are donors, columns hosts; the share of hosts that a donor's Address redirects through a linear map, with test keys
that the fit did not ask (left half of a cell), which alone supports a claim, and with keys that it asked (right half); on the diagonal the
host's own outputs, without a map. (b) Accuracy with a donor's block in place of the host's Address, beside the best control, which is named.
Both are of the variant that most pairs of models have; the tables have all. Bars and brackets are 95 % intervals over prompt pairs. A
model without rows of the experiment is left out, and what was not run is an en dash.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from encode_address import figures, metrics
from encode_address.cross import replaced
from encode_address.cross.stand_ins import DONOR, INTACT, LINEAR, REMOVED
from encode_address.cross.transferred import rate, whole
from encode_address.cross.transplants import MAPPED, SAME
from encode_address.experiments.scaling import table as guided_pairs
from encode_address.experiments.state_rank import END, MEASURES
from encode_address.figures import gathered, state_rank
from encode_address.figures.scaling import layout_of
from encode_address.stats import NOTHING, Estimate, estimate
from encode_address.tables.cross import SPLITS, by_donor, compare, stopped_after

WIDTH, LEAST = 7.0, 2  # inches; models, below which there is nothing to compare
# of the state ranks, in inches: models that fit side by side; beside each panel, its layers and its scale
ACROSS, LAYERS, SCALE, SIDE = 4, 0.85, 0.36, 0.12
ABOVE, BELOW, GAP, BETWEEN, TALL = 0.34, 0.28, 0.06, 0.44, 1.34
NAME = 22  # letters of a model's name in one line
# of transfer, in inches: width of donors' names; of a cell, at most; of half a cell that has room for an interval; height of a cell and of what stands
# above the cells; of a bar, between pairs of models; width of a pair's names
NAMES, CELL, SPREAD, ROW, HEAD, BAR, APART, PAIR = 1.3, 1.5, 0.46, 0.36, 0.36, 0.1, 0.14, 1.5
LETTER, WRAP = 0.055, 26  # width of a letter; letters of a line beside the bars
SHADE = 0.75  # of the colour, where the share is 1
BEST = "best control"
ARMS = {INTACT: figures.DARK, DONOR: figures.BLUE, BEST: figures.ORANGE, LINEAR: figures.SKY, REMOVED: figures.GREY}
LINE, TEXT, FOOT = 0.14, 3.0, 0.47  # of scaling: height of a line, the width that names take, room for the axis


def draw_models(tables: gathered.Tables, verdicts: gathered.Verdicts, folder: Path) -> list[Path]:
    """Write `state-rank-models` and `scaling-models`, each if at least two models have its rows, and `transfer-models`, if one is the
    donor of another; returns the files."""
    paths = []
    tables = {model: figures.shown(table) for model, table in tables.items()}
    with figures.style():
        ranks = {model: rows for model, table in tables.items() if len(rows := _states(table))}
        if len(ranks) >= LEAST:
            paths += figures.write(_ranks(ranks), Path(folder), "state-rank", "models")
        lines = {model: line for model, table in tables.items() if (line := _guided(table, verdicts.get(model)))}
        if len(lines) >= LEAST:
            paths += figures.write(_scaling(lines), Path(folder), "scaling", "models")
        if (figure := _transfer(tables)) is not None:
            paths += figures.write(figure, Path(folder), "transfer", "models")
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


# -- transfer ----------------------------------------------------------------------------------------------------------
Pairs = dict[tuple[str, str], pd.DataFrame]  # (donor, host) -> rows


def _transfer(tables: gathered.Tables) -> Figure | None:
    """The matrix of transplants and the bars of replacements; None without a pair of models."""
    moved = _pairs(tables, "transfer", lambda rows: any(len(whole(rows, MAPPED, keys)) for keys in SPLITS))
    stood = _pairs(tables, "replace", lambda rows: compare(rows, _measure(rows)) is not None, role="address")
    if not moved and not stood:
        return None
    names = list(dict.fromkeys([*(name for name in tables if any(name in pair for pair in moved)), *(d for d, _ in moved)]))  # fmt: skip
    wide = min(CELL, (WIDTH - NAMES - SIDE) / max(1, len(names)))
    heads = ["\n".join(textwrap.wrap(_own(name), min(NAME, int(wide / LETTER)))) for name in names]
    above = HEAD + LINE * max((head.count("\n") + 1 for head in heads), default=0)
    groups = [(_about(pair, rows), rows) for pair, rows in stood.items()]
    columns = [some for some in (groups[: -(-len(groups) // 2)], groups[-(-len(groups) // 2) :]) if some]
    deep = max((_deep(column) for column in columns), default=0.0)
    upper, lower = (above + ROW * len(names) + SIDE) * bool(moved), (HEAD + deep + FOOT) * bool(stood)
    height = upper + lower
    figure = Figure(figsize=(WIDTH, height))
    figures.FigureCanvasAgg(figure)
    if moved:
        place = (NAMES, height - above - ROW * len(names), wide * len(names), ROW * len(names))
        axes = figure.add_axes([size / of for size, of in zip(place, (WIDTH, height) * 2)])
        sizes = _matrix(axes, moved, names, heads, wide)
        said = f"(a) redirected by the donor's Address through a map, {_variant(moved)}, n = {sizes} pairs"
        key = "left: keys of fit and test are disjoint; right: shared, which is no evidence of transfer; blue: the host's own outputs"
        for y, text, weight in ((0.06, said, "bold"), (0.06 + LINE, key, "normal")):
            figure.text(0.02, 1 - y / height, text, va="top", size=6.5, weight=weight)
    for i, column in enumerate(columns):
        high = _deep(column)
        place = (i * WIDTH / 2 + PAIR, FOOT + deep - high, WIDTH / 2 - PAIR - 2 * SIDE, high)
        _stand_ins(figure.add_axes([size / of for size, of in zip(place, (WIDTH, height) * 2)]), column)
    if stood:
        said = f"({'b' if moved else 'a'}) accuracy with the donor's block in place of the host's Address, {_variant(stood)}"
        figure.text(0.02, (lower - 0.04) / height, said, va="top", size=6.5, weight="bold")
        handles = [Patch(color=colour, label="donor's block" if arm == DONOR else arm) for arm, colour in ARMS.items()]
        place = (0.02, (lower - 0.04 - LINE) / height)
        figure.legend(handles=handles, loc="upper left", bbox_to_anchor=place, ncols=len(ARMS), borderaxespad=0)
    return figure


def _pairs(tables: gathered.Tables, experiment: str, known: Callable[[pd.DataFrame], bool], **factors: str) -> Pairs:
    """The rows of every pair that has some: of the variant that most pairs have."""
    found: dict[str, Pairs] = {}
    for host, table in tables.items():
        for donor, rows in by_donor(table, experiment):
            for variant in figures.variants(rows):
                own = metrics.select(rows, variant=variant, **factors)
                if len(own) and known(own):
                    found.setdefault(variant, {})[donor, host] = own
    return max(found.values(), key=len, default={})


def _matrix(axes: Any, moved: Pairs, names: Sequence[str], heads: Sequence[str], wide: float) -> str:
    """Donors down, hosts across: of a map the two splits of keys, on the diagonal the host's own outputs. Returns the numbers of pairs."""
    sizes: set[int] = set()
    for (y, donor), (x, host) in product(enumerate(names), repeat=2):
        parts, colour = [NOTHING], figures.GREEN
        if donor == host:
            own = [whole(rows, SAME) for (_, other), rows in moved.items() if other == host]
            parts, colour = [next((rate(some) for some in own if len(some)), NOTHING)], figures.SKY
        elif (donor, host) in moved:
            parts = [rate(whole(moved[donor, host], MAPPED, keys)) for keys in SPLITS]
        share = 1 / len(parts)
        for i, one in enumerate(parts):
            shade = [1 - SHADE * one.value * (1 - part) for part in to_rgb(colour)] if one.n else "white"
            axes.add_patch(Rectangle((x + i * share, y), share, 1, facecolor=shade, edgecolor="white", linewidth=0.5))
            said = f"{one.value:.2f}" if one.n else "–"
            if one.n and wide * share >= SPREAD:
                said += f"\n[{one.low:.2f}, {one.high:.2f}]".replace("0.", ".")
            axes.text(x + (i + 0.5) * share, y + 0.5, said, ha="center", va="center", size=6, linespacing=1.15)
        axes.add_patch(Rectangle((x, y), 1, 1, fill=False, edgecolor=figures.DARK, linewidth=0.6, zorder=3))
        sizes |= {one.n for one in parts if one.n}
    axes.set(xlim=(0, len(names)), ylim=(len(names), 0))
    axes.set_xticks([i + 0.5 for i in range(len(names))], heads)
    axes.set_yticks([i + 0.5 for i in range(len(names))], [_short(name) for name in names])
    axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    axes.spines[:].set_visible(False)
    corner = {"textcoords": "offset points", "ha": "right", "va": "bottom", "size": 6.5, "style": "italic"}
    axes.annotate("donor ↓  host →", (0, 0), (-3, 3), **corner)
    return " to ".join(map(str, sorted({min(sizes), max(sizes)})))


def _about(pair: tuple[str, str], rows: pd.DataFrame) -> str:
    """What stands beside a pair's bars."""
    (donor, host), cut = pair, stopped_after(rows)
    own, note = metrics.select(rows, arm=DONOR).iloc[0], compare(rows, _measure(rows))["note"]
    source, target = (gathered.short(own[side].split("+")) for side in ("source", "block"))
    lines = textwrap.wrap(f"{_own(donor)} {source}", WRAP) + textwrap.wrap(f"→ {_own(host)} {target}", WRAP)
    lines.append(", ".join([f"n = {rows['pair'].nunique()}", *[note.lower()] * bool(note)]))
    return "\n".join(lines + [f"stopped after L{cut}"] * (cut is not None))


def _deep(column: Sequence[tuple[str, pd.DataFrame]]) -> float:
    """The height of a column of groups, in inches."""
    return sum(_tall(label) for label, _ in column)


def _tall(label: str) -> float:
    return max(len(ARMS) * BAR, 0.11 * (label.count("\n") + 1)) + APART


def _stand_ins(axes: Any, groups: Sequence[tuple[str, pd.DataFrame]]) -> None:
    """A group of lying bars per pair of models; the vertical axis is in inches."""
    top = 0.0
    for label, rows in groups:
        measure, middle = _measure(rows), top + _tall(label) / 2
        best = compare(rows, measure)["control"]
        for i, (arm, colour) in enumerate(ARMS.items()):
            one = replaced.rate(rows, best if arm == BEST else arm, measure)
            y = middle + (i + 0.5 - len(ARMS) / 2) * BAR
            if not one.n:
                axes.text(0.01, y, "–", va="center", size=6)
                continue
            ends = [[max(0.0, one.value - one.low)], [max(0.0, one.high - one.value)]]
            axes.barh(y, one.value, 0.86 * BAR, color=colour)
            line = figures.GREY if arm == INTACT else figures.DARK
            axes.errorbar(one.value, y, xerr=ends, fmt="none", ecolor=line, elinewidth=0.6, capsize=1, capthick=0.6)
            if arm == BEST:  # within a long bar, beside a short one
                axes.text(0.02 if one.value > 0.4 else one.high + 0.03, y, best, va="center_baseline", size=6)
        beside = {"textcoords": "offset points", "ha": "right", "va": "center", "size": 6, "linespacing": 1.15}
        axes.annotate(label, (0, middle), (-4, 0), **beside)
        top += _tall(label)
    axes.axvline(0, color=figures.DARK, linewidth=0.6)
    axes.set(xlim=(0, 1.04), ylim=(top, 0), xticks=[0, 0.5, 1], yticks=[], xlabel="accuracy")
    axes.tick_params(axis="x", length=2, pad=2)
    axes.spines["left"].set_visible(False)


def _measure(rows: pd.DataFrame) -> str:
    return replaced.measure_of(stopped_after(rows))


def _variant(pairs: Pairs) -> str:
    return next(iter(pairs.values()))["variant"].iloc[0]


def _own(model: str) -> str:
    """A hub's model without its owner."""
    return model.rsplit("/", 1)[-1]


def _short(model: str) -> str:
    """A hub's model without its owner, in lines of a column's width."""
    return "\n".join(textwrap.wrap(_own(model), NAME))


if __name__ == "__main__":
    figures.main(draw_models, gathered.gathered_models)
