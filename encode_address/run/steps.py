"""What runs where the model is: the traces of a bundle, one after the other, here or in a session on a server.

A step is plain data (tensors, numbers, names, functions of this package): a dict whose `do` names one of the functions
below. What steps hand on to later ones stays where the model is, in `bank`:

    prefixes   the caches after the prefixes, one dict of tensors per layer
    cache      a cache object to be refilled; running from a cache changes it in place
    taken      (site, layer) -> what donors have there, (runs, positions, ...)
    residual, attention   layer -> what enters it, and its watched attention, of hosts that later steps enter late

An argument of an edit that starts with "taken", "noisy" or "state" stands for something in the bank (see `found`). Torch and
nnsight only, and nothing that is not passed in: these functions travel to a server by value.
"""

import nnsight
import torch

from encode_address.interventions import (
    entry_attention,
    mixer_output,
    read_cache,
    truncated_logits,
    write_cache,
    write_state_head,
)
from encode_address.measure import answer, drift, next_token_loss
from encode_address.run.edits import apply_edits, enter


def run_step(model, step, bank):
    """Run one step: what was seen (None for a step that only fills the bank)."""
    return STEPS[step["do"]](model, step, bank)


def run_bundles(model, bundles, sourced=()):
    """Run the steps of bundles, each with a bank of its own: per bundle, what each step saw.

    `sourced` are the layers whose attention calls are touched.
    """
    for layer in sourced:
        model.layers[layer].mixer.source  # noqa: B018 (nnsight instruments a module that no trace has begun)
    seen = []
    for steps in bundles:
        bank = {}
        seen.append([run_step(model, step, bank) for step in steps])
    return seen


# -- steps that fill the bank ------------------------------------------------------------
def run_prefix(model, step, bank):
    """The caches after `ids` (batch, positions)."""
    cache = model.prefix(step["ids"])
    saved = read_cache(cache, model.held)
    bank["cache"] = cache
    if "prefixes" in bank:
        saved = [{name: torch.cat([old[name], new[name]]) for name in old} for old, new in zip(bank["prefixes"], saved)]
    bank["prefixes"] = saved


def run_take(model, step, bank):
    """What donors have. Returns whether the edits of their own runs stand."""
    layers, embed, takes = model.layers, model.embed, step["takes"]
    edits, trace = found_in(bank, step["edits"]), begin(model, step, bank)
    with torch.no_grad(), trace as tracer:
        seen = nnsight.save({})
        seen.update(apply_edits(layers, embed, edits, {}, None, takes))
        model.stop(tracer)
    known = bank.setdefault("taken", {})
    for what, values in seen["taken"].items():
        known[what] = torch.cat([known[what], values]) if what in known else values
    return {"landed": seen["landed"]}


def run_enter(model, step, bank):
    """What enters the layers `starts`, and the watched attention of layers below them."""
    layers, starts, watch, entries = model.layers, step["starts"], step["watch"], step["entries"]
    with torch.no_grad(), model.trace(step["ids"], logits_to_keep=1) as tracer:
        seen = nnsight.save({"residual": {}, "attention": {}})
        for i in range(starts[-1] + 1):
            if i in starts:
                seen["residual"][i] = layers[i].input.clone()
            if i in watch:
                seen["attention"][i] = entry_attention(layers[i].mixer, watch[i], entries)
        model.stop(tracer)
    for name, values in seen.items():
        kept = bank.setdefault(name, {})
        for layer, value in values.items():
            kept[layer] = torch.cat([kept[layer], value]) if layer in kept else value


# -- steps that measure --------------------------------------------------------------------
def run_answer(model, step, bank):
    """What prompts, or last tokens, answer under edits: `answer` (see `measure.answer`), `attention` of watched layers, and
    which edits stand (`landed`)."""
    layers, embed, watch, entries = model.layers, model.embed, step["watch"], step["entries"]
    tokens, last, start, returns = step["tokens"], step["exit"], step["start"], step["returns"]
    norm, head, scaling, cap = model.final_norm, model.lm_head, model.logits_scaling, model.logits_cap
    edits, trace, entering = found_in(bank, step["edits"]), begin(model, step, bank), entered(bank, step)
    with torch.no_grad(), trace as tracer:
        seen = nnsight.save({})
        enter(layers, start, entering, returns)
        seen.update(apply_edits(layers, embed, edits, watch, entries))
        if last is None:
            seen["answer"] = answer(tracer.result.logits[:, -1], tokens)
        else:
            seen["answer"] = answer(truncated_logits(layers[last], norm, head, scaling, cap=cap), tokens)
            model.stop(tracer)
    below = {layer: of_rows(bank["attention"][layer], step["entered"]) for layer in step["below"]}
    return {"answer": seen["answer"], "attention": {**seen["attention"], **below}, "landed": seen["landed"]}


