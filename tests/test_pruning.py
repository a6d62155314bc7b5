"""Pruning: the published normalisation beside ours, question sets on request, and the options of a single experiment."""

from __future__ import annotations

import json
import sys

import pandas as pd
import pytest

import encode_address as ea
from encode_address import figures, lab
from encode_address.errors import NameNotFound, TaskError
from encode_address.experiments import pruning
from encode_address.experiments.base import Setting
from encode_address.knowledge import SIX
from encode_address.metrics import select
from encode_address.stats import wilson
from tests.commands import Commands
from tests.test_knowledge import pretend

MODEL = "tiny-gdn"
LAYERS = 8


# -- the curves, on tables made by hand -----------------------------------------------------------
def task_rows(variant: str, chance: float, shares: dict[int, float], pairs: int = 16) -> pd.DataFrame:
    """Both forms of each pair: the share of pairs, by last layer, whose answer is chosen right."""
    return pd.DataFrame(
        [
            {"experiment": "pruning", "variant": variant, "split": "confirmation", "last": last, "pair": pair, "form": form,
             "chance": chance, "choice_correct": pair < share * pairs}
            for last, share in shares.items() for pair in range(pairs) for form in ("clean", "corrupted")
        ]
    )  # fmt: skip


def text_rows(losses: dict[int, float]) -> pd.DataFrame:
    rows = [{"experiment": "pruning-text", "split": "confirmation", "last": i, "loss": x} for i, x in losses.items()]
    return pd.DataFrame(rows)


def knowledge_rows(above: dict[int, float], n: int = 400) -> pd.DataFrame:
    """Every set answered right at this rate above its chance, by last layer."""
    rows = []
    for last, more in above.items():
        for name, chance in SIX.items():
            bounds = wilson(round((chance + more) * n), n)
            about = {"experiment": "pruning-knowledge", "split": "confirmation", "last": last, "task": name, "n": n}
            rows.append({**about, "chance": chance, "accuracy": bounds.value, "low": bounds.low, "high": bounds.high})
    return pd.DataFrame(rows)


TASK = pd.concat(
    [task_rows("chat8", 1 / 8, {0: 0.125, 1: 0.5, 2: 1.0}), task_rows("chat16", 1 / 16, {0: 0.0, 1: 0.0, 2: 1.0})]
)
TEXT, SETS = text_rows({0: 5.0, 1: 4.0, 2: 3.0}), knowledge_rows({0: -0.02, 1: 0.1, 2: 0.2})


def test_each_variant_has_its_own_chance_and_may_fall_below_it():
    curve = pruning.mean(TASK)
    assert curve["last"].tolist() == [0, 1, 2]
    below = -(1 / 16) / (15 / 16)
    assert curve["value"].tolist() == pytest.approx([below / 2, (0.375 / 0.875 + below) / 2, 1.0])
    assert ((curve["low"] <= curve["value"]) & (curve["value"] <= curve["high"])).all()


def test_the_published_curve_is_the_mean_first_over_an_eighth_and_cut():
    curve = pruning.mean(TASK, paper=True)
    assert curve["value"].tolist() == pytest.approx([0.0, (0.25 - 0.125) / 0.875, 1.0])
    assert (curve["low"] >= 0).all()
    one = pruning.mean(task_rows("chat16", 1 / 16, {0: 0.1875, 1: 1.0}), paper=True)
    assert one["value"].tolist() == pytest.approx([0.0625 / 0.875, 1.0]), "an eighth for chat16 too"


def test_the_measure_beside_it_is_knowledge_where_there_is_some():
    name, curve = pruning.beside(pd.concat([TASK, TEXT, SETS]), 400)
    assert (name, curve["value"].tolist()) == ("knowledge", pytest.approx([-0.1, 0.5, 1.0]))
    assert pruning.beside(SETS, 400, paper=True)[1]["value"].tolist() == pytest.approx([0.0, 0.5, 1.0])
    for rows in (pd.concat([TASK, TEXT]), pd.concat([TEXT, knowledge_rows({0: 0.0, 1: 0.0, 2: 0.0})])):
        name, curve = pruning.beside(rows, 400)
        assert name == "language-model score"
        assert curve["value"].iloc[-1] == 1.0
    assert pruning.beside(TASK, 400)[1].empty


