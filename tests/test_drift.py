"""What edits do to what follows them, in the same trace as the same prompts without edits, against plain hooks."""

from __future__ import annotations

import pytest
import torch

from encode_address.errors import RunError
from encode_address.run.cells import Cell, Edit
from encode_address.run.engine import Engine
from tests.oracle_cases import MODELS, case
from tests.oracle_runs import Runs


@pytest.fixture(params=MODELS)
def one(request):
    return case(request.param)


def cells(one) -> list[Cell]:
    out = []
    for item in one.questions:
        middle = (len(item.host) // 2 + item.pair,)
        for name, layers in one.units[:3]:
            for i, edit in enumerate(
                [
                    Edit("transplant", layers, middle, item.dissociation, item.host.final),
                    Edit("transplant", layers, middle, item.host, middle),
                    Edit("remove", layers, middle),
                ]
            ):
                labels = {"pair": item.pair, "block": name, "edit": i}
                out.append(Cell("none", item.host, also=(edit,), text=True, after=middle[0], labels=labels))
    return out


def test_loss_and_divergence_are_what_plain_hooks_say(one):
    plan = cells(one)
    table, runs = one.engine.run(plan), Runs(one.oracle)
    for cell, row in zip(plan, table.to_dict("records")):
        edited, plain = (
            runs.run(cell.host, edits).every[cell.after : -1].log_softmax(-1) for edits in (cell.edits, ())
        )
        target = torch.tensor(cell.host.ids[cell.after + 1 :])[:, None]
        expected = {
            "loss": -edited.gather(1, target).mean(),
            "loss_without": -plain.gather(1, target).mean(),
            "kl": torch.nn.functional.kl_div(edited, plain, log_target=True, reduction="none").sum(-1).mean(),
        }
        for name, value in expected.items():
            assert row[name] == pytest.approx(float(value), rel=1e-3, abs=1e-4), (one.name, cell.labels, name)
    assert table.loc[table["edit"] == 1, "kl"].abs().max() <= 1e-6, "an identity edit changes nothing"
    assert table.loc[table["edit"] == 0, "kl"].max() > 1e-3
    assert table.groupby("pair")["loss_without"].nunique().max() <= 3


def test_a_plan_of_them_says_what_it_takes(one):
    engine = Engine(one.model, one.text, batch_tokens=400)
    plan = cells(one)
    planned = engine.plan(plan)
    engine.run(plan)
    assert (engine.tokens, engine.traces) == (planned.tokens, planned.traces)
    assert engine.tokens >= engine.floor


def test_what_it_must_not_be_is_one_clear_line(one):
    host = one.questions[0].host
    edit = Edit("remove", (0,), (1,))
    with pytest.raises(RunError, match="after is a position of a text, not its last"):
        Cell("none", host, also=(edit,), text=True, after=len(host) - 1)
    with pytest.raises(RunError, match="after compares edits at some positions"):
        Cell("none", host, also=(Edit("remove", (0,)),), text=True, after=3)
