"""Mixer outputs: read, remove, transplant (paper sections 3.2, 3.5, 3.7)."""

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
