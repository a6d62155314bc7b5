"""The benchmark's runners agree, its rows have the promised fields, and it refuses runners that disagree. No time is asserted."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest
import torch

from benchmarks import cases, sweep
from benchmarks.runners import Batches, floor, naive, ours, traces

torch.set_num_threads(1)  # as the benchmark does

FIELDS = {
    "model", "intervention", "cells", "token_ratio", "speedup_over_naive", "speedup_over_naive_one_prompt",
    "speedup_all_in", "speedup_over_trace_per_cell", "over_floor", "nnsight_share", "peak_rss_mb", "naive_s_per_cell",
    "naive_one_prompt_s_per_cell", "trace_s_per_cell", "ours_s_per_cell", "floor_s_per_cell", "ours_all_in_s", "floor_s",
}  # fmt: skip
GROWTH_FIELDS = {"model", "intervention", "grows", "pairs", "cells_per_pair", "seconds", "relative"}
TINY = sweep.Effort(2, batch=2, naive_pairs=2, single_pairs=1, slope_pairs=2, slope_cells=9, repeats=1, slope_repeats=1)


@cache
def gdn() -> cases.Case:
    return cases.bundled("tiny-gdn", 4)


@pytest.mark.parametrize("intervention", cases.INTERVENTIONS)
def test_the_runners_agree_and_the_row_has_the_promised_fields(intervention):
    row, agreed = sweep.measure(gdn(), intervention, TINY)
    assert set(row) == FIELDS
    assert (row["model"], row["intervention"], row["cells"]) == ("tiny-gdn", intervention, 2 * len(gdn().blocks))
    assert 0 < agreed["max_difference"] < 1e-3 < agreed["largest_effect"]
    assert row["peak_rss_mb"] > 100
    # 2 pairs: a donor and a host per block, against two prefixes and one token per cell.
    blocks, prefix = len(gdn().blocks), gdn().length - 1
    naive_tokens = 2 * (prefix + 1) * (1 + blocks) if intervention == "transplant" else 2 * blocks * (2 * prefix + 1)
    fewest = 2 * 2 * prefix + 2 * blocks
    assert naive_tokens / (fewest + 2 * 2) <= row["token_ratio"] <= naive_tokens / fewest


@pytest.mark.parametrize("intervention", cases.INTERVENTIONS)
def test_tokens_are_counted_as_they_are_forwarded(intervention, request):
    """What the plain module and the engine's module are really given, whatever the runners say."""
    case = gdn().take(2)
    seen: list[int] = []
    for module in (case.plain, case.model.module):
        watch = module.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
        )
        request.addfinalizer(watch.remove)
    for run in (
        lambda: naive(case, intervention, case.blocks, 2),
        lambda: traces(case, intervention, case.blocks),
        lambda: floor(case, intervention, case.blocks, Batches(4, 3)),
    ):
        seen.clear()
        assert run().tokens == sum(seen) > 0
    seen.clear()
    told = ours(case, intervention, case.blocks).tokens
    assert told <= sum(seen) <= told + 1  # the engine sees a cache's size in one token


@pytest.mark.parametrize("runner", ["ours", "trace", "naive one", "ours many", "floor"])
def test_a_runner_that_computes_something_else_is_refused(runner):
    case, blocks, many = gdn().take(2), gdn().blocks, gdn().subsets(9)
    done = {
        "naive": naive(case, "transplant", blocks, 2),
        "naive one": naive(case.take(1), "transplant", blocks, 1),
        "trace": traces(case.take(1), "transplant", blocks),
        "ours": ours(case, "transplant", blocks),
        "ours many": ours(case, "transplant", many),
        "floor": floor(case, "transplant", blocks, Batches(4, 8)),
    }
    sweep.agree(case, "transplant", done, many)
    done[runner] = replace(done[runner], margin=done[runner].margin + 0.01)
    with pytest.raises(ValueError, match="differ by"):
        sweep.agree(case, "transplant", done, many)


def test_further_cells_are_different_sets_of_layers_no_lighter_than_a_block():
    sets, blocks = gdn().subsets(24), gdn().blocks
    assert len(set(sets)) == 24
    assert sets[: len(blocks)] == blocks
    assert min(map(len, sets[len(blocks) :])) >= sum(map(len, blocks)) / len(blocks)


def test_a_model_of_given_dimensions(tmp_path, monkeypatch):
    """The path of the real dimensions, on a small configuration: layers, shared weights, agreement."""
    facts = json.loads((cases.CONFIGS / "qwen3.5-0.8b.json").read_text())
    assert (len(facts["layer_types"]), facts["hidden_size"], facts["vocab_size"]) == (24, 1024, 248320)
    facts |= {"vocab_size": 500, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8}
    facts |= {"layer_types": facts["layer_types"][:8], "initializer_range": 0.3, "head_dim": 16}
    facts |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8}
    facts |= {"linear_value_head_dim": 8, "num_attention_heads": 2}
    facts["rope_parameters"] |= {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
    (tmp_path / "small.json").write_text(json.dumps(facts))
    monkeypatch.setattr(cases, "CONFIGS", tmp_path)
    case = cases.random_weights("small", 2)
    assert case.model.module is not case.plain
    assert case.model.module.lm_head.weight.data_ptr() == case.plain.lm_head.weight.data_ptr()
    row, _ = sweep.measure(case, "transplant", TINY)
    assert set(row) == FIELDS


def test_json_is_one_object_alone_on_stdout(monkeypatch, capsys):
    monkeypatch.setattr(sweep, "BUNDLED", ("tiny-gdn",))
    monkeypatch.setattr(sweep, "GROWTH_PAIRS", (2, 3))
    monkeypatch.setattr(sweep, "small", lambda pairs: TINY)
    sweep.main(["--quick", "--json", "--pairs", "4"])
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert {"threads", "machine", "versions", "rows", "growth"} <= set(result)
    assert result["threads"] == 1
    assert [(row["model"], row["intervention"]) for row in result["rows"]] == [
        ("tiny-gdn", "transplant"),
        ("tiny-gdn", "state"),
    ]
    assert all(set(row) == FIELDS for row in result["rows"])
    assert all(set(row) == GROWTH_FIELDS for row in result["growth"])
    assert [(r["grows"], r["pairs"], r["cells_per_pair"]) for r in result["growth"]] == [
        ("pairs", 2, 3), ("pairs", 3, 3), ("cells_per_pair", 3, 1), ("cells_per_pair", 3, 2),
        ("cells_per_pair", 3, 4), ("cells_per_pair", 3, 8),
    ]  # fmt: skip
    table = sweep.show(result)
    assert all(field in table for field in FIELDS - {"model", "intervention"})