def run_text(model, step, bank):
    """The loss on texts. With `after`, each has a second row that is not edited."""
    layers, embed, each, start, returns = model.layers, model.embed, step["each"], step["start"], step["returns"]
    ids, edits, after = step["ids"].repeat(each, 1), found_in(bank, step["edits"]), step["after"]
    entering = entered(bank, step)
    entering = None if entering is None else entering.repeat(each, 1, 1)
    with torch.no_grad(), model.trace(ids) as tracer:
        seen = nnsight.save({})
        enter(layers, start, entering, returns)
        seen.update(apply_edits(layers, embed, edits, {}, None))
        if each == 1:
            seen["loss"] = {"loss": next_token_loss(tracer.result.logits, ids)}
        else:
            seen["loss"] = drift(tracer.result.logits, ids, after)
    return {"loss": seen["loss"], "landed": seen["landed"]}


def run_read(model, step, bank):
    """Attention of the intact model, and answers or losses of truncated ones, all from one forward."""
    layers, ids, watch, exits, text = model.layers, step["ids"], step["watch"], step["exits"], step["text"]
    norm, head, scaling, cap = model.final_norm, model.lm_head, model.logits_scaling, model.logits_cap
    entries, plain, last = step["entries"], step["plain"], step["last"]
    with torch.no_grad(), model.trace(ids, logits_to_keep=1) as tracer:
        seen = nnsight.save({"attention": {}, "answer": {}, "loss": {}})
        for i in range(last + 1):
            if i in watch:
                seen["attention"][i] = of_rows(entry_attention(layers[i].mixer, watch[i], entries), plain)
            if i in exits:
                rows, tokens = exits[i]
                logits = truncated_logits(layers[i], norm, head, scaling, every=text, cap=cap)
                if text:
                    seen["loss"][i] = of_rows(next_token_loss(logits, ids), rows)
                else:
                    seen["answer"][i] = answer(of_rows(logits, rows), tokens)
        model.stop(tracer)
    return {"attention": seen["attention"], "answer": seen["answer"], "loss": seen["loss"]}


# -- about the unedited model ---------------------------------------------------------------
def mixer_sums(model, batches):
    """The sum of every mixer's output over all tokens of `batches` (each (batch, positions)): per layer (d_model,), in float64."""
    layers, sums = model.layers, None
    for ids in batches:
        with torch.no_grad(), model.trace(ids, logits_to_keep=1) as tracer:
            seen = nnsight.save([])
            for i in range(len(layers)):
                seen.append(mixer_output(layers[i].mixer).double().sum((0, 1)))
            model.stop(tracer)
        sums = seen if sums is None else [one + more for one, more in zip(sums, seen)]
    return sums


# -- what steps share ------------------------------------------------------------------------
def begin(model, step, bank):
    """The trace of a step: of whole prompts `ids` (batch, positions), or of the last tokens `last` (batch, 1) of prompts of
    `length`, each from a fresh copy of its prefix's cache; `prefix` are their rows in the bank, `swapped` and `heads` the
    states that are taken from other rows."""
    if "last" not in step:
        return model.trace(step["ids"], logits_to_keep=1)
    cache, saved, last = bank["cache"], bank["prefixes"], step["last"]
    write_cache(cache, saved, step["prefix"], step["swapped"], model.held)
    for layer, head, rows, taken in step["heads"]:
        states = saved[layer]["recurrent"]
        write_state_head(cache, layer, head, rows.to(states.device), states[taken.to(states.device), head])
    return model.lm.trace(**model.continuation(last, step["length"], cache))


def entered(bank, step):
    """What enters the layer that a step starts at, (batch, positions, d_model); None from the embeddings."""
    return of_rows(bank["residual"][step["start"]], step["entered"]) if step["start"] else None


def of_rows(values, rows):
    return values[rows.to(values.device)]


def found_in(bank, edits):
    """Edits with what the bank has in place of what stands for it."""
    return [(*edit[:3], tuple(found(bank, argument) for argument in edit[3])) for edit in edits]


def found(bank, argument):
    """("taken", site, layer, rows (n,), places (n, k) or None): donors' values (n, k, ...), of the one position that was taken
    where places is None. ("noisy", hosts, donors, seeds): the hosts' values plus noise, by a seed per row, of the size of donor - host at
    every position. ("state", layer, name, head, rows (n,), k): the first k numbers of the states of prefixes."""
    if not isinstance(argument, tuple) or not argument or not isinstance(argument[0], str):
        return argument
    if argument[0] == "taken":
        _, site, layer, rows, places = argument
        values = bank["taken"][site, layer]
        rows = rows.to(values.device)
        return values[rows] if places is None else values[rows[:, None], places.to(values.device)]
    if argument[0] == "noisy":
        host, donor = found(bank, argument[1]), found(bank, argument[2])
        like = host[0].shape
        noise = torch.stack(
            [torch.randn(like, generator=torch.Generator().manual_seed(seed)) for seed in argument[3]]
        ).to(host)
        return host + noise / noise.norm(dim=-1, keepdim=True) * (donor - host).norm(dim=-1, keepdim=True)
    _, layer, name, head, rows, count = argument
    state = bank["prefixes"][layer][name]
    state = state if head == -1 else state[:, head]
    return state.flatten(1)[:, :count][rows.to(state.device)]


STEPS = {
    "prefix": run_prefix,
    "take": run_take,
    "enter": run_enter,
    "answer": run_answer,
    "text": run_text,
    "read": run_read,
}
