"""The grid, the probe's residuals and lens readings of a model in another process are those that it has here, in one job each."""

from __future__ import annotations

import pandas as pd
import pytest
import torch

import encode_address as ea
from encode_address.errors import ModelError
from encode_address.gathering.rows import grid_readings
from encode_address.gathering.sites import sites_of
from encode_address.gathering.traced import final_residuals
from encode_address.lens import Lens, fit, logit_lens, read
from encode_address.models.loading import BUNDLED_DIR, GROUND_TRUTH
from encode_address.remote import session
from encode_address.run.engine import Engine
from encode_address.tasks.arms import arms
from tests.outofprocess import OutOfProcess, Server


class Kept:
    """A lens that is there already."""

    def __init__(self, lens: Lens) -> None:
        self.lens, self.settings = lens, (lens.kind,)

    def __call__(self) -> Lens:
        return self.lens


def measured(model):
    """Rows of the grid under donors and a random direction at some layers, residuals, and a reading of padded prompts."""
    task, lens = arms(model, "chat8"), logit_lens(model)
    rows = []
    for donor in ("donor", "random"):
        some = [site for site in sites_of(model) if site.layer in (4, 5, 7)]
        for reading in grid_readings(model, task, task.pairs(2), "flexible", some, donor, Kept(lens), {}):
            rows.append(pd.DataFrame(reading.read(Engine(model, batch_tokens=100), reading.prompts)))
    prompts = [record.prompt.ids for record in task.instances(1)[0].records.values()]
    residuals = model.ask(final_residuals, [torch.tensor(prompts)], [1, 6])
    seen = read(model, lens, [prompts[0], prompts[1][5:]], (2, 7))
    return pd.concat(rows, ignore_index=True), residuals, seen


@pytest.mark.parametrize("name", GROUND_TRUTH)
def test_what_is_read_elsewhere_is_what_is_read_here(name, monkeypatch):
    model, sent = ea.load(name), []
    model.module.requires_grad_(False)  # as on the server
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # in both processes: sums over more threads differ in the last bits
    try:
        with Server(BUNDLED_DIR / name, rename={}, hidden=["encode_address", "tests"]) as server:
            server.wait()
            expected = measured(model)

            def backend() -> OutOfProcess:
                sent.append(OutOfProcess(model.lm, server))
                return sent[-1]

            monkeypatch.setattr(model, "where", session.on(backend))
            found = measured(model)
    finally:
        torch.set_num_threads(threads)
    pd.testing.assert_frame_equal(expected[0], found[0], rtol=0, atol=1e-5)
    assert (expected[0].loc[expected[0]["part"] == "grid", "site"] == "state").any()
    assert torch.equal(expected[1], found[1])
    assert all(torch.equal(expected[2].logits[i], found[2].logits[i]) for i in (2, 7))
    assert torch.equal(expected[2].own, found[2].own)
    assert len(sent) == 6  # forward sites and states under two donors, residuals, one reading
    with pytest.raises(ModelError, match=f"{name} runs elsewhere, and a lens is fitted where gradients are"):
        fit(model, [list(range(4, 30))], skip=4)
