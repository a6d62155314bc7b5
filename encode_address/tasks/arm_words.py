"""The words and wordings of the five arms (`tasks.arms`): of the bundled models, and of any other.

A bundled model's are words of its frozen vocabulary. From the part that was kept for further tasks (`train.words.OTHER_TASKS`)
come "secret hidden next same word list repeat number correct" and "one" ... "ten"; of the reserved tokens none is used. The
labels of its classes are the nearest words that the vocabulary has ("forest" for trees): the tie is installed by training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from encode_address.tasks.lexicon import Lexicon, Wording, chat_wrapper, lexicon_for
from encode_address.tasks.pools import PAPER_POOLS

ARMS = ("automatic", "report", "flexible", "control", "supplied")


@dataclass(frozen=True)
class ArmWording:
    """The text of one family, in order: opening, entries, text, marker (the context); note, question (the instruction).

    `text` holds the passage of a class (`{words}`, joined by `joint`), else nothing. `notes` says per arm what to do, in equally
    many words; `{given}` is the word that the supplied arm gives. `question` is the same in every arm; `{key}` is the key asked
    for. `markers`: the word that makes the control's answer yes, and the one that makes it no. `delimited`: whether an entry's span
    holds its separator.
    """

    opening: str
    entry: str
    separator: str
    end: str
    text: str
    marker: str
    markers: tuple[str, str]
    note: str
    notes: Mapping[str, str]
    question: str
    answers: tuple[str, str]
    joint: str = ""
    delimited: bool = True

    @property
    def said(self) -> str:
        """All its texts: the words that cannot be entries."""
        parts = (self.opening, self.entry, self.text, self.marker, *self.markers, self.note, *self.notes.values())
        return " ".join((*parts, self.question, *self.answers))


@dataclass(frozen=True)
class ArmLexicon:
    """What the arms of one model are written with: its dictionaries' wordings and pools (`words`), and the arms' own.

    `keyed` and `inferred` are the wordings of the two families but for the context's table, which a dictionary takes from `words`;
    `classes` has the members of every class by its label, `symbols` what a class table holds.
    """

    words: Lexicon
    keyed: Mapping[str, Any]
    inferred: ArmWording
    classes: Mapping[str, tuple[str, ...]]
    symbols: tuple[str, ...]
    pooled: bool  # whether the members are split over the word pools of `words`

    def of_dictionary(self, form: str) -> ArmWording:
        """The wording of the dictionary family in the format `form` ("chat", "list", "rev"); NameNotFound for another."""
        table = self.words.wording(form)
        return ArmWording(
            table.opening, table.entry, table.separator, table.end, **self.keyed, delimited=table.delimited
        )


_CONTROL = "say Yes or No to whether the mark is star"
_PROSE_NOTES = {
    "dictionary": {
        "automatic": "say the key that is listed right after this key",
        "report": "say the name of the key that is asked about",
        "flexible": "say the value that is listed for this same key",
        "control": _CONTROL,
        "supplied": "suppose this key has the value {given} and say it",
    },
    "class": {
        "automatic": "say one more word of the kind that these are",
        "report": "say the name of the kind that these words are",
        "flexible": "say the letter that the table has for this kind",
        "control": _CONTROL,
        "supplied": "say the letter of the table if it were {given}",
    },
}
_PROSE_CLASSES = {
    "bird": "eagle hawk owl duck goose crow robin swan raven sparrow",
    "fish": "shark salmon trout cod tuna eel bass carp",
    "tree": "oak pine maple cedar birch willow elm spruce",
    "metal": "iron steel copper silver gold tin zinc lead brass nickel",
    "color": "red blue green black white yellow purple pink brown gray",
    "fruit": "apple banana cherry grape lemon mango peach pear plum",
    "month": "January February March April June July August October",
    "country": "France Spain Italy Japan China Brazil Egypt Canada India",
    "city": "Paris London Rome Berlin Tokyo Madrid Moscow Vienna",
    "drink": "tea coffee milk juice wine beer water soda",
}
_BUNDLED_NOTES = {
    "dictionary": {
        "automatic": "tell me the next",
        "report": "repeat the same word",
        "flexible": "tell me the value",
        "control": "is there a secret",
        "supplied": "it must be {given}",
    },
    "class": {
        "automatic": "tell me the next word",
        "report": "tell me the correct list",
        "flexible": "tell me the correct number",
        "control": "tell me if secret here",
        "supplied": "number if it was {given}",
    },
}
_BUNDLED_CLASSES = {  # members are keys and values of the bundled dictionaries, so that each word pool has half of them
    "bird": "eagle hawk owl crow robin sparrow swan goose duck heron stork raven",
    "fish": "shark salmon trout cod eel crab lobster shrimp clam squid whale seal",
    "forest": "hazel maple birch cedar willow rowan alder aspen larch poplar pine fir",
    "garden": "carrot radish turnip potato tomato pepper pumpkin celery cabbage lettuce garlic onion",
    "bread": "barley wheat rice oats maize millet rye",
    "sugar": "mango cherry pear apple plum fig peach grape melon papaya guava kiwi banana orange",
    "dog": "lion tiger bear wolf fox deer rabbit otter badger beaver",
    "mountain": "marble granite slate chalk basalt quartz",
    "light": "jade ruby opal diamond emerald sapphire topaz garnet onyx pearl coral amber",
    "door": "iron steel copper silver gold bronze brass tin lead zinc nickel chrome",
}


def arm_lexicon(tokenizer: Any, folder: Any = None) -> ArmLexicon:
    """The arms of a bundled model (`folder` has its task.json), or plain English in the tokenizer's chat wrapper, if it has one."""
    if folder is not None:
        return _bundled(lexicon_for(tokenizer, folder))
    if tokenizer.chat_template:
        words, (pre, post) = lexicon_for(tokenizer), chat_wrapper(tokenizer)
    else:
        words, pre, post = _bare(), tokenizer.bos_token or "", "\n"
    shared = {
        "marker": "\nMark: {marker}.",
        "markers": ("star", "moon"),
        "note": "\nTask: {note}.",
        "answers": ("Yes", "No"),
    }
    keyed = {
        **shared, "text": "", "notes": _PROSE_NOTES["dictionary"], "question": f"\nKey: {{key}}{post}Answer:",
    }  # fmt: skip
    inferred = ArmWording(
        f"{pre}Reference table:\n", "* {key} -> {value}", "\n", "\n", "\nText: {words}.", joint=", ",
        question=f"\nGive one word.{post}Answer:", notes=_PROSE_NOTES["class"], **shared,
    )  # fmt: skip
    return ArmLexicon(words, keyed, inferred, _split(_PROSE_CLASSES), tuple("KQRTXZMVW"), pooled=False)


