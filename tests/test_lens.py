"""The Jacobian lens against plain autograd, finite differences and its own algebra; what is kept, merged and refused."""

from __future__ import annotations

import json
import random

import pytest
import torch

import encode_address as ea
from encode_address.errors import EncodeAddressError, ModelError, RunError, StoreError
from encode_address.interventions import mixer_output, truncated_logits
from encode_address.lens import (
    Lens,
    fit,
    fitting,
    head_rows,
    import_published,
    lens_logits,
    load,
    logit_lens,
    merge,
    read,
    save,
    summed_gradients,
)
from encode_address.models.loading import BUNDLED_DIR
from encode_address.tasks import text_source
from tests.outofprocess import OutOfProcess, Server
from tests.tiny import build, load_tiny, toy_tokenizer

TWO = ("qwen3_5_text", "granite")
SKIP, LENGTH, WIDTH = 4, 20, 48
TOKENS = (31, 7, 200, 64)


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


def prompts(n, seed=0, length=LENGTH):
    draw = random.Random(seed)
    return [[draw.randrange(4, 240) for _ in range(length)] for _ in range(n)]


def kept(output):
    return output[0] if isinstance(output, tuple) else output


def plain_jacobian(module, ids, layers, skip, width):
    """J of one prompt by torch hooks alone, of the plain module, one direction at a time."""
    outputs, hooks = {}, []
    decoder = module.get_decoder().layers
    for i, layer in enumerate(decoder):
        hooks.append(layer.register_forward_hook(lambda _m, _i, o, i=i: outputs.update({i: kept(o)})))
    embedded = module.get_input_embeddings().register_forward_hook(lambda _m, _i, o: o.requires_grad_())
    module.requires_grad_(False)
    module(torch.tensor([ids] * width), use_cache=False)
    for hook in (*hooks, embedded):
        hook.remove()
    final = outputs[len(decoder) - 1]
    d, valid = final.shape[-1], range(skip, len(ids) - 1)
    out = {layer: torch.zeros(d, d) for layer in layers}
    for start in range(0, d, width):
        seed = torch.zeros_like(final)
        for row, direction in enumerate(range(start, min(start + width, d))):
            for place in valid:
                seed[row, place, direction] = 1.0
        for layer in layers:
            (gradient,) = torch.autograd.grad(final, outputs[layer], seed, retain_graph=True)
            for row, direction in enumerate(range(start, min(start + width, d))):
                out[layer][direction] = gradient[row, skip : len(ids) - 1].mean(0)
    return out


def finite_difference(module, ids, layer, skip, moved, size):
    """J moved, by running the plain module twice: each batch row moves the layer's output at one valid position."""
    decoder, valid = module.get_decoder().layers, list(range(skip, len(ids) - 1))
    seen = []
    for sign in (1, -1):

        def push(_module, _inputs, output, sign=sign):
            for row, place in enumerate(valid):
                kept(output)[row, place] += sign * size * moved

        hooks = [decoder[layer].register_forward_hook(push)]
        hooks.append(decoder[-1].register_forward_hook(lambda _m, _i, o: seen.append(kept(o).clone())))
        with torch.no_grad():
            module(torch.tensor([ids] * len(valid)), use_cache=False)
        for hook in hooks:
            hook.remove()
    return ((seen[0] - seen[1]) / (2 * size))[:, valid].sum(1).mean(0)


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


# -- resuming and merging ------------------------------------------------------------------------------
def test_an_interrupted_fit_goes_on_to_the_same_bits(granite, fitted, tmp_path, monkeypatch):
    def run():
        settings = {"skip": SKIP, "width": WIDTH, "path": tmp_path / "lens", "every": 2, "data": "random ids"}
        return fit(granite, prompts(4), (1, 5), **settings)

    work, done = fitting._gradients, []

    def stops(*arguments):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(arguments)
        return work(*arguments)

    monkeypatch.setattr(fitting, "_gradients", stops)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert load(tmp_path / "lens").counts == (1, 1)
    with pytest.raises(RunError, match="has 2 of its 4 prompts: run the fit again"):
        load(tmp_path / "lens", granite)
    done.clear()
    resumed = run()
    assert len(done) == 2  # prompts 2 and 3, not those that were kept
    for lens in (resumed, load(tmp_path / "lens", granite)):
        assert lens.counts == fitted.counts == (2, 2)
        assert lens.about == fitted.about
        assert all(torch.equal(lens.sums[layer], fitted.sums[layer]) for layer in (1, 5))
    done.clear()
    run()
    assert not done


