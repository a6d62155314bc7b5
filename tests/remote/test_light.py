"""The light server: it answers as a real one does, and goes wrong as told."""

import json
import urllib.error
import urllib.request

import httpx
import nnsight
import pytest
import torch
from nnsight.intervention.backends.remote import RemoteError
from nnsight.modeling.transformers import TransformersModel

import encode_address
from tests.out_of_process_cases import CASES, IDS, removes_to_zero
from tests.remote.jobs import Job
from tests.remote.sessions import FUNCTIONS, TRUSTED_ONLY, in_one_job
from tests.remote.stack import SANDBOXED, TRUSTED, get, model_key
from tests.test_out_of_process import differences

NAME = "tiny-gdn"


@pytest.fixture(scope="module")
def model():
    model = encode_address.load(NAME)
    model.module.requires_grad_(False)
    return model


@pytest.fixture
def job(light):
    yield Job(model_key(NAME), light.url, TRUSTED)
    light.faults()


def test_answers_who_asks_for_its_state(light, model, job):
    removes_to_zero(model, job)
    assert get(f"{light.url}/ping") == "pong"
    assert get(f"{light.url}/connected") == {"status": "connected"}
    (deployed,) = get(f"{light.url}/status")["deployments"].values()
    assert deployed["repo_id"] == f"encode-address/{NAME}"
    assert get(f"{light.url}/env")["packages"]["torch"] == torch.__version__.partition("+")[0] or torch.__version__


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.run.__name__)
def test_case_gives_in_a_sandbox_what_it_gives_here(light, model, case):
    here, there = case.run(model, None), case.run(model, Job(model_key(NAME), light.url, SANDBOXED))
    for one in (here, there):
        one.pop("after", None)  # a cache after a trace has used it: in a sandbox the trace was given a copy
    assert differences(here, there) == []


@pytest.mark.parametrize("key", [TRUSTED, SANDBOXED], ids=["trusted", "sandboxed"])
def test_functions_give_what_they_give_here(light, model, key):
    here = in_one_job(model, None, FUNCTIONS)
    there = in_one_job(model, Job(model_key(NAME), light.url, key), FUNCTIONS)
    assert differences(here, there) == []


@pytest.mark.parametrize(("function", "error"), TRUSTED_ONLY, ids=lambda one: getattr(one, "__name__", ""))
def test_function_that_a_sandbox_refuses(light, model, job, function, error):
    assert differences(in_one_job(model, None, [function]), in_one_job(model, job, [function])) == []
    with pytest.raises(RemoteError, match=error):
        in_one_job(model, Job(model_key(NAME), light.url, SANDBOXED), [function])


def test_plain_nnsight_client_of_a_hub_model(light, model, connect):
    """No key set by hand: nnsight asks the hub who the model is, and reads its configuration there."""
    connect(light, TRUSTED)
    there = TransformersModel(f"encode-address/{NAME}", tokenizer=model.tokenizer, task="text-generation")
    assert there.to_model_key() == model_key(NAME)
    with torch.no_grad(), there.trace(IDS, remote=True, blocking=False) as tracer:
        seen = nnsight.save({})
        seen["mixer"] = there.model.layers[0].linear_attn.output.clone()
    poller = tracer.backend
    while (answer := poller.poll()) is None:
        pass
    with torch.no_grad(), model.trace(IDS):
        here = model.layers[0].mixer.output.clone().save()
    assert torch.equal(answer["seen"]["mixer"], here)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("", "Missing or invalid API key"),
        ("abc", "Invalid API key format: 'abc'"),
        (TRUSTED[:-1] + "0", "Invalid API key."),
    ],
)
def test_refuses_keys(light, model, key, text):
    backend = Job(model_key(NAME), light.url, key)
    backend.api_key = key
    with pytest.raises(RemoteError, match=text):
        removes_to_zero(model, backend)


