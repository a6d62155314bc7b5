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
    """Attention weights (batch, heads, keys) from the last position of a softmax layer, from its own q and k.

    The keys are those there are: a sliding window has weight on its last ones only, and its cache holds no others.
    """
    query, key, scaling = query_and_key(mixer, op)
    window = getattr(mixer.source, op).inputs[1].get("sliding_window")
    if window is not None and window < key.shape[2]:
        near = torch.arange(key.shape[2], device=key.device) >= key.shape[2] - window
        mask = near[None] if mask is None else near[None] & mask.to(key.device, torch.bool)
    return attention_row(query[:, :, -1], key, scaling, mask)


def entry_attention(mixer, op, entries):
    """Attention mass from the last position on each entry: (batch, heads, entries).

    `entries` (batch, entries, keys) is 1 where a token belongs to an entry (paper section 4, reader attention).
    """
    weights = final_attention(mixer, op)
    return torch.einsum("bhk,bek->bhe", weights, entries[:, :, -weights.shape[2] :].to(weights))


def write_query(mixer, op, query, rows=None, head=-1):
    """The last position's query := `query` (n, heads, head_dim), after norm and position encoding (paper 3.8).

    `rows`: (n,) batch rows to write, all of them when None; `head`: one query head, all of them when -1.
    """
    target = query_and_key(mixer, op)[0]
    chosen = slice(None) if head == -1 else slice(head, head + 1)
    batch = torch.arange(target.shape[0], device=target.device) if rows is None else rows.to(target.device)
    if query.shape != (batch.shape[0], target.shape[1], target.shape[3]):
        raise ValueError(f"query of shape {tuple(query.shape)} for {batch.shape[0]} rows of {tuple(target.shape)}")
    target[batch, chosen, -1] = query[:, chosen].to(target)


def write_key(mixer, op, key, positions, rows=None):
    """Keys at `positions` (n, k) := `key` (n, k, kv_heads, head_dim), after norm and position encoding.

    `rows`: (n,) batch rows to write, all of them when None. A key carries its position: take donors from the position
    they are written to.
    """
    _write(query_and_key(mixer, op)[1], "key", key, positions, rows)


def value_of(mixer, op):
    """What the attention call receives as values: (batch, kv_heads, k, head_dim)."""
    return getattr(mixer.source, op).inputs[0][3]


def write_value(mixer, op, value, positions, rows=None):
    """Values at `positions` (n, k) := `value` (n, k, kv_heads, head_dim); `rows` as in `write_key`."""
    _write(value_of(mixer, op), "value", value, positions, rows)


def gates(mixer, heads):
    """The output gates of a gated softmax mixer, before the sigmoid: (batch, positions, heads, head_dim).

    Its query projection gives, per head, the query and then the gate (paper section 2.1, Qwen3.5).
    """
    both = mixer.q_proj.output
    return both.view(both.shape[0], both.shape[1], heads, 2, -1)[:, :, :, 1]


def write_gate(mixer, heads, gate, rows=None, head=-1):
    """The last position's output gate := `gate` (n, heads, head_dim); `rows` and `head` as in `write_query`."""
    target = gates(mixer, heads)
    chosen = slice(None) if head == -1 else slice(head, head + 1)
    batch = torch.arange(target.shape[0], device=target.device) if rows is None else rows.to(target.device)
    if gate.shape != (batch.shape[0], *target.shape[2:]):
        raise ValueError(f"gate of shape {tuple(gate.shape)} for {batch.shape[0]} rows of {tuple(target.shape)}")
    target[batch, -1, chosen] = gate[:, chosen].to(target)


def _write(target, name, new, positions, rows):
    target = target.transpose(1, 2)
    index = positions.to(target.device)
    batch = torch.arange(target.shape[0], device=target.device) if rows is None else rows.to(target.device)
    if new.shape != (batch.shape[0], index.shape[1], *target.shape[2:]):
        raise ValueError(
            f"{name} of shape {tuple(new.shape)} for {tuple(index.shape)} positions of {tuple(target.shape)}"
        )
    target[batch[:, None], index] = new.to(target)
