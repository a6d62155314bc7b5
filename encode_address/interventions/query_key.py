"""Queries, keys and attention of a softmax layer, after norm and position encoding (paper section 3.8)."""

import torch


def query_and_key(mixer, op):
    """What the attention call receives: query (batch, heads, q, head_dim), key (batch, kv_heads, k, head_dim),
    and the score scale. `op` is the call's name, `model.attention_op(layer)`."""
    args, kwargs = getattr(mixer.source, op).inputs
    return args[1], args[2], kwargs["scaling"]


def attention_row(query, key, scaling, mask=None):
    """Attention from one query (batch, heads, head_dim) over all keys (batch, kv_heads, k, head_dim).

    Returns float32 weights (batch, heads, k); keys are shared among query heads as in grouped-query attention.
    `mask` (batch, k): True where a key may be read.
    """
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = torch.einsum("bhd,bhkd->bhk", query.float(), key.float()) * scaling
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, :].to(torch.bool), float("-inf"))
    return scores.softmax(-1)


def final_attention(mixer, op, mask=None):
    """Attention weights (batch, heads, keys) from the last position of a softmax layer, from its own q and k."""
    query, key, scaling = query_and_key(mixer, op)
    return attention_row(query[:, :, -1], key, scaling, mask)


def entry_attention(mixer, op, entries):
    """Attention mass from the last position on each entry: (batch, heads, entries).

    `entries` (batch, entries, keys) is 1 where a token belongs to an entry (paper section 4, reader attention).
    """
    weights = final_attention(mixer, op)
    return torch.einsum("bhk,bek->bhe", weights, entries.to(weights))
