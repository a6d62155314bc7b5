"""The paper's tables, on rows made by hand: every cell is the estimate of its own rows, and what was not run is an en dash."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from encode_address.errors import EncodeAddressError
from encode_address.stats import Estimate, wilson
from encode_address.tables import Results, appendix, circuit, main, tables_of, write
from encode_address.tables.table import Table, number, plain, typeset

N = 10
DASH = "\N{EN DASH}"
LAYOUT = {
    "blocks": [{"name": "G0", "layers": [0]}, {"name": "G1", "layers": [2]}, {"name": "G2", "layers": [4, 5]}, {"name": "G3", "layers": [7]}],
    "softmax": [1, 3, 6],
}  # fmt: skip
CIRCUIT = {"encode": ["G0"], "address": ["G2"], "readers": ["L6H1"]}
VERDICT = {"layout": LAYOUT, "variants": {"chat8": CIRCUIT}, **CIRCUIT}


def rows(experiment: str, n: int = N, **columns) -> list[dict]:
    """A row per pair; a column's value may be a function of the pair."""
    own = {"experiment": experiment, "variant": "chat8", "intervention": "none", "mode": "", **columns}
    return [{"pair": i, "prompt": f"p{i}", **{k: v(i) if callable(v) else v for k, v in own.items()}} for i in range(n)]


def forms(experiment: str, right: int, margin: float, **columns) -> list[dict]:
    """Both forms of N pairs, of which the first `right` are answered right; the clean margin is `margin`."""
    return [
        {**row, "form": form, "prompt": f"{form}{row['pair']}"}
        for form in ("clean", "corrupted")
        for row in rows(experiment, correct=lambda i: i < right, choice_correct=True, margin=margin, **columns)
    ]


def removed(block: str, right: int, margin: float, **columns) -> list[dict]:
    told = {"experiment": "removal", "intervention": "remove", "mode": "zero", "position": "all", **columns}
    return forms(told.pop("experiment"), right, margin, block=block, **told)


def results(*tables: list[dict], name: str = "toy", verdict: dict = VERDICT) -> Results:
    return Results(name, pd.DataFrame([row for table in tables for row in table]), verdict)


def cell(table: Table, column: str, *labels: str):
    """The one cell of that column in the row with these labels (after the model)."""
    (found,) = [cells for own, cells in table.rows if own[1:] == labels]
    return found[table.columns.index(column)]


REMOVALS = [forms("baseline", N, 2.0), removed("G0", 0, 0.25), removed("G1", 7, 1.0)]
TEXT = [
    rows("text", 4, variant=None, loss=math.log(5.0)),
    rows("text", 4, variant=None, loss=math.log(5.0) + 0.5, intervention="remove", mode="zero", block="G1"),
]


# -- main tables --------------------------------------------------------------------------------------------------------
def test_removal_has_accuracy_gap_and_perplexity():
    table = main.removal([results(*REMOVALS, *TEXT)])
    assert table.columns == ("intact", "G0", "G1", "G2"), "G3 has no reader, so that the paper's tables leave it out"
    assert cell(table, "G1", "chat8", "accuracy").value == pytest.approx(0.7)
    assert cell(table, "intact", "chat8", "accuracy").n == N
    assert [cell(table, c, "chat8", "gap").value for c in table.columns[:3]] == pytest.approx([4.0, 0.5, 2.0])
    assert cell(table, "intact", "text", "perplexity").value == pytest.approx(5.0)
    assert cell(table, "G1", "text", "perplexity").value == pytest.approx(math.exp(0.5))
    assert plain(cell(table, "G2", "chat8", "accuracy")) == plain(cell(table, "G0", "text", "perplexity")) == DASH


