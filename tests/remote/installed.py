"""A user's environment: the package installed as from a wheel, in a virtual environment of its own, and its command line.

What the package needs is the test environment's, named in a .pth file: such a line adds a folder and does not read the
.pth files in it, so the editable installation there is not seen.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from tests.remote.install import ROOT


class Installed:
    """`folder/venv` with the package in it; commands run in `folder`, without anything of the repository."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        venv.create(folder / "venv")
        (site,) = folder.glob("venv/lib/python3*/site-packages")
        (site / "client.pth").write_text(sysconfig.get_path("purelib") + "\n")
        python = str(folder / "venv/bin/python")
        pip = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            python,
            "install",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
        ]
        subprocess.run([*pip, "--no-index", str(self._sources())], check=True)
        found = subprocess.check_output(
            [python, "-c", "import encode_address; print(encode_address.__file__)"],
            cwd=folder,
            env=self.environment({}),
        )
        assert Path(found.decode().strip()).is_relative_to(site)

    def _sources(self) -> Path:
        """A copy of what is packed: building leaves files beside the sources."""
        copy = self.folder / "sources"
        listed = subprocess.check_output(
            ["git", "ls-files", "encode_address", "figures", "*.toml", "README.md", "LICENSE"], cwd=ROOT
        )
        for name in listed.decode().splitlines():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
        return copy

    @staticmethod
    def environment(client: dict[str, str]) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("HOME", "PATH", "LANG", "TMPDIR") if name in os.environ}
        return {**kept, "OMP_NUM_THREADS": "1", **client}

    def start(self, *arguments: str, client: dict[str, str] | None = None, code: str | None = None) -> subprocess.Popen:
        """`encode-address ARGUMENTS`, or the Python `code`, in the background; its output is in `.communicate()`."""
        tool = (
            [str(self.folder / "venv/bin/encode-address")]
            if code is None
            else [str(self.folder / "venv/bin/python"), "-c", code]
        )
        return subprocess.Popen(
            [*tool, *map(str, arguments)],
            cwd=self.folder,
            env=self.environment(client or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *arguments: str, **options) -> str:
        """The same, waited for: its output. Fails with it where the command does."""
        return ended(self.start(*arguments, **options))


def ended(process: subprocess.Popen) -> str:
    output, _ = process.communicate()
    assert process.returncode == 0, f"{process.args}: {process.returncode}\n{output}"
    return output
