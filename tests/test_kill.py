"""A run that is killed or interrupted, at any moment, loses the batch in flight and nothing else.

The same command then continues, and what it writes is what an undisturbed run writes.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest

from encode_address.run.store import Store
from tests.test_cli import Commands, Done, commands, files, parts  # noqa: F401  (`commands` is a fixture)
from tests.test_store import leftovers

KILL, INTERRUPT = signal.SIGKILL, signal.SIGINT
INTERRUPTED = "interrupted; what was finished is kept, and the same command continues"
THIS_RUN = "this_run"  # what a manifest says of one run, not of the results

# Code that a command's process runs first. The process signals itself when a table is written but not yet named ...
IN_A_WRITE = """
replace = os.replace
def stopped(source, target):
    if str(target).endswith(".parquet"):
        os.kill(os.getpid(), signal.{name})
    replace(source, target)
os.replace = stopped
"""
# ... or inside a trace, which runs the measure of the answers in the middle of the model's forward.
IN_A_TRACE = """
from encode_address.run import steps
answer = steps.answer
def stopped(*arguments):
    os.kill(os.getpid(), signal.{name})
    return answer(*arguments)
steps.answer = stopped
"""
# Or it notes how many tokens it had forwarded when each part was finished.
NOTE_TOKENS = """
from encode_address.run import engine, store
engines, init, append = [], engine.Engine.__init__, store.Store.append
def noted_init(self, *arguments, **options):
    engines.append(self)
    init(self, *arguments, **options)
def noted_append(self, rows):
    append(self, rows)
    with open({path!r}, "a") as notes:
        print(engines[0].tokens, file=notes)
