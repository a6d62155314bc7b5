"""Make the test server's environment, .venv-ndif beside .venv. A second call does nothing.

    python -m tests.remote.install

What client and server share (torch, transformers, nnsight and all they need) is the client's own installation, named in
a .pth file: one version by construction, and no second copy of torch. Such a line adds a folder and does not read the
.pth files in it, so a package that is installed there as editable (ours) cannot be imported by the server.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".venv-ndif"
STAMP = FOLDER / "installed"
CONSTRAINTS = Path(__file__).with_name("constraints.txt")
PACKAGES = ("ray[default]", "redis", "boto3", "fastapi", "uvicorn", "gunicorn", "python-multipart", "accelerate")
PLAIN = ("python-dotenv", "ndif")  # without their dependencies: ndif's metadata asks for Python 3.12


class NotPossible(Exception):
    """The server cannot be had on this machine, and why."""


def install() -> None:
    """Raises NotPossible without Redis and root, CalledProcessError when pip or apt-get fails."""
    redis()
    client = sysconfig.get_path("purelib")
    key = hashlib.sha256(CONSTRAINTS.read_bytes() + Path(__file__).read_bytes() + client.encode()).hexdigest()
    if STAMP.is_file() and STAMP.read_text() == key:
        return
    shutil.rmtree(FOLDER, ignore_errors=True)
    venv.create(FOLDER, with_pip=True)
    (site,) = FOLDER.glob("lib/python3*/site-packages")
    (site / "client.pth").write_text(client + "\n")
    pip = [FOLDER / "bin/python", "-m", "pip", "install", "--quiet", "--constraint", CONSTRAINTS]
    subprocess.run([*pip, *PACKAGES], check=True)
    subprocess.run([*pip, "--no-deps", "--ignore-requires-python", *PLAIN], check=True)
    check()
    STAMP.write_text(key)


def redis() -> None:
    if shutil.which("redis-server"):
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise NotPossible("redis-server is not installed, and installing it takes root and apt-get")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for arguments in (["update", "-qq"], ["install", "-qq", "--no-install-recommends", "redis-server"]):
        subprocess.run(["apt-get", *arguments], check=True, env=environment, stdout=subprocess.DEVNULL)


def check() -> None:
    """The server must have what the client has, and must not have the package under test."""
    code = "import torch, transformers, nnsight, ndif, importlib.util as u; print(u.find_spec('encode_address'))"
    found = subprocess.run([FOLDER / "bin/python", "-I", "-c", code], check=True, capture_output=True, text=True).stdout
    if found.strip() != "None":
        raise NotPossible(
            f"the server's environment can import encode_address ({found.strip()}): reinstall as editable"
        )


if __name__ == "__main__":
    try:
        install()
    except NotPossible as error:
        sys.exit(f"no test server: {error}")
