"""The minimal hybrid: configurations are what plain hooks give, the elimination and its rule on tables made by hand, kv20."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise

import pandas as pd
import pytest
import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

import encode_address as ea
from encode_address import figures, lab
from encode_address.errors import TaskError
from encode_address.experiments import minimal, pruning
from encode_address.experiments.base import Circuit, Setting
from encode_address.experiments.minimal import configured, memory_cells, said, task_cells, text_cells
from encode_address.figures import minimal as figure
from encode_address.metrics import select
from encode_address.models.layout import Layout
from encode_address.run.engine import Engine
from encode_address.run.job import Job
from encode_address.tasks import memory
from tests import tiny, toy_tokenizers
from tests.oracle import Oracle
from tests.oracle_cases import MODELS, agree, case, mean_outputs
from tests.oracle_runs import Runs, expect_runs

LAYOUT = Layout.from_config(tiny.build("qwen3_5_text").config)
LINEAR = LAYOUT.linear_layers


# -- configurations against the oracle ----------------------------------------------------------------------------
@pytest.mark.parametrize("name", MODELS)
def test_a_configuration_is_what_plain_hooks_say(name):
    one = case(name)
    layout, linear = one.model.layout, one.model.layout.linear_layers
    cut, runs = layout.softmax_layers[-1] - 1, Runs(one.oracle, lambda: mean_outputs(name))
    margins = set()
    for left in (
        configured(layout, linear[:1]),
        configured(layout, linear[:1], removal="zero"),
        configured(layout, linear[1:-1]),
        configured(layout, linear[1:], cut),
        configured(layout, (), cut, "zero"),
    ):
        cells = task_cells(one.swaps, left, {})
        table = one.engine.run(cells)
        agree(one, cells, table, expect_runs(runs, cells), 1e-4)
        margins.add(round(float(table["margin"].iloc[0]), 4))
        texts = text_cells(one.text.chunks(one.model.tokenizer, n=2), left, {})
        for (_, row), cell in zip(one.engine.run(texts).iterrows(), texts):
            ids = torch.tensor(cell.host.ids)
            every = runs.run(cell.host, tuple(e for e in cell.edits if e.mode != "layer"), left.cut).every
            loss = torch.nn.functional.cross_entropy(every[:-1], ids[1:])
            assert row["loss"] == pytest.approx(float(loss), rel=1e-4), left
    assert len(margins) == 5, "the configurations differ"


def test_what_removes_nothing_is_the_intact_model():
    one = case("granite")
    layout, last = one.model.layout, len(one.model.layout.kinds) - 1
    intact = one.engine.run(task_cells(one.swaps, configured(layout, layout.linear_layers), {}))
    stopped = one.engine.run(task_cells(one.swaps, configured(layout, layout.linear_layers), {}, stop=True))
    assert set(intact["intervention"]) == {"none"}
    assert set(stopped["intervention"]) == {"truncate"}
    assert (intact["margin"] - stopped["margin"]).abs().max() <= 1e-4 * intact["spread"].max()
    assert set(stopped["layers"]) == {str(last)}
    # without the layers above a cut the loss is that of the truncated model, which is read another way
    texts = one.text.chunks(one.model.tokenizer, n=4)
    for cut in range(last + 1):
        below = one.engine.run(text_cells(texts, configured(layout, layout.linear_layers, cut), {}))
        assert below["loss"].tolist() == pytest.approx(one.engine.run(pruning.text_cells(texts, [cut]))["loss"].tolist(), rel=1e-4)  # fmt: skip


def test_no_layer_above_the_cut_is_kept_or_removed():
    left = configured(LAYOUT, (0, 5, 8), cut=4)
    assert (left.kept, left.removed) == ((0,), (1, 3))
    assert left.labels == {"kept_layers": "0", "k": 1, "removal": "mean", "cut": "L4"}
    assert configured(LAYOUT, LINEAR).labels["cut"] == "full"
    assert minimal.layers_in(said(())) == ()
    assert minimal.layers_in(said((0, 5))) == (0, 5)


# -- sets -----------------------------------------------------------------------------------------------------------
def setting_of(circuit: Circuit | None, tokenizer=None) -> Setting:
    model = type("Model", (), {"layout": LAYOUT, "tokenizer": tokenizer or tiny.toy_tokenizer()})()
    return Setting(model, "chat8", None, 30, 0, None, circuit)


def test_the_named_sets():
    circuit = Circuit(("G0",), ("G1",), ((4, 0), (7, 1)))
    sets = minimal.named_sets(setting_of(circuit), (0, 6), ranked=[8, 5, 0, 1, 3, 6])
    named = {name: layers for name, draw, layers in sets if not draw}
    assert named == {
        "all": LINEAR, "none": (), "Encode": (0, 1), "Address": (3,), "Encode+Address": (0, 1, 3), "pre-reader": (0, 1, 3),
        "greedy": (0, 6), "PPL top-2": (5, 8), "first-2": (0, 1), "last-2": (6, 8), "PPL top-3": (0, 5, 8),
        "first-3": (0, 1, 3), "last-3": (5, 6, 8),
    }  # fmt: skip
    for k, but in ((2, (0, 6)), (3, (0, 1, 3))):
        drawn = [layers for name, _, layers in sets if name == f"random-{k}"]
        assert len({*drawn}) == minimal.DRAWS
        assert but not in drawn
        assert all(len(layers) == k for layers in drawn)
    assert set(minimal.draws(LINEAR[:3], 2, [(0, 1)], 0)) == {(0, 3), (1, 3)}, "no more than there are"


def test_without_a_circuit_there_are_fewer_sets():
    names = {name for name, _, _ in minimal.named_sets(setting_of(None), (0,), list(LINEAR))}
    assert names == {"all", "none", "greedy", "PPL top-1", "first-1", "last-1", "random-1"}
    assert {n for n, _, _ in minimal.named_sets(setting_of(None), LINEAR, list(LINEAR))} == {"all", "none", "greedy"}


# -- the rule, on tables made by hand ---------------------------------------------------------------------------------
def rows_of(kept, rate: float, margin: float = 1.0, n: int = 40, **labels) -> pd.DataFrame:
    """`n` pairs of which a share `rate` is right in both forms."""
    right = [i < round(rate * n) for i in range(n) for _ in range(2)]
    given = {"experiment": "minimal", "arm": "elimination", "removal": "mean", "cut": "full", "draw": 0, **labels}
    return pd.DataFrame(
        {"correct": right, "choice_correct": right, "margin": margin, "spread": 2.0, "pair": [i for i in range(n) for _ in range(2)],
         "form": ["clean", "corrupted"] * n, "intervention": "none" if kept == LINEAR else "remove",
         "kept_layers": said(kept), "k": len(kept), "variant": "chat8", **given}
    )  # fmt: skip


def dev(path: list[tuple[tuple[int, ...], float]]) -> pd.DataFrame:
    """Rows in which the elimination takes `path`: the other candidates of each step are worse."""
    out = [rows_of(*path[0])]
    for (before, _), (kept, rate) in pairwise(path):
        tried = [tuple(x for x in before if x != gone) for gone in before]
        out += [rows_of(some, rate if some == kept else 0.0) for some in tried]
    return pd.concat(out)


PATH = [(LINEAR, 1.0), ((0, 1, 3, 5, 6), 1.0), ((0, 3, 5, 6), 0.95), ((0, 5, 6), 0.9), ((0, 5), 0.85)]


def test_the_elimination_drops_the_best_and_stops_below_nine_tenths():
    path = minimal.elimination(dev(PATH))
    assert [(step.kept, step.accepted) for step in path] == [(kept, rate >= 0.9) for kept, rate in PATH]
    ties = pd.concat([rows_of((0, 1), 1.0), rows_of((0,), 1.0, margin=3.0), rows_of((1,), 1.0, margin=4.0)])
    assert minimal.elimination(ties)[1].kept == (1,), "of equal accuracy the higher margin"
    hopeless = minimal.elimination(dev([(LINEAR, 0.0), ((0, 1, 3, 5, 6), 0.0)]))
    assert [step.accepted for step in hopeless] == [True, False], "nothing is kept of nothing"


def test_the_cut_is_the_first_that_keeps_nearly_all():
    rows = [rows_of(LINEAR, rate, arm="truncation", last=layer) for layer, rate in ((2, 0.1), (4, 0.95), (7, 0.9), (8, 1.0))]  # fmt: skip
    assert minimal.cut_star(pd.concat(rows)) == 4


def test_layers_are_ranked_by_what_their_removal_costs():
    rows = [
        rows_of(tuple(x for x in LINEAR if x != layer), 1.0, experiment="minimal-text").assign(loss=loss)
        for layer, loss in zip(LINEAR, (2.0, 1.0, 5.0, 1.5, 4.0, 3.0))
    ]
    assert minimal.ranking(pd.concat(rows), LINEAR) == [3, 6, 8, 0, 5, 1]


@pytest.mark.parametrize(
    ("path", "rates", "status", "why"),
    [
        (PATH, {"greedy": 0.95, "PPL top-3": 0.1, "random-3": 0.2}, "holds", "keeps 3 of 6"),
        (PATH, {"greedy": 0.95, "PPL top-3": 0.95, "random-3": 0.2}, "does not hold", "which is the same set"),
        (PATH, {"greedy": 0.95, "PPL top-3": 0.1, "random-3": 1.0}, "does not hold", "random-3 1.00"),
        (PATH, {"greedy": 0.5, "PPL top-3": 0.1, "random-3": 0.2}, "does not hold", "0.50"),
        (PATH, {"greedy": 0.85, "PPL top-3": 0.1, "random-3": 0.2}, "undecided", "0.85"),
        (PATH, {"greedy": 0.95, "PPL top-3": 0.75, "random-3": 0.2}, "undecided", "0.75"),
        (PATH, {"all": 0.7, "greedy": 0.7, "PPL top-3": 0.0, "random-3": 0.0}, "undecided", "intact model answers"),
        ([PATH[0], (PATH[1][0], 0.5)], {"greedy": 1.0}, "does not hold", "no linear layer can be removed"),
        ([((3,), 1.0), ((), 1.0)], {"greedy": 1.0}, "does not hold", "needs no linear layer"),
    ],
)
def test_the_conclusion_on_tables_made_by_hand(path, rates, status, why):
    said_ = minimal.conclude(table_of(path, rates), setting_of(None))
    assert said_.status == status, said_.why
    assert why in said_.why
    assert "kv20: this tokenizer lacks" in said_.figures["kv20"]


def test_both_blocks_are_always_said_and_a_failed_self_test_refuses():
    rates = {"greedy": 0.95, "PPL top-3": 0.1, "random-3": 0.2}
    table = pd.concat([table_of(PATH, rates), rows_of((0, 1, 3), 0.05, arm="named", kept_set="Encode+Address")])
    assert "Encode+Address (bind+query) alone 0-1,3: 0.05" in minimal.conclude(table, setting_of(None)).why
    table.loc[table["arm"] == "truncation", "margin"] += 1.0
    assert minimal.conclude(table, setting_of(None)).status == "undecided"


def table_of(path, rates: dict[str, float]) -> pd.DataFrame:
    eliminated = dev(path)
    eliminated.loc[eliminated["k"] == len(path[0][0]), "intervention"] = "none"
    stopped = [rows_of(path[0][0], 1.0, arm="truncation", last=8)]
    named = [rows_of((0, 5, 6), rate, arm="named", kept_set=name) for name, rate in {"all": 1.0, **rates}.items()]
    return pd.concat([eliminated, *stopped, *named], ignore_index=True)


# -- the KV-memory task -----------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def spoken():
    """A random model whose tokenizer is like a real one: its numbers are two tokens."""
    tokenizer = toy_tokenizers.toy_tokenizer("qwen")

    def build():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            config = Qwen3_5TextConfig(**tiny.qwen_settings(vocab_size=len(tokenizer), max_position_embeddings=2048))
            return tiny.randomise(Qwen3_5ForCausalLM(config))

    return ea.load(build(), tokenizer=tokenizer), Oracle(build(), "qwen3_5_text")


def test_the_prompt_is_the_papers_and_values_are_whole_strings(spoken):
    item = memory.Memory(spoken[0].tokenizer, 4).item(0, ["river", "bed", "lion", "coin"], ["41", "7", "99", "0"], 2)
    assert item.prompt.text == (
        "Memorize the following dictionary:\nriver:41\nbed:7\nlion:99\ncoin:0\nThe value of the key 'lion' is"
    )
    decoded = [spoken[0].tokenizer.decode(whole.ids[len(item.prompt) :]) for whole in item.continued]
    assert decoded == [" 41", " 7", " 99", " 0"]
    assert len(item.continued[0]) > len(item.continued[1]) > len(item.prompt)
    items = memory.Memory(spoken[0].tokenizer).items(5)
    assert {len(i.continued) for i in items} == {20}
    assert len({i.target for i in items}) > 1
    assert all(len({whole.ids for whole in i.continued}) == 20 for i in items)
    assert [i.prompt.ids for i in memory.Memory(spoken[0].tokenizer).items(5)] == [i.prompt.ids for i in items]


def test_a_tokenizer_that_cannot_write_it_is_told_so():
    with pytest.raises(TaskError, match="kv20: this tokenizer lacks line breaks, 'Memorize'"):
        memory.Memory(tiny.toy_tokenizer())
    with pytest.raises(TaskError, match="kv1: a dictionary of distinct numbers"):
        memory.Memory(toy_tokenizers.toy_tokenizer(), 1)
    with pytest.raises(TaskError, match="merges '41' with the prompt"):
        memory.Memory(toy_tokenizers.toy_tokenizer("qwen", added=("is 4",)), 2).item(0, ["bed", "lion"], ["41", "7"], 0)


def test_the_answer_is_the_value_of_highest_summed_log_probability(spoken):
    model, oracle = spoken
    items = memory.Memory(model.tokenizer, 6).items(8, seed=3)
    for left in (configured(model.layout, LINEAR), configured(model.layout, (0, 5))):
        text = tiny_text(model.tokenizer)
        means = oracle.means(torch.tensor([p.ids for p in text.chunks(model.tokenizer, "train", n=16)]))
        edits = {layer: (lambda output, value=means[layer]: value.expand_as(output)) for layer in left.removed}
        expected = []
        for item in items:
            scores, start = [], len(item.prompt)
            for whole in item.continued:
                ids = torch.tensor([whole.ids])
                logp = oracle.run(ids, edits).logits[0].float().log_softmax(-1)
                scores.append(float(sum(logp[i - 1, whole.ids[i]] for i in range(start, len(whole)))))
            expected.append(scores.index(max(scores)))
        rows = Engine(model, text).run(memory_cells(items, left, "kv6"))
        best = rows.loc[(rows["loss"] * (rows["tokens"] - 1)).groupby(rows["pair"]).idxmin()].sort_values("pair")
        assert best["candidate"].tolist() == expected
        right = sum(said_ == item.target for said_, item in zip(expected, items)) / len(items)
        assert minimal.memory_accuracy(rows, said(left.kept), "kv6").value == right
        assert len({*expected}) > 1


def tiny_text(tokenizer):
    words = " ".join(toy_tokenizers.POOL_WORDS)
    return ea.tasks.Text("toy", (words + ". ") * 4, (words + ". ") * 4)


# -- the experiment -----------------------------------------------------------------------------------------------------
def test_the_steps_score_kv20_where_it_can_be_written(spoken, monkeypatch):
    monkeypatch.setattr(minimal, "LEAST_DEV", 2)
    monkeypatch.setattr(minimal.Memory.__init__, "__defaults__", (4,))
    model, _ = spoken
    text = tiny_text(model.tokenizer)
    task = ea.tasks.dictionary(model, "chat8", text)
    setting = Setting(model, "chat8", task, 2, 0, text, Circuit(("G0",), ("G1",), ((4, 0),)))
    job, steps, rows = Job(model, text, None), minimal.steps(setting), None
    with suppress(StopIteration):
        while True:
            rows = job.run("", steps.send(rows))
    table = job.table()
    scored = select(table, experiment="minimal-kv4")
    assert {"none", said(LINEAR), "0,1", "3", "0,1,3"} <= set(scored["kept_layers"])
    assert minimal.memory_accuracy(table, "none", "kv4").n == 2
    assert minimal.conclude(table, setting).status == "undecided"


def test_on_trained_models_few_layers_do_and_the_path_is_consistent(tmp_path, monkeypatch):
    monkeypatch.setitem(lab.EXPERIMENTS, "minimal", minimal)
    monkeypatch.setattr(ea.tasks.Text, "count", 16)
    model = ea.load("tiny-mamba2")
    circuit = Circuit(("G0",), ("G2",), ((7, 0),))
    monkeypatch.setattr(lab, "circuits", lambda *_: {"chat8": circuit})
    result = lab.experiment("minimal", model, "chat8", n=16, out=tmp_path)
    rows, linear = result.table, model.layout.linear_layers
    path = minimal.elimination(rows)
    for before, after in pairwise(path):
        assert len({*before.kept} - {*after.kept}) == 1
        assert {*after.kept} < {*before.kept}
    greedy = [step.kept for step in path if step.accepted][-1]
    assert 0 < len(greedy) < len(linear)
    assert minimal.self_test(rows) <= 1e-4
    named = select(rows, arm="named", cut="full")
    assert set(select(named, kept_set="greedy")["kept_layers"]) == {said(greedy)}
    assert set(named["split"]) == {"confirmation"}
    assert not set(named["prompt"]) & set(select(rows, split="dev")["prompt"]), "the test dictionaries are new"
    right = named.groupby(["removal", "kept_set"])["correct"].mean()
    assert right["mean", "greedy"] >= 0.7 > 0.3 >= right["mean", "none"]
    assert right["mean", "all"] == right["zero", "all"] == 1
    again = lab.experiment("minimal", model, "chat8", n=16, out=tmp_path)
    assert again.sentence == result.sentence
    assert "kv20: this tokenizer lacks line breaks" in result.sentence
    check_figure(result, monkeypatch)


def check_figure(result, monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "write", lambda one, *_: drawn.append(one) or [])
    figure.draw(*figures.read(result.folder), result.folder)
    (one,) = drawn
    strip, curve, bars = one.axes[:3]
    named = select(result.table, arm="named", cut="full", removal="mean")
    values = named.groupby("kept_set")["correct"].mean()
    shown = [label.get_text() for label in bars.get_yticklabels()]
    assert set(shown) == set(values.index)
    assert [bar.get_width() for bar in bars.patches[: len(shown)]] == pytest.approx([values[name] for name in shown])
    assert list(values[shown]) == sorted(values, reverse=True)
    path = minimal.elimination(result.table)
    assert curve.lines[-1].get_ydata()[0] == path[-1].dev.value or path[-1].accepted
    dark = [patch for patch in strip.patches if patch.get_edgecolor()[:3] == pytest.approx((0.2, 0.2, 0.2), abs=0.01)]
    assert len(dark) == sum(len(step.kept) for step in path)
    assert any("kv20: this tokenizer lacks" in text.get_text() for text in bars.texts)


def test_a_cut_below_the_end_joins_the_named_sets():
    """Where the model retrieves before its last layer, every set runs at both depths, and only layers below the cut are kept."""
    model = tiny.load_tiny("qwen3_5_text")
    task = type("Task", (), {"swaps": lambda _, n, seed, seen: tiny.swaps(n, seed), "surface": "", "pool": "A"})()
    setting = Setting(model, "chat8", task, 4, 0, tiny.toy_text(), Circuit(("G0",), ("G2",), ((7, 0),)))
    steps = minimal.steps(setting)
    plan = next(steps)
    stops = [rows_of(LINEAR, 1.0 if at >= 7 else 0.2, arm="truncation", last=at) for at in (2, 4, 7, 8)]
    texts = [rows_of(tuple(x for x in LINEAR if x != gone), 1.0, experiment="minimal-text").assign(loss=1.0) for gone in LINEAR]  # fmt: skip
    assert {c.labels.get("last") for c in plan if c.labels.get("arm") == "truncation"} == {2, 4, 7, 8}
    last = steps.send(pd.concat([*stops, *texts, dev([(LINEAR, 1.0), (LINEAR[1:], 0.5)])]))
    named = [cell for cell in last if cell.labels["experiment"] == "minimal"]
    assert {cell.labels["cut"] for cell in named} == {"L7", "full"}
    assert {cell.labels["kept_layers"] for cell in named if cell.labels["kept_set"] == "all"} == {"0,1,3,5,6", "0,1,3,5,6,8"}  # fmt: skip
    counted = {(c.labels["kept_set"], c.labels["cut"], c.labels["removal"]) for c in named if not c.labels["draw"]}
    assert len(counted) == 4 * len({name for name, _, _ in counted})