# -- the figure -----------------------------------------------------------------------------------
@pytest.fixture
def drawn(monkeypatch) -> list:
    made = []
    monkeypatch.setattr(figures, "write", lambda figure, *_: made.append(figure) or [])
    return made


def legend(figure) -> list[str]:
    return [text.get_text().replace("\n", " ") for text in figure.axes[0].get_legend().get_texts()]


def heights(figure, colour: str) -> list[float]:
    """The values of the thick line of a colour."""
    (line,) = [line for line in figure.axes[0].lines if line.get_color() == colour and line.get_linewidth() > 1]
    return list(line.get_ydata())


def test_the_figure_says_which_measure_it_shows(drawn, tmp_path):
    known = pd.concat([TASK, TEXT, SETS])
    for rows, says in (
        (known, "knowledge (mean of six question sets, 2,400 questions)"),
        (pd.concat([TASK, TEXT]), "language-model score"),
    ):
        figures.pruning.draw(rows, {"vocabulary": 400}, tmp_path)
        assert legend(drawn[-1]) == ["retrieval (mean of chat8, chat16)", says]
    assert heights(drawn[0], figures.ORANGE) == pytest.approx([-0.1, 0.5, 1.0])
    figures.pruning.draw(TASK, None, tmp_path)
    assert legend(drawn[-1]) == ["retrieval (mean of chat8, chat16)"]


def test_the_figure_takes_the_normalisation_from_the_verdict(drawn, tmp_path):
    rows = pd.concat([TASK, SETS])
    for normalisation, first in (("own", -1 / 30), ("paper", 0.0)):
        figures.pruning.draw(rows, {"options": {"normalisation": normalisation, "knowledge": True}}, tmp_path)
        assert heights(drawn[-1], figures.BLUE)[0] == pytest.approx(first)
        assert ("published normalisation" in legend(drawn[-1])[0]) == (normalisation == "paper")
    assert heights(drawn[-1], figures.ORANGE)[0] == 0.0


# -- the experiment -------------------------------------------------------------------------------
@pytest.fixture
def out(tmp_path):
    """A folder that knows the circuit, so that `find` does not run."""
    circuit = {"encode": ["G0"], "address": ["G2"], "readers": ["L7H1"]}
    (tmp_path / MODEL).mkdir()
    (tmp_path / MODEL / "verdict.json").write_text(json.dumps({"variants": dict.fromkeys(("chat8", "list8"), circuit)}))
    return tmp_path


def asked(out, **options) -> lab.Result:
    return ea.experiment("pruning", ea.load(MODEL), ["chat8", "list8"], n=6, out=out, **options)


def test_the_questions_are_asked_once_for_all_variants_and_never_again(monkeypatch, out):
    harness = pretend(monkeypatch)
    dry = lab.dry_run("pruning", ea.load(MODEL), ["chat8", "list8"], n=6, out=out, knowledge=True)
    assert f"{LAYERS} readings of the model as it is, 0 tokens of forward without {LAYERS} of them" in dry
    assert not harness.asked
    first = asked(out, knowledge=True)
    assert (len(harness.wrapped), len(harness.asked)) == (2, LAYERS), "the dry run and the run load, the run asks"
    rows = select(first.table, experiment="pruning-knowledge")
    assert rows.groupby("last")["task"].nunique().to_dict() == dict.fromkeys(range(LAYERS), 6)
    assert rows["variant"].isna().all()
    for conclusion in first.conclusions.values():
        assert "; knowledge there 1.00)" in conclusion.why
    verdict = json.loads((first.folder / "verdict.json").read_text())
    assert verdict["options"] == {"knowledge": True, "normalisation": "own"}
    assert verdict["overall"]["knowledge"][f"L{LAYERS - 1}"].startswith("1.00 [")
    assert verdict["overall"]["questions"] == sum(60 + i for i in range(6))
    without = asked(out)
    assert select(without.table, experiment="pruning-knowledge").empty
    assert "; language-model score there 1.00)" in without.conclusions["chat8"].why
    pd.testing.assert_frame_equal(asked(out, knowledge=True).table, first.table)
    assert len(harness.asked) == LAYERS


