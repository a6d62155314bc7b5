"""The dictionary task: prompts character for character, spans, and what each pair may and may not differ in."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from encode_address.errors import NameNotFound, TaskError
from encode_address.tasks import CONFIGURATIONS, Dictionary, text_source
from encode_address.tasks.lexicon import Lexicon, Wording, lexicon_for
from encode_address.tasks.pools import PAPER_POOLS
from encode_address.tasks.prompts import Prompt
from tests.toy_tokenizers import PROSE, VARIANTS, all_split_but, bundled_model, task, toy_tokenizer

KEYS, VALUES = PAPER_POOLS["A"]["keys"], PAPER_POOLS["A"]["values"]


def differing(a: Prompt, b: Prompt) -> list[int]:
    assert len(a) == len(b)
    return [i for i in range(len(a)) if a.ids[i] != b.ids[i]]


# -- prompts, written out ------------------------------------------------------------------
QWEN_PRE = "<|im_start|>user\n"
QWEN_POST = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
CHAT8 = "Dictionary: apple=red, banana=blue, cherry=green, date=gold, elder=gray, fig=black, grape=white, lemon=orange."
QWEN_PROMPTS = {  # variant: the user's turn, the answer's beginning
    "chat4": (
        "Dictionary: apple=red, banana=blue, cherry=green, date=gold.\nQuestion: What is the value of cherry?",
        "The value of cherry is **",
    ),
    "chat8": (f"{CHAT8}\nQuestion: What is the value of cherry?", "The value of cherry is **"),
    "chat16": (
        "Dictionary: apple=red, banana=blue, cherry=green, date=gold, elder=gray, fig=black, grape=white, "
        "lemon=orange, mango=yellow, peach=amber, pear=rose, plum=lime, berry=olive, onion=azure, garlic=steel, "
        "ginger=ice.\nQuestion: What is the value of cherry?",
        "The value of cherry is **",
    ),
    "list8": (
        "Lookup table:\n* apple=red\n* banana=blue\n* cherry=green\n* date=gold\n* elder=gray\n* fig=black\n"
        "* grape=white\n* lemon=orange\nWhich value does cherry map to?",
        "The entry cherry maps to **",
    ),
    "rev8": (
        "Dictionary: red is the value of apple, blue is the value of banana, green is the value of cherry, "
        "gold is the value of date, gray is the value of elder, black is the value of fig, "
        "white is the value of grape, orange is the value of lemon.\nQuestion: What is the value of cherry?",
        "The value of cherry is **",
    ),
    "perm8": (f"{CHAT8}\nQuestion: What is the value of cherry?", "The value of cherry is **"),
    "long5": (
        f"{CHAT8}\nThe value of the table\n\nQuestion: What is the value of cherry?",
        "The value of cherry is **",
    ),
}


@pytest.mark.parametrize("variant", QWEN_PROMPTS)
def test_the_prompts_are_the_papers(variant):
    """Paper section 1.1, in the hand-written Qwen wrapper."""
    prompt = task(variant).prompt(KEYS[: task(variant).size], VALUES[: task(variant).size], query=2)
    user, answer = QWEN_PROMPTS[variant]
    assert prompt.text == QWEN_PRE + user + QWEN_POST + answer
    assert toy_tokenizer().decode(prompt.ids) == prompt.text


def test_prompts_grow_by_the_papers_token_counts():
    """Paper section 1.1: an entry is 4 tokens in chat, 5 in list, 7 in rev, plus its wording around it."""
    length = {variant: len(task(variant).swaps(1)[0].clean) for variant in VARIANTS}
    assert length["chat16"] - length["chat8"] == 2 * (length["chat8"] - length["chat4"]) == 32
    assert length["list16"] - length["list8"] == 40
    assert length["rev8"] - length["chat8"] == 24
    assert length["perm8"] == length["chat8"]


# -- draws ------------------------------------------------------------------------------------
def paper_draws(made: Dictionary, seed: int, n: int):
    """The paper's generator: one Random(seed), and per item the keys, then the values."""
    rng = random.Random(seed)
    return [(tuple(rng.sample(made.keys, made.size)), tuple(rng.sample(made.values, made.size))) for _ in range(n)]