def test_encode_counts_swaps_by_block():
    def swaps(block: str, share: int, swap: str, **how) -> list[dict]:
        given = {"intervention": "transplant", "block": block, **how}
        return rows("encode", swap=swap, carried=lambda i: i < share, **given)

    made = [swaps("G0", 9, "value"), swaps("G0", 3, "key"), swaps("embed", N, "key"), swaps("", 0, "key", intervention="none")]  # fmt: skip
    table = main.encode([results(*made)])
    assert cell(table, "G0", "chat8", "value", "G0") == wilson(9, N)
    assert cell(table, "G0", "chat8", "key", "G0") == wilson(3, N)
    assert cell(table, "embeddings", "chat8", "key", "G0") == wilson(N, N)
    assert cell(table, "no patch", "chat8", "key", "G0") == wilson(0, N)
    assert plain(cell(table, "embeddings", "chat8", "value", "G0")) == DASH


def test_query_key_puts_each_side_in_its_own_column():
    def side(query: str, key: str, mass: float) -> list[dict]:
        attended = [mass, *[(1 - mass) / 3] * 3]
        given = {"block": "G2", "ablation": "zero", "query_from": query, "key_from": key, "target": 0, "form": "clean"}
        return rows("query-key", **given, **{"attn.L6H1": lambda i: attended})

    made = [side("intact", "intact", 0.7), side("without", "intact", 0.1), side("intact", "without", 0.4)]
    table = main.query_key([results(*made)])
    about = ("chat8", "L6H1", "G2")
    assert cell(table, "intact", *about, "selectivity").value == pytest.approx(math.log(7))
    assert cell(table, "Q ablated", *about, "selectivity").value == pytest.approx(math.log(0.1 / 0.3))
    assert cell(table, "K ablated", *about, "selectivity").value == pytest.approx(math.log(2))
    assert [plain(cell(table, c, *about, "top-1")) for c in ("K ablated", "Q ablated", "both")] == ["1.00 [0.72, 1.00]", "0.00 [0.00, 0.28]", DASH]  # fmt: skip


def moved(block: str, right: int, **columns) -> list[dict]:
    given = {"intervention": "transplant", "block": block, "position": "final", "donor": "same-dictionary", **columns}
    return rows("transplant", redirected=lambda i: i < right, donor_index=1, host_index=0, **given)


def test_transplant_has_the_readers_attention_and_the_margin():
    host = rows("transplant", block="", position="final", donor="", redirected=False, margin=-3.0, donor_index=1, **{"attn.L6H1": lambda i: [0.9, 0.1]})  # fmt: skip
    own = moved("G2", 8, margin=1.5, **{"attn.L6H1": lambda i: [0.2, 0.8]})
    other_donor = moved("G2", 0, donor="permuted", margin=-9.0, **{"attn.L6H1": lambda i: [1.0, 0.0]})
    model = results(host, own, other_donor, moved("G2", 5, position="question"))
    table = main.transplant([model])
    assert cell(table, "redirected", "chat8", "L6H1", "G2") == wilson(8, N)
    assert cell(table, "attention on donor's entry", "chat8", "L6H1", "G2").value == pytest.approx(0.8)
    assert cell(table, "D(A-B)", "chat8", "L6H1", "G2").value == pytest.approx(1.5)
    assert cell(table, "D(A-B)", "chat8", "L6H1", "no patch").value == pytest.approx(-3.0)
    assert plain(cell(table, "redirected", "chat8", "L6H1", "G1")) == DASH
    by_place = appendix.transplant([model])
    assert cell(by_place, "question", "chat8", "G2") == wilson(5, N)
    assert plain(cell(by_place, "dictionary", "chat8", "G2")) == DASH


