"""Tiny random-weight models of every supported family, a toy tokenizer, and dictionary-like prompts for them.

The weights are random but not small: matrices are scaled up, norm weights and biases randomised, so that a wrong
layer, row, position or multiplier shows in the logits. Numbers that could be mixed up are distinct wherever the
architecture allows it. `build(name)` gives the same weights every time, so a second copy can serve as the oracle's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

import encode_address
from encode_address.models.hybrid import HybridModel
from encode_address.tasks import EntrySwap, Prompt, QuestionSwap, Swap, Text

# On models this small a second thread costs more than it gives, and very much more on a busy machine.
torch.set_num_threads(1)

PATTERN = "llalallal"  # l linear, a softmax: blocks G0 [0-1], G1 [3], G2 [5-6], and G3 [8] without a reader
BLOCKS = {"G0": (0, 1), "G1": (3,), "G2": (5, 6), "G3": (8,)}
BLOCKS_OF = {
    PATTERN: BLOCKS,
    "llalal": {"G0": (0, 1), "G1": (3,), "G2": (5,)},
    "lallal": {"G0": (0,), "G1": (2, 3), "G2": (5,)},
    "lmlalmal": {"G0": (0, 2), "G1": (4,), "G2": (7,)},  # m an MLP that is a layer of its own
}
HEADS, KV_HEADS = 4, 2

# -- words -----------------------------------------------------------------------
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
MARKS = [":", "=", ",", ".", "what", "is", "answer"]
_SYLLABLES = [c + v for c in "bdfgklmn" for v in "aiu"]
_WORDS = [a + b for a in _SYLLABLES for b in _SYLLABLES][:240]
KEYS, VALUES, FILLER = _WORDS[:40], _WORDS[40:80], _WORDS[80:]
VOCAB = {word: i for i, word in enumerate([*SPECIAL, *MARKS, *_WORDS])}
VOCAB_SIZE = len(VOCAB) + 5  # like real models, more rows than the tokenizer has words


def toy_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word, words separated by spaces."""
    tokenizer = Tokenizer(WordLevel(VOCAB, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


# -- models ----------------------------------------------------------------------
def layer_types(pattern: str = PATTERN) -> list[str]:
    return [{"l": "linear_attention", "a": "full_attention"}[kind] for kind in pattern]


def qwen_settings(pattern: str = PATTERN, **changes) -> dict:
    """Config numbers shared by the Gated DeltaNet families; heads x head_dim differs from the width."""
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 56,
        "num_hidden_layers": len(pattern),
        "layer_types": layer_types(pattern),
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": 32,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        "attention_bias": True,
        "bos_token_id": VOCAB["<s>"],
        "eos_token_id": VOCAB["</s>"],
        "pad_token_id": VOCAB["<pad>"],
        **changes,
    }


def _experts() -> dict:
    return {
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    }


def granite_settings(pattern: str = PATTERN, **changes) -> dict:
    """Config numbers of the Mamba-2 family; every multiplier differs from one, chunks are shorter than prompts."""
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 56,
        "shared_intermediate_size": 56,
        "num_hidden_layers": len(pattern),
        "layer_types": layer_types(pattern),
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "mamba_expand": 2,
        "mamba_n_heads": 6,
        "mamba_d_head": 16,
        "mamba_d_state": 10,
        "mamba_n_groups": 2,
        "mamba_chunk_size": 16,
        "max_position_embeddings": 512,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.6,
        "attention_multiplier": 1.6,
        "logits_scaling": 0.5,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "bos_token_id": VOCAB["<s>"],
        "eos_token_id": VOCAB["</s>"],
        "pad_token_id": VOCAB["<pad>"],
        **changes,
    }


def _qwen3_5_text():
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**qwen_settings()))


def _qwen3_5():
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": 48,
        "num_position_embeddings": 16,
    }
    tokens = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    outside = {name: VOCAB_SIZE - 1 - i for i, name in enumerate(tokens)}
    return Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=qwen_settings(), vision_config=vision, **outside))


def _qwen3_5_moe():
    return Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**qwen_settings(**_experts())))


def _qwen3_next():
    return Qwen3NextForCausalLM(Qwen3NextConfig(**qwen_settings(**_experts(), norm_topk_prob=True)))


def _granite():
    return GraniteMoeHybridForCausalLM(GraniteMoeHybridConfig(**granite_settings()))


def _granite_moe():
    changes = {"num_local_experts": 5, "num_experts_per_tok": 2, "position_embedding_type": "rope"}
    return GraniteMoeHybridForCausalLM(GraniteMoeHybridConfig(**granite_settings(**changes)))


FAMILIES: dict[str, Callable[[], torch.nn.Module]] = {
    "qwen3_5_text": _qwen3_5_text,
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": _qwen3_5_moe,
    "qwen3_next": _qwen3_next,
    "granite": _granite,
    "granite_moe": _granite_moe,
}


def pattern_of(name: str) -> str:
    """The layers of a family's tiny model: l linear, a softmax, m neither."""
    from tests.tiny_families import PATTERNS

    return PATTERNS.get(name, PATTERN)


