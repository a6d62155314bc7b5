"""MMLU: the paper's text to the character, pairs that differ in the letter alone, data of any layout, the filter."""

from __future__ import annotations

import copy
import json
import sys
from functools import cache
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig

import encode_address as ea
from encode_address.errors import NameNotFound, TaskError
from encode_address.experiments import removal, removal_mmlu
from encode_address.experiments.base import Circuit, Setting
from encode_address.metrics import select
from encode_address.run.job import Job
from encode_address.tasks.mmlu import LETTERS, MMLU, Bank, Question, mmlu_source
from tests import tiny
from tests.oracle import Oracle
from tests.toy_tokenizers import POOL_WORDS, bundled_model, toy_tokenizer

TOKENIZER = toy_tokenizer("none", added=tuple(f" {letter}" for letter in LETTERS))
WORDS = [word for word in POOL_WORDS if len(TOKENIZER(f" {word}")["input_ids"]) == 1]


def question(i: int = 0, subject: str = "high_school_fruit", **changes) -> Question:
    """A question about four words, each one token; which option is right goes round."""
    options = tuple(WORDS[(7 * i + 11 * j) % len(WORDS)] for j in range(4))
    return Question(
        **{"subject": subject, "text": f"Which one is number {i}?", "options": options, "answer": i % 4, **changes}
    )


def bank(n: int = 40, subject: str = "high_school_fruit") -> Bank:
    solved = tuple(question(1000 + i, subject, text=f"Solved {i}?") for i in range(7))
    return Bank("toy", tuple(question(i, subject) for i in range(n)), {subject: solved})


def task(variant: str, **kwargs) -> MMLU:
    return MMLU(variant, TOKENIZER, kwargs.pop("bank", None) or bank(**kwargs))


# -- prompts ---------------------------------------------------------------------
ASKED = Question("world_religions", "What grows?\nOne word.", ("red", "pear", "iron", "steel"), 1)
LINES = "What grows?\nOne word.\nA. red\nB. pear\nC. iron\nD. steel\nAnswer:"


def test_without_shots_the_prompt_is_the_papers_to_the_character():
    data = Bank("toy", (ASKED,), {})
    assert task("mmlu0", bank=data).prompt(ASKED).text == LINES
    assert task("mmlu_hint0", bank=data).prompt(ASKED).text == f"Hint: the answer is pear.\n{LINES}"


def test_five_solved_questions_of_the_subject_stand_before_it():
    solved = tuple(Question("world_religions", f"Solved {i}?", ("a", "b", "c", "d"), i % 4) for i in range(6))
    other = tuple(Question("virology", "Of another subject?", ("a", "b", "c", "d"), 0) for _ in range(5))
    data = Bank("toy", (ASKED,), {"virology": other, "world_religions": solved})
    prefix = (
        "The following are multiple choice questions (with answers) about world religions.\n\n"
        "Solved 0?\nA. a\nB. b\nC. c\nD. d\nAnswer: A\n\n"
        "Solved 1?\nA. a\nB. b\nC. c\nD. d\nAnswer: B\n\n"
        "Solved 2?\nA. a\nB. b\nC. c\nD. d\nAnswer: C\n\n"
        "Solved 3?\nA. a\nB. b\nC. c\nD. d\nAnswer: D\n\n"
        "Solved 4?\nA. a\nB. b\nC. c\nD. d\nAnswer: A\n\n"
    )
    assert task("mmlu5", bank=data).prompt(ASKED).text == prefix + LINES
    assert task("mmlu_hint5", bank=data).prompt(ASKED).text == f"{prefix}Hint: the answer is pear.\n{LINES}"