@pytest.mark.parametrize("variant", ["chat4", "chat8", "chat16", "list8", "rev8"])
def test_the_hundred_items_are_the_papers_draws(variant):
    """Paper section 1.3: seed 0, 25 items for each configuration in turn, whatever is built from them."""
    made, places = task(variant), CONFIGURATIONS[task(variant).size]
    draws = paper_draws(made, 0, 100)
    for i, (swap, question) in enumerate(zip(made.swaps(100), made.questions(100))):
        assert (swap.clean.keys, swap.clean.values) == draws[i] == (question.host.keys, question.host.values)
        assert (swap.target, swap.distractor) == places[i // 25] == (question.donor_index, question.host_index)
    for kind in ("value", "key"):
        for i, entry in enumerate(made.entries(100, kind)):
            plain = entry.donor if kind == "value" else entry.host
            assert (plain.keys, plain.values) == draws[i]
            assert plain.query == places[i // 25][0]


def test_perm_asks_every_index_equally_often():
    swaps = task("perm8").swaps(200)
    assert [swap.target for swap in swaps] == [i // 25 for i in range(200)]
    assert all(swap.distractor != swap.target for swap in swaps)
    assert len({swap.distractor for swap in swaps}) == 8


@given(st.sampled_from(VARIANTS), st.integers(1, 40))
@settings(max_examples=20, deadline=None)
def test_configurations_are_spread_evenly_for_any_n(variant, n):
    made = task(variant)
    targets = [swap.target for swap in made.swaps(n)]
    wanted = range(8) if variant == "perm8" else [target for target, _ in made.configurations]
    counts = [targets.count(target) for target in wanted]
    assert sum(counts) == n
    assert max(counts) - min(counts) <= 1


def test_the_avoid_set_keeps_two_splits_disjoint():
    """Confirmation must see no dictionary of discovery, even where the same seed would draw it again."""
    made = task("chat4")
    seen: set = set()
    splits = [{(s.clean.keys, s.clean.values) for s in made.swaps(100, seed, seen)} for seed in (0, 0, 1)]
    assert all(len(split) == 100 for split in splits)
    assert all(not a & b for a, b in itertools.combinations(splits, 2))
    assert seen == set().union(*splits)


def test_the_first_split_has_the_same_dictionaries_with_and_without_an_avoid_set():
    plain, avoiding = (task("chat8").swaps(20, 5, seen) for seen in (None, set()))
    assert [s.clean.ids for s in plain] == [s.clean.ids for s in avoiding]


def test_a_pool_that_is_used_up_says_so():
    tokenizer = toy_tokenizer(split=all_split_but(5))
    made = Dictionary("chat4", tokenizer, lexicon_for(tokenizer))
    seen = set(itertools.product(itertools.permutations(made.keys, 4), itertools.permutations(made.values, 4)))
    spare = seen.pop()
    with pytest.raises(TaskError, match="n is too large: pool of 5 keys and 5 values"):
        made.swaps(2, avoid=seen | {spare})


@pytest.mark.parametrize("n", [0, -3])
def test_no_items_is_an_error(n):
    with pytest.raises(TaskError, match="n must be at least 1"):
        task("chat8").swaps(n)


# -- pairs ------------------------------------------------------------------------------------
cases = given(st.sampled_from(VARIANTS), st.sampled_from(["A", "B"]), st.integers(0, 2**31), st.integers(1, 9))


@cases
@settings(max_examples=60, deadline=None)
def test_value_swaps_differ_in_the_two_values_only(variant, pool, seed, n):
    made = task(variant, pool=pool)
    for number, swap in enumerate(made.swaps(n, seed)):
        t, d, clean, corrupted = swap.target, swap.distractor, swap.clean, swap.corrupted
        assert swap.pair == number
        assert differing(clean, corrupted) == sorted(clean.span(f"value {t}") + clean.span(f"value {d}"))
        assert clean.spans == corrupted.spans
        assert clean.keys == corrupted.keys
        assert (clean.values[t], clean.values[d]) == (corrupted.values[d], corrupted.values[t])
        assert clean.query == corrupted.query == t
        assert (clean.answer, corrupted.answer) == (clean.choices[t], clean.choices[d])


@cases
@settings(max_examples=60, deadline=None)
def test_question_swaps_and_their_donors(variant, pool, seed, n):
    """Same dictionary, other key; other dictionary, same key and place; and the three-way dissociation."""
    made = task(variant, pool=pool)
    for item in made.questions(n, seed):
        host, donor, other, apart = item.host, item.donor, item.other_dictionary, item.dissociation
        a, b, j = item.donor_index, item.host_index, item.shifted_index
        assert len({len(p) for p in (host, donor, other, apart)}) == 1
        assert len({a, b, j}) == 3
        # donor: the same tokens up to the question
        assert (donor.keys, donor.values) == (host.keys, host.values)
        assert (host.query, donor.query) == (b, a)
        assert min(differing(host, donor)) > host.span("question")[0]
        assert host.answer == host.choices[b] != donor.answer == host.choices[a]
        # other dictionary: the host's key, where the host has it, with another value
        assert sorted(other.keys) == sorted(host.keys)
        assert other.keys != host.keys
        assert other.query == b
        assert other.keys[b] == host.keys[b]
        assert other.answer not in host.choices
        # dissociation: key A, at an index that neither asks, with a value the host has nowhere
        assert sorted(apart.keys) == sorted(host.keys)
        assert apart.query == j
        assert apart.keys[j] == host.keys[a]
        assert apart.answer not in host.choices
        assert len({host.choices[a], host.choices[j], apart.answer, host.answer}) == 4
        if 2 * made.size <= len(made.values):
            assert not set(other.values) & set(host.values)
            assert not set(apart.values) & set(host.values)


@pytest.mark.parametrize("variant", ["chat4", "chat8", "chat16", "perm8"])
def test_donor_dictionaries_pair_no_key_with_its_own_value(variant):
    """Where the pool forces values to be used again (chat16), none may stay with its key."""
    for item in task(variant).questions(40):
        own = dict(zip(item.host.keys, item.host.values))
        for donor in (item.other_dictionary, item.dissociation):
            kept = [key for key, value in zip(donor.keys, donor.values) if own[key] == value]
            assert kept == []


@given(st.sampled_from(["chat4", "chat8", "chat16", "list8", "rev8"]), st.integers(0, 2**31), st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_entry_swaps(variant, seed, n):
    """Paper sections 1.3 c and 3.5: the value swap is patched at one of two places, the key swap at both."""
    made = task(variant)
    for item in made.entries(n, "value", seed):
        t, (d,) = (
            item.host.query,
            [i for i, v in enumerate(item.host.values) if i != item.host.query and v != item.donor.values[i]],
        )
        assert item.positions == item.host.span(f"value {t}")
        assert differing(item.host, item.donor) == sorted(item.positions + item.host.span(f"value {d}"))
        assert item.host.answer == item.donor.choices[d]
        assert item.carried == item.donor.answer == item.donor.choices[t]
        assert item.host.keys == item.donor.keys
    for item in made.entries(n, "key", seed):
        t = item.host.query
        asked = item.host.keys[t]
        d = item.donor.keys.index(asked)
        assert differing(item.host, item.donor) == sorted(item.positions)
        assert sorted(item.positions) == sorted(item.host.span(f"key {t}") + item.host.span(f"key {d}"))
        assert item.host.values == item.donor.values
        assert item.carried == item.host.choices[d] == item.donor.answer
        assert item.host.answer == item.host.choices[t]


def test_the_query_of_a_key_swapped_donor_is_the_entry_it_asks_for():
    """`Prompt.query` is the index of the entry asked for; the donor's keys are exchanged, so its key stands at d."""
    for item in task("chat8").entries(4, "key"):
        assert item.donor.choices[item.donor.query] == item.donor.answer


# -- errors -----------------------------------------------------------------------------------
@pytest.mark.parametrize("variant", ["chat", "chat7", "chat88", "dict8", "8chat", "", "chat8/", "long", "chat-8"])
def test_an_unknown_variant_says_what_there_is(variant):
    with pytest.raises(NameNotFound, match=r"unknown variant .*chat, list, rev or perm with 4, 8 or 16"):
        task(variant)


def test_an_unknown_surface_or_pool_lists_what_there_is():
    with pytest.raises(NameNotFound, match="no wording 'chat/far' for this model; it has chat, list, rev"):
        task("chat8/far")
    with pytest.raises(NameNotFound, match="unknown pool 'C': this model has A, B"):
        task("chat8", pool="C")


def test_long_needs_a_text_that_is_long_enough():
    lexicon = lexicon_for(toy_tokenizer())
    with pytest.raises(TaskError, match="long512 needs a text"):
        Dictionary("long512", toy_tokenizer(), lexicon)
    with pytest.raises(TaskError, match="text prose has 361 tokens, fewer than the 512"):
        Dictionary("long512", toy_tokenizer(), lexicon, PROSE)


def test_an_answer_of_two_tokens_is_refused():
    lexicon = Lexicon(
        {"chat": Wording("Dictionary:", " {key}={value}", ",", ".", "\nWhich is {key}? **", "{value}?")},
        PAPER_POOLS,
        "",
    )
    with pytest.raises(TaskError, match=r"answer '\w+' is not one token after .* \(2 tokens\)"):
        Dictionary("chat4", toy_tokenizer(), lexicon).swaps(1)


def test_an_answer_that_merges_with_the_prompt_is_refused():
    """The first token of the answer must not change the tokens before it."""
    tokenizer = toy_tokenizer(added=(" **iron",))
    with pytest.raises(TaskError, match="answer 'iron' is not one token"):
        Dictionary("chat8", tokenizer, lexicon_for(tokenizer)).swaps(100)


def test_a_word_that_merges_with_its_neighbour_is_refused():
    tokenizer = toy_tokenizer(added=("=iron",))
    with pytest.raises(TaskError, match="'iron' is not one token here: 1 tokens that read '=iron'"):
        Dictionary("chat8", tokenizer, lexicon_for(tokenizer)).swaps(100)


def test_donor_and_host_of_unequal_length_are_refused():
    tokenizer = toy_tokenizer(added=(" apple?",))
    made = Dictionary("chat8", tokenizer, lexicon_for(tokenizer))
    with pytest.raises(TaskError, match=r"same number of tokens; these have \[60, 61\]"):
        made.questions(100)
    assert len(made.swaps(100)) == 100  # both forms ask the same key, so these stay equally long


def test_a_difference_outside_the_exchanged_entries_is_refused():
    """Paper section 1.4: one token over two entries would let the swap leak into a third entry."""
    made = task("chat4")
    a, b = made.prompt(KEYS[:4], VALUES[:4], 0), made.prompt(KEYS[:4], (*VALUES[:3], "iron"), 0)
    with pytest.raises(TaskError, match="position 19, outside the exchanged entries"):
        made._comparable(a, b, (0, 1))
    made._comparable(a, b, (0, 3))


# -- the bundled models -------------------------------------------------------------------------
@pytest.fixture(scope="module")
def bundled():
    """The tokenizer and folder of a bundled model."""
    return bundled_model().tokenizer, bundled_model().folder


@pytest.mark.parametrize("variant", ["chat4", "chat8", "chat8/far", "chat16", "list8", "rev8", "perm8", "long64"])
def test_a_bundled_model_is_asked_in_its_own_words(bundled, variant):
    tokenizer, folder = bundled
    made = Dictionary(variant, tokenizer, lexicon_for(tokenizer, folder), text_source(None, bundled=True))
    assert made.dropped == ()
    swap, question = made.swaps(8)[5], made.questions(8)[5]
    assert tokenizer.unk_token_id not in swap.clean.ids + question.dissociation.ids
    for prompt in (swap.clean, question.donor):
        for i in range(made.size):
            (key,), (value,) = prompt.span(f"key {i}"), prompt.span(f"value {i}")
            assert tokenizer.decode([prompt.ids[key], prompt.ids[value]]) == f"{prompt.keys[i]} {prompt.values[i]}"
        assert prompt.answer == tokenizer.convert_tokens_to_ids(prompt.values[prompt.query])
    values = swap.clean.span(f"value {swap.target}") + swap.clean.span(f"value {swap.distractor}")
    assert differing(swap.clean, swap.corrupted) == sorted(values)
    assert min(differing(question.host, question.donor)) > question.host.span("question")[0]
    for kind in ("value", "key"):
        assert all(len(item.positions) == (1 if kind == "value" else 2) for item in made.entries(8, kind))
    if variant == "long64":
        assert (
            len(swap.clean)
            == len(Dictionary("chat8", tokenizer, lexicon_for(tokenizer, folder)).swaps(1)[0].clean) + 64
        )


def test_a_bundled_models_far_surface_names_another_key_last(bundled):
    tokenizer, folder = bundled
    made = Dictionary("chat8/far", tokenizer, lexicon_for(tokenizer, folder))
    for item in made.questions(8):
        for prompt in (item.host, item.donor):
            asked, other = prompt.keys[prompt.query], prompt.keys[(prompt.query + 4) % 8]
            question = tokenizer.decode([prompt.ids[p] for p in prompt.span("question")])
            assert question.index(asked) < question.index(other)


def test_a_bundled_model_lists_its_surfaces(bundled):
    tokenizer, folder = bundled
    surfaces = ("equals", "far", "gap", "is", "near", "plain")
    has = ", ".join(f"{form}{end}" for form in ("chat", "list", "rev") for end in ("", *(f"/{s}" for s in surfaces)))
    with pytest.raises(NameNotFound, match=f"it has {has}"):
        Dictionary("chat8/nowhere", tokenizer, lexicon_for(tokenizer, folder))