@pytest.mark.parametrize("change", [{"skip": 5}, {"tokens": TOKENS}, {"layers": (1,)}, {"width": 7}, {"data": "x"}])
def test_a_fit_does_not_go_on_from_another_fit(granite, tmp_path, change):
    settings = {"layers": (1, 5), "skip": SKIP, "width": WIDTH, "path": tmp_path / "lens"}
    fit(granite, prompts(1), **settings)
    with pytest.raises(RunError, match=r"is of a fit with another .*: choose another path, or delete it"):
        fit(granite, prompts(1), **{**settings, **change})


def test_shards_merge_to_one_fit(granite, fitted):
    texts = prompts(4)
    settings = {"layers": (1, 5), "skip": SKIP, "width": WIDTH, "data": "random ids"}
    merged = merge([fit(granite, texts[:2], **settings), fit(granite, texts[2:], **settings)])
    assert merged.counts == fitted.counts
    assert merged.about == fitted.about
    for layer in (1, 5):
        assert torch.allclose(merged.matrix(layer), fitted.matrix(layer), rtol=1e-6, atol=1e-6)
    uneven = merge([fit(granite, texts[:1], **settings), fit(granite, texts[1:], **settings)])
    assert torch.allclose(uneven.matrix(1), fitted.matrix(1), rtol=1e-5, atol=1e-6)  # weighted by prompts


def test_shards_that_do_not_belong_together_are_refused(granite, fitted):
    settings = {"layers": (1, 5), "skip": SKIP, "width": WIDTH, "data": "random ids"}
    with pytest.raises(RunError, match="share prompts"):
        merge([fitted, fit(granite, prompts(1), **settings)])
    with pytest.raises(RunError, match="different skip"):
        merge([fitted, fit(granite, prompts(1, seed=9), **{**settings, "skip": 5})])
    other = Lens(fitted.sums, fitted.counts, {**fitted.about, "fingerprint": "another"})
    with pytest.raises(RunError, match="different fingerprint"):
        merge([fitted, other])
    with pytest.raises(RunError, match="finish it before merging"):
        merge([Lens(fitted.sums, (1, 1), fitted.about)])
    for nothing in ([], [logit_lens(granite)]):
        with pytest.raises(RunError, match="merge"):
            merge(nothing)


def test_reliability_compares_the_two_halves(granite, fitted):
    rows = fitted.reliability().set_index("layer")
    texts = prompts(4)
    even, odd = (fit(granite, texts[part::2], (1, 5), skip=SKIP, width=WIDTH).matrix(1) for part in (0, 1))
    expected = torch.nn.functional.cosine_similarity(even.flatten(), odd.flatten(), dim=0)
    assert rows.cosine[1] == pytest.approx(float(expected), abs=1e-5)
    eye = torch.eye(48)
    beyond = torch.nn.functional.cosine_similarity((even - eye).flatten(), (odd - eye).flatten(), dim=0)
    assert rows.cosine_beyond[1] == pytest.approx(float(beyond), abs=1e-5)
    assert rows.difference[1] == pytest.approx(float((even - odd).norm() / fitted.matrix(1).norm()), abs=1e-5)
    assert (rows[["n_even", "n_odd"]] == 2).all(axis=None)
    with pytest.raises(RunError, match="two prompts or more"):
        fit(granite, prompts(1), (1,), skip=SKIP).reliability()


