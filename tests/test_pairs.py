"""The same dictionaries for two models: words, splits, draws, wrappers, and what is said when too little is shared."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from encode_address.cross.pairs import Pairs, text_pairs
from encode_address.errors import TaskError
from encode_address.tasks import Text
from tests.toy_tokenizers import all_split_but, bundled_model, toy_tokenizer


def model(family: str, **changes) -> SimpleNamespace:
    """As much of a model as a task needs: the paper's words and wording for a toy tokenizer."""
    return SimpleNamespace(name=f"a {family}", tokenizer=toy_tokenizer(family, **changes), folder=None)


QWEN, GRANITE = model("qwen"), model("granite")


def keys_of(prompts) -> set[str]:
    return {key for prompt in prompts for key in prompt.keys}


def test_both_read_the_same_dictionary_in_their_own_wrapper():
    pairs = Pairs(QWEN, GRANITE, "chat8")
    for both in pairs.fit(20):
        donor, host = both.donor, both.host
        assert (donor.keys, donor.values, donor.query) == (host.keys, host.values, host.query)
        assert donor.query == both.index
        assert "<|im_start|>" in donor.text
        assert "<|start_of_role|>" in host.text
        assert host.text.endswith(f"The value of {host.keys[both.index]} is **")
    assert {both.index for both in pairs.fit(100)} == set(range(8))


def test_the_questions_ask_a_and_b_of_the_same_dictionary_in_the_papers_places():
    questions = Pairs(QWEN, GRANITE, "list8").questions(40)
    assert {(q.donor_index, q.host_index) for q in questions} == {(2, 5), (5, 2), (1, 6), (6, 1)}
    for q in questions:
        assert q.donor.query == q.host_asks_a.query == q.donor_index
        assert q.donor_asks_b.query == q.host.query == q.host_index
        assert len({p.keys for p in (q.donor, q.donor_asks_b, q.host, q.host_asks_a)}) == 1
        assert len(q.host) == len(q.host_asks_a)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("models", ["paper", "bundled"])
def test_no_test_key_is_in_a_disjoint_fit_and_every_one_may_be_in_a_shared(models, seed):
    two = (QWEN, GRANITE) if models == "paper" else (bundled_model(), bundled_model())
    apart, shared = (Pairs(*two, "chat8", keys=keys, seed=seed) for keys in ("disjoint", "shared"))
    test = keys_of(q.host for q in apart.questions(100)) | keys_of(b.host for b in apart.test(100))
    fitted = keys_of(b.host for b in apart.fit(200)) | keys_of(b.host for b in apart.fresh(100))
    assert test.isdisjoint(fitted)
    assert test <= keys_of(b.host for b in shared.fit(400))
    assert [q.host.ids for q in apart.questions(20)] == [q.host.ids for q in shared.questions(20)]  # one test for both
    assert apart.words.fit_values == shared.words.fit_values


def test_seed_0_of_models_with_two_pools_splits_by_pool_and_others_redraw():
    gdn = bundled_model()
    first, second = Pairs(gdn, gdn, "chat8", seed=0).words, Pairs(gdn, gdn, "chat8", seed=1).words
    assert {*first.test_keys} == {*Pairs(gdn, gdn, "chat8", pool="A").host.keys}
    assert set(first.test_values).isdisjoint(first.fit_values)
    assert {*first.test_keys} != {*second.test_keys}
    assert {*first.test_keys, *first.fit_keys} == {*second.test_keys, *second.fit_keys}
    assert len(second.test_keys) == len(second.fit_keys) == 64


def test_the_papers_pool_is_halved_by_the_seed_and_values_serve_both():
    words = [Pairs(QWEN, GRANITE, "chat8", seed=seed).words for seed in (0, 1)]
    assert (len(words[0].fit_keys), len(words[0].test_keys)) == (83, 84)
    assert words[0].fit_keys != words[1].fit_keys
    assert words[0].fit_values == words[0].test_values


def test_draws_depend_on_the_seed_alone_and_the_sets_differ():
    one, again, other = (Pairs(QWEN, GRANITE, "chat8", seed=seed) for seed in (0, 0, 1))
    assert [b.donor.ids for b in one.fit(5)] == [b.donor.ids for b in again.fit(5)]
    assert [b.donor.ids for b in one.fit(5)] == [b.donor.ids for b in one.fit(50)[:5]]
    assert [b.donor.ids for b in one.fit(5)] != [b.donor.ids for b in other.fit(5)]
    assert {b.host.ids for b in one.fit(50)}.isdisjoint(b.host.ids for b in one.fresh(50))


def test_fewer_distinct_keys_are_nested():
    pairs = Pairs(QWEN, GRANITE, "chat8")
    few, more = (keys_of(b.host for b in pairs.fit(200, distinct)) for distinct in (10, 20))
    assert (len(few), len(more)) == (10, 20)
    assert few < more < {*pairs.words.fit_keys}
    for distinct in (7, 84):
        with pytest.raises(TaskError, match=f"{distinct} distinct fit keys, of 8 to 83"):
            pairs.fit(2, distinct)


def test_templates_of_one_seed_split_the_words_alike():
    assert Pairs(QWEN, GRANITE, "chat8", seed=2).words == Pairs(QWEN, GRANITE, "list8", seed=2).words


def test_models_that_read_alike_share_one_rendering():
    gdn = bundled_model()
    both = Pairs(gdn, gdn, "chat8").fit(1)[0]
    assert both.donor is both.host


def test_only_words_that_both_have_are_used():
    lacking = model("granite", split=("lion", "tiger", "silver"))
    words = Pairs(QWEN, lacking, "chat8").words
    used = {*words.fit_keys, *words.test_keys, *words.fit_values}
    assert used.isdisjoint({"lion", "tiger", "silver"})
    assert len(words.fit_keys) + len(words.test_keys) == 165


def test_too_few_shared_words_are_listed():
    poor = model("granite", split=all_split_but(12, "B"))
    with pytest.raises(
        TaskError, match=r"a qwen and a granite share 12 keys, 13 values .* Missing in one of them: keys: .*lion"
    ):
        Pairs(QWEN, poor, "chat8")


@pytest.mark.parametrize(("changes", "said"), [({"keys": "some"}, "no split of keys 'some'"), ({"variant": "chat9"}, "unknown variant")])  # fmt: skip
def test_bad_names_are_refused(changes, said):
    from encode_address.errors import EncodeAddressError

    with pytest.raises(EncodeAddressError, match=said):
        Pairs(QWEN, GRANITE, **{"variant": "chat8", **changes})
    with pytest.raises(TaskError, match="at least 1, not 0"):
        Pairs(QWEN, GRANITE, "chat8").fit(0)


def test_lines_of_text_are_read_by_both():
    text = Text("lines", test="x", train="The value of the table\n\nx\nthe entry is the value\n")
    found = text_pairs(QWEN, GRANITE, text, 5)
    assert [a.text for a, _ in found] == ["The value of the table", "the entry is the value"]
    assert all(QWEN.tokenizer.decode(a.ids) == GRANITE.tokenizer.decode(b.ids) for a, b in found)
    with pytest.raises(TaskError, match="has no line in its train part"):
        text_pairs(QWEN, GRANITE, Text("empty", test="x", train="\n"), 5)
