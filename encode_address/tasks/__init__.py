"""What the models are asked to do. Tasks know tokenizers and words, no model internals."""

from __future__ import annotations

from typing import Any

from encode_address.tasks.dictionary import CONFIGURATIONS, Dictionary, EntrySwap, QuestionSwap, Swap
from encode_address.tasks.lexicon import lexicon_for
from encode_address.tasks.prompts import Prompt
from encode_address.tasks.text import Text, text_source


def dictionary(model: Any, variant: str = "chat8", text: Text | None = None, pool: str = "A") -> Dictionary:
    """The dictionary task `variant` as `model` is asked it: its own words and wording, or the paper's."""
    return Dictionary(variant, model.tokenizer, lexicon_for(model.tokenizer, model.folder), text, pool)


__all__ = [
    "CONFIGURATIONS",
    "Dictionary",
    "EntrySwap",
    "Prompt",
    "QuestionSwap",
    "Swap",
    "Text",
    "dictionary",
    "text_source",
]
