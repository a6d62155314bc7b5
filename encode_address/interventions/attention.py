"""Edits of softmax attention by query: which heads speak, and which keys they may see (arXiv 2510.19861).

Notation, per layer: p[b, h, t, s] the weights that query t gives key s, v[b, h, s] the values, o[b, t, h] = sum_s p v; heads are
concatenated and projected by W_o. Head edits set o[b, t, h] := 0 in the input of W_o (its bias, where it has one, stays; an output gate has
been applied). Key edits put sum_s p' v where the attention call returned o, before any gate. Scores are of the unedited p.
"""

import torch

from encode_address.interventions.heads import head_outputs
from encode_address.interventions.query_key import query_and_key


def attention_scores(query, key, scaling, window=None):
    """Scores before the softmax, float32 (batch, heads, queries, keys), -inf where a key may not be seen.

    The last query stands at the last key. `window`: how many keys up to its own a query may see (None: all).
    """
    count, keys = query.shape[2], key.shape[2]
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = torch.einsum("bhqd,bhkd->bhqk", query.float(), key.float()) * scaling
    here = torch.arange(keys - count, keys, device=key.device)[:, None]
    there = torch.arange(keys, device=key.device)[None]
    hidden = there > here if window is None else (there > here) | (there <= here - window)
    return scores.masked_fill(hidden, float("-inf"))


def scores_of(mixer, op, queries):
    """`attention_scores` of what a softmax layer's attention call receives, of its `queries` alone (a slice)."""
    query, key, scaling = query_and_key(mixer, op)
    window = getattr(mixer.source, op).inputs[1].get("sliding_window")
    first, last, _ = queries.indices(query.shape[2])
    seen = key.shape[2] - query.shape[2] + last  # keys up to the last of these queries
    return attention_scores(query[:, :, first:last], key[:, :, :seen], scaling, window)


def sharpness(weights):
    """Negative entropy in bits, (batch, heads, queries): the larger, the fewer keys a head looks at."""
    weights = weights + 1e-12
    return (weights * weights.log2()).sum(-1)


def noise(seed, layer, rows, heads, places):
    """Random numbers (rows, heads, places) that depend on nothing but these: not on what shares a batch or a pass.

    `rows` (n,) and `places` (q,): numbers of the prompts and positions of the queries.
    """
    heads = torch.arange(heads, device=places.device)[None, :, None]
    mixed = rows.to(places)[:, None, None] * 73856093 + heads * 19349663 + places[None, None] * 83492791
    mixed = (mixed + layer * 50331653 + seed * 12582917) & 0x7FFFFFFF
    for _ in range(3):
        mixed = ((mixed ^ (mixed >> 16)) * 0x45D9F3B) & 0x7FFFFFFF
    return (mixed ^ (mixed >> 16)).double()


def best_heads(scores, k):
    """The k heads with the largest scores (batch, heads, queries), by query: true/false, (batch, heads, queries).

    Among equal ones the first: the heads of a query that sees one key are all equal.
    """
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, order, True)


def keep_heads(mixer, kept, heads, queries):
    """The outputs of heads that are not `kept` (batch or 1, heads, queries or 1) := 0 at `queries` (a slice)."""
    outputs = head_outputs(mixer, heads)[:, queries]
    outputs.masked_fill_(~kept.transpose(1, 2)[..., None].to(outputs.device), 0)


def exposed(scores, columns, mode, renorm=False):
    """The weights that are left when keys are hidden: (batch, heads, queries, keys).

    `scores` as `attention_scores` gives them; `columns` (batch, keys): true at the keys that `mode` names. omit: these
    get 0; only: the others do; null: all do; balanced: these share evenly what they get, averaged over heads, from each query,
    and the others get 0. `renorm`: what is left sums to one again, as if the keys were masked (the paper: False). A query that
    may see none of what is left has no weights, and its heads give 0. Raises ValueError for another mode.
    """
    if mode not in ("omit", "only", "balanced", "null"):
        raise ValueError(f"unknown mode {mode!r}: use omit, only, balanced or null")
    weights, inside = scores.softmax(-1), columns[:, None, None].to(scores.device, torch.bool)
    if mode == "null":
        return torch.zeros_like(weights)
    if mode == "balanced":
        inside = inside & (scores > float("-inf"))
        count = inside.sum(-1, keepdim=True).clamp(min=1)
        mass = (weights * inside).sum(-1, keepdim=True).mean(1, keepdim=True)
        return torch.where(inside, 1 / count if renorm else mass / count, 0.0)
    hidden = inside if mode == "omit" else ~inside
    if not renorm:
        return weights.masked_fill(hidden, 0.0)
    left = scores.masked_fill(hidden, float("-inf"))
    return torch.where((left > float("-inf")).any(-1, keepdim=True), left.softmax(-1), 0.0)


def under(weights, value):
    """What heads put out under edited weights (batch, heads, queries, keys), the values (batch, kv_heads, keys, d) being those that the
    attention call receives: (batch, queries, heads, d), float32."""
    value = value.repeat_interleave(weights.shape[1] // value.shape[1], dim=1)[:, :, : weights.shape[3]]
    return torch.einsum("bhqk,bhkd->bqhd", weights, value.float())


def write_outputs(mixer, op, new, queries):
    """What the attention call returns at `queries` (a slice) := `new` (batch, queries, heads, d)."""
    output = getattr(mixer.source, op).output[0]
    output[:, queries] = new.to(output)
