"""Figures of several experiments or models: the numbers of the tables, what is left out, and no label on another."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import matplotlib.colors
import matplotlib.image
import pandas as pd
import pytest
from matplotlib.text import Text

from encode_address import figures
from encode_address.errors import EncodeAddressError
from encode_address.figures import construction, gathered, models, overview, two_readers
from tests.paper_tables import (
    DEEP,
    ENTRIES,
    GRANITE,
    PAIRS,
    TINY,
    VERDICTS,
    Made,
    both,
    full,
    lending,
    readers_apart,
    single_blocks,
)


def heights(axes, colour: str, lying: bool = False) -> list[float]:
    """Values of the bars of one colour, without those of length zero that legends are made from."""
    return [
        round(float(bar.get_width() if lying else bar.get_height()), 3)
        for bars in axes.containers
        if hasattr(bars, "patches")
        for bar in bars.patches
        if matplotlib.colors.to_hex(bar.get_facecolor()).upper() == colour
    ]


def drawn(make, *args):
    with figures.style():
        return make(*args)


def texts(figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text)]


@pytest.fixture
def caught(monkeypatch) -> list:
    """The figures that are handed to `figures.write`; files, which take longer, are made where scripts run."""
    made = []

    def write(figure, folder: Path, name: str, variant: str) -> list[Path]:
        made.append(figure)
        return [folder / f"{name}-{variant}.{kind}" for kind in ("png", "pdf")]

    monkeypatch.setattr(figures, "write", write)
    return made


# -- what is gathered ------------------------------------------------------------------------------------------------
def store(folder: Path, table: pd.DataFrame, n: int, verdict: dict | None = None) -> None:
    folder.mkdir(parents=True)
    table.to_parquet(folder / "cells.parquet")
    (folder / "manifest.json").write_text(json.dumps({"command": {"n": n, "seed": 0, "pool": "A"}}))
    if verdict:
        (folder / "verdict.json").write_text(json.dumps(verdict))


def rows(keys: str, **columns) -> pd.DataFrame:
    return pd.DataFrame({"key": list(keys), "pair": range(len(keys)), "split": "confirmation", **columns})


def test_a_models_tables_become_one_with_finds_first_and_its_verdict(tmp_path):
    other = rows("xy", experiment="transplant").assign(split="discovery")
    store(tmp_path / "m", both(rows("abc", experiment="transplant"), other), 3, {"address": ["G2"]})
    store(tmp_path / "m" / "a-first", rows("cd", experiment="state"), 3, {"address": ["not find's"]})
    store(tmp_path / "m" / "quick", rows("ce", experiment="state").drop(columns="split"), 2)
    (tmp_path / "m" / "figures").mkdir()
    table, verdict = gathered.gathered(tmp_path / "m")
    assert table["key"].tolist() == ["a", "b", "c", "d", "c", "e"], "c is there once per draw, discovery is left out"
    assert verdict == {"address": ["G2"]}
    assert len(figures.shown(table)) == 6
    some = gathered.of_one_draw(table, {"experiment": "state", "key": "e"})
    assert some["key"].tolist() == ["c", "e"], "pairs of another draw are other pairs"
    assert gathered.of_one_draw(table, {"key": "a"}, {"key": "e"}).empty


def test_without_finds_table_the_experiments_stand_and_without_any_it_is_an_error(tmp_path):
    store(tmp_path / "m" / "state", rows("ab", experiment="state"), 2, {"address": ["G2"]})
    table, verdict = gathered.gathered(tmp_path / "m")
    assert (len(table), verdict) == (2, None)
    for call, folder in (
        (gathered.gathered, tmp_path / "m" / "state" / "none"),
        (gathered.gathered_models, tmp_path / "m" / "state"),
    ):
        with pytest.raises(EncodeAddressError, match="give the"):
            call(folder)
    (tmp_path / "m" / "state" / "manifest.json").write_text("{")
    with pytest.raises(EncodeAddressError, match=r"manifest\.json cannot be read"):
        gathered.gathered(tmp_path / "m")


def test_models_are_named_by_their_rows(tmp_path):
    store(tmp_path / "one", rows("ab", model="org/one"), 2, {"address": ["G1"]})
    store(tmp_path / "two" / "state", rows("ab"), 2)
    (tmp_path / "else").mkdir()
    tables, verdicts = gathered.gathered_models(tmp_path)
    assert list(tables) == ["org/one", "two"]
    assert verdicts == {"org/one": {"address": ["G1"]}, "two": None}


def test_what_a_donor_answers_by_itself_is_not_the_hosts(tmp_path):
    lent = both(
        rows("pq", experiment="transfer", condition="donor", model="other"),
        rows("ab", experiment="transfer", model="m"),
    )
    store(tmp_path / "m" / "transfer-other", lent, 2, {"model": "m", "experiment": "transfer"})
    tables, _ = gathered.gathered_models(tmp_path)
    assert list(tables) == ["m"]
    assert tables["m"]["key"].tolist() == ["a", "b"]


def test_two_donors_are_two_draws(tmp_path):
    for donor in ("x", "y"):
        place = tmp_path / "m" / f"replace-{donor}"
        store(place, rows("ab", experiment="replace", donor_model=donor), 2)
        (place / "manifest.json").write_text(json.dumps({"command": {"n": 2, "seed": 0, "pool": "A", "donor": donor}}))
    table, _ = gathered.gathered(tmp_path / "m")
    assert table["donor_model"].tolist() == ["x", "x", "y", "y"]
    assert len(table["drawn"].unique()) == 2
    some = gathered.of_one_draw(table, {"experiment": "replace", "donor_model": "y"})
    assert set(some["donor_model"]) == {"y"}


def test_a_cell_that_two_experiments_ran_counts_once_with_its_attention():
    made = Made(TINY).question("G2", "final", 9).table()
    twice = both(made.drop(columns="attn.L7H1"), made)
    once = gathered.once(twice, (7, 1))
    assert len(once) == PAIRS
    assert once["attn.L7H1"].notna().all()


# -- numbers ---------------------------------------------------------------------------------------------------------
def test_the_overview_has_the_tables_numbers_and_the_verdicts_names():
    figure = drawn(overview._figure, full(TINY), TINY, "chat8")
    left, right = figure.axes
    assert [t.get_text() for t in left.get_yticklabels()] == ["Encode G0", "G1", "Address G2"]
    assert [t.get_text() for t in left.get_xticklabels()][:2] == ["apple = red", "potato = yellow"]
    assert {"L7H1 +1", "question:\napple?", "“red”", "org/model, chat8, n = 10 pairs"} <= set(texts(figure))
    assert heights(right, figures.BLUE) == [1, 0.2]
    little = 0.2 / ENTRIES
    values = (0.9, 0.2 * 0.9 + 0.8 * 0.1, little, 0.9 * 0.8 + 0.1 * little)
    assert heights(right, figures.ORANGE) == pytest.approx(values, abs=1e-3)
    assert heights(right, figures.GREEN) == [0, 0.9]


def test_maps_from_other_models_are_a_third_panel():
    """With all fit prompts, not the points of a learning curve; other models' rows are not pooled."""
    maps = drawn(overview._figure, both(full(TINY), Made(TINY).transfer().table()), TINY, "chat8").axes[2]
    names = ["host", "same-model", "tiny-gdn", "shuffled map", "NVIDIA-Nemotron-Nano-9B-v2", "shuffled map"]
    assert [t.get_text() for t in maps.get_xticklabels()] == names
    assert heights(maps, figures.GREEN) == [0, 1, 0.8, 0.1, 0.9, 0.1]
    assert maps.get_ylabel() == "redirected (n = 10 pairs)"


