"""Every supported family under the uniform names: the names lead where they say, and bad models are refused."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig

import encode_address
from encode_address.errors import ModelError, NameNotFound, TaskError
from encode_address.interventions import final_attention, query_and_key
from encode_address.models.families import REFUSED
from encode_address.models.hybrid import HybridModel
from encode_address.models.layout import Layout
from tests import tiny
from tests.tiny_families import MORE

load_once = cache(tiny.load_tiny)
NAMES = (*tiny.FAMILIES, *MORE)


@pytest.fixture(params=NAMES)
def name(request) -> str:
    return request.param


@pytest.fixture
def model(name) -> HybridModel:
    return load_once(name)


def random_rows(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(len(tiny.SPECIAL), len(tiny.VOCAB), (rows, length), generator=generator)


def logits_of(model: HybridModel, prompts) -> torch.Tensor:
    """Logits at all positions, (batch, positions, vocab)."""
    with torch.no_grad(), model.trace(prompts) as tracer:
        logits = tracer.result.logits.clone().save()
    return logits


# -- names -------------------------------------------------------------------------
def test_the_check_report_is_all_ok(model):
    report = model.check()
    assert report.ok
    assert [finding.name for finding in report.findings if finding.ok is not True] == []
    assert len(report.findings) == 8
    first, *_, last = model.layout.blocks
    for text in (f"G0 [{first.span}] -> L{first.reader}", f"{last.name} [{last.span}]"):
        assert text in str(report)


def test_blocks_and_readers(name, model):
    pattern = tiny.pattern_of(name)
    softmax, linear = (tuple(i for i, kind in enumerate(pattern) if kind == k) for k in "al")
    assert {name: block.layers for name, block in model.blocks.items()} == tiny.BLOCKS_OF[pattern]
    assert [block.reader for block in model.blocks.values()] == [*softmax, None]
    assert [block.name for block in model.layout.tabled] == [*tiny.BLOCKS_OF[pattern]][:-1]
    assert (model.softmax_layers, model.linear_layers) == (softmax, linear)


# Where a family's own names differ from {linear mixer, its projection, MLP, input norm, post norm, final norm}.
OWN = {
    "granite": ("mamba", "out_proj", "shared_mlp", "input_layernorm", "post_attention_layernorm", "norm"),
    "granite_moe": ("mamba", "out_proj", "shared_mlp", "input_layernorm", "post_attention_layernorm", "norm"),
    "bamba": ("mamba", "out_proj", "feed_forward", "input_layernorm", "pre_ff_layernorm", "final_layernorm"),
    "olmo_hybrid": ("linear_attn", "o_proj", "mlp", "input_layernorm", "post_attention_layernorm", "norm"),
    "lfm2": ("conv", "out_proj", "feed_forward", "operator_norm", "ffn_norm", "embedding_norm"),
    "lfm2_moe": ("conv", "out_proj", "feed_forward", "operator_norm", "ffn_norm", "embedding_norm"),
    "jamba": ("mamba", "out_proj", "feed_forward", "input_layernorm", "pre_ff_layernorm", "final_layernorm"),
    "recurrent_gemma": (
        "temporal_block",
        "linear_out",
        "mlp_block",
        "temporal_pre_norm",
        "channel_pre_norm",
        "final_norm",
    ),
    "nemotron_h": ("mixer", "out_proj", None, "norm", None, "norm_f"),
    "minimax": ("self_attn", "out_proj", "mlp", "input_layernorm", "post_attention_layernorm", "norm"),
    "kimi_linear": ("self_attn", "o_proj", "mlp", "input_layernorm", "post_attention_layernorm", "norm"),
}
PLAIN = ("linear_attn", "out_proj", "mlp", "input_layernorm", "post_attention_layernorm", "norm")
SOFTMAX_MIXER = {"recurrent_gemma": "temporal_block", "nemotron_h": "mixer"}


def test_uniform_names_lead_to_the_right_modules(name, model):
    linear, projection, mlp, input_norm, post_norm, final_norm = OWN.get(name, PLAIN)
    module, pattern, softmax = model.module, tiny.pattern_of(name), SOFTMAX_MIXER.get(name, "self_attn")
    decoder = module.model.language_model if "Conditional" in type(module).__name__ else module.model
    assert model.embed._module is (decoder.embeddings if name == "nemotron_h" else decoder.embed_tokens)
    assert model.final_norm._module is getattr(decoder, final_norm)
    assert model.lm_head._module is module.lm_head
    assert len(model.layers) == len(decoder.layers) == len(pattern)
    for layer, own, kind in zip(model.layers, decoder.layers, pattern):
        mixer = getattr(own, softmax if kind == "a" else linear)
        assert layer.mixer._module is mixer
        if kind != "m":
            last = projection if kind == "l" else "out_proj" if "lfm2" in name else "o_proj"
            assert layer.mixer.out_proj._module is getattr(mixer, last)
        for uniform, its_name in (("mlp", mlp), ("input_norm", input_norm), ("post_norm", post_norm)):
            part = getattr(own, its_name, None) if its_name else None
            if part is not None:
                assert getattr(layer, uniform)._module is part
            else:
                assert not hasattr(layer, uniform)


def test_mixers_of_blocks_unions_and_layers(name, model):
    def layers_of(names: str) -> list[int]:
        every = [layer.mixer._module for layer in model.layers]
        return [every.index(mixer._module) for mixer in model.mixers(names)]

    blocks = tiny.BLOCKS_OF[tiny.pattern_of(name)]
    assert layers_of("G1") == [*blocks["G1"]]
    assert layers_of("G2+G0") == [*blocks["G0"], *blocks["G2"]]
    assert layers_of("L4") == [4]


def test_a_block_that_does_not_exist_is_answered_with_those_that_do(name, model):
    pattern = tiny.pattern_of(name)
    names = ", ".join(tiny.BLOCKS_OF[pattern])
    with pytest.raises(NameNotFound, match=rf"'G9'.*{len(tiny.BLOCKS_OF[pattern])} blocks \({names}\)"):
        model.blocks["G9"]
    with pytest.raises(NameNotFound, match=rf"'G4'.*{names}"):
        model.mixers("G1+G4")
    with pytest.raises(NameNotFound, match=rf"no layer L9: this model has {len(pattern)} layers"):
        model.mixers("L9")


# -- queries, keys, attention --------------------------------------------------------
def test_queries_and_keys_have_the_configs_shapes(name, model):
    width = model.config.head_dim if hasattr(model.config, "head_dim") else model.config.hidden_size // tiny.HEADS
    latent = name == "kimi_linear"  # its keys are shared in the cache, and each head's own where attention reads them
    width, kv_heads = (model.config.qk_head_dim, tiny.HEADS) if latent else (width, tiny.KV_HEADS)
    assert (model.heads, model.head_dim) == (tiny.HEADS, width)
    for layer in model.softmax_layers:
        mixer, op = model.layers[layer].mixer, model.attention_op(layer)
        with torch.no_grad(), model.trace(random_rows(3, 11)):
            query, key, scaling = query_and_key(mixer, op)
            query, key = query.clone().save(), key.clone().save()
            scaling = float(scaling).save()
        assert query.shape == (3, tiny.HEADS, 11, width)
        assert key.shape == (3, kv_heads, 11, width)
        multiplier = getattr(model.config, "attention_multiplier", None)
        assert scaling == pytest.approx(width**-0.5 if multiplier is None else multiplier)


def test_attention_of_a_layer_that_has_none_is_refused(model):
    softmax = ", ".join(f"L{i}" for i in model.softmax_layers)
    for layer, kind in enumerate(model.layout.kinds):
        if kind != "softmax":
            with pytest.raises(ModelError, match=rf"L{layer} is a {kind} layer.*{softmax}"):
                model.attention_op(layer)


# -- batches -------------------------------------------------------------------------
def test_a_ragged_batch_equals_each_prompt_alone(name, model):
    """Left padding changes neither logits nor attention at the real tokens; where it would, it is refused."""
    long = random_rows(1, 40, seed=1)[0].tolist()
    rows = [long[:9], long, long[5:28]]
    if name == "recurrent_gemma":
        with pytest.raises(TaskError, match="recurrent_gemma does not mask padding: give prompts of one length"):
            model.trace(rows)
        return
    layer = model.softmax_layers[-1]
    mixer, op, mask = model.layers[layer].mixer, model.attention_op(layer), model.encode(rows)["attention_mask"]
    with torch.no_grad(), model.trace(rows) as tracer:
        weights = final_attention(mixer, op, mask).save()
        padded = tracer.result.logits.clone().save()
    for row, together, attended in zip(rows, padded, weights):
        with torch.no_grad(), model.trace(row) as tracer:
            own = final_attention(mixer, op).save()
            alone = tracer.result.logits.clone().save()
        bound = 1e-4 * max(1.0, float(alone.std()))
        assert (together[-len(row) :] - alone[0]).abs().max() <= bound
        assert (attended[:, -len(row) :] - own[0]).abs().max() <= 1e-5
        assert attended[:, : -len(row)].abs().sum() == 0


def test_a_batch_of_four_equals_four_batches_of_one(model):
    ids = random_rows(4, 67, seed=2)
    together = logits_of(model, ids)
    for row in range(4):
        alone = logits_of(model, ids[row])
        assert (together[row] - alone[0]).abs().max() <= 1e-4 * max(1.0, float(alone.std()))
    assert (together[0] - together[1]).abs().max() > 0.1


# -- what load refuses ---------------------------------------------------------------
def qwen(pattern: str) -> torch.nn.Module:
    return tiny.randomise(Qwen3_5ForCausalLM(Qwen3_5TextConfig(**tiny.qwen_settings(pattern))))


def refused(module: torch.nn.Module, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        encode_address.load(module, tokenizer=tiny.toy_tokenizer())


def test_a_model_without_linear_layers_is_refused():
    refused(qwen("aaa"), "no linear layers: it is a pure transformer")


def test_a_model_without_softmax_layers_is_refused():
    refused(qwen("lll"), "no softmax layers: it is a pure recurrent model")


def test_an_unsupported_model_type_is_refused_with_those_that_are():
    config = LlamaConfig(
        vocab_size=tiny.VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    refused(LlamaForCausalLM(config), "no linear layers: it is a pure transformer")
    config.layer_types = ["linear_attention", "full_attention"]
    refused(LlamaForCausalLM(config), r"'llama' is not supported.*qwen3_next.*granitemoehybrid.*families\.py")


def misname(module: torch.nn.Module, index: int, kind: str) -> None:
    """Make a model's config name another kind for one layer; some configs compute their layer types."""
    config = module.config.get_text_config()
    types = [kind if i == index else own for i, own in enumerate(config.layer_types)]
    own = type(config)
    config.__class__ = type(own.__name__, (own,), {"layer_types": types, "layers_block_type": types})
    config.__dict__.pop("layer_types", None)
    config.__dict__.pop("layers_block_type", None)


