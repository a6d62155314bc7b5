"""The three ways to run a bundle of cells: (engine, bundle) -> for each trace, its cells and what was seen.

*final*: edits at the last position. The prefixes run once; every cell is one token that continues from a copy of
its host's cache. A cache is never shared: running from it changes it in place.
*full*: edits anywhere. Whole prompts run, from the first touched layer up where the residual stream below it is
kept for several edits.
*read*: nothing is edited. One forward per host serves every read, and stops after the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import nnsight
import torch

from encode_address import measure
from encode_address.errors import RunError
from encode_address.interventions import entry_attention, read_cache, truncated_logits, write_cache, write_state_head
from encode_address.run.batch import asked, entries_of, ids_of, watched
from encode_address.run.cells import FINAL, FULL, READ, Cell, Edit, Run
from encode_address.run.edits import apply_edits, enter, state_stands
from encode_address.run.plan import Bundle, hosts_of
from encode_address.run.writes import ATTENTION, SITES, Sources, Writes, attention_calls, writes

SEEN_OF_STATE = 64  # numbers of each swapped state that are compared with the donor's where the mixer reads it
Seen = dict[str, Any]


# -- final -----------------------------------------------------------------------------
def final(engine: Any, bundle: Bundle) -> Iterator[tuple[Sequence[Cell], Seen]]:
    """One token per cell."""
    cache, saved = _prefixes(engine, bundle)
    prefixes = Prefixes(cache, saved, {ids: row for row, ids in enumerate(bundle.prefixes)})
    own = _sources(engine, bundle, prefixes)
    for step in bundle.steps:
        yield step, _continue(engine, step, prefixes, own)


@dataclass(frozen=True)
class Prefixes:
    """A cache object to be refilled, a copy of the caches of all prefixes, and which row each has in it."""

    cache: Any
    saved: list[dict[str, torch.Tensor]]
    row: dict[tuple[int, ...], int]

    def rows(self, prompts: Sequence[Any]) -> torch.Tensor:
        return torch.tensor([self.row[prompt.ids[:-1]] for prompt in prompts])


def _prefixes(engine: Any, bundle: Bundle) -> tuple[Any, list[dict[str, torch.Tensor]]]:
    """A cache object to be refilled, and a copy of the caches of all prefixes."""
    model, chunks = engine.model, []
    rows = max(1, engine.limits.tokens // bundle.length)
    for start in range(0, len(bundle.prefixes), rows):
        ids = torch.tensor(bundle.prefixes[start : start + rows])
        engine.count(ids.numel())
        cache = model.prefix(ids)
        chunks.append(read_cache(cache, model.held))
    if len(chunks) == 1:
        return cache, chunks[0]
    return cache, [
        {name: torch.cat([c[i][name] for c in chunks]) for name in chunks[0][i]} for i in range(len(chunks[0]))
    ]


def _one_token(model: Any, prompts: Sequence[Any], prefixes: Prefixes, swapped=None) -> dict:
    """The keywords of a trace of each prompt's last token, from a fresh copy of its prefix's cache."""
    write_cache(prefixes.cache, prefixes.saved, prefixes.rows(prompts).to(model.device), swapped, model.held)
    last = torch.tensor([[prompt.ids[-1]] for prompt in prompts], device=model.device)
    return model.continuation(last, len(prompts[0]), prefixes.cache)


def _continue(engine: Any, cells: Sequence[Cell], prefixes: Prefixes, own: Sources) -> Seen:
    model, layers, embed = engine.model, engine.model.layers, engine.model.embed
    hosts = [cell.host for cell in cells]
    rows = prefixes.rows(hosts)
    swaps, held = _swaps(model, cells, prefixes), model.held
    swapped = {}
    for layer, name, head, which, taken, _ in swaps:
        if head == -1:
            swapped.setdefault((layer, name), rows.clone())[which] = taken
    inputs = _one_token(model, hosts, prefixes, swapped)
    for layer, _, head, which, taken, _ in swaps:
        if head != -1:
            donors = prefixes.saved[layer]["recurrent"][taken.to(model.device), head]
            write_state_head(prefixes.cache, layer, head, which.to(model.device), donors)
    plan = writes(engine, [(cell.host, cell.edits) for cell in cells], own, short=True)
    for layer, name, head, which, taken, some in swaps:
        state = prefixes.saved[layer][name]
        state = state if head == -1 else state[:, head]
        expected = state.flatten(1)[:, :SEEN_OF_STATE][taken.to(model.device)]
        plan.append(((layer, "state", state_stands, (layer, name, head, expected, which, held)), some))
    edits, watch = [edit for edit, _ in plan], attention_calls(model, watched(cells))
    entries, tokens = entries_of(hosts) if watch else None, asked(cells)
    engine.count(len(cells))
    with torch.no_grad(), model.lm.trace(**inputs) as tracer:
        seen = nnsight.save({})
        seen.update(apply_edits(layers, embed, edits, watch, entries))
        seen["answer"] = measure.answer(tracer.result.logits[:, -1], tokens)
    engine.verify(plan, seen, seen["answer"]["finite"])
    return seen


def _swaps(model: Any, cells: Sequence[Cell], prefixes: Prefixes) -> list[tuple]:
    """State transplants: (layer, name, head, rows of the batch, prefix rows that their state is taken from, edits)."""
    groups: dict[tuple, list[tuple[int, Edit]]] = {}
    for i, cell in enumerate(cells):
        for edit in cell.edits:
            if edit.verb == "state":
                groups.setdefault((edit.layers, edit.mode, edit.head), []).append((i, edit))
    out = []
    for (layers, mode, head), which in groups.items():
        taken = prefixes.rows([edit.donor for _, edit in which])
        if head != -1:
            for layer in layers:
                model.heads_of(layer)  # refused where there are none
        for layer in layers:
            for name in ("recurrent", "conv") if mode == "both" else (mode,):
                if name not in prefixes.saved[layer]:
                    raise RunError(
                        f"{model.name}: L{layer} is a {model.layout.kinds[layer]} layer, it has no {name} state"
                    )
                rows = torch.tensor([i for i, _ in which])
                out.append((layer, name, head, rows, taken, [edit for _, edit in which]))
    return out


# -- full ------------------------------------------------------------------------------
def full(engine: Any, bundle: Bundle) -> Iterator[tuple[Sequence[Cell], Seen]]:
    """Whole prompts; the cells of a trace have the same edits, but for their donors and positions."""
    own = _sources(engine, bundle, None)
    residual, attention = _entry(engine, bundle)
    for step in bundle.steps:
        yield step, _whole(engine, bundle, step, own, residual, attention)


def _entry(engine: Any, bundle: Bundle) -> tuple[dict, dict]:
    """Of hosts whose edits enter late: layer -> residual stream that enters it, and layer -> watched attention.

    Attention below the first touched layer is the intact model's, so it is read here.
    """
    if not bundle.entered:
        return {}, {}
    model, layers = engine.model, engine.model.layers
    starts, top = bundle.starts, bundle.starts[-1]
    watch = attention_calls(model, [layer for layer in watched(bundle.cells) if layer < top])
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


def _whole(engine: Any, bundle: Bundle, cells: Sequence[Cell], own: Sources, residual: dict, attention: dict) -> Seen:
    model, layers, embed = engine.model, engine.model.layers, engine.model.embed
    ids, start = ids_of([cell.host for cell in cells]), cells[0].start if bundle.entered else 0
    rows = torch.tensor([residual["row"][cell.host.digest] for cell in cells]) if start else None
    entering = residual[start][rows.to(model.device)] if start else None
    plan = writes(engine, [(cell.host, cell.edits) for cell in cells], own, short=False)
    edits = [edit for edit, _ in plan]
    watch = attention_calls(model, [layer for layer in watched(cells) if layer >= start])
    entries = entries_of([cell.host for cell in cells]) if watch else None
    end = cells[0].end or len(layers)
    engine.count(ids.numel() * cells[0].rows, end - start)
    if cells[0].text:
        return _text(engine, cells, plan, start, entering)
    tokens, last, returns = asked(cells), cells[0].exit, model.family.layer_returns
    norm, head, scaling, cap = model.final_norm, model.lm_head, model.logits_scaling, model.logits_cap
    with torch.no_grad(), model.trace(ids, logits_to_keep=1) as tracer:
        seen = nnsight.save({})
        enter(layers, start, entering, returns)
        seen.update(apply_edits(layers, embed, edits, watch, entries))
        if last is None:
            seen["answer"] = measure.answer(tracer.result.logits[:, -1], tokens)
        else:
            seen["answer"] = measure.answer(truncated_logits(layers[last], norm, head, scaling, cap=cap), tokens)
            tracer.stop()
    engine.verify(plan, seen, seen["answer"]["finite"])
    for layer in watched(cells):
        if layer < start:
            seen["attention"][layer] = attention[layer][rows.to(model.device)]
    return seen


def _text(engine: Any, cells: Sequence[Cell], plan: Writes, start: int, entering: torch.Tensor | None) -> Seen:
    """The loss on texts. Cells that ask for what comes `after` have a second row each, which is not edited."""
    model, layers, embed, each = engine.model, engine.model.layers, engine.model.embed, cells[0].rows
    ids, edits = ids_of([cell.host for cell in cells]).repeat(each, 1), [edit for edit, _ in plan]
    entering = None if entering is None else entering.repeat(each, 1, 1)
    after, returns = torch.tensor([cell.after for cell in cells]), model.family.layer_returns
    with torch.no_grad(), model.trace(ids) as tracer:
        seen = nnsight.save({})
        enter(layers, start, entering, returns)
        seen.update(apply_edits(layers, embed, edits, {}, None))
        if each == 1:
            seen["loss"] = {"loss": measure.next_token_loss(tracer.result.logits, ids)}
        else:
            seen["loss"] = measure.drift(tracer.result.logits, ids, after)
    engine.verify(plan, seen, torch.isfinite(seen["loss"]["loss"]))
    return seen


# -- donors ----------------------------------------------------------------------------
def _sources(engine: Any, bundle: Bundle, prefixes: Prefixes | None) -> Sources:
    """Run what values are taken from, stage by stage: a donor's run may itself be under edits that have donors."""
    places = {p for cell in bundle.cells for _, edit in cell.every_edit for p in (*edit.where, *edit.source)}
    own = Sources(None if prefixes else sorted(places))
    if any(edit.verb == "gate" for cell in bundle.cells for _, edit in cell.every_edit) and not engine.model.gated:
        raise RunError(f"{engine.model.name}: its softmax layers have no output gate to edit")
    needed: dict[tuple, set[tuple[str, int]]] = {}
    for cell in bundle.cells:
        for run, edit in cell.sources:
            needed.setdefault(run.key, set()).update((SITES[edit.verb], layer) for layer in edit.layers)
    for short, runs, last in bundle.stages:
        rows = engine.limits.rows(FINAL if short else FULL, bundle.length)
        for start in range(0, len(runs), rows):
            some = runs[start : start + rows]
            sites = sorted({site for run in some for site in needed[run.key]}, key=lambda site: (site[1], site[0]))
            own.add(some, _taken(engine, some, sites, own, prefixes, short, last))
    return own