def test_the_overview_takes_both_arms_from_one_draw():
    """Removal of 10 pairs in one draw, without its baseline: the draw that has both is shown, and nothing is mixed."""
    half = Made(TINY).swaps(removed=8).table().query("experiment == 'removal'").assign(drawn="other")
    table = both(half, full(TINY).assign(drawn="find's"))
    assert heights(drawn(overview._figure, table, TINY, "chat8").axes[1], figures.BLUE) == [1, 0.2]


def test_construction_has_the_tables_numbers(tmp_path, caught):
    second = Made(TINY, "list8").sides().table()
    construction.draw(both(full(TINY), second), TINY, tmp_path)
    a, b, c = caught[0].axes
    assert [t.get_text() for t in a.get_xticklabels()] == [
        "intact",
        "keys\nwithout\nG2",
        "query\nwithout\nG2",
        "query\nwithout\nG1",
    ]
    dark = heights(a, figures.DARK)
    assert dark == heights(a, figures.GREY)
    assert dark[0] == dark[1] == dark[3] == round(math.log(0.8 / 0.025), 3)
    assert dark[2] < 0
    assert [t.get_text() for t in a.texts if "/" in t.get_text()] == [
        "1.00 / 1.00",
        "1.00 / 1.00",
        "0.00 / 0.00",
        "1.00 / 1.00",
    ]
    assert [t.get_text() for t in b.get_yticklabels()] == [
        "G2's output,\nlast token", "G2's output,\nquestion before", "G2's states", "G1's states", "G0's states", "G2's input,\nlast token"
    ]  # fmt: skip
    assert heights(b, figures.DARK, lying=True) == [0.9, 0.1, 0.1]
    assert [v for v in heights(b, figures.BLUE, lying=True) if v] == [0.8]
    assert [v for v in heights(b, figures.SKY, lying=True) if v] == [0.3]
    assert [t.get_text() for t in c.get_xticklabels()] == ["none", "G0", "G1", "feeders", "all before"]
    assert heights(c, figures.GREEN) == [1, 0.9, 0.8, 0.7, 0.6]


