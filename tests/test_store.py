"""The store: rows survive kills, full disks and restarts whole; two runs never share a folder."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import tracemalloc
from collections.abc import Sequence

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from encode_address import __version__
from encode_address.errors import StoreError
from encode_address.run.store import Store, write_text

ROWS = [{"key": f"k{i}", "pair": i, "correct": i % 2 == 0, "margin": i / 3} for i in range(6)]


def leftovers(folder) -> list[str]:
    """Temporary files anywhere under a folder."""
    return [path.name for path in folder.rglob("*") if path.name.endswith(".tmp")]


def child(code: str, *arguments: object, wrapper: Sequence[str] = ()) -> subprocess.Popen:
    """A Python process that imports the store only (not the package's torch and nnsight); arguments: the folder, ..."""
    setup = """
        import importlib.util, sys, types
        from pathlib import Path
        root = Path(sys.argv[1])
        package = types.ModuleType("encode_address")
        package.__path__ = [str(root / "encode_address")]
        package.__version__ = VERSION
        sys.modules["encode_address"] = package
        from encode_address.errors import StoreError
        from encode_address.run.store import Store, write_text
        folder = Path(sys.argv[2])
    """
    script = textwrap.dedent(setup).replace("VERSION", repr(__version__)) + textwrap.dedent(code)
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    command = [*wrapper, sys.executable, "-c", script, root, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def output(process: subprocess.Popen) -> str:
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out.strip()


# -- rows ---------------------------------------------------------------------------------
def test_rows_come_back_in_the_order_asked_for(tmp_path):
    with Store(tmp_path / "deep" / "er") as store:
        store.append(ROWS[3:])
        store.append(ROWS[:3])
        assert store.keys() == {row["key"] for row in ROWS}
        wanted = ["k4", "k0", "k5"]
        table = store.table(wanted)
    assert table["key"].tolist() == wanted
    assert table.to_dict("records") == [ROWS[4], ROWS[0], ROWS[5]]


def test_a_second_store_on_the_folder_has_the_rows_of_the_first(tmp_path):
    keys = [row["key"] for row in ROWS]
    with Store(tmp_path) as store:
        store.append(ROWS[:2])
        store.append(ROWS[2:])
        first = store.table(keys)
    with Store(tmp_path) as again:
        assert again.keys() == set(keys)
        pd.testing.assert_frame_equal(again.table(keys), first)


cell_rows = st.fixed_dictionaries(
    {"key": st.uuids().map(str), "pair": st.integers(0, 9), "said": st.text(max_size=5)},
    optional={
        "correct": st.booleans(),
        "margin": st.floats(allow_nan=False),
        "block": st.sampled_from(["G0", ""]),
        "attn.L3H0": st.lists(st.floats(0, 1), min_size=4, max_size=4),
    },
)


MIXED = [{"key": "a", "pair": 0, "said": "x"}, {"key": "b", "pair": 1, "said": "y", "correct": False}]


@given(rows=st.lists(cell_rows, min_size=1, max_size=8, unique_by=lambda row: row["key"]), cut=st.integers(0, 8))
@example(rows=MIXED, cut=0)
@settings(max_examples=25, deadline=None)
def test_a_resumed_run_has_the_table_of_one_that_was_not_interrupted(tmp_path_factory, rows, cut):
    """Design contract 4. Rows of one part may have different columns: a bundle mixes its interventions."""
    keys = [row["key"] for row in rows]
    folder = tmp_path_factory.mktemp("store")
    parts = [part for part in (rows[:cut], rows[cut:]) if part]
    with Store(folder / "whole") as store:
        for part in parts:
            store.append(part)
        whole = store.table(keys)
    for part in parts:  # one process per part
        with Store(folder / "resumed") as store:
            store.append(part)
    with Store(folder / "resumed") as store:
        resumed = store.table(keys)
    pd.testing.assert_frame_equal(resumed, whole, check_like=True)


def test_a_row_that_is_not_there_is_an_error(tmp_path):
    with Store(tmp_path) as store:
        store.append(ROWS)
        with pytest.raises(StoreError, match="lacks 2 rows"):
            store.table(["k0", "x", "y"])


def test_an_append_adds_one_part_and_leaves_no_temporary_file(tmp_path):
    with Store(tmp_path) as store:
        for i, row in enumerate(ROWS):
            store.append([row])
            assert len(list(store.parts.glob("*.parquet"))) == i + 1
    assert leftovers(tmp_path) == []


def test_finish_writes_the_table_and_the_files(tmp_path):
    with Store(tmp_path) as store:
        store.append(ROWS)
        table = store.table([row["key"] for row in ROWS])
        store.finish(table, manifest__json={"rows": 6}, summary__csv="measure,value\n")
        store.finish(table, manifest__json={"rows": 7}, summary__csv="measure,value\n")
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "cells.parquet"), table)
    assert json.loads((tmp_path / "manifest.json").read_text()) == {"rows": 7}
    assert (tmp_path / "summary.csv").read_text() == "measure,value\n"
    assert leftovers(tmp_path) == []


def test_a_damaged_part_is_named(tmp_path):
    """Renaming makes parts whole; if one is damaged all the same, the user is told which to delete."""
    with Store(tmp_path) as store:
        store.append(ROWS)
        (part,) = store.parts.glob("*.parquet")
    part.write_bytes(part.read_bytes()[:50])
    with Store(tmp_path) as store, pytest.raises(StoreError, match=rf"{part.name} cannot be read; delete it"):
        store.keys()


