"""The Jacobian lens against plain autograd, finite differences and its own algebra, here and in another process."""

from __future__ import annotations

import pytest
import torch

import encode_address as ea
from encode_address.interventions import mixer_output, truncated_logits
from encode_address.lens import fit, head_rows, lens_logits, logit_lens, read, summed_gradients
from encode_address.models.loading import BUNDLED_DIR
from encode_address.tasks import text_source
from tests.lens_oracle import LENGTH, SKIP, TOKENS, TWO, WIDTH, finite_difference, plain_jacobian, prompts
from tests.outofprocess import OutOfProcess, Server
from tests.tiny import build, load_tiny


@pytest.fixture(scope="module", params=TWO)
def model(request):
    return load_tiny(request.param)


@pytest.fixture(scope="module")
def granite():
    return load_tiny("granite")


@pytest.fixture(scope="module")
def gdn():
    return ea.load("tiny-gdn")


@pytest.fixture(scope="module")
def fitted(granite):
    return fit(granite, prompts(4), (1, 5), skip=SKIP, width=WIDTH, data="random ids")


# -- what J is ---------------------------------------------------------------------------------
@pytest.mark.parametrize("name", TWO)
@pytest.mark.parametrize("width", [48, 20])  # 20: the last of three backward passes has fewer directions than rows
def test_the_trace_gives_exactly_what_plain_autograd_gives(name, width):
    model, layers = load_tiny(name), (0, 3, 4, 7)
    texts = prompts(2)
    lens = fit(model, texts, layers, skip=SKIP, width=width)
    plain = [plain_jacobian(build(name), ids, layers, SKIP, width) for ids in texts]
    for layer in layers:
        assert torch.equal(lens.matrix(layer), (plain[0][layer] + plain[1][layer]) / 2)
        assert lens.matrix(layer).norm() > 1


def test_a_bundled_model_gives_exactly_what_plain_autograd_gives(gdn):
    prompt = text_source(None, bundled=True).chunks(gdn.tokenizer, "train", 1)[0]
    lens = fit(gdn, [prompt], (0, 2), skip=SKIP, longest=24, width=64)
    plain = plain_jacobian(ea.load("tiny-gdn").module, list(prompt.ids[:24]), (0, 2), SKIP, 64)
    assert all(torch.equal(lens.matrix(layer), plain[layer]) for layer in (0, 2))


def test_moving_a_residual_moves_the_last_layer_by_j(model):
    (ids,) = prompts(1, seed=3)
    lens = fit(model, [ids], (1, 6), skip=SKIP, width=WIDTH)
    generator = torch.Generator().manual_seed(0)
    for layer in (1, 6):
        moved = torch.randn(48, generator=generator)
        moved /= moved.norm()
        found = finite_difference(model.module, ids, layer, SKIP, moved, 3e-3)
        expected = lens.matrix(layer) @ moved
        assert (found - expected).norm() / expected.norm() < 0.01


