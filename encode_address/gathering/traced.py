"""Forwards of the grid: patch one site, read the last position through a lens at every layer. Torch and nnsight only.

A site is (name, kind, layers, ops): `kind` is residual (a layer's output), mixer or mlp (that module's output), query, key or value
(what attention receives; `ops` names the calls), or state (a linear layer's recurrent state before the last token). What several layers
have is written together. A lens is (rows, matrices): whether its matrices are those of a row lens, and one per layer to read.
"""

import nnsight
import torch

from encode_address.interventions import held_in, mixer_output, query_and_key, read_cache, slots, value_of, write_cache
from encode_address.lens.traced import lens_logits
from encode_address.measure import answer

INSIDE = ("query", "key", "value")  # in the order in which they are looked at; then mixer, mlp, residual


def patch_grid(model, hosts, donors, places, sites, lens, scored, asked, kind, seed=0):
    """Read `hosts` (n, T) without a patch, and with the values of each site at some positions replaced.

    `places`: the positions (n, k) of hosts, and of donors, whose values are exchanged. `kind` says what is written: "donor" (from `donors`
    (n, T)), "identity" (the host's own), "mean" (the mean of the other hosts'), "random" (its own and a random direction as long as the
    difference to the donor's). `scored`: (concepts (n, c), rivals (n, c, m)), token ids, or columns of a row lens. `asked` (n, a): tokens
    whose logits are wanted. Returns, per site name and for "clean": `margin` and `rank` (layers, n, c), `answer` and `landed`.
    """
    wanted = sorted({(layer, what, op) for _, what, layers, ops in sites for layer, op in zip(layers, ops)})
    kept = _captured(model, hosts, donors, places, wanted, kind) if wanted else {}
    n, out = len(hosts), {"clean": _read(model, hosts, places[0], {}, lens, scored, asked)}
    generator = torch.Generator().manual_seed(seed)
    for name, what, layers, ops in sites:
        values = {}
        for layer, op in zip(layers, ops):
            own, other = kept[what, layer][:n], kept[what, layer][n:]
            values[layer] = what, op, _replacement(own, other, kind, generator)
        out[name] = _read(model, hosts, places[0], values, lens, scored, asked)
    return out


def patch_states(model, hosts, donors, sites, lens, scored, asked, kind, seed=0):
    """As `patch_grid`, for sites of kind "state": the recurrent states before the last token; the last token continues from the cache.

    Here "clean" takes the same way. Families whose cache cannot be continued exactly have no such sites.
    """
    both = hosts if kind in ("identity", "mean") else torch.cat([hosts, donors])
    n, length = hosts.shape
    with torch.no_grad(), model.trace(both[:, :-1], use_cache=True, logits_to_keep=1) as tracer:
        cache = tracer.result.cache.save()
    saved = read_cache(cache)
    mine, new = torch.arange(n), torch.arange(n) + len(both)
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, _, layers, _ in [("clean", "state", (), ()), *sites]:
        given, swapped = list(saved), {}
        for layer in layers:
            states = saved[layer]["recurrent"]
            values = _replacement(states[:n], states[n:], kind, generator)
            given[layer] = {**saved[layer], "recurrent": torch.cat([states, values])}
            swapped[layer, "recurrent"] = new
        write_cache(cache, given, mine, swapped)
        last = hosts[:, -1:].to(saved[0][next(iter(saved[0]))].device)
        rest = {
            "input_ids": last,
            "attention_mask": torch.ones(n, length, dtype=torch.long, device=last.device),
            "position_ids": torch.full_like(last, length - 1),
            "cache": cache,
            "use_cache": True,
        }
        with torch.no_grad(), model.lm.trace(**rest) as tracer:
            seen = nnsight.save({"margin": [], "rank": [], "landed": []})
            for i in range(len(model.layers)):
                if i in layers:
                    standing = held_in(*slots(model.layers[i].mixer.inputs[1]["cache"], i)["recurrent"])
                    seen["landed"].append((standing == given[i]["recurrent"][len(both) :].to(standing)).all())
                if i in lens[1]:
                    _look(seen, mixer_output(model.layers[i])[:, -1], i, model, lens, scored)
            seen["answer"] = answer(tracer.result.logits[:, -1], asked)
        out[name] = _packed(seen)
    return out


def final_residuals(model, prompts, layers, asked):
    """The last position of `prompts` (n, T): every layer's output, `residual` (layers, n, d_model) in float32, and `answer`."""
    with torch.no_grad(), model.trace(prompts, logits_to_keep=1) as tracer:
        seen = nnsight.save({"residual": []})
        for i in layers:
            seen["residual"].append(mixer_output(model.layers[i])[:, -1].float().cpu().clone())
        seen["answer"] = answer(tracer.result.logits[:, -1], asked)
    return {"residual": torch.stack(seen["residual"]), "answer": {k: v.cpu() for k, v in seen["answer"].items()}}