def test_scaling_is_a_mean_over_variants_whose_pairs_are_separate():
    verdict = {"layout": LAYOUT, "variants": {"chat8": CIRCUIT, "list8": CIRCUIT, "rev8": {**CIRCUIT, "address": ["G1"]}}}  # fmt: skip
    made = [moved("G2", 10), moved("G2", 8, variant="list8"), moved("G1", 3, variant="rev8"), moved("G2", 10, variant="rev8")]  # fmt: skip
    made += [removed("G2", 6, 1.0), removed("G2", 0, 1.0, variant="list8"), removed("G1", 3, 1.0, variant="rev8")]
    table = main.scaling([results(*made, verdict=verdict)])
    assert cell(table, "transplant") == wilson(21, 3 * N), "a mean over pairs of one number would have n = 10"
    assert (cell(table, "removal").value, cell(table, "removal").n) == (pytest.approx(0.3), 3 * N)
    assert cell(table, "Address") == "G2 (chat8, list8); G1 (rev8)"
    assert cell(table, "mean over") == "chat8, list8, rev8"
    assert cell(table, "guides") is None
    only = main.scaling([results(moved("G2", 10), removed("G2", 6, 1.0), verdict=verdict)])
    assert cell(only, "mean over") == "chat8"


def test_scaling_names_the_readers_that_are_guided():
    def watched(block: str, attended: list[float], arm: str) -> list[dict]:
        return rows("scaling", block=block, arm=arm, host_index=0, donor_index=1, redirected=True, **{"attn.L6H1": lambda i: attended})  # fmt: skip

    made = [watched("", [0.9, 0.0], "host"), watched("G2", [0.0, 0.9], "transplant"), watched("G1", [0.8, 0.1], "transplant")]  # fmt: skip
    table = main.scaling([results(*made)])
    assert cell(table, "guides") == "G2 \N{RIGHTWARDS ARROW} L6"
    assert cell(table, "transplant") == wilson(N, N)


def test_tables_of_two_models_say_that_they_were_not_run():
    for table in (main.cross_transplant([results(*REMOVALS)]), main.replacement([results(*REMOVALS)])):
        assert not table.known
        assert table.said.endswith("Not run.")
        assert {plain(one) for _, cells in table.rows for one in cells} == {DASH}
        assert set(table.tidy()["text"]) == {DASH}
        assert table.tidy()["value"].isna().all()


# -- two models ---------------------------------------------------------------------------------------------------------
FIT = {"fit_variant": "chat8", "fit_prompts": 400, "fit_keys": 40}


def lent(donor: str, condition: str, right: int, seed: int = 0, kept: int = 0, **columns) -> list[dict]:
    """A condition of `transfer`; the pairs of a seed follow on those of the seed before, and a donor's prompts are its own."""
    given = {
        "donor_model": donor,
        "condition": condition,
        "block": "G2",
        "dictionary_seed": seed,
        "drawn": donor,
        **columns,
    }
    made = rows(
        "transfer", redirected=lambda i: i < right, kept=lambda i: i < kept, host_index=0, donor_index=1, **given
    )
    return [{**row, "pair": seed * N + row["pair"], "prompt": f"{donor} {seed} {row['pair']}"} for row in made]


def mapped(donor: str, right: int, keys: str = "disjoint", condition: str = "mapped", **more) -> list[dict]:
    return lent(donor, condition, right, **{"keys": keys, "source": "G4", **FIT, "map_r2_test": 0.5, **more})


def transferred(donor: str, right: int) -> list[dict]:
    seen = {"attn.L6H0": lambda i: [0.5, 0.5], "attn.L6H1": lambda i: [0.1, 0.9]}
    parts = [
        lent(donor, "host", 0), lent(donor, "same-model", 9, source="G2"), mapped(donor, right, **seen),
        mapped(donor, right - 4, seed=1, map_r2_test=-0.3, **seen), mapped(donor, N, fit_prompts=25), mapped(donor, N, fit_keys=8),
        mapped(donor, N, "shared"), mapped(donor, 0, condition="mapped-self", kept=7), mapped(donor, 1, condition="shuffled"),
        mapped(donor, 2, condition="mean"), mapped(donor, 3, "shared", condition="mean"),
        mapped(donor, 3, condition="other-source", source="G0"), mapped(donor, 4, condition="other-source", source="G1"),
        mapped(donor, N, condition="embedding", source="embedding"),
        mapped(donor, 5, variant="list8"), lent(donor, "same-model", 8, variant="list8"),
    ]  # fmt: skip
    return [row for part in parts for row in part]


