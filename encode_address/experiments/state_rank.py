"""State rank (paper section 3.17): is what the Encode block keeps in its states of lower rank than what the Address keeps?

S is the recurrent state of one head of one linear layer after a position, (key, value) in Gated DeltaNet and (value, state) in
Mamba-2; sigma_1 >= sigma_2 >= ... are its singular values, in float64 on the CPU, and n the larger of its two dimensions.

    effective rank      exp(-sum_i p_i log p_i),  p_i = sigma_i / sum_j sigma_j        between 1 and the smaller dimension
    numerical rank      #(sigma_i > n 2^-23 sigma_1)                                   what float32 can tell from zero
    significant rank    #(sigma_i > .01 sigma_1)
    top share           sigma_1^2 / sum_i sigma_i^2

None depends on the scale of S. A dead head, whose state is zero, has ranks 0 and no top share, and is in no median.

The states are read in two sources. *Task*: the hosts of the question swaps, after the last token before the question ("dictionary
end"), after the last token but one ("before final") and after the last ("final"). *Text*: the test part in 8 consecutive sequences
of equal length, read from their first token on, after 64, 128, 256, 1K, 4K and 16K tokens; a mark that the sequences or the model's
positions do not reach is absent. A text that comes in lines is one stream of their tokens, each line with the mark it begins with.

Role of a block in the variant's circuit: Encode; Address; feeder, another block before the Address; after, behind the Address;
other, where none of these can be said. The text's rows belong to no variant, so they have no role in the table; the conclusion
gives them its own variant's.

A role's rank is the median over prompts and heads, with an interval from drawing prompts anew: the heads are the model's own, so it
says how steady these heads are, not what another model's would be. The claim is that Encode's is lower than the Address' at the
dictionary's end; if it were false, the difference would be zero or positive. It is negative in all four published models (section
5.10), from 1.9 against 9.6 in a Qwen of 9B to 2.5 against 2.8 in a Granite of 1B, where the blocks after the Address lie lower still
(2.3). Encode is nearly always the first block, so a lower rank may be one of depth: feeder, after and the text are there to compare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch

from encode_address.errors import RunError
from encode_address.experiments.base import Circuit, Conclusion, Setting
from encode_address.metrics import select
from encode_address.models.layout import Layout
from encode_address.run.batch import ids_of, in_batches
from encode_address.run.memory import out_of_memory
from encode_address.run.reading import Reading
from encode_address.run.steps import states_after
from encode_address.stats import NOTHING, RESAMPLES, Estimate
from encode_address.tasks import Prompt
from encode_address.tasks.text import Text

SUMMARY = "state rank: whether the Encode block's recurrent states are of lower rank than the Address'"
PAPER, N, QUICK_N = "3.17", 8, 4
NEEDS_CIRCUIT, ADAPTIVE = True, False
MEASURES = ("effective_rank", "significant_rank", "numerical_rank")
ROLES = ("Encode", "feeder", "Address", "after", "other")
END, BEFORE, FINAL = TASK_MARKS = ("dictionary end", "before final", "final")
TEXT_MARKS = (64, 128, 256, 1024, 4096, 16384)
SIGNIFICANT, PRECISION = 0.01, 2.0**-23


def ranks(states: torch.Tensor) -> dict[str, torch.Tensor]:
    """The four measures of matrices (..., rows, columns), each (...)."""
    sigma = torch.linalg.svdvals(states.detach().cpu().double())
    top = sigma[..., :1]
    scaled = sigma / top  # a dead head has 0 / 0 here, which no threshold exceeds
    effective = torch.special.entr(scaled / scaled.sum(-1, keepdim=True)).sum(-1).exp()
    return {
        "effective_rank": torch.where(top[..., 0] > 0, effective, 0.0),
        "numerical_rank": (scaled > max(states.shape[-2:]) * PRECISION).sum(-1),
        "significant_rank": (scaled > SIGNIFICANT).sum(-1),
        "top_share": 1 / scaled.square().sum(-1),
    }


def roles(layout: Layout, circuit: Circuit | None) -> dict[str, str]:
    """The role of each block."""
    encode, address = (circuit.encode, circuit.address) if circuit else ((), ())
    own = layout.layers_of("+".join(address)) if address else ()

    def role(block: Any) -> str:
        if block.name in encode:
            return "Encode"
        if block.name in address:
            return "Address"
        if own and block.layers[-1] < own[0]:
            return "feeder"
        return "after" if own and block.layers[0] > own[-1] else "other"

    return {block.name: role(block) for block in layout.blocks}


def prefixes(prompts: Sequence[Prompt]) -> dict[str, list[Prompt]]:
    """What of each prompt is read up to each of the task's marks."""
    ends = {
        END: [prompt.span("question")[0] for prompt in prompts],
        BEFORE: [len(prompt) - 1 for prompt in prompts],
        FINAL: [len(prompt) for prompt in prompts],
    }
    return {mark: [Prompt(p.ids[:end]) for p, end in zip(prompts, lengths)] for mark, lengths in ends.items()}