engine.Engine.__init__, store.Store.append = noted_init, noted_append
"""


@dataclass(frozen=True)
class Job:
    """One `find` command, run into several folders below `base`. The run called "whole" is undisturbed."""

    commands: Commands
    base: Path
    options: tuple[str, ...]

    def folder(self, name: str) -> Path:
        return self.base / name / "tiny-mamba2"

    def start(self, name: str, before: str = "") -> int:
        arguments = ("find", "--model", "tiny-mamba2", *self.options, "--out", self.base / name)
        return self.commands.start(*arguments, before=before)

    def run(self, name: str, before: str = "") -> Done:
        return self.commands.wait(self.start(name, before))

    def run_whole(self) -> None:
        done = self.run("whole", NOTE_TOKENS.format(path=str(self.base / "tokens")))
        assert (done.code, done.stderr) == (0, "")

    def stop(self, name: str, how: signal.Signals, at: int, delay: float) -> Done:
        """Run until there are `at` parts, and `delay` seconds more; then send the signal."""
        pid = self.start(name)
        until = time.monotonic() + 120
        while len(parts(self.folder(name))) < at:
            assert time.monotonic() < until, f"{self.folder(name)} never had {at} parts"
            time.sleep(0.002)
        time.sleep(delay)
        os.kill(pid, how)
        return self.commands.wait(pid)

    def copy(self, name: str, keep: int) -> None:
        """A folder that looks as if the undisturbed run had been stopped after `keep` parts."""
        (self.folder(name) / ".parts").mkdir(parents=True)
        for part in sorted(parts(self.folder("whole")), key=lambda path: path.stat().st_mtime_ns)[:keep]:
            shutil.copy2(part, self.folder(name) / ".parts")
        shutil.copy2(self.folder("whole") / ".parts" / "written-by.json", self.folder(name) / ".parts")

    def manifest(self, name: str) -> dict:
        return json.loads((self.folder(name) / "manifest.json").read_text())

    def finish(self, name: str) -> None:
        """Run to the end; then nothing may differ from the undisturbed run, nor have been computed twice."""
        kept = {path: path.read_bytes() for path in parts(self.folder(name))}
        done = self.run(name)
        assert (done.code, done.stderr) == (0, "")
        self._same_results(name)
        self._nothing_twice(name, kept)

    def _same_results(self, name: str) -> None:
        whole, other = self.folder("whole"), self.folder(name)
        tables = [pd.read_parquet(folder / "cells.parquet") for folder in (other, whole)]
        pd.testing.assert_frame_equal(*tables, check_exact=False, rtol=0, atol=1e-6)
        for file in ("verdict.json", "summary.csv"):
            assert (other / file).read_text() == (whole / file).read_text()
        manifests = [{k: v for k, v in self.manifest(n).items() if k != THIS_RUN} for n in (name, "whole")]
        assert manifests[0] == manifests[1]
        own = [{file for file in files(folder) if not file.startswith(".parts")} for folder in (other, whole)]
        assert own[0] == own[1]
        assert leftovers(other) == []

    def _nothing_twice(self, name: str, kept: dict[Path, bytes]) -> None:
        now = {path: path.read_bytes() for path in parts(self.folder(name))}
        assert kept.items() <= now.items()
        assert len(now) == len(parts(self.folder("whole")))
        keys = [key for path in now for key in pq.read_table(path, columns=["key"])["key"].to_pylist()]
        assert len(keys) == len(set(keys))
        # The batch in flight is run again, and what it needs once more: what its bundle shares, the means of the text.
        forwarded = [0, *map(int, (self.base / "tokens").read_text().split())]
        again = sum(sorted(after - before for before, after in pairwise(forwarded))[-2:])
        left = self.manifest("whole")[THIS_RUN]["tokens_forwarded"] - forwarded[len(kept)]
        assert left <= self.manifest(name)[THIS_RUN]["tokens_forwarded"] <= left + again

    def survives(self, kills: int, seed: int) -> None:
        """Killed at random numbers of parts, and random instants after them (or before the first), then finished."""
        rng, total = random.Random(seed), len(parts(self.folder("whole")))
        for at in sorted(rng.sample(range(total - 2), kills)):
            stopped_well(self, "killed", self.stop("killed", KILL, at, rng.uniform(0, 0.1)), KILL)
        self.finish("killed")


def stopped_well(job: Job, name: str, done: Done, how: signal.Signals) -> None:
    """How a stopped command ends, and what it leaves: whole parts, no results, and of an interrupt one line."""
    if how == KILL:
        assert done.code == -KILL
        assert done.stderr == ""
    else:
        assert done.code == 130
        assert done.stderr.splitlines() == [INTERRUPTED]
        assert leftovers(job.folder(name)) == []
    assert done.stdout == ""
    assert not (job.folder(name) / "cells.parquet").exists()
    assert all(pq.read_table(path).num_rows > 0 for path in parts(job.folder(name)))


@pytest.fixture(scope="module")
def job(commands, tmp_path_factory) -> Job:  # noqa: F811
    job = Job(commands, tmp_path_factory.mktemp("small"), ("--variants", "chat8", "--n", "12"))
    job.run_whole()
    assert len(parts(job.folder("whole"))) > 40  # the moments below are in the middle of it
    return job


@pytest.mark.parametrize("how", [KILL, INTERRUPT], ids=["kill", "interrupt"])
def test_a_run_that_is_stopped_three_times_ends_as_one_that_was_not(job, how):
    name = f"three {how.name}"
    for at, delay in ((2, 0.0), (15, 0.03), (30, 0.011)):
        stopped_well(job, name, job.stop(name, how, at, delay), how)
        assert at <= len(parts(job.folder(name))) < len(parts(job.folder("whole")))
    job.finish(name)


@pytest.mark.parametrize("how", [KILL, INTERRUPT], ids=["kill", "interrupt"])
@pytest.mark.parametrize("lacking", [3, 0])
def test_stopped_in_the_middle_of_a_write(job, how, lacking):
    """Of a part, or (where no part is lacking) of the table of results."""
    name, keep = f"write {how.name} {lacking}", len(parts(job.folder("whole"))) - lacking
    job.copy(name, keep)
    stopped_well(job, name, job.run(name, IN_A_WRITE.format(name=how.name)), how)
    assert len(parts(job.folder(name))) == keep
    job.finish(name)


@pytest.mark.parametrize("how", [KILL, INTERRUPT], ids=["kill", "interrupt"])
def test_stopped_in_the_middle_of_a_trace(job, how):
    name, keep = f"trace {how.name}", len(parts(job.folder("whole"))) - 3
    job.copy(name, keep)
    stopped_well(job, name, job.run(name, IN_A_TRACE.format(name=how.name)), how)
    assert len(parts(job.folder(name))) == keep
    job.finish(name)


@pytest.mark.parametrize(
    "how", [pytest.param(KILL, marks=pytest.mark.full, id="kill"), pytest.param(INTERRUPT, id="interrupt")]
)
def test_stopping_several_models_stops_them_all(commands, tmp_path, how):  # noqa: F811
    """Bundled models run side by side; no process of theirs may outlive the command (it would hold its lock)."""
    folders = [tmp_path / name for name in ("tiny-gdn", "tiny-mamba2")]
    given = [word for folder in folders for word in ("--model", folder.name)]
    pid = commands.start("find", *given, "--quick", "--out", tmp_path)
    until = time.monotonic() + 120
    while not any(map(parts, folders)):
        assert time.monotonic() < until, "no model had a part"
        time.sleep(0.01)
    os.kill(pid, how)
    done = commands.wait(pid)
    time.sleep(0.5)  # a killed process may take a moment to let go
    for folder in folders:
        with Store(folder):
            pass
    assert done.stderr.splitlines() == ([INTERRUPTED] if how == INTERRUPT else [])
    assert (done.code, done.stdout) == (130 if how == INTERRUPT else -KILL, "")


def test_a_job_of_seconds_survives_six_kills(commands, tmp_path):  # noqa: F811
    job = Job(commands, tmp_path, ("--variants", "chat8", "--n", "40"))
    job.run_whole()
    job.survives(6, seed=0)


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_the_main_job_survives_twenty_kills(commands, tmp_path):  # noqa: F811
    job = Job(commands, tmp_path, ())
    job.run_whole()
    job.survives(20, seed=1)
