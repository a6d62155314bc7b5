"""Forwards of the grid: patch one site, read the last position through a lens at every layer. They run where the model is: torch and
nnsight only, plain data in, scores out.

A site is (name, kind, layers, ops): `kind` is residual (a layer's output), mixer or mlp (that module's output), query, key or value
(what attention receives; `ops` names the calls), or state (a linear layer's recurrent state before the last token). What several layers
have is written together. A lens is (rows, matrices): whether its matrices are those of a row lens, and one per layer to read, None for
the identity. A batch is a dict:

    hosts, donors   token ids (n, T); of one length in a batch
    places          positions of hosts, and of donors, whose values are exchanged: two tensors (n, k). Of states, the last token's
    concepts        (n, c), and `rivals` (n, c, m): token ids, or columns of a row lens
    asked           (n, a): tokens whose logits are wanted
    seeds           layer -> one per row, of its random direction there
"""

import nnsight
import torch

from encode_address.interventions import held_in, mixer_output, query_and_key, read_cache, slots, value_of, write_cache
from encode_address.lens.traced import lens_logits
from encode_address.measure import answer

INSIDE = ("query", "key", "value")  # in the order in which they are looked at; then mixer, mlp, residual


def patch_batches(model, batches, sites, lens, kind):
    """Per batch, what `patch_grid` gives, or `patch_states` for sites that are states."""
    for _, _, layers, ops in sites:
        for layer, op in zip(layers, ops):
            if op:
                model.layers[layer].mixer.source  # noqa: B018 (nnsight instruments a module that no trace has begun)
    patch = patch_states if sites and sites[0][1] == "state" else patch_grid
    return [patch(model, batch, sites, lens, kind) for batch in batches]


def patch_grid(model, batch, sites, lens, kind):
    """Read the hosts without a patch, and with the values of each site at some positions replaced.

    `kind` says what is written: "donor" (the donor's), "identity" (the host's own), "mean" (the mean of the other hosts'), "random" (its
    own and a random direction as long as the difference to the donor's). Returns, per site name and for "clean": `margin` and `rank`
    (layers, n, c), `answer` and `landed`, per layer of the site.
    """
    hosts, places = batch["hosts"], batch["places"][0]
    wanted = sorted({(layer, what, op) for _, what, layers, ops in sites for layer, op in zip(layers, ops)})
    kept = captured(model, batch, wanted, kind) if wanted else {}
    n, out = len(hosts), {"clean": read_patched(model, hosts, places, {}, lens, batch)}
    for name, what, layers, ops in sites:
        values = {}
        for layer, op in zip(layers, ops):
            own, other = kept[what, layer][:n], kept[what, layer][n:]
            values[layer] = what, op, replacement(own, other, kind, batch["seeds"].get(layer))
        out[name] = read_patched(model, hosts, places, values, lens, batch)
    return out


def patch_states(model, batch, sites, lens, kind):
    """As `patch_grid`, for sites of kind "state": the recurrent states before the last token; the last token continues from the cache.

    Here "clean" takes the same way. Families whose cache cannot be continued exactly have no such sites.
    """
    hosts = batch["hosts"]
    both = hosts if kind in ("identity", "mean") else torch.cat([hosts, batch["donors"]])
    n, length = hosts.shape
    cache = model.prefix(both[:, :-1])
    saved = read_cache(cache)
    mine, new = torch.arange(n), torch.arange(n) + len(both)
    out = {}
    for name, _, layers, _ in [("clean", "state", (), ()), *sites]:
        given, swapped = list(saved), {}
        for layer in layers:
            states = saved[layer]["recurrent"]
            values = replacement(states[:n], states[n:], kind, batch["seeds"].get(layer))
            given[layer] = {**saved[layer], "recurrent": torch.cat([states, values])}
            swapped[layer, "recurrent"] = new
        write_cache(cache, given, mine, swapped)
        with torch.no_grad(), model.lm.trace(**model.continuation(hosts[:, -1:], length, cache)) as tracer:
            seen = nnsight.save({"margin": [], "rank": [], "landed": []})
            for i in range(len(model.layers)):
                if i in layers:
                    standing = held_in(*slots(model.layers[i].mixer.inputs[1]["cache"], i)["recurrent"])
                    seen["landed"].append((standing == given[i]["recurrent"][len(both) :].to(standing)).all())
                if i in lens[1]:
                    look(seen, mixer_output(model.layers[i])[:, -1], i, model, lens, batch)
            seen["answer"] = answer(tracer.result.logits[:, -1], batch["asked"])
        out[name] = packed(seen)
    return out


