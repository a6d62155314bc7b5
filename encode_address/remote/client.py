"""Functions run on an NDIF server: each is one non-blocking job, whose id is kept before it is waited for.

What is asked is an nnsight session; nnsight captures and serialises it. Sending it, waiting for it and reading the answer are done
here, because every wait needs an end, and what comes back is read as plain data only.
"""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import nnsight
import torch
import zstandard
from nnsight.ndif import pull_env
from nnsight.schema.config import CONFIG
from nnsight.schema.request import RequestModel
from nnsight.tracing.backend import Backend

from encode_address.errors import ServerError
from encode_address.remote import answers
from encode_address.remote.digest import digest_of, shape_of
from encode_address.run.store import write_text

DEADLINE = 1800.0  # seconds that one job may take, its time in the queue included
FIRST, LATER = 5.0, 60.0  # seconds that a server may be out of reach: before it has answered once, and after that
POLLS = 0.05, 5.0  # seconds between two questions: at first, and at most
KEPT = 24 * 3600  # seconds that a job's id is kept; its result is gone long before


class Expired(Exception):
    """The server does not have that job, or its result, any more."""


class Capture(Backend):
    """Keeps a session's payload instead of running it."""

    payload: bytes

    def __call__(self, tracer: Any) -> None:
        pull_env()  # modules of the user's own travel by value too
        self.payload = RequestModel.serialize(tracer, compress=True)


