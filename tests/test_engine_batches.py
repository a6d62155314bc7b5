"""How a plan is cut never changes its table: any order, any batch size, any interruption, any shortage of memory.

Also that running leaves nothing behind: no tensors, no memory, no hooks, and no change in the caches it runs from.
"""

from __future__ import annotations

import gc
import random
import tempfile
from functools import cache
from pathlib import Path
from statistics import median

import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from encode_address.errors import RunError
from encode_address.experiments import readers, removal
from encode_address.run import steps as steps_module
from encode_address.run.cells import FINAL, FULL, Cell
from encode_address.run.engine import Engine
from encode_address.run.store import Store
from tests import tiny
from tests.oracle_cases import case, patched, untouched

NAMES = ("qwen3_5_text", "tiny-gdn")


# -- one plan of every path --------------------------------------------------------------------
def entry(prompt) -> tuple[int, ...]:
    return prompt.span(f"entry {prompt.query}")


@cache
def every_path(name: str) -> tuple[Cell, ...]:
    """Cells of every intervention, with twins that differ in their labels only."""
    one = case(name)
    linear, softmax, watch = one.model.linear_layers, one.model.softmax_layers, one.watch[::3]
    cells = untouched(one, FINAL, watch)
    cells += patched(one, FINAL, one.units[1][1], watch=watch)
    cells += patched(one, FINAL, linear, mode="random", seed=3, verb="transplant")
    cells += patched(one, FINAL, linear, verb="state", mode="both")
    cells += patched(one, FINAL, linear[1:2], verb="state", mode="conv")
    cells += patched(one, FINAL, softmax[-1:], verb="query", head=1, watch=watch)
    cells += untouched(one, FULL, watch)
    for _, layers in one.units[:3]:
        cells += removal.cells(one.swaps[:1], [("block", layers)], watch=watch, labels={"span": str(layers)})
    cells += readers.cells(one.swaps[:1], one.watch[-1:])
    cells += patched(one, FULL, softmax[-1:], "dissociation", entry, verb="key", watch=watch)[:2]
    for n, item in enumerate(one.swaps[:3]):
        outcomes = (("correct", item.clean.answer), ("swapped", item.corrupted.answer))
        cells += [Cell("truncate", item.clean, layers=(i,), outcomes=outcomes, labels={"n": n}) for i in (2, 5 + n)]
    cells += [Cell("none", item.host, watch=watch, labels={"n": n}) for n, item in enumerate(one.questions)]
    return (*cells, *(twin(cell) for cell in cells[::7]))


def one_layer_each(name: str) -> list[Cell]:
    """More cells of one token: outputs and states of each layer alone."""
    one, out = case(name), []
    for verb, mode in (("transplant", "outputs"), ("state", "recurrent")):
        for layer in one.model.linear_layers:
            out += patched(one, FINAL, (layer,), "dissociation", verb=verb, mode=mode)
    return out


def twin(cell: Cell) -> Cell:
    return Cell(**{**{f: getattr(cell, f) for f in cell.__dataclass_fields__}, "labels": {**cell.labels, "twin": 1}})


def engine_for(name: str, batch_tokens: int | None = None, **kw) -> Engine:
    one = case(name)
    return Engine(one.model, one.text, batch_tokens, **kw)


@cache
def undisturbed(name: str, batch_tokens: int | None = None) -> pd.DataFrame:
    return engine_for(name, batch_tokens).run(every_path(name))


def assert_same(table: pd.DataFrame, want: pd.DataFrame, size: float) -> None:
    """The same rows in the same order; numbers within `size` of the logits' spread, all else equal."""
    assert list(table["key"]) == list(want["key"])
    table, want = (t.dropna(axis="columns", how="all").reset_index(drop=True) for t in (table, want))
    assert set(table) == set(want)
    bound = size * want["spread"].fillna(1.0).clip(lower=1)
    for name in want:
        a, b = table[name], want[name]
        if name.startswith("attn."):
            assert a.notna().tolist() == b.notna().tolist(), name
            gap = torch.tensor(a.dropna().tolist()) - torch.tensor(b.dropna().tolist())
            assert gap.abs().max() <= size, name
        elif b.dtype.kind == "f":
            assert ((a.astype(float) - b).abs().fillna(0.0) <= bound).all(), name
            assert (a.isna() == b.isna()).all(), name
        else:
            assert a.fillna("").tolist() == b.fillna("").tolist(), name