def _taken(
    engine: Any,
    runs: Sequence[Run],
    sites: Sequence[tuple],
    own: Sources,
    prefixes: Prefixes | None,
    short: bool,
    last: int,
) -> dict[tuple, torch.Tensor]:
    """One trace of donors' runs, up to the last layer that is needed."""
    model, layers, embed = engine.model, engine.model.layers, engine.model.embed
    prompts = [run.prompt for run in runs]
    plan = writes(engine, [(run.prompt, run.edits) for run in runs], own, short)
    plan = [(edit, some) for edit, some in plan if edit[0] <= last]
    edits, ops = (
        [edit for edit, _ in plan],
        attention_calls(model, [layer for site, layer in sites if site in ATTENTION]),
    )
    takes = [
        (layer, "inside" if site in ATTENTION else site, site, ops.get(layer), model.heads, own.positions)
        for site, layer in sites
    ]
    engine.count(len(runs) * (1 if short else len(prompts[0])), 1 + last)
    if short:
        trace = model.lm.trace(**_one_token(model, prompts, prefixes))
    else:
        trace = model.trace(ids_of(prompts), logits_to_keep=1)
    with torch.no_grad(), trace as tracer:
        seen = nnsight.save({})
        seen.update(apply_edits(layers, embed, edits, {}, None, takes))
        tracer.stop()
    engine.verify(plan, seen, torch.ones(1))
    return seen["taken"]


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
    watch = attention_calls(model, watched(plain))
    norm, head, scaling, cap = model.final_norm, model.lm_head, model.logits_scaling, model.logits_cap
    ids, text = ids_of(hosts), bundle.cells[0].text
    tokens = {i: None if text else asked(cells) for i, cells in exits.items()}
    entries = entries_of(hosts) if watch else None
    engine.count(len(hosts) * bundle.length, 1 + last)
    with torch.no_grad(), model.trace(ids, logits_to_keep=1) as tracer:
        seen = nnsight.save({"attention": {}, "answer": {}, "loss": {}})
        for i in range(last + 1):
            if i in watch:
                seen["attention"][i] = entry_attention(layers[i].mixer, watch[i], entries)
            if i in exits and text:
                logits = truncated_logits(layers[i], norm, head, scaling, every=True, cap=cap)
                seen["loss"][i] = measure.next_token_loss(logits, ids)[rows[i]]
            elif i in exits:
                logits = truncated_logits(layers[i], norm, head, scaling, cap=cap)[rows[i]]
                seen["answer"][i] = measure.answer(logits, tokens[i])
        tracer.stop()
    if plain:
        index = torch.tensor([row[cell.host.digest] for cell in plain], device=model.device)
        yield plain, {"attention": {i: mass[index] for i, mass in seen["attention"].items()}}
    for i, cells in exits.items():
        if text:
            engine.verify([], {}, torch.isfinite(seen["loss"][i]), cells)
            yield cells, {"loss": {"loss": seen["loss"][i]}}
        else:
            engine.verify([], {}, seen["answer"][i]["finite"], cells)
            yield cells, {"attention": {}, "answer": seen["answer"][i]}


PATHS = {FINAL: final, FULL: full, READ: read}
