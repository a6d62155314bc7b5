"""Edits of attention by query and phase, against plain torch with a registered attention function, on every family."""

from __future__ import annotations

import nnsight
import pytest
import torch

from encode_address.attention import forward
from encode_address.interventions import read_cache
from encode_address.interventions.attention import attention_scores, exposed, scores_of
from tests.attention_oracle import by_phase, logits
from tests.family_row import NAMES, case
from tests.oracle_cases import ids_of, tolerance

LENGTH, ANSWER = 30, 3


# What sets families apart here: gates, windows, latent values, experts, multipliers, continuation.
APART = ("qwen3_5_moe", "granite", "jamba", "recurrent_gemma", "nemotron_h", "minimax", "kimi_linear")


@pytest.fixture(params=APART)
def one(request):
    return case(request.param)


@pytest.fixture(params=NAMES)
def each(request):
    return case(request.param)


def asked(one):
    """Prompts (n, P), three answer tokens each, choices, and where a needle and another span lie."""
    prompts = [question.host for question in one.questions]
    ids = ids_of(prompts)
    targets = torch.tensor([[*prompt.choices[:2], prompt.answer] for prompt in prompts])
    needle = torch.zeros(len(prompts), LENGTH + ANSWER, dtype=torch.bool)
    needle[:, [5, 6, 7, 20]] = True
    return ids, targets, torch.tensor([p.choices for p in prompts]), {"needle": needle}


def ops_of(model):
    return {layer: model.attention_op(layer) for layer in model.softmax_layers}


def everywhere(edit):
    return {phase: edit for phase in forward.PHASES}


def run(one, edits, first=LENGTH - 1):
    ids, targets, choices, columns = asked(one)
    rows = torch.arange(len(ids))
    return forward.whole(one.model, ids, targets, choices, first, ops_of(one.model), edits, columns, rows)


def expected(one, prefill, generation, first=LENGTH - 1):
    """The oracle's log-probabilities of the answer's tokens."""
    ids, targets, _, _ = asked(one)
    full = torch.cat([ids, targets[:, :-1]], 1)
    said = logits(one.oracle.module, full, by_phase(first, prefill, generation))[:, LENGTH - 1 :]
    return said.log_softmax(-1).gather(2, targets[..., None])[..., 0], said


# -- the edits again, in the oracle's terms ---------------------------------------------------------------------
def best(k, sign=1, l2=False):
    def edit(_layer, weights, _scores):
        p = weights + 1e-12
        ranked = weights.pow(2).sum(-1).sqrt() if l2 else sign * (p * p.log2()).sum(-1)
        heads = range(ranked.shape[1])
        ahead = [
            sum((ranked[:, o] > ranked[:, h]) | ((ranked[:, o] == ranked[:, h]) & (o < h)) for o in heads)
            for h in heads
        ]
        return weights, torch.stack(ahead, 1) < k

    return edit


def speak(heads):
    def edit(layer, weights, _scores):
        kept = torch.zeros(weights.shape[:3])
        kept[:, heads[layer]] = 1
        return weights, kept

    return edit


def columns_edit(one, mode, renorm=False):
    needle = asked(one)[3]["needle"]

    def edit(_layer, weights, scores):
        inside = needle[:, None, None, : weights.shape[3]].expand_as(weights)
        kept = {"omit": ~inside, "only": inside, "null": torch.zeros_like(inside), "balanced": inside}[mode]
        out = weights * kept
        if mode == "balanced":
            seen = kept & (scores > -1e30)
            share = out.sum((1, 3), keepdim=True) / weights.shape[1] / seen[:, :1].sum(-1, keepdim=True).clamp(min=1)
            out = share * seen
        if renorm:
            seen = kept & (scores > -1e30)
            top = scores.masked_fill(~seen, -1e30).max(-1, keepdim=True).values
            hidden = torch.where(seen, 1.0 if mode == "balanced" else (scores - top).double().exp(), 0.0)
            out = (hidden / hidden.double().sum(-1, keepdim=True).clamp(min=1e-300)).float()
        return out, None

    return edit


def same(one, got, want, size=2e-5):
    log_probs, said = want
    assert (got["log_prob"] - log_probs).abs().max() <= tolerance(said, size)
    return got["log_prob"]


# -- proofs -----------------------------------------------------------------------------------------------------------
def test_recomputed_attention_is_eager_attention(each):
    one = each
    ids = asked(one)[0]
    model, want = one.model, {}
    module = one.oracle.module
    hooks = [
        one.oracle.mixers[i].register_forward_hook(lambda _m, _i, out, i=i: want.update({i: out[1]}))
        for i in model.softmax_layers
    ]
    before = module.config._attn_implementation
    module.set_attn_implementation("eager")
    one.oracle.run(ids)
    module.set_attn_implementation(before)
    for hook in hooks:
        hook.remove()
    ops = ops_of(model)
    with torch.no_grad(), model.trace(ids):
        got = nnsight.save({})
        for i in model.softmax_layers:
            got[i] = scores_of(model.layers[i].mixer, ops[i], slice(None)).softmax(-1)
    first, *later = model.softmax_layers
    assert (got[first] - want[first]).abs().max() <= 1e-6
    for layer in later:  # what enters them has passed another kernel of the layer before
        assert (got[layer] - want[layer]).abs().max() <= 1e-5


