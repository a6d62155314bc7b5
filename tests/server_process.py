"""The other process: it holds a model, runs requests that arrive by value, and cannot import what it hides.

    python -I server_process.py FOLDER RENAME HIDDEN THREADS

FOLDER is a model folder, RENAME nnsight's rename dictionary and HIDDEN a list of module names, both as JSON.
Requests come on standard input and answers leave on standard output as length-prefixed frames; the first frame
it sends says that it is ready, and the end of its input ends it.

An answer is `torch.save` of plain values: `saved` (what the trace saved), `shipped` (which functions the request
brought with it, as `[name:line] file`), `error` (a traceback, or "").
"""

import importlib.abc
import io
import json
import linecache
import os
import pickle
import struct
import sys
import traceback
from contextlib import contextmanager

import torch
from nnsight.modeling.transformers import TransformersModel
from nnsight.schema.request import RequestModel
from nnsight.tracing.globals import BLOCKS, SOURCES
from nnsight.tracing.tracer import _saves, dec, inc
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging


class Hidden(importlib.abc.MetaPathFinder):
    """Makes the modules of these names, and all below them, impossible to import."""

    def __init__(self, names):
        self.names = frozenset(names)

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def read_frame(stream):
    """The next frame, or None at the end of the stream."""
    head = stream.read(8)
    if len(head) < 8:
        return None
    (size,) = struct.unpack(">Q", head)
    body = stream.read(size)
    return body if len(body) == size else None


def write_frame(stream, body):
    stream.write(struct.pack(">Q", len(body)) + body)
    stream.flush()


class Unreadable(Exception):
    """The request could not be read, so none of it ran. The cause is the error."""


def load(folder, rename):
    """A model folder under nnsight, without anything of the package under test."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    return TransformersModel(module, tokenizer=tokenizer, task="text-generation", rename=rename)


@contextmanager
def fresh_sources():
    """One request's source texts. nnsight keys them by file and line and never looks again, so the blocks of one
    request would answer for another's."""
    lines = dict(linecache.cache)
    try:
        yield
    finally:
        linecache.cache.clear()
        linecache.cache.update(lines)
        SOURCES.clear()
        BLOCKS.clear()


def execute(model, env, blob, compress=False):
    """Run one serialised trace or session; what it saved, and the functions that came with it."""
    model._remoteable_set_env(env)
    with fresh_sources():
        before = set(linecache.cache)
        try:
            tracer = RequestModel.deserialize(blob, model._remoteable_persistent_objects(), compress)
        except Exception as error:
            raise Unreadable(str(error)) from error
        shipped = sorted(name for name in set(linecache.cache) - before if name.startswith("["))
        inc()
        try:
            tracer.execute(tracer.info.code)
            kept = _saves()
            saved = {name: value for name, value in tracer.info.frame.f_locals.items() if id(value) in kept}
        finally:
            dec()
            model.interleaver.cancel()
    return {"saved": saved, "shipped": shipped, "error": ""}


def main(folder, rename, hidden, threads):
    sys.meta_path.insert(0, Hidden(json.loads(hidden)))
    torch.set_num_threads(int(threads))
    # The protocol keeps the real standard output; what a trace or a library prints must not get into it.
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    model = load(folder, json.loads(rename))
    write_frame(answers, b"ready")
    while (frame := read_frame(requests)) is not None:
        try:
            answer = execute(model, *pickle.loads(frame))
        except Exception:
            answer = {"saved": {}, "shipped": [], "error": traceback.format_exc()}
        buffer = io.BytesIO()
        torch.save(answer, buffer)
        write_frame(answers, buffer.getvalue())


if __name__ == "__main__":
    main(*sys.argv[1:])
