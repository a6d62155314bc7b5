"""The client against the light server: what goes wrong is one line that says what to do, and nothing is lost or paid twice."""

import json

import nnsight
import pandas as pd
import pytest
import torch

import encode_address
from encode_address.errors import JobTimeout, ModelError, ServerError
from encode_address.remote import client
from encode_address.run.engine import Engine
from encode_address.run.store import Store
from tests.oracle_cases import case
from tests.remote.stack import SANDBOXED, TRUSTED
from tests.test_engine_batches import every_path

NAME, IDS = "tiny-gdn", torch.arange(12)[None] + 5


@pytest.fixture
def there(light, connect, monkeypatch):
    """A bundled model on the light server."""
    connect(light, TRUSTED)
    monkeypatch.setattr(client, "FIRST", 0.6)
    monkeypatch.setattr(client, "LATER", 0.6)
    yield encode_address.load(NAME, remote=True, deadline=60)
    light.faults()


def first_output(model, ids):
    with torch.no_grad(), model.trace(ids) as tracer:
        seen = nnsight.save({"out": model.layers[0].output.clone(), "logits": tracer.result.logits.clone()})
    return seen


def reads_beyond(model, ids):
    with torch.no_grad(), model.trace(ids):
        seen = model.layers[0].output[:, 9999].save()
    return seen


def needs_a_module(model, ids):
    import a_module_of_mine

    return a_module_of_mine.read(model, ids)


def what_is_said(ask, *arguments) -> str:
    """The error of a question: one line."""
    with pytest.raises(ServerError) as caught:
        ask(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -- what goes right ---------------------------------------------------------------------------
@pytest.mark.parametrize("key", [TRUSTED, SANDBOXED], ids=["trusted", "sandboxed"])
def test_cells_give_what_they_give_here(light, connect, there, key):
    connect(light, key)
    here, cells = case(NAME).model, every_path(NAME)
    here.module.requires_grad_(False)  # as on the server: other kernels run with it
    local, remote = Engine(here, batch_tokens=600), Engine(there, batch_tokens=600)
    expected, found = local.run(cells), remote.run(cells)
    own = ["key", "fingerprint", "where"]
    pd.testing.assert_frame_equal(expected.drop(columns=own), found.drop(columns=own), rtol=0, atol=1e-6)
    assert set(found["where"]) == {light.url.partition("://")[2]}
    assert there.where.jobs == len(remote.plan(cells).jobs()) == 1
    assert 0 < there.where.up < 200_000
    assert 0 < there.where.down < 200_000


def test_a_plan_says_what_is_sent(there):
    plan = Engine(there, batch_tokens=600).plan(every_path(NAME))
    assert "on a server 1 jobs, " in str(plan)
    assert Engine(case(NAME).model, batch_tokens=600).plan(every_path(NAME)).wire is None


def test_large_results_come_too(there):
    ids = torch.randint(5, 60, (64, 120), generator=torch.Generator().manual_seed(0))
    seen = there.ask(first_output, ids)
    assert there.where.down > 8 << 20
    assert torch.allclose(seen["logits"], case(NAME).model.ask(first_output, ids)["logits"], atol=1e-5)


# -- what is given wrongly -----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((NAME, {"device": "cpu"}), "leave out device"),
        (("tiny-gdn-untrained", {}), "not on a server"),
        (("/", {}), "not on a server"),
        ((NAME, {"deadline": -1.0}), "seconds above 0"),
    ],
    ids=["device", "untrained", "folder", "deadline"],
)
def test_what_no_server_has_is_refused(given, says):
    with pytest.raises(ModelError, match=says):
        encode_address.load(given[0], remote=True, **given[1])


def test_a_model_that_the_hub_does_not_have(light, connect):
    connect(light, TRUSTED)
    with pytest.raises(ModelError, match="unknown model 'encode-address/none'"):
        encode_address.load("encode-address/none", remote=True)


@pytest.mark.parametrize(
    ("key", "says"),
    [
        (None, "wants an API key: set NDIF_API_KEY"),
        ("secret-words", "NDIF_API_KEY is not an API key"),
        (TRUSTED[:-1] + "0", "does not know this API key"),
    ],
    ids=["none", "malformed", "unknown"],
)
def test_keys(light, connect, there, key, says):
    connect(light, key)
    said = what_is_said(there.ask, first_output, IDS)
    assert says in said
    assert key is None or key not in said


