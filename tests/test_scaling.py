"""The scaling experiment: its rule on tables made by hand, and on small networks whose way is known by construction."""

from __future__ import annotations

import pandas as pd
import pytest
import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

import encode_address as ea
from encode_address import figures
from encode_address.experiments import scaling
from encode_address.experiments.scaling import chain_cells, kept_by_arm, path_of, transplant_cells
from encode_address.models.layout import Layout
from encode_address.run.engine import Engine
from encode_address.stats import Estimate
from encode_address.tasks import Prompt
from tests import tiny
from tests.oracle_cases import MODELS, agree, case
from tests.oracle_runs import Runs, expect_runs

LAYOUT = Layout.from_config(tiny.build("qwen3_5_text").config)
READER = (7, 1)


def sure(value: float, half: float = 0.05) -> Estimate:
    return Estimate(value, 50, value - half, value + half)


# -- the rule -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("softmax", "linear", "both", "earlier", "payload", "path"),
    [
        (1.0, 1.0, 1.0, 0.0, 0.0, "direct"),
        (0.0, 1.0, 0.0, 1.0, 0.0, "via attention (query)"),
        (0.1, 0.1, 0.0, 0.9, 0.1, "via attention (query)"),  # and on through a linear layer
        (0.0, 1.0, 0.0, 1.0, 0.9, "via attention (payload)"),
        (1.0, 0.1, 0.1, 0.0, 0.0, "via linear"),
        (0.9, 0.8, 0.1, 0.2, 0.0, "mixed"),  # either way is enough
        (0.1, 1.0, 0.1, 0.2, 0.0, "mixed"),  # attention is needed, and not enough
        (0.1, 1.0, 0.9, 0.2, 0.0, "mixed"),  # what linear layers write hides what comes directly
        (0.5, 1.0, 0.5, 0.0, 0.0, "undecided"),
        (0.0, 1.0, 0.0, 0.5, 0.0, "undecided"),
        (0.0, 1.0, 0.0, 1.0, 0.5, "undecided"),
    ],
)
def test_the_way_on_tables_made_by_hand(softmax, linear, both, earlier, payload, path):
    arms = dict(zip((*scaling.HELD, *scaling.EARLIER), map(sure, (softmax, linear, both, earlier, payload))))
    assert path_of(arms) == path


def test_layers_that_do_not_lie_in_between_hold_nothing():
    assert path_of({}) == "direct"
    assert path_of({"linear held": sure(0.0)}) == "via linear"
    assert path_of({"linear held": sure(1.0)}) == "direct"
    assert (
        path_of({"softmax held": sure(0.0), "earlier alone": sure(1.0), "payload": sure(0.0)})
        == "via attention (query)"
    )
    assert path_of({"softmax held": sure(1.0), "earlier alone": sure(0.0), "payload": sure(0.0)}) == "direct"


def test_the_threshold_is_a_parameter():
    arms = {"linear held": sure(0.6)}
    assert [path_of(arms, keeps) for keeps in scaling.SENSITIVITY] == ["direct", "direct", "via linear"]


def rows_of(block: str, attended: tuple[float, float], arm: str = "transplant", n: int = 30) -> pd.DataFrame:
    """Hosts whose reader gives this attention to the donor's entry (1) and its own (0)."""
    attn = [[attended[1] + 0.01 * (i % 3), attended[0] - 0.01 * (i % 3), 0.0, 0.0] for i in range(n)]
    return pd.DataFrame(
        {"experiment": "scaling", "block": block, "arm": arm, "reader": "", "pair": range(n), "host_index": 0,
         "donor_index": 1, "attn.L7H1": attn}
    )  # fmt: skip


