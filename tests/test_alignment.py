"""Tokens of two tokenizers that cover the same characters: toy tokenizers of the paper's two families, and split words."""

from __future__ import annotations

import pytest

from encode_address.cross.alignment import Alignment, align, align_all, report, segments
from encode_address.errors import TaskError
from encode_address.tasks import Dictionary, Prompt
from encode_address.tasks.lexicon import chat_wrapper, lexicon_for
from tests.toy_tokenizers import VARIANTS, bundled_model, task, toy_tokenizer

KEYS, VALUES = ("apple", "grape", "lemon", "mango", "peach", "pear", "plum", "fig"), ("red", "blue", "green", "gold", "gray", "black", "white", "rose")  # fmt: skip


def asked(variant: str, tokenizer) -> Prompt:
    made = Dictionary(variant, tokenizer, lexicon_for(tokenizer))
    return made.prompt(KEYS[: made.size], VALUES[: made.size], 1)


def characters(prompt: Prompt, tokenizer, position: int) -> str:
    start, end = tokenizer(prompt.text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"][
        position
    ]
    return prompt.text[start:end]


@pytest.mark.parametrize("variant", [v for v in VARIANTS if "16" not in v])
def test_two_wrappers_of_one_vocabulary_align_but_for_the_wrappers(variant):
    qwen, granite = toy_tokenizer("qwen"), toy_tokenizer("granite")
    a, b = asked(variant, qwen), asked(variant, granite)
    assert a.text != b.text
    found = align(a, qwen, b, granite)
    assert found.complete
    assert len(found) < min(len(a), len(b))
    for i, j in zip(found.a, found.b):
        assert characters(a, qwen, i) == characters(b, granite, j)
    for name in ("key 0", "value 3", "entry 2", "final"):
        assert [found.b[found.a.index(p)] for p in a.span(name)] == list(b.span(name))
    wrapper = {
        p for p in range(len(b)) if any(s in characters(b, granite, p) for s in ("<|", "system", "helpful", "user"))
    }
    assert wrapper
    assert wrapper.isdisjoint(found.b)
    assert max(found.a) == len(a) - 1  # the assistant's opening aligns too


def test_words_that_one_tokenizer_splits_do_not_align_and_are_counted():
    plain, splits = toy_tokenizer("qwen"), toy_tokenizer("granite", split=("Dictionary", "Question"))
    a, b = asked("chat8", plain), asked("chat8", splits)
    found = align(a, plain, b, splits)
    assert not found.complete
    assert found.inside[1] > found.inside[0] > len(found)
    lost = {characters(a, plain, p) for p in range(len(a))} - {characters(a, plain, p) for p in found.a}
    assert {"Dictionary", "Question"} <= {text.strip() for text in lost}
    told = report([found, found])
    assert told["prompts"] == 2
    assert told["aligned_tokens"] == len(found)
    assert told["host_share"] == len(found) / found.inside[1] < told["donor_share"] < 1
    assert (told["donor_tokens"], told["host_tokens"], told["complete"]) == (len(a), len(b), False)


def test_one_tokenizer_aligns_with_itself_completely_wrapper_apart():
    tokenizer = toy_tokenizer("qwen")
    prompt = asked("rev8", tokenizer)
    found = align(prompt, tokenizer, prompt, tokenizer)
    assert found.a == found.b
    assert found.complete
    before, _ = chat_wrapper(tokenizer)
    assert found.a[0] == len(tokenizer(before, add_special_tokens=False)["input_ids"])


def test_a_bundled_models_own_wrapper_is_known():
    model = bundled_model()
    prompt = Dictionary("chat8", model.tokenizer, lexicon_for(model.tokenizer, model.folder)).questions(1)[0].host
    first, last = segments(prompt.text, model.tokenizer)
    assert prompt.text[slice(*first)].startswith("Dictionary :")
    assert prompt.text[slice(*last)].startswith("The value of")
    found = align(prompt, model.tokenizer, prompt, model.tokenizer)
    assert found.complete
    assert sorted({*range(len(prompt))} - {*found.a}) == [0, 1, list(prompt.ids).index(model.tokenizer.convert_tokens_to_ids("<assistant>"))]  # fmt: skip


def test_a_text_without_a_wrapper_is_one_segment():
    tokenizers = [toy_tokenizer("none"), toy_tokenizer("granite", split=("value",))]
    text = "The value of the table is the entry"
    pair = [Prompt(tuple(t(text, add_special_tokens=False)["input_ids"]), text=text) for t in tokenizers]
    (found,) = align_all([tuple(pair)], *tokenizers)
    assert segments(text, tokenizers[0]) == [(0, len(text))]
    assert len(found) == found.inside[0] - 1
    assert found.inside[0] == len(pair[0])


def test_what_does_not_share_its_text_is_refused():
    qwen, granite = toy_tokenizer("qwen"), toy_tokenizer("granite")
    with pytest.raises(TaskError, match="do not share their text"):
        align(asked("chat8", qwen), qwen, asked("list8", granite), granite)
    mine = task("chat8").questions(1)[0].host
    with pytest.raises(TaskError, match="not what its tokenizer makes"):
        align(mine, qwen, Prompt(mine.ids[:-1], text=mine.text), qwen)


def test_nothing_to_report_is_zero():
    assert report([])["donor_share"] == 0.0
    assert Alignment((), (), (0, 0), (3, 3)).complete
