"""The knowledge curve: truncation is what plain hooks do, the harness is asked as in the paper, what is missing is said."""

from __future__ import annotations

import random
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from encode_address import knowledge
from encode_address.errors import NameNotFound, TaskError
from encode_address.interventions import truncated_logits
from encode_address.run.job import Job
from encode_address.run.store import Store
from encode_address.stats import wilson
from tests import tiny
from tests.oracle_cases import case

IDS = torch.tensor([swap.clean.ids for swap in tiny.swaps(4)])
DEPTH = len(tiny.PATTERN)


# -- truncation ------------------------------------------------------------------
@pytest.fixture(params=tiny.FAMILIES)
def one(request):
    return case(request.param)


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.module(IDS, use_cache=False).logits


def plainly(oracle, layer: int) -> torch.Tensor:
    """Final norm and head of an untouched module on what a hook saw leave `layer`."""
    seen = []
    hook = oracle.decoder.layers[layer].register_forward_hook(lambda module, args, output: seen.append(output))
    with torch.no_grad():
        oracle.module(IDS, use_cache=False)
        hook.remove()
        scaling = getattr(oracle.module.config.get_text_config(), "logits_scaling", 1.0)
        return oracle.module.lm_head(oracle.decoder.norm(seen[0])) / scaling


def test_a_truncated_model_says_what_plain_hooks_and_traces_read(one):
    model, whole = one.model, logits(one.model)
    for layer in range(DEPTH):
        with knowledge.truncated(model, layer):
            found = logits(model)
        expected = plainly(one.oracle, layer)
        size = 1e-5 * max(1.0, float(expected.std()))
        assert (found - expected).abs().max() <= size, layer
        with torch.no_grad(), model.trace(IDS):
            traced = truncated_logits(
                model.layers[layer], model.final_norm, model.lm_head, model.logits_scaling, every=True
            ).save()
        assert (found - traced).abs().max() <= size, layer
        assert torch.equal(found, whole) == (layer == DEPTH - 1), "every layer matters"
    assert torch.equal(logits(model), whole), "nothing is left behind"


def test_the_layers_above_do_not_run_and_come_back_whatever_happens(one):
    model, whole = one.model, logits(one.model)
    ran = []
    hooks = [
        mlp_of(layer._module).register_forward_hook(lambda *_, i=i: ran.append(i))
        for i, layer in enumerate(model.layers)
    ]
    with pytest.raises(KeyboardInterrupt):
        stopped(model, 4)
    for hook in hooks:
        hook.remove()
    assert ran == [0, 1, 2, 3, 4]
    assert torch.equal(logits(model), whole)
    assert torch.equal(logits_of_trace(model), whole[:, -1])
    for layer in (-1, DEPTH):
        with (
            pytest.raises(NameNotFound, match=f"no layer L{layer}: .* has L0 to L8"),
            knowledge.truncated(model, layer),
        ):
            pass


def stopped(model, last: int) -> None:
    with knowledge.truncated(model, last):
        logits(model)
        raise KeyboardInterrupt


def mlp_of(layer: torch.nn.Module) -> torch.nn.Module:
    return getattr(layer, "mlp", None) or layer.shared_mlp


def logits_of_trace(model) -> torch.Tensor:
    with torch.no_grad(), model.trace(IDS):
        found = model.lm_head.output[:, -1].save()
    return found / model.logits_scaling


# -- the harness -------------------------------------------------------------------
class Harness:
    """Stands in for lm-eval as its version 0.4.13 behaves: it notes what it is asked and what the model it was given
    then says, and answers with rates of their own for every call."""

    def __init__(self) -> None:
        self.wrapped, self.asked, self.loaded = [], [], []

    def HFLM(self, **kwargs):
        kwargs["tokenizer"].add_special_tokens({"pad_token": "<|pad|>"})
        self.wrapped.append(kwargs)
        return SimpleNamespace(module=kwargs["pretrained"])

    def TaskManager(self):
        def load(names):
            self.loaded.append(names)
            return {"tasks": {name: f"the questions of {name}" for name in names}, "groups": {}}

        return SimpleNamespace(load=load)

    def simple_evaluate(self, **kwargs):
        with torch.no_grad():
            said = kwargs["model"].module(IDS, use_cache=False).logits
        self.asked.append({**kwargs, "said": said})
        names = [task.removeprefix("the questions of ") for task in kwargs["tasks"]]
        counts = {name: min(kwargs["limit"], 60 + i) for i, name in enumerate(names)}
        right = {name: (len(self.asked) * 7 + i) % n for i, (name, n) in enumerate(counts.items())}
        return {
            "results": {
                name: {"alias": name, "acc,none": right[name] / n, "acc_norm,none": 9.0} for name, n in counts.items()
            },
            "n-samples": {name: {"original": 999, "effective": n} for name, n in counts.items()},
        }


