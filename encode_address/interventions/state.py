"""The one accessor and expander of the hybrid cache: recurrent and conv states, keys and values.

Running from a cache changes its tensors in place, so a cache is read once (a copy) and written back, with
whatever rows a batch needs, before every continuation.
"""


def read_cache(cache):
    """A copy of every tensor a cache holds: one dict per layer.

    Linear layers give `recurrent` and `conv`, softmax layers `keys` and `values`; batch is dimension 0.
    """
    saved = []
    for layer in cache.layers:
        if hasattr(layer, "recurrent_states"):
            saved.append({"recurrent": layer.recurrent_states[0].clone(), "conv": layer.conv_states[0].clone()})
        else:
            saved.append({"keys": layer.keys.clone(), "values": layer.values.clone()})
    return saved


def write_cache(cache, saved, rows):
    """Put copies of the `rows` (n,) of a saved cache back into `cache`, which then holds a batch of n."""
    for layer, tensors in zip(cache.layers, saved):
        if "recurrent" in tensors:
            layer.recurrent_states[0] = tensors["recurrent"].index_select(0, rows)
            layer.conv_states[0] = tensors["conv"].index_select(0, rows)
        else:
            layer.keys = tensors["keys"].index_select(0, rows)
            layer.values = tensors["values"].index_select(0, rows)
