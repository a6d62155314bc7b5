"""Overview: the circuit on one prompt, and what removing and transplanting the Address do.

    python figures/overview.py RESULTS_DIR

One figure per model, of the table's first variant. (a) Positions of a prompt from left to right, layers from the bottom up: linear
blocks light, softmax layers dark; Encode at the tokens of the dictionary's entries, the Address at the last token, from there to the
readers, and from them to the asked entry. Blocks, layers and heads are the verdict's; the words are those of one host. (b) Attention
of the reader and answers: intact and without the Address, on the asked entry and correct; host and host with the donor's Address,
on the donor's entry and redirected. (c) Where `transfer` was run, the share redirected by the host's own Address, and by each other
model's through a map and through one of shuffled pairs. Bars have 95 %
intervals over prompt pairs. Without an Address in the verdict nothing is claimed, and nothing drawn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from encode_address import figures, metrics
from encode_address.cross.transferred import rate, whole
from encode_address.cross.transplants import HOST, MAPPED, SAME, SHUFFLED
from encode_address.figures import gathered
from encode_address.figures.bars import Series, Slot, draw_bars
from encode_address.stats import NOTHING, Estimate, estimate

EDGES = {"Encode": figures.BLUE, "Address": figures.ORANGE}
LINEAR, SOFTMAX = "#F1F1F1", "#C4C4C4"
WIDTH, ABOVE, HIGH, BELOW, LETTER = 7.0, 0.36, 2.05, 0.86, 0.055  # inches; the last is a letter's width
PLACES = {False: [(0.72, 3.3), (5.02, 1.88)], True: [(0.72, 2.1), (3.7, 1.7), (6.17, 0.75)]}  # left and width of panels
STEEP = 4  # bars of maps, above which their labels stand upright
QUESTION, LAST = 3.6, 1.6  # widths of these spans, in entries


def draw(table: pd.DataFrame, verdict: dict[str, Any] | None, folder: Path) -> list[Path]:
    """Write the figure of the first variant; [] without an Address, a layout, or the rows of the Address' transplant."""
    return figures.draw_first("overview", _figure, table, verdict, folder)


def _figure(rows: pd.DataFrame, view: dict[str, Any], variant: str) -> Figure | None:
    address = "+".join(view.get("address") or [])
    intact, host = {"experiment": "baseline"}, {"experiment": "transplant", "intervention": "none", "position": "final"}
    removed = {"experiment": "removal", "intervention": "remove", "block": address, "mode": "zero", "position": "all"}
    moved = {**host, "intervention": "transplant", "block": address, "donor": "same-dictionary"}
    swaps, questions = gathered.of_one_draw(rows, intact, removed), gathered.of_one_draw(rows, host, moved)
    hosts = metrics.select(questions, **host)
    head = figures.reader(view, hosts, "host_index") if len(hosts) else None
    if not address or not (view.get("layout") or {}).get("blocks") or head is None:
        return None
    maps = _maps(metrics.select(rows, experiment="transfer"))
    below = max([BELOW, *(0.1 + LETTER * len(name) for name, _ in maps)])
    figure = Figure(figsize=(WIDTH, ABOVE + HIGH + below))
    figures.FigureCanvasAgg(figure)
    panels = [
        figure.add_axes((left / WIDTH, below / figure.get_figheight(), width / WIDTH, HIGH / figure.get_figheight()))
        for left, width in PLACES[bool(maps)]
    ]
    _circuit(panels[0], view, hosts, head)
    asked = [metrics.select(swaps, **factors) for factors in (intact, removed)]
    asked = [some[some["form"] == "clean"] if "form" in some else some for some in asked], asked
    lent = [hosts, metrics.select(questions, **moved)]
    attended = [_attention(some, head, "target") for some in asked[0]]
    attended += [_attention(some, head, "donor_index") for some in lent]
    _verbs(panels[1], gathered.short(view["address"]), head, attended, [_share(some, "correct") for some in asked[1]],
           [_share(some, "redirected") for some in lent])  # fmt: skip
    if maps:
        _transfer(panels[2], maps)
    counts = dict.fromkeys(str(some["pair"].nunique()) for some in (asked[0][0], hosts) if len(some))
    name = f"{rows['model'].iloc[0]}, " if "model" in rows else ""
    figure.text(0.06 / WIDTH, 0.02, f"{name}{variant}, n = {' and '.join(counts)} pairs", va="bottom")
    for axes, letter in zip(panels, "abc"):
        axes.annotate(
            f"({letter})", (0, 1), (-16, 12), xycoords="axes fraction", textcoords="offset points", weight="bold"
        )
    return figure


