"""Several small models at once on the cores of one machine: one process each (nnsight runs one model per process)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import typer

DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def side_by_side(command: Sequence[str], models: Sequence[str], options: Mapping[str, Any]) -> None:
    """Run `encode-address COMMAND --model M` for each model in its own process, as many at once as there are cores.

    `options` are those of the command, by name: None stands for one that was not given, True and False for a flag.
    Screens are printed in the order of `models`. A model's error stands on stderr as its own process printed it,
    and makes this command exit with that code once the others have finished. Ctrl-C ends them all.
    """
    given = [word for name, value in options.items() for word in _words(name, value)]
    given += ["--debug"] if "--debug" in sys.argv else []
    waiting, code, printed = list(models), 0, False
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    running: list[tuple[str, subprocess.Popen]] = []
    said = {"", None}
    try:
        while waiting or running:
            while waiting and len(running) < cores:
                model = waiting.pop(0)
                words = [sys.executable, "-m", "encode_address.cli", *command, "--model", model, *given]
                running.append((model, _start(words)))
            model, first = running[0]
            screen, complaint = first.communicate()
            running.pop(0)
            typer.echo(f"\n{screen}" if printed and screen else screen, nl=False)
            printed = printed or bool(screen)
            if first.returncode < 0:
                complaint = f"error: the process of {model} was ended by signal {-first.returncode}; run again\n"
            if complaint not in said:  # what is wrong with an option is wrong for every model
                typer.echo(complaint, err=True, nl=False)
                said.add(complaint)
            code = code or (first.returncode if first.returncode >= 0 else 2)
    except KeyboardInterrupt:
        for _, process in running:
            process.kill()  # what it finished is kept
        raise
    if code:
        raise typer.Exit(code)


def _words(name: str, value: Any) -> list[str]:
    if value is None or value is False:
        return []
    return [f"--{name}"] if value is True else [f"--{name}", str(value)]


def _start(command: list[str]) -> subprocess.Popen:
    """Start a process of its own session, so that Ctrl-C reaches us alone; on Linux it dies when we do."""

    def die_with_parent() -> None:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)

    # On a terminal the processes draw their progress bars themselves.
    complaints = None if sys.stderr.isatty() else subprocess.PIPE
    options = {"text": True, "start_new_session": True, "preexec_fn": die_with_parent}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=complaints, **options)
