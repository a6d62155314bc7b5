"""What a sandboxed job cannot do on a real NDIF server, refused here in the same words.

A real sandbox runs the job in a process that has the model's shape but not its weights: a module is called over a
socket, which only a trace has; a trace that was stopped leaves that socket unusable; a cache that goes into a trace is
a copy.
"""

import copy
from contextlib import contextmanager

from greenlet import getcurrent
from nnsight.intervention.envoy import Envoy
from nnsight.intervention.tracer import InterleavingTracer


@contextmanager
def rules(apply):
    """Inside, if `apply`, jobs have a sandbox's limits."""
    if not apply:
        yield
        return
    call, interleave, stop = Envoy.__call__, Envoy.interleave, InterleavingTracer.stop
    stopped = []

    def strict_call(self, *args, **kwargs):
        if getcurrent().parent is None:
            raise AttributeError("'NoneType' object has no attribute 'switch'")
        return call(self, *args, **kwargs)

    def strict_interleave(self, fn, *args, **kwargs):
        if stopped:
            raise BrokenPipeError(32, "Broken pipe")
        if "cache" in kwargs:
            kwargs["cache"] = copy.deepcopy(kwargs["cache"])
        return interleave(self, fn, *args, **kwargs)

    def strict_stop(self):
        stopped.append(self)
        stop(self)

    Envoy.__call__, Envoy.interleave, InterleavingTracer.stop = strict_call, strict_interleave, strict_stop
    try:
        yield
    finally:
        Envoy.__call__, Envoy.interleave, InterleavingTracer.stop = call, interleave, stop
