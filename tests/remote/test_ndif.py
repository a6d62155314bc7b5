"""A real NDIF: what a plain nnsight client gets from it, trusted and sandboxed, and how it fails.

The light server is held to what is found here.
"""

import time

import httpx
import nnsight
import pytest
import torch
from nnsight.intervention.backends.remote import RemoteError
from nnsight.modeling.transformers import TransformersModel

import encode_address
from encode_address.models.loading import GROUND_TRUTH
from tests.out_of_process_cases import CASES, IDS, removes_to_zero
from tests.remote.jobs import Job
from tests.remote.sessions import FUNCTIONS, TRUSTED_ONLY, in_one_job
from tests.remote.stack import SANDBOXED, TRUSTED, get, model_key
from tests.test_out_of_process import differences

pytestmark = pytest.mark.ndif
KEYS = pytest.mark.parametrize("key", [TRUSTED, SANDBOXED], ids=["trusted", "sandboxed"])
NAME = "tiny-gdn"


def bundled(name):
    model = encode_address.load(name)
    model.module.requires_grad_(False)  # as on the server: torch multiplies by other kernels for a parameter
    return model


@pytest.fixture(scope="module", params=GROUND_TRUTH)
def model(request):
    return bundled(request.param)


@pytest.fixture(scope="module")
def gdn():
    return bundled(NAME)


@KEYS
def test_functions_give_what_they_give_here(ndif, model, key):
    here = in_one_job(model, None, FUNCTIONS)
    there = in_one_job(model, Job(model_key(model.name), ndif.url, key), FUNCTIONS)
    assert differences(here, there) == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.run.__name__)
def test_case_gives_what_it_gives_here(ndif, model, case):
    assert differences(case.run(model, None), case.run(model, Job(model_key(model.name), ndif.url, TRUSTED))) == []


@pytest.mark.ndif_full
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.run.__name__)
def test_case_gives_in_a_sandbox_what_it_gives_here(ndif, model, case):
    here, there = case.run(model, None), case.run(model, Job(model_key(model.name), ndif.url, SANDBOXED))
    for one in (here, there):
        one.pop("after", None)  # a cache after a trace has used it: in a sandbox the trace was given a copy
    assert differences(here, there) == []


@pytest.mark.parametrize(("function", "error"), TRUSTED_ONLY, ids=lambda one: getattr(one, "__name__", ""))
def test_function_that_a_sandbox_refuses(ndif, gdn, function, error):
    trusted, sandboxed = (Job(model_key(NAME), ndif.url, key) for key in (TRUSTED, SANDBOXED))
    assert differences(in_one_job(gdn, None, [function]), in_one_job(gdn, trusted, [function])) == []
    with pytest.raises(RemoteError, match=error):
        in_one_job(gdn, sandboxed, [function])


def test_plain_nnsight_client_of_a_hub_model(ndif, gdn, connect):
    connect(ndif, TRUSTED)
    there = TransformersModel(f"encode-address/{NAME}", tokenizer=gdn.tokenizer, task="text-generation")
    assert there.to_model_key() == model_key(NAME)
    with torch.no_grad(), there.trace(IDS, backend=Job(there.to_model_key(), ndif.url, TRUSTED)):
        mixer = there.model.layers[0].linear_attn.output.clone().save()
    with torch.no_grad(), gdn.trace(IDS):
        here = gdn.layers[0].mixer.output.clone().save()
    assert torch.equal(mixer, here)


def test_server_has_the_clients_versions_and_not_the_package(ndif, gdn):
    packages = get(f"{ndif.url}/env")["packages"]
    assert packages["torch"] == torch.__version__
    assert packages["nnsight"] == nnsight.__version__
    with pytest.raises(RemoteError, match="No module named 'encode_address'"):
        in_one_job(gdn, Job(model_key(NAME), ndif.url, TRUSTED), [imports_the_package])


def imports_the_package(model, ids):
    return __import__("encode_address").__name__


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("", "Missing or invalid API key"),
        ("abc", "Invalid API key format: 'abc'"),
        (TRUSTED[:-1] + "0", "Invalid API key."),
    ],
)
def test_refuses_keys(ndif, gdn, key, text):
    backend = Job(model_key(NAME), ndif.url, TRUSTED)
    backend.api_key = key
    with pytest.raises(RemoteError, match=text):
        removes_to_zero(gdn, backend)


