"""Steering: what it generates is what plain hooks generate, its mistakes are one clear line, its costs are seen."""

from __future__ import annotations

import json
from functools import cache
from tempfile import TemporaryDirectory

import pytest
import torch

import encode_address as ea
from encode_address import lab
from encode_address.errors import NameNotFound, RunError, TaskError
from encode_address.experiments import steer
from encode_address.metrics import select
from tests import tiny
from tests.oracle_cases import case

TOKENS = 3


@pytest.fixture(params=tiny.FAMILIES)
def one(request):
    return case(request.param)


def greedy(one, ids: tuple[int, ...], layer_edits=()) -> list[int]:
    """What whole forwards generate: `layer_edits` (layer, position, vector) are written by plain hooks."""
    said: list[int] = []
    for _ in range(TOKENS):
        tokens = torch.tensor([[*ids, *said]])

        def write(output, position, vector):
            output[0, position] = vector
            return output

        edits = {
            layer: (lambda output, p=position, v=vector: write(output, p, v)) for layer, position, vector in layer_edits
        }
        said.append(int(one.oracle.logits(tokens, edits)[0].argmax()))
    return said


def text_of(one, ids: list[int]) -> str:
    end = one.model.tokenizer.eos_token_id
    return one.model.tokenizer.decode(ids[: ids.index(end)] if end in ids else ids).strip()


def test_it_generates_what_plain_hooks_do(one):
    if not one.model.family.continues:
        with pytest.raises(RunError, match="steering continues from a cache"):
            ea.steer(one.model, one.questions[0].host, "x", block="G1")
        return
    changed = 0
    for item in one.questions:
        for name, layers in one.units[:3]:
            to_key = item.host.keys[item.donor_index]
            said = ea.steer(one.model, item.host, to_key, block=name, tokens=TOKENS)
            end = len(item.host) - 1
            lent = one.oracle.outputs(torch.tensor([item.donor.ids]), layers)
            edits = [(layer, end, lent[layer][0, end]) for layer in layers]
            assert said.plain == text_of(one, greedy(one, item.host.ids))
            assert said.donor == text_of(one, greedy(one, item.donor.ids))
            assert said.text == text_of(one, greedy(one, item.host.ids, edits))
            changed += said.text != said.plain
    assert changed, "no edit moved what is generated"


def test_both_edits_redirect_a_trained_model_and_other_blocks_do_not():
    for name in ("tiny-gdn", "tiny-mamba2"):
        model = ea.load(name)
        (address,) = (b for b in model.layout.blocks if b.name == address_of(name))
        items = ea.tasks.dictionary(model, "chat8").questions(12)
        for edit in ("output", "state"):
            said = [ea.steer(model, i.host, i.host.keys[i.donor_index], block=address.name, edit=edit) for i in items]
            assert sum(s.redirected for s in said) >= 10, (name, edit)
            assert [s.donor for s in said] == [i.host.values[i.donor_index] for i in items]
        first = model.layout.blocks[0].name
        assert not any(ea.steer(model, i.host, i.host.keys[i.donor_index], block=first).redirected for i in items[:4])


@cache
def address_of(name: str) -> str:
    """The block whose transplant redirects most."""
    with TemporaryDirectory() as folder:
        shares = lab.experiment("transplant", ea.load(name), "chat8", n=20, out=folder).conclusions["chat8"].figures
    return max(shares, key=lambda block: float(shares[block].split()[0]))


def test_a_text_is_steered_like_a_prompt_and_the_block_is_what_find_said(tmp_path):
    model = ea.load("tiny-gdn")
    item = ea.tasks.dictionary(model, "chat8").questions(1)[0]
    to_key = item.host.keys[item.donor_index]
    block = address_of("tiny-gdn")
    expected = ea.steer(model, item.host, to_key, block=block)
    asked = item.host.keys[item.host_index]
    with pytest.raises(RunError, match="let `encode-address find` say it"):
        ea.steer(model, item.host.text, to_key, from_key=asked, out=tmp_path)
    (tmp_path / model.slug).mkdir()
    (tmp_path / model.slug / "verdict.json").write_text(json.dumps({"address": [block]}))
    assert ea.steer(model, item.host.text, to_key, from_key=asked, out=tmp_path) == expected


def test_what_cannot_be_steered_is_one_clear_line():
    model = ea.load("tiny-gdn")
    host = ea.tasks.dictionary(model, "chat8").questions(1)[0].host
    for error, line, call in (
        (TaskError, "say which key the prompt asks for", lambda: ea.steer(model, host.text, host.keys[0], block="G0")),
        (TaskError, "'zebra' is in the prompt 0 times", lambda: ea.steer(model, host.text, host.keys[0], from_key="zebra", block="G0")),
        (TaskError, "'zebra' is not in the prompt", lambda: ea.steer(model, host, "zebra", block="G0")),
        (TaskError, "takes another number of tokens", lambda: ea.steer(model, host, "Dictionary :", block="G0")),
        (RunError, "unknown edit 'gate': use output or state", lambda: ea.steer(model, host, host.keys[0], block="G0", edit="gate")),
        (RunError, "1 token or more, not 0", lambda: ea.steer(model, host, host.keys[0], block="G0", tokens=0)),
        (NameNotFound, "no block 'G9'", lambda: ea.steer(model, host, host.keys[0], block="G9")),
    ):  # fmt: skip
        with pytest.raises(error, match=line):
            call()


def test_the_costs_are_of_the_tokens_that_follow_and_noise_is_the_control(tmp_path):
    model = ea.load("tiny-gdn")
    table = lab.experiment("steer", model, "chat8", n=8, out=tmp_path).table
    rows = select(table, experiment="steer")
    assert set(rows["site"]) == {"answer", "continuation", "unrelated"}
    for site in ("continuation", "unrelated"):
        some = select(rows, site=site)
        assert (some["kl"] >= 0).all()
        assert select(some, arm="output")["kl"].mean() > 1e-5, "the edit is there while it is measured"
        plain = some.pivot_table(index="pair", columns="arm", values="loss_without")
        assert (plain["output"] - plain["random"]).abs().max() <= 1e-4, "without edits both are the same run"
    assert steer.redirected(rows, "random").value <= 0.1 < 0.7 <= steer.redirected(rows, "output").value
