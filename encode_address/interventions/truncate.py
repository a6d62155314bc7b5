"""Truncation: what the model says when it stops after a layer (paper section 3.1)."""


def truncated_logits(layer, final_norm, lm_head, scaling=1.0, every=False):
    """Logits at the last position, (batch, vocab), of the model without the layers above `layer`.

    The final norm and the head read that layer's output; `scaling` is `model.logits_scaling`. `every`: at all positions,
    (batch, positions, vocab).
    """
    if every:
        return lm_head(final_norm(layer.output)) / scaling
    return lm_head(final_norm(layer.output[:, -1:]))[:, -1] / scaling
