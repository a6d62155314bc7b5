"""Stores of other versions are refused, a fresh start forgets rows, and a dry run may ask what is stored."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from encode_address import __version__
from encode_address.errors import StoreError
from encode_address.run.store import FINISHED, Store, stored_keys
from tests.test_store import ROWS, child, output


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a folder but the lock."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def written(folder: Path, by: str | None = None) -> Path:
    """A folder of results with rows, a figure and a note; `by` replaces what it says of who wrote it."""
    with Store(folder) as store:
        store.append(ROWS[:4])
        store.append(ROWS[4:])
        store.finish(store.table(["k0"]), summary__csv="a,b\n", verdict__json={}, manifest__json={"rows": 1})
    (folder / "figures").mkdir()
    (folder / "figures" / "circuit.png").write_text("a figure")
    (folder / "notes.txt").write_text("mine")
    if by is not None:
        (folder / ".parts" / "written-by.json").write_text(by)
    if by == "":
        (folder / ".parts" / "written-by.json").unlink()
    return folder


OTHERS = {  # what the file says: how the refusal calls it
    '{"encode_address": "0.0.1"}': "encode_address 0.0.1",
    "": "an unknown version of encode_address",
    '{"encode_': "an unknown version of encode_address",
    '["0.1.0"]': "an unknown version of encode_address",
}


@pytest.mark.parametrize("by", OTHERS)
def test_rows_of_another_version_are_refused_and_left_alone(tmp_path, by):
    folder = written(tmp_path / "out", by)
    before = contents(folder)
    with pytest.raises(StoreError) as error, Store(folder):
        pass
    assert str(error.value) == (
        f"{folder} holds rows of {OTHERS[by]}, and this is {__version__}: "
        "start over with --fresh, or choose another --out"
    )
    assert contents(folder) == before
    with Store(folder, fresh=True) as store:  # and the refusal let go of the lock
        assert store.keys() == set()
        store.append(ROWS[:1])
    with Store(folder) as store:
        assert store.keys() == {"k0"}


def test_a_store_says_who_wrote_it_before_it_has_rows(tmp_path):
    code = """
        import os, signal
        replace = os.replace
        def stopped(source, target):
            if str(target).endswith(".parquet"):
                os.kill(os.getpid(), signal.SIGKILL)
            replace(source, target)
        os.replace = stopped
        with Store(folder) as store:
            store.append([{"key": "k0"}])
    """
    assert child(code, tmp_path).wait(timeout=60) == -signal.SIGKILL
    assert [path.name for path in (tmp_path / ".parts").glob("*.parquet")] == []
    assert json.loads((tmp_path / ".parts" / "written-by.json").read_text()) == {"encode_address": __version__}
    with Store(tmp_path) as store:
        assert store.keys() == set()


# -- starting over, and asking what is there --------------------------------------------------
def test_fresh_forgets_rows_and_results_and_nothing_else(tmp_path):
    folder = written(tmp_path / "out")
    assert set(FINISHED) <= set(contents(folder))
    with Store(folder, fresh=True) as store:
        assert set(contents(folder)) == {"notes.txt", "figures/circuit.png"}
        assert store.keys() == set()
        with pytest.raises(StoreError, match="lacks 1 rows"):
            store.table(["k0"])
        store.append(ROWS[1:3])
        assert store.keys() == {"k1", "k2"}
    with Store(folder) as store:
        assert store.table(["k2"]).to_dict("records") == [ROWS[2]]


def test_fresh_in_a_new_folder_is_a_new_store(tmp_path):
    with Store(tmp_path / "new", fresh=True) as store:
        store.append(ROWS)
    assert stored_keys(tmp_path / "new") == {row["key"] for row in ROWS}


def test_a_fresh_start_does_not_touch_what_another_run_is_writing(tmp_path):
    code = """
        try:
            with Store(folder, fresh=True) as store:
                print("entered", sorted(store.keys()))
        except StoreError as error:
            print(error)
    """
    folder = written(tmp_path / "out")
    with Store(folder) as store:
        before = contents(folder)
        assert output(child(code, folder)).endswith("is in use by another run: wait for it, or choose another --out")
        assert contents(folder) == before
        assert len(store.table(["k0", "k5"])) == 2
    assert output(child(code, folder)) == "entered []"


@pytest.mark.parametrize("removed", range(1, 9))
def test_killed_while_it_forgets_it_is_a_store_all_the_same(tmp_path, removed):
    """4 finished files, 2 parts and the signature go, in an order that every stop on the way can be continued from."""
    code = """
        import os, signal
        count, unlink, remove = 0, os.unlink, os.rmdir
        def stopping(function):
            def stopped(*arguments, **options):
                global count
                function(*arguments, **options)
                count += 1
                if count == int(sys.argv[3]):
                    os.kill(os.getpid(), signal.SIGKILL)
            return stopped
        os.unlink, os.rmdir = stopping(unlink), stopping(remove)
        with Store(folder, fresh=True):
            print("entered")
    """
    folder = written(tmp_path / "out")
    process = child(code, folder, removed)
    assert process.wait(timeout=60) == -signal.SIGKILL, process.communicate()
    with Store(folder) as store:
        kept = store.keys()
        assert len(kept) in (0, 2, 4, 6)
        assert store.table(sorted(kept)).to_dict("records") == [row for row in ROWS if row["key"] in kept]
    assert {"notes.txt", "figures/circuit.png"} <= set(contents(folder))


def test_stored_keys_are_those_that_a_run_would_reuse(tmp_path):
    folder = written(tmp_path / "out")
    before = contents(folder)
    with Store(folder) as store:  # it waits for no lock
        assert stored_keys(folder) == stored_keys(str(folder)) == store.keys() == {row["key"] for row in ROWS}
    assert contents(folder) == before


@pytest.mark.parametrize("by", OTHERS)
def test_rows_of_another_version_are_no_stored_keys(tmp_path, by):
    assert stored_keys(written(tmp_path / "out", by)) == set()


def test_asking_for_stored_keys_creates_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for name in ("none", "file", "empty"):
        assert stored_keys(tmp_path / name) == set()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["empty", "file"]
