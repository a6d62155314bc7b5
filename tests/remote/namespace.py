"""A network of one's own: run a command where only the loopback interface exists, and leave nothing of it behind.

    python -m tests.remote.namespace COMMAND...

Ray binds to the machine's own address whatever it is told; here there is none but 127.0.0.1, fixed ports cannot clash
with anybody's, and nothing can leave. Needs root. When the command ends, or this process is told to end, every process
that the command started is ended, however far it has detached itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import struct
import sys
import time
from pathlib import Path

CLONE_NEWNET = 0x40000000
PR_SET_CHILD_SUBREAPER = 36
SIOCSIFFLAGS = 0x8914
IFF_UP = 0x1

_libc = ctypes.CDLL(None, use_errno=True)


def isolated() -> bool:
    """Whether this process sees the loopback interface only."""
    return [name for _, name in socket.if_nameindex()] == ["lo"]


def isolate() -> None:
    """Move this process into a new network namespace and bring its loopback interface up. Raises OSError."""
    _call("unshare", CLONE_NEWNET)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh", b"lo", IFF_UP))


def join(pid: int) -> None:
    """Move this process into the network namespace of another one. Raises OSError."""
    with open(f"/proc/{pid}/ns/net") as namespace:
        _call("setns", namespace.fileno(), CLONE_NEWNET)


def parents() -> dict[int, int]:
    """Every process and its parent."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            found[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it ended while we looked
    return found


def descendants(root: int) -> list[int]:
    table = parents()
    found: list[int] = []
    front = {root}
    while front:
        front = {pid for pid, parent in table.items() if parent in front}
        found += sorted(front)
    return found


def end(pids: list[int], alive, patience: float = 2.0) -> list[int]:
    """Ask processes to end, then kill them; `alive()` lists those that are left. Returns the survivors."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + patience
        for pid in pids:
            _kill(pid, number)
        while (pids := alive()) and time.monotonic() < deadline:
            if number == signal.SIGKILL:
                for pid in pids:
                    _kill(pid, number)
            time.sleep(0.05)
        if not pids:
            break
    return pids


def main(command: list[str]) -> int:
    if not command:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        isolate()
    except OSError as error:
        print(f"a network namespace needs root: {error}", file=sys.stderr)
        return 2
    _call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child = os.spawnvp(os.P_NOWAIT, command[0], command)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda got, _frame: _kill(child, got))
    status = None
    while status is None:
        pid, code = os.wait()
        if pid == child:
            status = os.waitstatus_to_exitcode(code)
    end(descendants(os.getpid()), _left)
    return status if status >= 0 else 128 - status


def _left() -> list[int]:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return descendants(os.getpid())


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _call(name: str, *arguments: int) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
