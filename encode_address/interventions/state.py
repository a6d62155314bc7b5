"""The one accessor and expander of the hybrid cache: recurrent and conv states, keys and values.

Running from a cache changes its tensors in place, so a cache is read once (a copy) and written back, with
whatever rows a batch needs, before every continuation. Some families keep states outside the cache's layers: in a list
of the cache (MiniMax), or on their modules (RecurrentGemma: pass `held`, which is `model.held`).
"""

import torch


def slots(cache, layer, held=None):
    """Where what a `layer` keeps between tokens lies: its name -> (holder, key or attribute).

    Names: `recurrent` and `conv`, `keys` and `values`, and `seen`, how many tokens a sliding window has seen (a number).
    """
    found = dict(held[layer]) if held else {}
    beside = getattr(cache, "linear_cache", ())
    if layer < len(beside) and isinstance(beside[layer], torch.Tensor):
        found["recurrent"] = (beside, layer)
    if layer < len(cache.layers):
        own = cache.layers[layer]
        for name, attribute in (("recurrent", "recurrent_states"), ("conv", "conv_states")):
            if getattr(own, attribute, {}).get(0) is not None:
                found[name] = (getattr(own, attribute), 0)
        for name, attribute in (("keys", "keys"), ("values", "values"), ("seen", "cumulative_length")):
            if getattr(own, attribute, None) is not None and own.keys is not None:
                found[name] = (own, attribute)
    return found


def held_in(holder, key):
    """What a slot holds."""
    return getattr(holder, key) if isinstance(key, str) else holder[key]


def read_cache(cache, held=None):
    """A copy of every tensor a cache holds: one dict per layer.

    Linear layers give `recurrent` and `conv` (where the family has them), softmax layers `keys` and `values`;
    batch is dimension 0.
    """
    saved = []
    for layer in range(max(len(cache), len(held or ()))):
        tensors = {}
        for name, (holder, key) in slots(cache, layer, held).items():
            value = held_in(holder, key)
            # How many tokens a window has seen is one number: a row each, so that it travels with the rest.
            tensors[name] = torch.full((tensors["keys"].shape[0],), value) if name == "seen" else value.clone()
        saved.append(tensors)
    return saved


def write_cache(cache, saved, rows, swapped=None, held=None):
    """Put copies of the `rows` (n,) of a saved cache back into `cache`, which then holds a batch of n.

    `swapped` maps (layer, name) to other rows (n,): a state transplant takes the donor's row of that layer's
    `recurrent` or `conv` state, and everything else from the host's.
    """
    for index, tensors in enumerate(saved):
        places = slots(cache, index, held)
        for name, tensor in tensors.items():
            taken = rows if swapped is None else swapped.get((index, name), rows)
            chosen = tensor.index_select(0, taken.to(tensor.device))
            holder, key = places[name]
            chosen = int(chosen[0]) if name == "seen" else chosen
            if isinstance(key, str):
                setattr(holder, key, chosen)
            else:
                holder[key] = chosen


def write_state_head(cache, layer, head, rows, states):
    """One head's recurrent state of `rows` (n,) of a cache := `states` (n, ...); the other heads keep theirs."""
    held_in(*slots(cache, layer)["recurrent"])[rows, head] = states
