"""Real checkpoints without weights: layouts as the papers print them, names that lead somewhere, sizes, and plans."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import encode_address
from encode_address import circuit
from encode_address.cli import app
from encode_address.errors import ModelError, NameNotFound
from encode_address.models import real
from encode_address.outlook import outlook, sketch
from tests import tiny

# From the papers' tables (spec 2.1 and 2.2; "Some Attention", section 6): spans of blocks, and their readers.
GRANITE = (["0-4", "6-14", "16-24", "26-34", "36-39"], [5, 15, 25, 35])
SMALL_GRANITE = (["0-9", "11-12", "14-16", "18-26", "28-31"], [10, 13, 17, 27])
JAMBA = (["0-3", "5-11", "13-19", "21-27", "29-31"], [4, 12, 20, 28])


def qwen(blocks: int) -> tuple[list[str], list[int]]:
    """One softmax layer in four, the last layer among them."""
    return [f"{4 * i}-{4 * i + 2}" for i in range(blocks)], [4 * i + 3 for i in range(blocks)]


def griffin(blocks: int) -> tuple[list[str], list[int]]:
    """R, R, A again and again, and two recurrent layers at the end."""
    return [f"{3 * i}-{3 * i + 1}" for i in range(blocks)], [3 * i + 2 for i in range(blocks - 1)]


TABLES = {
    "qwen3.5-0.8b": (24, *qwen(6)),
    "qwen3.5-2b": (24, *qwen(6)),
    "qwen3.5-4b": (32, *qwen(8)),
    "qwen3.5-9b": (32, *qwen(8)),
    "qwen3.5-27b": (64, *qwen(16)),
    "qwen3.5-35b-a3b": (40, *qwen(10)),
    "granite-4.0-h-350m": (32, *SMALL_GRANITE),
    "granite-4.0-h-1b": (40, *GRANITE),
    "granite-4.0-h-tiny": (40, *GRANITE),
    "recurrentgemma-2b": (26, *griffin(9)),
    "recurrentgemma-9b": (38, *griffin(13)),
    "jamba-mini-1.6": (32, *JAMBA),
}
# (hidden width, query heads, key-value heads, width of a head) where they are facts; billions of parameters where all is.
WIDTHS = {
    "qwen3.5-0.8b": (1024, 8, 2, 256, 0.75),
    "qwen3.5-2b": (2048, 8, 2, 256, 1.88),
    "qwen3.5-9b": (4096, 16, 4, 256, 8.95),
    "qwen3.5-27b": (5120, 24, 4, 256, None),
    "qwen3.5-35b-a3b": (2048, 16, 2, 256, 34.7),
    "granite-4.0-h-1b": (1536, 12, 4, 128, None),
    "granite-4.0-h-tiny": (1536, 12, 4, 128, None),
    "recurrentgemma-2b": (2560, 10, 1, 256, None),
    "recurrentgemma-9b": (4096, 16, 1, 256, None),
    "jamba-mini-1.6": (4096, 32, 8, 128, None),
    "nemotron-3-nano-30b-a3b": (2688, 32, 2, 128, 31.6),
}


@cache
def made(name: str) -> real.Sketch:
    return sketch(name)[0]


@pytest.mark.parametrize("name", TABLES)
def test_layers_blocks_and_readers_are_the_papers(name):
    depth, spans, readers = TABLES[name]
    layout = made(name).layout
    assert len(layout.kinds) == depth
    assert [block.span for block in layout.blocks] == spans
    assert [*layout.softmax_layers] == readers
    assert [block.reader for block in layout.tabled] == readers


@pytest.mark.parametrize("name", real.names())
def test_uniform_names_lead_to_modules_without_weights(name):
    model = made(name)
    layers = model.module.get_decoder().layers
    assert len(model.layers) == len(layers)
    for index, (layer, kind) in enumerate(zip(layers, model.layout.kinds)):
        mixer = model.layers[index].mixer
        assert mixer._module is getattr(layer, model.family.mixer_attr(kind))
        assert kind == "mlp" or mixer.out_proj._module in [*mixer._module.children()]
    assert {parameter.device.type for parameter in model.module.parameters()} == {"meta"}
    with pytest.raises(ModelError, match="has no weights here"):
        model.trace([1, 2])


@pytest.mark.parametrize("name", WIDTHS)
def test_widths_are_facts_or_said_to_be_unconfirmed(name):
    model, (hidden, heads, kv_heads, width, billions) = made(name), WIDTHS[name]
    known = model.config.hidden_size, model.heads, model.config.num_key_value_heads, model.head_dim
    assert known == (hidden, heads, kv_heads, width)
    assert (billions is None) == bool(model.unconfirmed)
    if billions:
        assert model.parameters / 1e9 == pytest.approx(billions, rel=0.01)
        assert model.cache_bytes(10) > model.cache_bytes(1) > 0


def test_the_smallest_is_its_configuration_file():
    path = Path(__file__).parent.parent / "benchmarks" / "configs" / "qwen3.5-0.8b.json"
    stored = json.loads(path.read_text())
    stored = stored.get("text_config", stored)
    config = real.facts("Qwen/Qwen3.5-0.8B").config
    for key in ("hidden_size", "intermediate_size", "layer_types", "head_dim", "vocab_size", "linear_num_value_heads"):
        assert getattr(config, key) == stored[key], key


@pytest.mark.parametrize("name", ["qwen3_5_text", "granite_moe", "jamba", "recurrent_gemma", "kimi_linear"])
def test_a_sketch_has_the_sizes_of_the_model(name):
    model = tiny.load_tiny(name)
    drawn = real.Sketch(model.config, tiny.toy_tokenizer(), name, torch.float32)
    assert drawn.weight_bytes == sum(p.numel() * 4 for p in model.module.parameters())
    for length in (1, 7):
        assert drawn.cache_bytes(length) == model.cache_bytes(length)
    assert (drawn.heads, drawn.head_dim, drawn.layout) == (model.heads, model.head_dim, model.layout)


def test_the_plan_of_a_bundled_model_is_its_dry_run(tmp_path):
    told = outlook("tiny-gdn", n=20, variants=["chat8"], batch_tokens=2000)
    model = encode_address.load("tiny-gdn", device="cpu")
    cost = circuit.dry_run(model, ["chat8"], 20, out=tmp_path, batch_tokens=2000)
    first, *others = cost.splitlines()  # a model without weights may be on a server, so what goes there is said too
    assert all(line in told for line in (f"{first}; on a server 2 jobs, ", *others))
    assert "G2 [4-6] -> L7" in told
    assert f"{sum(p.numel() for p in model.module.parameters()):,} parameters" in told


def test_unconfirmed_widths_give_no_sizes():
    told = outlook("Qwen/Qwen3.5-4B", "transplant", n=4, variants=["chat8"])
    assert "unconfirmed: hidden_size" in told
    assert "cached state unconfirmed" in told
    assert "MB" not in told
    assert "tokens of forward" in told


def test_the_commands():
    runner = CliRunner()
    told = runner.invoke(app, ["plan", "qwen3.5-0.8b", "--experiment", "transplant", "--n", "4", "--quick"])
    assert told.exit_code == 0
    assert "MB of weights in float32" in told.stdout
    listed = runner.invoke(app, ["models"]).stdout
    assert "recurrent_gemma" in listed
    assert "falcon_h1: every layer has a linear and a softmax mixer side by side" in listed
    with pytest.raises(NameNotFound, match="no experiment 'nosuch'"):
        outlook("qwen3.5-0.8b", "nosuch")