def test_two_readers_shows_each_block_and_all(tmp_path):
    figure = drawn(two_readers._figure, readers_apart(), GRANITE, "chat8")
    (axes,) = figure.axes
    assert [t.get_text() for t in axes.get_xticklabels()] == ["host", "G2", "G3", "G2+G3"]
    assert heights(axes, figures.GREEN) == [0, 0.1, 0.2, 1]
    assert heights(axes, figures.ORANGE)[1:] == [0.8, 0.05, 0.85], "the first head of the verdict's in that layer"
    assert heights(axes, figures.SKY)[1:] == [0.1, 0.6, 0.7]
    assert two_readers.draw(readers_apart().query("block != 'G3'"), GRANITE, tmp_path) == []
    assert two_readers.draw(full(TINY), TINY, tmp_path) == [], "one block, one layer of readers"


def test_scaling_pools_variants_and_names_what_is_guided(tmp_path, caught):
    tables = {"org/tiny": both(full(TINY), Made(TINY, "rev8").swaps(removed=6).scaling().table()),
              "org/granite": full(GRANITE)}  # fmt: skip
    models.draw_models(tables, {"org/tiny": TINY, "org/granite": GRANITE}, tmp_path)
    removal, transplant = caught[-1].axes
    assert heights(removal, figures.BLUE, lying=True) == [0.4, 0.2], "the mean of .2 and .6, and one variant's .2"
    assert heights(transplant, figures.GREEN, lying=True) == [0.7, 0.7]
    said = texts(caught[-1])
    assert {"tiny\nn = 20 pairs", "G2 → L7", "granite\nn = 10 pairs"} <= set(said)
    assert any("G2 → L25, L35" in text and "G3 → L35" in text for text in said)


def test_ranks_are_each_models_own(tmp_path, caught):
    tables = {"a/tiny": full(TINY).assign(layer=lambda t: t["layer"].astype(float)), "b/granite": full(GRANITE)}
    models.draw_models(tables, {}, tmp_path)
    assert len(caught) == 1, "without a verdict there is no layout, and no scaling"
    first = next(axes for axes in caught[0].axes if axes.images)
    assert first.images[0].get_array()[:, 0].tolist() == [1, 3, 5, 6, 7]
    assert [t.get_text() for t in first.get_yticklabels()] == ["Encode L0", "feeder L2", "Address L4-6"]
    assert {"tiny\n(n = 2)", "granite\n(n = 2)"} <= set(texts(caught[0]))


def shades(axes) -> list[str]:
    """The texts of the matrix' cells, row by row."""
    return [t.get_text().split("\n")[0] for t in axes.texts if t.get_text() != "donor ↓  host →"]


def test_the_transfer_matrix_has_both_splits_and_the_hosts_own(tmp_path, caught):
    tables = lending({"org/a": TINY, "b": GRANITE})
    tables["b"] = both(tables["b"], Made(TINY, "list8", "b").lent("org/a", 1, 1).table())
    assert len(models.draw_models(tables, {}, tmp_path)) == 2
    matrix, *bars = caught[0].axes
    assert shades(matrix) == ["0.90", "0.70", "0.90", "0.70", "0.90", "0.90"], (
        "own; disjoint beside shared; no other variant"
    )
    assert "[.40, .89]" in matrix.texts[1].get_text()
    assert [t.get_text() for t in matrix.get_xticklabels()] == ["a", "b"]
    assert [len(axes.patches) for axes in bars] == [5, 5]
    assert [heights(axes, figures.BLUE, lying=True) for axes in bars] == [[0.7], [0.7]]
    assert [heights(axes, figures.ORANGE, lying=True) for axes in bars] == [[0.2], [0.2]]
    assert heights(bars[0], figures.DARK, lying=True) == [1]
    assert {"linear", "b G4\n→ a G2\nn = 10"} <= {t.get_text() for t in bars[0].texts}


