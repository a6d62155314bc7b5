"""ndif's model actor and controller on the CPU, through the hooks that ndif has for other classes of them.

The package's own actor assumes CUDA where it places a model, where it waits for the device after each request and where
it parks a model. The queue, the envelope, reading and running a request, statuses, results, errors and the sandbox are
the package's own code.
"""

import json
import os
from pathlib import Path

import ray
import repair  # noqa: F401
import torch
from ndif.services.ray.deployments.controller.controller import _ControllerActor
from ndif.services.ray.sandbox import host
from ndif.services.ray.sandbox.model import DEFAULT_POOL_SIZE, SandboxModelDeployment
from nnsight.modeling.huggingface import HuggingFaceModel

RUNNER = str(Path(__file__).with_name("runner.py"))

torch.cuda.synchronize = lambda *args, **kwargs: None
# Otherwise a runner asks the real hub for the model's config, never gets an answer and never starts.
host.RUNNER_ENV += ("HF_ENDPOINT", "HF_HUB_DISABLE_XET")


class CpuDeployment(SandboxModelDeployment):
    """A trusted request runs in this process, any other in a process of its own, as the key says."""

    def __init__(self, *args, gpu_mem_bytes_by_id=None, **kwargs):
        super().__init__(*args, gpu_mem_bytes_by_id={}, **kwargs)
        # For tests that kill it.
        name = json.loads(self.model_key.split(":", 1)[1])["repo_id"].replace("/", "--")
        Path(os.environ["NDIF_TEST_RUN"], f"{name}.pid").write_text(str(os.getpid()))

    def load_from_disk(self):
        model = HuggingFaceModel.from_model_key(
            self.model_key, dispatch=True, dtype=self.dtype_name, device="cpu", **self.kwargs
        )
        model._module.requires_grad_(False)
        return model

    def open_pool(self, pool_size=None, peers=1):
        self.pool = host.Pool(
            size=DEFAULT_POOL_SIZE, python=RUNNER, peers=peers, model_key=self.model_key, trust_remote_code=False
        )
        self.execution_sandbox = None

    async def to_cache(self):
        await self.cancel("preempted")
        self.cached = True

    def from_cache(self, gpu_mem_bytes_by_id):
        self.cached = False


@ray.remote(num_cpus=1, max_restarts=-1)
class CpuModelActor(CpuDeployment):
    pass


class _Controller(_ControllerActor):
    """The package's controller, as a class of this module: its worker then imports this module, and so the repair."""


@ray.remote(num_cpus=1, num_gpus=0, max_restarts=-1, resources={"head": 1})
class CpuControllerActor(_Controller):
    pass