@pytest.mark.parametrize("variant", ["mmlu0", "mmlu_hint5"])
def test_spans_letters_and_choices(variant):
    prompt = task(variant).prompt(question(6))
    decoded = {name: TOKENIZER.decode([prompt.ids[p] for p in places]) for name, places in prompt.spans.items()}
    for i, (letter, option) in enumerate(zip(LETTERS, question(6).options)):
        assert (decoded[f"key {i}"], decoded[f"value {i}"].strip()) == (letter, option)
        assert decoded[f"entry {i}"].strip() == f"{letter}. {option}"
    assert decoded["question"] == "Answer:"
    assert prompt.spans["final"] == (len(prompt) - 1,)
    assert [TOKENIZER.decode([token]) for token in prompt.choices] == [" A", " B", " C", " D"]
    assert prompt.answer == prompt.choices[6 % 4] == prompt.choices[prompt.query]
    assert TOKENIZER.decode(list(prompt.ids)) == prompt.text


# -- pairs -----------------------------------------------------------------------
@pytest.mark.parametrize("variant", ["mmlu0", "mmlu_hint0", "mmlu5"])
def test_in_a_pair_two_options_change_places_and_nothing_else(variant):
    swaps = task(variant).swaps(30)
    assert [swap.pair for swap in swaps] == list(range(30))
    for swap in swaps:
        clean, corrupted = swap.clean, swap.corrupted
        assert (clean.query, corrupted.query) == (swap.target, swap.distractor)
        assert clean.values[clean.query] == corrupted.values[corrupted.query]
        assert clean.values[swap.distractor] == corrupted.values[swap.target]
        assert clean.answer != corrupted.answer
        apart = [p for p in range(len(clean)) if clean.ids[p] != corrupted.ids[p]]
        assert len(clean) == len(corrupted)
        assert {*apart} == {*clean.span(f"value {swap.target}"), *clean.span(f"value {swap.distractor}")}


def test_what_cannot_be_a_pair_is_left_out():
    good = question(
        0, options=("red", "red blue", "green", "red"), answer=0
    )  # one other of as many tokens, another text
    bad = [
        question(1, text="x" * 601),
        question(2, options=("red", "blue\n", "green", "gold")),
        question(3, options=("red", "blue", " ", "gold")),
        question(4, options=("red", "red blue", "blue red", "red"), answer=0),
    ]
    (swap,) = task("mmlu0", bank=Bank("toy", (*bad, good), {})).pairs()
    assert (swap.clean.values, swap.target, swap.distractor) == (good.options, 0, 2)
    edge = question(5, text="x" * 600)
    assert len(list(task("mmlu0", bank=Bank("toy", (edge,), {})).pairs())) == 1
    with pytest.raises(TaskError, match=r"no question of toy can be used \(of 4\)"):
        list(task("mmlu0", bank=Bank("toy", tuple(bad), {})).pairs())


def test_options_that_the_tokenizer_cuts_differently_at_another_letter_are_left_out():
    tokenizer = toy_tokenizer("none", added=(*(f" {letter}" for letter in LETTERS), "A. red\n"))
    joined = question(0, options=("red", "blue", "blue", "blue"), answer=0)
    assert len(tokenizer("A. red\n")["input_ids"]) < len(tokenizer("B. red\n")["input_ids"])
    with pytest.raises(TaskError, match="no question"):
        list(MMLU("mmlu0", tokenizer, Bank("toy", (joined,), {})).pairs())


