"""Forwards in which attention, or the linear mixers, are edited by phase. Torch and nnsight only; everything else comes as plain data.

A phase is a set of query positions: those before `first` are *prefill*, the others *generation*. `first` is the last token of the
prompt, which so gets a step of its own, or (`boundary="hf"`) the token after it. An edit of a phase is a dict, all of whose entries may be missing:

    k, by, seed    the k best heads of every layer and query speak (`by`: sharp, l2, bottom or random); k = 0: none
    heads          layer -> the heads that speak there; layers that are not named keep all
    mode, span     which keys a query may see, by those of `columns[span]`; `renorm`: both as in `interventions.exposed`
    linear         layer -> "zero", "freeze" (what the mixer put out at the last prefill token) or "swap" (what it puts out in another
                   context: the row's donor)

Two ways to run the same thing. `whole`: one forward over the prompt and the answer's tokens; exact for every family, since an edit of later
queries changes nothing earlier. `stepped`: the prefill once under its edit, then one token at a time from copies of its cache, for
each generation edit; exact where a family continues from its cache, and cheaper the more generation edits share a prefill.
"""

import nnsight
import torch

from encode_address.interventions import (
    best_heads,
    exposed,
    keep_heads,
    mixer_output,
    noise,
    query_and_key,
    read_cache,
    scores_of,
    sharpness,
    under,
    value_of,
    write_cache,
    write_outputs,
)

PREFILL, GENERATION = PHASES = ("prefill", "generation")


def edit_softmax(mixer, op, layer, phases, heads, columns, rows, last):
    """Edit one softmax layer. `phases`: pairs of an edit and the slice of queries it acts on; `columns`: span -> (batch, positions);
    `rows`: numbers of the prompts; `last`: position of the last query. Returns which heads spoke where an edit chose them by score, per
    phase: (batch, heads, queries)."""
    query, key, _ = query_and_key(mixer, op)
    value = value_of(mixer, op)
    count, start = query.shape[2], last + 1 - key.shape[2]
    outputs, speakers, spoke = [], [], []
    for edit, queries in phases:
        k, by, mode = edit.get("k"), edit.get("by", "sharp"), edit.get("mode", "")
        chosen = k is not None and 0 < k < heads
        scores = scores_of(mixer, op, queries) if mode or (chosen and by != "random") else None
        kept = None
        if chosen:
            if by == "random":
                places = torch.arange(*queries.indices(count)[:2], device=key.device) + last + 1 - count
                ranked = noise(edit.get("seed", 0), layer, rows, heads, places)
            else:
                weights = scores.softmax(-1)
                ranked = weights.norm(dim=-1) if by == "l2" else sharpness(weights) * (-1 if by == "bottom" else 1)
            kept = best_heads(ranked, k)
            spoke.append(kept)
        elif k == 0 or layer in edit.get("heads", {}):
            named = torch.zeros(1, heads, 1, dtype=torch.bool)
            named[:, edit["heads"][layer] if k is None else []] = True
            kept = named
        if mode:
            seen = columns[edit["span"]] if mode != "null" else torch.zeros(1, last + 1, dtype=torch.bool)
            seen = seen[:, start : start + scores.shape[3]]
            outputs.append((under(exposed(scores, seen, mode, edit.get("renorm", False)), value), queries))
        if kept is not None:
            speakers.append((kept, queries))
    for new, queries in outputs:  # all is read by now: a trace cannot go back
        write_outputs(mixer, op, new, queries)
    for kept, queries in speakers:
        keep_heads(mixer, kept, heads, queries)
    return spoke


def edit_linear(mixer, how, queries, n, before=None):
    """Edit what a linear mixer puts out at `queries` in the first `n` rows; the others are their donors. `before`: the position of the
    last prefill token (freeze)."""
    output = mixer_output(mixer)
    if how == "zero":
        output[:n, queries] = 0
    elif how == "freeze":
        output[:n, queries] = output[:n, before : before + 1].clone()
    elif how == "swap":
        output[:n, queries] = output[n:, queries].clone()
    else:
        raise ValueError(f"unknown edit of a linear mixer {how!r}: use zero, freeze or swap")


