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


def drift(logits, ids, after):
    """How far edits move what is said after a position. `logits` (2n, T, vocab) and `ids` (2n, T) hold n edited rows and the
    same rows without edits; `after` (n,). Returns, per edited row and as means over the positions from `after` on that have
    a next token, in nats: `loss` and `loss_without`, the negative log-likelihood of that token, and `kl`, the divergence
    KL(without edits || with edits) of its distribution."""
    n = logits.shape[0] // 2
    logp = logits[:, :-1].float().log_softmax(-1)
    loss = -logp.gather(-1, ids[:, 1:].to(logits.device)[..., None])[..., 0]
    kl = (logp[n:].exp() * (logp[n:] - logp[:n])).sum(-1)
    place = torch.arange(kl.shape[1], device=kl.device)[None]
    counted = (place >= after.to(kl.device)[:, None]).to(kl)
    mean = {"loss": loss[:n], "loss_without": loss[n:], "kl": kl}
    return {name: (values * counted).sum(-1) / counted.sum(-1) for name, values in mean.items()}
