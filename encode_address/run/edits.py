"""The engine's own part inside a trace: apply edits, read attention, take values, read back what was written. Torch only.

An edit is (layer, place, function, arguments): `function(site, *arguments)` edits and returns whether what it wrote stands
in the model, read back, not taken from the writer. `place` says when in a layer's forward it happens ("residual", "input",
"state", "gate", "inside" its attention, "heads", "output"): things must be touched in the order in which they are computed.
"""

from encode_address.interventions import (
    entry_attention,
    gates,
    head_outputs,
    held_in,
    mixer_output,
    query_and_key,
    remove,
    remove_head,
    slots,
    transplant,
    value_of,
    write_gate,
    write_key,
    write_query,
    write_value,
)


def enter(layers, start, residual, returns=0):
    """Begin at layer `start` with the residual stream (batch, positions, d_model); the layers below do not run.

    `returns` is the family's `layer_returns`.
    """
    for i in range(start):
        skip(layers[i], residual, returns)


def skip(layer, residual, returns=0):
    """A decoder layer does not run: `residual` leaves it, first in a tuple of `returns` where it returns one."""
    layer.skip((residual, *[None] * (returns - 1)) if returns else residual)


def apply_edits(layers, embed, edits, watch, entries, takes=None):
    """Apply edits in the order of execution, read watched attention and take values on the way.

    Layer -1 stands for the embeddings; `watch` maps a softmax layer to its attention call's name. `takes` are
    (layer, place, what, attention call or None, heads, positions or None for the last). Returns the attention per watched
    layer, per edit whether what was written stands, and what was taken, by (what, layer).
    """
    attention, landed, taken = {}, {}, {}
    takes = takes or []
    for index in sorted({edit[0] for edit in edits} | set(watch) | {take[0] for take in takes}):
        for place in ("residual", "input", "state", "gate", "inside", "heads", "output"):
            for number, (layer, when, function, arguments) in enumerate(edits):
                if layer == index and when == place:
                    landed[number] = function(_site(layers, embed, index, place), *arguments)
            for layer, when, what, op, heads, positions in takes:
                if layer == index and when == place:
                    values = _read(_site(layers, embed, index, place), what, op, heads)
                    chosen = values[:, -1:] if positions is None else values[:, positions.to(values.device)]
                    taken[what, layer] = chosen.clone()
            if place == "inside" and index in watch:
                attention[index] = entry_attention(layers[index].mixer, watch[index], entries)
    return {"attention": attention, "landed": landed, "taken": taken}


def _site(layers, embed, index, place):
    """Where an edit of this layer and place is made: the embeddings, the decoder layer, or its mixer."""
    if index == -1:
        return embed
    return layers[index] if place == "residual" else layers[index].mixer


def _read(site, what, op, heads):
    """(batch, positions, ...): what a site has, as a view that can be written."""
    if what == "output":
        return mixer_output(site)
    if what in ("input", "residual"):
        return site.input
    if what == "gate":
        return gates(site, heads)
    if what == "value":
        return value_of(site, op).transpose(1, 2)
    query, key, _ = query_and_key(site, op)
    return (query if what == "query" else key).transpose(1, 2)


def set_value(mixer, value):
    """Every output := zero, or `value` (d_model,)."""
    remove([mixer], None if value is None else [value])
    after = mixer_output(mixer)
    return (after == (0 if value is None else value.to(after))).all()


def pass_on(layer, returns=0):
    """The decoder layer does not run: what enters it leaves it."""
    residual = layer.input
    skip(layer, residual, returns)
    return (mixer_output(layer) == residual).all()


def pass_through(layer, weight, bias, returns=0):
    """The decoder layer does not run: what enters it leaves it, plus a linear map of it."""
    residual = layer.input
    mapped = residual + residual @ weight.to(residual) + bias.to(residual)
    skip(layer, mapped, returns)
    return (mixer_output(layer) == mapped).all()


def map_outputs(mixer, weight, bias):
    """Every output := a linear map of what enters the mixer at that position."""
    entering = mixer.input
    mapped = entering @ weight.to(entering) + bias.to(entering)
    output = mixer_output(mixer)
    output[:] = mapped
    return (mixer_output(mixer) == mapped).all()


def zero_head(mixer, head, heads):
    """One head's output := zero."""
    remove_head(mixer, head, heads)
    return (head_outputs(mixer, heads)[:, :, head] == 0).all()


def put_outputs(mixer, donor, positions, rows):
    """Outputs at `positions` (n, k) of `rows` (n,) := the donor's (n, k, d_model)."""
    transplant([mixer], [donor], positions, rows)
    after = _at(mixer_output(mixer), rows, positions)
    return (after == donor.to(after)).all()


def put_inputs(site, donor, positions, rows):
    """What enters a mixer, or a decoder layer, at `positions` (n, k) of `rows` (n,) := the donor's (n, k, d_model)."""
    # A new tensor: where no norm stands between them, what enters the mixer is the residual stream itself.
    entering = site.input.clone()
    index = positions.to(entering.device)
    entering[rows.to(index.device)[:, None], index] = donor.to(entering)
    site.input = entering
    after = _at(site.input, rows, positions)
    return (after == donor.to(after)).all()


def put_query(mixer, op, donor, rows, head):
    """The last position's query of `rows` := the donor's (n, 1, heads, head_dim), of one head or of all (-1)."""
    donor = donor[:, 0]
    write_query(mixer, op, donor, rows, head)
    chosen = slice(None) if head == -1 else slice(head, head + 1)
    after = query_and_key(mixer, op)[0][rows.to(donor.device), chosen, -1]
    return (after == donor[:, chosen].to(after)).all()


def put_gate(mixer, heads, donor, rows, head):
    """The last position's output gate of `rows` := the donor's (n, 1, heads, head_dim), of one head or of all (-1)."""
    donor = donor[:, 0]
    write_gate(mixer, heads, donor, rows, head)
    chosen = slice(None) if head == -1 else slice(head, head + 1)
    after = gates(mixer, heads)[rows.to(donor.device), -1, chosen]
    return (after == donor[:, chosen].to(after)).all()


def put_key(mixer, op, donor, positions, rows):
    """Keys at `positions` (n, k) of `rows` (n,) := the donor's (n, k, kv_heads, head_dim)."""
    write_key(mixer, op, donor, positions, rows)
    after = _at(query_and_key(mixer, op)[1].transpose(1, 2), rows, positions)
    return (after == donor.to(after)).all()


def put_value(mixer, op, donor, positions, rows):
    """Values at `positions` (n, k) of `rows` (n,) := the donor's (n, k, kv_heads, head_dim)."""
    write_value(mixer, op, donor, positions, rows)
    after = _at(value_of(mixer, op).transpose(1, 2), rows, positions)
    return (after == donor.to(after)).all()


def state_stands(mixer, layer, name, head, donor, rows, held=None):
    """Writes nothing: whether the mixer runs from the states that were put into its cache, or on its module (`held`).

    `donor` (n, k): the first k numbers of the state (of a `head` of it, unless -1) that each of `rows` (n,) should have;
    `name` is recurrent or conv.
    """
    state = held_in(*slots(mixer.inputs[1]["cache"], layer, held)[name])
    state = state if head == -1 else state[:, head]
    return (state.flatten(1)[rows.to(state.device), : donor.shape[1]] == donor.to(state.device)).all()


def _at(output, rows, positions):
    """What (batch, positions, ...) has at `positions` (n, k) of `rows` (n,)."""
    return output[rows.to(output.device)[:, None], positions.to(output.device)]
