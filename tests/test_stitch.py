"""Another model's block in place of some layers: against plain hooks and scikit-learn's own ridge, on random models.

The donor has another architecture, another width and prompts of another length; its layers are run by hand, from a copy
that nnsight has never seen.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

import encode_address
from encode_address.errors import RunError
from encode_address.run.cells import Cell, Edit
from encode_address.run.engine import Engine
from encode_address.run.projection import Projection
from encode_address.run.stitch import Row, Slot, Stitch, classes
from tests import tiny
from tests.oracle import Oracle
from tests.oracle_cases import case, tolerance

HOST, FIRST, LATER = (5, 6), (3,), (5, 6)
DONOR = (0, 1)
LENGTH, LONGER = 70, 75
TOLERANCE = 1e-5
WIDE_GRID = tuple(10.0 ** (p / 2) for p in range(-24, 13))


@cache
def narrow():
    """A Mamba-2 donor of width 36 (every host here has 48), and its plain copy."""

    def build():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            settings = tiny.granite_settings(hidden_size=36, mamba_d_head=12)
            return tiny.randomise(GraniteMoeHybridForCausalLM(GraniteMoeHybridConfig(**settings)))

    model = encode_address.load(build(), tokenizer=tiny.toy_tokenizer())
    return SimpleNamespace(model=model, oracle=Oracle(build(), "granite"))


@cache
def rows(n: int = 12) -> tuple[Row, ...]:
    """Dictionaries that the donor reads with five more words of filling; its tokens align but for those."""
    out = []
    for _, target, _, keys, values in tiny._draw(n, 3):
        host, donor = (tiny.prompt(keys, values[:4], target, length=length) for length in (LENGTH, LONGER))
        same = [(i, i) for i in range(LENGTH - 5)]
        out.append(Row(host, donor, tuple(same + [(i, i + LONGER - LENGTH) for i in range(LENGTH - 5, LENGTH)])))
    return tuple(out)


def made(host, donor, layers=HOST, arms=(("block", DONOR),), under=(), data=None):
    return Slot(host, layers, donor, rows() if data is None else data, tuple(arms), tuple(under))


def cells(one, layers, standing, **more):
    return [
        Cell(
            "replace", swap.clean, layers=layers, map=standing, outcomes=(("correct", swap.clean.answer), ("swapped", swap.corrupted.answer)),
            labels={"pair": swap.pair}, **more,
        )
        for swap in one.swaps
    ]  # fmt: skip


def intact(one, **more):
    return [
        Cell("none", s.clean, path="full", outcomes=(("a", s.clean.answer), ("b", s.corrupted.answer)), labels={"pair": s.pair}, **more)
        for s in one.swaps
    ]  # fmt: skip


# -- exactness ---------------------------------------------------------------------------
@pytest.mark.parametrize("name", tiny.FAMILIES)
@pytest.mark.parametrize("layers", [(5, 6), (0, 1)])
def test_a_models_own_block_without_maps_is_the_model_to_the_bit(name, layers):
    one = case(name)
    kind = ("identity", layers)
    own = Stitch(Slot(one.model, layers, one.model, (), (kind,)), kind)
    plain, stitched = (
        one.engine.run(intact(one, watch=one.watch)),
        one.engine.run(cells(one, layers, own, watch=one.watch)),
    )
    for column in ["margin", "spread", "said", *(c for c in plain if c.startswith("attn."))]:
        assert [repr(v) for v in plain[column]] == [repr(v) for v in stitched[column]], column
    other = ("identity", (3,))  # and it is the donor's block that runs, not the host's own by chance
    wrong = one.engine.run(cells(one, layers, Stitch(Slot(one.model, layers, one.model, (), (other,)), other)))
    assert (plain["margin"] - wrong["margin"]).abs().max() > 1e-2


# -- oracle ------------------------------------------------------------------------------
def first_argument(args, kwargs):
    return args[0] if args else kwargs["hidden_states"]


def run_by_hand(oracle, block, x, zeroed=False):
    """Decoder layers of a plain module; a zeroed mixer is replaced in the layer."""
    hooks = [oracle.mixers[i].register_forward_hook(lambda _m, _a, out: out * 0) for i in block if zeroed]
    with torch.no_grad():
        for i in block:
            x = oracle.decoder.layers[i](x, position_embeddings=None, attention_mask=None)
    for hook in hooks:
        hook.remove()
    return x


@contextmanager
def put_by_hand(oracle, layers, stands):
    """`stands(h)` is what leaves the last of `layers` when h enters the first. Yields what entered and would have left."""
    seen = {}

    def entering(_m, args, kwargs):
        seen["x"] = first_argument(args, kwargs).clone()

    def leaving(_m, _a, out):
        seen["out"] = out.clone()
        return stands(seen["x"]) if stands else None

    one, two = oracle.decoder.layers[layers[0]], oracle.decoder.layers[layers[-1]]
    hooks = [one.register_forward_pre_hook(entering, with_kwargs=True), two.register_forward_hook(leaving)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def ridge_by_hand(parts):
    """Parts: (x, y, role of the prompt: 4 chooses the penalty, 5 takes no part)."""
    x, y, role = (np.concatenate(part) for part in zip(*parts))
    fit, held = role < 4, role == 4
    inner = x[fit] - x[fit].mean(0)
    largest = np.linalg.eigvalsh(inner.T @ inner)[-1]
    fits = {a: Ridge(a * largest, solver="svd").fit(x[fit], y[fit]) for a in WIDE_GRID}
    losses = {a: ((one.predict(x[held]) - y[held]) ** 2).sum() for a, one in fits.items()}
    best = min(losses, key=lambda a: losses[a])
    rest = role == 5
    r2 = 1 - ((fits[best].predict(x[rest]) - y[rest]) ** 2).sum() / ((y[rest] - y[fit].mean(0)) ** 2).sum()
    return best, (lambda v: torch.tensor(fits[best].predict(v.double().numpy()), dtype=v.dtype)), r2


def fit_by_hand(host, donor, layers, block, zeroed, under=None):
    """Both maps, with the penalty and the R^2 of each, from plain forwards, prompt by prompt."""
    entries, seen_host = [], []
    for i, row in enumerate(rows()):
        with put_by_hand(donor, block, None) as native:
            donor.logits(torch.tensor([row.donor.ids]))
        with put_by_hand(host, *(under or (layers, None))), put_by_hand(host, layers, None) as seen:
            host.logits(torch.tensor([row.host.ids]))
        x, y = (torch.tensor([pair[side] for pair in row.at]) for side in (0, 1))
        pair = seen["x"][0][x].double().numpy(), native["x"][0][y].double().numpy()
        entries.append((*pair, np.full(len(x), i % 6)))
        seen_host.append((seen["x"], (seen["out"] - seen["x"])[0].double().numpy()))
    entry = ridge_by_hand(entries)
    exits = []
    for i, (x, write) in enumerate(seen_host):
        entered = entry[1](x[0])[None]
        exits.append(
            (
                (run_by_hand(donor, block, entered, zeroed) - entered)[0].double().numpy(),
                write,
                np.full(len(write), i % 6),
            )
        )
    return entry, ridge_by_hand(exits)


def stands_by_hand(fitted, donor, block, zeroed):
    """h + N(B(M(h)) - M(h)), from the arrays of fitted maps."""
    entry, leave = ((torch.tensor(one.coef_), torch.tensor(one.intercept_)) for one in fitted.maps)

    def stands(x):
        entered = (x.double() @ entry[0] + entry[1]).float()
        write = (run_by_hand(donor, block, entered, zeroed) - entered).double()
        return x + (write @ leave[0] + leave[1]).float()

    return stands


@pytest.mark.parametrize("kind", ["block", "zeroed"])
@pytest.mark.parametrize("name", ["qwen3_5_text", "granite_moe"])
def test_a_stitched_block_gives_what_plain_hooks_give(name, kind):
    one, donor = case(name), narrow()
    arm = (kind, DONOR)
    standing = Stitch(made(one.model, donor.model, arms=(arm,)), arm)
    engine = Engine(one.model, one.text)
    table, plain = engine.run(cells(one, HOST, standing)), engine.run(intact(one))
    assert engine.tokens == engine.planned
    fitted = engine.fitted(standing)
    # What runs in the trace, with these maps:
    stands = stands_by_hand(fitted, donor.oracle, DONOR, kind == "zeroed")
    for swap, margin, before in zip(one.swaps, table["margin"], plain["margin"]):
        with put_by_hand(one.oracle, HOST, stands):
            logits = one.oracle.logits(torch.tensor([swap.clean.ids]))[0]
        want = float(logits[swap.clean.answer] - logits[swap.corrupted.answer])
        assert abs(margin - want) <= tolerance(logits, TOLERANCE)
        assert abs(margin - before) > 1e-3
    # The maps themselves:
    by_hand = fit_by_hand(one.oracle, donor.oracle, HOST, DONOR, kind == "zeroed")
    probe = torch.randn(20, 48, generator=torch.Generator().manual_seed(0)), torch.randn(20, 36)
    for ridge, side, (penalty, predict, r2), x in zip(fitted.maps, ("entry", "exit"), by_hand, probe):
        assert ridge.relative_alpha_ == pytest.approx(penalty)
        assert fitted.columns[f"{side}_r2"] == pytest.approx(r2, abs=1e-4)
        assert np.abs(ridge.predict(x.numpy()) - predict(x).numpy()).max() <= 2e-3 * max(
            1.0, float(predict(x).abs().max())
        )


def test_a_later_slot_is_fitted_with_the_earlier_one_replaced():
    one, donor = case("qwen3_5_text"), narrow()
    arm = ("block", DONOR)
    first = Stitch(made(one.model, donor.model, FIRST), arm)
    second = Stitch(made(one.model, donor.model, LATER, under=(first,)), arm)
    alone = Stitch(made(one.model, donor.model, LATER), arm)
    engine = Engine(one.model, one.text)
    table = engine.run(cells(one, LATER, second, also=(Edit("replace", FIRST, map=first),)))
    assert engine.tokens == engine.planned
    stands = [stands_by_hand(engine.fitted(s), donor.oracle, DONOR, False) for s in (first, second)]
    for swap, margin in zip(one.swaps, table["margin"]):
        with put_by_hand(one.oracle, FIRST, stands[0]), put_by_hand(one.oracle, LATER, stands[1]):
            logits = one.oracle.logits(torch.tensor([swap.clean.ids]))[0]
        assert abs(margin - float(logits[swap.clean.answer] - logits[swap.corrupted.answer])) <= tolerance(
            logits, TOLERANCE
        )
    by_hand = fit_by_hand(one.oracle, donor.oracle, LATER, DONOR, False, under=(FIRST, stands[0]))
    assert engine.fitted(second).columns["exit_r2"] == pytest.approx(by_hand[1][2], abs=1e-4)
    assert abs(engine.fitted(alone).columns["exit_r2"] - by_hand[1][2]) > 1e-3


# -- arms ----------------------------------------------------------------------------------
def test_the_linear_and_mean_arms_are_the_projections_of_the_same_prompts():
    """Of six prompts the sixth takes no part, so that the others are split as a projection splits its own."""
    one = case("granite")
    prompts = tuple(row.host for i, row in enumerate(rows()) if i % 6 != 5)
    arms = (("linear", ()), ("mean", ()), ("block", DONOR))
    slot = made(one.model, narrow().model, arms=arms)
    for arm, kind in ((arms[0], "ridge"), (arms[1], "mean")):
        a = one.engine.run(cells(one, HOST, Stitch(slot, arm)))
        b = one.engine.run(cells(one, HOST, Projection(HOST, "layers", prompts, kind)))
        assert (a["margin"] - b["margin"]).abs().max() <= 1e-4 * float(a["spread"].max())
        assert (a["margin"] - one.engine.run(intact(one))["margin"]).abs().max() > 1e-2


def test_arms_of_a_slot_are_fitted_in_the_same_runs():
    one, donor = case("granite"), narrow()
    arms = (("block", DONOR), ("zeroed", DONOR), ("shuffled", DONOR), ("block", (3,)), ("linear", ()), ("mean", ()))
    engine = Engine(one.model, one.text)
    slot = made(one.model, donor.model, arms=arms)
    work = [c for arm in arms for c in cells(one, HOST, Stitch(slot, arm))]
    for cell, arm in zip(work, [arm for arm in arms for _ in one.swaps]):
        cell.labels["arm"] = str(arm)
    planned = engine.plan(work)
    table = engine.run(work)
    assert engine.traces == planned.traces
    assert engine.tokens == engine.planned == planned.tokens
    fit = sum(len(r.host) * 2 * 7 + len(r.donor) * 3 for r in slot.rows) + 2 * LENGTH * 7  # the error: of two prompts
    assert slot.cost(engine.limits.tokens)[0] == fit
    told = {arm: engine.fitted(Stitch(slot, arm)).columns for arm in arms}
    assert told[arms[0]]["entry_r2"] == told[arms[1]]["entry_r2"] > 0.3
    assert told[arms[2]]["entry_r2"] < 0.1
    assert told[arms[4]]["exit_r2"] > told[arms[5]]["exit_r2"] == pytest.approx(0, abs=0.1)
    assert len(set(table.groupby("arm")["margin"].first())) == len(arms)


def test_the_missed_share_is_told_by_class_of_position():
    one = case("granite")
    prompt = rows()[0].host
    named = classes(prompt)
    assert named[:5] == ["wrapper", "key", "delimiter", "value", "delimiter"]
    assert named[-5:] == ["question"] * 4 + ["final"]
    assert classes(type(prompt)((3, 4, 5))) == ["text"] * 3
    slot = made(one.model, narrow().model, arms=(("mean", ()),))
    told = one.engine.fitted(Stitch(slot, ("mean", ()))).columns
    missed = {}
    mean = one.engine.fitted(Stitch(slot, ("mean", ()))).maps[1].mean_y_
    for row in rows()[5::6]:
        with put_by_hand(one.oracle, HOST, None) as seen:
            one.oracle.logits(torch.tensor([row.host.ids]))
        write = (seen["out"] - seen["x"])[0].double().numpy()
        for name, values in zip(classes(row.host), write):
            missed.setdefault(name, []).append(values)
    for name, values in missed.items():
        values = np.array(values)
        want = ((values - mean) ** 2).sum() / ((values - values.mean(0)) ** 2).sum()
        assert told[f"error_{name}"] == pytest.approx(want, rel=1e-3)


# -- what is refused -----------------------------------------------------------------------
def test_what_cannot_be_stitched_is_one_clear_line():
    one, donor = case("granite"), narrow()
    remote = SimpleNamespace(remote=True)
    with pytest.raises(RunError, match="load both models without remote=True"):
        Slot(one.model, HOST, remote, (), (("block", DONOR),))
    with pytest.raises(RunError, match="L2 is no linear layer"):
        made(one.model, donor.model, arms=(("block", (2,)),))
    with pytest.raises(RunError, match="do not follow one another"):
        made(one.model, donor.model, (3, 5))
    with pytest.raises(RunError, match="no stitch of kind 'heads'"):
        made(one.model, donor.model, arms=(("heads", DONOR),))
    with pytest.raises(RunError, match="width 36 need maps"):
        made(one.model, donor.model, arms=(("identity", DONOR),))
    with pytest.raises(RunError, match="earlier slots lie below"):
        made(one.model, donor.model, FIRST, under=(Stitch(made(one.model, donor.model), ("block", DONOR)),))


def test_what_cannot_be_fitted_is_one_clear_line():
    one, donor = case("granite"), narrow()
    arm = ("block", DONOR)

    def run(slot, engine=None):
        return (engine or Engine(one.model, one.text)).run(cells(one, slot.layers, Stitch(slot, arm)))

    with pytest.raises(RunError, match="six prompts or more"):
        run(made(one.model, donor.model, data=rows()[:4]))
    few = tuple(Row(row.host, row.donor, row.at[:3]) for row in rows())
    with pytest.raises(RunError, match="too few rows for a map: 24 for 48 features, it needs 48"):
        run(made(one.model, donor.model, data=few))
    other = case("qwen3_5_text")
    with pytest.raises(RunError, match=r"these maps are for layers of GraniteMoe.*, not of Qwen"):
        run(made(one.model, donor.model), Engine(other.model, other.text))
    broken = tiny.load_tiny("granite")
    with torch.no_grad():
        broken.module.model.layers[4].input_layernorm.weight[:] = float("nan")
    with pytest.raises(RunError, match="NaN or infinite activations at L6"):
        run(made(broken, donor.model), Engine(broken, one.text))