def edit_layers(model, ops, edits, cut, count, columns, rows, last, n):
    """Edit every layer that the edits of the two phases name, in order; the first `cut` of `count` queries are prefill.

    Returns, stacked over softmax layers, which heads spoke at generation queries where they were chosen by score: (batch, layers,
    heads, queries), or None.
    """
    phases = [(edits.get(PREFILL), slice(0, cut)), (edits.get(GENERATION), slice(cut, count))]
    phases = [(edit, queries) for edit, queries in phases if edit and queries.start < queries.stop]
    linear = {layer for edit, _ in phases for layer in edit.get("linear", {})}
    inside = any({"k", "heads", "mode"} & {*edit} for edit, _ in phases)
    spoke = []
    for layer in sorted(linear | (set(ops) if inside else set())):
        mixer = model.layers[layer].mixer
        if layer in ops:
            found = edit_softmax(mixer, ops[layer], layer, phases, model.heads, columns, rows, last)
            if found and phases[-1][1].stop == count and phases[-1][1].start == cut:
                spoke.append(found[-1])
        for edit, queries in phases if layer in linear else ():
            if layer in edit.get("linear", {}):
                edit_linear(mixer, edit["linear"][layer], queries, n, cut - 1)
    return torch.stack(spoke, 1) if spoke else None


def said(logits, targets=None, choices=None):
    """What one position says: `predicted` (batch,), `log_prob` and `rank` (batch,) of `targets`, and the logits of `choices` (batch, c)."""
    logits = logits.float()
    out = {"predicted": logits.argmax(-1), "finite": torch.isfinite(logits).all(-1)}
    if targets is not None:
        own = logits.gather(1, targets.to(logits.device)[:, None])
        out |= {"log_prob": (own - logits.logsumexp(-1, keepdim=True))[:, 0], "rank": (logits > own).sum(-1)}
    if choices is not None:
        out["choices"] = logits.gather(1, choices.to(logits.device))
    return out


def whole(model, ids, targets, choices, first, ops, edits, columns, rows, donors=None):
    """One forward over prompts (n, P), teacher-forced through `targets` (n, m), under the edits of both phases.

    Returns for each of the m answer tokens what was said, side by side: `predicted`, `log_prob`, `rank`, `finite` (n, m); `choices` (n, c)
    of the first; `spoke` (see `edit_layers`). `donors` (n, P): the prompts whose mixer outputs a swap takes.
    """
    touch(model, ops)
    m = targets.shape[1]
    logits, spoke = over(model, torch.cat([ids, targets[:, :-1]], 1), m, first, ops, edits, columns, rows, donors)
    steps = [said(logits[:, i], targets[:, i], choices if i == 0 else None) for i in range(m)]
    return stacked(steps, spoke)


def stepped(model, ids, targets, choices, first, ops, edits, columns, rows):
    """The same for several generation edits that share a prefill: `edits` holds one under "prefill" and a list under "generation".

    Returns a list, one entry per generation edit, as `whole` returns it.
    """
    touch(model, ops)
    m, end = targets.shape[1], ids.shape[1]
    cache, logits = prefilled(model, ids[:, :first], ops, edits.get(PREFILL), columns, rows)
    saved, every = read_cache(cache), torch.arange(len(ids), device=ids.device)
    begun = [] if first < end else [said(logits, targets[:, 0], choices)]
    full, out = torch.cat([ids, targets], 1), []
    for edit in edits[GENERATION]:
        write_cache(cache, saved, every)
        steps, chosen = [*begun], []
        for i in range(len(begun), m):
            token = full[:, end - 1 + i : end + i]
            logits, spoke = step(model, cache, token, end - 1 + i, ops, edit, columns, rows)
            steps += [said(logits, targets[:, i], choices if i == 0 else None)]
            chosen += [] if spoke is None else [spoke]
        out += [stacked(steps, torch.cat(chosen, 3) if chosen else None)]
    return out


def generated(model, ids, count, first, ops, edits, columns, rows, continues):
    """Greedy decoding of `count` tokens under the edits of both phases: (n, count) token ids.

    `continues`: the family continues from its cache; otherwise every token is one whole forward.
    """
    touch(model, ops)
    full, end = ids, ids.shape[1]
    if continues:
        cache, logits = prefilled(model, ids[:, :first], ops, edits.get(PREFILL), columns, rows)
    for position in range(end - 1, end - 1 + count):
        if not continues:
            logits = over(model, full, 1, first, ops, edits, columns, rows)[0][:, -1]
        elif position >= first:
            logits = step(model, cache, full[:, -1:], position, ops, edits.get(GENERATION), columns, rows)[0]
        full = torch.cat([full, logits.argmax(-1).to(full)[:, None]], 1)
    return full[:, end:]