def test_more_prompts_make_a_more_reliable_lens(gdn):
    """On a trained model, the lens is a property of the model: halves of more prompts agree better."""
    chunks = text_source(None, bundled=True).chunks(gdn.tokenizer, "train", 12)
    few, many = (fit(gdn, chunks[:n], (1, 2), skip=SKIP, width=64).reliability() for n in (2, 12))
    assert (many.cosine > few.cosine).all()
    assert (many.cosine > 0.9).all()


# -- files -----------------------------------------------------------------------------------------------
def test_a_lens_is_kept_with_what_it_was_fitted_on(granite, fitted, tmp_path):
    rows = fit(granite, prompts(2), (2, 3), tokens=TOKENS, skip=SKIP)
    for name, lens in {"full": fitted, "rows": rows, "logit": logit_lens(granite)}.items():
        assert save(lens, tmp_path / name) == tmp_path / f"{name}.safetensors"
        back = load(tmp_path / f"{name}.json", granite)
        assert (back.about, back.counts, back.tokens) == (lens.about, lens.counts, lens.tokens)
        assert all(torch.equal(back.matrix(layer), lens.matrix(layer)) for layer in lens.layers)
    readable = json.loads((tmp_path / "full.json").read_text())
    assert readable["fingerprint"] == granite.fingerprint
    assert (readable["layers"], readable["counts"], readable["n_prompts"], readable["data"]) == (
        [1, 5],
        [2, 2],
        4,
        "random ids",
    )
    assert len(set(readable["prompts"])) == 4
    (tmp_path / "full.json").unlink()  # only for people to read
    assert load(tmp_path / "full", granite).n == 4


def test_files_that_are_no_lens_are_refused(fitted, tmp_path):
    with pytest.raises(StoreError, match="fit it again"):
        load(tmp_path / "nothing")
    path = save(fitted, tmp_path / "lens")
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    with pytest.raises(StoreError, match="not a lens that can be read"):
        load(path)
    wider = {**fitted.about, "d_model": 50}
    save(Lens(fitted.sums, fitted.counts, wider), tmp_path / "wide")
    with pytest.raises(StoreError, match="not of shape"):
        load(tmp_path / "wide")
    save(Lens(fitted.sums, fitted.counts, {**fitted.about, "layers": [1]}), tmp_path / "layers")
    with pytest.raises(StoreError, match="its layers are not"):
        load(tmp_path / "layers")


def published(d=48, layers=(0, 3), **changes):
    generator = torch.Generator().manual_seed(1)
    matrices = {layer: torch.randn(d, d, generator=generator).half() for layer in layers}
    return {"J": matrices, "n_prompts": 1000, "source_layers": list(layers), "d_model": d, **changes}


def test_a_published_lens_is_imported(granite, tmp_path):
    content = published()
    torch.save(content, tmp_path / "lens.pt")
    lens = import_published(tmp_path / "lens.pt", granite)
    assert (lens.layers, lens.n, lens.about["skip"]) == ((0, 3), 1000, 16)
    assert torch.allclose(lens.matrix(3), content["J"][3].float())
    assert lens.matrix(3).dtype == torch.float32
    reading = read(granite, lens, prompts(2))
    assert reading.logits[3].shape == (2, granite.config.vocab_size)
    save(lens, tmp_path / "imported")
    assert torch.equal(load(tmp_path / "imported", granite).matrix(0), lens.matrix(0))
    with pytest.raises(RunError, match="no two halves"):
        lens.reliability()


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        (published(d=40), RunError, "whose width is 48: it has d_model 40"),
        (published(J={0: torch.zeros(48, 40), 3: torch.zeros(48, 48)}), RunError, r"L0 of shape \(48, 40\)"),
        (published(J={0: torch.zeros(48, 48, dtype=torch.int64)}, source_layers=[0]), RunError, "not of floats"),
        (published(source_layers=[0, 4]), RunError, "contradicts itself"),
        (published(layers=(0, 8)), RunError, "has layers L0 to L7, not L8"),
        (published(J={0: torch.full((48, 48), torch.inf)}, source_layers=[0]), RunError, "L0 is NaN or infinite"),
        ({"weights": 1}, StoreError, "it needs J by layer"),
        ([1, 2], StoreError, "it needs J by layer"),
    ],
)
def test_a_published_file_that_does_not_fit_is_refused(granite, tmp_path, content, kind, message):
    torch.save(content, tmp_path / "lens.pt")
    with pytest.raises(kind, match=message) as caught:
        import_published(tmp_path / "lens.pt", granite)
    assert "\n" not in str(caught.value)