def test_a_best_control_that_does_as_well_is_uninformative(tmp_path, caught):
    table = Made(TINY, model="m").stood_in("d", 8, other=7).table()
    models.draw_models({"m": table}, {}, tmp_path)
    (bars,) = caught[0].axes
    assert heights(bars, figures.ORANGE, lying=True) == [0.7]
    assert {"donor G1", "d G4\n→ m G2\nn = 10, uninformative"} <= {t.get_text() for t in bars.texts}


def test_pairs_that_were_not_run_are_dashes_in_the_matrix(tmp_path, caught):
    tables = {"m": Made(TINY, model="m").lent("d", 8, 9).table()}
    models.draw_models(tables, {}, tmp_path)
    (matrix,) = caught[0].axes
    assert shades(matrix) == ["0.90", "–", "0.80", "0.90", "–"], "d was a donor and never a host"
    tables["m"] = tables["m"].query("condition != 'mapped' or keys != 'shared'")
    models.draw_models(tables, {}, tmp_path)
    assert shades(caught[1].axes[0]) == ["0.90", "–", "0.80", "–", "–"]


# -- what is missing -------------------------------------------------------------------------------------------------
PER_MODEL = (overview, construction, two_readers)


@pytest.mark.parametrize("module", PER_MODEL)
def test_without_an_address_or_rows_nothing_is_drawn(module, tmp_path):
    table = both(full(GRANITE), readers_apart())
    for rows, view in ((table, None), (table, {**GRANITE, "address": []}), (table.iloc[:0], GRANITE),
                       (pd.DataFrame({"experiment": ["text"], "loss": [1.0]}), GRANITE)):  # fmt: skip
        assert module.draw(rows, view, tmp_path) == []
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "gone", ["baseline", "removal", "transplant", "query-key", "state", "upstream", "scaling", "state-rank"]
)
def test_a_missing_experiment_is_never_an_error(gone, tmp_path, caught):
    table = full(TINY)
    table = table[table["experiment"] != gone].dropna(axis=1, how="all")
    assert bool(overview.draw(table, TINY, tmp_path)) == (gone != "transplant")
    caught.clear()
    assert len(construction.draw(table, TINY, tmp_path)) == 2
    assert len(caught[0].axes) == 3 - (gone in ("query-key", "state", "upstream"))
    names = {path.stem for path in models.draw_models({"a": table, "b": table}, {"a": TINY, "b": TINY}, tmp_path)}
    expected = {"scaling-models": gone != "scaling", "state-rank-models": gone != "state-rank"}
    assert names == {name for name, there in expected.items() if there}


def test_what_was_not_run_is_a_dash(tmp_path, caught):
    table = full(TINY)
    models.draw_models({"a": table, "b": table[table["experiment"] != "removal"]}, {"a": TINY, "b": TINY}, tmp_path)
    removal, transplant = caught[-1].axes
    assert len(heights(removal, figures.BLUE, lying=True)) == 1
    assert heights(transplant, figures.GREEN, lying=True) == [0.7, 0.7], "which was run all the same"
    assert [t.get_text() for t in removal.texts] == ["–"]


def test_one_model_is_no_comparison_and_one_panel_no_construction(tmp_path):
    assert models.draw_models({"a": full(TINY)}, {"a": TINY}, tmp_path) == []
    assert models.draw_models({}, {}, tmp_path) == []
    assert construction.draw(Made(TINY).sides().table(), TINY, tmp_path) == []


