"""A needle in a haystack: one statement in a long text, asked for at the end; lengths x depths.

Variant "needle". For a model of ordinary text the haystack is the text source, the needles are those of `needles.json` (a statement and its
question each), the prompt has sections CONTEXT and QUESTION, and the answer is the statement, verbatim: after a section ANSWER that leads into
it, or in a chat model's turn. A bundled model has its own words: the haystack is the text of its grammar, the needle an entry of its
`list` wording, the answer the entry's value.

A length is the tokens of haystack and needle together. A depth is the share of the haystack that stands before the needle, in percent; the
needle is put after the end of a sentence, at or before that place, or at the very end (100). Each prompt's haystack starts at a sentence of its own.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from encode_address.errors import NameNotFound, TaskError
from encode_address.tasks.lexicon import chat_wrapper, lexicon_for
from encode_address.tasks.pools import one_token
from encode_address.tasks.probes import Probe, Turn, turn, twice
from encode_address.tasks.prompts import Piece, Prompt, assemble
from encode_address.tasks.text import Text

LENGTHS, BUNDLED_LENGTHS = (512, 1024, 2048, 4096), (32, 64, 128, 192)
DEPTHS = (0, 25, 50, 75, 100)
CUE = "The most relevant sentence in the context is:"
INSTRUCTION = "Answer with the most relevant sentence of the context, word for word, and nothing else."


class Needle:
    """The task for one tokenizer. `lengths`: tokens, several with commas ("512,2048").

    Raises NameNotFound for another variant, TaskError for lengths that are no numbers.
    """

    surface, pool = "haystack", "needles"

    def __init__(self, variant: str, tokenizer: Any, folder: Path | None, lengths: str | None = None) -> None:
        if variant != "needle":
            raise NameNotFound(f"unknown variant {variant!r}: use needle")
        self.variant, self.tokenizer, self.folder = variant, tokenizer, folder
        self.lengths = _numbers(lengths) if lengths else BUNDLED_LENGTHS if folder else LENGTHS

    def probes(self, n: int, other: int, seed: int, text: Text) -> tuple[list[Probe], list[Probe]]:
        """`n` probes, spread evenly over lengths and depths, and `other` ones to choose by, with other haystacks (and, of a bundled
        model, other needles)."""
        cells = [(length, depth) for length in self.lengths for depth in DEPTHS]
        words = self._sentences(text)
        out = []
        for part, count in (("measured", n), ("chosen", other)):
            rng = random.Random(f"needle {part} {seed}")
            places = [cells[i * len(cells) // count if count < len(cells) else i % len(cells)] for i in range(count)]
            out.append([self._probe(pair, *place, words, rng) for pair, place in enumerate(places)])
        return out[0], out[1]

    def _probe(self, pair: int, length: int, depth: int, sentences: list[list[int]], rng: random.Random) -> Probe:
        start, needle, question, answer, choices = self._asked(pair, rng)
        room = length - len(self._ids(needle))
        if room < 0:
            raise TaskError(f"a needle of {length - room} tokens does not fit into {length}: pass longer --lengths")
        before, after = _haystack(sentences, room, depth, rng)
        parts = [self.tokenizer.decode(part) for part in (before, after)]
        pieces = [Piece(start), Piece(f"{parts[0]} " if parts[0].strip() else ""), Piece(needle, ("needle",))]
        pieces += [Piece(f" {parts[1].strip()}" if parts[1].strip() else ""), Piece(question, ("question",))]
        said, ids, spans = assemble([piece for piece in pieces if piece.text], self.tokenizer)
        answers = tuple(self.tokenizer(said + answer, add_special_tokens=False)["input_ids"])
        if answers[: len(ids)] != ids or len(answers) == len(ids):
            raise TaskError(f"{answer!r} does not begin a new token after {said[-20:]!r}")
        spans["final"] = (len(ids) - 1,)
        prompt = Prompt(ids, spans, said, answer=answers[len(ids)], choices=choices)
        labels = {"length": length, "depth": depth, "needle": needle.strip(), "chance": 1 / max(1, len(choices))}
        return Probe(pair, prompt, answers[len(ids) :], labels, twice(prompt, self.tokenizer, self.turn))

    # -- wordings ------------------------------------------------------------
    def _asked(self, pair: int, rng: random.Random) -> tuple[str, str, str, str, tuple[int, ...]]:
        """What stands before the haystack, the needle, what follows the haystack, the answer, and the choices."""
        if self.folder is None:
            one = self.needles[pair % len(self.needles)]
            question = f"\n\nQUESTION\n{one['question']}"
            cue = f"\n\n{INSTRUCTION}{self.turn.answer}" if self.tokenizer.chat_template else f"\n\nANSWER\n{CUE}"
            answer = one["needle"] if cue.endswith("\n") else f" {one['needle']}"
            return f"{self.turn.before}CONTEXT\n", one["needle"], question + cue, answer, ()
        lexicon = lexicon_for(self.tokenizer, self.folder)
        wording, pool = lexicon.wording("list"), next(iter(lexicon.pools.values()))
        keys, values = (
            one_token(pool["keys"], self.tokenizer, bare=False)[0],
            one_token(pool["values"], self.tokenizer, bare=True)[0],
        )
        key, value = rng.choice(keys), rng.choice(values)
        needle = wording.entry.strip().replace("{key}", key).replace("{value}", value) + wording.end
        choices = tuple(self._ids(f" {one}")[-1] for one in values)
        answer = wording.answer.replace("{value}", value)
        return f"{wording.opening} ", needle, wording.question.replace("{key}", key), answer, choices

    @cached_property
    def turn(self) -> Turn:
        """What begins a prompt, and what begins its answer; a model without a chat template gets its first token, where it wants one."""
        if self.folder is not None or self.tokenizer.chat_template:
            own = turn(self.tokenizer, self.folder)
            return own if self.folder else Turn(*chat_wrapper(self.tokenizer), "\n\n")
        bos = self.tokenizer.bos_token_id
        wanted = bos is not None and self.tokenizer("a")["input_ids"][:1] == [bos]
        return Turn(self.tokenizer.bos_token if wanted else "", "\n\nANSWER\n", "\n\n")

    @cached_property
    def needles(self) -> list[dict[str, str]]:
        return json.loads((Path(__file__).parent / "needles.json").read_text())

    # -- haystack ------------------------------------------------------------
    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _sentences(self, text: Text) -> list[list[int]]:
        """The text as token ids, sentence by sentence; repeated until it is longer than two of the longest haystacks."""
        source = text.test
        if text.lines:
            source = " ".join(line.removeprefix("<s> ") for line in source.splitlines())
        ids, out, sentence = self._ids(source), [], []
        ends = {token for token in set(ids) if self.tokenizer.decode([token]).strip() == "."}
        for token in ids:
            sentence.append(token)
            if token in ends:
                out.append(sentence)
                sentence = []
        if not out:
            raise TaskError(f"text {text.name} has no sentence that ends with a full stop: pass another --text")
        total = sum(map(len, out))
        return out * (1 + 2 * max(self.lengths) // total)


def _haystack(sentences: Sequence[list[int]], room: int, depth: int, rng: random.Random) -> tuple[list[int], list[int]]:
    """`room` tokens of consecutive sentences from a random one on, cut in two where the needle goes."""
    first, ids, ends = rng.randrange(len(sentences) // 2), [], [0]
    for sentence in sentences[first:]:
        if len(ids) >= room:
            break
        ids += sentence
        ends.append(len(ids))
    ids = ids[:room]
    place = room if depth == 100 else max(end for end in ends if end <= room * depth // 100)
    return ids[:place], ids[place:]


def _numbers(lengths: str) -> tuple[int, ...]:
    try:
        found = tuple(int(number) for number in lengths.split(","))
    except ValueError as error:
        raise TaskError(f"lengths {lengths!r}: give numbers of tokens with commas, such as 512,2048") from error
    if min(found) < 1:
        raise TaskError(f"lengths {lengths!r}: give numbers of tokens above 0")
    return found