def readouts_of(hidden, matrix, norm, head, facts, rows, concepts, rivals):
    """What residuals (n, d_model) say of `concepts` (n, c): `margin` over `rivals` (n, c, m) and `rank`, each (n, c), float32.

    The rank is NaN for a row lens, which knows its own tokens only. `facts`: the model's logits scaling and soft cap.
    """
    if rows:
        logits = hidden.float() @ matrix.to(hidden.device).float().T
    else:
        logits = lens_logits(hidden, matrix, norm, head, *facts)
    n, c = concepts.shape
    own = logits.gather(1, concepts.to(logits.device))
    against = logits.gather(1, rivals.reshape(n, -1).to(logits.device)).view(n, c, -1)
    margin = own - against.mean(-1)
    if rows:
        return margin, torch.full_like(margin, float("nan"))
    ranks = [
        (logits > own[:, i : i + 1]).sum(1).float() for i in range(c)
    ]  # one at a time: the vocabulary may be large
    return margin, torch.stack(ranks, 1)


def _captured(model, hosts, donors, places, wanted, kind):
    """(what, layer) -> the values at `places` of the hosts, and below them of the donors where `kind` needs these."""
    both = hosts if kind in ("identity", "mean") else torch.cat([hosts, donors])
    where = places[0] if kind in ("identity", "mean") else torch.cat(places)
    with torch.no_grad(), model.trace(both, logits_to_keep=1) as tracer:
        kept = nnsight.save({})
        for layer in range(1 + max(entry[0] for entry in wanted)):
            for what in (*INSIDE, "mixer", "mlp", "residual"):
                for at, name, op in wanted:
                    if (at, name) == (layer, what):
                        view = _values(model.layers[layer], what, op)
                        kept[what, layer] = _at(view, where.to(view.device)).clone()
        tracer.stop()
    return kept


def _read(model, hosts, places, values, lens, scored, asked):
    """One trace of `hosts` in which `values`, layer -> (what, op, tensor), are written at `places` (n, k)."""
    with torch.no_grad(), model.trace(hosts, logits_to_keep=1) as tracer:
        seen = nnsight.save({"margin": [], "rank": [], "landed": []})
        for i in range(len(model.layers)):
            if i in values:
                what, op, new = values[i]
                view = _values(model.layers[i], what, op)
                rows, index = torch.arange(len(hosts), device=view.device)[:, None], places.to(view.device)
                view[rows, index] = new.to(view)
                again = _values(model.layers[i], what, op)
                seen["landed"].append((_at(again, index) == new.to(again)).all())
            if i in lens[1]:
                _look(seen, mixer_output(model.layers[i])[:, -1], i, model, lens, scored)
        seen["answer"] = answer(tracer.result.logits[:, -1], asked)
    return _packed(seen)


def _look(seen, hidden, layer, model, lens, scored):
    facts = (model.logits_scaling, model.logits_cap)
    margin, rank = readouts_of(hidden, lens[1][layer], model.final_norm, model.lm_head, facts, lens[0], *scored)
    seen["margin"].append(margin.cpu())
    seen["rank"].append(rank.cpu())


def _packed(seen):
    landed = [bool(one) for one in seen["landed"]]
    said = {name: value.cpu() for name, value in seen["answer"].items()}
    return {"margin": torch.stack(seen["margin"]), "rank": torch.stack(seen["rank"]), "answer": said, "landed": landed}


def _values(layer, what, op):
    """What a site of a decoder layer has, (batch, positions, ...), as a view that can be written."""
    if what == "query" or what == "key":
        return query_and_key(layer.mixer, op)[what == "key"].transpose(1, 2)
    if what == "value":
        return value_of(layer.mixer, op).transpose(1, 2)
    return mixer_output(layer if what == "residual" else getattr(layer, what))


def _at(view, index):
    """(batch, k, ...) of (batch, positions, ...)."""
    return view[torch.arange(view.shape[0], device=view.device)[:, None], index]


def _replacement(own, other, kind, generator):
    """What is written in place of `own`, of the same shape (n, ...)."""
    if kind == "identity":
        return own
    if kind == "donor":
        return other
    if kind == "mean":
        return (own.sum(0, keepdim=True) - own) / (len(own) - 1)
    noise = torch.randn(own.shape, generator=generator).to(own)
    sizes = tuple(range(2, own.ndim)) if own.ndim > 2 else (1,)  # per row and position; a state: per row and head
    scale = (other - own).norm(dim=sizes, keepdim=True) / noise.norm(dim=sizes, keepdim=True)
    return own + noise * scale
