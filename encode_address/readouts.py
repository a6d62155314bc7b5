"""How far a value can be read from a vector of logits (arXiv 2608.15022): three readouts of one rank, and forced choice.

* R, the percentile rank 1 - r / (V - 1). It saturates: in a large vocabulary ranks 1 and 25 differ by 1e-4. Rows where the next rank
  would read above `SATURATED` as well are marked, and R is never to be shown without their share.
* L, -log10(r + 1): 0 is the top, and each unit a factor of ten.
* M, the margin log p(value) - mean log p(rivals), in nats; it has no bound, and says nothing of the rest of the vocabulary.

r is the number of tokens with a strictly larger logit, V the size of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch

from encode_address.errors import RunError
from encode_address.stats import NOTHING, Estimate, wilson

SATURATED = 0.999
SATURATING = ("R",)


def readouts(logits: Any, value: Any, rivals: Any, tokens: Sequence[int] | None = None) -> pd.DataFrame:
    """Columns `rank`, `R`, `L`, `M`, `saturated` and `unit`, one row per row of `logits` (n, V).

    `value` (n,): token ids of the value that is looked for; `rivals` (n, m): those of its rivals. `tokens`: what the columns of
    `logits` stand for where they are a row lens's scores and not the whole vocabulary; then only `M` is known, up to a positive
    factor per row (`unit` is "relative", else "nats"), and the others are NaN (`saturated`: None). Raises RunError for logits that are
    not finite, ids that are not there, or a value among its own rivals.
    """
    logits, value, rivals = _prepared(logits, tokens, value, rivals)
    if rivals.shape[1] < 1 or (rivals == value).any():
        raise RunError("a margin needs rivals that are other tokens than the value itself")
    own = logits.gather(1, value)
    margin = (own - logits.gather(1, rivals).mean(1, keepdim=True))[:, 0].numpy()
    if tokens is not None:
        nothing = {name: float("nan") for name in ("rank", "R", "L")}
        return pd.DataFrame({**nothing, "M": margin, "saturated": None, "unit": "relative"}, index=range(len(margin)))
    rank, most = (logits > own).sum(1), max(1, logits.shape[1] - 1)
    percentile = 1 - rank.double() / most
    return pd.DataFrame(
        {
            "rank": rank.numpy(),
            "R": percentile.numpy(),
            "L": -torch.log10(rank.double() + 1).numpy(),
            "M": margin,
            "saturated": (percentile - 1 / most > SATURATED).numpy(),
            "unit": "nats",
        }
    )


def forced_choice(logits: Any, candidates: Any, gold: Any, tokens: Sequence[int] | None = None) -> pd.DataFrame:
    """Columns `chosen` (token id) and `correct`, one row per row of `logits` (n, V).

    `candidates` (n, k): the token ids to choose among; `gold` (n,): the right one of them. Where two are equally likely the first
    is `chosen`, and the row is not correct whichever it is: the order of candidates must not help. `tokens` as in `readouts`.
    Raises RunError as `readouts` does, and where the right one is not among the candidates, or one is there twice.
    """
    ids, right = torch.as_tensor(candidates), torch.as_tensor(gold)
    logits, places, golds = _prepared(logits, tokens, candidates, gold)
    if ((places == golds).sum(1) != 1).any():
        raise RunError("a forced choice needs the right answer among its candidates, once")
    ordered = places.sort(1).values
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        raise RunError("a forced choice has one candidate twice")
    scores = logits.gather(1, places)
    best = scores.argmax(1)
    alone = (scores == scores.max(1, keepdim=True).values).sum(1) == 1
    chosen = ids.reshape(places.shape).gather(1, best[:, None])[:, 0]
    return pd.DataFrame({"chosen": chosen.numpy(), "correct": (alone & (chosen == right.reshape(-1))).numpy()})


def accuracy(rows: pd.DataFrame) -> Estimate:
    """The share of `correct` rows with its n and 95 % interval (Wilson)."""
    return wilson(int(rows["correct"].sum()), len(rows)) if len(rows) else NOTHING


def saturation(rows: pd.DataFrame) -> Estimate:
    """The share of rows whose R no longer tells one rank from the next, with its n and interval: to be shown beside R."""
    known = rows["saturated"].dropna().astype(bool)
    return wilson(int(known.sum()), len(known)) if len(known) else NOTHING


def _prepared(logits: Any, tokens: Sequence[int] | None, *wanted: Any) -> list[torch.Tensor]:
    """Logits (n, V) in float64, and ids as columns of them, each (n, m)."""
    logits = torch.as_tensor(logits).double().cpu()
    if logits.ndim != 2 or not torch.isfinite(logits).all():
        raise RunError("readouts need finite logits, one row per prompt; try --dtype float32")
    n, columns = logits.shape
    if tokens is not None and len(tokens) != columns:
        raise RunError(f"{columns} scores for {len(tokens)} tokens: give the tokens of the lens that was read")
    place = None if tokens is None else {int(token): i for i, token in enumerate(tokens)}
    out = [logits]
    for ids in wanted:
        ids = torch.as_tensor(ids).cpu()
        if ids.ndim not in (1, 2) or len(ids) != n:
            raise RunError(f"token ids of shape {tuple(ids.shape)} for {n} rows of logits: give one row of ids per row")
        ids = ids.reshape(n, -1).long()
        there = range(columns) if place is None else place
        missing = [i for i in ids.flatten().tolist() if i not in there]
        if missing:
            raise RunError(f"token {missing[0]} is not among the {columns} that these logits are of")
        out.append(ids if place is None else ids.clone().apply_(lambda i: place[i]))
    return out
