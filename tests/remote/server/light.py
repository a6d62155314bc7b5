"""A light server of NDIF's protocol for jobs that are polled for: one process, the standard library, nnsight.

    python -I light.py PORT FOLDER HIDDEN NAME=FOLDER...

FOLDER keeps the jobs: a server that is started again on it knows them, and takes up those that had not ended. HIDDEN is
a JSON list of modules that must not be importable here. Routes, envelope, statuses, texts and results are ndif 0.1.2's.
Models load when they are first asked for. `POST /faults` with JSON sets what is to go wrong (see `Faults`).
Prints its port once it listens.
"""

from __future__ import annotations

import json
import os
import queue
import re
import sys
import threading
import time
import traceback
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import distributions
from io import BytesIO
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]
import strict  # noqa: E402
from server_process import Hidden, Unreadable, execute, load  # noqa: E402

del sys.path[:2]

import cloudpickle  # noqa: E402
import torch  # noqa: E402
import zstandard  # noqa: E402
from nnsight.intervention.serialization import UnknownPersistentIdError  # noqa: E402
from nnsight.tracing.util import clean_traceback  # noqa: E402

TEXTS = json.loads((HERE / "texts.json").read_text())


class Faults:
    """What is to go wrong, as a dictionary. Counts say how many times; they count down.

    keys        known API keys -> their tags; None: nobody is asked for one. Without the tag `trusted`, `strict` holds
    reconnecting  requests answered 503
    dropped     connections closed without an answer
    minimum     the oldest nnsight that is served, or None
    undeployable  jobs whose model cannot be deployed
    missing     a module that this server's model does not have, or None
    wedged      jobs that stay RUNNING for ever
    rows        forward rows that one job may run before its time is over, or None
    slow        seconds that every job waits before it runs
    dies        jobs at whose start the process ends itself
    expired     results that are gone
    misshapen   results whose tensors have lost a row
    """

    def __init__(self) -> None:
        switches = ("keys", "minimum", "missing", "rows")
        counts = ("reconnecting", "dropped", "undeployable", "wedged", "slow", "dies", "expired", "misshapen")
        self.start = {**dict.fromkeys(switches), **dict.fromkeys(counts, 0)}
        self.now, self.lock = self.start, threading.Lock()

    def set(self, faults: dict) -> None:
        with self.lock:
            if unknown := faults.keys() - self.start.keys():
                raise ValueError(f"no such faults: {sorted(unknown)}")
            self.now = {**self.start, **faults}

    def __getitem__(self, name: str):
        return self.now[name]

    def take(self, name: str) -> bool:
        """Whether this time is one of the counted ones."""
        with self.lock:
            left = self.now[name]
            self.now = {**self.now, name: max(0, left - 1)}
            return left > 0


