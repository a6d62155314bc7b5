"""Removal: what is needed, what is said of the Address, and whose attention is watched."""

from __future__ import annotations

from types import SimpleNamespace

import pandas as pd
import pytest

from encode_address.experiments import removal
from encode_address.experiments.base import Circuit, Setting
from tests import tiny


def answered(share: float, pairs: int = 40, **columns) -> pd.DataFrame:
    """Both forms of each pair, this share of the pairs right; L7H1 attends to the asked entry (1) with .8, in clean prompts."""
    return pd.DataFrame(
        [
            {"pair": pair, "form": form, "correct": pair < share * pairs, "margin": 4 * share, "target": 1,
             "attn.L7H1": [0.1, 0.8 if form == "clean" else 0.3], **columns}
            for pair in range(pairs) for form in removal.FORMS
        ]
    )  # fmt: skip


@pytest.mark.parametrize(("left", "needed"), [(0.0, True), (0.2, True), (0.5, None), (0.8, False), (1.0, False)])
def test_what_is_needed_loses_half_or_more(left, needed):
    assert removal.needed(answered(1.0), answered(left), "correct") is needed


@pytest.mark.parametrize(
    ("needs", "address", "status"),
    [
        ({"G1": True, "G2": False}, ("G1",), "holds"),
        ({"G1": True, "G2": True}, ("G1", "G2"), "holds"),
        ({"G1": True, "G2": False}, ("G1", "G2"), "undecided"),
        ({"G1": False, "G2": True}, ("G1",), "does not hold"),
        ({"G1": None, "G2": True}, ("G1",), "undecided"),
        ({"G1": True, "G2": True}, (), "undecided"),
    ],
)
def test_what_is_said_of_the_address(needs, address, status):
    said = removal.about_the_address("the task", needs, Circuit(address=address), "why", {})
    assert said.status == status
    assert said.why.startswith({"holds": "the task needs G1", "does not hold": "the task survives without G1"}.get(status, ""))  # fmt: skip


def test_the_dictionarys_conclusion_has_the_readers_attention_on_clean_prompts():
    removed = {"experiment": "removal", "intervention": "remove", "mode": "zero", "position": "all"}
    rows = [answered(1.0, experiment="baseline", intervention="none"), answered(0.1, block="G1", **removed)]
    rows += [answered(1.0, block=block, **removed) for block in ("G0", "G2")]
    losses = {"": ("none", 2.0), **{block: ("remove", 3.0) for block in ("G0", "G1", "G2")}}
    text = [
        {"experiment": "text", "intervention": verb, "mode": "zero", "block": block, "loss": loss, "pair": 0}
        for block, (verb, loss) in losses.items()
    ]
    model = SimpleNamespace(layout=SimpleNamespace(blocks=[SimpleNamespace(name=f"G{i}") for i in range(3)]))
    setting = Setting(model, "chat8", None, 40, 0, None, Circuit(address=("G1",), readers=((7, 1),)))
    said = removal.conclude(pd.concat([*rows, pd.DataFrame(text)]), setting)
    assert said.status == "holds"
    assert said.figures["G1"]["attention of L7H1"].startswith("0.80 [")
    assert said.figures["intact"]["gap"].startswith("8.00")
    assert said.figures["G1"]["gap"].startswith("0.80")
    assert said.figures["G1"]["perplexity"] == "x 2.72"


def test_the_circuits_readers_are_watched_where_blocks_are_removed_everywhere():
    model = tiny.load_tiny("granite")
    asked = SimpleNamespace(swaps=lambda n, seed: tiny.swaps(n, seed), surface="plain", pool="toy")
    readers = ((4, 1), (7, 2))
    setting = Setting(model, "chat8", asked, 2, 0, tiny.toy_text(), Circuit(address=("G1",), readers=readers))
    for given, watched in ((setting, readers), (setting.within(None), ())):
        (cells,) = removal.steps(given)
        everywhere = [
            cell for cell in cells
            if not cell.text and (cell.intervention == "none" or cell.mode == "mean" or cell.labels["block"] in ("G0", "G1", "G2", "G3"))
            and cell.mode in ("", "zero", "mean") and cell.labels["position"] == "all"
        ]  # fmt: skip
        assert {cell.watch for cell in everywhere} == {watched}
        assert {(c.intervention, c.mode) for c in everywhere} == {("none", ""), ("remove", "zero"), ("remove", "mean")}
        others = [cell for cell in cells if cell.watch and (cell.text or cell.labels["position"] != "all")]
        assert not others
