"""Blocks replaced by linear maps: against plain hooks and scikit-learn's own ridge, and what the experiment says."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

import encode_address as ea
from encode_address.errors import RunError
from encode_address.experiments.base import swap_cell
from encode_address.maps import TOKEN_GRID
from encode_address.run.cells import Cell
from encode_address.run.projection import Projection
from tests.oracle_cases import MODELS, case


@pytest.fixture(params=MODELS)
def one(request):
    return case(request.param)


def prompts_of(one):
    """Fit data of two lengths: dictionaries, and shorter cuts of them."""
    whole = [item.host for item in one.questions] + [swap.clean for swap in one.swaps]
    cut = [type(p)(p.ids[: len(p) // 2]) for p in whole]
    return tuple(whole + cut)


def watch(seen, layer, before, after):
    """Hooks that keep what enters one module and what leaves another."""

    def entering(_module, args, kwargs):
        seen["in", layer] = (args[0] if args else kwargs["hidden_states"]).clone()

    def leaving(_module, _args, out):
        seen["out", layer] = (out[0] if isinstance(out, tuple) else out).clone()

    return [before.register_forward_pre_hook(entering, with_kwargs=True), after.register_forward_hook(leaving)]


def rows_by_hooks(one, prompts, layers, unit):
    """{layer: (x, y, whether held out)} from plain hooks, prompt by prompt."""
    module, last = one.oracle.decoder, layers[-1]
    found = {layer: ([], [], []) for layer in (layers if unit == "mixers" else layers[:1])}
    for i, prompt in enumerate(prompts):
        seen, hooks = {}, []
        for layer in found:
            target = one.oracle.mixers[layer] if unit == "mixers" else module.layers[layer]
            hooks += watch(seen, layer, target, target if unit == "mixers" else module.layers[last])
        try:
            one.oracle.logits(torch.tensor([prompt.ids]))
        finally:
            for hook in hooks:
                hook.remove()
        for layer, (x, y, held) in found.items():
            out = seen["out", layer][0] - (seen["in", layer][0] if unit == "layers" else 0)
            x.append(seen["in", layer][0].double().numpy())
            y.append(out.double().numpy())
            held += [i % 5 == 4] * len(prompt)
    return {layer: (np.concatenate(x), np.concatenate(y), np.array(h)) for layer, (x, y, h) in found.items()}


def ridge_by_hand(x, y, held):
    inner = x[~held] - x[~held].mean(0)
    largest = np.linalg.eigvalsh(inner.T @ inner)[-1]

    def tried(penalty):
        fitted = Ridge(penalty * largest).fit(x[~held], y[~held])
        return ((fitted.predict(x[held]) - y[held]) ** 2).sum(), penalty, fitted

    fits = sorted((tried(penalty) for penalty in TOKEN_GRID), key=lambda fit: fit[1])
    for end, factor in ((0, 10**-0.5), (-1, 10**0.5)):  # past an end of the grid for as long as that is better
        if min(fits, key=lambda fit: fit[0]) is fits[end]:
            further = tried(fits[end][1] * factor)
            while further[0] < fits[end][0] and 1e-12 < further[1] < 1e6:
                fits.insert(0 if end == 0 else len(fits), further)
                further = tried(further[1] * factor)
    return min(fits, key=lambda fit: fit[0])[2]


@pytest.mark.parametrize("unit", ["layers", "mixers"])
def test_a_replaced_block_gives_what_plain_hooks_give(one, unit):
    name, layers = one.units[1]
    prompts = prompts_of(one)
    projection = Projection(layers, unit, prompts)
    cells = [swap_cell("replace", swap, "clean", {"block": name}, layers=layers, map=projection) for swap in one.swaps]
    engine = ea.Engine(one.model)  # of its own: what it forwards is compared with what it planned
    table = engine.run(cells)
    maps = {layer: ridge_by_hand(*rows) for layer, rows in rows_by_hooks(one, prompts, layers, unit).items()}
    changed = 0.0
    for swap, margin, r2 in zip(one.swaps, table["margin"], table["map_r2"]):
        ids, hooks = torch.tensor([swap.clean.ids]), []
        entered = {}
        if unit == "layers":

            def keep(_m, args, kwargs, entered=entered):
                entered["x"] = args[0] if args else kwargs["hidden_states"]

            def put(_m, _a, out, entered=entered):
                x = entered["x"]
                mapped = x + torch.tensor(maps[layers[0]].predict(x[0].double().numpy()), dtype=x.dtype)[None]
                return (mapped, *out[1:]) if isinstance(out, tuple) else mapped

            hooks.append(one.oracle.decoder.layers[layers[0]].register_forward_pre_hook(keep, with_kwargs=True))
            hooks.append(one.oracle.decoder.layers[layers[-1]].register_forward_hook(put))
        else:
            for layer in layers:

                def map_one(_m, args, kwargs, out, layer=layer):
                    x = args[0] if args else kwargs["hidden_states"]
                    mapped = torch.tensor(maps[layer].predict(x[0].double().numpy()), dtype=x.dtype)[None]
                    return (mapped, *out[1:]) if isinstance(out, tuple) else mapped

                hooks.append(one.oracle.mixers[layer].register_forward_hook(map_one, with_kwargs=True))
        try:
            logits = one.oracle.logits(ids)[0]
        finally:
            for hook in hooks:
                hook.remove()
        want = float(logits[swap.clean.answer] - logits[swap.corrupted.answer])
        plain = one.oracle.logits(ids)[0]
        changed = max(changed, abs(want - float(plain[swap.clean.answer] - plain[swap.corrupted.answer])))
        assert abs(margin - want) <= 1e-4 * max(1.0, float(logits.std()))
        assert r2 <= 1
    assert changed > 1e-3
    assert engine.tokens == engine.planned


def test_equal_projections_are_one_work_and_kinds_are_told_apart():
    one = case("tiny-gdn")
    layers = one.units[1][1]
    constant = Projection(layers, "mixers", prompts_of(one), "mean")
    again = Projection(layers, "mixers", prompts_of(one), "mean")
    assert constant.digest == again.digest
    assert Projection(layers, "mixers", prompts_of(one)).digest != constant.digest
    rows = one.engine.run([Cell("replace", s.clean, layers=layers, map=constant, outcomes=(("a", 3), ("b", 4))) for s in one.swaps])  # fmt: skip
    assert len(rows) == len(one.swaps)
    assert set(rows["mode"]) == {"mixers"}


def test_what_no_map_can_stand_in_for_is_one_clear_line():
    one = case("tiny-gdn")
    host = one.questions[0].host
    with pytest.raises(RunError, match="do not follow one another"):
        Projection((0, 2), "layers", (host,))
    with pytest.raises(RunError, match="no projection of 'heads'"):
        Projection((0,), "heads", (host,))
    with pytest.raises(RunError, match="replace, and nothing else, takes a map"):
        Cell("replace", host, layers=(0,))
    with pytest.raises(RunError, match="a map stands in for the layers"):
        Cell("replace", host, layers=(2,), map=Projection((0,), "layers", (host,)))
    with pytest.raises(RunError, match="one held out"):
        one.engine.run([Cell("replace", host, layers=(0,), map=Projection((0,), "layers", (host,)), outcomes=(("a", 3), ("b", 4)))])  # fmt: skip


def test_the_experiment_on_a_trained_model(tmp_path):
    model = ea.load("tiny-gdn")
    result = ea.experiment("encode-linear", model, "chat8", n=16, out=tmp_path)
    figures = result.conclusions["chat8"].figures
    assert len(figures) == len(model.layout.blocks) * 9
    table = result.table
    replaced = table[table["intervention"] == "replace"]
    assert set(replaced["arm"]) == {"linear", "text only", "mean", "shuffled"}
    assert (replaced[replaced["arm"] == "linear"].groupby("block")["map_r2"].first() > 0.3).all()
    assert (replaced[replaced["arm"] == "shuffled"]["map_r2"] < 0.05).all()
    # G1 is no part of the circuit: any map may stand there. Nothing linear stands in for the Address.
    shares = table[table["experiment"] == "encode-linear"].groupby(["block", "arm"])["correct"].mean()
    assert shares["G1", "linear"] > 0.8
    assert shares["G2", "linear"] < 0.5
    assert shares["G0", "mean"] < 0.3
    account = json.loads((result.folder / "manifest.json").read_text())["this_run"]
    assert account["tokens_forwarded"] == account["tokens_planned"]
