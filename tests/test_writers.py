"""The writers experiment: every edit against plain hooks, its states against caches, and its rule on tables made by hand."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

import encode_address as ea
from encode_address import figures, lab
from encode_address.experiments import EXPERIMENTS, writers
from encode_address.figures import writers as figure_of
from encode_address.metrics import select
from encode_address.models.layout import Layout
from encode_address.run.cells import FINAL, FULL
from tests import tiny
from tests.oracle import swap_states
from tests.oracle_cases import agree, case, tolerance
from tests.oracle_runs import Runs, expect_runs

LAYOUT = Layout.from_config(tiny.build("qwen3_5_text").config)


@pytest.fixture(params=tiny.FAMILIES)
def one(request):
    return case(request.param)


# -- against plain hooks ------------------------------------------------------------------------------------------
def test_patches_ways_and_screens_are_what_plain_hooks_say(one):
    swaps, unit, layout, place = one.swaps[:2], one.units[0], one.model.layout, "value and delimiter"
    cells = writers.base_cells(swaps, {}) + writers.control_cells(swaps, unit, place, {})
    cells += writers.way_cells(swaps, unit, place, layout, 2, {}) + writers.screen_cells(swaps, unit, place, layout, {})
    cells = [cell for cell in cells if cell.labels.get("reader", "all") in ("L4", "L5", "L4H1", "all")]
    table = one.engine.run(cells)
    agree(one, cells, table, expect_runs(Runs(one.oracle), cells), 1e-4)
    # Otherwise agreement would prove little: each way moves D when it is opened, by another amount when all readers are.
    plain = select(table, arm="none", form="corrupted").groupby("pair")["margin"].mean()
    for way in writers.WAYS:
        opened = [select(table, arm="open", site=way, reader=r).set_index("pair")["margin"] for r in ("L4", "all")]
        assert (opened[1] - plain).abs().max() > 1e-4, way
        assert (opened[1] - opened[0]).abs().max() > 1e-5, way
    blocked = select(table, arm="block").pivot_table(index=["pair", "reader"], columns="site", values="margin")
    assert (blocked["V"] - blocked["K"]).abs().max() > 1e-4
    same = select(table, arm="identity").set_index("pair")["margin"]
    assert (same - plain).abs().max() <= 1e-4 * table["spread"].max()


def test_the_scan_is_what_plain_hooks_say(one):
    cells = [c for c in writers.scan_cells(one.swaps[:2], one.model.layout, {}) if c.labels["arm"] == "patch"]
    assert {c.labels["block"] for c in cells} == {"embed", *tiny.BLOCKS, "L0", "L1", "L5", "L6"}
    cells = [c for c in cells if c.labels["block"] in ("embed", "G0", "L1", "G2")]
    table = one.engine.run(cells)
    agree(one, cells, table, expect_runs(Runs(one.oracle), cells), 1e-4)
    assert set(select(table, position="final")["path"]) == {FINAL}
    assert table["margin"].round(5).groupby(table["pair"]).nunique().min() >= 9, "units and places differ"


def continued(one, swap, sets, end: int) -> torch.Tensor:
    """Last logits of the corrupted prompt that goes on, token by token, from its own cache after its first `end` tokens, with
    the recurrent and convolutional states of some layers from the clean prompt's: a row per set of layers."""
    ids, other = (torch.tensor([prompt.ids] * len(sets)) for prompt in (swap.corrupted, swap.clean))
    mine, theirs = (one.oracle.run(part[:, :end], use_cache=True, logits_to_keep=1).cache for part in (ids, other))
    swapped = [SimpleNamespace(intervention="state", layers=layers, mode="both", head=-1) for layers in sets]
    swap_states(mine, theirs, swapped)
    for last in range(end + 1, ids.shape[1] + 1):
        mask = torch.ones_like(ids[:, :last])
        step = one.oracle.run(ids[:, last - 1 : last], use_cache=True, cache=mine, attention_mask=mask)
    return step.logits[:, -1].float()