@pytest.mark.parametrize("phases", [("prefill",), ("generation",), ("prefill", "generation")])
def test_heads_and_keys_equal_the_oracle(one, phases):
    plain = run(one, {})
    layers, moved = one.model.softmax_layers, []
    fixed = {layer: [0, 2] for layer in layers}
    cases = [
        ({"k": 1}, best(1)),
        ({"k": 2, "by": "l2"}, best(2, l2=True)),
        ({"k": 1, "by": "bottom"}, best(1, sign=-1)),
        ({"k": 0}, speak({layer: [] for layer in layers})),
        ({"heads": fixed}, speak(fixed)),
    ]
    for mode in ("omit", "only", "balanced", "null"):
        for renorm in (False, True):
            edit = {"mode": mode, "span": "needle", "renorm": renorm}
            cases.append((edit, columns_edit(one, mode, renorm and mode != "null")))
    for edit, oracle in cases:
        got = run(one, dict.fromkeys(phases, edit))
        edits = [oracle if phase in phases else None for phase in forward.PHASES]
        log_probs = same(one, got, expected(one, *edits))
        moved.append(float((log_probs - plain["log_prob"]).abs().max()))
    assert min(moved) > 1e-4, moved


def test_all_heads_is_a_no_op_to_the_bit_and_none_is_the_projection_of_zero(each):
    one = each
    heads = one.model.heads
    plain, all_heads = run(one, {}), run(one, everywhere({"k": heads}))
    assert torch.equal(plain["log_prob"], all_heads["log_prob"])
    none = run(one, everywhere({"k": 0}))
    ids, targets, _, _ = asked(one)
    full = torch.cat([ids, targets[:, :-1]], 1)
    hooks = [
        one.oracle.outs[layer].register_forward_pre_hook(lambda _m, args: (torch.zeros_like(args[0]), *args[1:]))
        for layer in one.model.softmax_layers
    ]
    said = one.oracle.run(full).logits[:, LENGTH - 1 :].float()
    for hook in hooks:
        hook.remove()
    want = said.log_softmax(-1).gather(2, targets[..., None])[..., 0]
    same(one, none, (want, said))


def test_stepped_is_whole(one):
    """Token by token from a shared prefill, and in one forward; where a family cannot be continued it is refused elsewhere."""
    if not one.model.family.continues or one.model.family.held:
        return
    ids, targets, choices, columns = asked(one)
    rows, ops = torch.arange(len(ids)), ops_of(one.model)
    later = [{}, {"k": 1}, {"k": 1, "by": "random", "seed": 3}, {"mode": "omit", "span": "needle"}, {"k": 0}]
    random = {"k": 2, "by": "random", "seed": 1}
    for first, prefills in ((LENGTH - 1, (random, {"mode": "only", "span": "needle"})), (LENGTH, ({},))):
        for prefill in prefills:
            edits = {"prefill": prefill, "generation": later}
            steps = forward.stepped(one.model, ids, targets, choices, first, ops, edits, columns, rows)
            for edit, got in zip(later, steps):
                both = {"prefill": prefill, "generation": edit}
                want = forward.whole(one.model, ids, targets, choices, first, ops, both, columns, rows)
                assert (got["log_prob"] - want["log_prob"]).abs().max() <= 1e-4
                assert (got["choices"] - want["choices"]).abs().max() <= 1e-4
                if edit.get("k"):
                    assert torch.equal(got["spoke"], want["spoke"][..., -got["spoke"].shape[3] :])


def test_random_heads_do_not_depend_on_the_batch(one):
    ids, targets, choices, columns = asked(one)
    ops, edits = ops_of(one.model), everywhere({"k": 1, "by": "random", "seed": 5})
    every = forward.whole(one.model, ids, targets, choices, LENGTH - 1, ops, edits, columns, torch.arange(len(ids)))
    last = {"needle": columns["needle"][-1:]}
    alone = forward.whole(
        one.model, ids[-1:], targets[-1:], choices[-1:], LENGTH - 1, ops, edits, last, torch.tensor([len(ids) - 1])
    )
    assert torch.equal(every["spoke"][-1:], alone["spoke"])
    seeds = {str(forward.noise(seed, 1, torch.arange(3), 4, torch.arange(9)).argmax(1)) for seed in range(5)}
    assert len(seeds) == 5


def test_later_tokens_never_change_earlier_logits(one):
    """Under an edit of both phases, at every position."""
    ids, _, _, columns = asked(one)
    ops, rows = ops_of(one.model), torch.arange(len(ids))
    other = ids.clone()
    other[:, 22:] = ids[:, 22:].flip(1)
    assert not torch.equal(other, ids)
    for edit in ({"k": 1}, {"mode": "balanced", "span": "needle"}, {"mode": "only", "span": "needle", "renorm": True}):
        said = [forward.over(one.model, x, LENGTH, 12, ops, everywhere(edit), columns, rows)[0] for x in (ids, other)]
        early = (said[0] - said[1])[:, :22].abs().max()
        assert early <= 1e-5
        assert (said[0] - said[1])[:, 22:].abs().max() > 1e-3


