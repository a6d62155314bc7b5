"""In-trace measures: what one forward tells, reduced to small tensors before it leaves the trace.

Torch only, as everything that runs inside a trace. The statistics are in `stats`, the metrics over rows of a
table in `metrics`.
"""

import torch


def answer(logits, tokens):
    """What the model says at the last position.

    `logits` (batch, vocab); `tokens` (batch, m) token ids of interest. Returns `predicted` (batch,) the
    full-vocabulary argmax, `logits` (batch, m) at those tokens, `spread` (batch,) the standard deviation of
    the logits and `finite` (batch,).
    """
    logits = logits.float()
    return {
        "predicted": logits.argmax(-1),
        "logits": logits.gather(1, tokens.to(logits.device)),
        "spread": logits.std(-1),
        "finite": torch.isfinite(logits).all(-1),
    }


def next_token_loss(logits, ids):
    """Mean negative log-likelihood, in nats, of each row's tokens 1..T-1: (batch,). `logits` (batch, T, vocab)."""
    logits = logits[:, :-1].float()
    target = ids[:, 1:].to(logits.device)
    return (logits.logsumexp(-1) - logits.gather(-1, target[..., None])[..., 0]).mean(-1)
