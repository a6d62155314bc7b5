"""Layouts: blocks are the maximal runs of linear layers, and every wrong name is an error that says what there is."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AutoConfig

from encode_address.errors import ModelError, NameNotFound
from encode_address.models.layout import LINEAR, SOFTMAX, Layout, layer_span

layer_types = st.lists(st.sampled_from(sorted(LINEAR | SOFTMAX)), min_size=2, max_size=40).filter(
    lambda types: LINEAR & set(types) and SOFTMAX & set(types)
)


def layout_of(pattern: str) -> Layout:
    """ "LLSL" as a layout: L linear, S softmax."""
    names = {"L": "linear_attention", "S": "full_attention"}
    return Layout.from_config({"layer_types": [names[letter] for letter in pattern]})


@given(layer_types)
def test_blocks_are_the_maximal_runs_of_linear_layers(types):
    """Every linear layer is in exactly one block; no block can be made longer; the reader is the next layer."""
    layout = Layout.from_config({"layer_types": types})
    assert layout.kinds == tuple("linear" if kind in LINEAR else "softmax" for kind in types)
    assert sorted(layout.linear_layers + layout.softmax_layers) == list(range(len(types)))
    assert [i for block in layout.blocks for i in block.layers] == list(layout.linear_layers)
    for number, block in enumerate(layout.blocks):
        first, last = block.layers[0], block.layers[-1]
        assert block.name == f"G{number}"
        assert block.layers == tuple(range(first, last + 1))
        assert first == 0 or layout.kinds[first - 1] == "softmax"
        assert block.reader == (last + 1 if last + 1 < len(types) else None)
        assert block.reader is None or layout.kinds[block.reader] == "softmax"
        assert layout.block(block.name) is block
        assert layout.layers_of(block.name) == block.layers


@given(layer_types)
def test_only_a_last_block_without_a_reader_is_left_out_of_the_tables(types):
    layout = Layout.from_config({"layer_types": types})
    trailing = layout.kinds[-1] == "linear"
    assert layout.tabled == (layout.blocks[:-1] if trailing else layout.blocks)


def test_the_layouts_of_the_paper():
    """Paper section 2.2: the 0.8B model has G0-G5 of three layers, Granite has G0-G3 and layers 36-39 outside."""
    qwen = layout_of("LLLS" * 6)
    assert [block.span for block in qwen.blocks] == ["0-2", "4-6", "8-10", "12-14", "16-18", "20-22"]
    assert [block.reader for block in qwen.blocks] == [3, 7, 11, 15, 19, 23]
    granite = layout_of("LLLLLS" + "LLLLLLLLLS" * 3 + "LLLL")
    assert [(b.name, b.span, b.reader) for b in granite.tabled] == [
        ("G0", "0-4", 5),
        ("G1", "6-14", 15),
        ("G2", "16-24", 25),
        ("G3", "26-34", 35),
    ]
    assert granite.blocks[-1].layers == (36, 37, 38, 39)


def test_a_transformers_config_reads_like_a_dict():
    config = AutoConfig.for_model("qwen3_5_text", num_hidden_layers=8)
    assert Layout.from_config(config) == layout_of("LLLSLLLS")


def test_consecutive_softmax_layers_have_no_block_between_them():
    layout = layout_of("SSLSSL")
    assert [(b.layers, b.reader) for b in layout.blocks] == [((2,), 3), ((5,), None)]
    assert layout.readers_after((2,)) == (3, 4)
    assert layout.readers_after((5,)) == ()


@pytest.mark.parametrize(
    ("types", "words"),
    [
        (["full_attention"] * 3, "toy has no linear layers"),
        (["mamba"] * 3, "toy has no softmax layers"),
        (["mamba", "attention", "hyena"], "toy: layer 2 is of kind 'hyena'"),
        ([], "toy: its config has no layer_types"),
        (None, "toy: its config has no layer_types"),
    ],
)
def test_a_model_that_is_no_hybrid_is_refused_by_name(types, words):
    with pytest.raises(ModelError, match=words):
        Layout.from_config({"layer_types": types}, "toy")


@pytest.mark.parametrize(
    ("model_type", "words"),
    [("gpt2", "no linear layers"), ("llama", "no linear layers"), ("mamba", "no softmax"), ("mamba2", "no softmax")],
)
def test_a_config_with_one_kind_of_layer_only_is_named_for_what_it_lacks(model_type, words):
    with pytest.raises(ModelError, match=words):
        Layout.from_config(AutoConfig.for_model(model_type))


@given(layer_types, st.data())
def test_a_union_is_its_layers_once_and_in_order(types, data):
    """Also where the parts overlap: "G0+L1" names a layer of G0 twice."""
    layout = Layout.from_config({"layer_types": types})
    names = [block.name for block in layout.blocks] + [f"L{i}" for i in range(len(types))]
    union = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=4))
    wanted = sorted({layer for name in union for layer in layout.layers_of(name)})
    assert layout.layers_of("+".join(union)) == tuple(wanted)


@given(st.text(max_size=6) | st.from_regex(r"[GL][0-9+]{1,4}", fullmatch=True))
@example("L²")
@example("")
@example("G0+")
@example("L-1")
@example("G01")
def test_any_name_is_resolved_or_refused(name):
    """Names come from users: whatever they type gives existing layers or NameNotFound, never another error."""
    layout = layout_of("LLSLS")
    try:
        layers = layout.layers_of(name)
    except NameNotFound:
        return
    assert layers
    assert set(layers) <= set(range(5))


def test_a_name_that_does_not_exist_lists_what_does():
    layout = layout_of("LLSLS")
    with pytest.raises(NameNotFound, match=r"no block 'G2': this model has 2 blocks \(G0, G1\)"):
        layout.block("G2")
    with pytest.raises(NameNotFound, match="no layer L5: this model has 5 layers"):
        layout.layers_of("G0+L5")


@given(st.lists(st.integers(0, 60), min_size=1, unique=True).map(sorted).map(tuple))
def test_a_layer_span_reads_back_as_its_layers(layers):
    read = []
    for run in layer_span(layers).split(","):
        first, _, last = run.partition("-")
        read.extend(range(int(first), int(last or first) + 1))
    assert tuple(read) == layers
