"""What runs in traces, and inside them, to fit a lens and to read through it. Torch and nnsight only."""

import nnsight
import torch

from encode_address.interventions.outputs import mixer_output


def summed_gradients(sources, target, cotangents, first):
    """Rows of the Jacobian from each source layer's output to the target layer's: (layers, rows, d_model), float32.

    The trace holds one prompt in each batch row. `sources`: layers in order, below `target`; `cotangents` (rows, d_model)
    are the directions of the target's output whose gradients are taken, as many at a time as the batch has rows: one
    backward pass serves all sources. With valid positions `first` ... T - 2, row c is the mean over valid p of
    sum over valid p' of d (c . target[p']) / d source[p]. Weights need no gradient: the graph starts at the lowest source.
    """
    hidden = []
    for source in sources:
        output = mixer_output(source)
        if not output.requires_grad:
            output.requires_grad_()
        hidden.append(output)
    final = mixer_output(target)
    width, last = final.shape[0], final.shape[1] - 1
    rows = []
    for start in range(0, len(cotangents), width):
        chunk = cotangents[start : start + width].to(final)
        seed = torch.zeros_like(final)
        seed[: len(chunk), first:last] = chunk[:, None]
        more = start + width < len(cotangents)
        gradients = torch.autograd.grad(final, hidden, seed, retain_graph=more)
        means = [g[: len(chunk), first:last].float().mean(1).to(final.device) for g in gradients]
        rows.append(torch.stack(means))
    return torch.cat(rows, 1)


def head_rows(final_norm, lm_head, tokens):
    """The directions of the last layer's output that the logits of `tokens` (k,) read: the norm's gain times the head's rows.

    Returns them, (k, d_model) in float32, and how far the norm is from x / rms(x) times that gain, relative to the gain:
    a norm that also centres or shifts has no such directions, nor has a head with a bias (then NaN).
    """
    weight = lm_head.weight
    probe = torch.full((1, 1, weight.shape[1]), 1024.0).to(weight)  # so large that the norm's epsilon is nothing
    gain = final_norm(probe)[0, 0].float()
    place = torch.arange(weight.shape[1], device=weight.device)
    other = (((place * 7919 % 23) - 8.0) * 64)[None, None].to(weight)
    expected = gain * (other / other.float().square().mean().sqrt())[0, 0].float()
    off = (final_norm(other)[0, 0].float() - expected).abs().max() / gain.abs().max()
    if getattr(lm_head, "bias", None) is not None:
        off = off * float("nan")
    return weight[tokens.to(weight.device)].float() * gain, off


def read_head(model, tokens):
    """`head_rows` of a model, in a trace of its own: `rows` (k, d_model) and `off`, on the CPU."""
    norm, head = model.final_norm, model.lm_head
    with torch.no_grad(), model.trace(torch.zeros(1, 1, dtype=torch.long)) as tracer:
        seen = nnsight.save({})
        rows, off = head_rows(norm, head, tokens)
        seen.update({"rows": rows.cpu(), "off": off.cpu()})
        model.stop(tracer)
    return seen


def lens_logits(hidden, jacobian, final_norm, lm_head, scaling=1.0, cap=None):
    """What the model's head says of J h: (batch, vocab), float32. `hidden` (batch, d_model), `jacobian` (d_model, d_model), or None
    for the identity.

    `scaling` and `cap` are `model.logits_scaling` and `model.logits_cap`. The product is taken in float32.
    """
    carried = hidden if jacobian is None else (hidden.float() @ jacobian.to(hidden.device).float().T).to(hidden)
    logits = lm_head(final_norm(carried[:, None]))[:, 0] / scaling
    return (logits if cap is None else (logits / cap).tanh() * cap).float()


def read_through(model, batch, position, matrices, rows):
    """Read a batch (`input_ids` and what goes with them) at one position, counted from the end, through one lens.

    `matrices`: layer -> the lens's matrix, or None for the identity; `rows`: whether they are those of a row lens. Returns `logits`, layer ->
    (batch, vocab) or (batch, tokens), and `own` (batch, vocab), what the model says there in the same pass: float32, on the CPU.
    """
    facts = (model.final_norm, model.lm_head, model.logits_scaling, model.logits_cap)
    with torch.no_grad(), model.lm.trace(**batch, use_cache=False, logits_to_keep=-position) as tracer:
        seen = nnsight.save({"logits": {}})
        for layer, matrix in matrices.items():
            hidden = mixer_output(model.layers[layer])[:, position]
            logits = hidden.float() @ matrix.to(hidden.device).T if rows else lens_logits(hidden, matrix, *facts)
            seen["logits"][layer] = logits.cpu()
        seen["own"] = tracer.result.logits[:, position].float().cpu().clone()
    return {"logits": seen["logits"], "own": seen["own"]}