class Jobs:
    """Jobs in a folder: ID.request, the latest answer ID.json, the result ID.pt."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.queue: queue.Queue[str] = queue.Queue()
        for path in sorted(folder.glob("*.request"), key=lambda path: path.stat().st_mtime):
            if not self.ended(path.stem):
                self.queue.put(path.stem)

    def add(self, envelope: dict, blob: bytes) -> dict:
        job = uuid.uuid4().hex
        self.write(f"{job}.request", cloudpickle.dumps((envelope, blob)))
        self.say(job, "QUEUED", f"Moved to position {self.queue.qsize() + 1} in Queue.")
        self.queue.put(job)
        return self.answer(job, "RECEIVED", "Your job has been received and is waiting to be queued.")

    def say(self, job: str, status: str, text: str, **more) -> None:
        self.write(f"{job}.json", json.dumps(self.answer(job, status, text, **more)).encode())

    @staticmethod
    def answer(job: str, status: str, text: str, data=None, meta=None) -> dict:
        return {"id": job, "status": status, "description": text, "data": data, "meta": meta}

    def write(self, name: str, content: bytes) -> None:
        part = self.folder / f"{name}.part"
        part.write_bytes(content)
        part.replace(self.folder / name)

    def read(self, name: str) -> bytes | None:
        path = self.folder / name
        return path.read_bytes() if path.is_file() else None

    def ended(self, job: str) -> bool:
        latest = self.read(f"{job}.json")
        return latest is not None and json.loads(latest)["status"] in ("COMPLETED", "ERROR")


class TimeIsUp(Exception):
    """The job has run more rows than the fault `rows` lets it."""


class Worker(threading.Thread):
    """Runs the jobs one by one; nnsight knows one thread."""

    def __init__(self, jobs: Jobs, faults: Faults, folders: dict[str, str], base: str) -> None:
        super().__init__(daemon=True)
        self.jobs, self.faults, self.folders, self.base = jobs, faults, folders, base
        self.models: dict[str, object] = {}
        self.rows = 0

    def run(self) -> None:
        torch.set_num_threads(1)
        while True:
            job = self.jobs.queue.get()
            started = time.monotonic()
            try:
                self.work(job)
            except Exception as error:
                meta = {"runtime": time.monotonic() - started, "max_memory_usage": 0}
                self.jobs.say(job, "ERROR", self.explain(error), meta=meta)

    def work(self, job: str) -> None:
        envelope, blob = cloudpickle.loads(self.jobs.read(f"{job}.request"))
        say, faults, started = self.jobs.say, self.faults, time.monotonic()
        model = self.model(job, envelope["model_key"])
        say(job, "DISPATCHED", "Your job has been sent to the model deployment.")
        say(job, "RUNNING", "Your job has started running.")
        if faults.take("dies"):
            os._exit(1)
        if faults.take("wedged"):
            threading.Event().wait()
        time.sleep(faults["slow"])
        self.rows = 0
        with strict.rules(apply=not envelope["trusted"]):
            saved = execute(model, envelope["env"], blob, envelope["compress"])["saved"]
        if faults.take("misshapen"):
            saved = lose_a_row(saved)
        buffer = BytesIO()
        torch.save(saved, buffer, pickle_module=cloudpickle)
        data = buffer.getvalue()
        if envelope["compress"]:
            data = zstandard.ZstdCompressor(level=3).compress(data)
        self.jobs.write(f"{job}.pt", data)
        meta = {"runtime": time.monotonic() - started, "max_memory_usage": 0}
        say(job, "COMPLETED", "Your job has been completed.", data=f"{self.base}/result/{job}", meta=meta)

    def model(self, job: str, key: str):
        repo = json.loads(key.split(":", 1)[1])["repo_id"]
        if self.faults.take("undeployable") or repo not in self.folders:
            reason = f"{repo} does not fit on any node." if repo in self.folders else f"{repo}: no such repository."
            raise Refused(f"Could not deploy this model. {reason}\nTraceback (most recent call last):\n  ...")
        if key not in self.models:
            self.jobs.say(job, "PROVISIONING", "Model Provisioning...")
            model = self.models[key] = load(self.folders[repo], {})
            model._module.register_forward_pre_hook(self.count, with_kwargs=True)
            known = model._remoteable_persistent_objects
            model._remoteable_persistent_objects = lambda: {
                name: value for name, value in known().items() if name != f"Module:{self.faults['missing']}"
            }
        return self.models[key]

    def count(self, _module, args, kwargs) -> None:
        ids = args[0] if args else kwargs.get("input_ids", kwargs.get("inputs_embeds"))
        self.rows += len(ids)
        if self.faults["rows"] is not None and self.rows > self.faults["rows"]:
            raise TimeIsUp

    @staticmethod
    def explain(error: Exception) -> str:
        if isinstance(error, Refused):
            return str(error)
        if isinstance(error, Unreadable):
            cause = error.__cause__
            if isinstance(cause, UnknownPersistentIdError):
                return TEXTS["architecture"].format(path=cause)
            return TEXTS["payload"].format(type=type(cause).__name__, cause=cause)
        if isinstance(error, TimeIsUp):
            return TEXTS["timeout"].format(seconds=20.0)
        return "".join(traceback.format_exception(type(error), error, clean_traceback(error.__traceback__)))


class Refused(Exception):
    """The server does not run this job, and says so in one sentence."""


def lose_a_row(value):
    if isinstance(value, torch.Tensor):
        return value[1:] if value.ndim else value
    if isinstance(value, dict):
        return {key: lose_a_row(one) for key, one in value.items()}
    return type(value)(lose_a_row(one) for one in value) if isinstance(value, (list, tuple)) else value


class Api(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    jobs: Jobs
    faults: Faults
    worker: Worker

    def log_message(self, *_) -> None:
        pass

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path != "/faults" and self.faults.take("dropped"):
            self.close_connection = True
            return
        try:
            answer = self.route(body)
        except Status as status:
            self.reply(status.code, json.dumps({"detail": status.detail}).encode())
        except Exception:
            traceback.print_exc()
            self.reply(500, json.dumps({"detail": "Internal server error."}).encode())
        else:
            self.reply(200, answer if isinstance(answer, bytes) else json.dumps(answer).encode())

    do_POST = do_HEAD = do_GET

    def route(self, body: bytes):
        kind, _, job = self.path.strip("/").partition("/")
        if kind in ("request", "status", "env", "connected") and self.faults.take("reconnecting"):
            raise Status(503, TEXTS["reconnecting"])
        if kind == "ping":
            return "pong"
        if kind == "faults":
            return self.faults.set(json.loads(body))
        if kind == "connected":
            return {"status": "connected"}
        if kind == "status":
            return {"deployments": {f"0:ModelActor:{key}": deployment(key) for key in self.worker.models}}
        if kind == "env":
            return {"python_version": sys.version, "packages": {d.metadata["Name"]: d.version for d in distributions()}}
        if kind == "whoami":
            tags = (self.faults["keys"] or {}).get(self.headers.get("ndif-api-key"), [])
            return {"email": None, "tags": tags}
        if kind == "request":
            return self.submit(body)
        if kind == "response" and (latest := self.jobs.read(f"{job}.json")) is not None:
            return latest
        if kind == "result" and not self.faults.take("expired") and (data := self.jobs.read(f"{job}.pt")) is not None:
            return data
        raise Status(404, f"No response for request {job}." if kind == "response" else "Not Found")

    def submit(self, body: bytes) -> dict:
        trusted = self.authorise()
        parts = multipart(self.headers["Content-Type"], body)
        minimum, version = self.faults["minimum"], self.headers.get("nnsight-version", "")
        if minimum and numbers(version) < numbers(minimum):
            raise Status(400, TEXTS["version"].format(version=version, minimum=minimum))
        return self.jobs.add({**json.loads(parts["data"]), "trusted": trusted}, parts["blob"])

    def authorise(self) -> bool:
        keys, key = self.faults["keys"], self.headers.get("ndif-api-key")
        if keys is None:
            return True
        if not key:
            raise Status(401, TEXTS["missing key"])
        try:
            uuid.UUID(key)
        except ValueError:
            raise Status(400, TEXTS["malformed key"].format(key=key)) from None
        if key not in keys:
            raise Status(403, TEXTS["unknown key"])
        return "trusted" in keys[key]

    def reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class Status(Exception):
    """An HTTP answer other than 200."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(detail)
        self.code, self.detail = code, detail