def assert_equal(table: pd.DataFrame, want: pd.DataFrame) -> None:
    """To the last bit."""
    assert_same(table, want, 0.0)


@given(
    seed=st.integers(0, 2**32),
    batch_tokens=st.sampled_from([1, 40, 71, 150, 700, 100_000]),
    name=st.sampled_from(NAMES),
)
@settings(max_examples=6, deadline=None)
def test_any_order_and_any_batch_size_give_the_same_table(seed, batch_tokens, name):
    want = undisturbed(name)
    order = random.Random(seed).sample(range(len(want)), len(want))
    cells = every_path(name)
    table = engine_for(name, batch_tokens).run([cells[i] for i in order])
    assert_same(table, want.iloc[order].reset_index(drop=True), 1e-4)


class Stop(Exception):
    """What ends a run in the tests below."""


def run_until(name: str, batch_tokens: int, cells, store: Store | None, calls: int, error=Stop) -> bool:
    """Run, and raise when rows are reported for the `calls`-th time; whether that happened."""
    left = [calls]

    def on_rows(_n: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise error

    try:
        engine_for(name, batch_tokens, on_rows=on_rows).run(cells, store)
    except error:
        return True
    return False


@given(
    batch_tokens=st.sampled_from([150, 700]),
    calls=st.tuples(st.integers(0, 12), st.integers(0, 40)),
    error=st.sampled_from([Stop, KeyboardInterrupt]),
    name=st.sampled_from(NAMES),
)
@settings(max_examples=6, deadline=None)
def test_interrupted_runs_give_the_same_table(batch_tokens, calls, error, name):
    """Two runs that are cut short, and a third: every row is that of one run, to the last bit."""
    cells = every_path(name)
    with tempfile.TemporaryDirectory() as folder, Store(Path(folder)) as store:
        for end in calls:
            before = len(store.keys())
            assert run_until(name, batch_tokens, cells, store, end, error) or len(store.keys()) == len(cells)
            assert len(store.keys()) >= before
        table = engine_for(name, batch_tokens).run(cells, store)
    assert_equal(table, undisturbed(name, batch_tokens))


def test_an_interruption_in_the_middle_leaves_rows_behind():
    """The property above is about real interruptions: some rows are there and some are not."""
    cells = every_path(NAMES[0])
    with tempfile.TemporaryDirectory() as folder, Store(Path(folder)) as store:
        assert run_until(NAMES[0], 150, cells, store, 9)
        assert 0 < len(store.keys()) < len(cells)


# -- what running leaves behind -------------------------------------------------------------------
def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def test_memory_is_flat_over_a_thousand_cells():
    """The same number of tensors after each of ten repeats, and no growth once the first have been."""
    name = NAMES[0]
    cells, engine = [*every_path(name), *one_layer_each(name)], engine_for(name, 700)
    alive, used = [], []
    for _ in range(10):
        engine.run(cells)
        alive.append(tensors())
        used.append(resident())
    assert 10 * len(cells) >= 1000
    assert len(set(alive[1:])) == 1, alive
    # Of three repeats, some 400 cells; the allocator may take one more piece (1.5 MB) at any time.
    assert median(used[7:]) - median(used[4:7]) < 3_000_000, used


def test_caches_that_cells_run_from_are_not_changed(monkeypatch):
    """Every cell continues from a copy: after all cells the prefixes' caches are what they were before the first."""
    name, kept = NAMES[0], []

    def spy(*where):
        saved = paths_read(*where)
        kept.append((saved, [{what: tensor.clone() for what, tensor in layer.items()} for layer in saved]))
        return saved

    paths_read = steps_module.read_cache
    monkeypatch.setattr(steps_module, "read_cache", spy)
    cells = [cell for cell in every_path(name) if cell.path == FINAL]
    engine_for(name).run(cells)
    ((after, before),) = kept
    assert [set(layer) for layer in after] == [set(layer) for layer in before]
    assert {"recurrent", "conv", "keys", "values"} == {what for layer in after for what in layer}
    assert all(torch.equal(layer[what], was[what]) for layer, was in zip(after, before) for what in layer)


# -- when memory runs out ----------------------------------------------------------------------------
ERRORS = {
    "torch": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "cpu": lambda: RuntimeError(
        "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried"
    ),
}


@pytest.fixture
def fresh():
    """A model of its own, so that hooks of these tests touch no other."""
    return tiny.load_tiny(NAMES[0])


def fails_above(model, rows: int, error, only_after: int = 0):
    """Make the model's embedding fail for batches of more than `rows` rows, from call `only_after` on."""
    calls = [0]

    def hook(_module, inputs):
        calls[0] += 1
        if inputs[0].shape[0] > rows and calls[0] > only_after:
            raise error()

    return model.module.get_input_embeddings().register_forward_pre_hook(hook)


def hooks_of(module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules())


@pytest.mark.parametrize(("error", "rows"), [("torch", 5), ("cpu", 1)])
def test_out_of_memory_halves_the_batches_and_goes_on(fresh, error, rows):
    """Down to one row per batch where that is what fits, with one line said, and smaller batches from then on."""
    said, model, cells = [], fresh, every_path(NAMES[0])
    engine, hooks = Engine(model, case(NAMES[0]).text, 1000, warn=said.append), hooks_of(model.module)
    with fails_above(model, rows, ERRORS[error]):
        table = engine.run(cells)
        again = engine.run(cells[:24])
    assert len(said) == 1, said
    assert said[0].startswith("out of memory: batches are halved to 500 tokens")
    assert "\n" not in said[0]
    assert engine.limits.tokens in [1000 >> n for n in range(1, 10)]
    assert_same(table, undisturbed(NAMES[0]), 1e-4)
    assert_same(again, undisturbed(NAMES[0])[:24], 1e-4)
    assert hooks_of(model.module) == hooks


def test_out_of_memory_in_the_middle_keeps_what_is_done(fresh):
    """Rows that were finished before are reported once and are not run again."""
    said, reported, cells = [], [], every_path(NAMES[0])
    engine = Engine(fresh, case(NAMES[0]).text, 1000, on_rows=reported.append, warn=said.append)
    with fails_above(fresh, 3, ERRORS["torch"], only_after=6):
        table = engine.run(cells)
    assert len(said) == 1
    assert sum(reported) == len(cells)
    assert_same(table, undisturbed(NAMES[0]), 1e-4)


@pytest.mark.parametrize("path", [FINAL, FULL, "read"])
def test_out_of_memory_with_one_prompt_is_one_clear_line(fresh, path):
    said, model = [], fresh
    engine, hooks = Engine(model, case(NAMES[0]).text, 200, warn=said.append), hooks_of(model.module)
    cells = [cell for cell in every_path(NAMES[0]) if cell.path == path]
    engine.plan(cells)  # measures once, with one token, what a cache takes
    with (
        fails_above(model, 0, ERRORS["torch"]),
        pytest.raises(RunError, match="out of memory with one prompt") as caught,
    ):
        engine.run(cells)
    assert "\n" not in str(caught.value)
    assert len(said) == 1
    assert hooks_of(model.module) == hooks
    assert len(engine.run(cells)) == len(cells)


def test_an_error_that_is_not_about_memory_passes_through(fresh):
    said = []
    engine = Engine(fresh, warn=said.append)
    with (
        fails_above(fresh, 1, lambda: RuntimeError("no such thing")),
        pytest.raises(RuntimeError, match="no such thing"),
    ):
        engine.run(untouched(case(NAMES[0]), FINAL))
    assert said == []


def test_ctrl_c_inside_a_trace_passes_through_and_the_next_run_works(fresh):
    engine, hooks, cells = Engine(fresh, case(NAMES[0]).text), hooks_of(fresh.module), every_path(NAMES[0])
    for after in (0, 1, 4):
        with fails_above(fresh, 0, KeyboardInterrupt, only_after=after), pytest.raises(KeyboardInterrupt):
            engine.run(cells)
        assert hooks_of(fresh.module) == hooks
    assert_same(engine.run(cells), undisturbed(NAMES[0]), 1e-6)
