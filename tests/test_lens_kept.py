"""Lenses that are resumed, merged, saved, loaded and imported; and what they refuse."""

from __future__ import annotations

import json

import pytest
import torch

import encode_address as ea
from encode_address.errors import EncodeAddressError, ModelError, RunError, StoreError
from encode_address.lens import Lens, fit, fitting, import_published, load, logit_lens, merge, read, save
from encode_address.tasks import text_source
from tests.lens_oracle import SKIP, TOKENS, WIDTH, prompts
from tests.tiny import build, load_tiny, toy_tokenizer


@pytest.fixture(scope="module")
def granite():
    return load_tiny("granite")


@pytest.fixture(scope="module")
def gdn():
    return ea.load("tiny-gdn")


@pytest.fixture(scope="module")
def fitted(granite):
    return fit(granite, prompts(4), (1, 5), skip=SKIP, width=WIDTH, data="random ids")


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