def build(name: str) -> torch.nn.Module:
    """The random model of one family (of FAMILIES, or of `tiny_families.MORE`), fp32 on the CPU; always the same weights."""
    from tests.tiny_families import MORE

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(sorted(FAMILIES).index(name) if name in FAMILIES else len(FAMILIES) + [*MORE].index(name))
        return randomise({**FAMILIES, **MORE}[name]())


def randomise(module: torch.nn.Module) -> torch.nn.Module:
    """Scale matrices up and move every vector (norm weight, bias, decay, ...) off its trivial start."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("A_log") and parameter.ndim > 1:
                continue  # Mamba-1: log decays, which would be none at all
            if parameter.ndim > 1:
                parameter.mul_(4.0)
            else:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return module.float().eval()


def load_tiny(name: str) -> HybridModel:
    """A random model through the public `load`, which verifies its names."""
    return encode_address.load(build(name), tokenizer=toy_tokenizer())


# -- prompts ---------------------------------------------------------------------
def prompt(
    keys: Sequence[str], values: Sequence[str], query: int, asked: str | None = None, length: int = 70
) -> Prompt:
    """A dictionary of `keys` and `values` that asks entry `query`, filled up to `length` tokens.

    Reads `<s> key = value , ... filler ... what is KEY answer :`. Spans as `Prompt` documents them.
    """
    asked = keys[query] if asked is None else asked
    words, spans = ["<s>"], {}
    for i, (key, value) in enumerate(zip(keys, values)):
        start = len(words)
        words += [key, "=", value, ","]
        spans |= {f"entry {i}": tuple(range(start, start + 4)), f"key {i}": (start,), f"value {i}": (start + 2,)}
    question = ["what", "is", asked, "answer", ":"]
    missing = length - len(words) - len(question)
    if missing < 0:
        raise ValueError(f"{len(keys)} entries and a question do not fit into {length} tokens")
    words += [FILLER[i % len(FILLER)] for i in range(missing)]
    spans |= {"question": tuple(range(len(words), length)), "final": (length - 1,)}
    words += question
    choices = tuple(VOCAB[value] for value in values)
    ids = tuple(VOCAB[word] for word in words)
    answer = choices[list(keys).index(asked)]
    return Prompt(ids, spans, " ".join(words), tuple(keys), tuple(values), query, answer, choices)


PLACES = ((0, 3), (3, 0), (1, 2), (2, 1))  # (entry asked for, other entry)


def _draw(n: int, seed: int):
    rng = random.Random(seed)
    for pair in range(n):
        yield pair, *PLACES[pair % 4], rng.sample(KEYS, 4), rng.sample(VALUES, 8)


def _exchanged(words: Sequence[str], i: int, j: int) -> list[str]:
    out = list(words)
    out[i], out[j] = out[j], out[i]
    return out


def swaps(n: int = 4, seed: int = 0, length: int = 70) -> list[Swap]:
    """Value swaps of the toy dictionary, as `tasks.Dictionary.swaps` gives them."""
    out = []
    for pair, target, other, keys, values in _draw(n, seed):
        clean = prompt(keys, values[:4], target, length=length)
        corrupted = prompt(keys, _exchanged(values[:4], target, other), target, length=length)
        out.append(Swap(pair, clean, corrupted, target, other))
    return out


def questions(n: int = 4, seed: int = 0, length: int = 70) -> list[QuestionSwap]:
    """Question swaps of the toy dictionary with all their donors."""
    out = []
    for pair, a, b, keys, values in _draw(n, seed):
        j = next(i for i in range(4) if i not in (a, b))
        host, donor = (prompt(keys, values[:4], query, length=length) for query in (b, a))
        same_key = prompt(keys, values[4:], b, length=length)
        dissociation = prompt(_exchanged(keys, a, j), values[4:], j, length=length)
        out.append(QuestionSwap(pair, host, donor, same_key, dissociation, b, a, j))
    return out


def entries(n: int = 4, swap: str = "value", seed: int = 0, length: int = 70) -> list[EntrySwap]:
    """Entry swaps of the toy dictionary, of kind "value" (one patched position) or "key" (two)."""
    out = []
    for pair, t, d, keys, values in _draw(n, seed):
        plain = prompt(keys, values[:4], t, length=length)
        if swap == "value":
            host, donor = prompt(keys, _exchanged(values[:4], t, d), t, length=length), plain
            positions, carried = host.span(f"value {t}"), plain.answer
        else:
            host, donor = plain, prompt(_exchanged(keys, t, d), values[:4], t, asked=keys[t], length=length)
            positions, carried = host.span(f"key {t}") + host.span(f"key {d}"), VOCAB[values[d]]
        out.append(EntrySwap(pair, swap, host, donor, positions, carried))
    return out


def toy_text(lines: int = 6, words: int = 40) -> Text:
    """Random words, one chunk a line, in a test and a train part."""
    rng = random.Random("toy text")
    test, train = ("\n".join(" ".join(rng.choices(_WORDS, k=words)) for _ in range(lines)) for _ in range(2))
    return Text("toy", test, train, lines=True)
