"""`run gathering` and `run address-payload` on a bundled model: rows, verdicts, figures, resuming, and what they refuse."""

from __future__ import annotations

import json

import pandas as pd
import pytest
import torch

import encode_address as ea
from encode_address import figures, lab
from encode_address.errors import EncodeAddressError, RunError, StoreError, TaskError
from encode_address.experiments import address_payload
from encode_address.experiments.base import Circuit, Setting
from encode_address.figures import address_payload as joint_figure
from encode_address.figures import gathering as figure
from encode_address.gathering import behaviour, lenses, pooling
from encode_address.gathering.rows import CONCEPTS, concepts_of, grid_readings, outcomes_of
from encode_address.gathering.sites import Site
from encode_address.lens import fit, fitting, logit_lens
from encode_address.metrics import select
from encode_address.run.engine import Engine
from encode_address.tasks import text_source
from encode_address.tasks.arms import ARMS, arms

N = 10


@pytest.fixture(scope="module")
def model():
    return ea.load("tiny-gdn")


@pytest.fixture(scope="module")
def task(model):
    return arms(model, "chat8")


@pytest.fixture(scope="module")
def result(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("results")
    return lab.experiment("gathering", model, "chat8", N, out=out, lens="logit")


@pytest.fixture(scope="module")
def joint(model, tmp_path_factory):
    """With the circuit that `find` would leave, so that it need not run."""
    out = tmp_path_factory.mktemp("results")
    verdict = {"variants": {"chat8": {"encode": ["G0"], "address": ["G2"], "readers": ["L7H0"]}}}
    (out / "tiny-gdn").mkdir()
    (out / "tiny-gdn" / "verdict.json").write_text(json.dumps(verdict))
    return lab.experiment("address-payload", model, "chat8", 20, out=out, lens="logit")


# -- rows ----------------------------------------------------------------------------------------------
def test_what_is_looked_for_is_what_the_tables_say(task):
    for pair in task.pairs(5):
        said = dict(zip(CONCEPTS, concepts_of(pair)))
        assert (
            said["redirected"][0]
            == dict(pair.outcomes("flexible"))["redirected"]
            == outcomes_of(pair, "flexible")["redirected"]
        )
        assert said["own value"][0] == pair.target["flexible"].prompt.answer == outcomes_of(pair, "flexible")["kept"]
        assert said["carried"][0] == pair.donor["flexible"].prompt.answer == outcomes_of(pair, "flexible")["carried"]
        assert said["address"][0] == pair.donor["report"].prompt.answer
        assert said["own key"][0] == pair.target["report"].prompt.answer
        assert len({said[c][0] for c in CONCEPTS}) == 5
        for token, rivals in said.values():
            assert token not in rivals
            assert len({*rivals}) == 7
        assert outcomes_of(pair, "control")["redirected"] is None
        given = outcomes_of(
            pair, "supplied"
        )  # where the given value happens to be the looked-up one, nothing tells them apart
        assert given["redirected"] == (None if given["kept"] == said["redirected"][0] else said["redirected"][0])
    (same,) = task.pairs(1, placebo=True)
    assert outcomes_of(same, "flexible")["redirected"] is None
    assert outcomes_of(same, "flexible")["carried"] == same.donor["flexible"].prompt.answer


def test_every_arm_is_read_and_only_solved_ones_are_patched(result):
    rows = result.table
    assert {*select(rows, part="answer", site="none", donor="none")["arm"]} == {*ARMS}
    assert {*rows.loc[rows["site"].isin(["mixer", "residual", "state"]), "arm"]} == {"flexible"}
    figures_ = result.conclusions["chat8"].figures
    assert [arm for arm, said in figures_["arms"].items() if said.startswith("INVALID")] == [
        "automatic",
        "report",
        "control",
        "supplied",
    ]
    assert {one["verdict"] for one in figures_["entry"]["M"].values()} == {"INVALID"}
    assert all("shift" not in one for one in figures_["entry"]["M"].values())
    assert figures_["two by two, M"]["verdict"] == "INVALID"
    assert "INVALID and not interpreted: automatic, report, control, supplied" in str(result.conclusions["chat8"])
    grid = select(rows, part="grid", donor="donor", position="last 1")
    assert {*grid["site"]} == {"none", "residual", "mixer", "mlp", "query", "key", "value", "state"}
    own = select(grid, site="mixer")
    assert (own["read"] >= own["layer"]).all()
    assert (own["read"] == own["layer"]).any()
    assert (select(grid, site="residual")["read"] > select(grid, site="residual")["layer"]).all()
    assert len(own) == N * 8 * 9 / 2


def test_the_summary_is_its_rows_again(result, model):
    """From the stored file alone, by hand."""
    rows = pd.read_parquet(result.folder / "cells.parquet")
    stored = json.loads((result.folder / "verdict.json").read_text())["variants"]["chat8"]["figures"]
    said = select(rows, part="answer", arm="flexible", donor="donor", position="last 1", site="mixer", path="full")
    transport = (said["redirected"] - said["distracted"]).groupby(said["layer"]).mean()
    accuracy = said["kept"].groupby(said["layer"]).mean()
    for layer in range(8):
        assert stored["donor - distractor"]["mixer"][f"L{layer}"].startswith(
            f"transport {transport[layer]:.2f} ".replace("-0.00", "0.00")
        ) or (abs(transport[layer]) < 0.005)
        assert f"accuracy {accuracy[layer]:.2f}" in stored["donor - distractor"]["mixer"][f"L{layer}"]
    grid = select(rows, part="grid", arm="flexible", donor="donor", position="last 1", path="full")
    clean = select(grid, site="none").set_index(["pair", "read"])["M.redirected"]
    own = select(grid, site="mixer", layer=5)
    near = own[own["read"].isin([6, 7])]
    by_hand = (near["M.redirected"].to_numpy() - clean.loc[list(zip(near["pair"], near["read"]))].to_numpy()).mean()
    found = pooling.profile(select(pooling.shifts(grid, CONCEPTS, 432), site="mixer"), "dM.redirected", 8)[5]
    assert found.value == pytest.approx(by_hand)
    assert str(found) == stored["matched distance, redirected, mixers"]["L5"]


def test_it_goes_on_from_what_is_stored_and_foresees_what_it_runs(model, result, monkeypatch):
    ran = json.loads((result.folder / "manifest.json").read_text())["this_run"]
    assert ran["tokens_forwarded"] == ran["tokens_planned"] > 0
    monkeypatch.setattr(Engine, "count", lambda *_: pytest.fail("a row was run again"))
    again = lab.experiment("gathering", model, "chat8", N, out=result.folder.parents[1], lens="logit")
    assert again.sentence == result.sentence


def test_its_figures_need_the_table_alone(result, joint):
    names = {path.name for path in figure.draw(*figures.read(result.folder), result.folder)}
    expected = {
        f"gathering-{what}-chat8.{kind}"
        for what in ("grid", "entry", "depth", "calibration")
        for kind in ("png", "pdf")
    }
    assert names == expected
    assert {path.suffix for path in joint_figure.draw(*figures.read(joint.folder), joint.folder)} == {".png", ".pdf"}
    assert figure.draw(*figures.read(joint.folder), joint.folder) == []


# -- the joint question --------------------------------------------------------------------------------
def test_the_address_makes_the_value_readable_at_the_reader(joint):
    shifts = pooling.shifts(joint.table, CONCEPTS, 432)
    address = select(address_payload.patched(shifts, Site("mixer", (4, 5, 6), "G2")), donor="donor")
    looked_up = address.groupby("read")["dM.redirected"].mean()
    assert [*looked_up.index] == [6, 7]
    assert looked_up[7] > 10 > 10 * abs(looked_up[6])
    reader = address_payload.patched(shifts, Site("mixer", (7,)))
    assert reader["dM.carried"].mean() > 10 > 3 * abs(reader["dM.redirected"].mean())
    for donor in ("placebo", "random"):  # which leave the looked-up value where it is
        quiet = address_payload.patched(shifts, Site("mixer", (4, 5, 6), "G2"), donor)
        assert abs(select(quiet, read=7)["dM.redirected"].mean()) < looked_up[7] / 4
    assert joint.conclusions["chat8"].status == "holds"
    assert "last layer" in joint.sentence


def setting_of(model, task, circuit, lens="logit"):
    return Setting(
        model, "chat8", task, 20, 0, text_source(None, bundled=True), circuit, {"lens": lens, "lens_file": None}
    )


def test_it_refuses_without_circuit_arm_lens_or_effect(joint, model, task):
    rows, known = joint.table, Circuit(("G0",), ("G2",), ((7, 0),))
    assert address_payload.conclude(rows, setting_of(model, task, known)).status == "holds"
    for circuit, why in (
        (Circuit(), "no Address"),
        (Circuit((), ("G2",), ((3, 0),)), "no reader above the Address G2"),
    ):
        found = address_payload.conclude(rows, setting_of(model, task, circuit))
        assert found.status == "undecided"
        assert why in found.why
    wrong = rows.assign(kept=rows["kept"].where(rows["site"] != "none", 0.0))
    found = address_payload.conclude(wrong, setting_of(model, task, known))
    assert found.status == "undecided"
    assert found.why.startswith("INVALID")
    halves = pd.DataFrame(
        [{"experiment": "address-payload", "variant": "chat8", "part": "lens", "layer": 6, "cosine": 0.5}]
    )
    found = address_payload.conclude(pd.concat([rows, halves]), setting_of(model, task, known))
    assert "not reliable" in found.why
    still = rows.copy()
    clean = select(rows, part="grid", site="none", donor="donor").set_index(["pair", "read"])
    moved = (still["part"] == "grid") & (still["donor"] == "donor") & (still["site"] != "none")
    at = list(zip(still.loc[moved, "pair"], still.loc[moved, "read"]))
    still.loc[moved, "M.redirected"] = clean.loc[at, "M.redirected"].to_numpy()
    found = address_payload.conclude(still, setting_of(model, task, known))
    assert found.status == "undecided"
    assert "does not make its value readable" in found.why


def test_a_value_that_is_readable_before_the_reader_breaks_the_claim(joint, model, task):
    """What a softmax-gathers account would look like: at L6 the looked-up value is as readable as at the reader."""
    rows = joint.table.copy()
    block = (rows["part"] == "grid") & (rows["block"] == "G2") & (rows["donor"] == "donor")
    late = rows[block & (rows["read"] == 7)].set_index("pair")["M.redirected"]
    early = block & (rows["read"] == 6)
    rows.loc[early, "M.redirected"] = late.loc[rows.loc[early, "pair"]].to_numpy()
    found = address_payload.conclude(rows, setting_of(model, task, Circuit(("G0",), ("G2",), ((7, 0),))))
    assert found.status == "does not hold"
    assert "at L6" in found.why


# -- the lens, spans and options -----------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["jacobian", "rows"])
def test_a_lens_is_kept_and_fitted_once(model, task, kind, tmp_path, monkeypatch):
    monkeypatch.setattr(lenses, "INSTANCES", 1)
    monkeypatch.setattr(lenses, "LINES", 2)
    text = text_source(None, bundled=True)
    kept = lenses.KeptLens(model, task, text, kind, tmp_path)
    (reading,) = kept.readings({"variant": "chat8"})
    rows = reading.read(Engine(model, text), reading.prompts)
    assert [row["layer"] for row in rows] == [*range(7)]
    assert all(row["n_even"] + row["n_odd"] == 7 for row in rows)
    assert len([*(tmp_path / ".lens").glob(f"chat8-A-{kind}-*.safetensors")]) == 1
    monkeypatch.setattr(fitting, "_gradients", lambda *_: pytest.fail("it was fitted again"))
    lens = lenses.KeptLens(model, task, text, kind, tmp_path)()
    assert (lens.tokens is None) == (kind == "jacobian")
    pairs = task.pairs(3)
    (reading,) = grid_readings(model, task, pairs, "flexible", [Site("mixer", (5,))], "donor", lambda_of(lens), {})
    rows = select(pd.DataFrame(reading.read(Engine(model, text), reading.prompts)), part="grid")
    assert rows["rank.address"].isna().all() == (kind == "rows")
    assert rows["M.redirected"].notna().all()
    table = behaviour.depth_profile(pooling.answers(pd.DataFrame(reading.rows(Engine(model, text), ""))))
    assert table["layer"].tolist() == [5]


def lambda_of(lens):
    """A lens that is there already."""
    return type("Kept", (), {"settings": (lens.kind,), "__call__": lambda self: lens})()


def test_a_published_lens_takes_the_place_of_a_fit(model, task, tmp_path, monkeypatch):
    whole, text, file = fit(model, [list(range(4, 40))], skip=16), text_source(None, bundled=True), tmp_path / "lens.pt"
    matrices = {layer: whole.matrix(layer) for layer in whole.layers}
    about = {"n_prompts": 1, "source_layers": list(matrices), "d_model": model.config.hidden_size}
    torch.save({"J": matrices, **about}, file)
    kept = {kind: lenses.KeptLens(model, task, text, kind, None, str(file)) for kind in ("jacobian", "rows")}
    assert not [*kept["rows"].readings({})]
    assert kept["jacobian"].settings != kept["rows"].settings
    tokens = lenses.candidates(task)
    fitted = fit(model, [list(range(4, 40))], tokens=tokens, skip=16)
    for layer in fitted.readable:
        assert torch.allclose(kept["rows"]().matrix(layer), fitted.matrix(layer), rtol=1e-5, atol=1e-5), layer
        assert torch.equal(kept["jacobian"]().matrix(layer), whole.matrix(layer))
    with pytest.raises(RunError, match="a logit lens has no file"):
        lenses.KeptLens(model, task, text, "logit", None, str(file))
    with pytest.raises(StoreError, match="cannot be read"):
        lenses.KeptLens(model, task, text, "rows", None, str(tmp_path / "none.pt"))
    monkeypatch.setattr(model, "where", lambda model, function, arguments: function(model, *arguments))
    assert lenses.KeptLens(model, task, text, "rows", None, str(file))().tokens == tokens
    with pytest.raises(RunError, match="send its rows alone, with --lens rows"):
        lenses.KeptLens(model, task, text, "jacobian", None, str(file))()


def test_lens_prompts_are_of_all_arms_and_text_and_both_halves_have_both(model, task):
    prompts = lenses.prompts_for(task, text_source(None, bundled=True))
    asked = {p.prompt.ids for one in task.instances(lenses.INSTANCES, lenses.SEED) for p in one.records.values()}
    for half in (prompts[::2], prompts[1::2]):
        assert len({*half} & asked) == len(asked) / 2
        assert len({*half} - asked) == lenses.LINES / 2
    grid = {
        p.ids
        for pair in task.pairs(60)
        for one in (pair.target, pair.donor)
        for p in (r.prompt for r in one.records.values())
    }
    assert not grid & asked


def test_wrong_options_are_said_in_one_line(model, task):
    with pytest.raises(TaskError, match="lens 'tuned' of gathering: use jacobian or rows or logit"):
        lab.options_of("gathering", {"lens": "tuned"})
    with pytest.raises(EncodeAddressError, match="has no option 'span'"):
        lab.options_of("address-payload", {"span": 3})
    with pytest.raises(TaskError, match="asks dictionaries"):
        address_payload.task(model, "class4")
    lens = lambda_of(logit_lens(model))
    (reading,) = grid_readings(
        model, task, task.pairs(2), "flexible", [Site("mixer", (5,))], "donor", lens, {}, span=99
    )
    with pytest.raises(RunError, match="a span of 99 positions"):
        reading.read(Engine(model), reading.prompts)


def test_the_limits_of_a_small_model_are_said(model, task):
    said = lenses.limits(setting_of(model, task, None, "rows"))
    assert len(said) == 4
    assert "432 words" in said[0]
    assert len(lenses.limits(setting_of(model, task, None))) == 2
