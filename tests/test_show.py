"""`show` sums up a results folder from its files alone, as far as they go."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from encode_address.errors import StoreError
from encode_address.run.store import Store
from encode_address.show import screen, show
from encode_address.verdict import Claim, VariantVerdict, Verdict, sentence
from tests.test_store import child, output

HOW = {"model": "toy", "dtype": "bfloat16", "attn_implementation": "sdpa", "device": "cpu", "where": "local"}
FACTS = {**HOW, "revision": "v2", "fingerprint": "0123abcd", "text_source": "bundled", "versions": "torch=2.13.0"}
MANIFEST = {
    "command": {"variants": ["chat8", "list8"], "n": 3, "pool": None, "text": "bundled"},
    **FACTS,
    "git": "e927e12",
    "rows": 12,
    "path_gap": {"final": 1.25e-6, "full": 0.0},
    "this_run": {
        "seconds": 75.25,
        "stages": {"text": 1.5, "chat8 discovery": 60.0},
        "threads": 1,
        "batch_tokens": 8192,
        "tokens_forwarded": 14300,
        "tokens_planned": 14200,
        "floor": 13000,
        "traces": 41,
        "peak_rss_mb": 1234,
    },
}
VERDICT = {
    "status": "FOUND",
    "model": "toy",
    "address_kind": "key",
    "reason": "partial on list8",
    "variants": {
        "chat8": {"encode": ["G0"], "address": ["G2", "G3"], "readers": ["L7H0", "L7H1"]},
        "list8": {"encode": ["G0"], "address": [], "readers": ["L7H0", "L7H1"]},
    },
}
SENTENCE = "FOUND in toy: Encode G0, Address G2+G3 on chat8 (by key), readers L7H0, L7H1 - partial on list8."
TEXT = [{"key": f"t{i}", "experiment": "text", "intervention": "none", **FACTS} for i in range(2)]
ROWS = [
    {"key": f"{variant}{verb}{i}", "experiment": "removal", "variant": variant, "intervention": verb, **FACTS}
    for variant in ("chat8", "list8")
    for verb, many in (("none", 1), ("remove", 4))
    for i in range(many)
]

WHOLE = f"""\
FOLDER
  model        toy, bfloat16, sdpa, cpu, local
  revision     v2
  fingerprint  0123abcd
  command      variants chat8/list8, n 3, text bundled
  versions     torch=2.13.0
  git          e927e12

  experiment  -  chat8  list8  all  interventions
  text        2                  2  none
  removal            5      5   10  none, remove
  all         2      5      5   12

  last run     75.2 s, 41 traces, threads 1, batches of 8,192 tokens, peak 1,234 MB
  tokens       14,300 forwarded, floor 13,000, 14,200 planned, 1.10 x the floor
  stages       text 1.5 s, chat8 discovery 60.0 s
  path gap     final 1.25e-06, full 0

  {SENTENCE}"""


def finished(folder: Path, manifest: dict = MANIFEST, verdict: dict = VERDICT) -> Path:
    """A results folder as `find` leaves it."""
    with Store(folder) as store:
        store.append(TEXT)
        store.append(ROWS)
        table = store.table([row["key"] for row in (*TEXT, *ROWS)])
        store.finish(table, manifest__json=manifest, verdict__json=verdict)
    return folder


def test_the_screen_of_a_finished_run(tmp_path):
    folder = finished(tmp_path / "toy")
    assert screen(folder) == WHOLE.replace("FOLDER", str(folder))
    assert list(show(str(folder))) == [screen(folder)]


def lost_lines(folder: Path, manifest: dict) -> int:
    lines = screen(finished(folder, manifest)).splitlines()
    return sum(line not in lines for line in WHOLE.splitlines()[1:])


@pytest.mark.parametrize("name", MANIFEST)
def test_what_the_manifest_lacks_is_left_out(tmp_path, name):
    """Nothing else changes than the lines that tell it; what rows say too is still told."""
    manifest = {key: value for key, value in MANIFEST.items() if key != name}
    lines = {"this_run": 3, "command": 1, "git": 1, "path_gap": 1}
    assert lost_lines(tmp_path / "toy", manifest) == lines.get(name, 0)


@pytest.mark.parametrize("name", MANIFEST["this_run"])
def test_what_is_not_known_of_a_run_is_left_out(tmp_path, name):
    run = {key: value for key, value in MANIFEST["this_run"].items() if key != name}
    assert lost_lines(tmp_path / "toy", {**MANIFEST, "this_run": run}) == 1


@pytest.mark.parametrize("kept", ["cells.parquet", "manifest.json", "verdict.json"])
def test_one_file_is_enough(tmp_path, kept):
    whole = finished(tmp_path / "whole")
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / kept).write_bytes((whole / kept).read_bytes())
    lines = screen(tmp_path / "one").splitlines()
    facts, counts, cost = WHOLE.splitlines()[1:4], WHOLE.splitlines()[8:12], WHOLE.splitlines()[13:17]
    shows = {"cells.parquet": [*facts, *counts], "manifest.json": [*facts, *cost], "verdict.json": [f"  {SENTENCE}"]}
    for block in shows.values():
        assert (set(block) <= set(lines)) == (set(block) <= set(shows[kept])), block
    assert not any("continues" in line for line in lines)


def test_a_table_of_another_experiment_is_shown_as_far_as_it_goes(tmp_path):
    with Store(tmp_path) as store:
        store.append([{"key": "a", "experiment": "mine", "loss": 0.5}])
        store.finish(store.table(["a"]))
    assert [line.split() for line in screen(tmp_path).splitlines() if "mine" in line] == [["mine", "1", "1", "-"]]


# -- runs that are not finished --------------------------------------------------------------------
def test_a_run_that_was_interrupted_continues(tmp_path):
    with Store(tmp_path) as store:
        store.append(TEXT)
        store.append(ROWS[:3])
    lines = [" ".join(line.split()) for line in screen(tmp_path).splitlines()]
    assert "model toy, bfloat16, sdpa, cpu, local" in lines
    assert lines[lines.index("text 2 2 none") :][:3] == ["text 2 2 none", "removal 3 3 none, remove", "all 2 3 5"]
    assert lines[-1] == "unfinished: 5 rows are stored; the same command continues"


def test_a_run_that_has_no_row_yet(tmp_path):
    with Store(tmp_path):
        pass
    assert screen(tmp_path).splitlines()[-1] == "  unfinished: 0 rows are stored; the same command continues"


def test_rows_beyond_the_table_are_told(tmp_path):
    """They are of a command with other options, or of an interrupted one: the files do not tell which."""
    folder = finished(tmp_path / "toy")
    with Store(folder) as store:
        store.append([{**ROWS[0], "key": "more"}])
    assert (
        "  13 rows are stored, 1 more than the table has: of other options, or of an unfinished run, "
        "which the same command continues"
    ) in screen(folder).splitlines()


def test_rows_of_another_version_do_not_continue(tmp_path):
    folder = finished(tmp_path / "toy")
    (folder / ".parts" / "written-by.json").write_text('{"encode_address": "0.0.1"}')
    text = screen(folder)
    assert "holds rows of encode_address 0.0.1" in text
    assert "--fresh" in text
    assert "continues" not in text
    assert SENTENCE in text


def test_rows_of_several_models_are_told_apart(tmp_path):
    with Store(tmp_path) as store:
        store.append([{**ROWS[0], "dtype": "float32"}, ROWS[1]])
    assert "toy, float32 or bfloat16, sdpa" in screen(tmp_path)


# -- folders ---------------------------------------------------------------------------------------
def test_a_folder_of_several_results_is_shown_one_by_one(tmp_path):
    for name in ("b", "a"):
        finished(tmp_path / name)
    (tmp_path / "figures").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    assert list(show(tmp_path)) == [screen(tmp_path / "a"), screen(tmp_path / "b")]
    assert list(show(tmp_path / "b")) == [screen(tmp_path / "b")]


@pytest.mark.parametrize("name", ["none", "file", "empty", "."])
def test_a_folder_without_results_is_an_error(tmp_path, name):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreError, match=r"no results in .*: give the results folder of a model"):
        list(show(tmp_path / name))


@pytest.mark.parametrize("content", ["", "{", "[1]", '"text"'])
@pytest.mark.parametrize("name", ["manifest.json", "verdict.json", "cells.parquet"])
def test_a_damaged_file_is_named(tmp_path, name, content):
    folder = finished(tmp_path / "toy")
    (folder / name).write_text(content)
    with pytest.raises(StoreError, match=rf"{name} (cannot be read|holds no object).*run again"):
        list(show(folder))


# -- the verdict -----------------------------------------------------------------------------------
def variant(name: str, encode: str = "", address: str = "", readers: str = "") -> VariantVerdict:
    claims = [Claim("found", tuple(names.split())) for names in ("", encode, address, readers)]
    return VariantVerdict(name, *claims, address_kind="key")


VARIANTS = {
    "one": [variant("chat8", "G0", "G1 G2", "L7H0 L7H1")],
    "nothing": [variant("chat8"), variant("rev8")],
    "equal": [variant("chat8", "G0", "G2", "L7H0"), variant("rev8", "G0", "G2", "L7H0")],
    "different": [
        variant("chat8", "G0", "G2", "L7H0"),
        variant("rev8", "", "G2 G3", "L7H0 L7H1"),
        variant("list8", "G0"),
    ],
}


HELD = {
    "one": ("G0", "G1+G2", "L7H0, L7H1"),
    "nothing": ("none", "none", "none"),
    "equal": ("G0", "G2", "L7H0"),
    "different": ("G0 on chat8 and list8", "G2 on chat8; G2+G3 on rev8", "L7H0 on chat8; L7H0, L7H1 on rev8"),
}


@pytest.mark.parametrize(("kind", "by"), [("", ""), ("key", " (by key)")])
@pytest.mark.parametrize(("reason", "tail"), [("", ""), ("the variants disagree", " - the variants disagree")])
@pytest.mark.parametrize("variants", VARIANTS)
def test_the_sentence_says_what_holds_and_where_the_variants_differ_on_which(variants, reason, tail, kind, by):
    verdict = Verdict("UNDECIDED", (), (), (), kind, reason, tuple(VARIANTS[variants]))
    stored = json.loads(json.dumps({**verdict.as_dict(), "model": "toy"}))
    encode, address, readers = HELD[variants]
    assert sentence(stored) == f"UNDECIDED in toy: Encode {encode}, Address {address}{by}, readers {readers}{tail}."


def test_show_needs_no_torch(tmp_path):
    """Looking at results must not wait for what only computing them needs."""
    code = """
        from encode_address.show import show
        print(*show(folder))
        assert not {"torch", "nnsight", "transformers"} & set(sys.modules)
    """
    folder = finished(tmp_path / "toy")
    assert output(child(code, folder)) == screen(folder)