def test_the_published_normalisation_is_in_the_figures_the_verdict_and_the_manifest(out, drawn):
    own, paper = asked(out), asked(out, normalisation="paper")
    verdict, manifest = (json.loads((paper.folder / f"{name}.json").read_text()) for name in ("verdict", "manifest"))
    assert verdict["options"]["normalisation"] == manifest["command"]["normalisation"] == "paper"
    curve = pruning.mean(paper.table, paper=True)
    said = [text.split()[0] for text in verdict["overall"]["retrieval"].values()]
    assert said == [f"{value:.2f}" for value in curve["value"]]
    for result, sign in ((own, "-"), (paper, "")):
        lines = result.conclusions["chat8"].figures.values()
        assert any("normalised -" in line for line in lines) == bool(sign)
    figures.draw_all(paper.folder)
    assert "published normalisation" in legend(drawn[-1])[0]


def test_what_is_missing_is_said_before_anything_runs(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    for call in (lab.dry_run, lab.experiment):  # the circuit is not known: `find` would run first
        with pytest.raises(TaskError, match=r"needs the package lm-eval .*'encode-address\[eval\]'") as caught:
            call("pruning", ea.load(MODEL), "chat8", n=4, out=tmp_path, knowledge=True)
        assert "\n" not in str(caught.value)
    assert not any(tmp_path.iterdir())


# -- options of a single experiment ---------------------------------------------------------------
def test_an_option_is_of_the_experiments_that_name_it():
    assert lab.options_of("pruning", {}) == {"knowledge": False, "normalisation": "own"}
    assert lab.options_of("pruning", {"knowledge": True})["knowledge"] is True
    assert lab.options_of("removal-mmlu", {"data": "a folder"}) == {"data": "a folder"}
    assert lab.options_of("removal-mmlu", {"data": None}) == {"data": None}
    assert lab.options_of("removal", {"data": None, "knowledge": None}) == {}
    for name, option, owner in (
        ("removal", "knowledge", "pruning"),
        ("pruning", "data", "removal-mmlu"),
        ("removal-mmlu", "normalisation", "pruning"),
    ):
        with pytest.raises(NameNotFound, match=f"^{name} has no option '{option}': it is one of {owner}$"):
            lab.options_of(name, {option: "own"})
    with pytest.raises(NameNotFound, match=r"^pruning has no option 'quikc': no experiment has$"):
        lab.options_of("pruning", {"quikc": True})
    with pytest.raises(TaskError, match=r"^normalisation 'none' of pruning: use own or paper$"):
        lab.options_of("pruning", {"normalisation": "none"})


def test_python_and_the_command_refuse_alike(tmp_path):
    model = ea.load(MODEL)
    with pytest.raises(NameNotFound, match="removal has no option 'normalisation'"):
        ea.experiment("removal", model, n=4, out=tmp_path, normalisation="paper")
    with pytest.raises(NameNotFound, match="transplant has no option 'data'"):
        lab.dry_run("transplant", model, n=4, out=tmp_path, data="here")
    commands = Commands(tmp_path)
    try:
        command = ("run", "removal", "--model", "no such model", "--out", tmp_path / "out")  # before it is loaded
        assert "removal has no option 'knowledge'" in commands.run(*command, "--knowledge").error()
        assert "removal has no option 'data'" in commands.run(*command, "--data", "here").error()
        command = ("run", "pruning", "--model", "no such model", "--normalisation", "none")
        assert "use own or paper" in commands.run(*command).error()
    finally:
        commands.close()
    assert not (tmp_path / "out").exists()


def test_a_setting_made_by_hand_needs_no_options():
    setting = Setting(None, "chat8", None, 2, 0, None)
    assert pruning.common(setting) == []
    assert pruning.overall(TASK, setting).keys() == {"retrieval"}
