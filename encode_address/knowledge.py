"""The knowledge curve of the pruning experiment (paper section 3.1): six question sets, of the model that stops after a layer.

The lm-evaluation-harness (extra `eval`) asks ARC-Challenge, ARC-Easy, PIQA, Winogrande, OpenBookQA and HellaSwag without examples,
each answer scored by its log-likelihood after the question; `accuracy` is its metric `acc`, over `n` <= 500 questions a set, in
[0, 1]. For the model that stops after layer L the layers above pass their input on, so final norm and head read h^(L+1), as in
`experiments.pruning`. With x(L) the mean of the six accuracies and c the mean of their chances, 1/3, knowledge is

    (x(L) - c) / (x(last) - c):   0 at chance, 1 for the full model.

`encode-address run pruning --knowledge` has its rows. Where this rises with retrieval, the jump of the pruning curve is not one of
retrieval. Bundled models know no English: for them,
and without the hub, the language-model score of `experiments.pruning` stands in, and the two are never mixed in one curve.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pandas as pd

from encode_address.errors import NameNotFound, TaskError
from encode_address.run.reading import Reading
from encode_address.stats import Estimate, wilson

SIX = {  # the harness's name of each set, and its chance
    "arc_challenge": 1 / 4,
    "arc_easy": 1 / 4,
    "piqa": 1 / 2,
    "winogrande": 1 / 2,
    "openbookqa": 1 / 4,
    "hellaswag": 1 / 4,
}
LIMIT, BATCH = 500, 16
INSTEAD = "without it `encode-address run pruning` has the language-model score, from text alone"


@contextmanager
def truncated(model: Any, last: int) -> Iterator[None]:
    """Within it, the layers of `model` above `last` are not run: each returns the residual stream that enters it.

    Raises NameNotFound for a layer that is not there.
    """
    if not 0 <= last < len(model.layout.kinds):
        raise NameNotFound(f"no layer L{last}: {model.name} has L0 to L{len(model.layout.kinds) - 1}")
    above = [layer._module for layer in model.layers][last + 1 :]
    own = [layer.__dict__.get("forward") for layer in above]
    try:
        for layer in above:
            layer.forward = lambda hidden_states, *args, **kwargs: hidden_states
        yield
    finally:
        for layer, forward in zip(above, own):
            del layer.forward
            if forward is not None:  # nnsight's own
                layer.forward = forward


def knowledge_curve(
    model: Any,
    limit: int = LIMIT,
    batch: int = BATCH,
    tasks: Mapping[str, float] = SIX,
    layers: Sequence[int] | None = None,
) -> pd.DataFrame:
    """A row per last layer and set: `last`, `task`, `accuracy` with `low` and `high` (Wilson), `n`, `chance`.

    `tasks` are names of the harness with their chances, `layers` the last layers (default: every one; each is a run of its own
    over all questions). Raises TaskError where the package or the questions are missing.
    """
    harness = _harness(model, batch, tasks)
    chosen = range(len(model.layout.kinds)) if layers is None else layers
    return pd.DataFrame([row for last in chosen for row in _rows(harness, model, last, limit, tasks)])


def readings(
    model: Any,
    limit: int = LIMIT,
    batch: int = BATCH,
    tasks: Mapping[str, float] = SIX,
    labels: Mapping[str, Any] | None = None,
) -> list[Reading]:
    """The same as readings of an experiment, one per last layer, so that a run that was stopped goes on at its layer.

    Rows have experiment="pruning-knowledge" and belong to no variant. What they take is not known before the questions are
    there, and is not counted. Raises TaskError at once where the package or the questions are missing.
    """
    harness = _harness(model, batch, tasks)

    def reading(last: int) -> Reading:
        given = {"experiment": "pruning-knowledge", "last": last, **(labels or {})}
        settings = (limit, tuple(tasks.items()), harness.version)
        return Reading(
            "knowledge", (), lambda engine, _: _rows(harness, engine.model, last, limit, tasks), given, settings
        )

    return [reading(last) for last in range(len(model.layout.kinds))]


def mean(curve: pd.DataFrame, last: int) -> Estimate:
    """The mean accuracy over sets of the model that stops after a layer; n is all questions together.

    The sets are independent samples, so each one's distance from its Wilson bound adds in squares:
    mean - low = sqrt(sum of (accuracy - low)^2) / sets, and so above.
    """
    rows = curve[curve["last"] == last]
    value = float(rows["accuracy"].mean())
    below, above = (
        math.sqrt(float(((rows["accuracy"] - rows[bound]) ** 2).sum())) / len(rows) for bound in ("low", "high")
    )
    return Estimate(value, int(rows["n"].sum()), value - below, value + above)


def normalised(curve: pd.DataFrame, paper: bool = False) -> pd.DataFrame:
    """Knowledge by last layer, as `pruning.normalised` gives retrieval: `last`, `value`, `low`, `high`. Empty where the full
    model is not above chance (lower bound). `paper`: negative values cut to 0, as published."""
    layers = sorted(int(layer) for layer in curve["last"].unique())
    full, chance = mean(curve, layers[-1]), float(curve.drop_duplicates("task")["chance"].mean())
    out = []
    for last in layers if full.low > chance else ():
        here = mean(curve, last)
        values = ((x - chance) / (full.value - chance) for x in (here.value, here.low, here.high))
        out.append((last, *(max(0.0, x) if paper else x for x in values)))
    return pd.DataFrame(out, columns=["last", "value", "low", "high"])


def _harness(model: Any, batch: int, tasks: Mapping[str, float]) -> SimpleNamespace:
    """The harness, once for all layers: the model as it takes it, the questions of `tasks`, `evaluate` and its version."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of every model that is given as an object
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise TaskError(
            f"the knowledge curve needs the package lm-eval ({_said(error)}): pip install 'encode-address[eval]'; {INSTEAD}"
        ) from error
    try:
        questions = list(TaskManager().load(list(tasks))["tasks"].values())
    except Exception as error:  # an unknown name, no network, an offline cache without them: the harness has many ways
        raise TaskError(
            f"the questions of {', '.join(tasks)} could not be loaded ({_said(error)}): they come from the hub; "
            f"run once where it can be reached (they are kept in HF_HOME); {INSTEAD}"
        ) from error
    # A copy of the tokenizer: the harness may give it a padding token, and its length is the vocabulary's elsewhere.
    wrapped = HFLM(
        pretrained=model.module, tokenizer=copy.deepcopy(model.tokenizer), backend="causal", batch_size=batch
    )
    return SimpleNamespace(model=wrapped, questions=questions, evaluate=simple_evaluate, version=version("lm_eval"))


def _rows(
    harness: SimpleNamespace, model: Any, last: int, limit: int, tasks: Mapping[str, float]
) -> list[dict[str, Any]]:
    with truncated(model, last):
        said = harness.evaluate(
            model=harness.model, tasks=harness.questions, num_fewshot=0, limit=limit, bootstrap_iters=0, log_samples=False,
            random_seed=None, numpy_random_seed=None, torch_random_seed=None,  # nothing is drawn: leave the caller's alone
        )  # fmt: skip
    rows = []
    for task, chance in tasks.items():
        n, accuracy = said["n-samples"][task]["effective"], said["results"][task]["acc,none"]
        bounds = wilson(round(accuracy * n), n)
        about = {"last": last, "task": task, "n": n, "chance": chance}
        rows.append({**about, "accuracy": accuracy, "low": bounds.low, "high": bounds.high})
    return rows


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
