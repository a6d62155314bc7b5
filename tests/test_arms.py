"""The five arms: prompts word for word, spans, answers, what pairs are, and every invariant broken on purpose."""

import dataclasses
import json
import re
from functools import cache
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import encode_address
from encode_address.errors import NameNotFound, TaskError
from encode_address.tasks.arm_records import ADDRESS, PAYLOAD, check, occurrences
from encode_address.tasks.arm_words import ARMS, arm_lexicon
from encode_address.tasks.arms import Arms
from encode_address.train.words import OTHER_TASKS, tokenizer, vocabulary
from tests.toy_tokenizers import QWEN_TEMPLATE

BUNDLED = Path(encode_address.__file__).parent / "models" / "bundled" / "tiny-gdn"
VARIANTS = ("chat4", "chat8", "chat16", "list8", "rev8", "class4", "class8")


@cache
def bundled(variant: str, pool: str = "A") -> Arms:
    own = tokenizer()
    return Arms(variant, own, arm_lexicon(own, BUNDLED), pool)


def word_tokenizer(template: str | None = None, split: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """Every word with the space before it is a token, as in a large BPE vocabulary; `split` words are unknown.

    It knows what the prose wordings and pools say: those texts are its vocabulary, with and without a space.
    """
    probe = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>")))
    probe.chat_template = template
    lexicon = arm_lexicon(probe)
    texts = [lexicon.inferred.said, *(lexicon.of_dictionary(form).said for form in ("chat", "list", "rev"))]
    texts += [*lexicon.classes, *lexicon.symbols, "given key value words marker note"]
    texts += [word for words in lexicon.classes.values() for word in words]
    texts += [word for pool in lexicon.words.pools.values() for words in pool.values() for word in words]
    words = sorted({*re.findall(r"\w+", " ".join(texts))} - {*split})
    signs = ["\n", "\n\n", ".", ",", ":", " *", "*", " ->", "=", "?", *"<|>_/"]
    pieces = ["<unk>", *words, *(f" {word}" for word in words), *signs]
    core = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?\w+|\n+| ?\*| ->|[^\w\n]"), "isolated")
    out = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")
    out.chat_template = template
    return out


@cache
def prose(variant: str, template: str | None = None) -> Arms:
    own = word_tokenizer(template)
    return Arms(variant, own, arm_lexicon(own))


# -- prompts, written out --------------------------------------------------------------------------
def test_the_bundled_dictionary_word_for_word():
    one = bundled("chat4").instances(3)[1]
    (k0, v0), (k1, v1), (k2, v2), (k3, v3) = one.table.items()
    marker = "secret" if one["control"].answer == "yes" else "hidden"
    assert one["flexible"].context == (
        f"<s> <user> Dictionary : {k0} = {v0} , {k1} = {v1} , {k2} = {v2} , {k3} = {v3} . Here : {marker} ."
    )
    given = one["supplied"].given
    notes = {
        "automatic": "tell me the next",
        "report": "repeat the same word",
        "flexible": "tell me the value",
        "control": "is there a secret",
        "supplied": f"it must be {given}",
    }
    for arm in ARMS:
        assert one[arm].instruction == f" Note : {notes[arm]} . Question : tell me the {k1} . <assistant> it is", (
            f"{arm} arm"
        )
    assert {arm: one[arm].answer for arm in ARMS if arm != "control"} == {
        "automatic": k2,
        "report": k1,
        "flexible": v1,
        "supplied": given,
    }
    assert given in (v0, v2, v3)


def test_the_bundled_class_word_for_word():
    made = bundled("class4")
    one = made.instances(3)[2]
    label = one["report"].answer
    passage = one["report"].passage.split(" , ")
    marker = "secret" if one["control"].answer == "yes" else "hidden"
    entries = " ;".join(f" - {name} : {symbol}" for name, symbol in one.table.items())
    assert one["report"].context == (
        f"<s> <user> Lookup table :{entries} . Facts : {' , '.join(passage)} . Here : {marker} ."
    )
    assert len({*passage}) == 3
    assert {*passage} < {*made.members[label]}
    assert list(one.table).index(label) == 2
    assert one["automatic"].answer in {*made.members[label]} - {*passage}
    for rival, other in one["automatic"].implied.items():
        assert other in made.members[rival]
    assert one["flexible"].answer == one.table[label]
    dummy = one["supplied"].given
    assert dummy != label
    assert one["supplied"].answer == one.table[dummy]
    assert f"number if it was {dummy} . Question : tell me it . <assistant> it is" in one["supplied"].instruction
    assert [one[arm].instruction for arm in ARMS if occurrences(label, one[arm].instruction)] == []


@pytest.mark.parametrize("template", [None, QWEN_TEMPLATE])
def test_another_model_is_asked_in_plain_english(template):
    pre, post = ("", "\n") if template is None else (
        "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )  # fmt: skip
    one = prose("chat4", template).instances(1)[0]
    (k0, v0), (k1, v1), (k2, v2), (k3, v3) = one.table.items()
    marker = "star" if one["control"].answer == "Yes" else "moon"
    assert one["flexible"].prompt.text == (
        f"{pre}Dictionary: {k0}={v0}, {k1}={v1}, {k2}={v2}, {k3}={v3}.\nMark: {marker}.\nTask: say the value that is listed "
        f"for this same key.\nKey: {k0}{post}Answer:"
    )
    one = prose("class4", template).instances(1)[0]
    entries = "\n".join(f"* {label} -> {symbol}" for label, symbol in one.table.items())
    text = one["report"].passage
    marker = "star" if one["control"].answer == "Yes" else "moon"
    assert one["report"].prompt.text == (
        f"{pre}Reference table:\n{entries}\n\nText: {text}.\nMark: {marker}.\nTask: say the name of the kind that these words are."
        f"\nGive one word.{post}Answer:"
    )


# -- what holds of every instance ---------------------------------------------------------------------
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", ["bundled", "prose"])
def test_arms_of_an_instance_are_matched(variant, family):
    made = (bundled if family == "bundled" else prose)(variant)
    instances = made.instances(24, seed=3)
    assert len({len(one[arm].prompt) for one in instances for arm in ARMS}) == 1
    unknown = made.tokenizer.unk_token_id
    for one in instances:
        prompts = [one[arm].prompt for arm in ARMS]
        spans = [{name: place for name, place in p.spans.items() if name != "given"} for p in prompts]
        assert all(some == spans[0] for some in spans)
        note = spans[0]["note"]
        for prompt in prompts[1:]:
            differ = [p for p in range(len(prompt)) if prompt.ids[p] != prompts[0].ids[p]]
            assert {*differ} <= {*note}
            assert differ
        for arm in ARMS:
            record = one[arm]
            if family == "bundled":
                assert unknown not in record.prompt.ids
            assert record.prompt.choices[record.candidates.index(record.answer)] == record.prompt.answer
            assert len(record.candidates) == round(1 / made.chance[arm])
            assert made.tokenizer.decode([record.prompt.answer]).strip() == record.answer
            assert [*record.concepts] == [ADDRESS, PAYLOAD]
            assert record.concepts[PAYLOAD].label == one.table[record.latent]


@pytest.mark.parametrize("variant", ["chat8", "rev8", "class4"])
def test_spans_name_the_words_they_cover(variant):
    made = bundled(variant)

    def says(record, name):
        return made.tokenizer.decode([record.prompt.ids[p] for p in record.prompt.span(name)])

    for one in made.instances(5):
        for arm in ARMS:
            record = one[arm]
            for i, (label, value) in enumerate(one.table.items()):
                assert (says(record, f"key {i}"), says(record, f"value {i}")) == (label, value)
                assert {*record.prompt.span(f"value {i}")} < {*record.prompt.span(f"entry {i}")}
            assert says(record, "marker") == ("secret" if one["control"].answer == "yes" else "hidden")
            assert says(record, "context") == record.context
            assert says(record, "instruction") == record.instruction.strip()
            assert says(record, "question").startswith("Question : tell me")
            assert record.prompt.span("final") == (len(record.prompt) - 1,)
            if variant == "class4":
                assert says(record, "passage") == record.passage
            else:
                assert says(record, "asked") == record.latent
        assert says(one["supplied"], "given") == one["supplied"].given
        with pytest.raises(TaskError, match="no position 'given'"):
            one["flexible"].prompt.span("given")


def test_draws_are_repeatable_spread_and_disjoint():
    made, seen = bundled("chat8"), set()
    first, again = made.instances(28, 5, seen), made.instances(28, 5)
    assert [one["flexible"].prompt.ids for one in first] == [one["flexible"].prompt.ids for one in again]
    assert [one["flexible"].prompt.query for one in first] == [i % 7 for i in range(28)]  # the last key has no next
    second = made.instances(28, 5, seen)
    assert not {one["flexible"].context for one in first} & {one["flexible"].context for one in second}
    said = [one["control"].answer for one in made.instances(200)]
    assert 70 < said.count("yes") < 130
    assert {*bundled("class4").instances(9)[8].table} != {*bundled("class4").instances(9)[7].table}


def test_pools_share_no_word():
    for variant in ("chat8", "class4"):
        a, b = bundled(variant), bundled(variant, "B")
        if variant == "chat8":
            assert not {*a.labels} & {*b.labels}
        else:
            members = [{word for words in made.members.values() for word in words} for made in (a, b)]
            assert not members[0] & members[1]


def test_a_record_is_a_line_of_json():
    record = bundled("class4").instances(1)[0]["supplied"]
    back = json.loads(json.dumps(record.as_dict()))
    assert back["condition"] == "supplied"
    assert back["context"] + back["instruction"] == record.prompt.text
    assert back["meta"]["given"] == record.given != back["latent_value"]
    assert len(back["control_token_ids"]) == 3


def test_words_of_other_tasks_that_are_used_are_in_the_vocabulary():
    known = {*vocabulary()}
    lexicon = arm_lexicon(tokenizer(), BUNDLED)
    said = f"{lexicon.inferred.said} {lexicon.of_dictionary('chat').said}".replace("{", " {").split()
    words = {word for word in said if not re.search(r"[{}]", word)}
    assert words <= known
    used = ["secret", "hidden", "next", "same", "word", "list", "repeat", "number", "correct"]
    assert {*used} == words & {*OTHER_TASKS}
    assert {*lexicon.symbols} <= {*OTHER_TASKS}
    assert {*lexicon.classes} <= known
    assert not {word for word in words if word.startswith("<reserved")}


# -- pairs -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("variant", ["chat4", "chat8", "rev8", "class4"])
def test_pairs_tell_the_address_from_the_value_carried(variant):
    made = bundled(variant)
    plain = made.instances(20, 2)
    for pair, same in zip(made.pairs(20, 2), plain):
        target, donor = pair.target, pair.donor
        assert target["flexible"].prompt.ids == same["flexible"].prompt.ids
        assert {*target.table} == {*donor.table}
        assert {*target.table.values()} == {*donor.table.values()}
        assert all(donor.table[label] != value for label, value in target.table.items())
        z, other = target["report"].latent, donor["report"].latent
        assert z != other
        assert len({target.table[z], target.table[other], donor.table[other]}) == 3
        token = made.tokenizer.convert_tokens_to_ids
        expected = {"redirected": token(target.table[other]), "kept": token(target.table[z])}
        assert dict(pair.outcomes("flexible")) == expected
        assert dict(pair.outcomes("report")) == {"redirected": token(other), "kept": token(z)}
        assert [name for name, _ in pair.outcomes("control")] == ["kept"]
        assert [name for name, _ in pair.outcomes("supplied")] == ["kept"]
        if made.family == "dictionary":
            keys = list(target.table)
            moved, kept = keys[keys.index(other) + 1], keys[keys.index(z) + 1]
            assert dict(pair.outcomes("automatic")) == {"redirected": token(moved), "kept": token(kept)}
            assert donor["automatic"].answer not in (moved, kept)
    for pair in made.pairs(20, 2, placebo=True):
        z = pair.target["report"].latent
        assert pair.donor["report"].latent == z
        assert pair.donor.table[z] != pair.target.table[z]
        assert [name for name, _ in pair.outcomes("flexible")] == ["kept"]


# -- broken on purpose -------------------------------------------------------------------------------
def broken(variant: str, arm: str, **changes) -> str:
    """What `check` says of an instance whose `arm` has these fields changed; `prompt__x` changes the prompt's x."""
    made = bundled(variant)
    one = made.instances(1)[0]
    inner = {name.removeprefix("prompt__"): value for name, value in changes.items() if name.startswith("prompt__")}
    outer = {name: value for name, value in changes.items() if not name.startswith("prompt__")}
    record = dataclasses.replace(one[arm], **outer)
    record = dataclasses.replace(record, prompt=dataclasses.replace(record.prompt, **inner))
    with pytest.raises(TaskError) as error:
        check([record if name == arm else one[name] for name in ARMS], made.wording)
    assert str(error.value).startswith(f"{one.id}-")
    assert "\n" not in str(error.value)
    return str(error.value)


def with_words(variant: str, arm: str, old: str, new: str) -> str:
    """The same, with `old` replaced by `new` in the instruction of `arm`, and its prompt made again."""
    made = bundled(variant)
    record = made.instances(1)[0][arm]
    instruction = record.instruction.replace(old, new)
    assert instruction != record.instruction
    text = record.context + instruction
    ids = tuple(made.tokenizer(text, add_special_tokens=False)["input_ids"])
    return broken(variant, arm, instruction=instruction, prompt__text=text, prompt__ids=ids)


def test_an_arm_too_few_or_twice():
    made = bundled("chat4")
    one = made.instances(1)[0]
    for arms in (ARMS[:4], (*ARMS, "report")):
        with pytest.raises(
            TaskError, match=r"chat4-0-00000-automatic: its instance has the arms .* each of the five once"
        ):
            check([one[arm] for arm in arms], made.wording)


def test_another_context():
    assert "chat4-0-00000-control: its context differs from that of" in broken("chat4", "control", context="<s>")
    assert "not its context and its instruction" in broken("chat4", "control", instruction=" it is")


def test_labels_must_be_symmetric():
    """A key that one arm alone names, and in the class family the class named by one arm."""
    made = bundled("chat4")
    one = made.instances(1)[0]
    other = list(one.table)[2]
    assert f"the label {other!r} 1 times" in with_words(
        "chat4", "flexible", "tell me the value", f"tell me the {other}"
    )
    rival = next(label for label in bundled("class4").instances(1)[0].table if label != one["report"].answer)
    assert "has the label" in with_words("class4", "control", "if secret here", f"if secret {rival}")


def test_answers_must_not_leak():
    one, two = bundled("chat4").instances(1)[0], bundled("class4").instances(1)[0]
    value, member = one["flexible"].answer, two["automatic"].answer
    assert "the label" in with_words("chat4", "flexible", "tell me the value", f"tell me the {value}")
    assert f"says the answer {member!r}" in with_words("class4", "automatic", "the next word", f"the next {member}")
    assert "says the answer" in with_words("chat4", "control", "is there a", f"is {one['control'].answer} a")
    label = two["report"].latent
    context = two["report"].context
    assert f"the passage contains {label!r}" in broken("class4", "automatic", passage=f"apple{label}s", context=context)


def test_answers_must_be_what_the_table_says():
    one = bundled("chat4").instances(1)[0]
    values, rest = one["flexible"].candidates, one["flexible"].prompt.choices
    wrong = {"answer": values[1], "prompt__answer": rest[1]}
    assert "is not what" in broken("chat4", "flexible", **wrong)
    assert "is not the table's value" in broken("chat4", "flexible", implied={}, **wrong)
    assert "is not the token that its prompt expects" in broken("chat4", "flexible", prompt__answer=rest[1])
    assert "no candidate" in broken("chat4", "report", answer="wood")
    assert "has a given word" in broken("chat4", "report", given=values[1])
    assert "has a given word" in broken("chat4", "supplied", given="")
    assert "is that of z" in broken("chat4", "supplied", given=values[0])
    assert "two of its candidates are one token" in broken("chat4", "report", prompt__choices=(rest[0],) * 4)
    concept = one["report"].concepts[ADDRESS]
    double = {**one["report"].concepts, ADDRESS: dataclasses.replace(concept, rivals=(concept.token,))}
    assert "is the token of a rival" in broken("chat4", "report", concepts=double)


def test_lengths_and_questions_must_match():
    assert "42 tokens, but chat4-0-00000-automatic has 41" in with_words(
        "chat4", "report", "repeat the", "repeat me the"
    )
    assert "its question has other tokens" in with_words("chat4", "report", "it is", "it was")


def test_a_wording_of_another_length_is_refused_when_it_is_used():
    """As in a tokenizer that splits a word of one note."""
    own = tokenizer()
    lexicon = arm_lexicon(own, BUNDLED)
    notes = {**lexicon.keyed["notes"], "report": "repeat the word"}
    short = dataclasses.replace(lexicon, keyed={**lexicon.keyed, "notes": notes})
    with pytest.raises(TaskError, match="chat4-0-00000-report: 40 tokens, but chat4-0-00000-automatic has 41"):
        Arms("chat4", own, short).instances(1)


def test_words_of_the_instructions_are_no_labels():
    """Pool B of other models has "star" and "key", which the wording uses: they would break the symmetry."""
    own = word_tokenizer()
    made = Arms("chat8", own, arm_lexicon(own), "B")
    assert {"star", "key"} <= {*made.dropped}
    assert not {"star", "key", "moon"} & {*made.labels}
    made.instances(30)


def test_a_word_of_several_tokens_is_left_out_and_too_few_are_an_error():
    own = word_tokenizer(split=("apple", "red"))
    made = Arms("chat8", own, arm_lexicon(own))
    assert {"apple", "red"} <= {*made.dropped}
    lexicon = arm_lexicon(own)
    few = dataclasses.replace(lexicon, classes=dict(list(lexicon.classes.items())[:3]))
    with pytest.raises(TaskError, match="class4 needs 4 labels and values; 3 and 9 are one token"):
        Arms("class4", own, few)


def test_unknown_names_say_what_there_is():
    own = tokenizer()
    lexicon = arm_lexicon(own, BUNDLED)
    for variant in ("chat", "perm8", "class3", "class16", "chat5", ""):
        with pytest.raises(
            NameNotFound, match=r"use chat, list or rev with 4, 8 or 16 \(chat8\), or class with 4 to 8"
        ):
            Arms(variant, own, lexicon)
    with pytest.raises(NameNotFound, match="unknown pool 'C': this model has A, B"):
        Arms("chat8", own, lexicon, "C")
    one = bundled("chat4").instances(1)[0]
    with pytest.raises(NameNotFound, match="unknown arm 'retrieve'"):
        one["retrieve"]
    with pytest.raises(TaskError, match="the control arm has no answer for"):
        one["control"].implied_token(one["report"].latent)
    with pytest.raises(TaskError, match="n must be at least 1"):
        bundled("chat4").instances(0)
