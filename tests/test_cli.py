"""The command line: what goes wrong is one line that says what to do, what goes right is one screen."""

from __future__ import annotations

import json
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

from encode_address.models.loading import BUNDLED, BUNDLED_DIR
from tests.commands import MODULE, SETTINGS, Commands, Done, files, parts, process
from tests.test_store import child, leftovers

RESULTS = {"cells.parquet", "summary.csv", "verdict.json", "manifest.json"}
SCREEN = 30


@pytest.fixture(scope="module")
def commands(tmp_path_factory) -> Iterator[Commands]:
    server = Commands(tmp_path_factory.mktemp("commands"))
    yield server
    server.close()


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
    (folder / "old" / "tiny-mamba2" / ".parts").mkdir(parents=True)
    (folder / "old" / "tiny-mamba2" / ".parts" / "written-by.json").write_text('{"encode_address": "0.0.1"}')
    (folder / "old" / "tiny-mamba2" / ".lock").write_text("")
    hybrid = json.loads((BUNDLED_DIR / "tiny-gdn" / "config.json").read_text())
    for kind in ("full_attention", "linear_attention"):
        config_only(folder, kind, {**hybrid, "layer_types": [kind] * hybrid["num_hidden_layers"]})
    for model_type in ("llama", "mamba2", "bailing_hybrid"):
        config_only(folder, model_type, {"model_type": model_type})
    own = shutil.ignore_patterns("task.json", "card.json", "*.jinja")  # without them: a checkpoint like anyone's
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
    "hybrid of no family": (
        "check GIVEN/bailing_hybrid",
        r"model type 'bailing_hybrid' is not supported .*qwen3_5.*families\.py",
    ),
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
        "no wording 'chat/nowhere' .* it has chat, chat/equals",
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
    "no tokens": (f"{FIND} --batch-tokens 0", r"'--batch-tokens'.* 1 .*see encode-address --help"),
    "tokens not a number": (f"{FIND} --batch-tokens all", r"'--batch-tokens'.*see encode-address --help"),
    "show of nothing": ("show GIVEN/empty", "no results in GIVEN/empty: give the results folder of a model"),
    "show of no folder": ("show GIVEN/none", "no results in GIVEN/none: give"),
    "show of a file": ("show GIVEN/file", "no results in GIVEN/file: give"),
    "show of a model": ("show GIVEN/plain", "no results in GIVEN/plain: give"),
    "show of a damaged table": ("show GIVEN/damaged", r"GIVEN/damaged/cells\.parquet cannot be read.*run again"),
    "show without a folder": ("show", r"Missing argument 'folder'.*see encode-address --help"),
    "rows of another version": (
        "find --model tiny-mamba2 --variants chat8 --n 4 --out GIVEN/old",
        r"GIVEN/old/tiny-mamba2 holds rows of encode_address 0\.0\.1, .*--fresh, or choose another --out",
    ),
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
    verdict, folder = found.done.stdout.splitlines()[-2:]
    assert " in tiny-mamba2: Encode " in verdict
    assert folder == str(found.folder)


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


def test_show_sums_up_what_find_did(commands, found):
    verdict = next(line for line in found.done.stdout.splitlines() if " in tiny-mamba2: Encode " in line)
    rows = len(pd.read_parquet(found.folder / "cells.parquet"))
    before = files(found.folder)
    done = commands.run("show", found.folder)
    assert (done.code, done.stderr) == (0, "")
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines[:2] == [str(found.folder), "model tiny-mamba2, float32, sdpa, cpu, local"]
    assert "command variants chat8, n 8, seed 0, pool A, text bundled" in lines
    assert any(line.startswith("all ") and line.endswith(f" {rows:,}") for line in lines)
    assert any(line.startswith("tokens ") and " forwarded, floor " in line for line in lines)
    assert lines[-1] == verdict
    assert len(lines) <= SCREEN
    assert commands.run("show", found.folder.parent) == done
    assert files(found.folder) == before


