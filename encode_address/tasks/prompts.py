"""A prompt: token ids plus named positions. Knows tokenizers, knows nothing of models."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from encode_address.errors import TaskError


@dataclass(frozen=True, eq=False)
class Prompt:
    """Token ids and the positions of their named spans.

    For a dictionary prompt the spans are "entry i", "key i", "value i" (i from 0), "question" (from the first
    token of the question to the last token) and "final" (the last token); `keys` and `values` are the
    dictionary in order of presentation, `query` the index of the entry asked for, `answer` its token id.
    """

    ids: tuple[int, ...]
    spans: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    text: str = ""
    keys: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    query: int = -1
    answer: int = -1
    choices: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def digest(self) -> str:
        """A hash of the ids, the spans and the answers."""
        content = (self.ids, sorted(self.spans.items()), self.query, self.choices)
        return hashlib.sha256(repr(content).encode()).hexdigest()[:16]

    @property
    def final(self) -> tuple[int, ...]:
        return (len(self.ids) - 1,)

    def span(self, name: str) -> tuple[int, ...]:
        """The token positions of a span. Raises TaskError for a name this prompt does not have."""
        if name not in self.spans:
            raise TaskError(f"this prompt has no position {name!r}; it has {', '.join(self.spans) or 'none'}")
        return self.spans[name]


@dataclass(frozen=True)
class Piece:
    """A run of characters of a prompt, and the span names that they carry."""

    text: str
    names: tuple[str, ...] = ()


def assemble(pieces: Sequence[Piece], tokenizer: Any) -> tuple[str, tuple[int, ...], dict[str, tuple[int, ...]]]:
    """Join pieces, tokenise once, and find the tokens of every named span by character offsets.

    A token belongs to a span when the two overlap. Names used by several pieces cover all of them.
    Raises TaskError when a named span has no token.
    """
    text = "".join(piece.text for piece in pieces)
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = tuple(encoding["input_ids"]), encoding["offset_mapping"]
    spans: dict[str, list[int]] = {}
    start = 0
    for piece in pieces:
        end = start + len(piece.text)
        for name in piece.names:
            spans.setdefault(name, []).extend(
                i for i, (a, b) in enumerate(offsets) if a < end and b > start and i not in spans.get(name, ())
            )
        start = end
    for name, positions in spans.items():
        if not positions:
            raise TaskError(f"no token covers {name!r} in {text[-80:]!r}")
    return text, ids, {name: tuple(positions) for name, positions in spans.items()}


def single_token(word: str, ids: Sequence[int], positions: Sequence[int], tokenizer: Any) -> int:
    """The one position of a word, or TaskError: it must be one token that decodes to the word."""
    decoded = tokenizer.decode([ids[p] for p in positions]).strip()
    if len(positions) != 1 or decoded != word:
        raise TaskError(f"{word!r} is not one token here: {len(positions)} tokens that read {decoded!r}")
    return positions[0]


def equal_length(prompts: Sequence[Prompt]) -> int:
    """The common length of prompts that are patched into one another. Raises TaskError when they differ."""
    lengths = {len(prompt) for prompt in prompts}
    if len(lengths) != 1:
        raise TaskError(f"donor and host must have the same number of tokens; these have {sorted(lengths)}")
    return lengths.pop()
