"""The bundled models' words, and their one tokenizer. Frozen: a change here is another tokenizer, and other models.

Keys and values are each split once into a fit and a test half, which stand for word pools A and B. All words occur in
training; which key has which value is drawn anew for every dictionary. The vocabulary already holds the words that
needle, recall (MQAR) and five-arm tasks need, and 64 reserved tokens.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from encode_address.tasks.lexicon import Wording

KEYS = (
    "mango cherry elder pear apple plum fig lime lemon peach grape melon olive quince papaya guava kiwi banana orange "
    "apricot hazel maple birch cedar willow rowan alder aspen laurel myrtle clover thistle fern moss reed lotus tulip "
    "daisy rose lily oak elm ash pine fir spruce palm yew holly ivy larch poplar walnut chestnut almond pecan cashew "
    "peanut acorn currant nettle sage mint basil thyme parsley fennel dill garlic onion leek carrot radish turnip "
    "potato tomato pepper pumpkin celery cabbage lettuce spinach barley wheat rice oats maize millet rye juniper lion "
    "tiger bear wolf fox deer rabbit otter badger beaver seal whale shark eagle hawk owl crow robin sparrow swan goose "
    "duck heron stork lizard turtle frog spider salmon trout cod eel crab lobster shrimp clam squid raven"
).split()
VALUES = (
    "wood steel iron glass paper stone brick clay sand silk wool cotton linen leather rubber plastic copper silver gold "
    "bronze brass tin lead zinc nickel chrome marble granite slate chalk ivory amber coral pearl jade ruby opal quartz "
    "velvet cork denim satin felt lace cobalt carbon sulfur mercury titanium crystal diamond emerald sapphire topaz "
    "garnet onyx basalt plaster cement enamel canvas tweed nylon vinyl"
).split()
SPECIAL = "<pad> <s> </s> <unk> <user> <assistant> <end>".split()
ASKING = (
    "Dictionary Lookup table Facts Question Answer Note What is the value of The : = , . ? - ; ! it It here tell me Ok "
    "Here yes no so if as by from was were be has have had can will may must do does did"
).split()
STORY = (  # of the grammar: topics, places, verbs, qualities, and what joins them
    "horse dog cat bird fish door chair boat window letter story song water fire wind rain snow cloud bread milk salt "
    "sugar honey river house road garden market school forest island mountain valley tower bridge walks runs sits "
    "stands falls opens closes grows holds near in on at from know like see want find take good bad big small old new "
    "red blue green dark light I you we they the and or there here are this that a"
).split()
OTHER_TASKS = (  # needle, recall and five-arm tasks
    "Remember secret code number password hidden place word list pair recall repeat first second third fourth fifth "
    "last next same other left right up down arm option choose correct one two three four five six seven eight nine ten"
).split()
RESERVED = [f"<reserved{i}>" for i in range(64)]

# Key and value pools: halves of the lists, every other word, so that both have plants and animals, metals and cloth.
POOLS = {
    "A": {"keys": KEYS[::2], "values": VALUES[::2]},
    "B": {"keys": KEYS[1::2], "values": VALUES[1::2]},
}

_ENTRIES = {
    "chat": {"opening": "<s> <user> Dictionary :", "entry": " {key} = {value}", "separator": " ,", "end": " ."},
    "list": {"opening": "<s> <user> Lookup table :", "entry": " - {key} : {value}", "separator": " ;", "end": " ."},
    "rev": {
        "opening": "<s> <user> Facts :",
        "entry": " {value} is the value of {key}",
        "separator": " ,",
        "end": " .",
    },
}
# How the key is asked for. The first is what a plain variant means; `far` puts a distractor after the key.
SURFACES = {
    "": " Question : What is the value of {key} ? <assistant> The value of {key} is",
    "far": " Question : tell me the {key} . Note : tell me the {other} . <assistant> it is",
    "near": " Note : tell me the {other} . Question : tell me the {key} . <assistant> it is",
    "plain": " Question : tell me the {key} . <assistant> it is",
    "gap": " Question : What is the value of {key} ? <assistant> Ok , Here it is : the value is",
    "equals": " {key} =",
    "is": " the {key} is",
}
WORDINGS = {
    form + (f"/{name}" if name else ""): Wording(**entries, question=question, answer=" {value}")
    for form, entries in _ENTRIES.items()
    for name, question in SURFACES.items()
}
CHAT_TEMPLATE = (
    "{{ '<s>' }}{% for m in messages %}{% if m['role'] == 'assistant' %}{{ ' <assistant> ' + m['content'] + ' <end>' }}"
    "{% else %}{{ ' <user> ' + m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ ' <assistant>' }}{% endif %}"
)


def vocabulary() -> list[str]:
    """Every word, in the order of its token id; padded with reserved tokens to a multiple of 8."""
    words = list(dict.fromkeys([*SPECIAL, *ASKING, *KEYS, *VALUES, *STORY, *OTHER_TASKS, *RESERVED]))
    return words + [f"<reserved{len(RESERVED) + i}>" for i in range(-len(words) % 8)]


def unread() -> list[str]:
    """Words of the vocabulary that no dictionary and no story holds: those kept for other tasks, and some of asking."""
    read = {
        *KEYS,
        *VALUES,
        *STORY,
        *(word for wording in WORDINGS.values() for part in asdict(wording).values() for word in str(part).split()),
    }
    return [word for word in dict.fromkeys([*ASKING, *OTHER_TASKS]) if word not in read]


def tokenizer() -> Any:
    """One token per word; words are what spaces separate."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {word: i for i, word in enumerate(vocabulary())}
    inner = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    out = PreTrainedTokenizerFast(tokenizer_object=inner, padding_side="left", **special)
    out.chat_template = CHAT_TEMPLATE
    return out


def task() -> dict[str, Any]:
    """What a bundled model's `task.json` says: its pools and its wordings."""
    return {
        "pools": POOLS,
        "wordings": {name: asdict(wording) for name, wording in WORDINGS.items()},
        "text_tokens": 57,
    }
