"""Steering (paper section 3.7 put to use): redirect a lookup by editing the Address, and what that costs.

m^L(x, p) is the output of layer L's mixer at position p, (d_model,), and S^L its state before the last token. The host h asks key B, the
donor d the key A of the same dictionary; T is the last token. Edits, for L in the Address:

    output      m^L(h, T) := m^L(d, T)
    state       S^L(h) := S^L(d), recurrent and convolutional
    random      m^L(h, T) := m^L(h, T) + noise of the norm of m^L(d, T) - m^L(h, T)      (control)

Success: the share of hosts that answer with the value of A. What an edit costs is measured while it is there, against the same
tokens without it: the perplexity of the model's next tokens, and KL(without || with), in nats per token,

* of what follows the redirected answer: h, the value of A, and the opening of a text, edited at T, from the answer on;
* of unrelated prompts: a text of the host's length that gets m^L(d, T) in the middle, from there on.

If steering wrecked the model, or moved whatever it touched, these would be far above the random edit's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from encode_address.experiments import transplant
from encode_address.experiments.base import Conclusion, Setting, incapable
from encode_address.experiments.removal import Unit
from encode_address.metrics import select
from encode_address.rule import CONTROL_LOW, REDIRECT_LOW
from encode_address.run.cells import FINAL, Cell, Edit
from encode_address.stats import Estimate, difference, estimate, per_pair
from encode_address.tasks import Prompt, QuestionSwap

SUMMARY = "steer: how often an edit of the Address redirects the answer, and what it costs the text after it and other prompts"
PAPER, N, QUICK_N = "3.7", 100, 40
NEEDS_CIRCUIT, ADAPTIVE = True, False
CONTINUATION = 32  # tokens of text after the redirected answer
HARM = 1.1  # how many times higher the perplexity after an edit may be


def success_cells(items: Sequence[QuestionSwap], unit: Unit, labels: Mapping[str, Any]) -> list[Cell]:
    """Every host as it is, and under each edit."""
    out = []
    for item in items:
        end, lent = item.host.final, {"donor": item.donor, "source": item.host.final}
        outcomes = transplant.outcomes(item, "same-dictionary", item.donor)

        def cell(verb: str, arm: str, item: QuestionSwap = item, outcomes: Any = outcomes, **kwargs: Any) -> Cell:
            given = _labels(item, unit, labels, arm, "answer")
            return Cell(verb, item.host, FINAL, outcomes=outcomes, labels=given, **kwargs)

        out += [
            cell("none", "host"),
            cell("transplant", "output", layers=unit[1], where=end, **lent),
            cell("state", "state", layers=unit[1], where=end, mode="both", **lent),
            *(
                cell("transplant", "random", layers=unit[1], where=end, mode="random", seed=seed, **lent)
                for seed in range(transplant.RANDOM_SEEDS)
            ),
        ]
    return out


def cost_cells(
    items: Sequence[QuestionSwap], unit: Unit, texts: Sequence[Prompt], labels: Mapping[str, Any]
) -> list[Cell]:
    """What follows the redirected answer, and unrelated texts, with the edit and without."""
    out = []
    for item in items:
        text = texts[item.pair % len(texts)].ids
        answer, end = (item.host.choices[item.donor_index],), item.host.final
        host, donor = (_as_text(prompt.ids + answer + text[:CONTINUATION]) for prompt in (item.host, item.donor))
        other, middle = _as_text(text[: len(item.host)]), (len(item.host) // 2,)
        for arm, mode, seed in (("output", "outputs", -1), ("random", "random", 0)):
            edit = Edit("transplant", unit[1], end, donor, end, mode=mode, seed=seed)
            out.append(_cost(item, unit, labels, arm, "continuation", host, edit, after=end[0] + 1))
            edit = Edit("transplant", unit[1], middle, item.donor, end, mode=mode, seed=seed)
            out.append(_cost(item, unit, labels, arm, "unrelated", other, edit, after=middle[0]))
    return out


def _cost(
    item: QuestionSwap, unit: Unit, labels: Mapping[str, Any], arm: str, site: str, host: Prompt, edit: Edit, after: int
) -> Cell:
    return Cell("none", host, also=(edit,), text=True, after=after, labels=_labels(item, unit, labels, arm, site))


def _labels(item: QuestionSwap, unit: Unit, labels: Mapping[str, Any], arm: str, site: str) -> dict[str, Any]:
    return {
        "experiment": "steer", **labels, "position": "final", "block": unit[0], "arm": arm, "site": site,
        "donor": "" if arm == "host" else "same-dictionary", "pair": item.pair, "host_index": item.host_index,
        "donor_index": item.donor_index,
    }  # fmt: skip


def _as_text(ids: tuple[int, ...]) -> Prompt:
    """Tokens of which nothing is asked."""
    return Prompt(ids, {}, "", (), (), -1, -1, ())


def steps(setting: Setting) -> Iterator[list[Cell]]:
    """All at once, of the circuit's Address."""
    circuit, text = setting.circuit, setting.text
    if not circuit or not circuit.address:
        return
    name = "+".join(circuit.address)
    unit = (name, setting.layout.layers_of(name))
    items = setting.task.questions(setting.n, setting.seed)
    labels = {**setting.labels, "split": "confirmation"}
    texts = text.chunks(setting.model.tokenizer, "test", n=text.count)
    longest = max(len(item.host) for item in items)
    texts = [chunk for chunk in texts if len(chunk) >= longest] or _joined(texts, longest)
    yield success_cells(items, unit, labels) + cost_cells(items, unit, texts, labels)