def touch(model, ops):
    """Before any trace: nnsight instruments only modules that none has entered."""
    for layer in ops:
        model.layers[layer].mixer.source  # noqa: B018


def over(model, ids, m, first, ops, edits, columns, rows, donors=None):
    """One forward over `ids` (n, length) under the edits of both phases: logits at the last `m` positions (n, m, vocab), and which heads
    spoke. `donors` (n, shorter): prompts that run beside them, unedited."""
    n, count = ids.shape
    both = ids if donors is None else torch.cat([ids, torch.cat([donors, ids[:, donors.shape[1] :]], 1)])
    with torch.no_grad(), model.trace(both, logits_to_keep=m) as tracer:
        seen = nnsight.save({})
        seen["spoke"] = edit_layers(model, ops, edits, min(first, count), count, columns, rows, count - 1, n)
        seen["logits"] = tracer.result.logits[:n, -m:].clone()
    return seen["logits"], seen["spoke"]


def prefilled(model, ids, ops, edit, columns, rows):
    """The cache after `ids` (n, length) under a prefill edit, and the last logits (n, vocab)."""
    n, count = ids.shape
    with torch.no_grad(), model.trace(ids, use_cache=True, logits_to_keep=1) as tracer:
        edit_layers(model, ops, {PREFILL: edit}, count, count, columns, rows, count - 1, n)
        logits = tracer.result.logits[:, -1].clone().save()
        cache = tracer.result.cache.save()
    return cache, logits


def step(model, cache, token, position, ops, edit, columns, rows):
    """One more token (n, 1) at `position` from a cache, under a generation edit: logits (n, vocab), and which heads spoke."""
    known = model.continuation(token, position + 1, cache)
    with torch.no_grad(), model.lm.trace(**known, logits_to_keep=1) as tracer:
        seen = nnsight.save({})
        edits = {GENERATION: edit}
        seen["spoke"] = edit_layers(model, ops, edits, 0, 1, columns, rows, position, len(token))
        seen["logits"] = tracer.result.logits[:, -1].clone()
    return seen["logits"], seen["spoke"]


def stacked(steps, spoke):
    """Steps of an answer put side by side."""
    out = {name: torch.stack([step[name] for step in steps], 1) for name in ("predicted", "log_prob", "rank", "finite")}
    out["choices"] = steps[0].get("choices")
    out["spoke"] = spoke
    return out


def ranked(model, ids, targets, ops, needle, late):
    """How every head of every softmax layer looks, unedited, at the queries that say the answer (one per answer token).

    `needle` (n, P): true where the needle lies. Returns (n, layers, heads) each: `sharpness`, the mean negative entropy (bits); `mass`, the
    mean weight on the needle; `retrieval`, the share of answer tokens that the model itself says and that the head's most
    attended key, in the needle, is (arXiv 2404.15574, teacher-forced); and `late` (n, layers, heads, queries), the sharpness of each of
    the last `late` queries, or of all that say the answer where these are more.
    """
    touch(model, ops)
    n, m = targets.shape
    full = torch.cat([ids, targets[:, :-1]], 1)
    where = torch.cat([needle, torch.zeros_like(targets[:, :-1], dtype=torch.bool)], 1)
    count = full.shape[1]
    wanted = slice(max(0, count - max(m, late)), count)
    with torch.no_grad(), model.trace(full, logits_to_keep=m) as tracer:
        seen = nnsight.save({"late": [], "mass": [], "most": []})
        for layer in sorted(ops):
            weights = scores_of(model.layers[layer].mixer, ops[layer], wanted).softmax(-1)
            seen["late"].append(sharpness(weights))
            seen["mass"].append((weights[:, :, -m:] * where[:, None, None]).sum(-1).mean(-1))
            seen["most"].append(weights[:, :, -m:].argmax(-1))
        seen["right"] = tracer.result.logits[:, -m:].argmax(-1) == targets
    most, rows = torch.stack(seen["most"], 1), torch.arange(n, device=ids.device)[:, None, None, None]
    hits = where[rows, most] & (full[rows, most] == targets[:, None, None]) & seen["right"][:, None, None]
    late = torch.stack(seen["late"], 1)
    out = {"late": late, "sharpness": late[..., -m:].mean(-1), "mass": torch.stack(seen["mass"], 1)}
    return {**out, "retrieval": hits.double().mean(-1), "right": seen["right"].all(-1)}