def test_unavailable_for_a_while(light, model, job):
    light.faults(reconnecting=2)
    for _ in range(2):
        with pytest.raises(RemoteError, match="compute backend is reconnecting") as caught:
            removes_to_zero(model, job)
        assert caught.value.__cause__.response.status_code == 503
    assert removes_to_zero(model, job)


def test_drops_connections(light, model, job):
    light.faults(dropped=1)
    with pytest.raises(RemoteError, match="disconnected"):
        removes_to_zero(model, job)
    assert removes_to_zero(model, job)


@pytest.mark.parametrize(
    ("faults", "text"),
    [
        ({"undeployable": 1}, r"^Could not deploy this model\. encode-address/tiny-gdn"),
        ({"missing": "model.model.layers.4"}, "no module at 'Module:model.model.layers.4'"),
        ({"minimum": "99.0"}, r"nnsight version 0\.8\.1 is below the minimum supported 99\.0"),
        ({"rows": 2}, r"^Your job exceeded the execution timeout of 20\.0s\.$"),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else "",
)
def test_refuses_jobs(light, model, job, faults, text):
    light.faults(**faults)
    with pytest.raises(RemoteError, match=text):
        removes_to_zero(model, job)
    light.faults()
    assert removes_to_zero(model, job)


def test_unknown_model(light, model):
    with pytest.raises(RemoteError, match=r"^Could not deploy this model\. encode-address/other: no such repository"):
        removes_to_zero(model, Job(model_key("other"), light.url, TRUSTED))


def test_error_in_a_block_comes_with_its_frame(model, job):
    with pytest.raises(RemoteError, match=r"(?s)^Traceback.*test_light\.py.*IndexError: index 9999"):  # noqa: SIM117
        with torch.no_grad(), model.trace(IDS, backend=job):
            model.layers[0].output[:, :, 9999].save()


def submitted(model, light, patience=60.0):
    """A job on its way: what it saves is the output of the first layer, as `out`."""
    backend = Job(model_key(NAME), light.url, TRUSTED, patience)
    with torch.no_grad(), model.trace(IDS, backend=backend.submit):
        out = model.layers[0].output.save()  # noqa: F841
    return backend


def first_output(model):
    with torch.no_grad(), model.trace(IDS):
        out = model.layers[0].output.save()
    return out


def test_wedged_job_holds_up_the_others_until_a_restart(light, model, job):
    light.faults(wedged=1)
    first = submitted(model, light)
    while first.status != "RUNNING":
        assert first.poll() is None
    second = submitted(model, light, patience=0.3)
    with pytest.raises(TimeoutError, match="QUEUED"):
        second.wait()
    light.restart()
    second.patience = 60
    for one in (first, second):
        assert torch.equal(one.wait()["out"], first_output(model))


def test_server_that_dies_takes_its_jobs_up_again(light, model, job):
    light.faults(dies=1)
    backend = submitted(model, light)
    light.server.process.wait(60)
    with pytest.raises(httpx.ConnectError):
        backend.poll()
    light.restart()
    assert torch.equal(backend.wait()["out"], first_output(model))


def test_result_that_has_expired(light, model, job):
    light.faults(expired=1)
    with pytest.raises(httpx.HTTPStatusError, match="404"):
        removes_to_zero(model, job)
    assert job.wait()  # it is there after all


def test_result_of_another_shape(light, model, job):
    light.faults(misshapen=1)
    assert removes_to_zero(model, job)["logits"].shape[0] == len(IDS) - 1
    assert removes_to_zero(model, job)["logits"].shape[0] == len(IDS)


def test_unknown_job_has_no_answer(light):
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(f"{light.url}/response/{'0' * 32}")


def test_refuses_faults_that_it_does_not_know(light):
    with pytest.raises(urllib.error.HTTPError, match="500"):
        urllib.request.urlopen(f"{light.url}/faults", data=json.dumps({"fire": 1}).encode(), timeout=10)