# -- (a) the circuit on one prompt -----------------------------------------------------------------------------------
def _circuit(axes: Any, view: dict[str, Any], hosts: pd.DataFrame, head: tuple[int, int]) -> None:
    """Positions and layers, with what the verdict names; `hosts` give the words and the entry that is asked."""
    column = f"attn.L{head[0]}H{head[1]}"
    hosts = hosts[hosts[column].notna()]
    right = hosts[hosts["kept"].eq(True)] if "kept" in hosts else hosts
    host = (right if len(right) else hosts).iloc[0]
    entries, asked = len(host[column]), int(host["host_index"])
    layout, end = view["layout"], entries + QUESTION + LAST / 2 - 0.5
    blocks = {block["name"]: (min(block["layers"]), max(block["layers"]) + 1) for block in layout["blocks"]}
    softmax = layout.get("softmax") or [b["reader"] for b in layout["blocks"] if b.get("reader") is not None]
    top = max([*(high for _, high in blocks.values()), *(layer + 1 for layer in softmax)])
    for low, high in blocks.values():
        axes.add_patch(Rectangle((-0.5, low), entries + QUESTION + LAST, high - low, color=LINEAR, linewidth=0))
    for layer in softmax:
        axes.add_patch(Rectangle((-0.5, layer + 0.1), entries + QUESTION + LAST, 0.8, color=SOFTMAX, linewidth=0))
    roles = {name: role for role in EDGES for name in view.get(role.lower()) or [] if name in blocks}
    for name, role in roles.items():
        low, high = blocks[name]
        for x, width in ((i, 0.8) for i in range(entries)) if role == "Encode" else [(end, LAST - 0.3)]:
            axes.add_patch(
                Rectangle((x - width / 2, low + 0.06), width, high - low - 0.12, facecolor=figures.BANDS[role],
                          edgecolor=EDGES[role], linewidth=0.8, zorder=2)
            )  # fmt: skip
    _arrows(axes, view, blocks, roles, asked, end)
    axes.set_xlim(-0.5, entries + QUESTION + LAST - 0.5)
    axes.set_ylim(-0.01 * top, 1.01 * top)
    axes.set_yticks([sum(span) / 2 for span in blocks.values()], [f"{roles.get(n, '')} {n}".strip() for n in blocks])
    for label, name in zip(axes.get_yticklabels(), blocks):
        label.set_weight("bold" if name in roles else "normal")
    for edge in (entries - 0.5, entries + QUESTION - 0.5):
        axes.axvline(edge, color="white", linewidth=1.5, zorder=1)
    _names(axes, host, entries, asked, end)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    handles = [
        Rectangle((0, 0), 1, 1, color=c, label=s) for c, s in ((LINEAR, "linear layers"), (SOFTMAX, "softmax layer"))
    ]
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1.02), ncols=2)


def _arrows(
    axes: Any, view: dict[str, Any], blocks: dict[str, tuple[int, int]], roles: dict[str, str], asked: int, end: float
) -> None:
    """From the Address to each reader's layer, from there to the asked entry, which holds what Encode wrote."""
    heads: dict[int, list[str]] = {}
    for name in view.get("readers") or []:
        heads.setdefault(figures.head_of(name)[0], []).append(name)
    tops = {role: [blocks[name][1] for name, own in roles.items() if own == role] for role in EDGES}
    for i, (layer, names) in enumerate(sorted(heads.items())):
        x, y = end + 0.3 * (i - (len(heads) - 1) / 2), layer + 0.5
        start = max((high for high in tops["Address"] if high <= layer), default=None)
        if start is not None:
            _arrow(axes, (x, start - 0.06), (x, y), figures.ORANGE)
        _arrow(axes, (x, y), (asked, y), figures.DARK)
        axes.plot([x], [y], "o", color=figures.DARK, markersize=3, zorder=5)
        more = f" +{len(names) - 1}" if len(names) > 1 else ""
        axes.annotate(
            f"{names[0]}{more}", (1, y), (2, 0), xycoords=axes.get_yaxis_transform(), textcoords="offset points",
            va="center", size=6.5, annotation_clip=False,
        )  # fmt: skip
    if heads and tops["Encode"]:
        axes.plot(
            [asked, asked], [max(tops["Encode"]), max(heads) + 0.5], ":", color=figures.BLUE, linewidth=1, zorder=3
        )


def _arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=6, color=colour, linewidth=1, shrinkA=0, shrinkB=1.5, zorder=4)
    )  # fmt: skip


