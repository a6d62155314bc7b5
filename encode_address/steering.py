"""Steering: make a model look up another key, by its Address block, and let it go on.

    ea.steer(model, prompt, to_key="lemon").text

The prompt asks for one key; a second prompt, the donor, asks for `to_key` instead. At the prompt's last token the block's outputs
(or its states before that token) are the donor's; nothing after it is edited. `encode-address run steer` measures how often that
works and what it costs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nnsight
import torch

from encode_address.errors import RunError, TaskError
from encode_address.interventions import mixer_output, read_cache, write_cache
from encode_address.run.engine import own_threads
from encode_address.tasks import Prompt

EDITS = ("output", "state")


@dataclass(frozen=True)
class Steered:
    """What a model says, greedily: steered, as it is, and when it is really asked for the other key."""

    text: str
    plain: str
    donor: str

    @property
    def redirected(self) -> bool:
        """Whether steering gives what really asking gives, and not what the model says as it is."""
        return self.text == self.donor != self.plain


def steer(
    model: Any,
    prompt: Prompt | str,
    to_key: str,
    *,
    from_key: str = "",
    block: str = "",
    edit: str = "output",
    tokens: int = 1,
    out: str | Path = "results",
) -> Steered:
    """Redirect the lookup of `prompt` to `to_key` and generate `tokens` tokens (greedily, to the end of the turn at most).

    `prompt` states its keys and then asks for one: `from_key` (of a task's `Prompt`: the one it asks for). The donor has
    `to_key` in every place of `from_key` but the first, which states it. `block`: where the address is written ("G2",
    "G2+G3"); without it, what `find` said of this model in `out`. `edit`: "output" (paper section 3.7) or "state" (3.9, with
    the convolutional state). Raises EncodeAddressError subclasses for what a user can mend.
    """
    if edit not in EDITS:
        raise RunError(f"unknown edit {edit!r}: use {' or '.join(EDITS)}")
    if model.uncontinued:
        raise RunError(f"{model.name}: steering continues from a cache, and {model.uncontinued}")
    if tokens < 1:
        raise RunError(f"steering generates 1 token or more, not {tokens}")
    layers = model.layout.layers_of(block or _address(model, Path(out)))
    host, donor = (_ids(model, text) for text in _texts(prompt, from_key, to_key))
    if len(host) != len(donor):
        raise TaskError(f"{to_key!r} takes another number of tokens than the asked key: {len(donor)} tokens in all, not {len(host)}")  # fmt: skip
    said = _generate(model, host, donor, layers, edit, tokens)
    return Steered(*(model.tokenizer.decode(_turn(model, ids)).strip() for ids in said.tolist()))


def _texts(prompt: Prompt | str, from_key: str, to_key: str) -> tuple[str, str]:
    text = prompt if isinstance(prompt, str) else prompt.text
    asked = from_key or ("" if isinstance(prompt, str) else prompt.keys[prompt.query])
    if not asked:
        raise TaskError("say which key the prompt asks for: from_key=...")
    stated, *rest = re.split(rf"(?<!\w){re.escape(asked)}(?!\w)", text)
    if len(rest) < 2:
        raise TaskError(f"{asked!r} is in the prompt {len(rest)} times: it must be stated, and asked for after that")
    if to_key not in text:
        raise TaskError(f"{to_key!r} is not in the prompt, so there is nothing to look up")
    return text, stated + asked + to_key.join(rest)


def _ids(model: Any, text: str) -> list[int]:
    return model.tokenizer(text, add_special_tokens=False)["input_ids"]


def _address(model: Any, out: Path) -> str:
    path = out / model.slug / "verdict.json"
    names = json.loads(path.read_text()).get("address") if path.is_file() else None
    if not names:
        raise RunError(f'say which block writes the address (block="G2"), or let `encode-address find` say it: no Address in {path}')  # fmt: skip
    return "+".join(names)


def _generate(
    model: Any, host: Sequence[int], donor: Sequence[int], layers: Sequence[int], edit: str, tokens: int
) -> torch.Tensor:
    """(3, tokens) token ids: steered, plain, donor. One forward for each token serves all three."""
    prompts = torch.tensor([host, donor])
    with own_threads(model):
        return model.ask(generate, prompts, tuple(layers), edit, tokens).cpu()


def generate(model, prompts, layers, edit, tokens):
    """The (3, tokens) ids that follow `prompts`, (2, positions) host and donor: of the host under the edit, the host, the donor."""
    with torch.no_grad():
        cache = model.prefix(prompts[:, :-1])
        saved, rows = read_cache(cache, model.held), torch.tensor([0, 0, 1])
        lent = torch.tensor([1, 0, 1])
        states = {(layer, name): lent for layer in layers for name in ("recurrent", "conv")} if edit == "state" else {}
        write_cache(cache, saved, rows, states, model.held)
        last, said = prompts[rows, -1:], []
        mixers = [model.layers[layer].mixer for layer in layers] if edit == "output" else []
        for length in range(prompts.shape[1], prompts.shape[1] + tokens):
            with model.lm.trace(**model.continuation(last, length, cache)) as tracer:
                for mixer in mixers:
                    mixer_output(mixer)[0] = mixer_output(mixer)[2]
                seen = nnsight.save({"logits": tracer.result.logits[:, -1]})
                if model.held is None:  # what the trace was given may be a copy over there
                    seen["cache"] = tracer.result.cache
            cache = seen.get("cache", cache)
            last, mixers = seen["logits"].argmax(-1, keepdim=True), []
            said.append(last)
    return torch.cat(said, 1)


def _turn(model: Any, ids: list[int]) -> list[int]:
    """Up to the end of the turn."""
    end = model.tokenizer.eos_token_id
    return ids[: ids.index(end)] if end in ids else ids
