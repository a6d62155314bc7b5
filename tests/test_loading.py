"""Loading: what cannot be loaded is refused in one line, and a fingerprint tells models apart."""

import json
import random

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import encode_address
from encode_address.errors import ModelError
from encode_address.models.cards import listing
from encode_address.models.loading import BUNDLED, BUNDLED_DIR, GROUND_TRUTH, TRAINED, card
from tests.toy_tokenizers import toy_tokenizer


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Models this small gain nothing from a second thread, and lose much where the other core is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def refusal(model, *arguments, **kwargs) -> str:
    with pytest.raises(ModelError) as error:
        encode_address.load(model, *arguments, **kwargs)
    assert "\n" not in str(error.value)
    return str(error.value)


def tiny_config(kinds: str):
    """A Gated DeltaNet config, l linear, a softmax."""
    return AutoConfig.for_model(
        "qwen3_5_text",
        vocab_size=48,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=len(kinds),
        layer_types=[{"l": "linear_attention", "a": "full_attention"}[kind] for kind in kinds],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
    )


def tiny_module(seed: int = 0) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(tiny_config("lal"))


# -- names ------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["tiny-rwkv", "tiny-gdn-", "no/such/folder", "./no-such-folder", "/no/such/folder"])
def test_an_unknown_name_lists_the_bundled_models(name):
    message = refusal(name)
    assert message.startswith(f"unknown model {name!r}")
    assert all(bundled in message for bundled in BUNDLED)


def test_a_folder_without_a_config_is_no_model(tmp_path):
    assert refusal(str(tmp_path)) == f"{tmp_path} is a folder without a config.json, so it is not a model"


@pytest.mark.parametrize(("model_type", "words"), [("llama", "no linear layers"), ("mamba2", "no softmax layers")])
def test_a_model_with_one_kind_of_layer_is_no_hybrid(tmp_path, model_type, words):
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    assert words in refusal(str(tmp_path))


@pytest.mark.parametrize("model_type", ["bailing_hybrid"])
def test_an_unsupported_model_type_names_the_place_to_add_it(tmp_path, model_type):
    """The reader learns at once that it is the architecture, not the tokenizer (which this folder lacks as well)."""
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    message = refusal(str(tmp_path))
    assert message.startswith(f"{tmp_path}: model type {model_type!r} is not supported (supported: qwen3_5_text, ")
    assert message.endswith("add a Family record in encode_address/models/families.py")


def test_a_model_type_that_transformers_does_not_know_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "retnet9"}')
    assert "(model type 'retnet9')" in refusal(str(tmp_path))


@pytest.mark.parametrize("content", ["{not json", "", '["a list"]'])
def test_a_broken_config_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    assert str(tmp_path) in refusal(str(tmp_path))


@pytest.mark.parametrize(("kinds", "words"), [("aaa", "no linear layers"), ("lll", "no softmax layers")])
def test_a_supported_family_without_both_kinds_of_layer_is_no_hybrid(tmp_path, kinds, words):
    tiny_config(kinds).save_pretrained(tmp_path)
    assert refusal(str(tmp_path), toy_tokenizer()).startswith(f"{tmp_path} has {words}")


def test_a_hybrid_folder_without_weights_says_so(tmp_path):
    tiny_config("lal").save_pretrained(tmp_path)
    assert f"{tmp_path}: its weights cannot be loaded" in refusal(str(tmp_path), toy_tokenizer())


def test_a_hybrid_folder_without_a_tokenizer_says_so(tmp_path):
    """transformers makes an empty tokenizer of nothing, which must not pass for the model's own."""
    tiny_module().save_pretrained(tmp_path)
    assert f"{tmp_path}: its tokenizer cannot be loaded" in refusal(str(tmp_path))
    assert encode_address.load(str(tmp_path), toy_tokenizer()).layout.kinds == ("linear", "softmax", "linear")


# -- settings ------------------------------------------------------------------------------------
@pytest.mark.parametrize("device", ["nonsense", "", "meta", "cuda:99"])
def test_a_device_that_cannot_be_used_is_refused(device):
    assert "device" in refusal("tiny-gdn", device=device)


