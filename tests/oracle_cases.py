"""The models, prompts and comparisons that the tests against the oracle share.

Both sides run the same prompts in the same batches on the same path, so they must agree within 1e-5 of the logits'
spread. The oracle's module is a second copy that nnsight has never seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM

import encode_address
from encode_address.experiments import removal, transplant
from encode_address.models.loading import BUNDLED_DIR, GROUND_TRUTH
from encode_address.run.cells import FINAL, READ, Cell
from encode_address.run.engine import Engine
from encode_address.tasks import text_source
from tests import tiny
from tests.oracle import Expected, Oracle, expect_final, expect_full, expect_read

MODELS = (*tiny.FAMILIES, *GROUND_TRUTH)
PAIRS = 4


@cache
def case(name: str) -> SimpleNamespace:
    """A loaded model, the oracle on its own copy of the weights, and prompts of all kinds."""
    if name in GROUND_TRUTH:
        model, text = encode_address.load(name, device="cpu"), text_source("bundled", True)
        module = AutoModelForCausalLM.from_pretrained(BUNDLED_DIR / name, attn_implementation="sdpa")
        task = encode_address.tasks.dictionary(model, "chat8")
        swaps, questions, entries = task.swaps(PAIRS), task.questions(PAIRS), task.entries
    else:
        model, text, module = tiny.load_tiny(name), tiny.toy_text(), tiny.build(name)
        swaps, questions, entries = tiny.swaps(PAIRS), tiny.questions(PAIRS), tiny.entries
    return SimpleNamespace(
        name=name,
        model=model,
        oracle=Oracle(module, name),
        text=text,
        engine=Engine(model, text),
        swaps=swaps,
        questions=questions,
        entries=entries,
        units=removal.blocks(model.layout),
        watch=tuple((layer, head) for layer in model.softmax_layers for head in range(model.heads)),
    )


def ids_of(prompts: Sequence) -> torch.Tensor:
    return torch.tensor([p.ids for p in prompts])


def tolerance(logits: torch.Tensor, size: float = 1e-5) -> float:
    return size * max(1.0, float(logits.std()))


@cache
def mean_outputs(name: str) -> dict[int, torch.Tensor]:
    """The oracle's mean of every linear mixer over the text's train part."""
    one = case(name)
    return one.oracle.means(ids_of(one.text.chunks(one.model.tokenizer, "train", n=64)))


def expect(one: SimpleNamespace, cells: Sequence[Cell]) -> Expected:
    """What the oracle says about cells of one path."""
    if cells[0].path == FINAL:
        return expect_final(one.oracle, cells)
    if cells[0].path == READ:
        return expect_read(one.oracle, cells)
    return expect_full(one.oracle, cells, lambda: mean_outputs(one.name))


def agree(
    one: SimpleNamespace, cells: Sequence[Cell], table: pd.DataFrame, expected: Expected, size: float = 1e-5
) -> pd.Series:
    """Assert that a table equals what the oracle says; returns the oracle's margins (NaN where only attention is read)."""
    margins = []
    for cell, (_, row), want in zip(cells, table.iterrows(), expected):
        what = f"{one.name} {cell.intervention} {cell.mode} {cell.columns()['layers']} {cell.head} {dict(cell.labels)}"
        for layer, head in cell.watch:
            spans = [list(cell.host.span(f"entry {e}")) for e in range(len(cell.host.keys))]
            weights = want[layer][head]  # of the keys there are: a sliding window's cache holds the last ones only
            weights = torch.cat([torch.zeros(len(cell.host) - len(weights)), weights])
            mass = [float(weights[span].sum()) for span in spans]
            assert row[f"attn.L{layer}H{head}"] == pytest.approx(mass, abs=size), what
        if cell.text:
            assert abs(row["loss"] - float(want["loss"])) <= 1e-5 * max(1.0, float(want["loss"])), what
            margins.append(float(want["loss"]))
        elif "logits" in want:
            margins.append(_same_answer(one, cell, row, want["logits"], what, size))
        else:
            margins.append(float("nan"))
    return pd.Series(margins, index=table.index)


def _same_answer(
    one: SimpleNamespace, cell: Cell, row: pd.Series, logits: torch.Tensor, what: str, size: float
) -> float:
    first, second = (token for _, token in cell.outcomes[:2])
    margin = float(logits[first] - logits[second])
    assert abs(row["margin"] - margin) <= tolerance(logits, size), what
    said = int(logits.argmax())
    word = one.model.tokenizer.convert_ids_to_tokens(said)  # None for a row of the head beyond the tokenizer
    assert pd.isna(row["said"]) if word is None else row["said"] == word, what
    assert [row[name] for name, _ in cell.outcomes] == [token == said for _, token in cell.outcomes], what
    best = max(cell.host.choices, key=lambda token: float(logits[token]))
    assert row["choice_correct"] == (best == cell.outcomes[0][1]), what
    assert row["spread"] == pytest.approx(float(logits.std()), rel=1e-4), what
    return margin


def check(one: SimpleNamespace, cells: Sequence[Cell]) -> tuple[pd.DataFrame, pd.Series]:
    """Run cells of one path on both sides and compare."""
    table = one.engine.run(cells)
    expected = expect(one, cells)
    assert len(table) == len(cells) == len(expected)
    return table, agree(one, cells, table, expected)


def moved(margins: pd.Series, rest: pd.Series) -> float:
    """The largest difference of two runs of the same prompts: how much there was to get wrong."""
    return max(abs(a - b) for a, b in zip(margins, rest))


def patched(
    one: SimpleNamespace, path: str, layers: tuple[int, ...], donor: str = "donor", where=None, verb: str = "", **kw
) -> list[Cell]:
    """Every question swap's host with `layers` edited from one kind of donor, at the last position or `where`.

    `verb` is transplant (of outputs) when not given; `kw` are further fields of the cells.
    """
    verb, kw = (verb, kw) if verb else ("transplant", {"mode": "outputs", **kw})
    return [
        Cell(
            verb,
            item.host,
            path=path,
            layers=layers,
            where=where(item.host) if where else item.host.final,
            donor=getattr(item, donor),
            source=where(item.host) if where else item.host.final,
            outcomes=(("redirected", item.host.choices[item.donor_index]), ("kept", item.host.answer)),
            labels={"pair": item.pair, "donor": donor},
            **kw,
        )
        for item in one.questions
    ]


def untouched(one: SimpleNamespace, path: str, watch=()) -> list[Cell]:
    cells = transplant.host_cells(one.questions, "final" if path == FINAL else "question", watch)
    assert {cell.path for cell in cells} == {path}
    return cells


def same_rows(a: pd.DataFrame, b: pd.DataFrame) -> bool:
    """Whether two tables hold the same measures to the last bit."""
    names = ["margin", "spread", *(name for name in a if name.startswith("attn."))]
    return a[names].to_numpy().tolist() == b[names].to_numpy().tolist()