def test_an_edit_of_generation_leaves_everything_earlier_to_the_bit(one):
    """In one forward (experts apart: which tokens share one changes the sums), and in the cache that others continue from."""
    ids, targets, choices, columns = asked(one)
    ops, rows, first = ops_of(one.model), torch.arange(len(ids)), LENGTH - 1
    plain, _ = forward.over(one.model, ids, LENGTH, first, ops, {}, columns, rows)
    later = [{"k": 0}, {"k": 1}, {"mode": "only", "span": "needle"}]
    for edit in later:
        got, _ = forward.over(one.model, ids, LENGTH, first, ops, {"generation": edit}, columns, rows)
        assert (got - plain)[:, :-1].abs().max() <= (1e-5 if "experts" in str(one.oracle.module) else 0)
        assert (got - plain)[:, -1].abs().max() > 1e-4
    if not one.model.family.continues or one.model.family.held:
        return
    cache, _ = forward.prefilled(one.model, ids[:, :first], ops, {}, columns, rows)
    before = read_cache(cache)
    forward.step(one.model, cache, ids[:, -1:], first, ops, {"k": 0}, columns, rows)
    for layer in one.model.softmax_layers:
        for name in ("keys", "values"):
            assert torch.equal(read_cache(cache)[layer][name][:, :, :first], before[layer][name])
    edits = {"prefill": {}, "generation": [*later, {}]}
    steps = forward.stepped(one.model, ids, targets, choices, first, ops, edits, columns, rows)
    (alone,) = forward.stepped(
        one.model, ids, targets, choices, first, ops, edits | {"generation": [{}]}, columns, rows
    )
    assert torch.equal(steps[-1]["log_prob"], alone["log_prob"])


def test_exposure_without_a_visible_key_is_zero():
    query, key = torch.randn(1, 2, 4, 3), torch.randn(1, 1, 4, 3)
    scores = attention_scores(query, key, 0.5, window=2)
    columns = torch.tensor([[True, False, False, False]])
    for renorm in (False, True):
        only = exposed(scores, columns, "only", renorm)
        assert bool(torch.isfinite(only).all())
        assert bool((only[:, :, 2:] == 0).all()), "the key has left the window of queries 2 and 3"
        assert bool((only[:, :, :2, 0] > 0).all())
    assert torch.allclose(exposed(scores, columns, "omit", True).sum(-1)[:, :, 1:], torch.ones(1, 2, 3))
    with pytest.raises(ValueError, match="unknown mode"):
        exposed(scores, columns, "hide")


@pytest.mark.parametrize("name", ["qwen3_5_text", "recurrent_gemma"])
def test_greedy_decoding_by_both_ways(name):
    one = case(name)
    ids, _, _, columns = asked(one)
    ops, rows = ops_of(one.model), torch.arange(len(ids))
    edits = {"prefill": {"mode": "omit", "span": "needle"}, "generation": {"k": 1}}
    by_whole = forward.generated(one.model, ids, 3, LENGTH - 1, ops, edits, columns, rows, False)
    full = ids
    for _ in range(3):
        edit = by_phase(LENGTH - 1, columns_edit(one, "omit"), best(1))
        full = torch.cat([full, logits(one.oracle.module, full, edit)[:, -1:].argmax(-1)], 1)
    assert torch.equal(by_whole, full[:, LENGTH:])
    if not one.model.family.held:
        assert torch.equal(by_whole, forward.generated(one.model, ids, 3, LENGTH - 1, ops, edits, columns, rows, True))


def test_linear_mixers(one):
    """Zero, freeze and swap at generation queries, against hooks."""
    ids, targets, choices, columns = asked(one)
    model, first = one.model, LENGTH - 1
    donors, full = ids.flip(0), torch.cat([ids, targets[:, :-1]], 1)
    outputs = one.oracle.outputs(torch.cat([donors, targets[:, :-1]], 1), model.linear_layers)

    def hook(how, layer):
        def edit(output):
            output = output.clone()
            new = {"zero": 0, "freeze": output[:, first - 1 : first], "swap": outputs[layer][:, first:]}[how]
            output[:, first:] = new
            return output

        return edit

    for how in ("zero", "freeze", "swap"):
        edits = {"generation": {"linear": dict.fromkeys(model.linear_layers, how)}}
        lent = donors if how == "swap" else None
        got = forward.whole(model, ids, targets, choices, first, {}, edits, columns, torch.arange(len(ids)), lent)
        said = one.oracle.run(full, {layer: hook(how, layer) for layer in model.linear_layers}).logits[:, first:]
        want = said.float().log_softmax(-1).gather(2, targets[..., None])[..., 0]
        same(one, got, (want, said.float()))
        assert (got["log_prob"] - run(one, {})["log_prob"]).abs().max() > 1e-3
