"""Heads: a head is a slice of its mixer's output-projection input (paper section 2.3), softmax or linear."""


def head_outputs(mixer, heads):
    """The per-head outputs that a mixer projects: (batch, positions, heads, head_dim)."""
    inputs = mixer.out_proj.input
    return inputs.view(inputs.shape[0], inputs.shape[1], heads, -1)


def remove_head(mixer, head, heads):
    """One head's output := 0 at all positions (paper 3.3)."""
    head_outputs(mixer, heads)[:, :, head] = 0
