"""Which tokens of two tokenizations of the same text cover exactly the same characters (paper section 3.11).

Two texts share their segments, the user's text and what is put into the assistant's mouth; the chat wrapper around them
is each model's own, and its tokens are never aligned. A text without the wrapper is one segment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from encode_address.errors import TaskError
from encode_address.tasks.lexicon import chat_wrapper
from encode_address.tasks.prompts import Prompt


@dataclass(frozen=True)
class Alignment:
    """Positions of aligned tokens, in order and equally many: `a[i]` and `b[i]` cover the same characters.

    `inside` counts the tokens of each side that lie in shared segments, `tokens` all of them.
    """

    a: tuple[int, ...]
    b: tuple[int, ...]
    inside: tuple[int, int]
    tokens: tuple[int, int]

    def __len__(self) -> int:
        return len(self.a)

    @property
    def complete(self) -> bool:
        """Whether every token of the shared segments is aligned."""
        return self.inside == (len(self), len(self))


def align(a: Prompt, tokenizer_a: Any, b: Prompt, tokenizer_b: Any) -> Alignment:
    """Align two prompts that have their `text`.

    Raises TaskError where a prompt is not what its tokenizer makes of its text, or the shared segments differ.
    """
    texts = [
        [prompt.text[start:end] for start, end in segments(prompt.text, tokenizer)]
        for prompt, tokenizer in ((a, tokenizer_a), (b, tokenizer_b))
    ]
    if texts[0] != texts[1]:
        raise TaskError(
            f"the two prompts do not share their text: {texts[0][0][:40]!r}... and {texts[1][0][:40]!r}...; "
            "tokens are aligned on equal text only"
        )
    places_a, places_b = _places(a, tokenizer_a), _places(b, tokenizer_b)
    once = [{s for s, count in Counter(places.values()).items() if count == 1} for places in (places_a, places_b)]
    where = {span: position for position, span in places_b.items()}
    common = once[0] & once[1]
    both = [(position, where[span]) for position, span in places_a.items() if span in common]
    inside = len(places_a), len(places_b)
    return Alignment(tuple(p for p, _ in both), tuple(p for _, p in both), inside, (len(a), len(b)))


def align_all(pairs: Sequence[tuple[Prompt, Prompt]], tokenizer_a: Any, tokenizer_b: Any) -> list[Alignment]:
    """Align each pair of prompts."""
    return [align(a, tokenizer_a, b, tokenizer_b) for a, b in pairs]


def report(alignments: Sequence[Alignment]) -> dict[str, Any]:
    """How many tokens align, over prompts: mean counts, and shares of the tokens of the shared segments."""
    aligned, n = sum(map(len, alignments)), len(alignments)
    inside = [sum(one.inside[side] for one in alignments) for side in (0, 1)]
    tokens = [sum(one.tokens[side] for one in alignments) for side in (0, 1)]
    return {
        "prompts": n,
        "aligned_tokens": aligned / n if n else 0.0,
        "donor_tokens": tokens[0] / n if n else 0.0,
        "host_tokens": tokens[1] / n if n else 0.0,
        "donor_share": aligned / inside[0] if inside[0] else 0.0,
        "host_share": aligned / inside[1] if inside[1] else 0.0,
        "complete": all(one.complete for one in alignments),
    }


def segments(text: str, tokenizer: Any) -> list[tuple[int, int]]:
    """(start, end) of the shared segments in characters: user's text, assistant's opening; the text, without a wrapper."""
    before, after = (part.strip() for part in chat_wrapper(tokenizer)) if tokenizer.chat_template else ("", "")
    if not before or not text.startswith(before):
        return [_trimmed(text, 0, len(text))]
    middle = text.find(after, len(before)) if after else -1
    if middle == -1:
        return [_trimmed(text, len(before), len(text))]
    return [_trimmed(text, len(before), middle), _trimmed(text, middle + len(after), len(text))]


def _trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    """A segment without the white space at its ends, which is the wrapper's."""
    part = text[start:end]
    return start + len(part) - len(part.lstrip()), end - len(part) + len(part.rstrip())


def _places(prompt: Prompt, tokenizer: Any) -> dict[int, tuple[int, int, int]]:
    """Position -> (segment, start, end) in characters from the segment's start, of the tokens that lie in one.

    Some tokenizers do not count the space before a word, others do: here a token begins where the last one ended.
    """
    encoding = tokenizer(prompt.text, add_special_tokens=False, return_offsets_mapping=True)
    if tuple(encoding["input_ids"]) != prompt.ids:
        raise TaskError(f"a prompt is not what its tokenizer makes of its text: {prompt.text[:60]!r}")
    parts, out, last = segments(prompt.text, tokenizer), {}, 0
    for position, (start, end) in enumerate(encoding["offset_mapping"]):
        begin = last if last < start and prompt.text[last:start].isspace() else start
        last = max(last, end)
        for number, (first, stop) in enumerate(parts):
            if first < end <= stop and (begin >= first or not prompt.text[begin:first].strip()):
                out[position] = number, max(begin, first) - first, end - first
    return out