def test_what_guides_a_reader():
    host = rows_of("", (0.05, 0.8), "host")
    weak = pd.concat([host, rows_of("G0", (0.1, 0.75)), rows_of("G1", (0.3, 0.2)), rows_of("G2", (0.1, 0.7))])
    assert scaling.guided(weak, LAYOUT, [READER]) == [], "less than half of its own attention is no guidance"
    # the best single block is G1; the next sets add each other block before the reader to it, in order
    assert scaling.next_sets(weak, LAYOUT, [READER]) == ["G0+G1", "G1+G2"]
    more = pd.concat([weak, rows_of("G0+G1", (0.35, 0.3)), rows_of("G1+G2", (0.38, 0.35))])
    assert scaling.next_sets(more, LAYOUT, [READER]) == ["G0+G1+G2"]
    both = pd.concat([more, rows_of("G0+G1+G2", (0.75, 0.1))])
    assert scaling.next_sets(both, LAYOUT, [READER]) == []
    assert scaling.guided(both, LAYOUT, [READER]) == [("G0+G1+G2", READER)]
    alone = pd.concat([host, rows_of("G0", (0.1, 0.75)), rows_of("G1", (0.7, 0.1)), rows_of("G2", (0.6, 0.1))])
    assert scaling.next_sets(alone, LAYOUT, [READER]) == []
    assert scaling.guided(alone, LAYOUT, [READER]) == [("G1", READER), ("G2", READER)]


def test_a_layer_that_reads_nothing_is_not_searched():
    quiet = pd.concat([rows_of("", (0.02, 0.05), "host"), rows_of("G0", (0.03, 0.04)), rows_of("G1", (0.03, 0.04))])
    assert scaling.next_sets(quiet, LAYOUT, [READER]) == scaling.guided(quiet, LAYOUT, [READER]) == []


# -- networks whose way is known ----------------------------------------------------------------------------------
D = 48 // 2  # the first half of the stream is what G0 writes; the second half is what the reader asks with


def known(way: str) -> torch.nn.Module:
    """llalallal, G0 [0-1] and the reader L7. MLPs are silent, and no layer in between writes, but the one of the way:
    L2, or L3, which hands what it finds in the first half on to the second. The reader's query and key see the second
    half alone, unless the way is direct. Its query is normalised, so that the stream's scale does not matter."""
    module = tiny.build("qwen3_5_text")
    with torch.no_grad():
        for i, layer in enumerate(module.model.layers):
            layer.mlp.down_proj.weight.zero_()
            mixer = getattr(layer, "linear_attn", None) or layer.self_attn
            out = getattr(mixer, "out_proj", None) or mixer.o_proj
            if i in (0, 1):
                out.weight[D:] = 0
            elif i == {"attention": 2, "linear": 3}.get(way):
                out.weight[:D] = 0
            elif i < 7:
                out.weight.zero_()
                if getattr(out, "bias", None) is not None:
                    out.bias.zero_()
            if i == 7 and way != "direct":
                for project in (mixer.q_proj, mixer.k_proj):
                    project.weight[:, :D] = 0
                    project.bias.zero_()
    return module


def run_chain(model, items, lent) -> dict[str, Estimate]:
    unit = ("G0", model.layout.layers_of("G0"))
    cells = transplant_cells(items, [("", ()), unit], [READER], {})
    cells += chain_cells(items, unit, READER, model.layout, lent, {})
    return kept_by_arm(Engine(model, tiny.toy_text()).run(cells), "G0", READER)


def lent(items) -> dict[int, Prompt]:
    out = {}
    for item in items:
        values = list(item.host.values)
        a, b = item.donor_index, item.host_index
        values[a], values[b] = values[b], values[a]
        out[item.pair] = tiny.prompt(item.host.keys, values, b)
    return out