def test_cross_transplant_has_a_row_per_donor_and_split_of_keys():
    model = results(transferred("a", 8), transferred("b", 5), moved("G2", 8))
    table = main.cross_transplant([model])
    assert [labels[1:] for labels, _ in table.rows] == [
        (donor, *about)
        for donor in "ab"
        for about in (
            ("chat8", "G4 → G2", "disjoint"), ("chat8", "G4 → G2", "shared"), ("list8", "G4 → G2", "disjoint, fit on chat8"),
        )
    ]  # fmt: skip
    about = ("a", "chat8", "G4 → G2")
    assert cell(table, "cross-model", *about, "disjoint") == wilson(12, 2 * N), "both seeds, all fit prompts and keys"
    assert cell(table, "cross-model", "b", *about[1:], "disjoint") == wilson(6, 2 * N), "donors are not pooled"
    assert cell(table, "seeds", *about, "disjoint") == "0.40 to 0.80"
    assert cell(table, "cross-model", *about, "shared") == wilson(N, N)
    assert cell(table, "same model", *about, "shared") == cell(table, "same model", *about, "disjoint") == wilson(9, N)
    assert cell(table, "self map", *about, "disjoint") == wilson(7, N)
    assert cell(table, "shuffled map", *about, "disjoint") == wilson(1, N)
    assert [cell(table, "mean vector", *about, keys) for keys in ("disjoint", "shared")] == [wilson(2, N), wilson(3, N)]
    assert cell(table, "best other block", *about, "disjoint") == wilson(4, N)
    assert cell(table, "that block", *about, "disjoint") == "G1"
    assert cell(table, "reader", *about, "disjoint") == "L6H1", "the verdict's, not the first that was watched"
    assert cell(table, "attention on donor's entry", *about, "disjoint").value == pytest.approx(0.9)
    assert cell(table, "map R2 on the test", *about, "disjoint") == "0.10"
    assert {plain(cell(table, c, *about, "shared")) for c in ("best other block", "that block", "shuffled map")} == {
        DASH
    }
    across = ("a", "list8", "G4 → G2", "disjoint, fit on chat8")
    assert cell(table, "cross-model", *across) == wilson(5, N)
    assert cell(table, "same model", *across) == wilson(8, N)
    assert plain(cell(table, "self map", *across)) == DASH
    assert "only disjoint keys support a claim" in table.said


def test_a_donor_without_mapped_rows_is_a_line_of_dashes():
    table = main.cross_transplant([results(transferred("a", 8), lent("c", "host", 0))])
    (cells,) = [cells for labels, cells in table.rows if labels[1] == "c"]
    assert {plain(one) for one in cells} == {DASH}


def stood_in(donor: str, own: int, removed: int = 1, **columns) -> list[dict]:
    given = {
        "donor_model": donor,
        "role": "address",
        "block": "G2",
        "target": 0,
        "margin": 0.0,
        "drawn": donor,
        **columns,
    }
    arms = {"intact": N, "removed": removed, "linear": 2, "mean": 0, "donor": own, "zeroed": 1, "shuffled": 0, "donor G0": 3,
            "donor G1": 4, "own, refitted": 9, "identity": N}  # fmt: skip
    seen = {"attn.L6H1": lambda i: [0.3, 0.7]}
    return [
        {**row, "prompt": f"{donor} {row['pair']}"}
        for arm, right in arms.items()
        for row in rows("replace", arm=arm, source=arm[6:] or "G4", correct=lambda i, r=right: i < r, entry_r2=0.6, exit_r2=0.8, **seen, **given)
    ]  # fmt: skip


