"""The three ways to run a bundle of cells: (engine, bundle) -> for each trace, its cells and what was seen.

*final*: edits at the last position. The prefixes run once; every cell is one token that continues from a copy of
its host's cache. A cache is never shared: running from it changes it in place.
*full*: edits anywhere. Whole prompts run, from the first touched layer up where the residual stream below it is
kept for several edits.
*read*: nothing is edited. One forward per host serves every read, and stops after the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import nnsight
import torch

from encode_address import measure
from encode_address.errors import RunError
from encode_address.interventions import (
    capture,
    entry_attention,
    mixer_output,
    query_and_key,
    read_cache,
    truncated_logits,
    write_cache,
)
from encode_address.run.batch import asked, entries_of, ids_of, noisy, watched
from encode_address.run.cells import EMBED, FINAL, FULL, READ, Cell
from encode_address.run.edits import (
    apply_edits,
    enter,
    put_key,
    put_outputs,
    put_query,
    set_value,
    state_stands,
    zero_head,
)
from encode_address.run.plan import Bundle, hosts_of

SEEN_OF_STATE = 64  # numbers of each swapped state that are compared with the donor's where the mixer reads it
Seen = dict[str, Any]
Edits = list[tuple[tuple, list[Cell]]]  # an edit for `apply_edits`, and the cells that it serves


# -- final -----------------------------------------------------------------------------
def final(engine: Any, bundle: Bundle) -> Iterator[tuple[Sequence[Cell], Seen]]:
    """One token per cell."""
    cache, saved = _prefixes(engine, bundle)
    place = {ids: row for row, ids in enumerate(bundle.prefixes)}
    own = _own_values(engine, bundle, cache, saved, place)
    for step in bundle.steps:
        yield step, _continue(engine, step, cache, saved, place, own)


def _prefixes(engine: Any, bundle: Bundle) -> tuple[Any, list[dict[str, torch.Tensor]]]:
    """A cache object to be refilled, and a copy of the caches of all prefixes."""
    model, chunks = engine.model, []
    rows = max(1, engine.limits.tokens // bundle.length)
    for start in range(0, len(bundle.prefixes), rows):
        ids = torch.tensor(bundle.prefixes[start : start + rows])
        engine.count(ids.numel())
        with torch.no_grad(), model.trace(ids, use_cache=True, logits_to_keep=1) as tracer:
            cache = tracer.result.cache.save()
        chunks.append(read_cache(cache))
    if len(chunks) == 1:
        return cache, chunks[0]
    return cache, [
        {name: torch.cat([c[i][name] for c in chunks]) for name in chunks[0][i]} for i in range(len(chunks[0]))
    ]


def _one_token(model: Any, prompts: Sequence[Any], cache: Any, saved: list, rows: torch.Tensor, swapped=None) -> dict:
    """The keywords of a trace of each prompt's last token, from a fresh copy of its prefix's cache."""
    write_cache(cache, saved, rows.to(model.device), swapped)
    last = torch.tensor([[prompt.ids[-1]] for prompt in prompts], device=model.device)
    # Without a mask of full length nnsight makes one of one token, and the softmax layers mask wrongly, silently.
    mask = torch.ones(len(prompts), len(prompts[0]), dtype=torch.long, device=model.device)
    return {"input_ids": last, "attention_mask": mask, "cache": cache, "use_cache": True}


def _own_values(engine: Any, bundle: Bundle, cache: Any, saved: list, place: dict) -> dict[tuple, dict]:
    """Outputs and queries that donors (and some hosts) have of themselves: (what, layer) -> token ids -> tensor."""
    model, layers = engine.model, engine.model.layers
    queried = sorted({layer for cell in bundle.cells if cell.intervention == "query" for layer in cell.layers})
    outputs = sorted({layer for cell in bundle.cells if cell.intervention == "transplant" for layer in cell.layers})
    ops = {layer: model.attention_op(layer) for layer in queried}
    rows, out = engine.limits.rows(FINAL, bundle.length), {}
    for start in range(0, len(bundle.captured), rows):
        prompts = bundle.captured[start : start + rows]
        inputs = _one_token(model, prompts, cache, saved, torch.tensor([place[p.ids[:-1]] for p in prompts]))
        engine.count(len(prompts), 1 + bundle.captured_layers[-1])
        with torch.no_grad(), model.lm.trace(**inputs) as tracer:
            seen = nnsight.save({})
            for i in sorted({*outputs, *queried}):
                if i in ops:
                    seen["query", i] = query_and_key(layers[i].mixer, ops[i])[0][:, :, -1].clone()
                if i in outputs:
                    seen["output", i] = mixer_output(layers[i].mixer)[:, -1].clone()
            tracer.stop()
        for what, values in seen.items():
            out.setdefault(what, {}).update(zip((p.ids for p in prompts), values))
    return out


def _continue(engine: Any, cells: Sequence[Cell], cache: Any, saved: list, place: dict, own: dict) -> Seen:
    model, layers, embed = engine.model, engine.model.layers, engine.model.embed
    hosts = [cell.host for cell in cells]
    rows = torch.tensor([place[host.ids[:-1]] for host in hosts])
    swaps = _swaps(model, cells, saved, place)
    swapped = {}
    for layer, name, which, taken, _ in swaps:
        swapped.setdefault((layer, name), rows.clone())[which] = taken
    inputs = _one_token(model, hosts, cache, saved, rows, swapped)
    plan = _final_edits(model, cells, own)
    for layer, name, which, taken, some in swaps:
        expected = saved[layer][name].flatten(1)[:, :SEEN_OF_STATE][taken.to(model.device)]
        plan.append(((layer, True, state_stands, (layer, name, expected, which)), some))
    edits, watch = [edit for edit, _ in plan], _ops(model, watched(cells))
    entries, tokens = entries_of(hosts) if watch else None, asked(cells)
    engine.count(len(cells))
    with torch.no_grad(), model.lm.trace(**inputs) as tracer:
        seen = nnsight.save({})
        seen.update(apply_edits(layers, embed, edits, watch, entries))
        seen["answer"] = measure.answer(tracer.result.logits[:, -1], tokens)
    engine.verify(plan, seen, seen["answer"]["finite"])
    return seen


def _swaps(model: Any, cells: Sequence[Cell], saved: list, place: dict) -> list[tuple]:
    """State transplants: (layer, name, rows of the batch, prefix rows that their state is taken from, cells)."""
    groups: dict[tuple, list[int]] = {}
    for i, cell in enumerate(cells):
        if cell.intervention == "state":
            groups.setdefault((cell.layers, cell.mode), []).append(i)
    out = []
    for (layers, mode), which in groups.items():
        some = [cells[i] for i in which]
        taken = torch.tensor([place[cell.donor.ids[:-1]] for cell in some])
        for layer in layers:
            for name in ("recurrent", "conv") if mode == "both" else (mode,):
                if name not in saved[layer]:
                    raise RunError(
                        f"{model.name}: L{layer} is a {model.layout.kinds[layer]} layer, it has no {name} state"
                    )
                out.append((layer, name, torch.tensor(which), taken, some))
    return out


def _final_edits(model: Any, cells: Sequence[Cell], own: dict) -> Edits:
    """One edit per layer and verb, over the rows that it concerns."""
    groups: dict[tuple, list[int]] = {}
    for i, cell in enumerate(cells):
        for layer in cell.layers if cell.intervention != "state" else ():
            groups.setdefault((layer, cell.intervention, cell.head), []).append(i)
    plan: Edits = []
    for (layer, verb, head), which in groups.items():
        some, rows = [cells[i] for i in which], torch.tensor(which)
        if verb == "query":
            values = torch.stack([own["query", layer][cell.donor.ids] for cell in some])
            edit = (layer, True, put_query, (model.attention_op(layer), values, rows, head))
        else:
            values = torch.stack([_written(cell, layer, own["output", layer]) for cell in some])
            edit = (layer, False, put_outputs, (values[:, None], torch.zeros(len(some), 1, dtype=torch.long), rows))
        plan.append((edit, some))
    return plan


def _written(cell: Cell, layer: int, outputs: dict) -> torch.Tensor:
    donor = outputs[cell.donor.ids]
    return noisy(cell, layer, outputs[cell.host.ids], donor) if cell.mode == "random" else donor


# -- full ------------------------------------------------------------------------------
def full(engine: Any, bundle: Bundle) -> Iterator[tuple[Sequence[Cell], Seen]]:
    """Whole prompts, one edit per trace."""
    own = _captured(engine, bundle)
    residual, attention = _entry(engine, bundle)
    for step in bundle.steps:
        yield step, _whole(engine, bundle, step, own, residual, attention)


def _captured(engine: Any, bundle: Bundle) -> dict[tuple, Any]:
    """Outputs and keys of donors (and hosts, for noise): (what, layer) -> (prompts, positions, ...), and places."""
    if not bundle.captured:
        return {}
    model, layers, embed = engine.model, engine.model.layers, engine.model.embed
    edited = [cell for cell in bundle.cells if cell.donor is not None]
    inner = sorted({layer for c in edited if c.intervention in ("query", "key") for layer in c.layers})
    outer = sorted({layer for c in edited if c.intervention == "transplant" for layer in c.layers})
    ops, positions = _ops(model, inner), sorted({p for cell in edited for p in (*cell.source, *cell.where)})
    chunks: list[dict] = []
    for ids in _chunks(bundle.captured, engine.limits.rows(FULL, bundle.length)):
        engine.count(ids.numel(), 1 + bundle.captured_layers[-1])
        where = torch.tensor(positions).expand(len(ids), -1)
        with torch.no_grad(), model.trace(ids, logits_to_keep=1) as tracer:
            seen = nnsight.save({})
            if EMBED in outer:
                seen["output", -1] = capture(embed, where)
            for i in range(len(layers)):
                if i in ops:
                    query, key, _ = query_and_key(layers[i].mixer, ops[i])
                    seen["query", i] = query[:, :, -1].clone()
                    seen["key", i] = key.transpose(1, 2)[:, where[0]].clone()
                if i in outer:
                    seen["output", i] = capture(layers[i].mixer, where)
            tracer.stop()
        chunks.append(dict(seen))
    own: dict[Any, Any] = {what: torch.cat([chunk[what] for chunk in chunks]) for what in chunks[0]}
    own["row"] = {prompt.ids: row for row, prompt in enumerate(bundle.captured)}
    own["position"] = {position: i for i, position in enumerate(positions)}
    return own


def _entry(engine: Any, bundle: Bundle) -> tuple[dict, dict]:
    """Of hosts whose edits enter late: layer -> residual stream that enters it, and layer -> watched attention.

    Attention below the first touched layer is the intact model's, so it is read here.
    """
    if not bundle.entered:
        return {}, {}
    model, layers = engine.model, engine.model.layers
    starts, top = bundle.starts, bundle.starts[-1]
    watch = _ops(model, [layer for layer in watched(bundle.cells) if layer < top])
    residual, attention = {i: [] for i in starts}, {i: [] for i in watch}
    rows = engine.limits.rows(FULL, bundle.length)
    for start in range(0, len(bundle.entered), rows):
        hosts = bundle.entered[start : start + rows]
        entries = entries_of(hosts) if watch else None
        engine.count(len(hosts) * bundle.length, top)
        with torch.no_grad(), model.trace(ids_of(hosts), logits_to_keep=1) as tracer:
            seen = nnsight.save({"residual": {}, "attention": {}})
            for i in range(top + 1):
                if i in starts:
                    seen["residual"][i] = layers[i].input.clone()
                if i in watch:
                    seen["attention"][i] = entry_attention(layers[i].mixer, watch[i], entries)
            tracer.stop()
        for kept, name in ((residual, "residual"), (attention, "attention")):
            for layer, value in seen[name].items():
                kept[layer].append(value)
    row = {host.digest: i for i, host in enumerate(bundle.entered)}
    residual, attention = ({k: torch.cat(v) for k, v in kept.items()} for kept in (residual, attention))
    return {**residual, "row": row}, attention


def _whole(engine: Any, bundle: Bundle, cells: Sequence[Cell], own: dict, residual: dict, attention: dict) -> Seen:
    model, layers, embed = engine.model, engine.model.layers, engine.model.embed
    ids, start = ids_of([cell.host for cell in cells]), cells[0].start if bundle.entered else 0
    rows = torch.tensor([residual["row"][cell.host.digest] for cell in cells]) if start else None
    entering = residual[start][rows.to(model.device)] if start else None
    plan = _full_edits(engine, cells, own)
    edits = [edit for edit, _ in plan]
    watch = _ops(model, [layer for layer in watched(cells) if layer >= start])
    entries = entries_of([cell.host for cell in cells]) if watch else None
    engine.count(ids.numel(), len(layers) - start)
    if cells[0].text:
        with torch.no_grad(), model.trace(ids) as tracer:
            seen = nnsight.save({})
            enter(layers, start, entering)
            seen.update(apply_edits(layers, embed, edits, watch, entries))
            seen["loss"] = measure.next_token_loss(tracer.result.logits, ids)
        engine.verify(plan, seen, torch.isfinite(seen["loss"]))
        return seen
    tokens = asked(cells)
    with torch.no_grad(), model.trace(ids, logits_to_keep=1) as tracer:
        seen = nnsight.save({})
        enter(layers, start, entering)
        seen.update(apply_edits(layers, embed, edits, watch, entries))
        seen["answer"] = measure.answer(tracer.result.logits[:, -1], tokens)
    engine.verify(plan, seen, seen["answer"]["finite"])
    for layer in watched(cells):
        if layer < start:
            seen["attention"][layer] = attention[layer][rows.to(model.device)]
    return seen


def _full_edits(engine: Any, cells: Sequence[Cell], own: dict) -> Edits:
    """One edit per touched layer; the cells of a step share verb, layers, mode and head."""
    model, first, plan = engine.model, cells[0], []
    where = torch.tensor([cell.where for cell in cells])
    for layer in first.layers:
        if first.intervention == "remove":
            edit = (layer, False, set_value, (None if first.mode == "zero" else engine.means()[layer],))
        elif first.intervention == "heads":
            edit = (layer, False, zero_head, (first.head, model.heads))
        elif first.intervention == "key":
            edit = (layer, True, put_key, (model.attention_op(layer), _taken(own, ("key", layer), cells), where))
        elif first.intervention == "query":
            rows = torch.tensor([own["row"][cell.donor.ids] for cell in cells])
            values = own["query", layer][rows.to(model.device)]
            edit = (layer, True, put_query, (model.attention_op(layer), values, torch.arange(len(cells)), first.head))
        elif first.intervention == "transplant":
            values = _taken(own, ("output", layer), cells)
            if first.mode == "random":
                hosts = _taken(own, ("output", layer), cells, of_host=True)
                values = torch.stack([noisy(c, layer, *pair) for c, *pair in zip(cells, hosts, values)])
            edit = (layer, False, put_outputs, (values, where, torch.arange(len(cells))))
        else:
            raise RunError(f"no full path for the intervention {first.intervention!r}")
        plan.append((edit, list(cells)))
    return plan


def _taken(own: dict, what: tuple, cells: Sequence[Cell], of_host: bool = False) -> torch.Tensor:
    """Captured values at each cell's donor and source positions (or its host and patched ones)."""
    pairs = [(c.host, c.where) if of_host else (c.donor, c.source) for c in cells]
    rows = torch.tensor([own["row"][prompt.ids] for prompt, _ in pairs])
    at = torch.tensor([[own["position"][p] for p in positions] for _, positions in pairs])
    values = own[what]
    return values[rows[:, None].to(values.device), at.to(values.device)]


