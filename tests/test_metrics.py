"""Metrics and the summary, on frames small enough to compute every number by hand."""

import math

import numpy as np
import pandas as pd
import pytest

from encode_address.metrics import accuracy, attention, gap, heads, perplexity, select, summary
from encode_address.stats import wilson

# Two pairs, both forms. D is logit(clean answer) - logit(corrupted answer); a row's margin is own minus other.
CLEAN_LOGITS = {0: (5.0, 1.0), 1: (2.0, 3.0)}  # pair -> logits of (clean answer, corrupted answer), clean prompt
CORRUPTED_LOGITS = {0: (0.5, 4.0), 1: (1.0, 1.5)}  # the same two tokens, corrupted prompt


@pytest.fixture
def swaps() -> pd.DataFrame:
    rows = []
    for pair in (0, 1):
        (clean_own, clean_other), (corrupted_other, corrupted_own) = CLEAN_LOGITS[pair], CORRUPTED_LOGITS[pair]
        rows.append({"pair": pair, "form": "clean", "margin": clean_own - clean_other})
        rows.append({"pair": pair, "form": "corrupted", "margin": corrupted_own - corrupted_other})
    table = pd.DataFrame(rows).assign(experiment="baseline", variant="chat8", intervention="none")
    return table.assign(
        correct=[True, True, False, True],
        choice_correct=[True, True, True, True],
        target=[0, 0, 1, 1],
        **{"attn.L3H1": [[0.7, 0.1], [0.5, 0.2], [0.3, 0.6], [0.2, 0.4]]},
    )


def test_the_gap_is_the_clean_minus_the_corrupted_difference(swaps):
    """Paper section 4: the mean over items of D(clean) - D(corrupted), D with the clean answer first in both."""
    by_hand = {
        pair: (CLEAN_LOGITS[pair][0] - CLEAN_LOGITS[pair][1]) - (CORRUPTED_LOGITS[pair][0] - CORRUPTED_LOGITS[pair][1])
        for pair in (0, 1)
    }
    assert gap(swaps).to_dict() == by_hand == {0: 7.5, 1: -0.5}
    assert summary(swaps).set_index("measure").loc["gap", "value"] == pytest.approx(3.5)


def test_accuracy_counts_both_forms(swaps):
    got = accuracy(swaps)
    assert (got.value, got.n) == (0.75, 2)


def test_attention_is_read_at_the_entry_that_the_column_names(swaps):
    assert attention(swaps, (3, 1), "target").tolist() == [0.7, 0.5, 0.6, 0.4]
    clean = swaps[swaps["form"] == "clean"]
    assert attention(clean, (3, 1), "target").to_dict() == {0: 0.7, 2: 0.6}


def test_rows_that_did_not_watch_a_head_have_no_attention(swaps):
    """A concatenated table holds NaN or None where a head was not watched; numpy arrays come from parquet."""
    for missing in (None, float("nan")):
        rows = pd.concat([swaps, swaps.assign(**{"attn.L3H1": [missing] * 4})], ignore_index=True)
        got = attention(rows, (3, 1), "target")
        assert got.isna().tolist() == [False] * 4 + [True] * 4
    arrays = swaps.assign(**{"attn.L3H1": [np.array(masses) for masses in swaps["attn.L3H1"]]})
    assert attention(arrays, (3, 1), "target").tolist() == [0.7, 0.5, 0.6, 0.4]


def test_heads_are_those_that_some_row_watched(swaps):
    rows = swaps.assign(**{"attn.L11H0": [None, None, None, [0.1, 0.2]], "attn.L7H2": None, "attn.note": "x"})
    assert heads(rows) == [(3, 1), (11, 0)]


def test_select_keeps_matching_rows_and_nothing_for_a_missing_column(swaps):
    assert select(swaps, form="clean", pair=1).index.tolist() == [2]
    assert select(swaps, form="clean", block="G0").empty
    assert len(select(swaps)) == 4


def test_perplexity_is_exp_of_the_mean_loss():
    assert perplexity(pd.Series([math.log(2), math.log(8)])) == pytest.approx(4)
    assert perplexity(pd.Series([math.log(4)])) == pytest.approx(4)


# -- summary ------------------------------------------------------------------------------
def test_the_summary_has_one_row_per_setting_and_measure(swaps):
    got = summary(pd.concat([swaps, swaps.assign(variant="list8", correct=True)], ignore_index=True))
    assert got.groupby(["variant", "measure"]).size().eq(1).all()
    value = got.set_index(["variant", "measure"])["value"]
    assert value["chat8", "accuracy"] == 0.75
    assert value["list8", "accuracy"] == 1.0
    assert value["chat8", "choice_accuracy"] == 1.0
    assert got["n"].eq(2).all()
    assert ((got["low"] <= got["value"]) & (got["value"] <= got["high"])).all()
    assert set(got["measure"]) == {"accuracy", "choice_accuracy", "gap", "attention of L3H1 on target"}


def test_the_summary_counts_pairs_where_a_donor_has_several_seeds():
    """Five random donors per pair are five rows of one pair: n is the number of pairs."""
    rows = pd.DataFrame(
        {"pair": np.repeat([0, 1, 2], 5), "seed": list(range(5)) * 3, "redirected": [True] * 5 + [False] * 10}
    )
    got = (
        summary(rows.assign(experiment="transplant", block="G1", donor="random")).set_index("measure").loc["redirected"]
    )
    assert (got["value"], got["n"]) == (pytest.approx(1 / 3), 3)


def test_rates_of_one_row_per_pair_have_the_wilson_interval():
    rows = pd.DataFrame(
        {"pair": range(4), "redirected": [True, True, True, False], "kept": [False, False, False, True]}
    )
    got = summary(rows.assign(experiment="transplant", block="G1", donor="same-dictionary")).set_index("measure")
    for measure, successes in (("redirected", 3), ("kept", 1)):
        assert got.loc[measure, ["value", "low", "high"]].tolist() == pytest.approx(
            [wilson(successes, 4).value, wilson(successes, 4).low, wilson(successes, 4).high]
        )


def test_experiments_with_different_columns_do_not_mix(swaps):
    """In one table of many experiments every setting gets its own measures only, whatever columns are empty there."""
    text = pd.DataFrame({"pair": [0, 1], "loss": [2.0, 4.0]}).assign(experiment="text", intervention="none")
    moved = pd.DataFrame({"pair": [0, 1], "redirected": [True, True]}).assign(
        experiment="transplant", variant="chat8", block="G1", donor="identity", intervention="transplant"
    )
    got = summary(pd.concat([swaps, text, moved], ignore_index=True))
    measures = got.groupby("experiment")["measure"].agg(set).to_dict()
    assert measures == {
        "baseline": {"accuracy", "choice_accuracy", "gap", "attention of L3H1 on target"},
        "text": {"loss"},
        "transplant": {"redirected"},
    }
    assert got.set_index("experiment").loc["text", ["value", "variant", "block"]].tolist() == [3.0, "", ""]
