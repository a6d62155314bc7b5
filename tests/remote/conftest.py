"""The servers of the remote tests.

`light`  the light server and the hub stand-in, one of each for a module
`ndif`   a real NDIF, one for the session (`make test-remote`)
"""

import os
from pathlib import Path

import huggingface_hub.constants
import pytest
from nnsight.modeling import huggingface
from nnsight.schema.config import CONFIG

from tests.remote import namespace
from tests.remote.light import Light
from tests.remote.stack import Stack


@pytest.fixture(scope="module")
def light(tmp_path_factory):
    server = Light(tmp_path_factory.mktemp("light"))
    yield server
    server.down()


@pytest.fixture
def connect(monkeypatch):
    """`connect(server, key)`: this process's nnsight and hub client now talk to that server."""

    def connect(server, key):
        client = server.client()
        monkeypatch.setattr(CONFIG.API, "HOST", client["NDIF_HOST"])
        monkeypatch.setattr(CONFIG.API, "APIKEY", key)
        monkeypatch.setattr(CONFIG.APP, "REMOTE_LOGGING", False)
        monkeypatch.setattr(huggingface, "_ID_CACHE", {})
        hub = huggingface_hub.constants
        endpoint, cache = client["HF_ENDPOINT"], Path(client["HF_HOME"]) / "hub"
        monkeypatch.setattr(hub, "ENDPOINT", endpoint)
        monkeypatch.setattr(hub, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(hub, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(hub, "HF_HUB_DISABLE_XET", True)

    return connect


@pytest.fixture(scope="session")
def ndif(tmp_path_factory):
    impossible = os.environ.get("TEST_REMOTE")  # set by `python -m tests.remote`: why not, or empty
    if impossible is None and not os.environ.get("CI"):
        pytest.skip("a real NDIF runs in a network of its own: use `make test-remote`")
    if impossible:
        pytest.skip(impossible)
    assert namespace.isolated(), "a real NDIF runs in a network of its own: use `make test-remote`"
    stack = Stack(tmp_path_factory.mktemp("ndif"))
    stack.up()
    yield stack
    assert stack.down() == [], "processes of the server are left"
