"""Start and stop the light server (`server/light.py`) and the hub stand-in, and tell them what is to go wrong.

In a test: the fixture `light` is a `Light`, `connect(light, key)` points this process's nnsight and hub client at it, and
`light.client()` is the environment of a client in another process. `light.faults(...)` sets what goes wrong from then on,
by name, and nothing else does (`light.faults()`: nothing). A count says how many times; it counts down.

    keys          known API keys -> their tags (TRUSTED and SANDBOXED, unless given); None: nobody is asked for one (a client
                  without a key gets 401, one whose key is no UUID 400, an unknown key 403)
    reconnecting  count of requests answered 503 "compute backend is reconnecting" (`response`, `result`, `ping` go on)
    dropped       count of connections that are closed without an answer
    minimum       the oldest nnsight that is served: an older client gets 400
    undeployable  count of jobs whose model cannot be deployed (a model that the server has not got never can)
    missing       a module path, e.g. "model.model.layers.4", that this server's model does not have
    rows          forward rows that one job may run before its execution time is over
    slow          seconds that every job waits before it runs
    wedged        count of jobs that stay RUNNING, with all that come after them, until `restart`
    dies          count of jobs at whose start the server's process ends: RUNNING is the last that was said of them
    forgotten     count of questions after a job that are answered 404, as for a job nobody knows
    expired       count of results that are gone (404)
    denied        count of results whose address is too old (403)
    misshapen     count of results whose tensors have lost a row

Without a fault: a job that needs a module of HIDDEN that it does not bring cannot be read (ModuleNotFoundError), an error
in a job comes as its traceback, and every result comes by address, of whatever size. `stop`, `restart` and `down` do what
they say to the server; its jobs are on disk and outlive it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

from tests.remote.stack import MODELS, SANDBOXED, SERVER, TRUSTED, hub_arguments

KEYS = {TRUSTED: ["trusted"], SANDBOXED: []}
HIDDEN = ("encode_address", "tests", "execnet")  # what no server has; the last is installed here


class Script:
    """One of the server's scripts as a process that prints its port once it listens."""

    def __init__(self, name: str, port: int, *arguments: str) -> None:
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by end)
        # -I: no PYTHONPATH, no user site and no script folder, so the tests cannot be imported from there.
        command = [sys.executable, "-I", str(SERVER / name), str(port), *arguments]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self.errors, stdin=subprocess.DEVNULL, cwd=tempfile.gettempdir()
        )
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self.errors.seek(0)
            raise RuntimeError(f"{name} did not start: {self.errors.read().decode(errors='replace')[-2000:]}")
        self.port = int(line)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.errors.close()


class Light:
    """A light server of the bundled models (or of ORG/NAME=FOLDER), its jobs kept in `folder`, and a hub that has them.

    A client needs the key TRUSTED, or SANDBOXED to be held to what a sandbox can do.
    """

    def __init__(self, folder: Path, models=MODELS) -> None:
        self.folder, self.models = Path(folder), hub_arguments(models)
        self.hub = Script("hub.py", 0, *self.models)
        self.server = None
        self.start(0)

    def start(self, port: int) -> None:
        jobs = str(self.folder / "jobs")
        self.server = Script("light.py", port, jobs, json.dumps(HIDDEN), *self.models)
        self.url, self.hub_url = f"http://127.0.0.1:{self.server.port}", f"http://127.0.0.1:{self.hub.port}"
        self.faults()

    def stop(self) -> None:
        """As when the server's machine goes down: what was running is not finished."""
        self.server.end()

    def restart(self) -> None:
        """A new server at the same address, which knows the jobs of the old one and takes up the unfinished ones."""
        self.stop()
        self.start(self.server.port)

    def down(self) -> None:
        self.server.end()
        self.hub.end()

    def faults(self, **faults) -> None:
        body = json.dumps({"keys": KEYS, **faults}).encode()
        urllib.request.urlopen(f"{self.url}/faults", data=body, timeout=30).close()

    def client(self) -> dict[str, str]:
        """The environment of a client in another process."""
        return {
            "NDIF_HOST": self.url,
            "NDIF_API_KEY": TRUSTED,
            "HF_ENDPOINT": self.hub_url,
            "HF_HOME": str(self.folder / "client"),
            "HF_HUB_DISABLE_XET": "1",
        }