def _joined(texts: Sequence[Prompt], length: int) -> list[Prompt]:
    """Neighbouring chunks put together, where one is shorter than a prompt."""
    size = -(-length // min(map(len, texts)))
    return [
        _as_text(tuple(token for chunk in texts[i : i + size] for token in chunk.ids))
        for i in range(0, len(texts) - size + 1, size)
    ]


def conclude(rows: pd.DataFrame, setting: Setting) -> Conclusion:
    """Steering works if the output edit redirects (more than half, and more than the random edit does) and neither what
    follows nor other text becomes more than HARM times as perplexing."""
    if not setting.circuit or not setting.circuit.address:
        return Conclusion("undecided", "`find` names no Address here")
    rows = select(rows, experiment="steer")
    if problem := incapable(select(rows, arm="host")):
        return problem
    shares = {arm: redirected(rows, arm) for arm in ("output", "state", "random")}
    harm = {(site, arm): perplexity_ratio(rows, site, arm) for site in ("continuation", "unrelated") for arm in ("output", "random")}  # fmt: skip
    drift = {(site, arm): kl(rows, site, arm) for site, arm in harm}
    figures = {
        "redirected": {arm: str(share) for arm, share in shares.items()},
        **{site: {arm: f"perplexity x {harm[site, arm]}, KL {drift[site, arm]} nats" for arm in ("output", "random")}
           for site in ("continuation", "unrelated")},
    }  # fmt: skip
    why = (
        f"the Address's output redirects {shares['output']}, its states {shares['state']}, a random edit of that size {shares['random']}; "
        f"what follows is {harm['continuation', 'output']} times as perplexing (random {harm['continuation', 'random']}), unrelated text "
        f"{harm['unrelated', 'output']} times (random {harm['unrelated', 'random']})"
    )
    apart = difference(_success(rows, "output"), _success(rows, "random"))
    worst = [harm[site, "output"] for site in ("continuation", "unrelated")]
    if shares["output"].high < REDIRECT_LOW or any(e.low > HARM for e in worst):
        return Conclusion("does not hold", why, figures)
    if shares["output"].low >= REDIRECT_LOW and apart.low >= CONTROL_LOW and all(e.high <= HARM for e in worst):
        return Conclusion("holds", why, figures)
    return Conclusion("undecided", why, figures)


def redirected(rows: pd.DataFrame, arm: str) -> Estimate:
    """The share of hosts that answer with the donor's entry under an edit."""
    some = select(rows, arm=arm, site="answer")
    return estimate(some["redirected"], some["pair"])


def perplexity_ratio(rows: pd.DataFrame, site: str, arm: str) -> Estimate:
    """How many times as perplexing the tokens after an edit are: exp of the mean difference of losses per token."""
    some = select(rows, arm=arm, site=site)
    value = difference(per_pair(some, "loss"), per_pair(some, "loss_without"), unit=False)
    return value.exp()


def kl(rows: pd.DataFrame, site: str, arm: str) -> Estimate:
    """How far an edit moves the distributions of what follows it, nats per token."""
    some = select(rows, arm=arm, site=site)
    return estimate(some["kl"], some["pair"])


def _success(rows: pd.DataFrame, arm: str) -> pd.Series:
    return per_pair(select(rows, arm=arm, site="answer"), "redirected")
