"""What tells one question to a server from another, and the shape of an answer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch


def digest_of(host: str, key: str, function: Callable[..., Any], arguments: Sequence[Any]) -> str:
    """A hash of what is asked of which model where, by this code: equal in every process that asks the same."""
    digest = hashlib.sha256(code().encode())
    _add(digest, [host, key, function, list(arguments)])
    return digest.hexdigest()[:32]


@cache
def code() -> str:
    """A hash of this package's source."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(f"tensor {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        digest.update(f"dict {len(value)}".encode())
        for name, one in value.items():
            _add(digest, name)
            _add(digest, one)
    elif isinstance(value, (list, tuple)):
        digest.update(f"{type(value).__name__} {len(value)}".encode())
        for one in value:
            _add(digest, one)
    elif callable(value):
        digest.update(f"function {value.__module__}.{value.__qualname__}".encode())
    else:
        digest.update(f"{type(value).__name__} {value!r}".encode())


def shape_of(value):
    """Plain data without its contents: shapes of tensors, lengths and keys of containers. Runs on the server too."""
    if isinstance(value, torch.Tensor):
        return ["tensor", *value.shape]
    if isinstance(value, dict):
        return ["dict", *([str(name), shape_of(one)] for name, one in value.items())]
    if isinstance(value, (list, tuple)):
        return ["list", *(shape_of(one) for one in value)]
    return "value"
