"""The command line: what goes wrong is one line that says what to do, what goes right is one screen."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest
from safetensors.torch import load_file, save_file

import encode_address
from encode_address.models.loading import BUNDLED, BUNDLED_DIR
from tests.test_store import child, leftovers

ROOT = Path(encode_address.__file__).parent.parent
RESULTS = {"cells.parquet", "summary.csv", "verdict.json", "manifest.json"}
SCREEN = 30
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


@pytest.fixture(scope="module")
def commands(tmp_path_factory) -> Iterator[Commands]:
    server = Commands(tmp_path_factory.mktemp("commands"))
    yield server
    server.close()


def process(*arguments: object, program: tuple[str, ...] = MODULE) -> Done:
    """A command as a user runs it, imports and all."""
    ended = subprocess.run([*program, *map(str, arguments)], capture_output=True, **SETTINGS)
    return Done(ended.returncode, ended.stdout, ended.stderr)


def parts(folder: Path) -> list[Path]:
    """The finished parts of a results folder that may not be there yet."""
    return sorted((folder / ".parts").glob("*.parquet"))


def files(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []


# -- what is given wrongly ------------------------------------------------------------------------
def config_only(folder: Path, name: str, config: dict) -> None:
    (folder / name).mkdir()
    (folder / name / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> Path:
    """A folder with one of each thing that cannot be used, and of a model that can ("plain")."""
    folder = tmp_path_factory.mktemp("given")
    (folder / "file").write_text("not a folder")
    (folder / "empty").mkdir()
    (folder / "damaged").mkdir()
    (folder / "damaged" / "cells.parquet").write_text("not a table")
    hybrid = json.loads((BUNDLED_DIR / "tiny-gdn" / "config.json").read_text())
    for kind in ("full_attention", "linear_attention"):
        config_only(folder, kind, {**hybrid, "layer_types": [kind] * hybrid["num_hidden_layers"]})
    for model_type in ("llama", "mamba2", "minimax"):
        config_only(folder, model_type, {"model_type": model_type})
    own = shutil.ignore_patterns("task.json", "card.json")  # without them it is a checkpoint like anyone's
    plain = shutil.copytree(BUNDLED_DIR / "tiny-gdn", folder / "plain", ignore=own)
    nan = Path(shutil.copytree(plain, folder / "nan"))
    weights = load_file(nan / "model.safetensors")
    weights["model.layers.2.linear_attn.out_proj.weight"][0, 0] = float("nan")
    save_file(weights, nan / "model.safetensors", metadata={"format": "pt"})
    torn = Path(shutil.copytree(plain, folder / "torn"))
    content = (torn / "model.safetensors").read_bytes()
    (torn / "model.safetensors").write_bytes(content[: len(content) // 2])
    return folder


FIND = "find --model tiny-mamba2 --variants chat8 --n 4 --out OUT"
NAMES = ", ".join(BUNDLED)
BAD = {  # what is wrong: (the command, what its one line says)
    "unknown model": ("find --model tiny-rwkv --out OUT", f"unknown model 'tiny-rwkv'.*{NAMES}.*folder or a hub name"),
    "unknown model, check": ("check tiny-rwkv", f"unknown model 'tiny-rwkv'.*{NAMES}"),
    "no model folder": ("check GIVEN/empty", "GIVEN/empty is a folder without a config.json"),
    "file as a model": ("check GIVEN/file", "unknown model 'GIVEN/file'.*give a folder or a hub name"),
    "transformer": ("find --model GIVEN/full_attention --out OUT", "GIVEN/full_attention has no linear layers"),
    "recurrent model": (
        "find --model GIVEN/linear_attention --out OUT",
        "GIVEN/linear_attention has no softmax layers",
    ),
    "transformer by type": ("check GIVEN/llama", "GIVEN/llama has no linear layers"),
    "recurrent by type": ("check GIVEN/mamba2", "GIVEN/mamba2 has no softmax layers"),
    "hybrid of no family": ("check GIVEN/minimax", r"model type 'minimax' is not supported .*qwen3_5.*families\.py"),
    "torn weights": ("check GIVEN/torn", "GIVEN/torn: its weights cannot be loaded"),
    "NaN weights": ("check GIVEN/nan", "GIVEN/nan.*NaN"),
    "no chat template": ("find --model GIVEN/plain --text bundled --out OUT", "has no chat template"),
    "no text": ("find --model tiny-gdn --text GIVEN/none --out OUT", "no text 'GIVEN/none': give a file, .*'bundled'"),
    "short text": ("find --model tiny-gdn --text GIVEN/file --out OUT", "text file: .* fewer than one chunk of 512"),
    "unknown variant": (
        "find --model tiny-gdn --variants chat8,poem8 --out OUT",
        "variant 'poem8': use chat, list, rev",
    ),
    "two models": ("find --model tiny-gdn --model tiny-mamba2 --variants chat9 --out OUT", "unknown variant 'chat9'"),
    "unknown size": ("find --model tiny-gdn --variants chat9 --out OUT", "variant 'chat9': use .* 4, 8 or 16"),
    "unknown surface": (
        "find --model tiny-gdn --variants chat8/nowhere --out OUT",
        "no wording 'chat/nowhere' .* it has chat, chat/far",
    ),
    "filler too long": (
        "find --model tiny-gdn --variants long99999 --out OUT",
        r"has \d+ tokens, fewer than the 99999",
    ),
    "unknown pool": (f"{FIND} --pool Z", "unknown pool 'Z': this model has A"),
    "no pairs": (f"{FIND} --n 0", "n of 2 or more"),
    "one pair": (f"{FIND} --n 1", "n of 2 or more"),
    "n not a number": (f"{FIND} --n many", r"'--n'.*see encode-address --help"),
    "unknown dtype": (f"{FIND} --dtype float64", "unknown dtype 'float64': use float32, bfloat16, float16"),
    "unknown device": (f"{FIND} --device tpu", "unknown device 'tpu': use cpu, cuda or cuda:N"),
    "missing option": ("find --out OUT", r"Missing option '--model'.*see encode-address --help"),
    "missing argument": ("check", r"Missing argument 'model'.*see encode-address --help"),
    "unknown option": (f"{FIND} --fast", r"No such option: --fast.*see encode-address --help"),
    "unknown command": ("search", r"No such command 'search'.*see encode-address --help"),
    "figures of nothing": ("figures GIVEN/empty", r"no GIVEN/empty/cells\.parquet: give the folder of a finished run"),
    "figures of a damaged table": ("figures GIVEN/damaged", r"GIVEN/damaged/cells\.parquet cannot be read.*run again"),
    "out is a file": ("find --model tiny-gdn --out GIVEN/file", "cannot write to GIVEN/file/tiny-gdn: "),
    "out is not writable": ("find --model tiny-gdn --out /proc/none", "cannot write to /proc/none/tiny-gdn: "),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_input_is_one_line_and_leaves_nothing(commands, given, tmp_path, case):
    command, says = BAD[case]
    out = tmp_path / "out"
    before = files(given)
    words = [word.replace("GIVEN", str(given)).replace("OUT", str(out)) for word in command.split()]
    message = commands.run(*words).error().replace(str(given), "GIVEN")
    assert re.search(says, message), message
    assert [name for name in files(out) if not name.endswith(".lock")] == []
    assert files(given) == before


def test_a_bad_input_is_one_line_from_a_fresh_process_too():
    """The forks above do not see what the imports print."""
    assert "unknown model" in process("check", "tiny-rwkv").error()


def test_debug_adds_the_traceback_before_the_line(commands):
    done = commands.run("--debug", "check", "tiny-rwkv")
    lines = done.stderr.splitlines()
    assert done.code == 2
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-2].startswith("encode_address.errors.ModelError: unknown model 'tiny-rwkv'")
    assert lines[-1].startswith("error: unknown model 'tiny-rwkv'")
    assert commands.run("check", "tiny-rwkv", "--debug").stderr.splitlines()[-1] == lines[-1]


# -- a full disk ----------------------------------------------------------------------------------
FULL_DISK = """
    import subprocess, resource
    for name in [name for name in sys.modules if name.split(".")[0] == "encode_address"]:
        del sys.modules[name]  # the helper's stand-in: here the whole package is wanted
    from encode_address.cli import main
    disk = folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=600k", "none", str(disk)]
    mounted = sys.argv[3] == "disk" and subprocess.run(mount, capture_output=True).returncode == 0
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if not mounted:
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limits[1]))
    sys.argv = ["encode-address", *"find --model tiny-mamba2 --variants chat8 --n 4 --out".split(), str(disk)]
    out = disk / "tiny-mamba2"
    for attempt in range(2):
        try:
            main()
        except SystemExit as end:
            left = [path.name for path in disk.rglob("*") if path.name.endswith(".tmp")]
            kept = len(list((out / ".parts").glob("*.parquet")))
            print("attempt", end.code, kept, (out / "cells.parquet").exists(), left, flush=True)
        if mounted:
            subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