@pytest.mark.parametrize(
    ("way", "shares"),
    [
        ("direct", {"softmax held": 1, "linear held": 1, "both held": 1, "earlier alone": 0, "payload": 0}),
        ("linear", {"softmax held": 1, "linear held": 0, "both held": 0, "earlier alone": 0, "payload": 0}),
        ("attention", {"softmax held": 0, "linear held": 1, "both held": 0, "earlier alone": 1}),
    ],
)
def test_the_way_in_a_network_built_for_it(way, shares):
    items = tiny.questions(8)
    model = ea.load(known(way), tokenizer=tiny.toy_tokenizer())
    kept = run_chain(model, items, lent(items))
    assert {arm: kept[arm].value for arm in shares} == pytest.approx(shares, abs=0.02)
    said = path_of({**kept, "payload": sure(0.0)} if way == "attention" else kept)
    assert said == {"direct": "direct", "linear": "via linear", "attention": "via attention (query)"}[way]


# -- a lookup that is handed on, built by hand ----------------------------------------------------------------------
WORDS = [tiny.VOCAB[word] for word in tiny.KEYS + tiny.VALUES]
OWN, BACK, FOUND, ALWAYS, VALUE, OTHER = (
    0,
    80,
    160,
    240,
    241,
    242,
)  # where the stream (256) holds what; a word is one of 80 axes
PLAIN, HEAD = 8, 128  # axes of a query from here on carry no position; its size


def handing(what: int) -> torch.nn.Module:
    """llalallal. At every token G0 (L0) writes the word two tokens before it: the key at a value, the asked key at the end. L2 looks
    for the value whose key is the asked one, and hands on its own word (OWN: the answer) or its key (BACK). L7 attends to the word that
    was handed on. All else is silent."""
    rotary = {**tiny.qwen_settings()["rope_parameters"], "partial_rotary_factor": PLAIN / HEAD}
    sizes = {"hidden_size": 256, "head_dim": HEAD, "rope_parameters": rotary, "tie_word_embeddings": False}
    sizes |= {"linear_num_key_heads": 1, "linear_num_value_heads": 1, "linear_value_head_dim": len(WORDS)}
    axes = range(len(WORDS))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        module = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**tiny.qwen_settings(**sizes))).float().eval()
        embed = module.model.embed_tokens.weight.zero_()
        embed[:, ALWAYS], embed[:, OTHER] = 1, 2**0.5  # all tokens are equally long, so that norms scale them alike
        for axis, word in enumerate(WORDS):
            embed[word, OTHER], embed[word, OWN + axis] = 0, 1
            embed[word, VALUE if axis >= len(tiny.KEYS) else OTHER] = 1
        for layer in module.model.layers:
            layer.mlp.down_proj.weight.zero_()
            mixer = getattr(layer, "linear_attn", None) or layer.self_attn
            (getattr(mixer, "out_proj", None) or mixer.o_proj).weight.zero_()
        first = module.model.layers[0].linear_attn  # it forgets at once, so the output is the value of its own step
        for weights in (first.in_proj_qkv, first.in_proj_z, first.in_proj_b, first.in_proj_a, first.conv1d):
            weights.weight.zero_()
        first.A_log.fill_(1.0), first.dt_bias.fill_(10.0), first.norm.weight.fill_(1.0)
        start = 2 * first.key_dim
        first.in_proj_qkv.weight[:start, ALWAYS], first.conv1d.weight[:start, 0, 3] = 1, 1
        first.conv1d.weight[start:, 0, 1] = 1  # of four taps, the one two tokens back
        first.in_proj_z.weight[:, ALWAYS], first.in_proj_b.weight[:, ALWAYS] = 1, 1
        for axis in axes:
            first.in_proj_qkv.weight[start + axis, OWN + axis] = 1
            first.out_proj.weight[BACK + axis, axis] = 1 / 80  # about one
        look(module.model.layers[2].self_attn, BACK, BACK, what)
        look(module.model.layers[7].self_attn, FOUND, OWN, None)
    return module


