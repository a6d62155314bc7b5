"""Runs `encode-address` commands for the tests, and looks at the folders they leave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import encode_address

ROOT = Path(encode_address.__file__).parent.parent
SETTINGS = {"cwd": ROOT, "env": {**os.environ, "OMP_NUM_THREADS": "1"}, "text": True}
MODULE = (sys.executable, "-m", "encode_address.cli")

# Importing torch and nnsight takes seconds, so it is done once. Every command still gets a process of its own: a
# fork that has its own file descriptors, signals and exit code, and none of the state another command left.
SERVER = """
import json, os, signal, sys, traceback
import encode_address.circuit, encode_address.figures, encode_address.models.loading
from encode_address.cli import main
for line in sys.stdin:
    order = json.loads(line)
    if "wait" in order:
        print(os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1]), flush=True)
        continue
    pid = os.fork()
    if pid:
        print(pid, flush=True)
        continue
    for descriptor, path in enumerate(["/dev/null", order["stdout"], order["stderr"]]):
        os.dup2(os.open(path, os.O_RDONLY if descriptor == 0 else os.O_WRONLY | os.O_CREAT), descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where pytest runs in the background
    sys.argv = ["encode-address", *order["arguments"]]
    code = 1
    try:
        exec(order["before"])
        main()
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
"""


@dataclass(frozen=True)
class Done:
    """A command that ended. A negative code is the signal that ended it."""

    code: int
    stdout: str
    stderr: str

    def error(self) -> str:
        """The one line of a command that failed as it should."""
        assert "Traceback" not in self.stderr, self.stderr
        lines = self.stderr.splitlines()
        assert len(lines) == 1, self.stderr
        assert lines[0].startswith("error: ")
        assert self.code == 2
        assert self.stdout == ""
        return lines[0].removeprefix("error: ")


class Commands:
    """Runs `encode-address` commands, each in a fork of one process that has imported the package."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._files = folder, {}
        server = [sys.executable, "-c", SERVER]
        self._server = subprocess.Popen(server, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **SETTINGS)

    def start(self, *arguments: object, before: str = "") -> int:
        """Start a command and return its process id; `before` is code that its process runs first."""
        base = self.folder / f"command-{len(self._files)}"
        stdout, stderr = base.with_suffix(".stdout"), base.with_suffix(".stderr")
        order = {"arguments": [*map(str, arguments)], "before": before, "stdout": str(stdout), "stderr": str(stderr)}
        pid = self._ask(order)
        self._files[pid] = stdout, stderr
        return pid

    def wait(self, pid: int) -> Done:
        code = self._ask({"wait": pid})
        return Done(code, *(path.read_text() for path in self._files[pid]))

    def run(self, *arguments: object, before: str = "") -> Done:
        return self.wait(self.start(*arguments, before=before))

    def close(self) -> None:
        self._server.stdin.close()
        self._server.wait(timeout=60)

    def _ask(self, order: dict) -> int:
        print(json.dumps(order), file=self._server.stdin, flush=True)
        return int(self._server.stdout.readline())


def process(*arguments: object, program: tuple[str, ...] = MODULE) -> Done:
    """A command as a user runs it, imports and all."""
    ended = subprocess.run([*program, *map(str, arguments)], capture_output=True, **SETTINGS)
    return Done(ended.returncode, ended.stdout, ended.stderr)


def parts(folder: Path) -> list[Path]:
    """The finished parts of a results folder that may not be there yet."""
    return sorted((folder / ".parts").glob("*.parquet"))


def files(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