def test_later_positions_and_skipped_ones_take_no_part(granite):
    """Neither what comes after the cut, nor the last position or the first ones as sources or targets."""
    (ids,) = prompts(1)
    whole = fit(granite, [ids], (2,), skip=SKIP, width=WIDTH)
    longer = fit(granite, [[*ids, 9, 9]], (2,), skip=SKIP, longest=LENGTH, width=WIDTH)
    assert torch.equal(whole.matrix(2), longer.matrix(2))
    other_end = fit(granite, [[*ids[:-1], 9]], (2,), skip=SKIP, width=WIDTH)
    assert torch.allclose(whole.matrix(2), other_end.matrix(2), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(whole.matrix(2), fit(granite, [ids], (2,), skip=SKIP + 1).matrix(2), rtol=1e-3)


def test_the_width_of_a_backward_pass_changes_rounding_only(granite):
    wide, narrow = (fit(granite, prompts(1), (0, 6), skip=SKIP, width=width).matrix(0) for width in (48, 7))
    assert (wide - narrow).norm() / wide.norm() < 1e-5


def test_weights_want_gradients_as_before_and_get_none():
    model = load_tiny("granite")
    parameters = [*model.module.parameters()]
    parameters[0].requires_grad_(False)
    with torch.no_grad():  # a caller's setting does not stop the fit
        fit(model, prompts(1), (6,), skip=SKIP)
    assert [p.requires_grad for p in parameters] == [False] + [True] * (len(parameters) - 1)
    assert all(p.grad is None for p in parameters)


# -- the row lens, and reading -----------------------------------------------------------------------
def test_a_row_lens_is_the_heads_rows_times_the_gain_times_j(model):
    texts = prompts(2)
    whole = fit(model, texts, skip=SKIP, width=WIDTH)
    rows = fit(model, texts, tokens=TOKENS, skip=SKIP)
    norm, head = model.module.get_decoder().norm, model.module.get_output_embeddings()
    gain = 1 + norm.weight if "Qwen" in type(norm).__name__ else norm.weight
    directions = head.weight[list(TOKENS)] * gain
    for layer in whole.layers:
        expected = directions.detach() @ whole.matrix(layer)
        assert (rows.matrix(layer) - expected).norm() / expected.norm() < 1e-5
    assert rows.layers == whole.layers == tuple(range(8))


def test_a_row_lens_orders_candidates_as_the_whole_lens_does(model):
    texts, hosts = prompts(2), prompts(5, seed=1)
    whole = read(model, fit(model, texts, (1, 6), skip=SKIP, width=WIDTH), hosts)
    rows_lens = fit(model, texts, (1, 6), tokens=TOKENS, skip=SKIP)
    rows = read(model, rows_lens, hosts)
    for layer in (1, 6):
        full, few = whole.logits[layer][:, list(TOKENS)], rows.logits[layer]
        ratio = (full[:, :1] - full[:, 1:]) / (few[:, :1] - few[:, 1:])
        assert (ratio > 0).all()  # one factor per row: the norm's scale, and the model's logits scaling
        assert ((ratio / ratio.mean(1, keepdim=True) - 1).abs() < 1e-2).all()
        with torch.no_grad(), model.trace(hosts):
            hidden = mixer_output(model.layers[layer])[:, -1].clone().save()
        assert torch.allclose(rows_lens.scores(hidden, layer), few, rtol=1e-5, atol=1e-4)


def test_the_logit_lens_is_j_equal_to_one(model):
    hosts = prompts(3)
    reading = read(model, logit_lens(model), hosts)
    assert sorted(reading.logits) == list(range(9))
    for layer in (0, 4, 8):
        envoy, norm, head = model.layers[layer], model.final_norm, model.lm_head
        with torch.no_grad(), model.trace(hosts):
            expected = truncated_logits(envoy, norm, head, model.logits_scaling).clone().save()
        assert torch.equal(reading.logits[layer], expected)
    assert torch.allclose(reading.logits[8], reading.own, rtol=1e-4, atol=1e-4)


def test_reading_applies_j_before_the_models_own_norm_and_head(granite, fitted):
    hosts = prompts(3, seed=5)
    reading = read(granite, fitted, hosts, position=-2)
    with torch.no_grad(), granite.trace(hosts):
        hidden = mixer_output(granite.layers[5])[:, -2].clone().save()
    decoder, head = granite.module.get_decoder(), granite.module.get_output_embeddings()
    with torch.no_grad():
        expected = head(decoder.norm(hidden @ fitted.matrix(5).T)) / granite.config.logits_scaling
        own = granite.module(torch.tensor(hosts), use_cache=False).logits[:, -2]
    assert torch.allclose(reading.logits[5], expected, rtol=1e-4, atol=1e-5)
    assert torch.allclose(reading.own, own, rtol=1e-4, atol=1e-5)


def test_at_the_target_every_lens_says_what_the_model_says(model):
    """There J is I, so it needs no fit; in a model whose last layer is a reader, that is where the value arrives."""
    whole = fit(model, prompts(1), (2,), skip=SKIP, width=WIDTH)
    rows = fit(model, prompts(1), (2,), tokens=TOKENS, skip=SKIP)
    hosts = prompts(3, seed=2)
    assert whole.readable == rows.readable == (2, 8)
    reading = read(model, whole, hosts)
    assert torch.allclose(reading.logits[8], reading.own, rtol=1e-4, atol=1e-4)
    own, few = reading.own[:, list(TOKENS)], read(model, rows, hosts).logits[8]
    ratio = (own[:, :1] - own[:, 1:]) / (few[:, :1] - few[:, 1:])
    assert (ratio > 0).all()
    assert ((ratio / ratio.mean(1, keepdim=True) - 1).abs() < 1e-2).all()


def test_prompts_of_different_length_are_read_at_their_own_ends(granite, fitted):
    short, long = prompts(1, length=9)[0], prompts(1, length=LENGTH)[0]
    together = read(granite, fitted, [short, long])
    for row, prompt in enumerate((short, long)):
        alone = read(granite, fitted, [prompt])
        assert torch.allclose(together.logits[5][row], alone.logits[5][0], rtol=1e-3, atol=1e-4)


def test_a_soft_capped_head_is_read_with_its_cap():
    model = load_tiny("recurrent_gemma")
    hosts = prompts(2)
    reading = read(model, logit_lens(model), hosts)
    assert torch.allclose(reading.logits[5], reading.own, rtol=1e-4, atol=1e-4)
    (ids,) = prompts(1)
    lens = fit(model, [ids], (2,), skip=SKIP, width=WIDTH)
    assert torch.equal(lens.matrix(2), plain_jacobian(build("recurrent_gemma"), ids, (2,), SKIP, WIDTH)[2])


# -- elsewhere ---------------------------------------------------------------------------------------------
def test_fits_and_reads_run_in_a_process_without_this_package(gdn):
    ids = torch.tensor([prompts(1, length=12)[0]]) % 60 + 4
    sources, target = [gdn.layers[1], gdn.layers[2]], gdn.layers[len(gdn.layers) - 1]
    layer, norm, head, eye = gdn.layers[1], gdn.final_norm, gdn.lm_head, torch.eye(gdn.config.hidden_size)
    tokens = torch.tensor([5, 9])
    out = []
    gdn.module.requires_grad_(False)
    try:
        with Server(BUNDLED_DIR / "tiny-gdn", rename={}, hidden=["encode_address", "tests"]) as server:
            server.wait()
            for backend in (None, OutOfProcess(gdn.lm, server)):
                with torch.enable_grad(), gdn.trace(ids.expand(4, -1), backend=backend):
                    rows = summed_gradients(sources, target, eye[:6], 2).save()
                with torch.no_grad(), gdn.trace(ids, backend=backend):
                    directions, _ = head_rows(norm, head, tokens)
                    logits = lens_logits(mixer_output(layer)[:, -1], eye, norm, head).save()
                    directions = directions.save()
                out.append((rows, directions, logits))
    finally:
        gdn.module.requires_grad_(True)
    for here, there in zip(*out):
        assert torch.equal(here.detach(), there.detach())
        assert here.norm() > 0