# -- read ------------------------------------------------------------------------------
def read(engine: Any, bundle: Bundle) -> Iterator[tuple[Sequence[Cell], Seen]]:
    """Attention of the intact model, and answers of truncated ones, many reads in one forward."""
    model, layers, last = engine.model, engine.model.layers, bundle.last_read
    hosts = hosts_of(bundle.cells)
    row = {host.digest: i for i, host in enumerate(hosts)}
    plain = [cell for cell in bundle.pending if cell.intervention == "none"]
    exits: dict[int, list[Cell]] = {}
    for cell in bundle.pending:
        if cell.intervention == "truncate":
            exits.setdefault(cell.layers[0], []).append(cell)
    rows = {i: torch.tensor([row[c.host.digest] for c in cells], device=model.device) for i, cells in exits.items()}
    tokens = {i: asked(cells) for i, cells in exits.items()}
    watch, norm, head, scaling = _ops(model, watched(plain)), model.final_norm, model.lm_head, model.logits_scaling
    entries = entries_of(hosts) if watch else None
    engine.count(len(hosts) * bundle.length, 1 + last)
    with torch.no_grad(), model.trace(ids_of(hosts), logits_to_keep=1) as tracer:
        seen = nnsight.save({"attention": {}, "answer": {}})
        for i in range(last + 1):
            if i in watch:
                seen["attention"][i] = entry_attention(layers[i].mixer, watch[i], entries)
            if i in exits:
                logits = truncated_logits(layers[i], norm, head, scaling)[rows[i]]
                seen["answer"][i] = measure.answer(logits, tokens[i])
        tracer.stop()
    if plain:
        index = torch.tensor([row[cell.host.digest] for cell in plain], device=model.device)
        yield plain, {"attention": {i: mass[index] for i, mass in seen["attention"].items()}}
    for i, cells in exits.items():
        engine.verify([], {}, seen["answer"][i]["finite"], cells)
        yield cells, {"attention": {}, "answer": seen["answer"][i]}


PATHS = {FINAL: final, FULL: full, READ: read}


def _ops(model: Any, layers: Sequence[int]) -> dict[int, str]:
    """The attention call of each layer; its source is touched here, outside any trace, as nnsight needs."""
    return {layer: model.attention_op(layer) for layer in layers}


def _chunks(prompts: Sequence[Any], rows: int) -> Iterator[torch.Tensor]:
    for start in range(0, len(prompts), rows):
        yield ids_of(prompts[start : start + rows])