def test_the_seed_draws_and_n_cuts():
    texts = [[swap.clean.text for swap in task("mmlu0").swaps(20, seed)] for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert [swap.clean.text for swap in task("mmlu0").swaps(5)] == texts[0][:5]
    with pytest.raises(TaskError, match="n is too large: toy gives 40 mmlu0 pairs, fewer than 41"):
        task("mmlu0").swaps(41)
    with pytest.raises(TaskError, match="n must be at least 1"):
        task("mmlu0").swaps(0)


def test_what_cannot_be_asked_is_one_clear_line():
    for name in ("mmlu", "mmlu6", "chat8", "mmlu5/far"):
        with pytest.raises(NameNotFound, match="use mmlu5 or mmlu_hint5"):
            task(name)
    few = Bank("toy", (question(),), {"high_school_fruit": tuple(question(i) for i in range(4))})
    with pytest.raises(
        TaskError, match=r"needs 5 dev questions of 'high_school_fruit', toy has 4: .* or ask mmlu_hint0"
    ):
        task("mmlu_hint5", bank=few)
    for tokenizer in (toy_tokenizer("none"), bundled_model().tokenizer):  # " A" is two tokens, or unknown
        with pytest.raises(TaskError, match="' A' to ' D' are not one token each"):
            MMLU("mmlu0", tokenizer, bank()).swaps(1)


# -- data ------------------------------------------------------------------------
HENDRYCKS = '"What, if anything,\nis ""it""?",None,b,c,d,B\nSecond?,a,b,c,d,D\n'


def test_a_folder_in_the_hendrycks_layout(tmp_path):
    for split, text in (("test", HENDRYCKS), ("dev", "Solved?,1,2,3,4,A\n"), ("val", "broken")):
        (tmp_path / "data" / split).mkdir(parents=True)
        (tmp_path / "data" / split / f"abstract_algebra_{split}.csv").write_text(text)
    found = mmlu_source(tmp_path / "data")
    assert found.test == (
        Question("abstract_algebra", 'What, if anything,\nis "it"?', ("None", "b", "c", "d"), 1),
        Question("abstract_algebra", "Second?", ("a", "b", "c", "d"), 3),
    )
    assert found.dev == {"abstract_algebra": (Question("abstract_algebra", "Solved?", ("1", "2", "3", "4"), 0),)}


def test_one_file_of_any_kind_gives_the_same_questions(tmp_path):
    rows = [
        {"question": "Second?", "choices": ["a", "b", "c", "d"], "answer": 3, "subject": "virology", "split": "test"},
        {"question": "Solved?", "choices": ["1", "2", "3", "4"], "answer": 0, "subject": "virology", "split": "dev"},
    ]
    pd.DataFrame(rows).to_parquet(tmp_path / "m.parquet")
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    named = [
        {"question": row["question"], **dict(zip(LETTERS, row["choices"])), "answer": LETTERS[row["answer"]],
         "subject": "virology", "split": row["split"]} for row in rows
    ]  # fmt: skip
    pd.DataFrame(named).to_csv(tmp_path / "m.csv", index=False)
    first, *others = [mmlu_source(tmp_path / f"m.{kind}") for kind in ("parquet", "jsonl", "csv")]
    assert first.test == (Question("virology", "Second?", ("a", "b", "c", "d"), 3),)
    assert [(found.test, found.dev) for found in others] == [(first.test, first.dev)] * 2
    (tmp_path / "virology.csv").write_text("Second?,a,b,c,d,D\n")
    alone = mmlu_source(tmp_path / "virology.csv")
    assert (alone.test, alone.dev) == (first.test, {})


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("none.csv", None, "no MMLU data .*: give a folder with test/SUBJECT_test.csv"),
        ("a.csv", "Second?,a,b,c,D\n", "a.csv, row 1: a question needs its text, four options, and an answer"),
        ("a.csv", "Second?,a,b,c,d,E\n", "row 1: a question needs"),
        ("a.csv", "Second?,a,b,c,d,4\n", "row 1: a question needs"),
        ("a.csv", "Second, or first?,a,b,c,d,A\n", "row 1: a question needs"),
        ("a.csv", "", "a.csv has no questions in a test split"),
        ("a_dev.csv", "Second?,a,b,c,d,A\n", "a_dev.csv has no questions in a test split"),
        ("a.jsonl", "{not json}\n", "a.jsonl cannot be read: "),
        ("a.jsonl", "[1]\n", "a.jsonl cannot be read: a line is not an object"),
        ("a.parquet", "no parquet", "a.parquet cannot be read: "),
        ("a.txt", "text", "MMLU data in a.txt: give a folder"),
    ],
)
def test_data_that_cannot_be_used_is_one_clear_line(tmp_path, name, text, line):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(TaskError, match=line) as caught:
        mmlu_source(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_the_hub_is_asked_for_two_splits(monkeypatch):
    asked = []

    def load_dataset(*args, split):
        asked.append((*args, split))
        return [{"question": f"From {split}?", "subject": "virology", "choices": ["a", "b", "c", "d"], "answer": 2}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    found = mmlu_source()
    assert asked == [("cais/mmlu", "all", "test"), ("cais/mmlu", "all", "dev")]
    assert found.test == (Question("virology", "From test?", ("a", "b", "c", "d"), 2),)
    assert found.dev["virology"][0].text == "From dev?"

    def unreachable(*args, **kwargs):
        raise ConnectionError("no route\nto host")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=unreachable))
    with pytest.raises(TaskError, match=r"cais/mmlu could not be loaded \(ConnectionError\): .* or pass --data PATH"):
        mmlu_source()
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(TaskError, match=r"needs the package datasets: .*encode-address\[text\].* or pass --data PATH"):
        mmlu_source()


