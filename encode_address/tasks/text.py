"""The text behind perplexity, mean removal and long{L}: one source, chunked as in the paper (section 4)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from encode_address.errors import TaskError
from encode_address.tasks.prompts import Prompt

BUNDLED_DIR = Path(__file__).parent.parent / "models" / "bundled"
WIKITEXT = "wikitext-2-v1"
CHUNK = 512


@dataclass(frozen=True)
class Text:
    """A text in a test and a train part. `lines`: each line is a chunk by itself (the bundled grammar text);
    otherwise the part is cut into consecutive chunks of 512 tokens. `start` is where long{L} begins to read."""

    name: str
    test: str
    train: str
    lines: bool = False
    start: str = ""

    @property
    def sha256(self) -> str:
        return hashlib.sha256((self.test + "\0" + self.train).encode()).hexdigest()[:16]

    @property
    def count(self) -> int:
        """How many chunks an experiment uses: the paper's 16 of 512 tokens; of short lines, 64."""
        return 64 if self.lines else 16

    def chunks(self, tokenizer: Any, part: str = "test", n: int = 16) -> list[Prompt]:
        """The first `n` chunks (of a line-wise text: lines) as prompts of equal length."""
        source = {"test": self.test, "train": self.train}[part]
        if self.lines:
            rows = [tuple(tokenizer(line, add_special_tokens=False)["input_ids"]) for line in source.splitlines()]
            length = min(len(row) for row in rows)
            return [Prompt(row[:length]) for row in rows[:n]]
        ids = tokenizer(source, add_special_tokens=False)["input_ids"]
        rows = [tuple(ids[i : i + CHUNK]) for i in range(0, len(ids) - CHUNK + 1, CHUNK)][:n]
        if not rows:
            raise TaskError(f"text {self.name}: {len(ids)} tokens in its {part} part, fewer than one chunk of {CHUNK}")
        return [Prompt(row) for row in rows]

    def opening(self, tokenizer: Any, tokens: int) -> str:
        """The first `tokens` tokens of the text, decoded (paper 1.1, long{L})."""
        source = self.start or self.test
        if self.lines:
            source = " ".join(line.removeprefix("<s> ") for line in source.splitlines())
        ids = tokenizer(source, add_special_tokens=False)["input_ids"]
        if len(ids) < tokens:
            raise TaskError(f"text {self.name} has {len(ids)} tokens, fewer than the {tokens} asked for")
        return tokenizer.decode(ids[:tokens])


def text_source(name: str | None, bundled: bool) -> Text:
    """`name`: a local file, "wikitext-2-v1" (needs the `text` extra), or "bundled"; by default the bundled text for a
    bundled model and wikitext for any other. Raises TaskError when it cannot be had."""
    if name is None:
        name = "bundled" if bundled else WIKITEXT
    if name == "bundled":
        test, train = (BUNDLED_DIR / f"text-{part}.txt" for part in ("test", "train"))
        return Text("bundled", test.read_text(), train.read_text(), lines=True)
    if name == WIKITEXT:
        return _wikitext()
    path = Path(name)
    if not path.is_file():
        raise TaskError(f"no text {name!r}: give a file, {WIKITEXT!r} or 'bundled'")
    try:
        whole = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"text {name} cannot be read: {error}") from error
    half = whole.rfind("\n", 0, len(whole) // 2) + 1 or len(whole) // 2
    return Text(path.name, test=whole[:half], train=whole[half:])


def _wikitext() -> Text:
    hint = "install the extra (pip install 'encode-address[text]') where the hub can be reached, or pass --text FILE"
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise TaskError(f"{WIKITEXT} needs the package datasets: {hint}") from error
    try:
        data = load_dataset("Salesforce/wikitext", WIKITEXT)
    except Exception as error:  # whatever the hub client raises, the user can do one of two things
        raise TaskError(f"{WIKITEXT} could not be loaded ({type(error).__name__}): {hint}") from error
    lines = {part: [line for line in data[part]["text"] if line.strip()] for part in ("test", "train")}
    return Text(
        WIKITEXT, "\n\n".join(lines["test"]), "\n\n".join(lines["train"]), start="\n\n".join(lines["test"][200:])
    )