def look(mixer: torch.nn.Module, asked: int, offered: int, handed: int | None) -> None:
    """All heads alike: the query is the word that the stream holds at `asked`, the key the word at `offered`; where that is BACK, tokens
    that are values count more, as the question's end has the asked key there too. The first head writes the word at `handed` to FOUND."""
    for project in (mixer.q_proj, mixer.k_proj, mixer.v_proj, mixer.o_proj):
        project.weight.zero_(), project.bias.zero_()
    mixer.q_norm.weight.fill_(5.0), mixer.k_norm.weight.zero_()  # sharp: a match counts 68
    query, key = (
        mixer.q_proj.weight.view(tiny.HEADS, 2, HEAD, -1)[:, 0],
        mixer.k_proj.weight.view(tiny.KV_HEADS, HEAD, -1),
    )
    value, out = mixer.v_proj.weight.view(tiny.KV_HEADS, HEAD, -1), mixer.o_proj.weight.view(-1, tiny.HEADS, HEAD)
    for axis in range(len(WORDS)):
        query[:, PLAIN + axis, asked + axis] = key[:, PLAIN + axis, offered + axis] = 1
        if handed is not None:
            value[:, axis, handed + axis], out[FOUND + axis, 0, axis] = 1, 1
    if offered == BACK:
        query[:, -1, ALWAYS] = key[:, -1, VALUE] = 1


@pytest.mark.parametrize(("what", "payload", "way"), [(OWN, 1, "payload"), (BACK, 0, "query")])
def test_what_an_earlier_reader_hands_on_is_told_apart(what, payload, way):
    """The later reader gets the answer (payload) or the key (query), and the rule says so of the arms that were run."""
    items = tiny.questions(8)
    model = ea.load(handing(what), tokenizer=tiny.toy_tokenizer())
    kept = run_chain(model, items, lent(items))
    shares = {"softmax held": 0, "linear held": 1, "both held": 0, "earlier alone": 1, "payload": payload}
    assert {arm: share.value for arm, share in kept.items()} == pytest.approx(shares, abs=0.02)
    assert path_of(kept) == f"via attention ({way})"


# -- against the oracle ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", MODELS)
def test_every_arm_is_what_plain_hooks_say(name):
    one = case(name)
    layout, reader = one.model.layout, one.model.softmax_layers[-1]
    head = (reader, 0)
    lend = {i.pair: i.other_dictionary for i in one.questions}  # any prompt will do here
    cells = chain_cells(one.questions, one.units[0], head, layout, lend, {})
    assert {cell.labels["arm"] for cell in cells} == {*scaling.HELD, *scaling.EARLIER}
    table = one.engine.run(cells)
    agree(one, cells, table, expect_runs(Runs(one.oracle), cells), 1e-4)
    assert table.groupby("pair")["margin"].nunique().min() >= 4, "the arms differ"


# -- the figure -----------------------------------------------------------------------------------------------------
def test_the_figure_frames_what_is_guided_and_says_the_way(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "write", lambda figure, *_: drawn.append(figure) or [])
    arms = {
        "softmax held": (0.05, 0.8),
        "linear held": (0.8, 0.05),
        "earlier alone": (0.8, 0.05),
        "payload": (0.05, 0.8),
    }
    chain = [rows_of("G0", shares, arm).assign(reader="L7H1") for arm, shares in arms.items()]
    table = pd.concat([rows_of("", (0.05, 0.8), "host"), rows_of("G0", (0.8, 0.05)), *chain]).assign(variant="chat8")
    blocks = [{"name": b.name, "layers": list(b.layers), "reader": b.reader} for b in LAYOUT.blocks]
    figures.scaling.draw(table, {"layout": {"blocks": blocks, "softmax": list(LAYOUT.softmax_layers)}}, tmp_path)
    (figure,) = drawn
    top, bottom = figure.axes[0], figure.axes[1]
    assert [text.get_text() for text in top.texts[:2]] == ["-0.77", "+0.73"]
    assert len(top.patches) == 1
    assert bottom.get_xticklabels()[0].get_text() == "G0 → L7H1\nvia attention\n(query)"
    heights = [bar.get_height() for bar in bottom.patches]
    assert heights == pytest.approx([0, 1, 1, 0], abs=0.01)
