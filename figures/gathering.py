"""Gathering: where a donor's values can be read, by patch layer and readout layer, and what the answer becomes.

    python figures/gathering.py RESULTS_DIR

Per variant up to four figures, of the rows of `gathering` at the last position.

`gathering-grid`: (a) the mean shift of M for the donor's key, the value that the target's table has for it, and the donor's own value (rows) after a patch of
each sort of site (columns); patch layer p down, readout layer r across; softmax layers are marked. (b) The mixers' shifts again, by kind at p and softmax
layers crossed in (p, r]. `gathering-entry`: (a) z's margin in the unpatched arms by depth; an arm that is not solved is grey and dashed. (b) The probe
of z and its floor. `gathering-depth`: donor minus distractor, its counterpart for the donor's own value, and accuracy, by patch layer; shaded where the
stream's patch leaves accuracy below .5 and does not make the model look up the donor's key. `gathering-calibration`: readout against answer, trial by trial, at the mixer that installs most. Bands are 95 %.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.colors import LinearSegmentedColormap, SymLogNorm
from matplotlib.figure import Figure

from encode_address import figures, metrics
from encode_address.experiments.gathering import MAIN, carrier_said, main_rows, transporters
from encode_address.gathering import behaviour, contrasts, pooling, probe
from encode_address.gathering.rows import CLEAN
from encode_address.gathering.sites import KINDS
from encode_address.stats import estimate
from encode_address.tasks.arms import ARMS

MAP = LinearSegmentedColormap.from_list("shift", [figures.ORANGE, "white", figures.BLUE]).with_extremes(bad="#F2F2F2")
CONCEPTS = {
    "address": "donor's key",
    "redirected": "its value\nin target's table",
    "carried": "its value\nin donor's table",
}
COLOURS = dict(
    zip(
        ("mixer", "residual", "mlp", "query", "state"),
        (figures.BLUE, figures.DARK, figures.ORANGE, figures.GREEN, figures.SKY),
    )
)
MARKS = dict(zip(COLOURS, "os^Dv"))
ARM_COLOURS = dict(zip(ARMS, (figures.SKY, figures.GREEN, figures.BLUE, figures.ORANGE, "#CC79A7")))
LINEAR = 0.1  # nats up to which the colour scale is linear


def draw(table: pd.DataFrame, verdict: dict[str, Any] | None, folder: Path) -> list[Path]:
    """Write the figures of every variant that has rows of `gathering`; returns the files."""
    paths = []
    for name, make in (("grid", _grid), ("entry", _entry), ("depth", _depth), ("calibration", _calibration)):
        paths += figures.draw_each(f"gathering-{name}", make, table, verdict, folder)
    return paths


def _shifts(rows: pd.DataFrame) -> pd.DataFrame:
    return pooling.shifts(main_rows(rows), tuple(CONCEPTS), 2)  # in M, which asks for no vocabulary


def _title(rows: pd.DataFrame, variant: str, n: int) -> str:
    name = f"{rows['model'].iloc[0]}, " if "model" in rows else ""
    return f"{name}{variant}, n = {n}"


def _sheet(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height))
    figures.FigureCanvasAgg(figure)
    return figure


def _letter(axes: Any, letter: str, left: float = -6) -> None:
    axes.annotate(
        f"({letter})",
        (0, 1),
        (left, 4),
        xycoords="axes fraction",
        textcoords="offset points",
        weight="bold",
        ha="right",
    )


# -- the grid --------------------------------------------------------------------------------------
def heat_map(axes: Any, values: pd.DataFrame, depth: int, highest: float, softmax: list[int]) -> Any:
    """A map of means by (patch layer, readout layer), softmax layers marked on both axes; returns the image."""
    table = values.reindex(index=range(depth), columns=range(depth)).to_numpy(float)
    norm = SymLogNorm(LINEAR, vmin=-highest, vmax=highest)
    image = axes.imshow(np.ma.masked_invalid(table), cmap=MAP, norm=norm, aspect="auto")
    for layer in softmax:
        axes.plot([-0.85], [layer], marker="s", markersize=2.2, color=figures.DARK, clip_on=False)
        axes.plot([layer], [depth - 0.15], marker="s", markersize=2.2, color=figures.DARK, clip_on=False)
    ticks = range(0, depth, max(1, depth // 4))
    axes.set_xticks(ticks, ticks)
    axes.set_yticks(ticks, ticks)
    axes.tick_params(length=0, pad=4)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return image


def softmax_layers(rows: pd.DataFrame) -> list[int]:
    """The layers whose mixer is softmax attention, from the rows of their patches."""
    known = rows[rows["site"] == "mixer"]
    return sorted(int(layer) for layer in known.loc[known["mixer"] == "softmax", "layer"].unique())


def _grid(rows: pd.DataFrame, _view: dict[str, Any], variant: str) -> Figure | None:
    own = metrics.select(rows, experiment="gathering", part="grid", arm=MAIN, donor="donor")
    if own.empty:
        return None
    shifts, depth = _shifts(rows), int(own["read"].max()) + 1
    kinds, softmax = [kind for kind in KINDS if kind in set(shifts["site"])], softmax_layers(shifts)
    figure = _sheet(7.0, 4.6)
    grid = figure.add_gridspec(3, len(kinds), left=0.13, right=0.92, top=0.93, bottom=0.42, wspace=0.2, hspace=0.16)
    for i, (concept, said) in enumerate(CONCEPTS.items()):
        means = pooling.cells(shifts, f"dM.{concept}").set_index(["site", "layer", "read"])[f"dM.{concept}"]
        highest = max(1.0, float(means.abs().max()))
        for j, kind in enumerate(kinds):
            axes = figure.add_subplot(grid[i, j])
            image = heat_map(axes, means[kind].unstack(), depth, highest, softmax)
            if i == 0:
                axes.set_title(kind, size=6.5, pad=3)
            if i < 2:
                axes.set_xticklabels([])
            if j:
                axes.set_yticklabels([])
            if i == j == 0:
                _letter(axes, "a", -24)
            if j == 0:
                axes.set_ylabel(f"{said}\npatch layer p", size=6, labelpad=3)
        place = axes.get_position()
        bar = figure.colorbar(image, cax=figure.add_axes((0.935, place.y0, 0.012, place.height)))
        bar.outline.set_visible(False)
        bar.set_ticks([-highest, 0, highest], labels=[f"-{highest:.2g}", "0", f"{highest:.2g}"])
        bar.ax.tick_params(length=0, labelsize=5.5)
        bar.ax.minorticks_off()
    figure.text(
        0.52, 0.365, "readout layer r (squares: softmax layers; colour: shift of M in nats)", ha="center", size=6.5
    )
    lower = figure.add_gridspec(1, 3, left=0.13, right=0.92, top=0.29, bottom=0.1, wspace=0.3)
    for i, concept in enumerate(CONCEPTS):
        axes = figure.add_subplot(lower[0, i])
        _strata(
            axes,
            pooling.strata(metrics.select(shifts, site="mixer"), f"dM.{concept}"),
            CONCEPTS[concept].replace("\n", " "),
        )
        if i == 0:
            axes.set_ylabel("shift of M (nats)")
            _letter(axes, "b", -24)
    figure.text(0.13, 0.975, _title(rows, variant, shifts["pair"].nunique()), size=7)
    return figure


def _strata(axes: Any, table: pd.DataFrame, said: str) -> None:
    for kind, colour, shape, step in (("linear", figures.BLUE, "o", -0.08), ("softmax", figures.ORANGE, "s", 0.08)):
        some = metrics.select(table, mixer=kind)
        bounds = np.abs(np.stack([some["value"] - some["low"], some["high"] - some["value"]]))
        axes.errorbar(
            some["crossed"] + step,
            some["value"],
            bounds,
            color=colour,
            marker=shape,
            markersize=3,
            linestyle="",
            label=kind,
        )
    axes.axhline(0, color=figures.GREY, linewidth=0.6, zorder=0)
    axes.set_xticks(sorted(table["crossed"].unique()))
    axes.set_xlabel("softmax layers in (p, r]")
    axes.set_title(said, size=6.5, pad=3)
    axes.legend(loc="best", title="mixer at p", title_fontsize=6)


# -- entry -----------------------------------------------------------------------------------------
def _entry(rows: pd.DataFrame, _view: dict[str, Any], variant: str) -> Figure | None:
    rows = metrics.select(rows, experiment="gathering")
    clean = metrics.select(rows, part="grid", site=CLEAN, donor="none")
    if clean.empty:
        return None
    wrong, depth = contrasts.invalid_arms(rows), int(clean["read"].max()) + 1
    figure = _sheet(7.0, 2.3)
    grid = figure.add_gridspec(1, 2, left=0.08, right=0.98, top=0.86, bottom=0.19, wspace=0.25, width_ratios=(1.7, 1))
    left, right = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
    band = contrasts.band(depth)
    left.axvspan(band[0] - 0.5, band[-1] + 0.5, color="#F2F2F2", zorder=0)
    for arm in [arm for arm in ARMS if arm in set(clean["arm"])]:
        some = metrics.select(clean, arm=arm)
        found = {int(r): estimate(one["M.own key"], one["pair"]) for r, one in some.groupby("read")}
        colour = figures.GREY if arm in wrong else ARM_COLOURS[arm]
        look = {
            "color": colour,
            "linestyle": "--" if arm in wrong else "-",
            "label": f"{arm} (INVALID)" if arm in wrong else arm,
        }
        left.plot(
            [*found], [e.value for e in found.values()], marker="" if arm in wrong else "o", markersize=2.5, **look
        )
        if arm not in wrong:
            left.fill_between(
                [*found],
                [e.low for e in found.values()],
                [e.high for e in found.values()],
                color=colour,
                alpha=0.2,
                linewidth=0,
            )
    left.axhline(0, color=figures.GREY, linewidth=0.6, zorder=0)
    left.set_xlabel("readout layer (shaded: the band that contrasts average)")
    left.set_ylabel("M of z (nats)")
    left.legend(loc="best", ncol=2)
    _letter(left, "a", -18)
    left.set_title(_title(rows, variant, clean["pair"].nunique()), loc="left", size=7, pad=4)
    _probe(right, metrics.select(rows, part="probe"), wrong)
    _letter(right, "b", -18)
    return figure


def _probe(axes: Any, rows: pd.DataFrame, wrong: dict[str, str]) -> None:
    found = probe.summarise(rows)
    at = range(len(found))
    axes.scatter(at, [one["accuracy"] for one in found.values()], color=figures.BLUE, s=12, label="z")
    axes.scatter(
        at,
        [one["floor"] for one in found.values()],
        color=figures.GREY,
        marker="s",
        s=10,
        label="labels permuted\nby instance",
    )
    axes.set_xticks(at, [f"{arm}\n(INVALID)" if arm in wrong else arm for arm in found], rotation=25, size=6)
    axes.set_ylim(-0.03, 1.05)
    axes.set_ylabel("probe accuracy")
    axes.legend(loc="center right")


# -- depth -----------------------------------------------------------------------------------------
def _depth(rows: pd.DataFrame, _view: dict[str, Any], variant: str) -> Figure | None:
    own = main_rows(rows)
    said = pooling.answers(own) if len(own) else own
    if said.empty:
        return None
    profiles = {
        site: behaviour.depth_profile(metrics.select(said, site=site))
        for site in COLOURS
        if (said["site"] == site).any()
    }
    noise = behaviour.depth_profile(metrics.select(pooling.answers(main_rows(rows, donor="random")), site="residual"))
    where = carrier_said(rows)
    passage = metrics.select(rows, experiment="gathering", arm=MAIN, donor="donor", position=where)
    if len(passage):
        profiles[where] = behaviour.depth_profile(metrics.select(pooling.answers(passage), site="residual"))
    figure, axes = figures.panels(4.6, 3, 1.05, above=0.3, between=0.2, below=0.38, right=1.15, left=0.62)
    residual = profiles.get("residual")
    for panel, (column, label) in zip(
        axes,
        (("transport", "donor - distractor"), ("carry", "donor's own value\n- distractor"), ("accuracy", "accuracy")),
    ):
        for layer in residual.loc[residual["destroyed"], "layer"] if residual is not None else ():
            panel.axvspan(layer - 0.5, layer + 0.5, color="#F2F2F2", zorder=0)
        for site, table in profiles.items():
            colour = COLOURS.get(site, "#CC79A7")
            name = f"stream at {site}" if site == where else site
            _line(panel, table, column, colour, MARKS.get(site, "x"), name, "--" if site == where else "-")
        _line(panel, noise, column, figures.GREY, "", "random, stream", ":")
        panel.axhline(0, color=figures.GREY, linewidth=0.6, zorder=0)
        panel.set_ylabel(label)
        panel.set_ylim(-0.25 if column != "accuracy" else -0.05, 1.08)
    axes[-1].set_xlabel("patch layer (shaded: accuracy below .5 and no lookup of the donor's key)")
    axes[0].legend(loc="upper left", bbox_to_anchor=(1.02, 1.0))
    axes[0].set_title(_title(rows, variant, said["pair"].nunique()), loc="left", size=7)
    for panel, letter in zip(axes, "abc"):
        _letter(panel, letter, -30)
    return figure


def _line(axes: Any, table: pd.DataFrame, column: str, colour: str, mark: str, name: str, style: str) -> None:
    known = [(r.layer, getattr(r, column)) for r in table.itertuples() if getattr(r, column).n]
    if not known:
        return
    layers, found = zip(*known)
    # Sites that not every layer has are no curve.
    style = "" if len(layers) > 1 and max(b - a for a, b in pairwise(layers)) > 1 else style
    axes.plot(layers, [e.value for e in found], color=colour, marker=mark, markersize=2.8, linestyle=style, label=name)
    if style:
        axes.fill_between(
            layers, [e.low for e in found], [e.high for e in found], color=colour, alpha=0.12, linewidth=0
        )
    else:
        axes.vlines(layers, [e.low for e in found], [e.high for e in found], color=colour, linewidth=0.8)


# -- calibration -----------------------------------------------------------------------------------
def _calibration(rows: pd.DataFrame, _view: dict[str, Any], variant: str) -> Figure | None:
    own = main_rows(rows)
    said = pooling.answers(own) if len(own) else own
    if said.empty:
        return None
    best = transporters(said, pooling.answers(main_rows(rows, donor="random")))
    if not best:
        return None
    peak, shifts = max(best, key=lambda p: best[p][1].value), _shifts(rows)
    table, trials = behaviour.calibration(shifts, said, peak, "redirected", int(shifts["read"].max()) + 1)
    if table.empty:
        return None
    figure = _sheet(3.4, 2.9)
    axes = figure.add_axes((0.15, 0.34, 0.8, 0.58))
    for r in table.itertuples():
        some = metrics.select(trials, site=r.site)
        ratio = (
            f"ratio {r.ratio.value:.1f} [{r.ratio.low:.1f}, {r.ratio.high:.1f}]"
            if r.ratio.n
            else "no ratio: readout not moved"
        )
        axes.scatter(some["readout"], some["answer"], s=7, alpha=0.7, linewidth=0, color=COLOURS.get(r.site, figures.GREY),
                     marker=MARKS.get(r.site, "x"), label=f"{r.site}: {ratio}")  # fmt: skip
    axes.axhline(0, color=figures.GREY, linewidth=0.6, zorder=0)
    axes.axvline(0, color=figures.GREY, linewidth=0.6, zorder=0)
    axes.set_xlabel(f"shift of M of the looked-up value, layers after L{peak} (nats)")
    axes.set_ylabel("shift of the answer's margin")
    axes.legend(loc="upper left", bbox_to_anchor=(-0.1, -0.22), fontsize=6)
    axes.set_title(f"{_title(rows, variant, trials['pair'].nunique())}, patches at L{peak}", loc="left", size=7)
    return figure


if __name__ == "__main__":
    figures.main(draw)