# -- what goes wrong over there --------------------------------------------------------------------
@pytest.mark.parametrize(
    ("faults", "says"),
    [
        ({"undeployable": 1}, "cannot serve this model: encode-address/tiny-gdn does not fit on any node"),
        ({"missing": "model.model.layers.4"}, "has no module model.model.layers.4, so its packages differ"),
        ({"minimum": "99.0"}, "serves nnsight 99.0 or newer, and this is 0.8"),
        ({"reconnecting": 99}, "cannot be reached (Service temporarily unavailable"),
        ({"misshapen": 1}, "has another shape than what was computed there"),
        ({"expired": 99}, "has lost the result of job"),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else "",
)
def test_faults_are_told_in_one_line(light, there, faults, says):
    light.faults(**faults)
    assert says in what_is_said(there.ask, first_output, IDS)
    light.faults()
    assert there.ask(first_output, IDS)["out"].shape[:2] == IDS.shape


def test_what_passes_is_tried_again(light, there):
    light.faults(reconnecting=1)
    assert there.ask(first_output, IDS)
    light.faults(dropped=1)
    assert there.ask(first_output, IDS)
    light.faults(expired=1)
    lost = []
    there.where.warn = lost.append
    assert there.ask(first_output, IDS)
    assert len(lost) == 1
    assert there.where.jobs == 4


def test_an_error_inside_says_what_and_where(there):
    with pytest.raises(ServerError) as caught:
        there.ask(reads_beyond, IDS)
    said = str(caught.value)
    assert "IndexError: index 9999" in said
    assert "in reads_beyond (test_client.py:" in said
    assert "Traceback" in str(caught.value.__cause__)


def test_a_module_that_is_not_there(there):
    assert "No module named 'a_module_of_mine'" in what_is_said(there.ask, needs_a_module, IDS)


def test_server_down_before_and_during_a_job(light, there, tmp_path):
    there.where.notes = tmp_path / "jobs.json"
    light.stop()
    assert "cannot be reached" in what_is_said(there.ask, first_output, IDS)
    light.restart()
    light.faults(dies=1)
    assert "cannot be reached" in what_is_said(there.ask, first_output, IDS)
    light.restart()
    assert there.ask(first_output, IDS)["out"].shape[:2] == IDS.shape
    assert there.where.jobs == 1  # the job that was sent before it died was waited for again


def test_a_wedged_job_ends_at_the_deadline_and_is_waited_for_again(light, connect, there, tmp_path):
    light.faults(wedged=1)
    there.where.notes, there.where.deadline = tmp_path / "jobs.json", 1.0
    said = what_is_said(there.ask, first_output, IDS)
    assert "still RUNNING after 1 s" in said
    (entry,) = json.loads((tmp_path / "jobs.json").read_text()).values()
    assert entry["id"] in said
    light.restart()
    again = encode_address.load(NAME, remote=True, deadline=60)  # as another process would
    again.where.notes = tmp_path / "jobs.json"
    assert again.ask(first_output, IDS)["out"].shape[:2] == IDS.shape
    assert again.where.jobs == 0


def test_a_job_that_takes_too_long_is_split_once(light, there):
    cells = every_path(NAME)
    whole = Engine(there, batch_tokens=600).run(cells)
    told = []
    light.faults(rows=60)
    split = Engine(there, batch_tokens=600, warn=told.append).run(cells)
    assert len(told) == 1
    assert "took too long" in told[0]
    pd.testing.assert_frame_equal(whole, split, rtol=0, atol=1e-4)
    light.faults(rows=1)
    with pytest.raises(JobTimeout, match=r"longer than the 20 s"):
        Engine(there, batch_tokens=600, warn=told.append).run(cells[:3])


def test_a_store_keeps_what_was_finished(light, there, tmp_path):
    cells = every_path(NAME)
    with Store(tmp_path) as store:
        Engine(there, batch_tokens=600).run(cells[:5], store)
        light.faults(undeployable=99)
        with pytest.raises(ServerError):
            Engine(there, batch_tokens=600).run(cells, store)
        light.faults()
        before = there.where.jobs
        assert len(Engine(there, batch_tokens=600).run(cells, store)) == len(cells)
        assert there.where.jobs == before + 1
