"""Cells whose traces run in another process, in sessions, give the table that they give here, in few jobs."""

from __future__ import annotations

import pandas as pd
import pytest
import torch

from encode_address.models.loading import BUNDLED_DIR, GROUND_TRUTH
from encode_address.run import plan
from encode_address.run.engine import Engine
from tests.oracle_cases import case
from tests.outofprocess import OutOfProcess, Server, sessions_on
from tests.test_engine_batches import every_path


@pytest.fixture(scope="module", params=GROUND_TRUTH)
def served(request):
    """A bundled model's name, and a server of its folder that cannot import this package."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # in both processes: sums over more threads differ in the last bits
    with Server(BUNDLED_DIR / request.param, rename={}, hidden=["encode_address", "tests"]) as server:
        case(request.param).model.module.requires_grad_(False)  # as on the server
        server.wait()
        yield request.param, server
    torch.set_num_threads(threads)


@pytest.mark.parametrize("job_tokens", [plan.JOB_TOKENS, 500])
def test_every_path_in_sessions(served, monkeypatch, job_tokens):
    name, server = served
    monkeypatch.setattr(plan, "JOB_TOKENS", job_tokens)
    model, cells, sent = case(name).model, every_path(name), []

    def backend() -> OutOfProcess:
        sent.append(OutOfProcess(model.lm, server))
        return sent[-1]

    here, there = Engine(model, batch_tokens=600), Engine(model, batch_tokens=600)
    expected = here.run(cells)
    monkeypatch.setattr(model, "where", sessions_on(backend))
    found = there.run(cells)
    pd.testing.assert_frame_equal(expected, found, rtol=0, atol=1e-6)
    assert expected["said"].tolist() == found["said"].tolist()
    assert (there.traces, there.tokens) == (here.traces, here.tokens)
    jobs = len(there.plan(cells).jobs())
    assert len(sent) == jobs
    assert jobs > 1 if job_tokens == 500 else jobs == 1
    assert {"run_bundles", "run_step"} <= {function for function, _ in sent[0].shipped}
    assert pd.notna(found["margin"]).any()
