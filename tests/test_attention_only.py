"""The experiment attention-only: end to end on a bundled model, and what its conclusion makes of rows."""

from __future__ import annotations

import json
from functools import cache
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pandas as pd
import pytest

from encode_address import lab
from encode_address.attention import arms as plan
from encode_address.attention.arms import Arm, Edit
from encode_address.attention.measured import chance_overlap, decoded_rows, measured, tokens_of, window_of
from encode_address.errors import NameNotFound, TaskError
from encode_address.experiments import attention_only as experiment
from encode_address.figures import draw_all
from encode_address.metrics import select
from encode_address.run.engine import Engine
from encode_address.tasks.probes import Probe
from tests import tiny
from tests.family_row import case
from tests.toy_tokenizers import bundled_model

PAIRS = 16  # the least of which all right is reliably right


@cache
def result():
    """The dictionary and associative recall on a bundled model, few probes; the folder goes with the process."""
    folder = TemporaryDirectory()
    found = lab.experiment("attention-only", bundled_model(), ("chat8", "mqar"), n=PAIRS, out=folder.name)
    return SimpleNamespace(found=found, folder=folder, table=found.table)


def test_every_part_is_there_and_none_is_a_copy_of_another():
    table = select(result().table, variant="chat8")
    parts = {"heads", "drop", "sweep", "twice", "grid", "curve", "overlap", "linear"}
    assert set(table["part"]) == parts
    measured_rows = table[table["log_prob"].notna()]
    columns = [
        "split",
        "part",
        "phase",
        "k",
        "by",
        "size",
        "prefill",
        "generation",
        "renorm",
        "span",
        "linear",
        "block",
        "layer",
        "head",
        "pair",
    ]
    assert not measured_rows.duplicated(columns).any()
    pairs = measured_rows.groupby("split")["pair"].nunique()
    assert pairs.to_dict() == {"confirmation": PAIRS, "discovery": PAIRS // 2}
    sweep = select(table, part="sweep")
    assert set(sweep["phase"]) == {"", *plan.PHASES}
    assert len({by for by in sweep["by"] if by.startswith("random")}) >= 5
    assert len(select(table, part="grid", renorm=False, span="needle")) == 4 * 5 * PAIRS


def test_each_kind_of_edit_moved_the_answer_and_nothing_kept_is_intact():
    table = select(result().table, variant="chat8", split="confirmation")
    intact = select(table, part="sweep", by="intact").set_index("pair")["log_prob"]

    def moved(**factors):
        rows = select(table, **factors).set_index("pair")["log_prob"]
        assert len(rows) == PAIRS
        return (rows - intact).abs()

    assert moved(part="grid", prefill="keep", generation="keep", renorm=False, span="needle").max() <= 1e-4
    for phase in plan.PHASES:
        assert moved(part="sweep", phase=phase, by="none").min() > 1e-3
        assert moved(part="linear", phase=phase, linear="zero", block="all").mean() > 1
    # With no key visible in either phase, or no head speaking, attention says nothing: the same to rounding.
    assert (moved(part="grid", prefill="null", generation="null", renorm=False) - moved(part="sweep", phase="both", by="none")).abs().max() <= 1e-3  # fmt: skip
    assert moved(part="grid", prefill="keep", generation="omit", renorm=False, span="needle").mean() > 5
    elsewhere = select(table, part="grid", span="elsewhere 0").set_index("pair")["log_prob"]
    assert (elsewhere - intact).abs().mean() < 1, "a span elsewhere costs little: the control stays flat"
    assert moved(part="linear", linear="freeze").mean() > 0.1


def test_the_conclusion_and_the_refusal():
    found = result().found
    assert found.conclusions["chat8"].status == "undecided"
    assert found.conclusions["chat8"].why.startswith("1 of 2 heads are 50% of a layer's, not 15%")
    assert "no heads 0.00" in found.conclusions["chat8"].why
    assert found.conclusions["mqar"].status == "undecided"
    assert found.conclusions["mqar"].why.startswith("INVALID task")
    assert set(select(found.table, variant="mqar")["part"]) == {"sweep", "twice"}, "nothing else was run"
    verdict = json.loads((found.folder / "verdict.json").read_text())
    assert verdict["options"]["boundary"] == "split"
    run = json.loads((found.folder / "manifest.json").read_text())["this_run"]
    assert run["tokens_planned"] == run["tokens_forwarded"]
    drawn = [path.name for path in draw_all(found.folder)]
    assert "attention-only-chat8.png" in drawn
    summary = pd.read_csv(found.folder / "summary.csv")
    assert {"right", "log_prob", "retrieval", "jaccard"} <= set(summary["measure"])


def test_nothing_is_run_twice():
    again = lab.experiment(
        "attention-only", bundled_model(), ("chat8", "mqar"), n=PAIRS, out=str(result().found.folder.parents[1])
    )
    manifest = json.loads((again.folder / "manifest.json").read_text())
    assert manifest["this_run"]["tokens_forwarded"] == 0
    assert again.sentence == result().found.sentence


def test_the_boundary_of_transformers_generate_leaves_one_token_answers_alone():
    """The whole prompt is the prefill, which says the first token of the answer."""
    model = bundled_model()
    probes, _ = experiment.task(model, "chat8").probes(4, 1, 0)
    silent = Edit(k=0)
    arms = [Arm("x").labelled(at=""), Arm("x", None, silent).labelled(at="generation")]
    arms += [Arm("x", silent).labelled(at="prefill"), Arm("x", silent, silent).labelled(at="both")]
    rows = pd.DataFrame(measured(Engine(model, None), probes, arms, "hf"))
    says = rows.pivot_table(index="pair", columns="at", values="log_prob")
    assert (says["generation"] == says[""]).all()
    assert (says["both"] == says["prefill"]).all()
    assert (says["prefill"] - says[""]).abs().min() > 1e-3
    setting = SimpleNamespace(model=SimpleNamespace(heads=10), options={"boundary": "hf"})
    said = experiment.conclude(rows_of(PAPER), setting)
    assert said.status == "undecided"
    assert "said by the prefill" in said.why


def test_mistakes_are_said():
    with pytest.raises(TaskError, match="use split or hf"):
        lab.options_of("attention-only", {"boundary": "middle"})
    with pytest.raises(NameNotFound):
        experiment.task(bundled_model(), "needle8")


# -- a sliding window ------------------------------------------------------------------------------------------
def test_a_needle_outside_the_window_is_a_category_of_its_own():
    """No edit of its keys does anything there, which is said in the rows and kept out of the conclusion."""
    one = case("recurrent_gemma")
    window, model = window_of(one.model), one.model
    assert window == 26
    probes = []
    for pair, place in enumerate((2, 20)):
        prompt = tiny.questions(1, seed=pair, length=40)[0].host
        spans = {**prompt.spans, "needle": (place, place + 1)}
        prompt = type(prompt)(
            prompt.ids, spans, prompt.text, prompt.keys, prompt.values, 0, prompt.answer, prompt.choices
        )
        probes.append(Probe(pair, prompt, (prompt.answer,)))
    hidden = {mode: Arm("grid", None, Edit(mode=mode)).labelled(mode=mode) for mode in ("omit", "only")}
    rows = pd.DataFrame(measured(one.engine, probes, [Arm("grid").labelled(mode=""), *hidden.values()]))
    assert rows.groupby("pair")["reach"].unique().map(list).tolist() == [["outside"], ["inside"]]
    says = rows.pivot_table(index="pair", columns="mode", values="log_prob")
    assert abs(says.loc[0, "omit"] - says.loc[0, ""]) <= 1e-5
    assert abs(says.loc[1, "omit"] - says.loc[1, ""]) > 1e-3
    assert abs(says.loc[0, "only"] - says.loc[0, ""]) > 1e-3, (
        "no key is left: attention says nothing, not all it said before"
    )
    before = one.engine.tokens
    measured(one.engine, probes, list(hidden.values()))
    assert one.engine.tokens - before == tokens_of(model, probes, list(hidden.values()))


def rows_of(shares: dict[str, float], reach: str = "inside", n: int = 100) -> pd.DataFrame:
    """Synthetic rows: the share of right answers per rule at generation (H = 10 heads, so k = 2)."""
    out = []
    arms = [
        ("sweep", by, {"intact": 10, "none": 0}.get(by, 2), "" if by == "intact" else "generation")
        for by in shares
        if by != "twice"
    ]
    arms += [("twice", "intact", 10, ""), ("twice", "none", 0, "generation")]
    for part, by, k, phase in arms:
        share = shares["twice" if part == "twice" and by == "none" else by]
        for pair in range(n):
            row = {
                "experiment": "attention-only",
                "split": "confirmation",
                "part": part,
                "by": by,
                "k": k,
                "phase": phase,
            }
            out.append({**row, "pair": pair, "right": pair < share * n, "reach": reach, "answer_tokens": 1})
    return pd.DataFrame(out)


PAPER = {"intact": 1.0, "none": 0.0, "sharp": 0.98, "random 0": 0.5, "bottom": 0.1, "fixed": 0.9, "twice": 0.0}


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({}, "holds"),
        ({"none": 0.5}, "does not hold"),
        ({"sharp": 0.5}, "does not hold"),
        ({"twice": 0.4}, "does not hold"),
        ({"sharp": 0.82}, "undecided"),
        ({"random 0": 0.98}, "undecided"),
        ({"intact": 0.5, "sharp": 0.5}, "undecided"),
    ],
)
def test_what_is_concluded(changed, status):
    setting = SimpleNamespace(model=SimpleNamespace(heads=10), options={})
    said = experiment.conclude(rows_of({**PAPER, **changed}), setting)
    assert said.status == status, said.why
    assert ("INVALID" in said.why) == ("intact" in changed)
    mixed = pd.concat([rows_of({**PAPER, **changed}), rows_of(dict.fromkeys(PAPER, 0.0), "outside", 20)])
    assert experiment.conclude(mixed, setting).status == status, "what attention cannot reach is apart"
    assert experiment.conclude(rows_of(PAPER, "outside"), setting).status == "undecided"


