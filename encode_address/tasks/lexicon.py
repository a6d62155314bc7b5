"""How a model is asked: its word pools and the wording of each format.

A real chat model gets the paper's templates (section 1.1) in its own chat wrapper. A bundled model brings its
words and wordings in its own `task.json`; nothing here knows them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from encode_address.errors import NameNotFound, TaskError
from encode_address.tasks.pools import PAPER_POOLS

_QWEN_PRE = "<|im_start|>user\n"
_QWEN_POST = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@dataclass(frozen=True)
class Wording:
    """The text of one format, in order: opening, entries, filler, question, and the answer that would follow.

    `{key}` and `{value}` stand for an entry's words (in `question` for the key asked for), `{other}` for the key
    of another entry. `separator` follows every entry but the last, `end` the last one; `delimited` says whether
    they belong to the entry's span (paper 1.4).
    """

    opening: str
    entry: str
    separator: str
    end: str
    question: str
    answer: str
    delimited: bool = True


@dataclass(frozen=True)
class Lexicon:
    """A model's wordings by format ("chat", "list", "rev", "chat/far", ...), its pools, and what joins filler text."""

    wordings: dict[str, Wording]
    pools: dict[str, dict[str, list[str]]]
    filler_joint: str

    def wording(self, name: str) -> Wording:
        if name not in self.wordings:
            raise NameNotFound(f"no wording {name!r} for this model; it has {', '.join(sorted(self.wordings))}")
        return self.wordings[name]


def lexicon_for(tokenizer: Any, folder: Path | None = None) -> Lexicon:
    """The lexicon of a bundled model's folder, or the paper's in the tokenizer's chat wrapper.

    Raises TaskError for a tokenizer without a chat template.
    """
    if folder is not None:
        data = json.loads((folder / "task.json").read_text())
        return Lexicon({name: Wording(**w) for name, w in data["wordings"].items()}, data["pools"], " ")
    pre, post = chat_wrapper(tokenizer)
    ask = f"\nQuestion: What is the value of {{key}}?{post}The value of {{key}} is **"
    wordings = {
        "chat": Wording(f"{pre}Dictionary:", " {key}={value}", ",", ".", ask, "{value}"),
        "list": Wording(
            f"{pre}Lookup table:\n",
            "* {key}={value}",
            "\n",
            "\n",
            f"Which value does {{key}} map to?{post}The entry {{key}} maps to **",
            "{value}",
        ),
        "rev": Wording(
            f"{pre}Dictionary:", " {value} is the value of {key}", ",", ".", ask, "{value}", delimited=False
        ),
    }
    return Lexicon(wordings, PAPER_POOLS, "\n")


def chat_wrapper(tokenizer: Any) -> tuple[str, str]:
    """What stands before and after the user's text in a single-turn chat, generation prompt included.

    Qwen's is written out (with its empty thinking section); any other comes from the tokenizer's own template.
    """
    template = tokenizer.chat_template
    if not template:
        raise TaskError("the tokenizer has no chat template, so the paper's prompts cannot be built for it")
    if "<|im_start|>" in str(template):
        return _QWEN_PRE, _QWEN_POST
    turn = [{"role": "user", "content": "\0"}]
    rendered = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    if rendered.count("\0") != 1:
        raise TaskError("the tokenizer's chat template does not show the user's text exactly once")
    pre, post = rendered.split("\0")
    return pre, post
