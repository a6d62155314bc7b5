"""`encode-address paper`: what is run, what is refused, and a page that says only what the tables say."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

from encode_address import paper
from encode_address.compare.results import Source
from encode_address.errors import EncodeAddressError, StoreError, TaskError
from encode_address.experiments import EXPERIMENTS

MODEL = SimpleNamespace(name="toy")


@pytest.fixture
def ran(monkeypatch) -> list[tuple[str, dict]]:
    """What `run` asks for; nothing is computed."""
    asked: list[tuple[str, dict]] = []
    monkeypatch.setattr(paper.circuit, "find", lambda model, **given: asked.append(("find", given)))
    monkeypatch.setattr(paper.lab, "experiment", lambda name, model, **given: asked.append((name, given)))
    return asked


def source(model: str, experiment: str, statuses: dict[str, str], n: int = 3, **more) -> Source:
    rows = [{"key": f"{model}{experiment}{v}{i}", "variant": v, "pair": i} for v in statuses for i in range(n)]
    said = {v: {"status": status, "why": f"{experiment} | of {v}"} for v, status in statuses.items()}
    return Source(Path("none"), model, experiment, pd.DataFrame(rows), {"variants": said, "model": model, **more})


def shapes(*lines: tuple[str, str, str, str]) -> pd.DataFrame:
    columns = ["model", "condition", "variant", "result"]
    return pd.DataFrame(lines, columns=columns).assign(kind="shape", source="all four (5.2)")


# -- running -------------------------------------------------------------------------------------
def test_every_experiment_is_run_with_the_options_that_it_knows(ran, tmp_path):
    assert paper.run(MODEL, tmp_path, n=5, seed=3, data="mmlu", knowledge=True, normalisation=None) == {}
    assert [name for name, _ in ran] == ["find", *EXPERIMENTS]
    given = dict(ran)
    assert given["find"]["variants"] == ("chat8", "list8", "rev8")
    assert {call["n"] for call in given.values()} == {5}
    assert {call["seed"] for call in given.values()} == {3}
    assert [name for name, call in ran if "data" in call] == ["removal-mmlu", "attention-only"]
    assert [name for name, call in ran if "knowledge" in call] == ["pruning"]
    assert not any("normalisation" in call for call in given.values())


def test_without_n_each_takes_its_own(ran, tmp_path):
    paper.run(MODEL, tmp_path, quick=True)
    given = dict(ran)
    assert (given["find"]["n"], given["find"]["variants"]) == (60, ("chat8",))
    assert all((call["n"], call["quick"]) == (None, True) for name, call in ran if name != "find")


def test_what_cannot_be_asked_is_named_and_the_others_run(ran, monkeypatch, tmp_path):
    inner = paper.lab.experiment

    def experiment(name, model, **given):
        if name == "removal-mmlu":
            raise TaskError("no questions here")
        inner(name, model, **given)

    monkeypatch.setattr(paper.lab, "experiment", experiment)
    assert paper.run(MODEL, tmp_path) == {"removal-mmlu": "no questions here"}
    assert [name for name, _ in ran] == ["find", *(name for name in EXPERIMENTS if name != "removal-mmlu")]


def test_a_full_disk_ends_it(ran, monkeypatch, tmp_path):
    def experiment(name, model, **given):
        raise StoreError("cannot write: no space left")

    monkeypatch.setattr(paper.lab, "experiment", experiment)
    with pytest.raises(StoreError, match="no space left"):
        paper.run(MODEL, tmp_path)


def test_a_folder_without_results_is_one_clear_line(tmp_path):
    with pytest.raises(EncodeAddressError, match="no finished results in"):
        paper.write(tmp_path)


# -- the page ------------------------------------------------------------------------------------
def test_the_page_says_what_was_concluded_of_whom():
    found = [
        source("b", "transplant", {"chat8": "does not hold"}),
        source("a", "state", {"chat8": "holds", "list8": "undecided", "rev8": "holds"}),
        source("a", "transplant", {"chat8": "holds", "list8": "holds"}, n=7),
        source("a", "find", {}, status="FOUND", imposed=["which layer reads"]),
    ]
    lines = paper.page(found, shapes(("a", "it moves", "chat8", "agrees"), ("b", "it moves", "chat8", "disagrees"))).splitlines()  # fmt: skip
    transplant = next(line for line in lines if line.startswith("| `transplant` | 3.7 |"))
    assert transplant.endswith("| holds | does not hold |")
    state = next(line for line in lines if line.startswith("| `state` |"))
    assert state.endswith("| holds (chat8, rev8), undecided (list8) | – |")
    assert next(line for line in lines if line.startswith("| `writers` |")).endswith("| – | – |")
    assert next(line for line in lines if line.startswith("| `find` |")).endswith("| FOUND | – |")
    assert "| it moves | all four (5.2) | agrees | disagrees |" in lines
    assert "- `transplant`: **holds** (chat8, list8). chat8, n = 7: transplant | of chat8" in lines
    assert any("`a` was trained for this toolkit" in line and "which layer reads" in line for line in lines)
    assert lines.index("### a") < lines.index("### b")


def test_every_donor_of_a_host_has_its_line():
    """Two donors of one host do not overwrite each other, and a host that a donor was not tried on has a dash."""

    def lent(host: str, experiment: str, donor: str, status: str) -> Source:
        paper_section = {"transfer": "3.12", "replace": "3.13"}[experiment]
        return source(host, experiment, {"chat8": status}, donor=donor, paper=paper_section)

    found = [
        lent("a", "replace", "c", "undecided"),
        lent("a", "transfer", "c", "holds"),
        lent("b", "transfer", "c", "does not hold"),
        lent("a", "transfer", "b", "does not hold"),
        source("a", "transplant", {"chat8": "holds"}),
    ]
    assert list(paper.by_model(found)["a"]) == ["transplant", "transfer from b", "transfer from c", "replace from c"]
    lines = paper.page(found, shapes()).splitlines()
    rows = [line for line in lines if line.startswith(("| `transfer", "| `replace"))]
    assert [(line.split(" | ")[0], *line.split(" | ")[-2:]) for line in rows] == [
        ("| `transfer from b`", "does not hold", "– |"),
        ("| `transfer from c`", "holds", "does not hold |"),
        ("| `replace from c`", "undecided", "– |"),
    ]
    assert all(" | 3.12 | " in line or " | 3.13 | " in line for line in rows)
    details = lines[lines.index("### a") : lines.index("### b")]
    assert "- `transfer from b`: **does not hold** (chat8). chat8, n = 3: transfer | of chat8" in details
    assert "- `transfer from c`: **holds** (chat8). chat8, n = 3: transfer | of chat8" in details


def test_a_bar_in_a_cell_does_not_break_the_table():
    frame = shapes(("a", "P(x|y) rises", "chat8", "agrees"))
    lines = paper.page([source("a", "transplant", {"chat8": "holds"})], frame).splitlines()
    first = lines.index("## Beside the paper's pattern")
    assert {line.count("|") for line in lines[:first] if line.startswith("| ")} == {5}  # three columns and a model
    assert "| P(x/y) rises | all four (5.2) | agrees |" in lines
