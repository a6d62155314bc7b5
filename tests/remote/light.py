"""Start and stop the light server (`server/light.py`) and the hub stand-in, and tell them what is to go wrong."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

from tests.remote.stack import MODELS, SANDBOXED, SERVER, TRUSTED, hub_arguments

KEYS = {TRUSTED: ["trusted"], SANDBOXED: []}
HIDDEN = ("encode_address", "tests")


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

    `faults(...)` sets what is to go wrong, and nothing else goes wrong then (see `Faults` of the server). Without
    `keys=None` a client needs the key TRUSTED, or SANDBOXED to be held to what a sandbox can do.
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
