"""What the benchmark runs on: models, prompt pairs and the sets of layers that are patched."""

from __future__ import annotations

import copy
import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import encode_address
from encode_address.run.cells import Cell
from encode_address.tasks import Prompt

BUNDLED = ("tiny-gdn", "tiny-mamba2")
CONFIGS = Path(__file__).parent / "configs"
INTERVENTIONS = ("transplant", "state")
MODES = {"transplant": "outputs", "state": "recurrent"}
VARIANT = "list8"  # the shortest of 60 tokens or more on the bundled models
LENGTH = 62  # tokens of a made-up prompt
WORDS = 400
Layers = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A model twice, and pairs of prompts of one length.

    `model` is the package's; `plain` is the transformers module that nnsight has never seen, with the same weights.
    `targets` are, per pair, the two token ids whose difference of logits at the last position is the margin.
    """

    name: str
    model: Any
    plain: torch.nn.Module
    hosts: tuple[Prompt, ...]
    donors: tuple[Prompt, ...]
    targets: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        lengths = {len(prompt) for prompt in self.hosts + self.donors}
        if len(lengths) != 1 or min(lengths) < 60:
            raise ValueError(f"prompts must have one length, of 60 tokens or more; these have {sorted(lengths)}")

    @property
    def length(self) -> int:
        return len(self.hosts[0])

    @property
    def blocks(self) -> list[Layers]:
        return [block.layers for block in self.model.layout.blocks]

    def take(self, pairs: int) -> Case:
        """The same model with the first `pairs` pairs."""
        return replace(self, hosts=self.hosts[:pairs], donors=self.donors[:pairs], targets=self.targets[:pairs])

    def subsets(self, count: int) -> list[Layers]:
        """`count` different sets of linear layers: the blocks first, then sets of a block's mean size and larger."""
        sets, linear = self.blocks[:count], self.model.linear_layers
        size = -(-sum(map(len, self.blocks)) // len(self.blocks))  # rounded up: a further cell is never the lighter
        while len(sets) < count and size <= len(linear):
            further = list(itertools.combinations(linear, size))
            random.Random(size).shuffle(further)
            sets += [layers for layers in further if layers not in self.blocks][: count - len(sets)]
            size += 1
        if len(sets) < count:
            raise ValueError(f"{self.name} has fewer than {count} sets of linear layers")
        return sets

    def cells(self, intervention: str, subsets: Sequence[Layers]) -> list[Cell]:
        """The plan, pair by pair, for the engine."""
        return [
            Cell(
                intervention,
                host,
                path="final",
                layers=layers,
                where=host.final,
                donor=donor,
                source=donor.final,
                mode=MODES[intervention],
                outcomes=(("redirected", redirected), ("kept", kept)),
                labels={"pair": pair},
            )
            for pair, (host, donor, (redirected, kept)) in enumerate(zip(self.hosts, self.donors, self.targets))
            for layers in subsets
        ]


def bundled(name: str, pairs: int) -> Case:
    """A bundled trained model with question swaps of its own dictionary task."""
    model = encode_address.load(name, device="cpu")
    plain = AutoModelForCausalLM.from_pretrained(model.folder, attn_implementation=model.attn_implementation).eval()
    items = encode_address.tasks.dictionary(model, VARIANT).questions(pairs, 0)
    targets = tuple((item.host.choices[item.donor_index], item.host.answer) for item in items)
    return Case(name, model, plain, tuple(i.host for i in items), tuple(i.donor for i in items), targets)


def random_weights(config_name: str, pairs: int) -> Case:
    """A model of real dimensions with random weights, in float32, and made-up pairs that differ in one token.

    The answers mean nothing; they must only be the same whichever way they are computed.
    """
    facts = json.loads((CONFIGS / f"{config_name}.json").read_text())
    config = AutoConfig.for_model(facts.pop("model_type"), **facts)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32).eval()
    weights = itertools.chain(plain.parameters(), plain.buffers())
    module = copy.deepcopy(plain, {id(tensor): tensor for tensor in weights})  # its own modules, the same memory
    module.config.name_or_path = f"{config_name} (random)"
    model = encode_address.load(module, tokenizer=_word_tokenizer())
    rng, hosts, donors, targets = random.Random(0), [], [], []
    for _ in range(pairs):
        ids = [rng.randrange(4, WORDS) for _ in range(LENGTH)]
        key = LENGTH - 6  # where a question names its key
        other = list(ids)
        other[key] = 4 + (ids[key] - 3) % (WORDS - 4)
        for prompts, row in ((hosts, ids), (donors, other)):
            prompts.append(Prompt(tuple(row), {"final": (LENGTH - 1,)}))
        targets.append(tuple(rng.sample(range(4, WORDS), 2)))
    return Case(model.name, model, plain, tuple(hosts), tuple(donors), tuple(targets))


def _word_tokenizer() -> PreTrainedTokenizerFast:
    """Four special tokens and WORDS - 4 words, one token each."""
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    words = [*special, *(f"w{i}" for i in range(len(special), WORDS))]
    core = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
