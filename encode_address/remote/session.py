"""Run a function where the model is: here, or in a session on a server, as one job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import nnsight


def here(model: Any, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Run `function(model, *arguments)` in this process."""
    return function(model, *arguments)


def on(backend: Callable[[], Any]) -> Callable[[Any, Callable[..., Any], Sequence[Any]], Any]:
    """Like `here`, on an nnsight backend (a fresh one per job): `function` travels by value, the model as a plain view of its
    names, and what it returns comes back. All three are plain data but for functions of this package."""
    return lambda model, function, arguments: _in_session(model, function, tuple(arguments), backend())


def _in_session(model: Any, function: Callable[..., Any], arguments: tuple, backend: Any) -> Any:
    with model.lm.session(backend=backend):
        result = nnsight.save(function(model, *arguments))
    return result