def test_states_in_the_middle_of_a_prompt_are_those_of_a_swapped_cache(one):
    """The detour by inputs, keys and values is the same as exchanging caches where they are."""
    swaps, layout = tiny.swaps(2, length=24), one.model.layout
    cells = [c for c in writers.scan_cells(swaps, layout, {}) if c.labels["arm"] == "state" and c.path == FULL]
    table = one.engine.run(writers.base_cells(swaps, {}) + cells)
    sets = [*tiny.BLOCKS.values(), layout.linear_layers]
    moved = []
    for swap in swaps:
        rows = select(table, pair=swap.pair)
        (plain,) = select(rows, arm="none", form="corrupted", path=FULL)["margin"]
        for place in ("value", "delimiter", "dictionary"):
            logits = continued(one, swap, sets, writers.places(swap)[place][-1] + 1)
            for name, row in zip((*tiny.BLOCKS, writers.ALL_STATES), logits):
                (margin,) = select(rows, arm="state", block=name, position=place)["margin"]
                want = float(row[swap.clean.answer] - row[swap.corrupted.answer])
                assert abs(margin - want) <= tolerance(row, 1e-4), (name, place)
                moved.append(abs(margin - plain))
    assert max(moved) > 1e-2, "no state moved the answer"


# -- the rule -----------------------------------------------------------------------------------------------------
def made(n: int = 30, wrong: bool = False, **margins: float) -> pd.DataFrame:
    """A table in which D is 10 for clean and -10 for corrupted prompts, and these recoveries hold; the rest recover 0."""
    ways = [("G0", "value", way, reader) for way, reader in (("V", "L2"), ("V", "all"), ("K", "all"), ("Q", "all"))]
    settings = {
        "patch": [("G0", "value", "", ""), ("G1", "value", "", ""), ("G0", "delimiter", "", ""), ("embed", "value", "", "")],
        "state": [("all linear", place, mode, "") for place, mode in writers.STATES],
        "open": ways,
        "block": ways,
        **{arm: [("G0", "value", "", "")] for arm in writers.CONTROLS},
    }  # fmt: skip
    out = [
        {"arm": "none", "form": form, "path": FULL, "margin": 10.0 * sign, "pair": i, "restored": sign > 0 and not wrong, "kept": sign < 0}
        for form, sign in (("clean", 1), ("corrupted", -1)) for i in range(n)
    ]  # fmt: skip
    for arm, some in settings.items():
        for block, position, site, reader in some:
            share = margins.get(f"{arm}_{position}", margins.get(f"{arm}_{site or block}", 0.0))
            out += [
                {"arm": arm, "block": block, "position": position, "site": site, "reader": reader, "path": FULL, "pair": i,
                 "form": "corrupted", "margin": -10 + 20 * (share + 0.02 * (i % 3 - 1))}
                for i in range(n)
            ]  # fmt: skip
    return pd.DataFrame(out).assign(experiment="writers")


PAPER = {"patch_G0": 1.0, "open_V": 0.95, "block_V": 0.05, "block_K": 1.0, "block_Q": 1.0, "patch_embed": 1.1}


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({}, "holds"),
        ({"patch_G1": 1.2}, "does not hold"),  # a later block writes more, and nothing of it is known to go through V
        ({"patch_G0": 0.1}, "undecided"),  # nobody writes
        ({"patch_G0": 0.4}, "does not hold"),
        ({"open_V": 0.2, "open_K": 0.9}, "does not hold"),  # read as a key
        ({"block_V": 0.9}, "does not hold"),  # V is enough, and not needed
        ({"open_V": 0.5}, "undecided"),
        ({"state_recurrent": 0.6}, "does not hold"),
        ({"state_both": 0.2}, "undecided"),
        ({"state_dictionary": 0.6}, "does not hold"),
        ({"state_value": 0.6}, "undecided"),  # it may be the conv window
        ({"elsewhere_G0": 0.5}, "does not hold"),  # any entry would do
        ({"wrong": True}, "undecided"),  # the model cannot do the task
    ],
)
def test_the_conclusion_on_tables_made_by_hand(change, status):
    rows = made(**{**PAPER, **change})
    if "patch_G1" in change:  # its ways were run, those of G0 were not
        moved = rows["arm"].isin(["open", "block", *writers.CONTROLS])
        rows.loc[moved, "block"] = "G1"
    said = writers.conclude(rows, SimpleNamespace(layout=LAYOUT))
    assert said.status == status, said.why


