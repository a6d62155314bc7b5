"""J of a lens by plain torch alone: hooks and autograd, and finite differences; and prompts for both."""

from __future__ import annotations

import random

import torch

TWO = ("qwen3_5_text", "granite")
SKIP, LENGTH, WIDTH = 4, 20, 48
TOKENS = (31, 7, 200, 64)


def prompts(n, seed=0, length=LENGTH):
    draw = random.Random(seed)
    return [[draw.randrange(4, 240) for _ in range(length)] for _ in range(n)]


def kept(output):
    return output[0] if isinstance(output, tuple) else output


def plain_jacobian(module, ids, layers, skip, width):
    """J of one prompt by torch hooks alone, of the plain module, one direction at a time."""
    outputs, hooks = {}, []
    decoder = module.get_decoder().layers
    for i, layer in enumerate(decoder):
        hooks.append(layer.register_forward_hook(lambda _m, _i, o, i=i: outputs.update({i: kept(o)})))
    embedded = module.get_input_embeddings().register_forward_hook(lambda _m, _i, o: o.requires_grad_())
    module.requires_grad_(False)
    module(torch.tensor([ids] * width), use_cache=False)
    for hook in (*hooks, embedded):
        hook.remove()
    final = outputs[len(decoder) - 1]
    d, valid = final.shape[-1], range(skip, len(ids) - 1)
    out = {layer: torch.zeros(d, d) for layer in layers}
    for start in range(0, d, width):
        seed = torch.zeros_like(final)
        for row, direction in enumerate(range(start, min(start + width, d))):
            for place in valid:
                seed[row, place, direction] = 1.0
        for layer in layers:
            (gradient,) = torch.autograd.grad(final, outputs[layer], seed, retain_graph=True)
            for row, direction in enumerate(range(start, min(start + width, d))):
                out[layer][direction] = gradient[row, skip : len(ids) - 1].mean(0)
    return out


def finite_difference(module, ids, layer, skip, moved, size):
    """J moved, by running the plain module twice: each batch row moves the layer's output at one valid position."""
    decoder, valid = module.get_decoder().layers, list(range(skip, len(ids) - 1))
    seen = []
    for sign in (1, -1):

        def push(_module, _inputs, output, sign=sign):
            for row, place in enumerate(valid):
                kept(output)[row, place] += sign * size * moved

        hooks = [decoder[layer].register_forward_hook(push)]
        hooks.append(decoder[-1].register_forward_hook(lambda _m, _i, o: seen.append(kept(o).clone())))
        with torch.no_grad():
            module(torch.tensor([ids] * len(valid)), use_cache=False)
        for hook in hooks:
            hook.remove()
    return ((seen[0] - seen[1]) / (2 * size))[:, valid].sum(1).mean(0)
