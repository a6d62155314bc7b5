"""Small byte-level BPE tokenizers, trained in a moment, that behave like those of the paper's models.

Training runs until every word of the corpus is one token, so a word is split exactly when it is left out of the
corpus in that form. The pre-tokenizer is Qwen's: "=red" is one pre-token, ".\\n" may be one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import encode_address
from encode_address.models.hybrid import HybridModel
from encode_address.tasks import Dictionary, Text
from encode_address.tasks.lexicon import lexicon_for
from encode_address.tasks.pools import PAPER_POOLS

VARIANTS = ("chat4", "chat8", "chat16", "list4", "list8", "list16", "rev4", "rev8", "rev16", "perm8")
PROSE = Text("prose", test="The value of the table is the entry. " * 40, train="")
POOL_WORDS = tuple(sorted({word for pool in PAPER_POOLS.values() for words in pool.values() for word in words}))
TEMPLATE_TEXT = (
    "user assistant system Dictionary Lookup table Question What Which is the value of does map maps to The entry "
    "You are a helpful model"
)
TEMPLATE_WORDS = tuple(TEMPLATE_TEXT.split())
PUNCTUATION = ("\n", "\n\n", ".\n", ":\n", " **", "**", " =", "=", ",", ".", "?", "*", ":")
SPECIALS = {
    "qwen": ("<|im_start|>", "<|im_end|>", "<think>", "</think>"),
    "granite": ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
}
SPLIT_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # words, digits, signs, space
)
QWEN_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
GRANITE_TEMPLATE = (
    "{% if messages[0].role != 'system' %}"
    "<|start_of_role|>system<|end_of_role|>You are a helpful model.<|end_of_text|>\n{% endif %}"
    "{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"
)
TEMPLATES = {"qwen": QWEN_TEMPLATE, "granite": GRANITE_TEMPLATE, "none": None}


@cache
def toy_tokenizer(
    family: str = "qwen",
    split: Sequence[str] = (),
    split_bare: Sequence[str] = (),
    added: Sequence[str] = (),
) -> PreTrainedTokenizerFast:
    """A tokenizer of `family` ("qwen", "granite", or "none": without a chat template).

    `split` words are several tokens in every form, `split_bare` words only where no space precedes them. `added`
    strings are one token wherever they occur, across word boundaries too.
    """
    bare = [w for w in (*POOL_WORDS, *TEMPLATE_WORDS) if w not in split and w not in split_bare]
    spaced = [f" {w}" for w in (*POOL_WORDS, *TEMPLATE_WORDS) if w not in split]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=10_000,
        min_frequency=0,
        show_progress=False,
        special_tokens=list(SPECIALS.get(family, ())),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    core.train_from_iterator([*bare, *spaced, *PUNCTUATION], trainer)
    core.add_tokens([AddedToken(text, normalized=False) for text in added])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    tokenizer.chat_template = TEMPLATES[family]
    return tokenizer


def all_split_but(kept: int, pool: str = "A") -> tuple[str, ...]:
    """The words of a pool to split so that only its first `kept` keys and values stay one token."""
    words = PAPER_POOLS[pool]
    return tuple(words["keys"][kept:] + words["values"][kept:])


@cache
def task(variant: str, family: str = "qwen", pool: str = "A") -> Dictionary:
    """A variant for the plain tokenizer of `family`; long{L} is filled with PROSE."""
    tokenizer = toy_tokenizer(family)
    return Dictionary(variant, tokenizer, lexicon_for(tokenizer), PROSE, pool)


@cache
def bundled_model() -> HybridModel:
    """A bundled model, loaded once (on one thread: its operations are too small to share)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = encode_address.load("tiny-gdn")
    torch.set_num_threads(threads)
    return model
