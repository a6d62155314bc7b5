"""How much may be in memory at once, from what is free; and what an out-of-memory error looks like."""

from __future__ import annotations

import contextlib
import resource
import sys
from pathlib import Path
from typing import Any

import torch

from encode_address.errors import ServerError
from encode_address.run.cells import FINAL
from encode_address.run.plan import Limits

SHARE = 0.25  # of the free memory, for one trace's activations, and again for what a bundle keeps
# A small model gains nothing from more, and a fixed number keeps its batches, and so its table, the same.
MOST_TOKENS = {"cpu": 8192, "cuda": 32768}
MOST_KEPT = {"cpu": 512 << 20, "cuda": 1 << 60}
UNKNOWN = 4 << 30  # free bytes assumed where the system does not say


def limits(model: Any, batch_tokens: int | None = None) -> Limits:
    """Limits for `model` where it lies; `batch_tokens` overrides what free memory gives."""
    config, place = model.config, "cuda" if model.device.type == "cuda" else "cpu"
    size, free = next(model.module.parameters()).element_size(), free_bytes(model.device)
    hidden, depth = config.hidden_size, len(model.layout.kinds)
    wide = max(getattr(config, "intermediate_size", 0) or 0, 4 * hidden)
    per_token = size * (64 * hidden + 8 * wide)  # live activations of a layer, the linear kernels' workspace included
    tokens = batch_tokens or min(MOST_TOKENS[place], max(64, int(free * SHARE) // per_token))

    def per_prompt(path: str, length: int) -> int:
        # A full-path bundle keeps residual streams and outputs, at most two of each per layer and token.
        return model.cache_bytes(length) if path == FINAL else 2 * depth * hidden * size * length

    logits = 3 * 4 * config.vocab_size  # of one token, with the copies that a loss makes
    return Limits(tokens, min(MOST_KEPT[place], int(free * SHARE)), per_prompt, 1 + logits // per_token)


def free_bytes(device: torch.device) -> int:
    """Free bytes of a GPU (what torch has reserved and does not use included), or of this machine."""
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserved
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return UNKNOWN
    try:  # a container's own limit
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return free
    return min(free, max(0, limit - used))


def peak_bytes() -> int:
    """The most memory this process has had."""
    with contextlib.suppress(OSError, StopIteration):  # Linux; getrusage would count a parent's memory too
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or what it was raised from, says that memory ran out."""
    while error is not None:
        told = "out of memory" in str(error).lower() or "can't allocate memory" in str(error)
        memory = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        if memory or (isinstance(error, (RuntimeError, ServerError)) and told):
            return True
        error = error.__cause__ or error.__context__
    return False
