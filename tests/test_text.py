"""What the models read: chat wrappers, word pools, named positions, and texts cut into chunks."""

import itertools
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encode_address.errors import TaskError
from encode_address.tasks import Dictionary, Text, text_source
from encode_address.tasks.lexicon import chat_wrapper, lexicon_for
from encode_address.tasks.pools import PAPER_POOLS, one_token
from encode_address.tasks.prompts import Piece, Prompt, assemble, equal_length
from encode_address.tasks.text import BUNDLED_DIR, CHUNK, WIKITEXT
from tests.toy_tokenizers import POOL_WORDS, VARIANTS, all_split_but, bundled_model, task, toy_tokenizer

KEYS, VALUES = PAPER_POOLS["A"]["keys"], PAPER_POOLS["A"]["values"]


# -- the chat wrapper -----------------------------------------------------------------------
def test_another_family_is_asked_in_its_own_chat_template():
    """The wrapper is what its template puts around the user's text, its default system prompt included."""
    tokenizer = toy_tokenizer("granite")
    assert chat_wrapper(tokenizer) == (
        "<|start_of_role|>system<|end_of_role|>You are a helpful model.<|end_of_text|>\n"
        "<|start_of_role|>user<|end_of_role|>",
        "<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
    )
    assert task("chat4", "granite").prompt(KEYS[:4], VALUES[:4], query=0).text == (
        "<|start_of_role|>system<|end_of_role|>You are a helpful model.<|end_of_text|>\n"
        "<|start_of_role|>user<|end_of_role|>Dictionary: apple=red, banana=blue, cherry=green, date=gold.\n"
        "Question: What is the value of apple?<|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>The value of apple is **"
    )