def test_replacement_has_the_best_control_of_each_donor():
    table = main.replacement([results(stood_in("a", 9), stood_in("b", 4), stood_in("c", N, removed=9))])
    about = ("a", "chat8", "G4 → G2", "address")
    assert cell(table, "donor's block", *about) == wilson(9, N)
    assert cell(table, "donor's block", "b", *about[1:]) == wilson(4, N)
    expected = {"intact": N, "removed": 1, "linear projection": 2, "mixers zeroed": 1, "best other block": 4, "own block, refitted": 9}  # fmt: skip
    assert {column: cell(table, column, *about) for column in expected} == {
        c: wilson(k, N) for c, k in expected.items()
    }
    assert cell(table, "attention", *about).value == pytest.approx(0.3)
    assert (cell(table, "that block", *about), cell(table, "best control", *about)) == ("G1", "donor G1")
    assert cell(table, "donor - best control", *about).value == pytest.approx(0.5)
    assert cell(table, "R2 of the maps", *about) == "0.60, 0.80"
    notes = [cell(table, "note", donor, *about[1:]) for donor in "abc"]
    assert notes == ["", "UNINFORMATIVE", "UNINFORMATIVE"], "a control does as well; removal leaves .9"


def test_a_stopped_host_is_measured_by_choice():
    made = stood_in("a", 0, cut="6", choice_correct=lambda i: i < 8)
    table = main.replacement([results(made)])
    assert cell(table, "donor's block", "a", "chat8", "G4 → G2", "address, stopped after L6") == wilson(8, N)


def test_rows_of_two_models_change_no_other_table():
    made = [*REMOVALS, *TEXT, moved("G2", 8), removed("G2", 6, 1.0)]
    own = [[{**row, "drawn": "find's"} for row in some] for some in made]
    plainly, beside = (
        results(*own),
        results(*own, transferred("a", 8), transferred("b", 5), stood_in("a", 9), stood_in("b", 4)),
    )
    before, after = ({table.name: table.markdown() for table in tables_of([one])} for one in (plainly, beside))
    assert {name for name in after if after[name] != before.get(name)} == {"cross-transplant", "replacement"}
    assert set(before) == set(after)


# -- which rows count ---------------------------------------------------------------------------------------------------
def test_the_largest_draw_of_pairs_counts_and_draws_are_never_mixed():
    small = [{**row, "prompt": f"other {row['pair']}", "redirected": True, "drawn": "n 4"} for row in moved("G2", 4)[:4]]  # fmt: skip
    large = [{**row, "drawn": "n 10"} for row in moved("G2", 3)]
    assert cell(main.transplant([results(small, large)]), "redirected", "chat8", DASH, "G2") == wilson(3, N)
    with pytest.raises(EncodeAddressError, match="several draws"):
        main.transplant([Results("toy", pd.DataFrame(small + large).drop(columns="drawn"), VERDICT)])


def test_a_run_that_two_experiments_watched_counts_once_with_all_heads():
    one = moved("G2", 7, **{"attn.L6H0": lambda i: [0.5, 0.5]})
    other = moved("G2", 7, **{"attn.L6H1": lambda i: [0.1, 0.9]})
    table = main.transplant([results(one, other)])
    assert cell(table, "redirected", "chat8", "L6H1", "G2") == wilson(7, N), "two rows of a pair would be bootstrapped"
    assert cell(table, "attention on donor's entry", "chat8", "L6H1", "G2").value == pytest.approx(0.9)


def test_five_solved_questions_supersede_none():
    made = [row for v in ("mmlu0", "mmlu5", "mmlu_hint0") for row in forms("removal-mmlu", N, 1.0, variant=v)]
    made += removed("G1", 4, 0.5, experiment="removal-mmlu", variant="mmlu5")
    table = appendix.removal_mmlu([results(made)])
    assert {labels[1] for labels, _ in table.rows} == {"mmlu5", "mmlu_hint0"}
    assert cell(table, "G1", "mmlu5", "accuracy").value == pytest.approx(0.4)
    assert cell(table, "G1", "mmlu5", "choice accuracy").value == 1.0
    assert cell(appendix.removal([results(made)]), "G1", "mmlu5").value == pytest.approx(0.4)


