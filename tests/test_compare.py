"""`compare`: the published numbers are tidy, ours is put beside the right one, and shapes can disagree."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import encode_address as ea
from encode_address.compare import as_text, compare, write
from encode_address.compare.numbers import SHARES, beside
from encode_address.compare.published import KEY, matched, published
from encode_address.errors import EncodeAddressError, StoreError
from encode_address.experiments import EXPERIMENTS
from encode_address.stats import Estimate

SMALL, NINE = "Qwen/Qwen3.5-0.8B", "Qwen/Qwen3.5-9B"
Z = 1.959963984540054
LAYOUT = {"blocks": [{"name": f"G{i}", "layers": [2 * i], "reader": 2 * i + 1} for i in range(4)], "softmax": [1, 3, 5, 7]}  # fmt: skip


def stored(folder: Path, model: str, rows: list[dict], **verdict) -> Path:
    """A finished run of hand-made rows."""
    folder.mkdir(parents=True, exist_ok=True)
    shared = {"variant": "chat8", "split": "confirmation", "dictionary_seed": 0.0, "model": model, "position": "final"}
    table = pd.DataFrame([{"key": f"{folder.name}-{i}", **shared, **row} for i, row in enumerate(rows)])
    table.to_parquet(folder / "cells.parquet")
    (folder / "verdict.json").write_text(json.dumps({"model": model, **verdict}))
    return folder


def transplants(right: int, n: int, block: str = "G3", **more) -> list[dict]:
    """n pairs, `right` of them redirected."""
    shared = {"experiment": "transplant", "intervention": "transplant", "block": block, "donor": "same-dictionary"}
    return [{**shared, "pair": i, "redirected": i < right, "kept": i >= right, **more} for i in range(n)]


def wilson(p: float, n: int) -> tuple[float, float]:
    middle = (p + Z**2 / (2 * n)) / (1 + Z**2 / n)
    half = Z / (1 + Z**2 / n) * math.sqrt(p * (1 - p) / n + Z**2 / (4 * n**2))
    return middle - half, middle + half


def line(frame: pd.DataFrame, **where) -> pd.Series:
    """The one number with these factors."""
    some = frame[frame["kind"] == "number"]
    for column, value in where.items():
        some = some[some[column] == value]
    assert len(some) == 1, some
    return some.iloc[0]


# -- the published numbers ------------------------------------------------------------------------------------------
def test_the_published_numbers_are_tidy():
    table = published()
    assert not table.duplicated(KEY).any()
    assert table["value"].notna().all()
    assert {s for sections in table["spec_section"] for s in sections.split(";")} == {f"5.{i}" for i in range(1, 11)} | {"3.10"}  # fmt: skip
    n = table["n"].dropna()
    assert len(n) > 700
    assert (n == n.round()).all()
    assert (n > 0).all()
    assert table.loc[table["measure"].isin(SHARES) | table["measure"].str.startswith("attention"), "value"].between(0, 1).all()  # fmt: skip
    assert (table.loc[table["measure"] == "perplexity", "value"] > 1).all()
    assert set(table["relation"]) == {"=", "~", "<=", ">="}
    assert set(table["source"]) == {"paper", "repository JSON", "README"}
    assert (table[["experiment", "unit", "measure", "paper_name"]] != "").sum().min() >= len(table) - 40
    two_models = {"cross-transplant", "cross-encode", "block-replacement"}
    ours = {*EXPERIMENTS, "removal-mmlu", "minimal", "writers", "routes", "state-rank"}
    assert set(table["experiment"]) <= ours | two_models
    assert set(table.loc[table["model"] == "", "experiment"]) <= two_models
    assert table["model"].nunique() == 9


@pytest.mark.parametrize(
    ("value", "n", "where"),
    [
        (0.13, 100, {"model": SMALL, "experiment": "removal", "variant": "chat8", "unit": "G3", "measure": "accuracy"}),
        (11.6, 100, {"model": NINE, "experiment": "removal", "variant": "chat8", "unit": "G4", "measure": "gap"}),
        (0.97, 200, {"model": SMALL, "variant": "perm8", "unit": "G4", "measure": "accuracy"}),
        (0.62, 207, {"model": NINE, "variant": "mmlu5", "unit": "G4", "measure": "accuracy"}),
        (-0.57, 100, {"model": SMALL, "variant": "rev8", "unit": "G3", "condition": "Q ablated", "measure": "selectivity"}),
        (0.98, 100, {"model": NINE, "experiment": "transplant", "variant": "rev8", "unit": "G4", "position": "final", "measure": "redirected"}),
        (0.10, 200, {"paper_name": "Granite4.0-7B", "experiment": "encode", "unit": "G0", "condition": "value"}),
        (0.91, 200, {"model": SMALL, "experiment": "cross-transplant", "condition": "donor Granite4.0-1B", "variant": "chat8"}),
        (0.54, 200, {"model": SMALL, "measure": "accuracy", "condition": "Address of Granite4.0-7B"}),
        (0.34, None, {"paper_name": "Qwen3.5-35B-A3B", "experiment": "scaling", "measure": "accuracy"}),
        (86.4, None, {"paper_name": "Granite4.0-1B", "experiment": "minimal", "unit": "pre-reader", "measure": "perplexity"}),
        (9.6, None, {"model": NINE, "experiment": "state-rank", "unit": "Address"}),
    ],
)  # fmt: skip
def test_what_the_specification_has_is_what_is_shipped(value, n, where):
    some = published()
    for column, wanted in where.items():
        some = some[some[column] == wanted]
    assert len(some) == 1
    assert some["value"].item() == value
    assert some["n"].isna().item() if n is None else some["n"].item() == n


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Qwen/Qwen3.5-9B", NINE), ("/data/models/qwen3.5-9b", NINE), ("my-Qwen3.5-9B", NINE), ("Qwen--Qwen3.5-0.8B", SMALL),
        ("./granite-4.0-h-tiny", "ibm-granite/granite-4.0-h-tiny"), ("unqwen3.5-9b", None), ("Qwen/Qwen3.5-9B-Base", None),
        ("Qwen3.5-9B/tuned", None), ("tiny-gdn", None), ("h-tiny", None),
    ],
)  # fmt: skip
def test_a_model_is_matched_by_the_last_part_of_its_name(model, name):
    assert matched(model, published()["model"].unique()) == name


# -- numbers ----------------------------------------------------------------------------------------------------------
def test_a_share_is_put_beside_the_published_one_with_newcombes_interval(tmp_path):
    rows = transplants(45, 50) + transplants(0, 50, "G1") + transplants(50, 50, split="discovery")
    frame = compare(stored(tmp_path / "x", "/somewhere/qwen3.5-0.8b", rows))
    where = {"experiment": "transplant", "unit": "G3", "measure": "redirected"}
    row = line(frame, **where)
    (low, high), (low2, high2), d = wilson(0.9, 50), wilson(0.99, 100), 0.9 - 0.99
    assert (row["ours"], row["n"], row["published"], row["published_n"]) == (0.9, 50, 0.99, 100)
    assert row["difference"] == pytest.approx(d)
    assert row["difference_low"] == pytest.approx(d - math.hypot(0.9 - low, high2 - 0.99), abs=1e-6)
    assert row["difference_high"] == pytest.approx(d + math.hypot(high - 0.9, 0.99 - low2), abs=1e-6)
    assert row["result"] == "differs"
    assert line(frame, unit="G1", measure="redirected")["result"] == "no difference seen"
    text = as_text(frame)
    assert "beside the published numbers of Qwen/Qwen3.5-0.8B (matched by name): 2 numbers, 2 tested, 1 differ" in text
    assert "0.90 [0.79, 0.96]" in text
    assert "with nothing here to put beside: block-replacement" in text


def test_what_has_no_n_or_no_spread_is_not_tested():
    ours = Estimate(0.9, 100, 0.8, 1.0)
    base = {"relation": "=", "value": 1.043, "n": 100.0, "sem": 0.008, "measure": "recovery"}
    said = beside(ours, pd.Series(base))
    assert said["difference_low"] == pytest.approx(-0.143 - math.hypot(0.1, 1.96 * 0.008))
    assert said["difference_high"] == pytest.approx(-0.143 + math.hypot(0.1, 1.96 * 0.008) + 0, abs=1e-12)
    assert said["result"] == "differs"
    for change, result in (
        ({"sem": math.nan}, "no spread published: no test"),
        ({"measure": "accuracy", "value": 0.9, "n": math.nan}, "n unknown: no test"),
        ({"relation": "~"}, "printed as about: no test"),
        ({"relation": ">=", "value": 0.99}, "a bound: not beyond it"),
        ({"relation": "<=", "value": 0.5}, "a bound: beyond it"),
    ):
        said = beside(ours, pd.Series({**base, **change}))
        assert said["result"] == result
        assert "difference_low" not in said
    table = published()
    assert not any("difference_low" in beside(ours, row) for _, row in table[table["n"].isna()].iterrows())


def pairs(n: int, **more) -> list[dict]:
    return [{"pair": i, **more} for i in range(n)]


def forms(n: int, right: int, **more) -> list[dict]:
    """Both forms of n pairs, the clean ones of `right` pairs and no corrupted one answered; margins 3 and 1."""
    return [{"pair": i, "form": f, "target": 2, "correct": f == "clean" and i < right, "choice_correct": i < right, "margin": m, "chance": 0.125, **more}
            for i in range(n) for f, m in (("clean", 3.0), ("corrupted", 1.0))]  # fmt: skip


MASSES = [0.1, 0.05, 0.5, 0.05, 0.02, 0.02, 0.02, 0.04]
ATTENDED = {"attn.L15H5": MASSES}
S = [math.log(m) for m in MASSES]
SELECTIVITY = S[2] - (sum(S) - S[2]) / 7
FIVE = ("chat8", "chat16", "list8", "rev8", "long512")
BASE = {"experiment": "baseline", "intervention": "none"}
GONE = {"experiment": "removal", "intervention": "remove", "mode": "zero", "position": "all", "block": "G3"}
CASES = {
    "accuracy": (SMALL, forms(10, 8, **GONE), {"unit": "G3", "measure": "accuracy"}, 0.4),
    "gap": (SMALL, forms(10, 8, **GONE), {"unit": "G3", "measure": "gap"}, 4.0),
    "other ablation": (SMALL, forms(10, 8, **{**GONE, "mode": "mean"}), {"unit": "G3", "measure": "accuracy"}, None),
    "intact": (SMALL, forms(10, 10, **BASE), {"unit": "intact", "measure": "accuracy", "relation": "="}, 0.5),
    "attention": (SMALL, forms(10, 8, **GONE, **ATTENDED), {"unit": "G3", "measure": "attention_target"}, 0.5),
    "others": (SMALL, forms(10, 8, **GONE, **ATTENDED), {"unit": "G3", "measure": "attention_others"}, sum(MASSES) - 0.5),
    "donor's": (SMALL, transplants(9, 10, donor_index=0, **ATTENDED), {"unit": "G3", "measure": "attention_donor"}, 0.1),
    "mmlu": (NINE, forms(10, 6, **{**GONE, "experiment": "removal-mmlu", "block": "G4"}, variant="mmlu5"), {"unit": "G4", "measure": "accuracy"}, 0.3),
    "selectivity": (SMALL, pairs(6, experiment="query-key", block="G3", ablation="zero", query_from="without", key_from="intact", target=2, **ATTENDED),
                    {"condition": "Q ablated", "measure": "selectivity"}, SELECTIVITY),
    "top1": (SMALL, pairs(6, experiment="query-key", block="G3", ablation="zero", query_from="without", key_from="intact", target=0, **ATTENDED),
             {"condition": "Q ablated", "measure": "top1"}, 0.0),
    "resampled": (SMALL, pairs(6, experiment="query-key", block="G3", ablation="resampled", query_from="without", key_from="intact", target=2, **ATTENDED),
                  {"condition": "Q ablated", "measure": "selectivity"}, None),
    "state": (NINE, [{**r, "redirected": r["pair"] < 9} for r in pairs(10, experiment="state", intervention="state", mode="recurrent", block="G4", donor="same-dictionary")],
              {"unit": "G4", "condition": "recurrent"}, 0.9),
    "input": (NINE, [{**r, "redirected": r["pair"] < 1} for r in pairs(10, experiment="state", intervention="input", mode="", block="G4", donor="same-dictionary")],
              {"unit": "G4", "condition": "input"}, 0.1),
    "encode": (NINE, [{**r, "carried": r["pair"] < 7} for r in pairs(10, experiment="encode", intervention="transplant", block="G0", swap="key")],
               {"unit": "G0", "condition": "key"}, 0.7),
    "encode-linear": (NINE, forms(10, 8, experiment="encode-linear", block="G0", arm="linear", unit="layers"), {"measure": "accuracy"}, 0.4),
    "upstream": (NINE, [{**r, "redirected": r["pair"] < 2} for r in pairs(10, experiment="upstream", block="G4", donor="same-dictionary", without="feeders")],
                 {"experiment": "upstream"}, 0.2),
    "pruning": (NINE, [r for v in FIVE for r in forms(10, FIVE.index(v), experiment="pruning", last=19, variant=v)],
                {"unit": "L19", "measure": "choice_accuracy"}, 0.2),
    "pruning, a variant short": (NINE, [r for v in FIVE[1:] for r in forms(10, 5, experiment="pruning", last=19, variant=v)],
                                 {"unit": "L19", "measure": "choice_accuracy"}, None),
    "normalised": (NINE, [r for v in FIVE for layer, right in ((19, 5), (31, 10)) for r in forms(10, right, experiment="pruning", last=layer, variant=v)],
                   {"unit": "L19", "measure": "normalised_choice_accuracy"}, (0.5 - 1 / 8) / (1 - 1 / 8)),
    "scaling": (SMALL, [{**r, "experiment": "scaling", "arm": "transplant", "variant": v} for v, k in (("chat8", 10), ("list8", 8), ("rev8", 6)) for r in transplants(k, 10)],
                {"experiment": "scaling", "measure": "redirected"}, 0.8),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_ours_is_what_the_rows_say(tmp_path, name):
    model, rows, where, value = CASES[name]
    frame = compare(stored(tmp_path / "x", model, rows))
    if value is None:
        some = frame[frame["kind"] == "number"]
        assert some[(some[list(where)] == pd.Series(where)).all(axis=1)].empty
    else:
        assert line(frame, **where)["ours"] == pytest.approx(value)


def test_an_experiments_own_run_comes_before_finds(tmp_path):
    stored(tmp_path / "m", SMALL, transplants(45, 50))
    frame = compare(tmp_path / "m")
    assert line(frame, unit="G3", measure="redirected")["ours"] == 0.9
    stored(tmp_path / "m" / "transplant", SMALL, transplants(10, 20), experiment="transplant")
    for folder in (tmp_path, tmp_path / "m", tmp_path / "m" / "transplant"):
        row = line(compare(folder), unit="G3", measure="redirected")
        assert (row["ours"], row["n"]) == (0.5, 20)
        assert row["setting"].startswith("transplant, seed 0")


# -- shapes -----------------------------------------------------------------------------------------------------------
def shapes(frame: pd.DataFrame, variant: str = "chat8") -> dict[str, str]:
    some = frame[(frame["kind"] == "shape") & (frame["variant"].isna() | (frame["variant"] == variant))]
    return dict(zip(some["condition"], some["result"]))


REDIRECTS, ENCODES = "only the Address's output at the last token redirects", "Encode is the first block"
ALONE, QUERY = "no other block carries swapped values or keys", "the Address builds the query, not the keys"
STATE, INPUT = "only the Address's recurrent state before the last token redirects", "the Address's input at the last token does not redirect"  # fmt: skip
FIRST, NEEDED = "removing the first block breaks accuracy", "removing the Address breaks accuracy, other blocks do not"  # fmt: skip
JUMP = "retrieval jumps at a reader's layer"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """Small runs of tiny-gdn; what `find` would say is given, so that it need not run."""
    out, model = tmp_path_factory.mktemp("tiny"), ea.load("tiny-gdn")
    said = {"encode": ["G0"], "address": ["G2"], "readers": ["L7H1", "L7H0"]}
    (out / "tiny-gdn").mkdir()
    (out / "tiny-gdn" / "verdict.json").write_text(json.dumps({"model": "tiny-gdn", "variants": {"chat8": said}}))
    for name, n in (("encode", 60), ("transplant", 16), ("state", 16), ("pruning", 8), ("query-key", 6)):
        ea.experiment(name, model, "chat8", n=n, out=out)
    ea.experiment("transplant", ea.load("tiny-gdn-negative"), "chat8", n=16, out=out)
    return out


def test_a_bundled_model_has_shapes_and_no_numbers(tiny):
    frame = compare(tiny)
    assert set(frame["kind"]) == {"shape"}
    assert not {"published", "difference"} & {*frame.dropna(axis=1, how="all")}
    assert shapes(frame[frame["model"] == "tiny-gdn"]) == {
        ENCODES: "agrees", ALONE: "agrees", REDIRECTS: "agrees", STATE: "disagrees", INPUT: "agrees", QUERY: "agrees",
        JUMP: "agrees", FIRST: "not run", NEEDED: "not run",
    }  # fmt: skip
    negative = shapes(frame[frame["model"] == "tiny-gdn-negative"])
    assert negative[REDIRECTS] == "disagrees"
    assert {result for claim, result in negative.items() if claim != REDIRECTS} == {"not run"}
    text = as_text(frame)
    assert "G2 (with its convolutional state 1.00 [0.81, 1.00]) 0.00 [0.00, 0.19]" in text, "why it disagrees"
    for model in ("tiny-gdn", "tiny-gdn-negative"):
        assert f"{model} is a bundled model and none of the paper's" in text
    assert "G2 1.00 [0.81, 1.00]; G0 0.00 [0.00, 0.19]" in text
    alone = compare(tiny / "tiny-gdn" / "query-key")  # the circuit is said one folder above
    assert shapes(alone)[QUERY] == "agrees"


def test_shapes_disagree_or_stay_open_where_rows_say_so(tmp_path):
    hosts = [{**row, "intervention": "none", "block": "", "donor": ""} for row in transplants(0, 40)]
    address = {"variants": {"chat8": {"address": ["G2"], "encode": [], "readers": []}}, "layout": LAYOUT}

    def judged(rows: list[dict]) -> str:
        return shapes(compare(stored(tmp_path / "x", "some/thing-3b", [*hosts, *rows], **address)))[REDIRECTS]

    others = [row for block in ("G0", "G1", "G3") for row in transplants(0, 40, block)]
    assert judged([*others, *transplants(40, 40, "G2")]) == "agrees"
    assert judged([*others, *transplants(22, 40, "G2")]) == "undecided"
    assert judged([*others, *transplants(8, 40, "G2")]) == "disagrees"
    assert judged([*others[40:], *transplants(40, 40, "G2"), *transplants(40, 40, "G0")]) == "disagrees"
    weak = [{**row, "kept": row["pair"] < 20} for row in hosts]
    frame = compare(stored(tmp_path / "y", "some/thing-3b", [*weak, *others, *transplants(40, 40, "G2")], **address))
    assert shapes(frame)[REDIRECTS] == "undecided"
    assert "what it seems to do is no evidence" in as_text(frame)
    assert "no published numbers for some/thing-3b; published are: Qwen/Qwen3.5-0.8B, " in as_text(frame)


def test_removal_shapes(tmp_path):
    def removed(block: str, right: int) -> list[dict]:
        return [{"pair": i, "correct": i < right, **GONE, "block": block} for i in range(40)]

    rows = [{"pair": i, "correct": True, **BASE} for i in range(40)]
    address = {"variants": {"chat8": {"address": ["G2"]}}, "layout": LAYOUT}
    spared = removed("G1", 36) + removed("G3", 40)
    for first, own, wanted in ((0, 2, ("agrees", "agrees")), (38, 40, ("disagrees", "disagrees"))):
        table = [*rows, *spared, *removed("G0", first), *removed("G2", own)]
        found = shapes(compare(stored(tmp_path / "x", "m", table, **address)))
        assert (found[FIRST], found[NEEDED]) == wanted
    nameless = compare(stored(tmp_path / "y", "m", [*rows, *spared, *removed("G0", 0)], layout=LAYOUT))
    assert shapes(nameless)[NEEDED] == "undecided"
    assert "no Address is known" in as_text(nameless)


# -- seeds, files, mistakes -------------------------------------------------------------------------------------------
def test_the_spread_between_seeds(tmp_path):
    folders = []
    for seed, right in enumerate((40, 44, 48)):
        rows = [{**row, "dictionary_seed": float(seed)} for row in transplants(right, 50)]
        folders.append(stored(tmp_path / f"seed{seed}", "some/thing-3b", rows, experiment="transplant"))
    frame = compare(*folders, seeds=3)
    row = frame[(frame["kind"] == "seeds") & (frame["measure"] == "redirected")].iloc[0]
    shares = np.array([0.8, 0.88, 0.96])
    assert row["ours"] == pytest.approx(shares.mean())
    assert row["sd"] == pytest.approx(np.sqrt(((shares - shares.mean()) ** 2).sum() / 2))
    assert (row["unit"], row["n"]) == ("G3", 50)
    assert row["note"].startswith("seeds 0, 1, 2; lowest 0.800, highest 0.960")
    assert "0.880  0.080" in as_text(frame)
    line = r"has 2 \(0, 1\): run `encode-address run transplant --model some/thing-3b --seed 2 --out results-seed2`"
    with pytest.raises(EncodeAddressError, match=line):
        compare(*folders[:2], seeds=3)
    with pytest.raises(EncodeAddressError, match="two seeds or more"):
        compare(*folders, seeds=1)


def test_several_seeds_of_one_folder_are_more_pairs(tmp_path):
    rows = [{**row, "dictionary_seed": float(seed)} for seed in (0, 1) for row in transplants(45, 50)]
    row = line(compare(stored(tmp_path / "x", SMALL, rows)), unit="G3", measure="redirected")
    assert (row["ours"], row["n"]) == (0.9, 100)


def test_the_file_is_the_frame(tmp_path):
    folder = stored(tmp_path / "x", SMALL, transplants(45, 50))
    frame = compare(folder)
    path = write(frame, folder)
    assert path == folder / "compare.csv"
    back = pd.read_csv(path)
    assert len(back) == len(frame)
    assert line(back, unit="G3", measure="redirected")["difference"] == pytest.approx(-0.09)
    assert compare(folder).equals(frame), "the file is no result"
    with pytest.raises(StoreError):
        write(frame, path)


def test_mistakes_are_one_line(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(EncodeAddressError, match=r"no finished results in .*: give the folder that") as caught:
            compare(folder)
        assert "\n" not in str(caught.value)
    folder = stored(tmp_path / "x", SMALL, transplants(45, 50))
    (folder / "verdict.json").write_text("{")
    with pytest.raises(EncodeAddressError, match=r"verdict\.json cannot be read; run again"):
        compare(folder)