@dataclass
class Client:
    """Runs functions of a model on the NDIF server that nnsight is set to (`NDIF_HOST`, `NDIF_API_KEY`); see `HybridModel.where`.

    `deadline`: seconds that one job may take. `notes`: a file that keeps the ids of jobs (None: nowhere); a client that finds a job
    there for what it would ask waits for that one. `warn` and `told` are called with a line that the user should see, and with
    what the server says of a job under way. `jobs`, `up` and `down` count what was sent, in jobs and bytes.

    Raises ServerError, or JobTimeout where the server ended a job that took too long.
    """

    deadline: float = DEADLINE
    notes: Path | None = None
    warn: Callable[[str], Any] = lambda line: print(f"warning: {line}", file=sys.stderr)
    told: Callable[[str], Any] = lambda line: None
    jobs: int = 0
    up: int = 0
    down: int = 0
    _answered: bool = field(default=False, repr=False)

    @property
    def host(self) -> str:
        return CONFIG.API.HOST.rstrip("/")

    def __call__(self, model: Any, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        key = model.lm.to_model_key()
        digest = digest_of(self.host, key, function, arguments)
        job, until = self._noted().get(digest, {}).get("id"), time.monotonic() + self.deadline
        for attempt in (1, 2):
            try:
                job = job or self._submit(model, key, function, arguments, digest, until)
                return self._result(job, until)
            except Expired:
                if attempt == 2:
                    raise ServerError(
                        f"{self.host} has lost the result of job {job} twice (results are kept for about an hour): "
                        "the same command asks for it again"
                    ) from None
                self.warn(f"{self.host} has no result of job {job} any more; it is asked for again")
                self._note(digest, None)
                job = None

    # -- one job -------------------------------------------------------------------
    def _submit(self, model, key, function, arguments, digest, until) -> str:
        capture = Capture()
        with model.lm.session(backend=capture):
            result = nnsight.save(function(model, *arguments))
            shape = nnsight.save(shape_of(result))  # noqa: F841
        request = RequestModel(model_key=key, compress=True, env=model.lm._remoteable_get_env())
        reply = self.http("POST", "/request", until, data={"data": request.metadata()}, files={"blob": capture.payload})
        job = reply.json()["id"]
        self._note(digest, job)
        self.jobs, self.up = self.jobs + 1, self.up + len(capture.payload)
        return job

    def _result(self, job: str, until: float) -> Any:
        """Wait for a job and read what it gave. Raises Expired where the server does not know it."""
        pause, longest = POLLS
        while True:
            reply = self.http("GET", f"/response/{job}", until, missing=True)
            if reply is None:
                raise Expired
            said = reply.json()
            status = said["status"]
            if status == "ERROR":
                raise answers.error(said["description"], self.host)
            if status == "COMPLETED":
                return self._read(job, said["data"], until)
            self.told(f"job {status.lower()}")
            left = until - time.monotonic()
            if left <= 0:
                raise ServerError(
                    f"job {job} on {self.host} is still {status} after {self.deadline:g} s: the same command waits for it further "
                    "(--deadline sets how long); if it never ends, its replica is stuck and the server's operators can restart it"
                )
            time.sleep(min(pause, left))
            pause = min(longest, pause * 1.3)

    def _read(self, job: str, url: str, until: float) -> Any:
        reply = self.http("GET", url, until, missing=True)
        if reply is None:
            raise Expired
        self.down += len(reply.content)
        try:
            content = zstandard.ZstdDecompressor().decompressobj().decompress(reply.content)
            # Tensors, numbers, text and their containers: whatever a server sends, nothing of it is run here.
            saved = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            result, shape = saved["result"], saved["shape"]
        except Exception as error:
            raise ServerError(
                f"the result of job {job} on {self.host} cannot be read: {answers.first(error)}"
            ) from error
        if shape_of(result) != shape:
            raise ServerError(
                f"the result of job {job} on {self.host} has another shape than what was computed there: nothing of it was "
                "used; see encode-address remote status for versions, and run the same command again"
            )
        return result

    # -- the wire ------------------------------------------------------------------
    def http(self, method: str, path: str, until: float, missing: bool = False, **sent: Any) -> httpx.Response | None:
        """One request, again and again while the server cannot be reached. `missing`: None where it has no such thing."""
        url = path if path.startswith(("http://", "https://")) else f"{self.host}{path}"
        own = url.startswith(f"{self.host}/")  # a result may lie elsewhere; the key is not for there
        started, pause = time.monotonic(), 0.25
        while True:
            left = max(1.0, until - time.monotonic())
            try:
                timeout = httpx.Timeout(min(10.0, left), read=min(600.0, left), write=min(600.0, left))
                reply = httpx.request(method, url, headers=self._headers() if own else None, timeout=timeout, **sent)
                why = "" if reply.status_code not in (429, 502, 503, 504) else answers.detail(reply)
            except httpx.UnsupportedProtocol as error:
                raise ServerError(f"NDIF_HOST is {self.host!r}: it must start with http:// or https://") from error
            except httpx.TransportError as error:
                reply, why = None, answers.first(error)
            if not why:
                self._answered = True
                if missing and reply.status_code in (403, 404, 410):
                    return None
                if reply.is_error:
                    raise answers.refusal(reply, self.host)
                return reply
            patience = LATER if self._answered else FIRST
            if min(until, started + patience) < time.monotonic() + pause:
                raise answers.unreachable(self.host, why)
            self.told(f"{self.host} cannot be reached ({why}), trying again")
            time.sleep(pause)
            pause = min(8.0, 2 * pause)

    def _headers(self) -> dict[str, str]:
        known = {
            "ndif-timestamp": repr(time.time()),
            "nnsight-version": version("nnsight"),
            "python-version": sys.version,
        }
        return known | ({"ndif-api-key": CONFIG.API.APIKEY} if CONFIG.API.APIKEY else {})

    # -- notes ---------------------------------------------------------------------
    def _noted(self) -> dict[str, dict[str, Any]]:
        try:
            return json.loads(self.notes.read_text()) if self.notes else {}
        except (OSError, ValueError):
            return {}

    def _note(self, digest: str, job: str | None) -> None:
        if self.notes is None:
            return
        now = time.time()
        noted = {one: entry for one, entry in self._noted().items() if now - entry["sent"] < KEPT and one != digest}
        if job is not None:
            noted[digest] = {"id": job, "sent": now}
        write_text(self.notes, json.dumps(noted, indent=1) + "\n")