def sequences(text: Text, model: Any, n: int) -> list[tuple[int, ...]]:
    """The first `n` of the text's sequences (8, or n if that is more), as long as all marks need, if they can be."""
    lines = text.test.splitlines() if text.lines else [text.test]
    ids = [token for line in lines for token in model.tokenizer(line, add_special_tokens=False)["input_ids"]]
    length = len(ids) // max(n, N)
    reach = min(length, TEXT_MARKS[-1], getattr(model.config, "max_position_embeddings", None) or length)
    return [tuple(ids[i * length : i * length + reach]) for i in range(n)]


def steps(setting: Setting) -> Iterator[Reading]:
    """A reading per source and mark."""
    model = setting.model
    if model.uncontinued:
        raise RunError(f"{model.uncontinued}: its rank cannot be read")
    labels = {"experiment": "state-rank", "split": "confirmation"}
    known = roles(setting.layout, setting.circuit)
    hosts = [item.host for item in setting.task.questions(setting.n, setting.seed)]
    for mark, prompts in prefixes(hosts).items():
        own = {**labels, **setting.labels, "source": "task", "mark": mark}
        yield Reading("state-rank", prompts, partial(read, known=known), own, tuple(known.items()))
    stream = sequences(setting.text, model, setting.n)
    for mark in (mark for mark in TEXT_MARKS if mark <= len(stream[0])):
        own = {**labels, "source": "text", "mark": str(mark)}
        yield Reading("state-rank", [Prompt(ids[:mark]) for ids in stream], read, own)


