"""The engine's own part inside a trace: apply edits, read attention, read back what was written. Torch only.

An edit is (read, write, stands, arguments): `write(mixer, *arguments)` edits, `read(mixer)` gives the tensor that was
edited, `stands(tensor, *arguments)` whether what was written is in it.
"""

import torch

from encode_address.interventions import entry_attention, remove, remove_head, transplant


def apply_edits(layers, embed, edits, watch, entries):
    """Apply edits in the order of execution and read watched attention on the way.

    `edits` maps a layer (-1: the embeddings) to (read, write, stands, arguments); `watch` maps a softmax layer to
    its attention call's name. Returns the attention per watched layer and, per edit, whether what was written
    stands in the model and the largest change that made: both are read back, not taken from the writer.
    """
    attention, landed, change = {}, {}, {}
    for index in sorted({*edits, *watch}):
        site = embed if index == -1 else layers[index].mixer
        if index in watch:
            attention[index] = entry_attention(site, watch[index], entries)
        if index in edits:
            read, write, stands, arguments = edits[index]
            before = read(site).clone()
            write(site, *arguments)
            landed[index] = stands(read(site), *arguments)
            change[index] = (read(site) - before).abs().amax()
    return {"attention": attention, "landed": landed, "change": change}


def projected_input(mixer):
    return mixer.out_proj.input


def write_value(mixer, value):
    remove([mixer], value)


def value_stands(output, value):
    return (output == (0 if value is None else value[0].to(output))).all()


def write_head(mixer, head, heads):
    remove_head(mixer, head, heads)


def head_stands(inputs, head, heads):
    return (inputs.view(inputs.shape[0], inputs.shape[1], heads, -1)[:, :, head] == 0).all()


def write_donor(mixer, donor, positions, rows):
    transplant([mixer], [donor], positions, rows)


def donor_stands(output, donor, positions, rows):
    index = positions.to(output.device)
    batch = torch.arange(output.shape[0]) if rows is None else rows
    return (output[batch.to(output.device)[:, None], index] == donor.to(output)).all()