# -- appendix tables ----------------------------------------------------------------------------------------------------
def test_critical_layers_and_the_worst_head():
    layers = [removed("L0", 0, 0.0), removed("L3", 5, 1.1), removed("L6", 5, 1.3)]  # gaps 0, 2.2 and 2.6, of 4
    heads = [removed(f"L0H{h}", right, 1.0, intervention="heads") for h, right in enumerate((6, 2, 9))]
    model = results(*REMOVALS, *layers, *heads)
    table = appendix.removal([model])
    assert cell(table, "critical layers", "chat8") == "L0, L3"
    assert cell(table, "worst head of L0", "chat8") == "L0H1"
    assert cell(table, "n", "chat8") == str(N)
    figures = appendix.critical([model])
    assert [labels[2] for labels, _ in figures.rows] == ["intact", "L0", "L3", "L0H1"]
    assert cell(figures, "accuracy", "chat8", "L0H1").value == pytest.approx(0.2)
    assert cell(appendix.removal([results(*REMOVALS)]), "critical layers", "chat8") is None


def test_minimal_reads_sets_draws_and_memory():
    shared = {"removal": "mean", "cut": "full"}
    named = {"arm": "named", **shared}
    greedy = forms("minimal", 8, 1.0, kept_set="greedy", kept_layers="0,4,5", draw=0, **named)
    draws = [
        forms("minimal", right, 1.0, kept_set="random-2", kept_layers=kept, draw=i, **named)
        for i, (right, kept) in enumerate([(2, "0,2"), (4, "2,7")])
    ]
    texts = [
        rows("minimal-text", 4, variant=None, loss=math.log(p), kept_layers=kept, **shared)
        for p, kept in [(8, "0,4,5"), (20, "0,2"), (30, "2,7")]
    ]
    kv = [
        rows(
            "minimal-kv20",
            variant=None,
            kept_layers="0,4,5",
            candidate=c,
            target=0,
            tokens=3,
            loss=lambda i, c=c: float(c == (i < 6)),
            **shared,
        )
        for c in (0, 1)
    ]
    table = appendix.minimal([results(greedy, *draws, *texts, *kv)])
    about = ("chat8", "full", "mean")
    assert cell(table, "layers", *about, "greedy") == "0,4-5"
    assert cell(table, "accuracy", *about, "greedy").value == pytest.approx(0.8)
    assert cell(table, "perplexity", *about, "greedy").value == pytest.approx(8.0)
    assert cell(table, "kv20", *about, "greedy") == wilson(6, N)
    assert cell(table, "accuracy", *about, "random-2").value == pytest.approx(0.3)
    assert cell(table, "perplexity", *about, "random-2") == "20.00 to 30.00"
    assert cell(table, "kv20", *about, "random-2") is None


def test_pruning_is_normalised_by_the_chance_of_its_variant():
    made = [
        rows("pruning", last=last, form="clean", chance=0.25, choice_correct=lambda i, right=right: i < right)
        for last, right in [(5, 4), (6, 10)]
    ]
    table = appendix.pruning([results(*made)])
    assert cell(table, "chat8", "L5", "linear", "choice accuracy") == wilson(4, N)
    assert cell(table, "chat8", "L5", "linear", "normalised").value == pytest.approx((0.4 - 0.25) / 0.75)
    assert cell(table, "chat8", "L6", "softmax", "normalised").n == N


def test_state_rank_takes_roles_from_the_circuit():
    ranks = {"G0": 1.5, "G1": 4.0, "G2": 6.0, "G3": 3.0}
    made = [rows("state-rank", 4, source="task", mark="final", block=block, layer=layer, head=0, effective_rank=lambda i, r=rank: r + i / 100)
            for layer, (block, rank) in enumerate(ranks.items())]  # fmt: skip
    table = appendix.state_rank([results(*made)])
    assert table.columns == ("Encode", "feeder", "Address", "after"), "a role that no block has, has no column"
    assert [one.value for _, cells in table.rows for one in cells] == pytest.approx([1.515, 4.015, 6.015, 3.015])


