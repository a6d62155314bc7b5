"""State rank: the measures on matrices of known rank, the states against transformers itself, the conclusion, the figure."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import encode_address as ea
from encode_address import figures, lab
from encode_address.errors import RunError
from encode_address.experiments import EXPERIMENTS, base, state_rank
from encode_address.experiments.base import Circuit
from encode_address.experiments.state_rank import END, TASK_MARKS, TEXT_MARKS, prefixes, ranks, read, roles, sequences
from encode_address.figures import state_rank as drawing
from encode_address.metrics import select
from encode_address.models.layout import Layout
from encode_address.run.engine import Engine
from encode_address.tasks import Prompt, text_source
from encode_address.tasks.text import Text
from tests import tiny
from tests.oracle_cases import MODELS, case

COUNTED = ("numerical_rank", "significant_rank")


def one_of(matrix: np.ndarray) -> dict[str, float]:
    return {name: value.item() for name, value in ranks(torch.as_tensor(matrix)).items()}


def with_values(values: list[float], rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """A matrix that has these singular values."""
    rng = np.random.default_rng(seed)
    left, right = (np.linalg.qr(rng.normal(size=(size, size)))[0] for size in (rows, columns))
    return left[:, : len(values)] * values @ right[: len(values)]


def direct(matrix: np.ndarray) -> dict[str, float]:
    """The definitions once more, in numpy."""
    sigma = np.linalg.svd(matrix.astype(np.float64), compute_uv=False)
    if sigma[0] == 0:
        return {"effective_rank": 0.0, "numerical_rank": 0, "significant_rank": 0, "top_share": float("nan")}
    p = sigma[sigma > 0] / sigma.sum()
    return {
        "effective_rank": float(np.prod(p**-p)),
        "numerical_rank": int(np.sum(sigma > max(matrix.shape) / 2**23 * sigma[0])),
        "significant_rank": int(np.sum(sigma > sigma[0] / 100)),
        "top_share": float(sigma[0] ** 2 / np.sum(sigma**2)),
    }


# -- the measures ---------------------------------------------------------------------------------------------------
@given(rank=st.integers(1, 6), rows=st.integers(6, 12), columns=st.integers(6, 12), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_equal_singular_values_count_as_what_they_are(rank, rows, columns, seed):
    found = one_of(with_values([3.0] * rank, rows, columns, seed))
    assert found == pytest.approx(
        {"effective_rank": rank, "numerical_rank": rank, "significant_rank": rank, "top_share": 1 / rank}, rel=1e-9
    )


def test_the_thresholds_are_the_papers():
    n = 10  # the larger dimension
    above, below = [1.0, 0.5, n * 2.0**-23 * 1.1], [1.0, 0.5, n * 2.0**-23 * 0.9]
    assert [one_of(with_values(v, n, 6))["numerical_rank"] for v in (above, below)] == [3, 2]
    assert [one_of(with_values(v, 6, n))["numerical_rank"] for v in (above, below)] == [3, 2]
    assert one_of(with_values([2.0, 0.021, 0.019], 5, 7))["significant_rank"] == 2
    halves = one_of(with_values([4.0, 2.0, 2.0], 5, 7))
    assert halves["effective_rank"] == pytest.approx(2**1.5)  # entropy of (1/2, 1/4, 1/4): 1.5 bits
    assert halves["top_share"] == pytest.approx(2 / 3)


@given(
    matrix=arrays(np.float64, st.tuples(st.integers(1, 6), st.integers(1, 6)), elements=st.integers(-9, 9)),
    power=st.integers(-100, 100),
)
@settings(max_examples=60, deadline=None)
def test_they_are_the_definitions_whatever_the_scale_and_the_side(matrix, power):
    expected = direct(matrix)
    for other in (matrix, matrix * 2.0**power, -matrix, matrix.T.copy()):
        assert one_of(other) == pytest.approx(expected, rel=1e-6, nan_ok=True)


def test_a_dead_head_has_rank_zero_and_no_share_and_leaves_the_others_alone():
    states = torch.zeros(2, 3, 4, 5)
    states[0, 1] = torch.ones(4, 5)
    found = ranks(states)
    for name in ("effective_rank", *COUNTED):
        assert found[name].tolist() == [[0, pytest.approx(1), 0], [0, 0, 0]], name
    assert found["top_share"].isnan().tolist() == [[True, False, True], [True, True, True]]
    assert found["top_share"][0, 1].item() == pytest.approx(1)


# -- the states, against transformers itself --------------------------------------------------------------------------
@pytest.mark.parametrize("name", MODELS)
def test_the_states_are_those_of_the_model_run_on_the_prefix(name):
    one = case(name)
    hosts = [item.host for item in one.questions]
    hosts = [*hosts[:2], Prompt(hosts[2].ids[5:], {"question": (len(hosts[2]) - 9,)})]  # of another length
    cut = prefixes(hosts)
    assert list(cut) == list(TASK_MARKS)
    seen = set()
    for mark, prompts in cut.items():
        engine = Engine(one.model, batch_tokens=100)  # two prompts do not fit into one trace
        rows = pd.DataFrame(read(engine, prompts)).set_index(["pair", "layer", "head"])
        assert engine.tokens == sum(map(len, prompts))
        assert rows.index.is_unique
        assert len(rows) == len(prompts) * sum(one.model.heads_of(layer) for layer in one.oracle.linear)
        for pair, host in enumerate(hosts):
            end = {END: host.span("question")[0], "before final": len(host) - 1, "final": len(host)}[mark]
            cache = one.oracle.run(torch.tensor([host.ids[:end]]), use_cache=True).past_key_values
            for layer in one.oracle.linear:
                for head, matrix in enumerate(cache.layers[layer].recurrent_states[0][0]):
                    row, expected = rows.loc[(pair, layer, head)], direct(matrix.numpy())
                    assert row["effective_rank"] == pytest.approx(expected["effective_rank"], rel=1e-3)
                    assert row["top_share"] == pytest.approx(expected["top_share"], rel=1e-3)
                    for counted, slack in zip(
                        COUNTED, (2, 0)
                    ):  # the last value that float32 tells is a matter of rounding
                        assert abs(row[counted] - expected[counted]) <= slack, (mark, pair, layer, head, counted)
                    seen.add(round(expected["effective_rank"], 3))
        assert set(rows["block"]) == {block.name for block in one.model.layout.blocks}
    assert len(seen) > 20, "the states differ, so that a wrong position or head would show"


def test_what_cannot_be_read_is_one_clear_line(monkeypatch):
    one = case("granite")
    hosts = [item.host for item in one.questions[:2]]
    plain = state_rank.states_after

    def broken(damage):
        def states(model, ids):
            saved = plain(model, ids)
            damage(saved)
            return saved

        monkeypatch.setattr(state_rank, "states_after", states)
        return lambda: read(one.engine, hosts)

    with pytest.raises(RunError, match="L0 has no recurrent state in the cache"):
        broken(lambda states: states.pop(0))()
    with pytest.raises(RunError, match=r"NaN or infinite state at layer 0 .*--dtype float32"):
        broken(lambda states: states[0][0, 1].fill_(float("inf")))()
    monkeypatch.setattr(state_rank, "states_after", plain)
    model = ea.load("tiny-gdn")
    task, text = ea.tasks.dictionary(model, "chat8"), text_source(None, True)
    setting = base.Setting(model, "chat8", task, 2, 0, text)
    monkeypatch.setattr(model, "family", replace(model.family, continues=False))
    with pytest.raises(RunError, match="does not continue exactly from a cache: its rank cannot be read"):
        next(state_rank.steps(setting))

    def full(*_args, **_kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(one.model, "trace", full)
    with pytest.raises(RunError, match="out of memory with prompts of 70 tokens: use --batch-tokens"):
        read(one.engine, hosts)


# -- what is read ------------------------------------------------------------------------------------------------------
def test_the_text_is_a_stream_in_eight_sequences_as_long_as_there_is_text():
    model = case("qwen3_5_text").model
    words = [tiny.FILLER[i % len(tiny.FILLER)] for i in range(1400)]
    ids = [tiny.VOCAB[word] for word in words]
    whole = Text("whole", " ".join(words), "")
    lines = replace(whole, test="\n".join(" ".join(words[i : i + 7]) for i in range(0, 1400, 7)), lines=True)
    for text in (whole, lines):
        stream = sequences(text, model, 4)
        assert stream == [tuple(ids[i * 175 : (i + 1) * 175]) for i in range(4)], "fewer of them are the same ones"
        assert sequences(text, model, 8)[:4] == stream
        assert list(map(len, sequences(text, model, 10))) == [140] * 10
    longer = replace(whole, test=" ".join(words * 4))
    assert len(sequences(longer, model, 4)[0]) == model.config.max_position_embeddings == 512


LAYOUT = Layout.from_config(tiny.build("qwen3_5_text").config)  # G0 [0-1], G1 [3], G2 [5-6], G3 [8]


def test_the_role_of_a_block_is_what_the_circuit_makes_of_it():
    def said(encode, address):
        return "".join(role[0] for role in roles(LAYOUT, Circuit(encode, address)).values())

    assert said(("G0",), ("G2",)) == "EfAa"
    assert said(("G0",), ("G1", "G3")) == "EAoA", "what lies between two of its blocks is neither before nor after"
    assert said((), ("G1",)) == "fAaa"
    assert said(("G0",), ()) == "Eooo"
    assert set(roles(LAYOUT, None).values()) == {"other"}


@pytest.fixture
def known(monkeypatch):
    monkeypatch.setitem(EXPERIMENTS, "state-rank", state_rank)

    def at(folder, model, address, variants=("chat8",)):
        """A folder in which `find` has said what the circuit is."""
        (folder / model.slug).mkdir(parents=True)
        circuit = {"encode": ["G0"], "address": address, "readers": []}
        content = {"variants": {variant: circuit for variant in variants}}
        (folder / model.slug / "verdict.json").write_text(json.dumps(content))
        return folder

    return at


def test_a_run_forwards_what_it_said_and_reads_the_text_once(known, tmp_path):
    model, variants = ea.load("tiny-gdn"), ["chat8", "rev8"]
    out = known(tmp_path, model, ["G2"], variants)
    marks = [mark for mark in TEXT_MARKS if mark <= 912]
    hosts = {v: [i.host for i in ea.tasks.dictionary(model, v).questions(2)] for v in variants}
    text = 2 * sum(marks)
    task = {v: sum(h.span("question")[0] + 2 * len(h) - 1 for h in some) for v, some in hosts.items()}
    assert f"{task['rev8'] + text:,} tokens of forward" in lab.dry_run("state-rank", model, "rev8", n=2, out=out)
    result = ea.experiment("state-rank", model, variants, n=2, out=out)
    account = json.loads((result.folder / "manifest.json").read_text())["this_run"]
    assert account["tokens_forwarded"] == account["tokens_planned"] == account["floor"] == sum(task.values()) + text
    table = result.table
    assert len(table) == 2 * 5 * 4 * (2 * len(TASK_MARKS) + len(marks)), "prompts x layers x heads x marks"
    task, text = (select(table, source=source) for source in ("task", "text"))
    assert task.groupby("block")["role"].unique().map(list).to_dict() == {
        "G0": ["Encode"],
        "G1": ["feeder"],
        "G2": ["Address"],
    }
    assert text["variant"].isna().all()
    assert text["role"].isna().all()
    assert list(text["mark"].unique()) == [str(mark) for mark in marks]
    again = ea.experiment("state-rank", model, variants, n=2, out=out)
    assert json.loads((again.folder / "manifest.json").read_text())["this_run"]["tokens_forwarded"] == 0
    assert again.sentence == result.sentence


def test_another_circuit_is_another_reading_of_the_task_and_the_same_of_the_text():
    model = ea.load("tiny-gdn")
    plain = base.Setting(model, "chat8", ea.tasks.dictionary(model, "chat8"), 2, 0, text_source(None, True))
    one, other = (
        [reading.key("model") for reading in state_rank.steps(plain.within(Circuit(("G0",), (address,))))]
        for address in ("G1", "G2")
    )
    assert [a == b for a, b in zip(one, other)] == [False] * len(TASK_MARKS) + [True] * (len(one) - len(TASK_MARKS))
    assert len({*one, *other}) == len(one) + len(TASK_MARKS)


def test_without_an_address_nothing_is_concluded(known, tmp_path):
    model = ea.load("tiny-gdn-negative")
    result = ea.experiment("state-rank", model, "chat8", n=2, out=known(tmp_path, model, []))
    assert result.sentence == "chat8: undecided - `find` names no Address here: nothing to compare"
    assert set(result.conclusions["chat8"].figures[END]) == {"Encode", "other"}
    assert set(select(result.table, source="task")["role"]) == {"Encode", "other"}


# -- the conclusion, on tables made by hand ------------------------------------------------------------------------------
def rows_of(block: str, role: str, values, mark: str = END, source: str = "task", heads: int = 3) -> list[dict]:
    """One layer of a block, whose heads have these effective ranks, of each prompt: `values` (prompts,)."""
    layer = LAYOUT.block(block).layers[0]
    return [
        {"experiment": "state-rank", "variant": "chat8" if source == "task" else None, "source": source, "mark": mark,
         "block": block, "role": role if source == "task" else None, "layer": layer, "head": head, "pair": pair,
         "effective_rank": value + (0.1 * head if value else 0), "significant_rank": round(value),
         "numerical_rank": round(value), "model": "m"}
        for pair, value in enumerate(values) for head in range(heads)
    ]  # fmt: skip


class Known:
    layout, circuit = LAYOUT, Circuit(("G0",), ("G2",))


def conclude(encode, address, more=()):
    rows = [*rows_of("G0", "Encode", encode), *rows_of("G2", "Address", address), *more]
    return state_rank.conclude(pd.DataFrame(rows), Known)


def test_the_claim_is_a_lower_rank_in_encode_over_the_same_prompts():
    low, high = [2.0, 2.1, 1.9, 2.0], [3.0, 3.2, 2.9, 3.1]
    said = conclude(low, high)
    assert said.status == "holds"
    assert {role: text.split()[0] for role, text in said.figures[END].items()} == {"Encode": "2.10", "Address": "3.15"}
    assert said.figures["Encode minus Address"].startswith("-1.05 [-1.1")
    assert conclude(high, low).status == "does not hold"
    assert conclude(low, low).status == "does not hold", "equal is not lower"
    assert conclude([1.0, 3.0, 1.0, 3.0], [3.0, 1.0, 3.0, 1.0]).status == "undecided"
    rising = np.array([1.0, 2.0, 3.0, 4.0])
    assert conclude(rising, rising + 0.5).status == "holds", "paired: every prompt is lower, if prompts differ by more"


def test_the_interval_is_that_of_all_ways_to_draw_the_prompts_anew():
    a, b = (np.random.default_rng(seed).normal(4, 1, (5, 3)) for seed in (0, 1))
    ways = [list(way) for way in product(range(5), repeat=5)]
    for found, every in (
        (state_rank.median(pd.DataFrame(a)), [np.median(a[way]) for way in ways]),
        (state_rank.less(*map(pd.DataFrame, (a, b))), [np.median(a[way]) - np.median(b[way]) for way in ways]),
    ):
        assert np.quantile(every, 0.01) <= found.low <= np.quantile(every, 0.04) < found.value
        assert found.value < np.quantile(every, 0.96) <= found.high <= np.quantile(every, 0.99)


def test_a_state_that_is_zero_is_in_no_median_and_is_counted():
    dead = [dict(row, layer=1, effective_rank=0.0) for row in rows_of("G0", "Encode", [1.0] * 4, heads=2)]
    alive, said = conclude([3.0] * 4, [2.0] * 4), conclude([3.0] * 4, [2.0] * 4, dead)
    assert said.figures == {**alive.figures, "dead heads": 2}
    assert said.status == "does not hold"
    assert conclude([0.0] * 4, [2.0] * 4).status == "undecided"


def test_other_marks_and_the_text_are_told_and_decide_nothing():
    more = [*rows_of("G2", "Address", [0.5] * 4, "final"), *rows_of("G0", "", [9.0] * 4, "1024", "text")]
    said, plain = conclude([2.0] * 4, [3.0] * 4, more), conclude([2.0] * 4, [3.0] * 4)
    assert (said.status, said.why) == (plain.status, plain.why)
    assert said.figures["final"] == {"Address": "0.60 [0.60, 0.60]"}
    assert said.figures["text, 1024 tokens"] == {"Encode": "9.10 [9.10, 9.10]"}


def test_one_prompt_says_nothing():
    assert conclude([2.0], [3.0]).status == "undecided"


# -- the figure ----------------------------------------------------------------------------------------------------------
def test_the_figure_shows_the_medians_and_the_roles(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(figures, "write", lambda figure, _folder, _name, what: drawn.update({what: figure}) or [])
    rows = [
        row
        for mark in (END, "final")
        for block, role, values in (("G0", "Encode", [1, 2, 9]), ("G1", "feeder", [0, 0, 3]), ("G2", "Address", [5, 5, 6]))
        for row in rows_of(block, role, values, mark)
    ]  # fmt: skip
    rows += [row for mark in ("64", "1024", "128", "256") for row in rows_of("G0", "", [4, 4, 4], mark, "text")]
    drawing.draw(pd.DataFrame(rows), None, tmp_path)
    task, text = drawn["chat8"], drawn["text"]
    grid = np.array(task.axes[:6]).reshape(3, 2)
    assert [axes.get_title() for axes in grid[0]] == ["dictionary\nend", "final"]
    effective = grid[0, 0].images[0].get_array()
    assert effective.filled(np.nan).tolist() == [
        pytest.approx([2.0, 2.1, 2.2]),
        pytest.approx([np.nan] * 3, nan_ok=True),
        pytest.approx([5.0, 5.1, 5.2]),
    ]
    assert [text.get_text() for text in grid[0, 0].get_yticklabels()] == ["Encode L0", "feeder L3", "Address L5"]
    assert len({axes.images[0].get_clim() for axes in grid[0]}) == 1, "one scale for all marks of a measure"
    assert [axes.get_title() for axes in text.axes[:4]] == ["64 tokens", "128 tokens", "256 tokens", "1K tokens"]
    assert [label.get_text() for label in text.axes[0].get_yticklabels()] == ["Encode L0"]
    assert (task.get_size_inches()[0], text.get_size_inches()[0]) == (3.4, 7.0)
    for figure in (task, text):
        figure.canvas.draw()
        width, height = figure.canvas.get_width_height()
        for axes in figure.axes:
            box = axes.get_tightbbox()
            assert min(box.x0, box.y0, width - box.x1, height - box.y1) >= 0


def test_a_table_of_something_else_draws_nothing(tmp_path):
    assert drawing.draw(pd.DataFrame({"experiment": ["state"], "variant": ["chat8"]}), None, tmp_path) == []