def pretend(monkeypatch) -> Harness:
    """Put a harness where the package lm-eval would be."""
    made = Harness()
    parts = {
        "lm_eval": {"simple_evaluate": made.simple_evaluate},
        "lm_eval.models": {},
        "lm_eval.models.huggingface": {"HFLM": made.HFLM},
        "lm_eval.tasks": {"TaskManager": made.TaskManager},
    }
    for name, contents in parts.items():
        module = ModuleType(name)
        module.__dict__.update(contents, __path__=[])
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(knowledge, "version", lambda name: "0.4.13")
    return made


@pytest.fixture
def harness(monkeypatch) -> Harness:
    return pretend(monkeypatch)


def test_each_truncated_model_is_asked_as_in_the_paper(harness):
    model = case("granite").model
    words, drawn = len(model.tokenizer), (random.getstate()[1], np.random.get_state()[1].tolist())
    curve = knowledge.knowledge_curve(model)
    assert list(curve.columns) == ["last", "task", "n", "chance", "accuracy", "low", "high"]
    assert list(zip(curve["last"], curve["task"])) == [(last, task) for last in range(DEPTH) for task in knowledge.SIX]
    assert harness.loaded == [["arc_challenge", "arc_easy", "piqa", "winogrande", "openbookqa", "hellaswag"]]
    (wrapped,) = harness.wrapped
    assert (wrapped["pretrained"], wrapped["backend"], wrapped["batch_size"]) == (model.module, "causal", 16)
    for last, asked in enumerate(harness.asked):
        given = {
            name: asked[name]
            for name in ("num_fewshot", "limit", "random_seed", "numpy_random_seed", "torch_random_seed")
        }
        assert given == {**dict.fromkeys(given), "num_fewshot": 0, "limit": 500}
        assert asked["tasks"] == [f"the questions of {task}" for task in knowledge.SIX]
        with knowledge.truncated(model, last):
            assert torch.equal(asked["said"], logits(model)), "the model that stops after this layer"
        rows = curve[curve["last"] == last]
        for i, row in enumerate(rows.itertuples()):
            bounds = wilson((7 * (last + 1) + i) % (60 + i), 60 + i)
            assert (row.accuracy, row.n, row.low, row.high) == (bounds.value, bounds.n, bounds.low, bounds.high)
            assert row.chance == knowledge.SIX[row.task]
    assert len(model.tokenizer) == words, "the harness's padding token is not ours"
    assert (random.getstate()[1], np.random.get_state()[1].tolist()) == drawn


def test_a_few_sets_and_layers_may_be_asked(harness):
    curve = knowledge.knowledge_curve(case("granite").model, limit=10, batch=2, tasks={"piqa": 0.5}, layers=(3, 8))
    assert list(zip(curve["last"], curve["task"], curve["n"])) == [(3, "piqa", 10), (8, "piqa", 10)]
    assert (harness.wrapped[0]["batch_size"], harness.asked[0]["limit"]) == (2, 10)


def test_as_readings_they_go_on_where_they_were_stopped(harness, tmp_path):
    model = case("granite").model
    with Store(tmp_path) as store:
        job = Job(model, tiny.toy_text(), store)
        first = [job.run("knowledge", reading) for reading in knowledge.readings(model)[:4]]
    assert len(harness.asked) == 4
    with Store(tmp_path) as store:
        job = Job(model, tiny.toy_text(), store)
        tables = [job.run("knowledge", reading) for reading in knowledge.readings(model)]
        other = job.run("knowledge", knowledge.readings(model, limit=10)[0])
    assert len(harness.asked) == DEPTH + 1, "another limit is another reading"
    assert [table["key"].tolist() for table in tables[:4]] == [table["key"].tolist() for table in first]
    assert set(other["key"]).isdisjoint(tables[0]["key"])
    rows = pd.concat(tables)
    assert set(rows["experiment"]) == {"pruning-knowledge"}
    assert rows.groupby("last")["task"].nunique().to_dict() == dict.fromkeys(range(DEPTH), 6)


