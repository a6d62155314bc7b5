"""The one accessor and expander of the hybrid cache: recurrent and conv states, keys and values.

Running from a cache changes its tensors in place, so a cache is read once (a copy) and written back, with
whatever rows a batch needs, before every continuation.
"""


def read_cache(cache):
    """A copy of every tensor a cache holds: one dict per layer.

    Linear layers give `recurrent` and `conv` (where the family has them), softmax layers `keys` and `values`;
    batch is dimension 0.
    """
    saved = []
    for layer in cache.layers:
        if hasattr(layer, "recurrent_states"):
            tensors = {"recurrent": layer.recurrent_states[0], "conv": layer.conv_states[0]}
        else:
            tensors = {"keys": layer.keys, "values": layer.values}
        saved.append({name: tensor.clone() for name, tensor in tensors.items() if tensor is not None})
    return saved


def write_cache(cache, saved, rows, swapped=None):
    """Put copies of the `rows` (n,) of a saved cache back into `cache`, which then holds a batch of n.

    `swapped` maps (layer, name) to other rows (n,): a state transplant takes the donor's row of that layer's
    `recurrent` or `conv` state, and everything else from the host's.
    """
    for index, (layer, tensors) in enumerate(zip(cache.layers, saved)):
        for name, tensor in tensors.items():
            taken = rows if swapped is None else swapped.get((index, name), rows)
            chosen = tensor.index_select(0, taken.to(tensor.device))
            if name == "recurrent":
                layer.recurrent_states[0] = chosen
            elif name == "conv":
                layer.conv_states[0] = chosen
            elif name == "keys":
                layer.keys = chosen
            else:
                layer.values = chosen


def write_state_head(cache, layer, head, rows, states):
    """One head's recurrent state of `rows` (n,) of a cache := `states` (n, ...); the other heads keep theirs."""
    cache.layers[layer].recurrent_states[0][rows, head] = states