def test_state_upstream_and_steer():
    swapped = {"block": "G2", "donor": "same-dictionary", "position": "final"}
    made = [
        rows("state", intervention="state", mode="recurrent", redirected=lambda i: i < 9, **swapped),
        rows("state", intervention="input", redirected=lambda i: i < 1, **swapped),
        *(rows("upstream", without=w, redirected=lambda i, r=r: i < r, **swapped) for w, r in [("", 10), ("G0", 2)]),
        rows("upstream", without="G0", correct=lambda i: i < 5, **{**swapped, "donor": "itself"}),
        *(rows("steer", arm=arm, site="answer", redirected=arm == "output", **swapped) for arm in ("output", "random")),
        rows("steer", arm="output", site="continuation", loss=2.0, loss_without=1.5, kl=0.3, **swapped),
    ]  # fmt: skip
    model = results(*made)
    state = circuit.state([model])
    assert (cell(state, "recurrent state", "chat8", "G2"), cell(state, "mixers' input", "chat8", "G2")) == (wilson(9, N), wilson(1, N))  # fmt: skip
    assert plain(cell(state, "conv state", "chat8", "G2")) == DASH
    upstream = circuit.upstream([model])
    assert cell(upstream, "redirected", "chat8", "G2", "nothing") == wilson(N, N)
    assert cell(upstream, "redirected", "chat8", "G2", "G0") == wilson(2, N)
    assert cell(upstream, "the donor's own accuracy", "chat8", "G2", "G0") == wilson(5, N)
    steer = circuit.steer([model])
    assert cell(steer, "redirected", "chat8", "G2", "random") == wilson(0, N)
    assert cell(steer, "continuation: perplexity", "chat8", "G2", "output").value == pytest.approx(math.exp(0.5))
    assert cell(steer, "continuation: KL", "chat8", "G2", "output").value == pytest.approx(0.3)
    assert plain(cell(steer, "unrelated: KL", "chat8", "G2", "output")) == DASH


def test_encode_linear_writers_and_routes():
    linear = {"arm": "linear", "unit": "layers", "block": "G0"}
    made = [forms("encode-linear", 9, 1.0, **linear)]
    made += [rows("encode-linear-text", loss=1.0), rows("encode-linear-text", loss=1.7, intervention="replace", **linear)]  # fmt: skip
    told = [("clean", "none", "", "", 4.0), ("corrupted", "none", "", "", -4.0), ("corrupted", "patch", "G0", "value", 2.0)]  # fmt: skip
    made += [
        rows("writers", form=form, arm=arm, block=block, position=at, path="full", margin=margin)
        for form, arm, block, at, margin in told
    ]
    arms = [("clean", "", 4.0), ("corrupted", "", -4.0), ("kv", "clean", 4.0), ("state", "clean", -2.0)]
    made += [
        rows("routes", part="routes", position="dictionary", arm=arm, donor=donor, margin=margin, carried=margin > 0)
        for arm, donor, margin in arms
    ]
    model = results(*made)
    table = circuit.encode_linear([model])
    assert cell(table, "linear", "chat8", "G0", "layers", "accuracy").value == pytest.approx(0.9)
    assert cell(table, "linear", "chat8", "G0", "layers", "perplexity").value == pytest.approx(math.exp(0.7))
    assert cell(table, "zeroed", "chat8", "G0", "layers", "accuracy") == "", "whole layers are not zeroed: nothing to run"  # fmt: skip
    assert cell(circuit.writers([model]), "value", "chat8", "output", "G0").value == pytest.approx(0.75)
    assert plain(cell(circuit.writers([model]), "final", "chat8", "output", "G0")) == DASH
    routes = circuit.routes([model])
    assert cell(routes, "dictionary: recovery", "chat8", "kv", "clean").value == pytest.approx(1.0)
    assert cell(routes, "dictionary: recovery", "chat8", "state", "clean").value == pytest.approx(0.25)
    assert cell(routes, "dictionary: answers as clean", "chat8", "state", "clean") == wilson(0, N)