# -- what is missing ---------------------------------------------------------------
def test_without_the_package_it_says_so_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    for call in (knowledge.knowledge_curve, knowledge.readings):
        with pytest.raises(TaskError) as caught:
            call(case("granite").model)
        said = str(caught.value)
        assert "needs the package lm-eval" in said
        assert "pip install 'encode-address[eval]'" in said
        assert said.endswith("without it `encode-address run pruning` has the language-model score, from text alone")
        assert "\n" not in said


def test_without_the_questions_it_says_so_in_one_line(harness, monkeypatch):
    def load(names):
        raise ConnectionError("Couldn't reach the hub\nat all")

    monkeypatch.setattr(sys.modules["lm_eval.tasks"], "TaskManager", lambda: SimpleNamespace(load=load))
    with pytest.raises(TaskError) as caught:
        knowledge.knowledge_curve(case("granite").model)
    said = str(caught.value)
    assert said.startswith(
        "the questions of arc_challenge, arc_easy, piqa, winogrande, openbookqa, hellaswag could not be loaded"
    )
    assert "(ConnectionError: Couldn't reach the hub): they come from the hub; run once where it can be reached" in said
    assert "\n" not in said
    assert not harness.asked


# -- the curve ---------------------------------------------------------------------
def made(rates: dict[int, float], n: int = 400) -> pd.DataFrame:
    """A curve in which every set has this rate above its chance, by last layer."""
    rows = []
    for last, rate in rates.items():
        for task, chance in knowledge.SIX.items():
            value = wilson(round((chance + rate) * n), n)
            rows.append(
                {
                    "last": last,
                    "task": task,
                    "n": n,
                    "chance": chance,
                    "accuracy": value.value,
                    "low": value.low,
                    "high": value.high,
                }
            )
    return pd.DataFrame(rows)


def test_the_mean_of_six_is_over_a_third_and_narrower_than_one_set():
    assert sum(knowledge.SIX.values()) / 6 == pytest.approx(1 / 3)
    curve = made({0: 0.0, 1: 0.2})
    mean = knowledge.mean(curve, 1)
    assert (mean.value, mean.n) == (pytest.approx(1 / 3 + 0.2), 2400)
    one = wilson(280, 400)
    assert (mean.high - mean.low) == pytest.approx((one.high - one.low) / 6**0.5, rel=0.1)
    assert mean.low < mean.value < mean.high


def test_the_interval_of_the_mean_covers_what_is_drawn():
    """95 % intervals of drawn curves hold the truth in about 95 % of draws."""
    rng, truth = np.random.default_rng(0), 1 / 3 + 0.2
    inside = 0
    for _ in range(400):
        draws = [wilson(int(rng.binomial(60, chance + 0.2)), 60) for chance in knowledge.SIX.values()]
        curve = pd.DataFrame([{"last": 0, "n": 60, "accuracy": w.value, "low": w.low, "high": w.high} for w in draws])
        mean = knowledge.mean(curve, 0)
        inside += mean.low <= truth <= mean.high
    assert 0.92 <= inside / 400 <= 0.98


def test_normalised_knowledge_is_nothing_at_chance_and_one_at_the_end():
    found = knowledge.normalised(made({0: -0.04, 1: 0.0, 2: 0.1, 3: 0.2}))
    assert found["last"].tolist() == [0, 1, 2, 3]
    assert found["value"].tolist() == pytest.approx([-0.2, 0.0, 0.5, 1.0])
    assert ((found["low"] < found["value"]) & (found["value"] < found["high"])).all()
    cut = knowledge.normalised(made({0: -0.04, 1: 0.0, 2: 0.1, 3: 0.2}), paper=True)
    assert cut["value"].tolist() == pytest.approx([0.0, 0.0, 0.5, 1.0])
    assert (cut["low"] >= 0).all()
    assert knowledge.normalised(made({0: 0.0, 1: 0.01})).empty, "a model that knows nothing has no curve"