def test_an_unknown_kind_of_layer_is_refused(name):
    module = tiny.build(name)
    misname(module, 3, "hyena")
    refused(module, "layer 3 is of kind 'hyena', which is neither linear nor softmax")


def test_a_config_without_layer_types_is_refused():
    with pytest.raises(ModelError, match="toy: its config has no layer_types"):
        Layout.from_config({"hidden_size": 8}, "toy")


def test_a_config_that_misnames_a_layer_is_refused(name):
    """The config says linear where the module has attention."""
    module, layer = tiny.build(name), tiny.pattern_of(name).rindex("a")
    misname(module, layer, "linear_attention")
    refused(module, f"L{layer} should be linear but")


def test_a_mixer_whose_output_reaches_nothing_is_refused():
    module = tiny.build("granite")
    module.model.layers[3].residual_multiplier = 0.0
    refused(module, "writing to the mixer of L3 changed nothing")


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_refused_architecture_says_why(model_type, tmp_path):
    config = AutoConfig.for_model(model_type)
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=f"model type '{model_type}' is refused: {REFUSED[model_type][:60]}"):
        encode_address.load(str(tmp_path), tokenizer=tiny.toy_tokenizer())


def test_a_module_without_its_tokenizer_is_refused():
    with pytest.raises(ModelError, match="needs its tokenizer"):
        encode_address.load(tiny.build("granite"))