def test_fresh_computes_all_rows_again(commands, found, tmp_path):
    copy = shutil.copytree(found.folder, tmp_path / "tiny-mamba2")
    (copy / "notes.txt").write_text("mine")
    before = {*parts(copy)}
    command = ["find", "--model", "tiny-mamba2", "--variants", "chat8", "--n", "8", "--out", str(tmp_path)]
    done = commands.run(*command, "--fresh")
    assert (done.code, done.stderr) == (0, "")
    assert not before & {*parts(copy)}
    assert (copy / "notes.txt").read_text() == "mine"
    tables = [pd.read_parquet(folder / "cells.parquet") for folder in (copy, found.folder)]
    pd.testing.assert_frame_equal(*tables, check_exact=False, rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", [[], ["--fresh"], ["--model", "tiny-gdn"]])
def test_a_dry_run_says_what_it_would_cost_and_writes_nothing(commands, found, tmp_path, options):
    """Where there is no folder, and where there are results."""
    models = ["tiny-mamba2", *options[1:]]
    for out in (tmp_path / "none", found.folder.parent):
        before = {path: path.stat().st_mtime_ns for path in out.rglob("*")} if out.exists() else {}
        command = ["find", "--model", "tiny-mamba2", "--variants", "chat8", "--n", "8", "--out", str(out)]
        done = commands.run(*command, "--dry-run", *options)
        assert (done.code, done.stderr) == (0, "")
        costs = re.findall(r"([\d,]+) cells, ([\d,]+) tokens of forward, floor ([\d,]+)", done.stdout)
        assert len(costs) == len(models)
        assert out.exists() == bool(before)
        assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_several_models_get_the_options_of_the_command(commands, tmp_path):
    """Each in a process of its own; here every process only prints what it was asked to do."""
    asked = ["--variants", "chat8", "--n", "4", "--out", str(tmp_path), "--batch-tokens", "999", "--fresh"]
    command = ["find", "--model", "tiny-gdn", "--model", "tiny-mamba2", *asked]
    done = commands.run(*command, before="sys.executable = '/bin/echo'")
    assert (done.code, done.stderr) == (0, "")
    for line, model in zip(done.stdout.split("\n\n"), ("tiny-gdn", "tiny-mamba2"), strict=True):
        assert f"find --model {model} " in line
        assert " --batch-tokens 999 --fresh" in line
        assert "--dry-run" not in line
        assert "False" not in line


def test_ctrl_c_of_a_fresh_run_does_not_send_the_user_back_to_the_start(commands, tmp_path):
    interrupt = "import encode_address.circuit as c\ndef find(*_, **__): os.kill(os.getpid(), 2)\nc.find = find"
    command = ["find", "--model", "tiny-mamba2", "--variants", "chat8", "--out", tmp_path]
    same = "interrupted; what was finished is kept, and the same command{} continues\n"
    assert commands.run(*command, "--fresh", before=interrupt).stderr == same.format(" without --fresh")
    assert commands.run(*command, before=interrupt).stderr == same.format("")


@pytest.mark.parametrize("model", ["tiny-gdn", "GIVEN/plain"])
def test_check_reports_that_all_is_well(commands, given, model):
    """A folder is checked as quietly as a bundled name."""
    done = commands.run("check", model.replace("GIVEN", str(given)))
    assert (done.code, done.stderr) == (0, "")
    findings = [line.split(maxsplit=1) for line in done.stdout.splitlines()[3:]]
    assert {mark for mark, _ in findings} == {"ok"}
    assert len(findings) == 8
    assert "8 layers, 5 linear, 3 softmax" in done.stdout


MEASURING = "--variants --n --seed --quick --text --pool --device --dtype --out --batch-tokens --fresh --remote --deadline --dry-run"
OPTIONS = {
    "find": f"--model --revision {MEASURING}",
    "run": f"--model --revision --list --data --knowledge --normalisation {MEASURING}",
    "transfer": f"--donor --host --source --target --fit --seeds {MEASURING}",
    "replace": f"--donor --host --slot --source --target --truncate {MEASURING}",
    "paper": "folder --model --n --seed --quick --text --pool --data --knowledge --device --dtype --dry-run --remote --deadline",
    "compare": "folder --seeds",
    "check": "model --device --dtype --revision",
    "show": "folder",
    "figures": "folder",
    "remote": "status check",
    "remote check": "model --revision --deadline",
    "": "remote find run transfer replace paper compare plan check show figures models train --debug",
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
