"""Needles, associative recall, prompts stated twice: what is where in the token ids that the model gets."""

from __future__ import annotations

import copy
import random
from collections import Counter

import pytest
from tokenizers.processors import TemplateProcessing

from encode_address.attention.measured import containment
from encode_address.errors import NameNotFound, TaskError
from encode_address.tasks import Text, text_source
from encode_address.tasks.mmlu import MMLU, mmlu_source
from encode_address.tasks.mqar import MQAR
from encode_address.tasks.needle import DEPTHS, Needle
from encode_address.tasks.probes import DictionaryProbes, MMLUProbes, elsewhere, reach, turn
from tests.toy_tokenizers import bundled_model, task, toy_tokenizer

PROSE = Text(
    "prose", test="The table has an entry. A model is helpful here. What is the value? None of it. " * 60, train=""
)


def with_bos(tokenizer):
    """A tokenizer that puts a first token before every text, as RecurrentGemma's does."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.bos_token_id)]
    )
    return tokenizer


@pytest.mark.parametrize("family", ["qwen", "granite", "none", "bos"])
def test_the_needle_is_where_its_span_says_in_the_final_ids(family):
    """The released code counts it without the beginning-of-sequence token and is off by one."""
    tokenizer = with_bos(toy_tokenizer("none")) if family == "bos" else toy_tokenizer(family)
    probes, _ = Needle("needle", tokenizer, None, "300,500").probes(12, 0, 0, PROSE)
    assert len({probe.labels["needle"] for probe in probes}) >= 4
    for probe in probes:
        ids, needle = probe.prompt.ids, probe.labels["needle"]
        assert tokenizer.decode([ids[p] for p in probe.prompt.span("needle")]).strip() == needle
        assert tokenizer.decode(probe.answer).strip() == needle, "the answer is the needle, word for word"
        assert tokenizer.decode([*ids, *probe.answer]).endswith(needle)
        assert (ids[0] == tokenizer.bos_token_id) == (family == "bos")
        assert tuple(tokenizer(probe.prompt.text, add_special_tokens=False)["input_ids"]) == ids
        assert probe.prompt.text.count(needle) == 1
        assert probe.repeated.text.count(needle) == 2
        assert len(probe.repeated) < 2 * len(probe.prompt)


def test_needles_are_put_after_sentences_at_their_depth():
    tokenizer = toy_tokenizer("none")
    asked = Needle("needle", tokenizer, None, "400")
    probes, others = asked.probes(20, 10, 0, PROSE)
    assert Counter(probe.labels["depth"] for probe in probes) == dict.fromkeys(DEPTHS, 4)
    for probe in [*probes, *others]:
        before, after = probe.prompt.text.split(probe.labels["needle"])
        before, after = before.removeprefix("CONTEXT\n"), after.split("\n\nQUESTION")[0]
        depth, share = probe.labels["depth"], len(before) / (len(before) + len(after))
        assert before.strip() == "" or depth == 100 or before.strip().endswith(".")
        assert share <= depth / 100 + 0.02
        assert share >= depth / 100 - 0.1
    assert asked.probes(20, 10, 0, PROSE)[0][7].prompt.ids == probes[7].prompt.ids
    assert asked.probes(20, 10, 1, PROSE)[0][7].prompt.ids != probes[7].prompt.ids


def test_a_bundled_models_needle_is_an_entry_of_its_own_words():
    model = bundled_model()
    probes, _ = Needle("needle", model.tokenizer, model.folder).probes(20, 0, 0, text_source(None, True))
    assert Counter(p.labels["length"] for p in probes) == {32: 5, 64: 5, 128: 5, 192: 5}
    for probe in probes:
        said = model.tokenizer.decode([probe.prompt.ids[p] for p in probe.prompt.span("needle")])
        assert said == probe.labels["needle"]
        assert said.split()[-2] == model.tokenizer.decode(probe.answer).strip()
        assert probe.prompt.choices.count(probe.answer[0]) == 1


def test_needle_mistakes_are_said():
    tokenizer = toy_tokenizer("none")
    with pytest.raises(NameNotFound, match="use needle"):
        Needle("needles8", tokenizer, None)
    with pytest.raises(TaskError, match="numbers of tokens with commas"):
        Needle("needle", tokenizer, None, "many")
    with pytest.raises(TaskError, match="longer --lengths"):
        Needle("needle", tokenizer, None, "5").probes(2, 0, 0, PROSE)
    with pytest.raises(TaskError, match="full stop"):
        Needle("needle", tokenizer, None, "64").probes(2, 0, 0, Text("t", "no end " * 99, ""))


def test_mqar_is_zoologys():
    model = bundled_model()
    rng, made = random.Random(0), MQAR("mqar64x8", model.tokenizer, model.folder)
    places = Counter()
    for _ in range(200):
        ids, where = made.sequence(rng)
        assert len(ids) == 64
        keys, values = ids[0:16:2], ids[1:16:2]
        assert len({*keys}) == len({*values}) == len(where) == 8
        assert {*keys} <= {*made.keys}
        assert {*values} <= {*made.values}
        assert sorted(where.values()) == list(range(8))
        for place, number in where.items():
            assert place >= 16
            assert place % 2 == 0
            assert ids[place] == keys[number]
        assert all(token == made.filler for p, token in enumerate(ids) if p >= 16 and p not in where)
        places.update(where.keys())
    assert places[16] > 3 * places[62], "near cells are drawn more often"
    probes, others = made.probes(30, 10, 0)
    assert [p.pair for p in others] == list(range(10))
    for probe in probes:
        key, value = probe.prompt.span("needle")
        assert probe.prompt.ids[key] == probe.prompt.ids[-1]
        assert probe.prompt.ids[value] == probe.answer[0]
        assert probe.repeated.ids == probe.prompt.ids[:16] + probe.prompt.ids
    with pytest.raises(TaskError, match="at least four times"):
        MQAR("mqar30x8", model.tokenizer, model.folder)
    with pytest.raises(NameNotFound, match="mqarNxD"):
        MQAR("mqar8", model.tokenizer, model.folder)
    whole = MQAR("mqar", toy_tokenizer("none"), None)
    assert not {*whole.keys} & {*whole.values}
    assert whole.filler not in whole.keys


@pytest.mark.parametrize("family", ["qwen", "granite"])
def test_a_dictionary_stated_twice(family):
    made = DictionaryProbes(task("chat4", family), toy_tokenizer(family), None)
    own = turn(toy_tokenizer(family), None)
    probes, others = made.probes(4, 4, 0)
    for probe in probes:
        text = probe.repeated.text
        body = probe.prompt.text.removeprefix(own.before).split(own.answer)[0]
        assert text.count(body) == 2
        assert text.count(own.answer) == 1
        assert text.endswith(probe.prompt.text[-10:])
        assert probe.prompt.span("needle") == probe.prompt.span(f"entry {probe.prompt.query}")
    words = {(p.prompt.keys, p.prompt.values) for p in probes}
    assert not words & {(p.prompt.keys, p.prompt.values) for p in others}


def test_spans_elsewhere_and_reach():
    made = DictionaryProbes(task("chat8"), toy_tokenizer("qwen"), None)
    for probe in made.probes(8, 1, 0)[0]:
        prompt, needle = probe.prompt, {*probe.prompt.span("needle")}
        drawn = {elsewhere(prompt, i, probe.pair) for i in range(5)}
        assert len(drawn) > 1
        for span in drawn:
            assert len(span) == len(needle)
            assert not needle & {*span}
            assert max(span) < min(prompt.span("question"))
        first, last, end = min(needle), max(needle), len(prompt) - 1
        assert reach(prompt, None) == reach(prompt, end - first + 1) == "inside"
        assert reach(prompt, end - first) == reach(prompt, end - last + 1) == "edge"
        assert reach(prompt, end - last) == "outside"


def test_mmlu_as_probes(tmp_path):
    lines = [f'"Which is {i} of the table?",red,blue,lime,steel,{"ABCD"[i % 4]}' for i in range(12)]
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "words_test.csv").write_text("\n".join(lines))
    tokenizer = toy_tokenizer("none", added=(" A", " B", " C", " D"))
    made = MMLUProbes(MMLU("mmlu0", tokenizer, mmlu_source(tmp_path)))
    probes, others = made.probes(6, 4, 0)
    assert (len(probes), len(others)) == (6, 4)
    for probe in probes:
        letter = tokenizer.decode(probe.answer).strip()
        line = tokenizer.decode([probe.prompt.ids[p] for p in probe.prompt.span("needle")])
        assert line.strip().startswith(f"{letter}.")
        assert probe.repeated is None


def test_containment_is_of_whole_words():
    needle = "The gate opens at nine."
    assert containment("It says: the gate opens at  nine!", needle) == {"contains": True, "word_recall": 1.0}
    assert containment("the gate opens at ninety", needle) == {"contains": False, "word_recall": 0.8}
    assert containment("", needle) == {"contains": False, "word_recall": 0.0}