# -- files --------------------------------------------------------------------------------------------------------------
def odd() -> Results:
    return results(*REMOVALS, *TEXT, moved("G2", 8, margin=-1.5), name="my_model & 50%#{x}|~^\\")


def test_numbers_are_short():
    assert [number(x) for x in (0.874, -0.001, -0.5, 26019.4, 99.996, math.inf)] == ["0.87", "0.00", "-0.50", "26,019", "100.00", "∞"]  # fmt: skip
    assert plain(Estimate(0.87, 9, 0.8, 0.92)) == "0.87 [0.80, 0.92]"
    assert typeset(Estimate(-0.5, 9, -0.8, 0.1)) == "$-$0.50 [$-$0.80, 0.10]"
    assert typeset(None) == typeset(Estimate(math.nan, 0, math.nan, math.nan)) == "--"


def test_latex_is_balanced_escaped_and_rectangular():
    for table in [*tables_of([odd()]), *tables_of([odd(), results(*REMOVALS)])]:
        text = table.latex().replace(r"\\", "\n")
        assert text.isascii()
        bare = re.sub(r"\\[{}&%$#_]", "", text)
        assert bare.count("{") == bare.count("}")
        assert bare.count("$") % 2 == 0
        assert re.findall(r"\\begin\{(\w+)\}", text) == re.findall(r"\\end\{(\w+)\}", text)[::-1]
        aligned = re.search(r"\\begin\{tabular\}\{([lr]+)\}", text)[1]
        body = re.sub(r"\\(mid|top|bottom)rule", "", text[text.index(r"\toprule") : text.index(r"\bottomrule")])
        lines = [line for line in body.split("\n") if line.strip()]
        assert len(lines) == 1 + len(table.rows)
        assert {len(re.findall(r"(?<!\\)&", line)) + 1 for line in lines} == {len(aligned)}
        assert "%" not in re.sub(r"\\%", "", text.split("\n", 1)[1]), "an unescaped % would swallow the rest of its line"  # fmt: skip


def test_the_model_has_a_column_only_where_there_are_several():
    one, two = main.removal([odd()]), main.removal([odd(), results(*REMOVALS)])
    assert one.markdown().count("my_model") == 1
    assert "Model: my_model" in one.said
    assert two.markdown().split("\n")[2].startswith("| model |")
    assert two.latex().count(r"\midrule") == 2
    assert "n = 10 in every cell" in main.removal([results(*REMOVALS)]).said
    assert "n = 4 to 10" in one.said


def test_files_are_written_and_stale_ones_go(tmp_path: Path):
    for name in ("steer-old.tex", "notes.md"):
        (tmp_path / name).write_text("")
    paths = write([results(*REMOVALS, name="a/b")], tmp_path)
    assert set(tmp_path.iterdir()) == {*paths, tmp_path / "notes.md"}
    names = {path.stem for path in paths}
    assert {"removal", "encode", "query-key", "transplant", "cross-transplant", "replacement", "scaling"} < names
    assert names - {make([]).name for make in main.MAIN} == {"appendix-removal-a--b", "critical-a--b"}, "only what was run"  # fmt: skip
    tidy = pd.read_csv(tmp_path / "removal.csv")
    own = tidy[(tidy["measure"] == "accuracy") & (tidy["column"] == "G1")].iloc[0]
    assert (own["model"], own["value"], own["n"]) == ("a/b", 0.7, N)
    assert own["low"] < 0.7 < own["high"]
    assert tidy[tidy["column"] == "G2"]["value"].isna().all()
    assert np.isfinite(tidy["value"]).sum() == 6


def test_a_model_without_a_verdict_has_its_blocks_from_its_rows():
    table = main.removal([results(*REMOVALS, verdict={})])
    assert table.columns == ("intact", "G0", "G1")
    assert {plain(one) for _, cells in main.scaling([results(*REMOVALS, verdict={})]).rows for one in cells} >= {DASH, "none"}  # fmt: skip
