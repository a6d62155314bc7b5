"""The grid once more in plain torch hooks: capture, patch, read. Knows nothing of nnsight, engine or `gathering`."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager

import torch

from tests.oracle_parts import first, mixer_of


def module_of(layer, what):
    """The module whose output a site is, and how to see (batch, positions, ...) of that output as what the site holds."""
    mixer = mixer_of(layer)
    if what == "residual":
        return layer, lambda out: out
    if what == "mixer":
        return mixer, lambda out: out
    if what == "mlp":
        return first(layer, ("mlp", "shared_mlp")), lambda out: out
    # Before position encoding: at equal positions a rotation of both is the same exchange.
    name = {"query": ("q_norm", "q_proj"), "key": ("k_norm", "k_proj"), "value": ("v_proj",)}[what]
    return first(mixer, name), lambda out: out


def tensor_of(output):
    return output[0] if isinstance(output, tuple) else output


@contextmanager
def hooks(pairs):
    with ExitStack() as stack:
        for module, hook in pairs:
            stack.callback(module.register_forward_hook(hook).remove)
        yield


def forward(module, ids):
    with torch.no_grad():
        return module(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[:, -1].float()


def captured(module, ids, layer, what, positions):
    """The site's values at `positions` (n, k)."""
    where, seen = module_of(module.get_decoder().layers[layer], what)[0], {}
    rows = torch.arange(len(ids))[:, None]
    with hooks([(where, lambda _m, _i, out: seen.update(v=tensor_of(out)[rows, positions].clone()) or None)]):
        forward(module, ids)
    return seen["v"]


def patched(module, ids, layer, what, positions, values):
    """Residual streams (layers, n, d) at the last position, and logits (n, vocab), with a site's values replaced."""
    layers, streams = module.get_decoder().layers, {}
    rows = torch.arange(len(ids))[:, None]

    def put(_module, _inputs, out):
        tensor_of(out)[rows, positions] = values

    def keep(i):
        def hook(_module, _inputs, out):
            streams[i] = tensor_of(out)[:, -1].float().clone()

        return hook

    edits = [] if values is None else [(module_of(layers[layer], what)[0], put)]
    with hooks([*edits, *((one, keep(i)) for i, one in enumerate(layers))]):
        logits = forward(module, ids)
    return torch.stack([streams[i] for i in range(len(layers))]), logits


def state_patched(module, ids, donors, layer):
    """The same with a linear layer's recurrent state before the last token replaced by the donors' (None: not replaced)."""
    layers, streams, caches = module.get_decoder().layers, {}, []
    with torch.no_grad():
        for some in (ids, donors):
            caches.append(module(input_ids=some[:, :-1], use_cache=True).past_key_values)
    if layer is not None:
        caches[0].layers[layer].recurrent_states[0].copy_(caches[1].layers[layer].recurrent_states[0])

    def keep(i):
        def hook(_module, _inputs, out):
            streams[i] = tensor_of(out)[:, -1].float().clone()

        return hook

    with torch.no_grad(), hooks([(one, keep(i)) for i, one in enumerate(layers)]):
        full = torch.ones_like(ids)
        where = torch.full_like(ids[:, -1:], ids.shape[1] - 1)
        out = module(input_ids=ids[:, -1:], attention_mask=full, position_ids=where, cache=caches[0], use_cache=True)
    return torch.stack([streams[i] for i in range(len(layers))]), out.logits[:, -1].float()


def margins(module, stream, jacobian, concepts, rivals):
    """Margin and rank of `concepts` (n, c) over `rivals` (n, c, m) in what the head says of J h."""
    decoder, scaling = module.get_decoder(), getattr(module.config, "logits_scaling", 1.0)
    with torch.no_grad():
        logits = module.get_output_embeddings()(decoder.norm((stream @ jacobian.T)[:, None]))[:, 0] / scaling
    logp = logits.log_softmax(-1)
    margin, rank = torch.empty(concepts.shape), torch.empty(concepts.shape)
    for i, row in enumerate(concepts.tolist()):
        for j, token in enumerate(row):
            margin[i, j] = logp[i, token] - logp[i, rivals[i, j]].mean()
            rank[i, j] = (logp[i] > logp[i, token]).sum()
    return margin, rank
