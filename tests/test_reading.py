"""A reading's rows: stored once, told apart by what they depend on, counted, priced beforehand."""

from __future__ import annotations

import json

import encode_address as ea
from encode_address import lab
from encode_address.experiments import EXPERIMENTS, base
from encode_address.run.reading import Reading
from tests.oracle_cases import case


class Counted:
    """An experiment that reads the lengths of prompts."""

    SUMMARY, PAPER, N, QUICK_N, NEEDS_CIRCUIT, ADAPTIVE = "lengths", "0", 4, 3, False, False
    reads = 0

    @classmethod
    def steps(cls, setting):
        def read(engine, prompts):
            cls.reads += 1
            engine.count(sum(map(len, prompts)))
            return [{"variant": setting.variant, "pair": i, "length": len(p)} for i, p in enumerate(prompts)]

        hosts = [item.host for item in setting.task.questions(setting.n, setting.seed)]
        yield Reading("lengths", hosts, read, {"experiment": "lengths"}, (setting.n,))

    @staticmethod
    def conclude(rows, setting):
        return base.Conclusion("undecided", f"{len(rows)} prompts, {int(rows['length'].sum())} tokens")


def test_a_reading_is_read_once_and_costs_what_it_said(tmp_path, monkeypatch):
    monkeypatch.setitem(EXPERIMENTS, "lengths", Counted)
    monkeypatch.setattr(Counted, "reads", 0)
    model = ea.load("tiny-gdn")
    priced = lab.dry_run("lengths", model, "chat8", out=tmp_path)
    first = ea.experiment("lengths", model, "chat8", out=tmp_path)
    tokens = int(first.table["length"].sum())
    assert f"1 readings of the model as it is, {tokens:,} tokens of forward" in priced
    account = json.loads((first.folder / "manifest.json").read_text())["this_run"]
    assert account["tokens_forwarded"] == account["tokens_planned"] == account["floor"] == tokens
    again = ea.experiment("lengths", model, "chat8", out=tmp_path)
    assert Counted.reads == 1
    assert again.table.equals(first.table)
    assert json.loads((again.folder / "manifest.json").read_text())["this_run"]["tokens_forwarded"] == 0
    more = ea.experiment("lengths", model, "chat8", n=5, out=tmp_path)
    assert Counted.reads == 2
    assert len(more.table) == 5
    assert set(more.table["model"]) == {"tiny-gdn"}


def test_readings_are_told_apart_by_name_prompts_labels_and_settings():
    hosts = [item.host for item in case("tiny-gdn").questions]

    def read(engine, prompts):
        return []

    readings = [
        Reading("a", hosts, read),
        Reading("b", hosts, read),
        Reading("a", hosts[1:], read),
        Reading("a", hosts, read, {"variant": "chat8"}),
        Reading("a", hosts, read, {}, (1,)),
    ]
    assert len({reading.key("model") for reading in readings}) == len(readings)
    assert readings[0].key("model") != readings[0].key("other model")
    assert readings[0].key("model") == Reading("a", hosts, read).key("model")
