"""Readouts of a value from logits, on vectors whose answers are known by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from encode_address.errors import RunError
from encode_address.readouts import SATURATED, accuracy, forced_choice, readouts, saturation

LOGITS = torch.tensor([[5.0, 1.0, 3.0, 2.0, 0.0], [1.0, 1.0, 1.0, 4.0, 9.0]])


def test_three_readouts_of_one_rank():
    rows = readouts(LOGITS, [2, 1], [[0, 1], [3, 4]])
    assert rows["rank"].tolist() == [1, 2]  # in the second row two are larger, and two as large
    assert rows.R.tolist() == [0.75, 0.5]
    assert rows.L.tolist() == pytest.approx([-math.log10(2), -math.log10(3)])
    assert rows.M.tolist() == pytest.approx([3 - 3, 1 - 6.5])
    assert set(rows.unit) == {"nats"}


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), size=st.integers(3, 60), shift=st.floats(-5, 5))
def test_they_are_what_the_definitions_say(seed, size, shift):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(4, size)).round(1)
    ids = np.stack([rng.permutation(size)[:3] for _ in range(4)])
    rows = readouts(logits + shift, ids[:, 0], ids[:, 1:])
    logp = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    for i, (value, *rivals) in enumerate(ids):
        rank = sum(logits[i, t] > logits[i, value] for t in range(size))
        assert rows["rank"][i] == rank
        assert rows.R[i] == pytest.approx(1 - rank / (size - 1))
        assert rows.L[i] == pytest.approx(-math.log10(rank + 1))
        assert rows.M[i] == pytest.approx(logp[i, value] - logp[i, rivals].mean(), abs=1e-9)


def test_r_saturates_in_a_real_vocabulary_and_is_marked_there():
    """Ranks 1 and 25 of 248,320 tokens are 1e-4 apart in R, and a decade apart in L."""
    size = 248_320
    logits = -torch.arange(size, dtype=torch.float32)[None].repeat(3, 1)
    rows = readouts(logits, [1, 25, 2000], [[size - 1]] * 3)
    assert rows["rank"].tolist() == [1, 25, 2000]
    assert rows.R[0] - rows.R[1] == pytest.approx(1e-4, abs=1e-5)
    assert rows.L[0] - rows.L[1] > 1
    assert rows.saturated.tolist() == [True, True, False]
    assert rows.R[1] > SATURATED > rows.R[2]
    share = saturation(rows)
    assert (share.value, share.n) == (pytest.approx(2 / 3), 3)


def test_r_of_a_small_vocabulary_is_never_called_saturated():
    rows = readouts(LOGITS, [0, 4], [[1], [1]])
    assert rows.R.tolist() == [1.0, 1.0]
    assert not rows.saturated.any()


def test_scores_of_a_row_lens_give_margins_only():
    rows = readouts(LOGITS[:, :3], [40, 60], [[50, 60], [40, 50]], tokens=(40, 50, 60))
    assert rows.M.tolist() == pytest.approx([5 - 2, 0])
    assert rows[["rank", "R", "L"]].isna().all(axis=None)
    assert set(rows.unit) == {"relative"}
    assert saturation(rows).n == 0
    chosen = forced_choice(LOGITS[:, :3], [[60, 40], [40, 50]], [60, 50], tokens=(40, 50, 60))
    assert chosen.chosen.tolist() == [40, 40]
    assert chosen.correct.tolist() == [False, False]


def test_forced_choice_is_among_the_candidates_and_ties_are_not_correct():
    logits = torch.cat([LOGITS, LOGITS[1:]])
    rows = forced_choice(logits, [[2, 3, 4], [0, 1, 3], [0, 1, 2]], [2, 3, 0])
    assert rows.chosen.tolist() == [2, 3, 0]
    assert rows.correct.tolist() == [True, True, False]
    rate = accuracy(rows)
    assert (rate.value, rate.n) == (pytest.approx(2 / 3), 3)
    assert rate.low < rate.value < rate.high
    assert accuracy(rows.iloc[:0]).n == 0


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda: readouts(LOGITS, [2, 1], [[2, 0], [3, 4]]), "other tokens than the value"),
        (lambda: readouts(LOGITS, [2, 1], [[], []]), "needs rivals"),
        (lambda: readouts(LOGITS, [2, 5], [[0], [0]]), "token 5 is not among the 5"),
        (lambda: readouts(LOGITS, [2, -1], [[0], [0]]), "token -1 is not among"),
        (lambda: readouts(LOGITS, [2], [[0]]), "for 2 rows of logits"),
        (lambda: readouts(LOGITS * torch.inf, [2, 1], [[0], [0]]), "finite logits"),
        (lambda: readouts(LOGITS[0], [2], [[0]]), "one row per prompt"),
        (lambda: readouts(LOGITS, [2, 1], [[0], [0]], tokens=(1, 2)), "5 scores for 2 tokens"),
        (lambda: forced_choice(LOGITS, [[0, 1], [0, 1]], [2, 0]), "right answer among its candidates"),
        (lambda: forced_choice(LOGITS, [[0, 1, 1], [0, 1, 2]], [0, 0]), "one candidate twice"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(action, message):
    with pytest.raises(RunError, match=message) as caught:
        action()
    assert "\n" not in str(caught.value)