class Runs:
    """What unpickling it would do is seen by the file it makes."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_code_in_a_published_file_does_not_run(granite, tmp_path):
    torch.save({**published(), "extra": Runs(tmp_path / "ran")}, tmp_path / "lens.pt")
    with pytest.raises(StoreError, match="loaded safely") as caught:
        import_published(tmp_path / "lens.pt", granite)
    assert not (tmp_path / "ran").exists()
    assert "\n" not in str(caught.value)
    (tmp_path / "text.pt").write_text("not a lens")
    for name in ("text.pt", "missing.pt"):
        with pytest.raises(StoreError, match="loaded safely"):
            import_published(tmp_path / name, granite)


# -- guards ------------------------------------------------------------------------------------------------
def refusals(model, fitted, gdn):
    lens, texts = fitted, prompts(2)
    broken = {layer: values.clone() for layer, values in lens.sums.items()}
    broken[5][0, 1, 1] = torch.nan
    return {
        "not fitted at L3: use one of L1, L5, L8, or fit it there": lambda: read(model, lens, texts, [3]),
        "position 3 cannot be read: the lens was fitted from position 4": lambda: read(
            model, lens, texts, position=-17
        ),
        "position 2 cannot be read": lambda: read(model, lens, [texts[0], texts[1][:3]]),
        "-1 is the last token": lambda: read(model, lens, texts, position=3),
        "one of 20 counted from the end": lambda: read(model, lens, texts, position=-21),
        "lens of L5 is NaN or infinite": lambda: Lens(broken, lens.counts, lens.about),
        "not of tiny-gdn .*fit one for this model": lambda: read(gdn, lens, texts),
        "only a row lens scores": lambda: lens.scores(torch.zeros(48), 1),
        "has layers L0 to L7, not L8": lambda: fit(model, texts, [8], skip=SKIP),
        "not none": lambda: fit(model, texts, [], skip=SKIP),
        "needs prompts": lambda: fit(model, []),
        "prompt 0 has 20 tokens, .*give prompts of 21 tokens or more": lambda: fit(model, texts, skip=19),
        "prompts are repeated": lambda: fit(model, [texts[0], texts[0]], skip=SKIP),
        "different token ids": lambda: fit(model, texts, skip=SKIP, tokens=[5, 5]),
        "of the model's vocabulary": lambda: fit(model, texts, skip=SKIP, tokens=[100000]),
    }


@pytest.mark.parametrize("place", range(15))
def test_what_cannot_be_meant_is_refused_in_one_line(granite, fitted, gdn, place):
    message, action = list(refusals(granite, fitted, gdn).items())[place]
    with pytest.raises(EncodeAddressError, match=message) as caught:
        action()
    assert "\n" not in str(caught.value)


def test_gradients_that_are_not_finite_name_the_layer_and_the_prompt():
    model = load_tiny("granite")
    with torch.no_grad():
        model.module.get_decoder().layers[4].shared_mlp.output_linear.weight[0, 0] = torch.inf
    with pytest.raises(RunError, match=r"gradients at L2 of prompt 0 are NaN or infinite"):
        fit(model, prompts(1), (2, 6), skip=SKIP)


@pytest.mark.parametrize("kind", ["norm", "bias"])
def test_a_head_that_has_no_rows_is_refused(kind):
    module = build("granite")
    if kind == "norm":
        module.model.norm = torch.nn.LayerNorm(48)
    else:
        module.lm_head.bias = torch.nn.Parameter(torch.ones(module.config.vocab_size))
    model = ea.load(module, tokenizer=toy_tokenizer())
    with pytest.raises(ModelError, match="has no row lens: fit without tokens"):
        fit(model, prompts(1), (2,), tokens=TOKENS, skip=SKIP)


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