# -- the filter and the experiment --------------------------------------------------
ARCHITECTURES = {
    "qwen3_5_text": lambda size: Qwen3_5ForCausalLM(Qwen3_5TextConfig(**tiny.qwen_settings(vocab_size=size))),
    "granite": lambda size: GraniteMoeHybridForCausalLM(
        GraniteMoeHybridConfig(**tiny.granite_settings(vocab_size=size))
    ),
}


@cache
def guesser(family: str) -> torch.nn.Module:
    """A random model that says a letter, whichever: the head has rows for letters only, and prefers none on average."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        module = tiny.randomise(ARCHITECTURES[family](len(TOKENIZER)))
    prompts = [swap.clean for swap in task("mmlu0").swaps(30)]
    with torch.no_grad():
        ends = torch.cat([module.model(torch.tensor([prompt.ids])).last_hidden_state[:, -1] for prompt in prompts])
        kept = module.lm_head.weight[list(prompts[0].choices)]
        mean = ends.mean(0)
        kept = kept - torch.outer(kept @ mean, mean) / (mean @ mean)
        module.lm_head.weight = torch.nn.Parameter(torch.zeros_like(module.lm_head.weight))
        module.lm_head.weight[list(prompts[0].choices)] = 100 * (kept - kept.mean(0))
    return module


@cache
def loaded(family: str):
    return ea.load(copy.deepcopy(guesser(family)), tokenizer=TOKENIZER)


@cache
def plainly_solved(family: str) -> list[bool]:
    """Of the 120 pairs of `mmlu0`, those whose two forms plain forwards answer right."""
    oracle = Oracle(guesser(family), family)

    def right(prompt) -> bool:
        return int(oracle.logits(torch.tensor([prompt.ids]))[0].argmax()) == prompt.answer

    return [right(swap.clean) and right(swap.corrupted) for swap in task("mmlu0", n=120).swaps(120)]


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_solved_is_what_plain_forwards_answer(family):
    expected = plainly_solved(family)
    assert removal_mmlu.solved(loaded(family), task("mmlu0", n=120).swaps(120)) == expected
    assert 0 < sum(expected) < 30, "a guesser solves few pairs, not none"


def run(setting: Setting) -> tuple[pd.DataFrame, list[int]]:
    """What the lab does with an experiment's steps: the table, and how many cells each step had."""
    job, steps, rows, sizes = Job(setting.model, setting.text, None), removal_mmlu.steps(setting), None, []
    while True:
        try:
            cells = steps.send(rows)
        except StopIteration:
            return job.table(), sizes
        sizes.append(len(cells))
        rows = job.run("mmlu", cells)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_the_experiment_asks_until_n_are_solved_and_removes_from_those(family):
    model, asked = loaded(family), task("mmlu0", n=120)
    setting = Setting(model, "mmlu0", asked, 3, 0, tiny.toy_text(), Circuit(address=("G1",)))
    table, sizes = run(setting)
    own = select(table, experiment="removal-mmlu")
    first = [pair for pair, right in enumerate(plainly_solved(family)) if right][:3]
    assert sizes[:-1] == [6] * -(-(first[-1] + 1) // 3), "three pairs in two forms at a time, until three are solved"
    intact, screen = (select(own, split=split, intervention="none") for split in ("confirmation", "screen"))
    assert sorted(intact["pair"].unique()) == first
    assert intact["correct"].all()
    assert intact["choice_correct"].all()
    assert (own["chance"] == 0.25).all()
    assert removal_mmlu.share_kept(own).n == screen["pair"].nunique() == len(sizes[:-1]) * 3
    sets = {"all linear", "all softmax", "all but first", "all but Address"}
    for rows in (select(own, intervention="remove"), select(table, experiment="text", intervention="remove")):
        assert {*rows["block"]} == {*(block.name for block in model.layout.blocks), *sets}
        assert {*rows["mode"]} == {"zero", "mean"}
    oracle = Oracle(guesser(family), family)
    swaps = asked.swaps(first[-1] + 1)
    for block in model.layout.blocks:
        rows = select(own, block=block.name, mode="zero", form="corrupted").set_index("pair")
        for pair in first:
            host, other = swaps[pair].corrupted, swaps[pair].clean
            logits = oracle.logits(torch.tensor([host.ids]), dict.fromkeys(block.layers, torch.zeros_like))[0]
            assert rows.loc[pair, "margin"] == pytest.approx(
                float(logits[host.answer] - logits[other.answer]), abs=1e-3
            )
            assert rows.loc[pair, "correct"] == (int(logits.argmax()) == host.answer)
    conclusion = removal_mmlu.conclude(table, setting)
    assert conclusion.status == "undecided"
    assert "guessing letters solves up to 0.062" in conclusion.why


def test_without_a_solved_pair_nothing_is_removed_and_nothing_is_claimed():
    model = loaded("granite")
    wrong = [swap.pair for swap in task("mmlu0").swaps(40) if not removal_mmlu.solved(model, [swap])[0]][:2]
    asked = SimpleNamespace(
        pairs=lambda seed: (s for s in task("mmlu0").swaps(40) if s.pair in wrong), surface="plain", pool="toy"
    )
    setting = Setting(model, "mmlu0", asked, 10, 0, tiny.toy_text())
    table, sizes = run(setting)
    assert sizes == [4]
    assert removal_mmlu.conclude(table, setting).why.startswith("the intact model solves both forms of 0.00")


def made(falls: dict[str, float], solved: int = 40, asked: int = 60) -> pd.DataFrame:
    """A table by hand: `falls` gives each block's choice accuracy after removal."""

    def row(pair, form, right, **columns):
        return {
            "experiment": "removal-mmlu",
            "pair": pair,
            "form": form,
            "correct": right,
            "choice_correct": right,
            **columns,
        }

    rows = [row(p, f, p < solved, split="screen", intervention="none") for p in range(asked) for f in removal.FORMS]
    shared = {"split": "confirmation", "mode": "zero"}
    rows += [
        row(p, f, True, **{**shared, "mode": ""}, intervention="none") for p in range(solved) for f in removal.FORMS
    ]
    for block, left in falls.items():
        cut = {**shared, "intervention": "remove", "block": block}
        rows += [row(p, f, p < left * solved, **cut) for p in range(solved) for f in removal.FORMS]
        rows.append({**cut, "experiment": "text", "loss": 3.0, "pair": 0})
    return pd.DataFrame(
        [*rows, {"experiment": "text", "split": "confirmation", "intervention": "none", "loss": 2.0, "pair": 0}]
    )


@pytest.mark.parametrize(
    ("left", "address", "status"),
    [
        (0.1, ("G1",), "holds"),
        (0.9, ("G1",), "does not hold"),
        (0.5, ("G1",), "undecided"),
        (0.1, (), "undecided"),
        (0.1, ("G1", "G2"), "undecided"),  # one of two
    ],
)
def test_the_claim_on_tables_made_by_hand(left, address, status):
    model = SimpleNamespace(layout=SimpleNamespace(blocks=[SimpleNamespace(name=f"G{i}") for i in range(3)]))
    setting = Setting(model, "mmlu5", None, 40, 0, None, Circuit(address=address))
    conclusion = removal_mmlu.conclude(made({"G0": 0.0, "G1": left, "G2": 1.0}), setting)
    assert conclusion.status == status, conclusion.why
    assert "0.67 [0.54, 0.77] (40 of 60 asked), up to 0.09 of these by luck, n = 40" in conclusion.why
    assert "perplexity x 2.72" in conclusion.figures["G1"]
