"""The engine's own part inside a trace: apply edits, read attention, read back what was written. Torch only.

An edit is (layer, inside, function, arguments): `function(mixer, *arguments)` edits and returns whether what it
wrote stands in the model, and the largest change that made; both are read back, not taken from the writer.
`inside` edits are made within attention, before its weights are read.
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
    attention per watched layer and, per edit, whether what was written stands and the change it made.
    """
    attention, landed, change = {}, {}, {}
    for index in sorted({edit[0] for edit in edits} | set(watch)):
        site = embed if index == -1 else layers[index].mixer
        for inside in (True, False):
            for number, (layer, within, function, arguments) in enumerate(edits):
                if layer == index and within == inside:
                    landed[number], change[number] = function(site, *arguments)
            if inside and index in watch:
                attention[index] = entry_attention(site, watch[index], entries)
    return {"attention": attention, "landed": landed, "change": change}


def set_value(mixer, value):
    """Every output := zero, or `value` (d_model,)."""
    before = mixer_output(mixer).clone()
    remove([mixer], None if value is None else [value])
    after = mixer_output(mixer)
    return (after == (0 if value is None else value.to(after))).all(), (after - before).abs().amax()


def zero_head(mixer, head, heads):
    """One head's output := zero."""
    before = head_outputs(mixer, heads)[:, :, head].clone()
    remove_head(mixer, head, heads)
    after = head_outputs(mixer, heads)[:, :, head]
    return (after == 0).all(), (after - before).abs().amax()


def put_outputs(mixer, donor, positions, rows):
    """Outputs at `positions` (n, k) of `rows` (n,) := the donor's (n, k, d_model)."""
    before = _at(mixer_output(mixer), rows, positions)
    transplant([mixer], [donor], positions, rows)
    after = _at(mixer_output(mixer), rows, positions)
    return (after == donor.to(after)).all(), (after - before).abs().amax()


def put_query(mixer, op, donor, rows, head):
    """The last position's query of `rows` := the donor's (n, heads, head_dim), of one head or of all (-1)."""
    chosen = slice(None) if head == -1 else slice(head, head + 1)
    rows = rows.to(donor.device)
    before = query_and_key(mixer, op)[0][rows, chosen, -1]
    write_query(mixer, op, donor, rows, head)
    after = query_and_key(mixer, op)[0][rows, chosen, -1]
    return (after == donor[:, chosen].to(after)).all(), (after - before).abs().amax()


def put_key(mixer, op, donor, positions):
    """Keys at `positions` (batch, k) := the donor's (batch, k, kv_heads, head_dim)."""
    rows = torch.arange(donor.shape[0])
    before = _at(query_and_key(mixer, op)[1].transpose(1, 2), rows, positions)
    write_key(mixer, op, donor, positions)
    after = _at(query_and_key(mixer, op)[1].transpose(1, 2), rows, positions)
    return (after == donor.to(after)).all(), (after - before).abs().amax()


def feel_state(mixer, own, rows):
    """Writes nothing: how far the outputs of `rows` are from the host's `own` (n, d_model), after its state was
    swapped in the cache. A change shows that the layer runs from the state that was put there."""
    output = mixer_output(mixer)[:, -1]
    change = (output[rows.to(output.device)] - own.to(output)).abs().amax()
    return torch.isfinite(change), change


def _at(output, rows, positions):
    """A copy of (batch, positions, ...) at `positions` (n, k) of `rows` (n,)."""
    return output[rows.to(output.device)[:, None], positions.to(output.device)].clone()
