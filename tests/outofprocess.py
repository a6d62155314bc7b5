"""An nnsight backend that runs traces in another process, as a remote server would.

    with Server(folder, rename, hidden) as server:
        with model.trace(ids, backend=OutOfProcess(model.lm, server)):
            ...

The block is serialised by the code that a remote request uses, and nothing else of this process reaches the other
one. That one refuses to import the modules in `hidden` (see `server_process`), so only what travels by value runs.
"""

import io
import json
import pickle
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import torch
from nnsight.ndif import pull_env
from nnsight.schema.request import RequestModel
from nnsight.tracing.backend import Backend
from nnsight.tracing.tracer import save
from nnsight.tracing.util import push

from tests.server_process import read_frame, write_frame

SCRIPT = Path(__file__).with_name("server_process.py")


class ServerError(Exception):
    """The request failed in the other process (its traceback), or that process is gone."""


class Server:
    """The other process. Use as a context manager: it is killed on the way out.

    `timeout` (seconds) bounds the start and every request; a worker that exceeds it is killed.
    """

    def __init__(self, folder, rename, hidden, timeout=60.0):
        self.timeout, self._ready = timeout, False
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed by __exit__)
        # -I: no PYTHONPATH, no user site and no script folder, so the tests cannot be imported from there.
        arguments = [str(folder), json.dumps(rename), json.dumps(sorted(hidden)), str(torch.get_num_threads())]
        self.process = subprocess.Popen(
            [sys.executable, "-I", str(SCRIPT), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            cwd=tempfile.gettempdir(),
        )

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self._stderr):
            stream.close()

    def wait(self):
        """Return once the model is loaded; raise ServerError if that fails or takes too long."""
        if not self._ready:
            self._exchange(None)
            self._ready = True

    def ask(self, request):
        """The answer to a request. Loading it accepts plain values only."""
        self.wait()
        answer = self._exchange(pickle.dumps(request))
        return torch.load(io.BytesIO(answer), map_location="cpu", weights_only=True)

    def _exchange(self, frame):
        # Killing the worker is what ends a read (or write) that would otherwise wait for ever.
        late = threading.Timer(self.timeout, self.process.kill)
        late.start()
        try:
            if frame is not None:
                write_frame(self.process.stdin, frame)
            answer = read_frame(self.process.stdout)
        except BrokenPipeError:
            answer = None
        finally:
            late.cancel()
        if answer is None:
            code = self.process.wait()
            self._stderr.seek(0)
            said = self._stderr.read().decode(errors="replace")[-2000:]
            raise ServerError(f"no answer within {self.timeout:g} s, or the worker died (exit code {code}): {said}")
        return answer


class OutOfProcess(Backend):
    """Runs a trace or a session of `lm` on `server` and brings the saved values into the caller's frame.

    `payloads` are the bytes of its requests, `shipped` the functions that travelled in them, as (name, file).
    """

    def __init__(self, lm, server):
        self.lm, self.server = lm, server
        self.payloads, self.shipped = [], set()

    def __call__(self, tracer):
        pull_env()
        self.payloads.append(RequestModel.serialize(tracer))
        answer = self.server.ask((self.lm._remoteable_get_env(), self.payloads[-1]))
        if answer["error"]:
            raise ServerError(answer["error"])
        for entry in answer["shipped"]:
            where, file = entry[1:].split("] ", 1)
            self.shipped.add((where.rpartition(":")[0], file))
        for value in answer["saved"].values():
            save(value)
        push(tracer.info.frame, answer["saved"])


def sessions_on(backend):
    """A model's `where`: what is asked runs in a session on a fresh `backend()`."""

    def ask(model, function, arguments):
        with model.lm.session(backend=backend()):
            result = save(function(model, *arguments))
        return result

    return ask