"""


def test_a_full_disk_is_one_line_and_with_room_the_same_command_finishes(tmp_path):
    """A tiny file system in a mount namespace of the process's own; where none may be made, a file size limit."""
    namespace = ("unshare", "--mount")
    allowed = shutil.which("unshare") and subprocess.run([*namespace, "true"], capture_output=True).returncode == 0
    limited = child(FULL_DISK, tmp_path, "disk" if allowed else "size", wrapper=namespace if allowed else ())
    stdout, stderr = limited.communicate(timeout=120)
    full, roomy = (line.split(maxsplit=4)[1:] for line in stdout.splitlines() if line.startswith("attempt"))
    (message,) = stderr.splitlines()
    assert message.startswith(f"error: cannot write {tmp_path}")
    assert message.endswith("; what was finished is kept")
    assert full[:1] + full[2:] == ["2", "False", "[]"]
    assert 0 < int(full[1]) < int(roomy[1])
    assert roomy[:1] + roomy[2:] == ["0", "True", "[]"]


# -- what goes right ------------------------------------------------------------------------------
@dataclass(frozen=True)
class Pair:
    """A finished `find`, the folder it wrote, and a second command on that folder while it ran."""

    done: Done
    refused: Done
    folder: Path


@pytest.fixture(scope="module")
def found(commands, tmp_path_factory) -> Pair:
    out = tmp_path_factory.mktemp("found")
    command = ["find", "--model", "tiny-mamba2", "--variants", "chat8", "--n", "8", "--out", str(out)]
    first = subprocess.Popen([*MODULE, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, **SETTINGS)
    folder = out / "tiny-mamba2"
    while first.poll() is None and not parts(folder):
        time.sleep(0.01)
    refused = commands.run(*command)
    assert first.poll() is None  # else the second command met a finished run
    stdout, stderr = first.communicate(timeout=120)
    return Pair(Done(first.returncode, stdout, stderr), refused, folder)


def test_find_prints_one_screen_and_nothing_else(found):
    assert found.done.code == 0
    assert found.done.stderr == ""
    assert len(found.done.stdout.splitlines()) <= SCREEN
    assert " in tiny-mamba2: Encode " in found.done.stdout
    assert f"results in {found.folder}, " in found.done.stdout
    assert f"figures in {found.folder}/figures" in found.done.stdout


def test_find_writes_the_table_the_verdict_and_the_figures(found):
    names = {path.name for path in found.folder.iterdir() if not path.name.startswith(".")}
    assert names == RESULTS | {"figures"}
    table = pd.read_parquet(found.folder / "cells.parquet")
    manifest = json.loads((found.folder / "manifest.json").read_text())
    assert manifest["rows"] == len(table) > 0
    assert manifest["command"] == {"variants": ["chat8"], "n": 8, "seed": 0, "pool": "A", "text": "bundled"}
    assert json.loads((found.folder / "verdict.json").read_text())["model"] == "tiny-mamba2"
    assert len(pd.read_csv(found.folder / "summary.csv")) > 0
    drawn = {path.name for path in (found.folder / "figures").iterdir()}
    assert {"circuit-chat8.png", "circuit-chat8.pdf"} <= drawn
    assert leftovers(found.folder) == []


def test_a_second_command_on_the_same_folder_is_refused(found):
    assert found.refused.error() == f"{found.folder} is in use by another run: wait for it, or choose another --out"


def test_figures_draws_again_what_find_drew(commands, found):
    before = {path: path.read_bytes() for path in (found.folder / "figures").iterdir()}
    for path in before:
        path.unlink()
    done = commands.run("figures", found.folder)
    assert (done.code, done.stderr) == (0, "")
    assert {*done.stdout.splitlines()} == {*map(str, before)}
    assert {path: path.read_bytes() for path in (found.folder / "figures").iterdir()} == before


def test_undecided_is_an_answer_not_an_error(commands, tmp_path):
    out = tmp_path / "results"
    done = commands.run("find", "--model", "tiny-gdn-untrained", "--variants", "chat8", "--n", "4", "--out", out)
    assert (done.code, done.stderr) == (0, "")
    assert "UNDECIDED in tiny-gdn-untrained: " in done.stdout
    assert len(done.stdout.splitlines()) <= SCREEN
    assert {path.name for path in (out / "tiny-gdn-untrained").iterdir()} >= RESULTS


def test_a_bad_second_model_keeps_the_results_of_the_first(commands, found):
    command = ["find", "--model", "tiny-mamba2", "--model", "tiny-rwkv", "--variants", "chat8", "--n", "8"]
    done = commands.run(*command, "--out", found.folder.parent)
    assert done.code == 2
    assert len(done.stderr.splitlines()) == 1
    assert "unknown model 'tiny-rwkv'" in done.stderr
    assert {path.name for path in found.folder.iterdir()} >= RESULTS


@pytest.mark.parametrize("model", ["tiny-gdn", "GIVEN/plain"])
def test_check_reports_that_all_is_well(commands, given, model):
    """A folder is checked as quietly as a bundled name."""
    done = commands.run("check", model.replace("GIVEN", str(given)))
    assert (done.code, done.stderr) == (0, "")
    findings = [line.split(maxsplit=1) for line in done.stdout.splitlines()[3:]]
    assert {mark for mark, _ in findings} == {"ok"}
    assert len(findings) == 6
    assert "9 layers, 6 linear, 3 softmax" in done.stdout


OPTIONS = {
    "find": "--model --variants --n --seed --quick --pool --text --device --dtype --revision --out",
    "check": "model --device --dtype --revision",
    "figures": "folder",
    "": "find check figures --debug",
}


@pytest.mark.parametrize("command", OPTIONS)
def test_help_names_every_option(commands, command):
    done = commands.run(*command.split(), "--help")
    assert (done.code, done.stderr) == (0, "")
    missing = {*OPTIONS[command].split()} - {*done.stdout.replace("[", " ").replace("]", " ").lower().split()}
    assert missing == set()
    assert len(done.stdout.splitlines()) <= SCREEN


def test_the_installed_program_and_no_arguments_show_the_help(commands):
    program = Path(sys.executable).with_name("encode-address")
    assert process("--help", program=(str(program),)) == commands.run() == commands.run("--help")