def deployment(key: str) -> dict:
    identity = json.loads(key.split(":", 1)[1])
    return {
        "application_state": "RUNNING",
        "deployment_level": "HOT",
        "model_key": key,
        "repo_id": identity["repo_id"],
        "task": identity.get("task"),
        "revision": identity.get("revision"),
        "trusted": False,
        "dtype": "float32",
    }


def multipart(content_type: str, body: bytes) -> dict[str, bytes]:
    """The parts of a form by name."""
    boundary = b"--" + re.search(r"boundary=\"?([^\";]+)", content_type)[1].encode()
    parts = {}
    for part in body.split(boundary)[1:-1]:
        head, _, content = part.removeprefix(b"\r\n").partition(b"\r\n\r\n")
        parts[re.search(rb'name="([^"]+)"', head)[1].decode()] = content.removesuffix(b"\r\n")
    return parts


def numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


def main(port: str, folder: str, hidden: str, *models: str) -> None:
    sys.meta_path.insert(0, Hidden(json.loads(hidden)))
    Api.jobs, Api.faults = Jobs(Path(folder)), Faults()
    server = ThreadingHTTPServer(("127.0.0.1", int(port)), Api)
    base = f"http://127.0.0.1:{server.server_address[1]}"
    Api.worker = Worker(Api.jobs, Api.faults, dict(model.split("=", 1) for model in models), base)
    Api.worker.start()
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
