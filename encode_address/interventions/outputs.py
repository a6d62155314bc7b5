"""Mixer outputs: read, remove, transplant (paper sections 3.2, 3.5, 3.7); layers run out of their place (3.13)."""

import torch


def mixer_output(mixer):
    """The output tensor (batch, positions, d_model) of a mixer, whether it returns a tensor or a tuple.

    Works for any module whose output comes first, so `model.embed` and a decoder layer are valid "mixers" too.
    """
    output = mixer.output
    return output[0] if isinstance(output, tuple) else output


def capture(mixer, positions):
    """A mixer's outputs at `positions` (batch, k), one list of positions per row: (batch, k, d_model)."""
    output = mixer_output(mixer)
    index = positions.to(output.device)
    rows = torch.arange(output.shape[0], device=output.device)[:, None]
    return output[rows, index].clone()


def remove(mixers, value=None):
    """Mixer outputs of every layer of a block := 0 at all positions, MLPs untouched (paper 3.2).

    `value`: one (d_model,) tensor per mixer to write instead of zero (mean removal).
    """
    for i, mixer in enumerate(mixers):
        output = mixer_output(mixer)
        output[:] = 0 if value is None else value[i].to(output)


def transplant(mixers, donor, positions, rows=None):
    """The host's mixer outputs at `positions` := the donor's (paper 3.7).

    `donor`: one tensor (n, k, d_model) per mixer; `positions`: (n, k), one list of positions per row;
    `rows`: (n,) batch rows to write, all of them when None. Shapes are checked: torch would broadcast.
    """
    for i, mixer in enumerate(mixers):
        output = mixer_output(mixer)
        values = donor[i].to(output)
        index = positions.to(output.device)
        batch = torch.arange(output.shape[0], device=output.device) if rows is None else rows.to(output.device)
        if values.shape != (batch.shape[0], index.shape[1], output.shape[2]) or index.shape[0] != batch.shape[0]:
            raise ValueError(
                f"donor of shape {tuple(values.shape)} for {batch.shape[0]} rows, {tuple(index.shape)} positions, "
                f"width {output.shape[2]}"
            )
        output[batch[:, None], index] = values


def run_layers(layers, residual, mask=None, zeroed=False):
    """The residual stream (batch, positions, d_model) that leaves linear `layers` which `residual` enters, wherever they
    belong: another model's, or this one's own, out of their place. Local models only: a server would take another model's
    layers for its own.

    `mask` is what their mixers get (None for prompts of equal length); linear layers need no positions. `zeroed`: mixers
    give zero, norms and MLPs run.
    """
    hooks = [layer.mixer._module.register_forward_hook(_nothing) for layer in layers] if zeroed else []
    try:
        for layer in layers:
            left = layer(residual, position_embeddings=None, attention_mask=mask, cache=None)
            residual = left[0] if isinstance(left, tuple) else left
    finally:
        for hook in hooks:
            hook.remove()
    return residual


def stitched(residual, layers, entry, exit, mask=None, zeroed=False):
    """h + N(B(M(h)) - M(h)): another model's block B in place of some layers, M the entry map and N the exit map.

    `residual` h (batch, positions, d_host); `entry` and `exit` are (weight, bias) with weight (d_host, d_donor) and (d_donor,
    d_host), or None for the identity. Without an exit map the terms are summed so that the block's own values come out to the bit.
    """
    entered = mapped(residual, entry)
    weights = next(layers[0]._module.parameters())
    left = run_layers(layers, entered.to(weights), mask, zeroed).to(entered)
    if exit is None:
        return (residual - entered) + left
    return residual + mapped(left - entered, exit)


def mapped(values, map):
    """values @ weight + bias, in the values' precision and place; the values themselves where `map` is None."""
    if map is None:
        return values
    weight, bias = map
    return values @ weight.to(values) + bias.to(values)


def _nothing(_module, _inputs, output):
    """A forward hook: zeros instead of a mixer's output."""
    return (torch.zeros_like(output[0]), *output[1:]) if isinstance(output, tuple) else torch.zeros_like(output)