def read(engine: Any, prompts: Sequence[Prompt], known: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """A row per prompt, linear layer and head: the ranks of its state after the prompt's last token. `known`: blocks' roles."""
    block_of = {layer: block.name for block in engine.model.layout.blocks for layer in block.layers}
    rows = []
    for which, states in _states(engine, prompts):
        for layer, state in states.items():
            if not bool(torch.isfinite(state).all()):
                raise RunError(f"NaN or infinite state at layer {layer} ({engine.model.name}): try --dtype float32")
            block = block_of[layer]
            place = {"block": block, **({"role": known[block]} if known else {}), "layer": layer}
            measured = {name: values.tolist() for name, values in ranks(state).items()}
            rows += [
                {"pair": pair, **place, "head": head, **{name: values[i][head] for name, values in measured.items()}}
                for i, pair in enumerate(which)
                for head in range(state.shape[1])
            ]
    return rows


def _states(engine: Any, prompts: Sequence[Prompt]) -> Iterator[tuple[list[int], dict[int, torch.Tensor]]]:
    """For each trace: which prompts ran, and each linear layer's recurrent states (batch, heads, rows, columns) after them."""
    model, groups = engine.model, in_batches(prompts, engine.limits.tokens)
    each = model.cache_bytes(0)
    batches = ((ids.numel(), len(ids) * each, (ids,)) for ids in (ids_of([prompts[i] for i in one]) for one in groups))
    try:
        for which, saved in zip(groups, engine.each(states_after, batches)):
            if missing := [layer for layer in model.linear_layers if layer not in saved]:
                raise RunError(
                    f"{model.name}: L{missing[0]} has no recurrent state in the cache: its rank cannot be read"
                )
            yield which, saved
    except Exception as error:
        if not out_of_memory(error):
            raise
        raise RunError(
            f"out of memory with prompts of {max(map(len, prompts))} tokens: use --batch-tokens, --dtype bfloat16, or a shorter --text"
        ) from error


# -- what the rows say ---------------------------------------------------------------------------------------------
def conclude(rows: pd.DataFrame, setting: Setting) -> Conclusion:
    """Encode's effective rank against the Address', at the dictionary's end, over the same prompts."""
    rows = select(rows, experiment="state-rank")
    rows = rows.assign(role=rows["block"].map(roles(setting.layout, setting.circuit)))
    figures: dict[str, Any] = {}
    for source, mark in [*(("task", mark) for mark in TASK_MARKS), *(("text", str(mark)) for mark in TEXT_MARKS)]:
        some = select(rows, source=source, mark=mark)
        if len(some):
            name = mark if source == "task" else f"text, {mark} tokens"
            figures[name] = {role: str(e) for role in ROLES if (e := median(by_head(some, role))).n}
    rows = select(rows, source="task", mark=END)
    figures["dead heads"] = int(rows[rows["effective_rank"] == 0].groupby(["layer", "head"]).ngroups)
    circuit = setting.circuit or Circuit()
    lacking = [name for name, found in (("Encode", circuit.encode), ("Address", circuit.address)) if not found]
    if lacking:
        return Conclusion("undecided", f"`find` names no {' and no '.join(lacking)} here: nothing to compare", figures)
    encode, address = by_head(rows, "Encode"), by_head(rows, "Address")
    gap = less(encode, address)
    figures["Encode minus Address"] = str(gap)
    if not gap.n:
        return Conclusion("undecided", "every state of Encode or of the Address is zero", figures)
    others = {role: median(by_head(rows, role)) for role in ("feeder", "after")}
    why = (
        f"at the dictionary's end the states of Encode have an effective rank of {median(encode)}, of the Address {median(address)}"
        f" (difference {gap})" + "".join(f", {role} {e}" for role, e in others.items() if e.n)
    )
    if gap.high < 0:
        return Conclusion("holds", why, figures)
    return Conclusion("does not hold" if gap.low >= 0 else "undecided", why, figures)


def by_head(rows: pd.DataFrame, role: str, measure: str = "effective_rank") -> pd.DataFrame:
    """(prompts, heads) of the heads in blocks of a role; states that are zero are left out (NaN)."""
    rows = select(rows, role=role)
    return rows[rows["effective_rank"] > 0].pivot(index="pair", columns=["layer", "head"], values=measure)


def median(heads: pd.DataFrame) -> Estimate:
    """The median over prompts and heads."""
    values = heads.to_numpy(float)
    return _over_prompts(lambda chosen: np.nanmedian(values[chosen]), len(heads))


def less(a: pd.DataFrame, b: pd.DataFrame) -> Estimate:
    """median(a) - median(b), over the prompts in both: the same prompts are drawn for each."""
    both = a.index.intersection(b.index)
    one, other = a.loc[both].to_numpy(float), b.loc[both].to_numpy(float)
    return _over_prompts(lambda chosen: np.nanmedian(one[chosen]) - np.nanmedian(other[chosen]), len(both))


def _over_prompts(statistic: Callable[[np.ndarray], float], n: int) -> Estimate:
    """A statistic of n prompts, with a percentile bootstrap over them; of one prompt the interval is without bound."""
    if n < 2:
        return Estimate(float(statistic(np.arange(n))), n, -np.inf, np.inf) if n else NOTHING
    drawn = np.random.default_rng(0).integers(0, n, (RESAMPLES, n))
    low, high = np.percentile([statistic(chosen) for chosen in drawn], [2.5, 97.5])
    return Estimate(float(statistic(np.arange(n))), n, float(low), float(high))