# -- as pictures -----------------------------------------------------------------------------------------------------
def expect_readable(figure) -> None:
    """No text leaves the figure, lies on another one, or is smaller than 6 points."""
    figure.canvas.draw()
    width, height = figure.canvas.get_width_height()
    hidden = {
        t for axes in figure.axes for t in axes.get_yticklabels() + axes.get_xticklabels() if not _within(axes, t)
    }
    boxes = [
        (t, t.get_window_extent())
        for t in set(figure.findobj(Text)) - hidden
        if t.get_visible() and t.get_text().strip()
    ]
    for text, box in boxes:
        assert text.get_fontsize() >= 6, text
        assert min(box.x0, box.y0, width - box.x1, height - box.y1) >= 0, (text, box)
    level = [(t.get_text(), box) for t, box in boxes if t.get_rotation() in (0, 90)]
    assert len(level) > 8
    for i, (one, a) in enumerate(level):
        for other, b in level[i + 1 :]:
            assert not a.padded(-0.5).overlaps(b.padded(-0.5)), (one, other)


def _within(axes, tick: Text) -> bool:
    (x, y), (left, right), (low, high) = tick.get_position(), sorted(axes.get_xlim()), sorted(axes.get_ylim())
    return (left <= x <= right or x in (0, 1)) and (low <= y <= high or y in (0, 1))


@pytest.mark.parametrize("name", VERDICTS)
def test_labels_are_readable_whatever_the_model(name, tmp_path, caught):
    view = VERDICTS[name]
    table = full(view)
    if name != "tiny":
        table = both(table, single_blocks(view))
    for module in PER_MODEL:
        module.draw(table, view, tmp_path)
    overview.draw(both(table, Made(view).transfer().table()), view, tmp_path / "with-maps")
    assert len(caught) == (3 if name == "tiny" else 4)
    for figure in caught:
        assert figure.get_figwidth() <= 7.0001
        expect_readable(figure)


def test_labels_of_several_models_are_readable(tmp_path, caught):
    names = [
        "nvidia/NVIDIA-Nemotron-Nano-9B-v2",
        "ibm-granite/granite-4.0-h-tiny",
        "tiny",
        "Qwen/Qwen3.5-35B-A3B-Instruct",
        "a/b",
    ]
    verdicts = dict(zip(names, (DEEP, GRANITE, TINY, DEEP, TINY)))
    tables = {name: full(view) for name, view in verdicts.items()}
    models.draw_models(tables, verdicts, tmp_path)
    assert len(caught) == 2
    for figure in caught:
        assert figure.get_figheight() < 9.5
        expect_readable(figure)


def test_labels_of_pairs_of_models_are_readable(tmp_path, caught):
    names = [
        "nvidia/NVIDIA-Nemotron-Nano-9B-v2",
        "ibm-granite/granite-4.0-h-tiny",
        "Qwen/Qwen3.5-35B-A3B-Instruct",
        "tiny",
    ]
    tables = lending(dict(zip(names, (DEEP, GRANITE, DEEP, TINY))))
    models.draw_models(tables, {}, tmp_path)
    models.draw_models(lending({"tiny-gdn": TINY, "tiny-mamba2": TINY}), {}, tmp_path)
    assert len(caught) == 2
    for figure in caught:
        assert (figure.get_figwidth(), figure.get_figheight() < 9.5) == (7, True)
        expect_readable(figure)


def two_results(folder: Path) -> Path:
    for name in ("one", "two"):
        table = both(full(GRANITE), single_blocks(GRANITE))
        store(folder / name, table.assign(model=name), PAIRS, GRANITE)
    return folder


@pytest.mark.parametrize("module", PER_MODEL)
def test_each_draws_the_folder_that_is_named(module, tmp_path, monkeypatch, capsys):
    folder = two_results(tmp_path) / "one"
    monkeypatch.setattr(sys, "argv", ["figure", str(folder)])
    figures.main(module.draw, gathered.gathered)
    paths = [Path(line) for line in capsys.readouterr().out.split()]
    assert [path.suffix for path in paths] == [".png", ".pdf"]
    assert all(path.parent == folder / "figures" for path in paths)
    assert matplotlib.image.imread(paths[0]).shape[1] <= 7 * 300 + 1
    assert paths[1].read_bytes().startswith(b"%PDF")
    monkeypatch.setattr(sys, "argv", ["figure", str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit) as ended:
        figures.main(module.draw, gathered.gathered)
    assert (ended.value.code, capsys.readouterr().err.count("\n")) == (2, 1)


def test_the_models_figure_runs_as_a_script(tmp_path):
    script = Path(__file__).parent.parent / "figures" / "models.py"
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script, two_results(tmp_path)], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    names = {f"{figure}-models.{kind}" for figure in ("state-rank", "scaling") for kind in ("png", "pdf")}
    assert {path.name for path in map(Path, done.stdout.split())} == names
