"""Figures: drawn from tables alone, with the table's numbers, readable, and quiet about what a table lacks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import matplotlib
import matplotlib.image
import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.text import Text

import encode_address as ea
from encode_address import figures
from encode_address.errors import EncodeAddressError
from encode_address.experiments import baseline, removal, transplant
from encode_address.experiments.base import run_cells

attention_example, circuit = figures.attention_example, figures.circuit
SCRIPTS = Path(__file__).parent.parent / "figures"
PAIRS = 6
ENTRIES = 8
WORDS = {"keys": list("abcdefgh"), "values": ["red", "blue", "green", "gold", "grey", "black", "white", "rose"]}


def mass(entry: int, amount: float) -> list[float]:
    return [amount if i == entry else (1 - amount) / ENTRIES for i in range(ENTRIES)]


def table(blocks: int = 4, variant: str = "chat8", head: str = "L7H1", union: str = "") -> pd.DataFrame:
    """A result table: the first block is needed, the last but one is needed and redirects, the others do nothing."""
    rows = []
    address = blocks - 2
    shared = {"variant": variant, "split": "confirmation"}

    def swap(experiment, intervention, block, layers, right, lead):
        for pair in range(PAIRS):
            for form in ("clean", "corrupted"):
                rows.append({
                    **shared, "experiment": experiment, "intervention": intervention, "block": block, "layers": layers,
                    "mode": "zero" if block else "", "position": "all", "pair": pair, "form": form, "target": pair,
                    "correct": right > pair, "margin": lead + pair / 10, f"attn.{head}": mass(pair, (0.1 + right / 10) if form == "clean" else 0),
                })  # fmt: skip

    def question(intervention, block, layers, donor, redirected):
        for pair in range(PAIRS):
            for _ in range(5 if donor == "random" else 1):
                entry = pair + 2 if redirected > pair else pair
                rows.append({
                    **shared, "experiment": "transplant", "intervention": intervention, "block": block, "donor": donor,
                    "layers": layers, "mode": "outputs" if block else "", "position": "final", "pair": pair,
                    "host_index": pair, "donor_index": pair + 2, "redirected": redirected > pair,
                    "kept": redirected <= pair, "said": "▁" + WORDS["values"][entry], f"attn.{head}": mass(entry, 0.8),
                    **({} if block else WORDS),
                })  # fmt: skip

    swap("baseline", "none", None, "", PAIRS, 5)
    question("none", None, "", "", 0)
    for i in range(blocks):
        name, layers = f"G{i}", f"{2 * i}" if i % 2 else f"{2 * i}-{2 * i + 1}"
        swap("removal", "remove", name, layers, 0 if i == 0 else 2 if i == address else PAIRS, 1 if i == address else 4)
        for donor in ("same-dictionary", "identity", "other-dictionary", "permuted", "random"):
            question("transplant", name, layers, donor, 5 if i == address and donor == "same-dictionary" else 0)
    if union:
        question("transplant", union, "1-9", "same-dictionary", PAIRS)
    example = [r for r in rows if r["experiment"] == "transplant" and r["block"] == f"G{address}"][:PAIRS]
    rows += [{**r, "experiment": "example", "intervention": "remove", "position": "all"} for r in example]
    return pd.DataFrame(rows)


def verdict(blocks: int = 4, head: str = "L7H1", **more) -> dict:
    """A verdict that fits `table`, with the last block after the last softmax layer."""
    layout = [
        {"name": f"G{i}", "layers": [2 * i], "reader": 2 * i + 1 if i < blocks - 1 else None} for i in range(blocks)
    ]
    return {"encode": ["G0"], "address": [f"G{blocks - 2}"], "readers": [head], "layout": {"blocks": layout}, **more}


def script(name: str, folder: Path) -> subprocess.CompletedProcess:
    # One thread: the work is small, and threads that wait for one another are slow on a busy machine.
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, SCRIPTS / f"{name}.py", folder], capture_output=True, text=True, env=env)


def drawing(module, rows, view, variant="chat8"):
    with figures.style():
        return module._figure(rows, view, variant)


def heights(axes, colour) -> list[float]:
    return [
        round(float(bar.get_height()), 6)
        for bars in axes.containers
        if hasattr(bars, "patches")
        for bar in bars.patches
        if matplotlib.colors.to_hex(bar.get_facecolor()).upper() == colour and bar.get_width() > 0
    ]


# -- files -----------------------------------------------------------------------
def test_all_figures_are_written_for_every_variant(tmp_path):
    pd.concat([table(), table(variant="rev8/far")]).to_parquet(tmp_path / "cells.parquet")
    (tmp_path / "verdict.json").write_text(json.dumps(verdict()))
    paths = figures.draw_all(tmp_path)
    names = {f"{figure}-{v}.{kind}" for figure in ("circuit", "attention_example") for v in ("chat8", "rev8-far") for kind in ("png", "pdf")}  # fmt: skip
    assert {p.name for p in paths} == names
    assert all(p.parent == tmp_path / "figures" for p in paths)
    for path in paths:
        if path.suffix == ".pdf":
            assert path.read_bytes().startswith(b"%PDF")
            continue
        picture = matplotlib.image.imread(path)
        assert picture.shape[1] == 3.4 * 300, "the width of a column, at 300 dots per inch"
        coloured = np.ptp(picture[..., :3], axis=-1) > 0.2
        assert 0.02 < coloured.mean() < 0.5, path


def test_the_same_table_gives_the_same_bytes_and_leaves_matplotlib_alone(tmp_path):
    before = matplotlib.rcParams.copy()
    contents = []
    for folder in ("one", "two"):
        paths = circuit.draw(table(), verdict(), tmp_path / folder)
        contents.append([p.read_bytes() for p in paths])
    assert contents[0] == contents[1]
    assert not any(b"CreationDate" in content for content in contents[0])
    assert dict.__eq__(before, matplotlib.rcParams.copy())


def test_rows_of_other_splits_and_single_layers_are_not_shown(tmp_path):
    other = table()
    other["split"], other["correct"], other["redirected"] = "selection", False, False
    single = table().query("experiment == 'removal' and block == 'G1'").assign(block="L2", correct=False)
    alone, among = (
        circuit.draw(rows, None, tmp_path / name)[0].read_bytes()
        for name, rows in (("alone", table()), ("among", pd.concat([other, table(), single])))
    )
    assert alone == among


@pytest.mark.parametrize("experiment", ["baseline", "removal", "transplant"])
def test_without_its_rows_the_circuit_is_not_drawn(tmp_path, experiment):
    rows = table()
    assert circuit.draw(rows[rows["experiment"] != experiment], verdict(), tmp_path) == []
    assert not (tmp_path / "figures").exists()


def test_without_an_address_or_its_rows_the_example_is_not_drawn(tmp_path):
    rows = table()
    assert attention_example.draw(rows, None, tmp_path) == []
    assert attention_example.draw(rows, verdict(address=[]), tmp_path) == []
    assert attention_example.draw(rows[rows["experiment"] != "transplant"], verdict(), tmp_path) == []
    assert attention_example.draw(rows.drop(columns="attn.L7H1"), verdict(), tmp_path) == []


def test_a_table_of_something_else_draws_nothing(tmp_path):
    pd.DataFrame({"experiment": ["text"], "loss": [1.0]}).to_parquet(tmp_path / "cells.parquet")
    assert figures.draw_all(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "content"), [("cells.parquet", b""), ("cells.parquet", b"not a table"), ("verdict.json", b"{")]
)
def test_unreadable_files_are_one_clear_line(tmp_path, name, content):
    table().to_parquet(tmp_path / "cells.parquet")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(EncodeAddressError, match=rf"{name} cannot be read") as error:
        figures.draw_all(tmp_path)
    assert "\n" not in str(error.value)


def test_a_folder_without_a_table_is_an_error(tmp_path):
    with pytest.raises(EncodeAddressError, match=r"no .*cells\.parquet"):
        figures.draw_all(tmp_path)


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "figures").write_text("a file in the way")
    with pytest.raises(EncodeAddressError, match="cannot write"):
        circuit.draw(table(), verdict(), tmp_path)


# -- the circuit -------------------------------------------------------------------
def test_bars_are_the_numbers_of_the_table():
    figure = drawing(circuit, table(), verdict())
    top, bottom = figure.axes
    assert heights(top, figures.BLUE) == [0, 1, round(2 / 6, 6), 1], "accuracy after removal"
    assert heights(top, figures.SKY) == [round(4.25 / 5.25, 6)] * 2 + [round(1.25 / 5.25, 6), round(4.25 / 5.25, 6)]
    assert heights(top, figures.ORANGE) == [0.1, 0.7, 0.3, 0.7], "attention on the asked entry of clean prompts"
    assert heights(bottom, figures.GREEN) == [0, 0, round(5 / 6, 6), 0], "share redirected"
    little = 0.2 / ENTRIES
    assert heights(bottom, figures.ORANGE) == [little, little, round((5 * 0.8 + little) / 6, 6), little]


def test_the_interval_of_a_gap_ratio_is_that_of_drawing_pairs_anew():
    rng = np.random.default_rng(0)
    intact, left = rng.normal(5, 1, 60), rng.normal(2, 2, 60)
    frames = [
        pd.DataFrame({"pair": list(range(60)) * 2, "margin": np.repeat(margin[None], 2, 0).ravel()})
        for margin in (left, intact)
    ]
    estimate = circuit._gap_ratio(*frames)
    again = rng.integers(0, 60, (20000, 60))
    low, high = np.quantile(left[again].mean(1) / intact[again].mean(1), [0.025, 0.975])
    assert estimate.value == pytest.approx(left.mean() / intact.mean())
    assert (estimate.low, estimate.high) == pytest.approx((low, high), abs=0.02)


def test_bands_and_reader_line_come_from_the_verdict():
    top = drawing(circuit, table(), {}).axes[0]
    assert [t.get_text() for t in top.texts if t.get_text() in ("Encode", "Address")] == []
    figure = drawing(circuit, table(), verdict(readers=["L5H0", "L5H1"]))
    top, bottom = figure.axes
    assert {t.get_text(): t.xy[0] for t in top.texts if t.get_text() in ("Encode", "Address")} == {
        "Encode": 0,
        "Address": 2,
    }
    assert {t.get_text(): t.xy[0] for t in bottom.texts if t.get_text().startswith("L")} == {"L5": 2.5}
    assert [t.get_text() for t in bottom.get_xticklabels()] == ["G0", "G1", "G2", "G3"]
    assert [t.xy[0] for t in bottom.texts if t.get_text() == "no reader"] == [3]


def test_the_verdict_on_a_variant_comes_before_the_common_one():
    view = figures.verdict_of(verdict(variants={"rev8": {"address": ["G1"]}}), "rev8")
    assert (view["address"], view["encode"]) == (["G1"], ["G0"])
    assert figures.verdict_of(None, "rev8") == {}


def test_the_reader_is_the_verdicts_first_watched_head_or_the_most_attentive():
    rows = table().query("experiment == 'baseline'").assign(**{"attn.L9H2": None})
    rows["attn.L9H2"] = [mass(t, 0.9) for t in rows["target"]]
    rows["attn.L7H1"] = [mass(t, 0.5) for t in rows["target"]]
    assert figures.reader({"readers": ["L3H0", "L7H1"]}, rows, "target") == (7, 1)
    assert figures.reader({}, rows, "target") == (9, 2)
    assert figures.reader({}, rows.drop(columns=["attn.L9H2", "attn.L7H1"]), "target") is None


def test_an_address_of_several_blocks_is_shown_as_a_whole():
    figure = drawing(circuit, table(6, union="G3+G4"), verdict(6, address=["G3", "G4"]))
    bottom = figure.axes[1]
    assert bottom.get_xticklabels()[-1].get_text() == "all of"
    assert heights(bottom, figures.GREEN)[-1] == 1


def _within(tick: Text, limits: tuple[float, float]) -> bool:
    return limits[0] <= tick.get_position()[1] <= limits[1]


@pytest.mark.parametrize("blocks", [2, 4, 8, 16])
def test_no_label_overlaps_another_or_leaves_the_figure(blocks):
    readers = ["L25H10", "L29H3"] if blocks == 16 else ["L1H0"]
    union = "G13+G14" if blocks == 16 else ""
    view = verdict(blocks, readers=readers, **({"address": ["G13", "G14"]} if union else {}))
    rows = table(blocks, head=readers[0], union=union)
    for module in (circuit, attention_example):
        if module is attention_example and union:
            rows.loc[rows["experiment"] == "example", "block"] = union
        figure = drawing(module, rows, view)
        figure.canvas.draw()
        boxes = {}
        beyond = {t for axes in figure.axes for t in axes.get_yticklabels() if not _within(t, axes.get_ylim())}
        for text in set(figure.findobj(Text)) - beyond:
            box = text.get_window_extent()
            if text.get_visible() and text.get_text().strip() and box.width > 0:
                boxes[text] = (box, text.get_rotation())
        width, height = figure.canvas.get_width_height()
        level = [(text.get_text(), box) for text, (box, rotation) in boxes.items() if rotation in (0, 90)]
        assert len(level) > 8
        for text, (box, _) in boxes.items():
            assert min(box.x0, box.y0, width - box.x1, height - box.y1) >= 0, text
        for i, (one, a) in enumerate(level):
            for other, b in level[i + 1 :]:
                assert not a.padded(-0.5).overlaps(b.padded(-0.5)), (one, other)


# -- the example -------------------------------------------------------------------
def test_the_example_shows_the_first_pair_that_is_kept_and_redirected():
    rows = table()
    rows.loc[(rows["intervention"] == "none") & (rows["pair"] == 0), "kept"] = False
    figure = drawing(attention_example, rows, verdict())
    titles = [axes.get_title("left") for axes in figure.axes]
    assert titles == ["intact", "Address removed", "Address transplanted"]
    assert "pair 1: the first that is answered right and then redirected" in figure.texts[-1].get_text()
    labels = figure.axes[-1].get_xticklabels()
    assert [t.get_text() for t in labels][1:4] == ["b = blue", "c = green", "d = gold"]
    assert [t.get_text() for t in labels if t.get_weight() == "bold"] == ["b = blue", "d = gold"]
    assert [axes.get_title("right") for axes in figure.axes][::2] == ["answers “blue”", "answers “gold”"]
    assert heights(figure.axes[2], figures.GREEN)[0] == 0.8


def test_the_example_says_when_no_pair_is_redirected_and_does_without_words():
    rows = table().drop(columns=["keys", "values"])
    rows["redirected"] = False
    rows = rows[rows["experiment"] != "example"]
    figure = drawing(attention_example, rows, verdict())
    assert [axes.get_title("left") for axes in figure.axes] == ["intact", "Address transplanted"]
    assert "pair 0: the first (none is" in figure.texts[-1].get_text()
    assert figure.axes[-1].get_xticklabels()[0].get_text() == "entry 0"


# -- from a run, and as scripts ------------------------------------------------------
@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The folder of a small run on a bundled model."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # see `script`
    model = ea.load("tiny-mamba2")
    watch = [(layer, head) for layer in model.softmax_layers for head in range(model.heads)]
    swaps = ea.tasks.dictionary(model, "chat8").swaps(4)
    labels = {"variant": "chat8"}
    units = removal.blocks(model.layout)
    plan = baseline.cells(swaps, watch, labels) + removal.cells(swaps, units, "zero", watch, labels)
    items = ea.tasks.dictionary(model, "chat8").questions(8)
    plan += transplant.host_cells(items, watch=watch, labels=labels)
    plan += transplant.cells(items, units, watch=watch, labels=labels)
    rows = run_cells(model, plan)
    torch.set_num_threads(threads)
    folder = tmp_path_factory.mktemp("results")
    rows.to_parquet(folder / "cells.parquet")
    movers = rows.query("donor == 'same-dictionary'").groupby("block")["redirected"].mean()
    (folder / "verdict.json").write_text(json.dumps({"address": [movers.idxmax()]}))
    return folder


def test_the_columns_of_a_run_are_those_the_figures_read(results):
    assert sorted(p.name for p in figures.draw_all(results)) == [
        "attention_example-chat8.pdf",
        "attention_example-chat8.png",
        "circuit-chat8.pdf",
        "circuit-chat8.png",
    ]


def test_a_figure_runs_as_a_script(results):
    done = script("attention_example", results)
    assert (done.returncode, done.stderr) == (0, "")
    assert [Path(line).name for line in done.stdout.split()] == [
        "attention_example-chat8.png",
        "attention_example-chat8.pdf",
    ]


def test_a_script_without_a_table_says_so_in_one_line(tmp_path):
    done = script("circuit", tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: no ")
    assert done.stderr.count("\n") == 1