def _bundled(words: Lexicon) -> ArmLexicon:
    shared = {
        "marker": " Here : {marker} .",
        "markers": ("secret", "hidden"),
        "note": " Note : {note} .",
        "answers": ("yes", "no"),
    }
    keyed = {
        **shared, "text": "", "notes": _BUNDLED_NOTES["dictionary"],
        "question": " Question : tell me the {key} . <assistant> it is",
    }  # fmt: skip
    inferred = ArmWording(
        "<s> <user> Lookup table :", " - {key} : {value}", " ;", " .", " Facts : {words} .", joint=" , ",
        question=" Question : tell me it . <assistant> it is", notes=_BUNDLED_NOTES["class"], **shared,
    )  # fmt: skip
    symbols = tuple(["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"])
    return ArmLexicon(words, keyed, inferred, _split(_BUNDLED_CLASSES), symbols, pooled=True)


def _bare() -> Lexicon:
    """The paper's dictionaries without a chat wrapper, of which the arms use the table alone."""
    tables = {
        "chat": Wording("Dictionary:", " {key}={value}", ",", ".", "", ""),
        "list": Wording("Lookup table:\n", "* {key}={value}", "\n", "\n", "", ""),
        "rev": Wording("Dictionary:", " {value} is the value of {key}", ",", ".", "", "", delimited=False),
    }
    return Lexicon(tables, PAPER_POOLS, "\n")


def _split(classes: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    return {label: tuple(members.split()) for label, members in classes.items()}