def _names(axes: Any, host: pd.Series, entries: int, asked: int, end: float) -> None:
    """Under the panel, the entries, slanted, and the other spans; above it, what the host answers."""
    keys, values = host.get("keys"), host.get("values")
    known = all(hasattr(words, "__len__") and len(words) == entries for words in (keys, values))
    words = [f"{k} = {v}" for k, v in zip(keys, values)] if known else [f"entry {i}" for i in range(entries)]
    axes.set_xticks(range(entries), words, rotation=45, ha="right", rotation_mode="anchor", size=6)
    axes.get_xticklabels()[asked].set(color=figures.BLUE, weight="bold")
    said = f"question:\n{keys[asked]}?" if known else f"question:\nentry {asked}?"
    for x, text in ((entries + QUESTION / 2 - 0.5, said), (end, "last\ntoken")):
        axes.annotate(
            text, (x, 0), (0, -3), xycoords=axes.get_xaxis_transform(), textcoords="offset points", ha="center", va="top",
            size=6.5,
        )  # fmt: skip
    if isinstance(host.get("said"), str):
        axes.annotate(
            f"“{host['said'].strip(' Ġ▁')}”", (end, 1), (0, 3), xycoords=axes.get_xaxis_transform(), textcoords="offset points",
            ha="center", va="bottom", size=6.5,
        )  # fmt: skip


# -- (b) remove and transplant, (c) maps -------------------------------------------------------------------------------
def _verbs(
    axes: Any,
    address: str,
    head: tuple[int, int],
    attended: list[Estimate],
    right: list[Estimate],
    moved: list[Estimate],
) -> None:
    names = ("intact", f"without\n{address}", "host", f"donor's\n{address}")
    slots = [Slot(name, x, 0, (name, "")) for name, x in zip(names, (0, 1, 2.3, 3.3))]
    series = [
        Series("correct", figures.BLUE, [*right, NOTHING, NOTHING]),
        Series("attention", figures.ORANGE, attended),
        Series("redirected", figures.GREEN, [NOTHING, NOTHING, *moved]),
    ]
    draw_bars(axes, slots, series, f"attention of L{head[0]}H{head[1]}, share of answers", legend_at=12)
    for x, what in ((0.5, "remove:\nasked entry"), (2.8, "transplant:\ndonor's entry")):
        axes.annotate(
            what, (x, 0), (0, -22), xycoords=axes.get_xaxis_transform(), textcoords="offset points", ha="center", va="top",
            size=6.5,
        )  # fmt: skip


def _maps(rows: pd.DataFrame) -> list[tuple[str, Estimate]]:
    """What redirects: nothing, the host's own Address, and each other model's through a map and through a shuffled one."""
    out: list[tuple[str, Estimate]] = []
    for donor, some in rows.groupby("donor_model", sort=False) if "donor_model" in rows else ():
        first = [] if out else [(name, rate(whole(some, name))) for name in (HOST, SAME)]
        mapped = (donor.rsplit("/", 1)[-1], rate(whole(some, MAPPED)))
        out += [*first, mapped, (f"{SHUFFLED} map", rate(whole(some, SHUFFLED)))] if mapped[1].n else []
    return out


def _transfer(axes: Any, maps: list[tuple[str, Estimate]]) -> None:
    slots = [Slot(name, i, 0, (name, "")) for i, (name, _) in enumerate(maps)]
    shares = [share for _, share in maps]
    counts = dict.fromkeys(str(share.n) for share in shares if share.n)
    label = f"redirected (n = {' and '.join(counts)} pairs)"
    draw_bars(axes, slots, [Series("redirected", figures.GREEN, shares)], label, legend_at=12)
    axes.get_legend().remove()
    for label in axes.get_xticklabels():
        label.set(rotation=45 if len(maps) <= STEEP else 90, ha="right", rotation_mode="anchor", size=6)
        label.set_va("top" if len(maps) <= STEEP else "center")


def _attention(rows: pd.DataFrame, head: tuple[int, int], index: str) -> Estimate:
    if rows.empty or head not in metrics.heads(rows):
        return NOTHING
    rows = gathered.once(rows, head)
    return estimate(metrics.attention(rows, head, index), rows["pair"])


def _share(rows: pd.DataFrame, column: str) -> Estimate:
    rows = gathered.once(rows) if len(rows) else rows
    return estimate(rows[column], rows["pair"]) if len(rows) else NOTHING


if __name__ == "__main__":
    figures.main(draw, gathered.gathered)
