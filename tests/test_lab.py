"""`encode-address run`: what is listed works, on any family, resumes, and says what it costs."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

import encode_address as ea
from encode_address import lab
from encode_address.errors import NameNotFound, TaskError
from encode_address.experiments import EXPERIMENTS, query_key, scaling
from encode_address.figures import draw_all
from encode_address.metrics import select
from tests.commands import Commands

QUICK = ("tiny-gdn", "tiny-mamba2")
NAMES = [name for name, module in EXPERIMENTS.items() if not hasattr(module, "task")]


class Results(dict):
    """(experiment, model) -> its result at the quick size, run when it is first asked for."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def __missing__(self, asked: tuple[str, str]) -> lab.Result:
        name, model = asked
        self[asked] = ea.experiment(name, ea.load(model), quick=True, out=self.out)
        return self[asked]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Results:
    return Results(tmp_path_factory.mktemp("lab"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("model", QUICK)
def test_every_experiment_leaves_a_table_a_conclusion_and_what_it_took(results, name, model):
    result = results[name, model]
    verdict, manifest = (json.loads((result.folder / f).read_text()) for f in ("verdict.json", "manifest.json"))
    assert verdict["sentence"] == result.sentence
    assert result.folder.parts[-2:] == (model, name)
    conclusion = verdict["variants"]["chat8"]
    assert conclusion["status"] in ("holds", "does not hold", "undecided")
    assert conclusion["why"]
    assert len(pd.read_parquet(result.folder / "cells.parquet")) == len(result.table) == manifest["rows"]
    assert manifest["this_run"]["tokens_forwarded"] >= manifest["this_run"]["floor"] > 0
    assert {"variant", "surface", "pool", "dictionary_seed", "split", "pair"} <= set(result.table)
    module = EXPERIMENTS[name]
    assert module.SUMMARY
    assert module.__doc__.count("\n") > 4, "a docstring that states the definition"


def test_the_transplant_names_the_block_that_the_card_knows(results):
    for model in QUICK:
        conclusion = results["transplant", model].conclusions["chat8"]
        assert (conclusion.status, conclusion.why[:2]) == ("holds", "G2"), model
        rows = select(results["transplant", model].table, intervention="transplant", donor="same-dictionary")
        assert set(rows["position"]) == {"final", "question", "question-before"}
        assert {"G0+G1", "G1+G2", "L4"} <= set(rows["block"])
        assert not rows.loc[rows["block"] == "G1", "redirected"].any()


def test_removal_has_its_units_places_ways_and_text(results):
    for model in QUICK:
        result = results["removal", model]
        rows = select(result.table, experiment="removal")
        assert {"all linear", "all softmax", "all but first", "all but Address", "L0", "L0H0", "L1H1"} <= set(
            rows["block"]
        )
        assert set(rows["position"]) == {"all", "dictionary", "question", "final"}
        assert {"zero", "mean", "layer"} <= set(rows["mode"])
        text = select(result.table, experiment="text")
        assert text["variant"].isna().all()
        assert {"all linear", "L0", "L0H0"} <= set(text["block"].dropna())
        nothing_left = select(rows, block="all linear", mode="zero")
        assert nothing_left["correct"].mean() <= 0.2


def test_query_key_keeps_the_papers_dualities(results):
    """Rescuing the query reads what inserting the keys does; both restored is the intact attention, to rounding."""
    for model in QUICK:
        table = results["query-key", model].table
        columns = [c for c in table if c.startswith("attn.") and select(table, experiment="rescue")[c].notna().all()]
        sides = table[table["experiment"].isin(["query-key", "rescue"])].set_index(
            ["experiment", "block", "ablation", "query_from", "key_from", "pair"]
        )[columns]
        inserted, rescued = sides.loc["query-key"].sort_index(), sides.loc["rescue"].sort_index()
        assert (inserted.index == rescued.index).all()
        assert len(columns) >= 1
        for column in columns:
            for a, b in zip(inserted[column], rescued[column]):
                assert list(a) == pytest.approx(list(b), abs=2e-3)


def test_the_transplant_acts_through_the_readers_query(results):
    for model in QUICK:
        conclusion = results["query-key", model].conclusions["chat8"]
        assert conclusion.status == "holds", conclusion.why
        arms = query_key.mediation(results["query-key", model].table)
        assert arms["held"].value <= 0.1 < 0.75 <= arms["alone"].value
        other = query_key.mediation(results["query-key", model].table, "value")
        assert other["alone"].value <= 0.1 < 0.75 <= other["held"].value


def test_the_state_of_the_address_moves_it_and_its_input_does_not(results):
    """With the asked key next to the last token its place is the convolutional state; far from it, the recurrent one."""
    for model in QUICK:
        near = results["state", model]
        far = ea.experiment("state", ea.load(model), "chat8/far", n=24, out=near.folder.parents[1] / "far")
        block = results["transplant", model].conclusions["chat8"].why[:2]
        for result, variant, status in ((near, "chat8", "does not hold"), (far, "chat8/far", "holds")):
            conclusion = result.conclusions[variant]
            assert (conclusion.status, conclusion.why.split()[4]) == (status, block), conclusion.why
            rows = select(result.table, block=block)
            moved = select(rows, intervention="state", donor="same-dictionary").groupby("mode")["redirected"].mean()
            assert moved["both"] >= 0.85
            assert moved["recurrent"] >= 0.85 if status == "holds" else moved["recurrent"] <= 0.15
            for verb in ("input", "residual"):
                assert not select(rows, intervention=verb)["redirected"].any()
            assert select(rows, donor="identity")["kept"].astype(float).mean() == 1.0


def test_one_block_encodes_and_the_embeddings_are_the_ceiling(results):
    for model in QUICK:
        conclusion = results["encode", model].conclusions["chat8"]
        assert (conclusion.status, conclusion.why[:2]) == ("holds", "G0"), conclusion.why
        assert conclusion.figures["embed"]["value"].startswith("1.00")


def test_a_block_after_the_address_changes_nothing_upstream(results):
    for model in QUICK:
        table = results["upstream", model].table
        rows = select(table, experiment="upstream", donor="same-dictionary")
        address = ea.load(model).layout.block(rows["block"].iloc[0])
        plain = select(rows, without="").set_index("pair")["margin"]
        without_first = select(rows, without="G0").set_index("pair")["margin"]
        assert (plain - without_first).abs().max() > 1.0, "the removal reaches the donor"
        for block in ea.load(model).layout.blocks:
            if block.layers[0] > address.layers[-1]:
                after = select(rows, without=block.name).set_index("pair")["margin"]
                assert (plain - after).abs().max() <= 1e-3


def test_the_address_guides_the_layer_that_reads_next_and_nothing_lies_between(results):
    for model in QUICK:
        result = results["scaling", model]
        verdict = json.loads((result.folder / "verdict.json").read_text())["variants"]["chat8"]
        (address,), layout = verdict["address"], ea.load(model).layout
        pairs = scaling.table(result.table, layout)
        assert list(pairs["block"]) == [address]
        assert int(pairs["reader"][0][1:].split("H")[0]) == layout.block(address).reader
        conclusion = result.conclusions["chat8"]
        assert (conclusion.status, conclusion.why.count("nothing lies between")) == ("undecided", 1)
        assert float(conclusion.figures["Address"]["transplant"][:4]) >= 0.85


@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_cannot_do_the_task_gets_no_conclusion(tmp_path, name):
    model = ea.load("tiny-mamba2-untrained")
    (tmp_path / model.slug).mkdir()
    (tmp_path / model.slug / "verdict.json").write_text(
        json.dumps({"variants": {"chat8": {}}})
    )  # what `find` would say
    assert lab.dry_run(name, model, "chat8", n=4, out=tmp_path).startswith(f"{model.name} {name}: ")
    result = ea.experiment(name, model, "chat8", n=4, out=tmp_path)
    assert result.conclusions["chat8"].status == "undecided", result.sentence
    draw_all(result.folder)


def test_the_same_experiment_again_computes_nothing(results):
    result = results["transplant", QUICK[0]]
    again = ea.experiment("transplant", ea.load(QUICK[0]), quick=True, out=result.folder.parents[1])
    pd.testing.assert_frame_equal(again.table, result.table)
    manifest = json.loads((result.folder / "manifest.json").read_text())
    assert manifest["this_run"]["tokens_forwarded"] == 0


def test_donors_of_another_format_where_the_wording_has_the_same_length(tmp_path):
    model = ea.load(QUICK[0])
    assert ea.tasks.dictionary(model, "chat8").sister() is None
    assert ea.tasks.dictionary(model, "chat8/far").sister().variant == "chat8/near"
    table = ea.experiment("transplant", model, "chat8/far", n=6, out=tmp_path).table
    other = select(table, donor="other-format")
    assert len(other) == 6 * len(model.layout.blocks)
    assert set(other["prompt"]) == set(select(table, donor="identity", position="final")["prompt"])
    assert not set(other["donor_prompt"]) & set(select(table, donor="same-dictionary")["donor_prompt"])


def test_a_quick_find_of_another_variant_leaves_what_find_found(tmp_path, monkeypatch):
    model, asked = ea.load(QUICK[0]), []
    folder = tmp_path / model.slug
    folder.mkdir()
    said = {"chat8": {"encode": ["G0"], "address": ["G2"], "readers": ["L7H1"]}}
    (folder / "verdict.json").write_text(json.dumps({"variants": said}))

    def find(model, variants, n, seed, text, pool, out, **_):
        asked.append(list(variants))
        (out / model.slug).mkdir(parents=True)
        there = {variant: {"address": ["G1"]} for variant in variants}
        (out / model.slug / "verdict.json").write_text(json.dumps({"variants": there}))

    monkeypatch.setattr(lab.main_job, "find", find)
    for _ in range(2):  # the second time it is known
        known = lab.circuits(model, ["chat8", "list8"], 0, "A", tmp_path, None, None)
        assert (known["chat8"].address, known["list8"].address, asked) == (("G2",), ("G1",), [["list8"]])
    assert json.loads((folder / "verdict.json").read_text()) == {"variants": said}


# -- the command ----------------------------------------------------------------------------------
def test_the_list_names_every_experiment_once():
    assert [line.split()[0] for line in lab.listing().splitlines()] == list(EXPERIMENTS)


def test_what_cannot_be_run_is_one_clear_line(tmp_path):
    with pytest.raises(NameNotFound, match="no experiment 'removals': there are pruning, removal"):
        ea.experiment("removals", ea.load(QUICK[0]), out=tmp_path)
    with pytest.raises(TaskError, match="n of 2 or more"):
        ea.experiment("transplant", ea.load(QUICK[0]), n=1, out=tmp_path)
    assert not any(tmp_path.iterdir())


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    server = Commands(tmp_path_factory.mktemp("commands"))
    yield server
    server.close()


def test_the_command_ends_with_the_conclusion_and_the_folder(commands, tmp_path):
    asked = ("run", "transplant", "--model", QUICK[0], "--variants", "chat8", "--n", "4", "--out", tmp_path)
    priced = commands.run(*asked, "--dry-run")
    assert priced.code == 0
    assert priced.stdout.startswith(f"{QUICK[0]} transplant: ")
    assert "what follows from these results comes on top" in priced.stdout
    assert not any(tmp_path.iterdir())
    done = commands.run(*asked)
    *_, sentence, folder = done.stdout.splitlines()
    assert (done.code, folder) == (0, str(tmp_path / QUICK[0] / "transplant"))
    assert sentence == json.loads((tmp_path / QUICK[0] / "transplant" / "verdict.json").read_text())["sentence"]
    assert (tmp_path / QUICK[0] / "transplant" / "figures" / "transplant-chat8.png").is_file()
    assert "rows are stored" in commands.run(*asked, "--dry-run").stdout


def test_the_command_lists_and_refuses_in_one_line(commands):
    listed = commands.run("run", "--list")
    assert (listed.code, listed.stdout.strip()) == (0, lab.listing())
    assert "say which experiment and which model" in commands.run("run", "transplant").error()
    assert "no experiment 'nothing'" in commands.run("run", "nothing", "--model", QUICK[0]).error()