def test_cuda_without_a_gpu_says_what_to_use(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # true of most test machines, made true of all
    assert refusal("tiny-gdn", device="cuda") == (
        "device 'cuda' was asked for, but torch sees no GPU here: use --device cpu"
    )


@pytest.mark.parametrize("dtype", ["float", "fp32", "float64", "torch.float32"])
def test_an_unknown_dtype_lists_the_known_ones(dtype):
    assert refusal("tiny-gdn", dtype=dtype) == f"unknown dtype {dtype!r}: use float32, bfloat16, float16"


def test_a_module_needs_its_tokenizer():
    assert refusal(tiny_module()) == "a module needs its tokenizer: load(module, tokenizer=...)"


def test_a_module_is_loaded_as_it_is():
    module = tiny_module().train()
    model = encode_address.load(module, toy_tokenizer())
    assert model.module is module
    assert not module.training
    assert (model.folder, model.dtype, [b.name for b in model.layout.blocks]) == (None, "float32", ["G0", "G1"])


# -- the bundled models and their controls -----------------------------------------------------------
@pytest.mark.parametrize("name", GROUND_TRUTH)
def test_untrained_controls_are_the_same_every_time_and_differ_from_the_trained(name):
    """Whatever the global random state is; and loading leaves that state alone."""
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = encode_address.load(f"{name}-untrained")
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    second, trained = encode_address.load(f"{name}-untrained"), encode_address.load(name)
    assert first.fingerprint == second.fingerprint != trained.fingerprint
    for (key, a), b in zip(first.module.state_dict().items(), second.module.state_dict().values()):
        assert torch.equal(a, b), key
    assert first.layout == trained.layout
    assert first.module.state_dict().keys() == trained.module.state_dict().keys()
    assert card(trained)["imposed"]
    assert card(first) == {}


def test_the_listing_says_what_the_cards_say():
    paragraphs = listing().split("\n\n")
    for name, paragraph in zip(TRAINED, paragraphs):
        facts = card(encode_address.load(name))
        assert paragraph.startswith(f"{name}: {facts['architecture']}")
        assert all(f"imposed in training: {line}" in paragraph for line in facts["imposed"])
        unmet = [d for d in facts["demands"] if not d["met"]]
        assert paragraph.count("falls short: ") == len(unmet)
        assert f"{len(facts['seeds'])} seed" in paragraph
        assert facts["command"] in paragraph
    assert all(f"{name}-untrained" in paragraphs[-1] for name in GROUND_TRUTH)


def test_what_is_shipped_is_small_and_says_how_it_was_made():
    for name in TRAINED:
        folder = BUNDLED_DIR / name
        assert sum(path.stat().st_size for path in folder.iterdir()) <= 5_000_000
        facts = json.loads((folder / "card.json").read_text())
        assert facts["command"] == f"encode-address train {name} --seed {facts['seed']}"
        assert facts["seed"] in [row["seed"] for row in facts["seeds"]]
        assert {"data", "steps", "wall_seconds", "accuracy", "perplexity", "imposed", "selection", "demands"} <= set(
            facts
        )


@pytest.mark.parametrize("variant", ["chat8", "list8", "rev8", "chat8/far"])
def test_the_recurrent_gemma_passes_its_checks_and_looks_up(variant):
    """On dictionaries that neither training nor the card's measures drew."""
    model = encode_address.load("tiny-griffin")
    assert (model.family.name, model.module.config.model_type) == ("recurrent_gemma", "recurrent_gemma")
    assert model.check().ok
    questions = encode_address.tasks.dictionary(model, variant).questions(64, seed=3)
    ids = torch.tensor([question.host.ids for question in questions])
    assert model.module.config.attention_window_size > ids.shape[1]
    with torch.no_grad():
        said = model.module(input_ids=ids, use_cache=False).logits[:, -1].argmax(-1)
    right = [question.host.answer for question in questions]
    assert (said == torch.tensor(right)).float().mean() >= 0.95
    assert card(model)["accuracy"][variant] >= 0.99


def test_a_model_loads_the_same_from_its_name_and_from_its_folder():
    """A folder is loaded through the same code as a bundled name: same weights, same words."""
    named = encode_address.load("tiny-gdn")
    folder = encode_address.load(str(named.folder))
    assert named.fingerprint == folder.fingerprint
    text = "<s> <user> Dictionary : mango = wood ."
    assert named.tokenizer(text)["input_ids"] == folder.tokenizer(text)["input_ids"]
    assert len(set(named.tokenizer(text)["input_ids"])) == 8


# -- fingerprints ---------------------------------------------------------------------------------------
def fingerprint(module: torch.nn.Module) -> str:
    return encode_address.load(module, toy_tokenizer()).fingerprint


def test_the_fingerprint_is_of_the_content():
    assert fingerprint(tiny_module()) == fingerprint(tiny_module())
    assert fingerprint(tiny_module(0)) != fingerprint(tiny_module(1))
    assert fingerprint(tiny_module()) != fingerprint(tiny_module().bfloat16())


def test_the_fingerprint_changes_when_any_one_weight_changes():
    """Rows are reused by it, so an edit anywhere must show: here one number of one tensor, drawn at random."""
    original, rng = fingerprint(tiny_module()), random.Random(0)
    unnoticed = []
    for name in tiny_module().state_dict():
        module = tiny_module()
        flat = module.state_dict()[name].view(-1)
        place = rng.randrange(flat.numel())
        flat[place] += 0.01
        if fingerprint(module) == original:
            unnoticed.append(f"{name}[{place}]")
    assert unnoticed == []