@KEYS
def test_error_in_a_block_comes_with_its_frame(ndif, gdn, key):
    with pytest.raises(RemoteError, match=r"(?s)^Traceback.*test_ndif\.py.*IndexError: index 9999"):  # noqa: SIM117
        with torch.no_grad(), gdn.trace(IDS, backend=Job(model_key(NAME), ndif.url, key)):
            gdn.layers[0].output[:, :, 9999].save()


def test_model_that_cannot_be_deployed(ndif, gdn):
    with pytest.raises(RemoteError, match=r"^Could not deploy this model\."):
        removes_to_zero(gdn, Job(model_key("nowhere"), ndif.url, TRUSTED))


def test_module_that_the_server_does_not_have(ndif):
    """The tree of one model, sent to another."""
    with pytest.raises(RemoteError, match="architecture on this server doesn't match"):
        removes_to_zero(bundled("tiny-mamba2"), Job(model_key(NAME), ndif.url, TRUSTED))


def test_result_that_has_expired(ndif, gdn):
    backend = Job(model_key(NAME), ndif.url, TRUSTED)
    removes_to_zero(gdn, backend)
    ndif.expire(backend.job_id)
    with pytest.raises(httpx.HTTPStatusError, match="404"):
        backend.poll()


# -- faults ------------------------------------------------------------------
def slow(model, ids, seconds):
    time.sleep(seconds)
    with torch.no_grad(), model.trace(ids, logits_to_keep=1) as tracer:
        logits = tracer.result.logits[:, -1].clone()
    return logits


def running(model, ndif, key, seconds):
    """A job that has started and takes some seconds."""
    backend = Job(model_key(NAME), ndif.url, key, patience=120.0)
    with model.lm.session(backend=backend.submit):
        out = nnsight.save(slow(model, IDS, seconds))  # noqa: F841
    until = time.monotonic() + backend.patience
    while backend.status != "RUNNING" and time.monotonic() < until:
        assert backend.poll() is None
    return backend


@KEYS
def test_job_outlives_the_api(ndif, gdn, key):
    backend = running(gdn, ndif, key, 5)
    ndif.kill_api()
    try:
        with pytest.raises(httpx.TransportError):
            backend.poll()
    finally:
        ndif.start_api()
        ndif.wait()
    assert torch.equal(backend.wait()["out"], in_one_job(gdn, None, [whole])[0])


@KEYS
def test_job_dies_with_its_replica_and_the_next_one_runs(ndif, gdn, key):
    backend = running(gdn, ndif, key, 60)
    ndif.kill_replica(NAME)
    with pytest.raises(RemoteError, match="Please try again later"):
        backend.wait()
    backend = Job(model_key(NAME), ndif.url, key, patience=120.0)
    assert torch.equal(in_one_job(gdn, backend, [whole])[0], in_one_job(gdn, None, [whole])[0])


def whole(model, ids):
    return slow(model, ids, 0)


@pytest.mark.ndif_full
def test_time_is_up(ndif, gdn):
    """A sandboxed job that times out leaves its replica wedged; killing that one brings the model back."""
    with pytest.raises(RemoteError, match=rf"^Your job exceeded the execution timeout of {ndif.timeout}s\.$"):
        running(gdn, ndif, TRUSTED, ndif.timeout + 30).wait()
    assert in_one_job(gdn, Job(model_key(NAME), ndif.url, TRUSTED), [whole])
    with pytest.raises(RemoteError, match="exceeded the execution timeout"):
        running(gdn, ndif, SANDBOXED, ndif.timeout + 30).wait()
    with pytest.raises(TimeoutError, match="RUNNING"):
        in_one_job(gdn, Job(model_key(NAME), ndif.url, TRUSTED, patience=20.0), [whole])
    ndif.kill_replica(NAME)
    assert in_one_job(gdn, Job(model_key(NAME), ndif.url, TRUSTED, patience=120.0), [whole])


@pytest.mark.ndif_full
def test_client_that_is_too_old(ndif, gdn):
    ndif.kill_api()
    ndif.start_api(NDIF_MIN_NNSIGHT_VERSION="99.0")
    ndif.wait()
    with pytest.raises(RemoteError, match=r"nnsight version 0\.8\.1 is below the minimum supported 99\.0"):
        removes_to_zero(gdn, Job(model_key(NAME), ndif.url, TRUSTED))
    ndif.kill_api()
    ndif.start_api()
    ndif.wait()