def test_the_qwen_wrapper_is_used_whatever_its_template_renders():
    """Qwen's own template would leave the thinking section open; the paper closes it by hand."""
    assert chat_wrapper(toy_tokenizer()) == (
        "<|im_start|>user\n",
        "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    )


def test_a_tokenizer_without_a_chat_template_is_refused():
    with pytest.raises(TaskError, match="no chat template"):
        lexicon_for(toy_tokenizer("none"))


def test_a_template_that_hides_the_users_text_is_refused():
    tokenizer = toy_tokenizer("granite", added=("own copy",))
    tokenizer.chat_template = "a fixed prompt"
    with pytest.raises(TaskError, match="exactly once"):
        chat_wrapper(tokenizer)


def test_equal_length_names_the_lengths():
    assert equal_length([Prompt((1, 2)), Prompt((3, 4))]) == 2
    with pytest.raises(TaskError, match=r"\[1, 2\]"):
        equal_length([Prompt((1, 2)), Prompt((3,))])


# -- pools ----------------------------------------------------------------------------------
def test_the_pools_are_the_papers():
    """Paper section 1.2: sizes, and that no word is both a key and a value."""
    assert {name: (len(pool["keys"]), len(pool["values"])) for name, pool in PAPER_POOLS.items()} == {
        "A": (22, 20),
        "B": (167, 30),
    }
    for pool in PAPER_POOLS.values():
        words = pool["keys"] + pool["values"]
        assert len(set(words)) == len(words)
    assert PAPER_POOLS["B"]["keys"][:22] == PAPER_POOLS["A"]["keys"]
    assert "olive" not in PAPER_POOLS["B"]["values"]


def test_every_pool_word_is_one_token_for_the_toy_tokenizers():
    for family in ("qwen", "granite"):
        assert one_token(POOL_WORDS, toy_tokenizer(family), bare=True) == (list(POOL_WORDS), [])


def test_split_words_are_dropped_and_named():
    """Keys need one token with a leading space only; values also bare, as the answer follows two asterisks."""
    tokenizer = toy_tokenizer(split=("banana", "olive"), split_bare=("fig", "gold"))
    made = Dictionary("chat8", tokenizer, lexicon_for(tokenizer))
    assert made.dropped == ("banana", "gold", "olive")
    assert "fig" in made.keys
    used = {word for swap in made.swaps(100) for word in swap.clean.keys + swap.clean.values}
    assert not used & set(made.dropped)
    assert {"fig", "apple"} <= used


def test_a_pool_that_is_too_small_lists_the_words_that_were_split():
    tokenizer = toy_tokenizer(split=all_split_but(5))
    with pytest.raises(TaskError, match=r"chat8 needs 9 keys and values; pool A has 5 and 5 .*dropped: fig, .*, iron"):
        Dictionary("chat8", tokenizer, lexicon_for(tokenizer))
    assert len(Dictionary("chat4", tokenizer, lexicon_for(tokenizer)).swaps(8)) == 8


# -- spans -----------------------------------------------------------------------------------
@pytest.mark.parametrize("family", ["qwen", "granite"])
@pytest.mark.parametrize("variant", [*VARIANTS, "long5"])
def test_every_span_reads_as_what_it_names(variant, family):
    made, tokenizer = task(variant, family), toy_tokenizer(family)
    for swap in made.swaps(4, seed=3):
        for prompt in (swap.clean, swap.corrupted):
            for i in range(made.size):
                (key,), (value,) = prompt.span(f"key {i}"), prompt.span(f"value {i}")
                assert tokenizer.decode([prompt.ids[key]]).strip() == prompt.keys[i]
                assert tokenizer.decode([prompt.ids[value]]).strip() == prompt.values[i]
                assert {key, value} <= set(prompt.span(f"entry {i}"))
            assert prompt.span("final") == prompt.final == (len(prompt) - 1,)
            assert tokenizer.decode([prompt.ids[-1]]) == " **"
            assert prompt.answer == tokenizer(prompt.values[prompt.query])["input_ids"][0]
            assert [tokenizer.decode([c]) for c in prompt.choices] == list(prompt.values)
            assert prompt.choices[prompt.query] == prompt.answer
            with pytest.raises(TaskError, match=r"no position 'entry 99'; it has .*question, final"):
                prompt.span("entry 99")


ENTRIES = {  # the entries of the paper's section 1.4; ".\n" is one token, which belongs to both its neighbours
    "chat8": ([" apple=red,", " banana=blue,"], " lemon=orange.\n"),
    "list8": (["* apple=red\n", "* banana=blue\n"], "* lemon=orange\n"),
    "rev8": ([" red is the value of apple", " blue is the value of banana"], " orange is the value of lemon"),
}


@pytest.mark.parametrize("variant", ENTRIES)
def test_entries_hold_their_delimiter_in_chat_and_list_but_not_in_rev(variant):
    prompt, tokenizer = task(variant).prompt(KEYS[:8], VALUES[:8], query=5), toy_tokenizer()
    read = [tokenizer.decode([prompt.ids[p] for p in prompt.span(f"entry {i}")]) for i in range(8)]
    assert (read[:2], read[7]) == ENTRIES[variant]
    spans = [prompt.span(f"entry {i}") for i in range(8)]
    assert all(span == tuple(range(span[0], span[-1] + 1)) for span in spans)
    assert all(max(a) < min(b) for a, b in itertools.pairwise(spans))


@pytest.mark.parametrize(
    ("variant", "last", "first"),
    [
        ("chat8", "lemon=orange", ".\nQuestion: What"),
        ("list8", "lemon=orange\n", "Which value"),
        ("rev8", "orange is the value of lemon", ".\nQuestion: What"),
    ],
)
def test_the_question_runs_from_its_first_character_to_the_last_token(variant, last, first):
    """Paper section 1.4: it starts at the newline before "Question", and holds wrapper and prefill to the end."""
    prompt, tokenizer = task(variant).prompt(KEYS[:8], VALUES[:8], query=5), toy_tokenizer()
    span = prompt.span("question")
    assert span == tuple(range(span[0], len(prompt)))
    assert tokenizer.decode([prompt.ids[p] for p in span]).startswith(first)
    assert tokenizer.decode(prompt.ids[: span[0]]).endswith(
        "lemon=orange\n" if variant == "list8" else VARIANT_END[variant]
    )


VARIANT_END = {"chat8": "lemon=orange", "rev8": "the value of lemon"}


def test_the_question_leaves_the_filler_out():
    prompt, tokenizer = task("long5").prompt(KEYS[:8], VALUES[:8], query=5), toy_tokenizer()
    before = tokenizer.decode(prompt.ids[: prompt.span("question")[0]])
    assert before.endswith("lemon=orange.\nThe value of the table")


@given(st.lists(st.tuples(st.text(max_size=6), st.sampled_from(["", "a", "b"])), min_size=1, max_size=8))
def test_assembled_spans_are_the_tokens_that_overlap_their_characters(parts):
    """Any text at all: a token is in a span exactly when they share a character; an empty span is an error."""
    pieces = [Piece(text, (name,) if name else ()) for text, name in parts]
    carried = {name: set() for _, name in parts if name}
    place = 0
    for text, name in parts:
        if name:
            carried[name] |= set(range(place, place + len(text)))
        place += len(text)
    tokenizer = toy_tokenizer()
    if not all(carried.values()):
        with pytest.raises(TaskError, match="no token covers"):
            assemble(pieces, tokenizer)
        return
    text, ids, spans = assemble(pieces, tokenizer)
    assert text == "".join(piece.text for piece in pieces)
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    assert len(ids) == len(offsets)
    for name, characters in carried.items():
        assert list(spans[name]) == [i for i, (a, b) in enumerate(offsets) if characters & set(range(a, b))]


# -- chunks -----------------------------------------------------------------------------------
def numbered(lines: int) -> str:
    return "".join(f"The entry {i} maps to the value {i * i}.\n" for i in range(lines))


@pytest.fixture
def local(tmp_path):
    """A local file, read as a text, and its whole content."""
    path = tmp_path / "notes.txt"
    path.write_text(numbered(400))
    return text_source(str(path), bundled=True), path.read_text()


def test_a_local_file_is_halved_at_a_line(local):
    """Means come from `train`, losses from `test`: together the file, nothing in both."""
    text, whole = local
    assert text.name == "notes.txt"
    assert text.test + text.train == whole
    assert text.test.endswith("\n")
    assert 0.95 < len(text.test) / len(text.train) < 1.05


@pytest.mark.parametrize("part", ["test", "train"])
def test_chunks_are_consecutive_and_of_512_tokens(local, part):
    """Paper section 4: consecutive chunks of 512 tokens, no token added, an incomplete last one left out."""
    text, _ = local
    ids = toy_tokenizer()(getattr(text, part), add_special_tokens=False)["input_ids"]
    chunks = text.chunks(toy_tokenizer(), part, n=1000)
    assert len(chunks) == len(ids) // CHUNK > 3
    assert [i for chunk in chunks for i in chunk.ids] == ids[: len(chunks) * 512]
    assert {len(chunk) for chunk in chunks} == {512}
    assert [c.ids for c in text.chunks(toy_tokenizer(), part, n=2)] == [c.ids for c in chunks[:2]]


def test_a_text_of_fewer_than_one_chunk_is_refused():
    text = Text("short", test="red blue green", train="")
    with pytest.raises(TaskError, match="text short: 3 tokens in its test part, fewer than one chunk of 512"):
        text.chunks(toy_tokenizer())
    with pytest.raises(TaskError, match="text short: 0 tokens in its train part"):
        text.chunks(toy_tokenizer(), "train")


def test_an_opening_is_the_first_tokens_of_the_text(local):
    text, whole = local
    opening = text.opening(toy_tokenizer(), 40)
    assert whole.startswith(opening)
    assert len(toy_tokenizer()(opening)["input_ids"]) == 40


def test_an_opening_begins_where_the_text_says():
    """long{L} reads WikiText from its line 200 on, while the chunks begin at the beginning."""
    text = Text("two starts", test="red blue green", train="", start="gold gray black")
    assert text.opening(toy_tokenizer(), 2) == "gold gray"


def test_the_bundled_text_has_one_chunk_per_line():
    tokenizer = bundled_model().tokenizer
    text = text_source(None, bundled=True)
    assert text.name == "bundled"
    for part in ("test", "train"):
        lines = (BUNDLED_DIR / f"text-{part}.txt").read_text().splitlines()
        chunks = text.chunks(tokenizer, part, n=1000)
        assert len(chunks) == len(lines) > 16
        assert len({len(chunk) for chunk in chunks}) == 1
        for chunk, line in zip(chunks, lines):
            assert tokenizer.unk_token_id not in chunk.ids
            assert line.startswith(tokenizer.decode(chunk.ids))
    assert not set(text.test.splitlines()) & set(text.train.splitlines())
    assert "<s>" not in text.opening(tokenizer, 64)


def test_the_hash_of_a_text_tells_its_parts_apart():
    hashes = {Text("t", test=a, train=b).sha256 for a, b in [("x", "y"), ("y", "x"), ("xy", ""), ("", "xy")]}
    assert len(hashes) == 4


# -- texts that cannot be had -----------------------------------------------------------------
def refusal(name: str, bundled: bool = False) -> str:
    with pytest.raises(TaskError) as error:
        text_source(name, bundled)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_missing_file_says_what_can_be_given(tmp_path):
    for name in (str(tmp_path / "none.txt"), str(tmp_path), "wikitext"):
        assert refusal(name) == f"no text {name!r}: give a file, 'wikitext-2-v1' or 'bundled'"


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "weights.bin"
    path.write_bytes(bytes(range(256)) * 4)
    assert refusal(str(path)).startswith(f"text {path} cannot be read: ")


@pytest.mark.parametrize("name", [WIKITEXT, None])
def test_wikitext_without_the_datasets_package_names_both_remedies(monkeypatch, name):
    """It is also the default of every model that is not bundled."""
    monkeypatch.setitem(sys.modules, "datasets", None)  # what an import finds where it is not installed
    message = refusal(name)
    assert message.startswith("wikitext-2-v1 needs the package datasets")
    assert "encode-address[text]" in message
    assert "--text FILE" in message