# -- parts ------------------------------------------------------------------------------------------------------
def test_numbers_of_heads():
    assert [experiment.headline(heads) for heads in (2, 8, 10, 16, 32)] == [1, 2, 2, 3, 5]
    assert experiment.ks_of(2) == [1]
    assert experiment.ks_of(8) == [1, 2, 3, 4, 5, 6, 7]
    many = experiment.ks_of(32)
    assert {1, 5, 31} <= {*many}
    assert len(many) <= 9
    assert plan.sizes(6) == [1, 2, 3, 4, 5]
    assert max(plan.sizes(128)) == 127
    assert chance_overlap(2, 2) == 1
    assert chance_overlap(1, 4) == pytest.approx(0.25)


def test_rankings_put_the_best_first():
    every = [(1, 0), (1, 1), (3, 0), (3, 1)]
    found = pd.DataFrame(
        [
            {"layer": layer, "head": head, "sharpness": -i, "mass": i, "retrieval": float(i == 2)}
            for i, (layer, head) in enumerate(every)
        ]
    )
    rows = [{"phase": "", "log_prob": 0.0, "layer": None, "head": None}]
    rows += [{"phase": "both", "log_prob": -i, "layer": layer, "head": head} for i, (layer, head) in enumerate(every)]
    orders = experiment.rankings(found, pd.DataFrame(rows), every)
    assert orders["sharpness"] == every
    assert orders["mass"] == orders["drop"] == every[::-1]
    assert orders["inverse"] == every
    assert orders["retrieval"][0] == (3, 0)
    assert len({tuple(orders[f"random {seed}"]) for seed in range(5)}) > 1
    assert experiment.best_per_layer(found, 1) == ((1, 1), (3, 0))


def test_decoding_says_what_whole_forwards_say():
    model = bundled_model()
    engine = Engine(model, None)
    probes, _ = experiment.task(model, "chat8").probes(3, 1, 0)
    arms = [Arm("decoded").labelled(by="intact"), Arm("decoded", None, Edit(k=0)).labelled(by="none")]
    rows = pd.DataFrame(decoded_rows(engine, probes, arms, count=4))
    intact, none = (select(rows, by=by) for by in ("intact", "none"))
    assert intact["contains"].all()
    assert not none["contains"].any()
    assert [said.split()[0] for said in intact["said"]] == [model.tokenizer.decode(p.answer).strip() for p in probes]
