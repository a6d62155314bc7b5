"""A plain nnsight client of a test server: submits a trace or a session, polls for it, and brings its values here."""

import time

from nnsight.intervention.backends.remote import RemoteBackend


class Job(RemoteBackend):
    """Runs a trace or a session as one non-blocking job; its saved values arrive in the caller's frame as if run here.

    `server` has `url`; raises TimeoutError when the job has not ended in `patience` seconds.
    """

    def __init__(self, key, url, api_key, patience=60.0):
        super().__init__(key, host=url, api_key=api_key, blocking=False)
        self.display.enabled = False
        self.patience = patience

    def __call__(self, tracer=None):
        self.submit(tracer)
        result = self.wait()
        self._push(result, tracer)
        return result

    def submit(self, tracer):
        self.job_id = None
        return super().submit(tracer)

    def wait(self):
        deadline = time.monotonic() + self.patience
        while (result := self.poll()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"job {self.job_id} is {self.status} after {self.patience:g} s")
            time.sleep(0.05)
        return result
