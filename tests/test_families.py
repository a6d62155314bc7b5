"""Every supported family under the uniform names: the names lead where they say, and bad models are refused."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig

import encode_address
from encode_address.errors import ModelError, NameNotFound
from encode_address.interventions import final_attention, query_and_key
from encode_address.models.hybrid import HybridModel
from encode_address.models.layout import Layout
from tests import tiny

load_once = cache(tiny.load_tiny)


@pytest.fixture(params=tiny.FAMILIES)
def model(request) -> HybridModel:
    return load_once(request.param)


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
    assert all(name in str(report) for name in ("G0 [0-1] -> L2", "G3 [8]"))


def test_blocks_and_readers(model):
    assert {name: block.layers for name, block in model.blocks.items()} == tiny.BLOCKS
    assert [block.reader for block in model.blocks.values()] == [2, 4, 7, None]
    assert [block.name for block in model.layout.tabled] == ["G0", "G1", "G2"]
    assert model.softmax_layers == (2, 4, 7)
    assert model.linear_layers == (0, 1, 3, 5, 6, 8)


def test_uniform_names_lead_to_the_right_modules(model):
    module = model.module
    granite = "Granite" in type(module).__name__
    wrapped = "Conditional" in type(module).__name__
    decoder = module.model.language_model if wrapped else module.model
    assert model.embed._module is decoder.embed_tokens
    assert model.final_norm._module is decoder.norm
    assert model.lm_head._module is module.lm_head
    assert len(model.layers) == len(decoder.layers) == len(tiny.PATTERN)
    for layer, own, kind in zip(model.layers, decoder.layers, tiny.PATTERN):
        linear = own.mamba if granite and kind == "l" else own.linear_attn if kind == "l" else None
        mixer = own.self_attn if linear is None else linear
        assert layer.mixer._module is mixer
        assert layer.mixer.out_proj._module is (mixer.o_proj if linear is None else mixer.out_proj)
        assert layer.mlp._module is (own.shared_mlp if granite else own.mlp)
        assert layer.input_norm._module is own.input_layernorm
        assert layer.post_norm._module is own.post_attention_layernorm


def test_mixers_of_blocks_unions_and_layers(model):
    def layers_of(names: str) -> list[int]:
        every = [layer.mixer._module for layer in model.layers]
        return [every.index(mixer._module) for mixer in model.mixers(names)]

    assert layers_of("G2") == [5, 6]
    assert layers_of("G3+G0") == [0, 1, 8]
    assert layers_of("L4") == [4]


def test_a_block_that_does_not_exist_is_answered_with_those_that_do(model):
    with pytest.raises(NameNotFound, match=r"'G9'.*4 blocks \(G0, G1, G2, G3\)"):
        model.blocks["G9"]
    with pytest.raises(NameNotFound, match=r"'G4'.*G0, G1, G2, G3"):
        model.mixers("G1+G4")
    with pytest.raises(NameNotFound, match=r"no layer L9: this model has 9 layers"):
        model.mixers("L9")


# -- queries, keys, attention --------------------------------------------------------
def test_queries_and_keys_have_the_configs_shapes(model):
    width = model.config.head_dim if hasattr(model.config, "head_dim") else model.config.hidden_size // tiny.HEADS
    assert (model.heads, model.head_dim) == (tiny.HEADS, width)
    for layer in model.softmax_layers:
        mixer, op = model.layers[layer].mixer, model.attention_op(layer)
        with torch.no_grad(), model.trace(random_rows(3, 11)):
            query, key, scaling = query_and_key(mixer, op)
            query, key = query.clone().save(), key.clone().save()
            scaling = float(scaling).save()
        assert query.shape == (3, tiny.HEADS, 11, width)
        assert key.shape == (3, tiny.KV_HEADS, 11, width)
        multiplier = getattr(model.config, "attention_multiplier", None)
        assert scaling == pytest.approx(width**-0.5 if multiplier is None else multiplier)


def test_attention_of_a_linear_layer_is_refused(model):
    for layer in model.linear_layers:
        with pytest.raises(ModelError, match=rf"L{layer} is a linear layer.*L2, L4, L7"):
            model.attention_op(layer)


# -- batches -------------------------------------------------------------------------
def test_a_ragged_batch_equals_each_prompt_alone(model):
    """Left padding changes neither logits nor attention at the real tokens."""
    long = random_rows(1, 40, seed=1)[0].tolist()
    rows = [long[:9], long, long[5:28]]
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


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_an_unknown_kind_of_layer_is_refused(family):
    module = tiny.build(family)
    config = module.config.get_text_config()
    config.layer_types = [*config.layer_types[:3], "hyena", *config.layer_types[4:]]
    refused(module, "layer 3 is of kind 'hyena', which is neither linear nor softmax")


def test_a_config_without_layer_types_is_refused():
    with pytest.raises(ModelError, match="toy: its config has no layer_types"):
        Layout.from_config({"hidden_size": 8}, "toy")


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_config_that_misnames_a_layer_is_refused(family):
    """The config says linear where the module has attention."""
    module = tiny.build(family)
    config = module.config.get_text_config()
    config.layer_types = ["linear_attention" if i == 4 else kind for i, kind in enumerate(config.layer_types)]
    refused(module, "L4 should be linear but has no")


def test_a_mixer_whose_output_reaches_nothing_is_refused():
    module = tiny.build("granite")
    module.model.layers[3].residual_multiplier = 0.0
    refused(module, "writing to the mixer of L3 changed nothing")


def test_a_module_without_its_tokenizer_is_refused():
    with pytest.raises(ModelError, match="needs its tokenizer"):
        encode_address.load(tiny.build("granite"))