def final_residuals(model, batches, layers):
    """Every layer's output at the last position of `batches` of prompts, each (n, T): (layers, all prompts, d_model), float32."""
    found = []
    for ids in batches:
        with torch.no_grad(), model.trace(ids, logits_to_keep=1) as tracer:
            seen = nnsight.save([])
            for i in layers:
                seen.append(mixer_output(model.layers[i])[:, -1].float().cpu().clone())
            model.stop(tracer)
        found.append(torch.stack(seen))
    return torch.cat(found, 1)


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
    # One concept at a time: the vocabulary may be large.
    ranks = [(logits > own[:, i : i + 1]).sum(1).float() for i in range(c)]
    return margin, torch.stack(ranks, 1)


def captured(model, batch, wanted, kind):
    """(what, layer) -> the values at the places of the hosts, and below them of the donors where `kind` needs these."""
    alone = kind in ("identity", "mean")
    both = batch["hosts"] if alone else torch.cat([batch["hosts"], batch["donors"]])
    where = batch["places"][0] if alone else torch.cat(batch["places"])
    with torch.no_grad(), model.trace(both, logits_to_keep=1) as tracer:
        kept = nnsight.save({})
        for layer in range(1 + max(entry[0] for entry in wanted)):
            for what in (*INSIDE, "mixer", "mlp", "residual"):
                for at, name, op in wanted:
                    if (at, name) == (layer, what):
                        view = site_values(model.layers[layer], what, op)
                        kept[what, layer] = at_places(view, where.to(view.device)).clone()
        model.stop(tracer)
    return kept


def read_patched(model, hosts, places, values, lens, batch):
    """One trace of `hosts` in which `values`, layer -> (what, op, tensor), are written at `places` (n, k)."""
    with torch.no_grad(), model.trace(hosts, logits_to_keep=1) as tracer:
        seen = nnsight.save({"margin": [], "rank": [], "landed": []})
        for i in range(len(model.layers)):
            if i in values:
                what, op, new = values[i]
                view = site_values(model.layers[i], what, op)
                rows, index = torch.arange(len(hosts), device=view.device)[:, None], places.to(view.device)
                view[rows, index] = new.to(view)
                again = site_values(model.layers[i], what, op)
                seen["landed"].append((at_places(again, index) == new.to(again)).all())
            if i in lens[1]:
                look(seen, mixer_output(model.layers[i])[:, -1], i, model, lens, batch)
        seen["answer"] = answer(tracer.result.logits[:, -1], batch["asked"])
    return packed(seen)


def look(seen, hidden, layer, model, lens, batch):
    facts = (model.logits_scaling, model.logits_cap)
    scored = batch["concepts"], batch["rivals"]
    margin, rank = readouts_of(hidden, lens[1][layer], model.final_norm, model.lm_head, facts, lens[0], *scored)
    seen["margin"].append(margin.cpu())
    seen["rank"].append(rank.cpu())


def packed(seen):
    landed = [bool(one) for one in seen["landed"]]
    said = {name: value.cpu() for name, value in seen["answer"].items()}
    return {"margin": torch.stack(seen["margin"]), "rank": torch.stack(seen["rank"]), "answer": said, "landed": landed}


def site_values(layer, what, op):
    """What a site of a decoder layer has, (batch, positions, ...), as a view that can be written."""
    if what == "query" or what == "key":
        return query_and_key(layer.mixer, op)[what == "key"].transpose(1, 2)
    if what == "value":
        return value_of(layer.mixer, op).transpose(1, 2)
    return mixer_output(layer if what == "residual" else getattr(layer, what))


def at_places(view, index):
    """(batch, k, ...) of (batch, positions, ...)."""
    return view[torch.arange(view.shape[0], device=view.device)[:, None], index]


def replacement(own, other, kind, seeds):
    """What is written in place of `own`, of the same shape (n, ...). A row's random direction is its own, whatever else is in its batch."""
    if kind == "identity":
        return own
    if kind == "donor":
        return other
    if kind == "mean":
        return (own.sum(0, keepdim=True) - own) / (len(own) - 1)
    like = own.shape[1:]
    noise = torch.stack([torch.randn(like, generator=torch.Generator().manual_seed(one)) for one in seeds]).to(own)
    sizes = tuple(range(2, own.ndim)) if own.ndim > 2 else (1,)  # per row and position; a state: per row and head
    scale = (other - own).norm(dim=sizes, keepdim=True) / noise.norm(dim=sizes, keepdim=True)
    return own + noise * scale
