"""Truncation: what the model says when it stops after a layer (paper section 3.1)."""

from encode_address.interventions.outputs import mixer_output


def truncated_logits(layer, final_norm, lm_head, scaling=1.0, every=False, cap=None):
    """Logits at the last position, (batch, vocab), of the model without the layers above `layer`.

    The final norm and the head read that layer's output; `scaling` and `cap` are `model.logits_scaling` and
    `model.logits_cap`. `every`: at all positions, (batch, positions, vocab).
    """
    output = mixer_output(layer)
    logits = lm_head(final_norm(output if every else output[:, -1:])) / scaling
    logits = logits if cap is None else (logits / cap).tanh() * cap
    return logits if every else logits[:, -1]
