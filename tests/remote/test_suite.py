"""The command line against a real NDIF, as a user has it: from an installed package, outside the repository.

Tables are those of a local run: the same rows, rates and answers identical, numbers within 1e-4.
"""

import os
import signal
import time

import numpy as np
import pandas as pd
import pytest

from encode_address.experiments import EXPERIMENTS
from encode_address.models.loading import GROUND_TRUTH
from tests.remote.installed import Installed, ended
from tests.remote.stack import SANDBOXED, TRUSTED

pytestmark = pytest.mark.ndif
TOLERANCE = 1e-4
PLACE = ("key", "where", "device", "fingerprint")  # columns that say where a row was made
EVERYTHING = """
import sys, encode_address
from encode_address.paper import run
name, out, remote = sys.argv[1:]
print(run(encode_address.load(name, remote=remote == "remote"), out, quick=True))
"""
SMALL = [("find", "tiny-mamba2"), ("state", "tiny-mamba2"), ("query-key", "tiny-mamba2")]
SANDBOX = [(name, model) for name in ("find", "state") for model in GROUND_TRUTH]


@pytest.fixture(scope="session")
def installed(tmp_path_factory):
    return Installed(tmp_path_factory.mktemp("user"))


@pytest.fixture(scope="session")
def local(installed):
    """`local(experiment, model)`: the folder of that run made here."""
    made = {}

    def local(name, model):
        if (name, model) not in made:
            made[name, model] = installed.run(*command(name, model, "local"))
        return folder(installed, name, model, "local")

    return local


def command(name, model, out):
    return [*(["find"] if name == "find" else ["run", name]), "--model", model, "--quick", "--out", out]


def folder(installed, name, model, out):
    return installed.folder / out / model / ("" if name == "find" else name)


def client(ndif, key):
    return {**ndif.client(), "NDIF_API_KEY": key}


def assert_same_tables(here, there):
    here, there = (ordered(pd.read_parquet(one / "cells.parquet")) for one in (here, there))
    assert set(here.columns) == set(there.columns)
    assert len(here) == len(there) > 0
    for column in here.columns:
        differing = [(a, b) for a, b in zip(here[column], there[column]) if not same(a, b)]
        assert not differing, f"{column}: {len(differing)} of {len(here)} differ, e.g. {differing[:3]}"


def ordered(table):
    """By the words and integers of each row, which say what it is and what the model answered."""
    table = table.drop(columns=[name for name in PLACE if name in table])
    words = [name for name in table if isinstance(table[name].dtype, pd.StringDtype) or table[name].dtype.kind == "i"]
    words = sorted({*words, *table.columns.intersection(["head"])})  # a number, but missing where there is none
    return table.sort_values(words, kind="stable").reset_index(drop=True)


def same(a, b):
    if isinstance(a, (list, np.ndarray)) and isinstance(b, (list, np.ndarray)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return (np.isnan(a) and np.isnan(b)) or abs(a - b) <= TOLERANCE
    return a == b or (pd.isna(a) and pd.isna(b))


def test_every_experiment(ndif, installed):
    runs = [
        installed.start("tiny-gdn", f"everything-{where}", where, code=EVERYTHING, client=client(ndif, TRUSTED))
        for where in ("local", "remote")
    ]
    assert len({ended(run) for run in runs}) == 1  # what could not be run, and why
    for name in ("find", *EXPERIMENTS):
        here, there = (folder(installed, name, "tiny-gdn", f"everything-{where}") for where in ("local", "remote"))
        if (here / "cells.parquet").exists():
            assert_same_tables(here, there)


@pytest.mark.parametrize(("name", "model"), SMALL)
def test_trusted(ndif, installed, local, name, model):
    installed.run(*command(name, model, "trusted"), "--remote", client=client(ndif, TRUSTED))
    assert_same_tables(local(name, model), folder(installed, name, model, "trusted"))


@pytest.mark.parametrize(("name", "model"), SANDBOX)
def test_sandboxed(ndif, installed, local, name, model):
    installed.run(*command(name, model, "sandboxed"), "--remote", client=client(ndif, SANDBOXED))
    assert_same_tables(local(name, model), folder(installed, name, model, "sandboxed"))


# -- faults ------------------------------------------------------------------
def waiting(ndif, installed, out):
    """A client that has a job under way in a sandbox, where a job takes seconds."""
    before = ndif.jobs()
    process = installed.start(*command("state", "tiny-gdn", out), "--remote", client=client(ndif, SANDBOXED))
    until = time.monotonic() + 120
    while ndif.jobs() == before:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.1)
    return process


def test_client_waits_for_an_api_that_was_killed(ndif, installed, local):
    process = waiting(ndif, installed, "api")
    ndif.kill_api()
    ndif.start_api()
    output, _ = process.communicate()
    ndif.wait()
    if process.returncode:  # the server took longer than the client's patience: the same command goes on
        assert process.returncode == 2
        assert "error: NDIF at" in output.splitlines()[-1]
        installed.run(*command("state", "tiny-gdn", "api"), "--remote", client=client(ndif, SANDBOXED))
    assert_same_tables(local("state", "tiny-gdn"), folder(installed, "state", "tiny-gdn", "api"))


def test_replica_that_dies_under_a_job(ndif, installed, local):
    process = waiting(ndif, installed, "replica")
    ndif.kill_replica("tiny-gdn")
    output, _ = process.communicate()
    if process.returncode:
        assert process.returncode == 2
        assert output.splitlines()[-1].startswith("error: ")
        installed.run(*command("state", "tiny-gdn", "replica"), "--remote", client=client(ndif, SANDBOXED))
    assert_same_tables(local("state", "tiny-gdn"), folder(installed, "state", "tiny-gdn", "replica"))


def test_killed_client_goes_on_with_its_job(ndif, installed, local):
    before = ndif.jobs()
    process = waiting(ndif, installed, "killed")
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    installed.run(*command("state", "tiny-gdn", "killed"), "--remote", client=client(ndif, SANDBOXED))
    assert_same_tables(local("state", "tiny-gdn"), folder(installed, "state", "tiny-gdn", "killed"))
    whole = ndif.jobs()
    installed.run(*command("state", "tiny-gdn", "again"), "--remote", client=client(ndif, SANDBOXED))
    assert whole - before == ndif.jobs() - whole  # none was sent twice