# -- memory -------------------------------------------------------------------------------
def test_memory_is_flat_over_many_appends(tmp_path):
    """200 parts of 50 rows of 2 kB are 20 MB; what may grow is the map of keys, about 150 bytes a row."""

    def append(part: int) -> None:
        store.append([{"key": f"{part:04}{i:020}", "said": f"{part},{i}" + "x" * 2000} for i in range(50)])

    with Store(tmp_path) as store:
        for part in range(20):  # what is allocated once, is
            append(part)
        tracemalloc.start()
        before, arrow = tracemalloc.get_traced_memory()[0], pa.total_allocated_bytes()
        for part in range(20, 200):
            append(part)
        rows = store.table(sorted(store.keys())[:100])
        assert len(rows) == 100
        del rows
        grown = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        assert pa.total_allocated_bytes() - arrow < 1_000_000
        assert grown < 180 * 50 * 250, grown


def test_a_table_reads_the_parts_of_its_rows_only(tmp_path):
    with Store(tmp_path) as store:
        store.append(ROWS[:3])
        (first,) = store.parts.glob("*.parquet")
        store.append(ROWS[3:])
        first.write_bytes(b"damaged")
        assert store.table(["k5", "k3"]).to_dict("records") == [ROWS[5], ROWS[3]]
        with pytest.raises(StoreError, match=rf"{first.name} cannot be read; delete it"):
            store.table(["k5", "k0"])


# -- two processes ------------------------------------------------------------------------
def test_a_second_process_is_refused_until_the_first_is_done(tmp_path):
    code = """
        try:
            with Store(folder) as store:
                print("entered", sorted(store.keys()))
        except StoreError as error:
            print(error)
    """
    with Store(tmp_path) as store:
        store.append(ROWS[:1])
        assert output(child(code, tmp_path)) == (
            f"{tmp_path} is in use by another run: wait for it, or choose another --out"
        )
    assert output(child(code, tmp_path)) == "entered ['k0']"


def test_a_second_store_in_the_same_process_is_refused_too(tmp_path):
    with Store(tmp_path), pytest.raises(StoreError, match="in use by another run"), Store(tmp_path):
        pass


@pytest.mark.parametrize("moment", [0.0, 0.013, 0.05])
def test_a_killed_process_leaves_whole_parts_only_and_no_lock(tmp_path, moment):
    """kill -9 while a child appends in a loop: every part is readable, numbered rows have no gap."""
    code = """
        with Store(folder) as store:
            i = 0
            while True:
                store.append([{"key": f"{i}-{j}", "i": i, "filling": "x" * 2000} for j in range(50)])
                print(i, flush=True)
                i += 1
    """
    process = child(code, tmp_path)
    for _ in range(5):
        seen = int(process.stdout.readline())
    time.sleep(moment)
    process.send_signal(signal.SIGKILL)
    rest = process.communicate(timeout=60)[0].split()
    assert process.returncode == -signal.SIGKILL
    last = int(rest[-1]) if rest else seen
    parts = list((tmp_path / ".parts").glob("*.parquet"))
    assert all(pq.read_table(part).num_rows == 50 for part in parts)
    with Store(tmp_path) as store:
        assert len(parts) in (last + 1, last + 2)  # the last one may be there before it was printed
        assert store.keys() == {f"{i}-{j}" for i in range(len(parts)) for j in range(50)}
        store.append(ROWS)


# -- folders that cannot be used --------------------------------------------------------------
@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_file_where_the_folder_should_be_is_one_line(tmp_path, below):
    path = tmp_path / "taken"
    path.write_text("a file")
    with pytest.raises(StoreError) as error, Store(path / below):
        pass
    assert str(error.value).startswith(f"cannot write to {path}")
    assert "\n" not in str(error.value)
    assert path.read_text() == "a file"


def test_text_is_not_written_below_a_file(tmp_path):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(StoreError, match=r"cannot write .*; what was finished is kept"):
        write_text(tmp_path / "taken" / "verdict.json", "{}")


FULL_DISK = """
    import os, resource, subprocess
    disk = folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(disk)]
    mounted = sys.argv[3] == "disk" and subprocess.run(mount, capture_output=True).returncode == 0
    if not mounted:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    row = lambda i, size: {"key": f"k{i}", "filling": os.urandom(size // 2).hex()}
    with Store(disk / "out") as store:
        store.append([row(0, 1000)])
        for attempt in (
            lambda: store.append([row(1, 200_000)]),
            lambda: store.finish(store.table(["k0"]), big__txt="x" * 200_000),
        ):
            try:
                attempt()
                print("no error")
            except StoreError as error:
                print(error)
        store.append([row(2, 1000)])
        print(sorted(store.keys()), sorted(Store(disk / "out").keys()))
    print(sorted(path.name for path in disk.rglob("*") if path.name.endswith(".tmp")))
"""


@pytest.mark.parametrize("limit", ["disk", "file size"])
def test_a_full_disk_is_an_error_that_keeps_what_was_finished(tmp_path, limit):
    """A tiny file system in a mount namespace of the child's own; where none may be made, a file size limit again."""
    namespace = ("unshare", "--mount")
    allowed = limit == "disk" and subprocess.run([*namespace, "true"], capture_output=True).returncode == 0
    process = child(FULL_DISK, tmp_path, limit if allowed else "file size", wrapper=namespace if allowed else ())
    lines = output(process).splitlines()
    assert len(lines) == 4
    for line in lines[:2]:
        assert line.startswith(f"cannot write {tmp_path}")
        assert line.endswith("; what was finished is kept")
    assert lines[2:] == ["['k0', 'k2'] ['k0', 'k2']", "[]"]