def test_recovery_is_per_pair_of_its_own_path_and_leaves_out_pairs_without_effect():
    def row(arm, form, path, pair, margin):
        return {
            "experiment": "writers",
            "arm": arm,
            "form": form,
            "path": path,
            "pair": pair,
            "margin": margin,
            "block": "G0",
        }

    rows = pd.DataFrame(
        [row("none", "clean", p, i, m) for p, i, m in ((FULL, 0, 4), (FULL, 1, 1), (FINAL, 0, 9), (FINAL, 1, 9))]
        + [row("none", "corrupted", p, i, m) for p, i, m in ((FULL, 0, 0), (FULL, 1, 3), (FINAL, 0, 1), (FINAL, 1, -1))]
        + [row("patch", "corrupted", FULL, 0, 3), row("patch", "corrupted", FULL, 1, 2)]
        + [row("state", "corrupted", FINAL, 0, 3), row("state", "corrupted", FINAL, 1, 9)]
        + [row("reverse", "clean", FULL, 0, 3)]
    )
    assert writers.recovery(rows, arm="patch").to_dict() == {0: 0.75}
    assert writers.recovery(rows, arm="state").to_dict() == {0: 0.25, 1: 1.0}
    assert writers.recovery(rows, arm="reverse").to_dict() == {0: 0.25}
    assert writers.recovered(rows, "G2", "value").n == 0


def test_the_third_entry_is_neither_of_the_two():
    for swap in tiny.swaps(8):
        at = writers.places(swap)
        assert len({at["value"], at["distractor"], at["elsewhere"]}) == 3
        assert at["delimiter"] == (at["value"][0] + 1,)
        assert at["dictionary"][0] + 1 == swap.clean.span("question")[0]


# -- a trained model ----------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> lab.Result:
    """`tiny-mamba2`, few pairs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(EXPERIMENTS, "writers", writers)
        return lab.experiment("writers", ea.load("tiny-mamba2"), "chat8", n=16, out=tmp_path_factory.mktemp("writers"))


def test_the_first_block_writes_and_readers_take_it_as_a_value(trained):
    said = trained.conclusions["chat8"]
    assert said.status == "holds", said.why
    rows = trained.table
    assert writers.writer_of(rows) == ("G0", "value")
    assert writers.recovery(rows, arm="identity").abs().max() <= 1e-4
    assert set(rows.loc[rows["arm"] == "none", "path"]) == {FULL, FINAL}
    for site, high in (("V", True), ("K", False), ("Q", False), ("V elsewhere", False)):
        share = writers.recovered(rows, "G0", "value", "open", site=site, reader="all")
        assert share.low > 0.5 if high else share.high < 0.2, (site, share)
    assert all(writers.recovered(rows, "G0", "value", a, reader="L7").high < 0.2 for a in writers.SCREENS)
    assert json.dumps(said.as_dict())


def test_the_figure_frames_the_writer_and_has_a_panel_for_each_question(trained, monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "write", lambda figure, *_: drawn.append(figure) or [])
    figure_of.draw(trained.table, None, trained.folder)
    (figure,) = drawn
    heat, opened, blocked, held, controls = figure.axes
    units = [label.get_text() for label in heat.get_xticklabels()]
    (frame,) = heat.patches
    assert units[round(frame.get_x() + 0.5)] == "G0"
    assert round(frame.get_y() + 0.5) == writers.PLACES.index("value")
    assert [label.get_text() for label in opened.get_xticklabels()] == ["L1", "L3", "L7", "all"]
    assert [label.get_text() for label in held.get_xticklabels()] == [f"L{i}" for i in range(1, 8)]
    whole = writers.recovered(trained.table, "G0", "value").value
    assert controls.patches[0].get_height() == pytest.approx(whole)
    joint = {arm: [bar.get_height() for bar in axes.patches][3] for arm, axes in (("open", opened), ("block", blocked))}
    assert joint["open"] > 0.5 > joint["block"], "V, in all layers"


def test_without_a_writer_the_figure_is_the_scan_alone(monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "write", lambda figure, *_: drawn.append(figure) or [])
    rows = made(patch_G0=0.0).assign(variant="chat8", layers="0-1")
    rows.loc[rows["block"] == "G1", "layers"] = "3"
    figure_of.draw(rows, None, None)
    assert len(drawn[0].axes) == 1
