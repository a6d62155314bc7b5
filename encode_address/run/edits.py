"""The engine's own part inside a trace: apply edits, read attention, read back what was written. Torch only.

An edit is (layer, inside, function, arguments): `function(mixer, *arguments)` edits and returns whether what it
wrote stands in the model, read back, not taken from the writer. `inside` edits are made before the mixer's output,
and before attention weights are read.
"""

import torch

from encode_address.interventions import (
    entry_attention,
    head_outputs,
    mixer_output,
    query_and_key,
    remove,
    remove_head,
    transplant,
    write_key,
    write_query,
)


def enter(layers, start, residual):
    """Begin at layer `start` with the residual stream (batch, positions, d_model); the layers below do not run."""
    for i in range(start):
        layers[i].skip(residual)


def apply_edits(layers, embed, edits, watch, entries):
    """Apply edits in the order of execution and read watched attention on the way.

    Layer -1 stands for the embeddings; `watch` maps a softmax layer to its attention call's name. Returns the
    attention per watched layer and, per edit, whether what was written stands.
    """
    attention, landed = {}, {}
    for index in sorted({edit[0] for edit in edits} | set(watch)):
        site = embed if index == -1 else layers[index].mixer
        for inside in (True, False):
            for number, (layer, within, function, arguments) in enumerate(edits):
                if layer == index and within == inside:
                    landed[number] = function(site, *arguments)
            if inside and index in watch:
                attention[index] = entry_attention(site, watch[index], entries)
    return {"attention": attention, "landed": landed}


def set_value(mixer, value):
    """Every output := zero, or `value` (d_model,)."""
    remove([mixer], None if value is None else [value])
    after = mixer_output(mixer)
    return (after == (0 if value is None else value.to(after))).all()


def zero_head(mixer, head, heads):
    """One head's output := zero."""
    remove_head(mixer, head, heads)
    return (head_outputs(mixer, heads)[:, :, head] == 0).all()


def put_outputs(mixer, donor, positions, rows):
    """Outputs at `positions` (n, k) of `rows` (n,) := the donor's (n, k, d_model)."""
    transplant([mixer], [donor], positions, rows)
    after = _at(mixer_output(mixer), rows, positions)
    return (after == donor.to(after)).all()


def put_query(mixer, op, donor, rows, head):
    """The last position's query of `rows` := the donor's (n, heads, head_dim), of one head or of all (-1)."""
    write_query(mixer, op, donor, rows, head)
    chosen = slice(None) if head == -1 else slice(head, head + 1)
    after = query_and_key(mixer, op)[0][rows.to(donor.device), chosen, -1]
    return (after == donor[:, chosen].to(after)).all()


def put_key(mixer, op, donor, positions):
    """Keys at `positions` (batch, k) := the donor's (batch, k, kv_heads, head_dim)."""
    write_key(mixer, op, donor, positions)
    after = _at(query_and_key(mixer, op)[1].transpose(1, 2), torch.arange(donor.shape[0]), positions)
    return (after == donor.to(after)).all()


def state_stands(mixer, layer, name, donor, rows):
    """Writes nothing: whether the mixer runs from the states that were put into its cache.

    `donor` (n, k): the first k numbers of the state that each of `rows` (n,) should have; `name` is recurrent or conv.
    """
    states = mixer.inputs[1]["cache"].layers[layer]
    state = states.recurrent_states[0] if name == "recurrent" else states.conv_states[0]
    return (state.flatten(1)[rows.to(state.device), : donor.shape[1]] == donor.to(state.device)).all()


def _at(output, rows, positions):
    """What (batch, positions, ...) has at `positions` (n, k) of `rows` (n,)."""
    return output[rows.to(output.device)[:, None], positions.to(output.device)]
