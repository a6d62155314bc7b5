"""A real NDIF on loopback: Redis, stand-ins for object store and hub, Ray, the API, the controller, and models.

    python -m tests.remote.stack up | down | status | run COMMAND...

By hand it stays up in the background in its own network namespace, until `down`; `run` runs a client in there. The
tests use `Stack` directly, inside `tests.remote.namespace`. State and logs are under the folder it is given.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from tests.remote import namespace
from tests.remote.install import FOLDER, ROOT, install

SERVER = Path(__file__).parent / "server"
BUNDLED = ROOT / "encode_address" / "models" / "bundled"
ORGANISATION = "encode-address"
MODELS = ("tiny-gdn", "tiny-mamba2")
TRUSTED = "11111111-1111-4111-8111-111111111111"
SANDBOXED = "22222222-2222-4222-8222-222222222222"
# Fixed: the network namespace has no other user. Ray's workers take 10002 to 19999.
PORTS = {
    "redis": 20379,
    "storage": 20900,
    "hub": 20555,
    "gcs": 20385,
    "client": 20001,
    "dashboard": 20265,
    "api": 20801,
}
URL = f"http://127.0.0.1:{PORTS['api']}"
HUB = f"http://127.0.0.1:{PORTS['hub']}"
STORAGE = f"http://127.0.0.1:{PORTS['storage']}"
MARK = "NDIF_TEST_RUN"


class StackError(Exception):
    """The server did not come up; the message ends with the tail of the log that says why."""


def hub_arguments(models=MODELS) -> list[str]:
    """What the hub stand-in is to serve: bundled models, or ORG/NAME=FOLDER as it stands."""
    return [model if "=" in model else f"{ORGANISATION}/{model}={BUNDLED / model}" for model in models]


def model_key(name: str) -> str:
    identity = {"repo_id": f"{ORGANISATION}/{name}", "revision": None, "task": "text-generation"}
    return f"nnsight.modeling.transformers.TransformersModel:{json.dumps(identity)}"


class Stack:
    """One server. `up()` returns when every model of `models` runs; `down()` leaves no process of it.

    `timeout` is the server's limit for one job in seconds. The key TRUSTED runs jobs inside the model's process, the
    key SANDBOXED in a process of their own.
    """

    def __init__(self, folder: Path, models=MODELS, timeout: float = 60.0) -> None:
        self.folder, self.models, self.timeout = Path(folder), tuple(models), timeout
        self.processes: dict[str, subprocess.Popen] = {}

    def up(self) -> None:
        """Raises StackError when a part does not start."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._start_stores()
            self._start_ray()
            self.start_api()
            self._start_controller()
            self.wait()
        except BaseException:
            self.down()
            raise

    def wait(self, patience: float = 240.0) -> None:
        """Return when every model runs. Raises StackError when a part has ended, or after `patience` seconds."""
        deadline = time.monotonic() + patience
        while not self.running():
            for part, process in self.processes.items():
                if process.poll() is not None:
                    raise StackError(f"{part} ended\n{self.tail(part)}")
            if time.monotonic() > deadline:
                raise StackError(f"the models do not run after {patience:g} s\n{self.tail('api')}")
            time.sleep(0.3)

    def down(self) -> list[int]:
        """End every process of the server. Returns those that could not be ended."""
        redis = self.processes.pop("redis", None)  # it hides its environment, and so the mark
        left = namespace.end(self.marked(), self.marked)
        if redis is not None:
            redis.terminate()
            redis.wait(10)
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1)
        self.processes.clear()
        return left

    def marked(self) -> list[int]:
        """The processes that inherited this server's mark."""
        mark = f"{MARK}={self.folder}".encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0") and int(entry.name) != os.getpid():
                    found.append(int(entry.name))
        return found

    @property
    def url(self) -> str:
        return URL

    def running(self) -> bool:
        """Whether every model answers."""
        with contextlib.suppress(OSError, ValueError):
            deployed = get(f"{URL}/status")["deployments"].values()
            up = {entry["model_key"] for entry in deployed if entry["application_state"] == "RUNNING"}
            return up >= {model_key(model) for model in self.models}
        return False

    def client(self) -> dict[str, str]:
        """The environment of a client in another process."""
        return {
            "NDIF_HOST": URL,
            "NDIF_API_KEY": TRUSTED,
            "HF_ENDPOINT": HUB,
            "HF_HOME": str(self.folder / "client"),
            "HF_HUB_DISABLE_XET": "1",
        }

    # -- faults ---------------------------------------------------------------

    def start_api(self, **environment: str) -> None:
        bind = f"127.0.0.1:{PORTS['api']}"
        config = ["--config", "python:ndif.services.api.gunicorn_conf", "--bind", bind]
        # nnsight's .save on every object makes anyio refuse large uploads.
        unmounted = self.folder / "nnsight.yaml"
        unmounted.write_text("APP: {PYMOUNT: false}\n")
        self._start("api", ["gunicorn", *config, "api:app"], NNSIGHT_CONFIG=str(unmounted), **environment)

    def kill_api(self) -> None:
        """Kill the API and its queue, as when their container dies: what was queued there is lost, running jobs go on."""
        api = self.processes.pop("api")
        for pid in [api.pid, *namespace.descendants(api.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        api.wait()

    def kill_replica(self, model: str) -> None:
        """Kill the process that holds a model; Ray starts another one."""
        os.kill(int((self.folder / f"{ORGANISATION}--{model}.pid").read_text()), signal.SIGKILL)

    def expire(self, job: str) -> None:
        """Let a job's stored result expire."""
        urllib.request.urlopen(urllib.request.Request(f"{STORAGE}/ndif-results/{job}.pt", method="DELETE")).close()

    # -- parts ----------------------------------------------------------------

    def _start_stores(self) -> None:
        port = str(PORTS["redis"])
        where = ["--dir", str(self.folder), "--save", "", "--appendonly", "no"]
        self._start("redis", ["redis-server", "--port", port, "--bind", "127.0.0.1", *where])
        self._start("storage", ["python", str(SERVER / "storage.py"), str(PORTS["storage"])])
        self._start("hub", ["python", str(SERVER / "hub.py"), str(PORTS["hub"]), *hub_arguments(self.models)])

    def _start_ray(self) -> None:
        resources = {"head": 10, "cuda_memory_bytes": 4 * 10**9, "cpu_memory_bytes": 4 * 10**9}
        options = {
            "port": PORTS["gcs"],
            "ray-client-server-port": PORTS["client"],
            "num-cpus": 4,
            "num-gpus": 1,  # ndif leaves a node without one alone
            "resources": json.dumps(resources),
            "object-store-memory": 100_000_000,
            "include-dashboard": "true",  # the controller asks it for the state of actors
            "dashboard-host": "127.0.0.1",
            "dashboard-port": PORTS["dashboard"],
            "temp-dir": self.folder / "ray",
        }
        flags = [f"--{name}={value}" for name, value in options.items()]
        self._run("ray", ["ray", "start", "--head", "--disable-usage-stats", *flags])

    def _start_controller(self) -> None:
        module = "ndif.services.ray.deployments.controller.controller"
        self._run("controller", ["python", "-m", module], RAY_ADDRESS=f"127.0.0.1:{PORTS['gcs']}")

    def _environment(self) -> dict[str, str]:
        kept = ("HOME", "LANG", "LC_ALL", "TMPDIR", "TZ")  # nothing else of the caller's: no PYTHONPATH, no keys
        return {
            **{name: os.environ[name] for name in kept if name in os.environ},
            MARK: str(self.folder),
            "PATH": f"{FOLDER / 'bin'}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "PYTHONPATH": str(SERVER),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "HF_ENDPOINT": HUB,
            "HF_HOME": str(self.folder / "server"),
            "HF_HUB_DISABLE_XET": "1",
            "NDIF_REDIS_URL": f"redis://127.0.0.1:{PORTS['redis']}",
            "NDIF_OBJECT_STORE_URL": STORAGE,
            "NDIF_RAY_ADDRESS": f"ray://127.0.0.1:{PORTS['client']}",
            "NDIF_API_URL": URL,
            "NDIF_TEST_KEYS": json.dumps({TRUSTED: ["trusted"], SANDBOXED: []}),
            "NDIF_MODEL_IMPORT_PATH": "actor.CpuModelActor",
            "NDIF_CONTROLLER_IMPORT_PATH": "actor.CpuControllerActor",
            "NDIF_DEPLOYMENTS": "|".join(model_key(model) for model in self.models),
            "NDIF_DEFAULT_DTYPE": "float32",
            "NDIF_DEFAULT_PADDING_BIAS": "1000000",
            "NDIF_DEFAULT_EXECUTION_TIMEOUT_SECONDS": str(self.timeout),
            "NDIF_MINIMUM_DEPLOYMENT_TIME_SECONDS": "0",
            "NDIF_SANDBOX_POOL_SIZE": "1",
            "NDIF_STATUS_TTL_S": "1",
            "GRPC_ENABLE_FORK_SUPPORT": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_prestart_worker_first_driver": "false",
            "RAY_memory_monitor_refresh_ms": "0",
        }

    def _start(self, name: str, command: list[str], **environment: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command,
                env={**self._environment(), **environment},
                cwd=self.folder,  # Ray's workers import from where it was started
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _run(self, name: str, command: list[str], **environment: str) -> None:
        self._start(name, command, **environment)
        if self.processes.pop(name).wait(120):
            raise StackError(f"{name} failed\n{self.tail(name)}")

    def tail(self, name: str, lines: int = 30) -> str:
        """The end of a part's log, and of what Ray's workers wrote as errors."""
        logs = [self.folder / f"{name}.log", *self.folder.glob("ray/session_latest/logs/worker-*.err")]
        texts = [(log.name, log.read_text(errors="replace").splitlines()[-lines:]) for log in logs if log.is_file()]
        return "\n".join("\n".join([f"== {name}", *text]) for name, text in texts if text)


def get(url: str, timeout: float = 10.0):
    with urllib.request.urlopen(url, timeout=timeout) as answer:
        return json.load(answer)


# -- by hand ------------------------------------------------------------------

HAND = Path(tempfile.gettempdir()) / f"encode-address-ndif-{os.getuid()}"


def _holder() -> int | None:
    """The process of the server that was started by hand."""
    with contextlib.suppress(OSError, ValueError):
        pid = int((HAND / "pid").read_text())
        if b"tests.remote.stack" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    return None


def _serve() -> None:
    stack = Stack(HAND)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    try:
        stack.up()
        (HAND / "running").touch()
        signal.pause()
    finally:
        stack.down()


def _up() -> str:
    if _holder():
        return "already up"
    install()
    shutil.rmtree(HAND, ignore_errors=True)
    HAND.mkdir()
    command = [sys.executable, "-m", "tests.remote.namespace", sys.executable, "-m", "tests.remote.stack", "serve"]
    with (HAND / "serve.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
    (HAND / "pid").write_text(str(process.pid))
    while not (HAND / "running").exists():
        if process.poll() is not None:
            sys.exit((HAND / "serve.log").read_text())
        time.sleep(0.2)
    return f"up: logs in {HAND}"


def _down() -> str:
    pid = _holder()
    if pid is None:
        return "not up"
    os.kill(pid, signal.SIGTERM)
    while _holder():
        time.sleep(0.1)
    return "down"


def _client(command: list[str]) -> None:
    pid = _holder()
    if pid is None:
        sys.exit("not up")
    namespace.join(pid)
    os.execvpe(command[0], command, {**Stack(HAND).client(), **os.environ})


def main(action: str = "", *rest: str) -> None:
    if action == "serve":
        _serve()
    elif action == "run" and rest:
        _client(list(rest))
    elif action == "status":
        _client([sys.executable, "-c", f"import urllib.request as r; print(r.urlopen('{URL}/status').read().decode())"])
    elif action in ("up", "down"):
        print(_up() if action == "up" else _down())
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(*sys.argv[1:])
