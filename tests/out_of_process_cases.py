"""Traces that use every function made for the inside of a trace; `test_out_of_process` runs them in two places.

A case takes a model and a backend (None: here) and gives a dict. Each trace block is written canonically (one
statement a line, no comments), because nested blocks travel as text and are found again by line.
"""

from dataclasses import dataclass

import nnsight
import torch

from encode_address import measure
from encode_address.attention.forward import edit_layers, edit_linear, edit_softmax
from encode_address.interventions import (
    attention_row,
    attention_scores,
    best_heads,
    capture,
    entry_attention,
    exposed,
    final_attention,
    gates,
    head_outputs,
    held_in,
    keep_heads,
    mixer_output,
    noise,
    query_and_key,
    read_cache,
    remove,
    remove_head,
    scores_of,
    sharpness,
    slots,
    transplant,
    truncated_logits,
    under,
    value_of,
    write_cache,
    write_gate,
    write_key,
    write_outputs,
    write_query,
    write_state_head,
    write_value,
)
from encode_address.run.edits import (
    _at,
    _read,
    _site,
    apply_edits,
    enter,
    map_outputs,
    pass_on,
    pass_through,
    put_gate,
    put_inputs,
    put_key,
    put_outputs,
    put_query,
    put_value,
    set_value,
    skip,
    state_stands,
    zero_head,
)

IDS = torch.randint(20, 200, (3, 12), generator=torch.Generator().manual_seed(0))
TOKENS = IDS[:, :4]
AFTER = torch.tensor([3])
ENTRIES = torch.zeros(3, 2, 12)
ENTRIES[:, 0, 2:5] = 1
ENTRIES[:, 1, 5:9] = 1


@dataclass(frozen=True)
class Case:
    """`run(model, backend)` gives a dict; `covers` must travel; `writes`: its `logits` differ from the model's own."""

    run: object
    covers: tuple
    writes: bool


CASES = []


def case(*covers, writes=False):
    def add(run):
        CASES.append(Case(run, covers, writes))
        return run

    return add


@case(mixer_output)
def reads_outputs(model, backend):
    layers, embed, indices = model.layers, model.embed, range(len(model.layers))
    with torch.no_grad(), model.trace(IDS, backend=backend):
        seen = nnsight.save({})
        seen["embed"] = mixer_output(embed).clone()
        for i in indices:
            seen[i] = mixer_output(layers[i].mixer).clone()
    return seen


@case(remove, writes=True)
def removes_to_zero(model, backend):
    mixers = model.mixers("G2")
    with torch.no_grad(), model.trace(IDS, backend=backend) as tracer:
        remove(mixers)
        logits = tracer.result.logits[:, -1].save()
    return {"logits": logits}


@case(remove, writes=True)
def removes_to_mean(model, backend):
    mixers = model.mixers("G1+G2")
    means = list(torch.randn(len(mixers), model.config.hidden_size, generator=torch.Generator().manual_seed(1)))
    with torch.no_grad(), model.trace(IDS, backend=backend) as tracer:
        remove(mixers, means)
        logits = tracer.result.logits[:, -1].save()
    return {"logits": logits}


@case(capture, transplant, writes=True)
def transplants_everywhere(model, backend):
    """The captured values come back from one request and travel out again with the next."""
    mixers, source, where = model.mixers("G2"), torch.tensor([[1, 4]] * 3), torch.tensor([[2, 11]] * 3)
    with torch.no_grad(), model.trace(IDS.flip(0), backend=backend):
        donor = nnsight.save([])
        for mixer in mixers:
            donor.append(capture(mixer, source))
    with torch.no_grad(), model.trace(IDS, backend=backend) as tracer:
        transplant(mixers, donor, where)
        logits = tracer.result.logits[:, -1].save()
    return {"donor": donor, "logits": logits}


@case(capture, transplant, writes=True)
def transplants_into_rows(model, backend):
    mixers, where, rows = model.mixers("G0"), torch.tensor([[3, 11], [0, 11]]), torch.tensor([2, 0])
    donor = list(torch.randn(len(mixers), 2, 2, model.config.hidden_size, generator=torch.Generator().manual_seed(2)))
    with torch.no_grad(), model.trace(IDS, backend=backend) as tracer:
        seen = nnsight.save({})
        transplant(mixers, donor, where, rows)
        seen["written"] = capture(mixers[0], torch.tensor([[0, 3, 11]] * 3))
        seen["logits"] = tracer.result.logits[:, -1].clone()
    return seen


@case(head_outputs, remove_head, writes=True)
def removes_head(model, backend):
    mixer, heads = model.layers[model.softmax_layers[-1]].mixer, model.heads
    with torch.no_grad(), model.trace(IDS, backend=backend) as tracer:
        seen = nnsight.save({})
        seen["before"] = head_outputs(mixer, heads).clone()
        remove_head(mixer, 1, heads)
        seen["after"] = head_outputs(mixer, heads).clone()
        seen["logits"] = tracer.result.logits[:, -1].clone()
    return seen


@case(query_and_key, attention_row, final_attention, entry_attention)
def reads_attention(model, backend):
    """Here `.source` is touched outside the trace; over there its operation is found by name."""
    layer = model.softmax_layers[1]
    mixer, op, mask = model.layers[layer].mixer, model.attention_op(layer), torch.arange(12).expand(3, -1) != 4
    with torch.no_grad(), model.trace(IDS, backend=backend):
        seen = nnsight.save({})
        query, key, scaling = query_and_key(mixer, op)
        seen["query"], seen["key"], seen["scaling"] = query.clone(), key.clone(), scaling
        seen["row"] = attention_row(query[:, :, 6], key, scaling, mask)
        seen["final"] = final_attention(mixer, op)
        seen["masked"] = final_attention(mixer, op, mask)
        seen["mass"] = entry_attention(mixer, op, ENTRIES)
    return seen


@case(write_query, write_key, query_and_key, writes=True)
def writes_queries_and_keys(model, backend):
    """In two layers: one head of some rows, then every head and keys at places of their own in each row."""
    first, last = (model.layers[i].mixer for i in (model.softmax_layers[0], model.softmax_layers[-1]))
    op, final = model.attention_op(model.softmax_layers[0]), model.attention_op(model.softmax_layers[-1])
    query, key, rows, places = *queries_and_keys(model), torch.tensor([2, 0]), torch.tensor([[1, 4], [0, 2], [5, 3]])
    with torch.no_grad(), model.trace(IDS, backend=backend) as tracer:
        seen = nnsight.save({})
        write_query(first, op, query[:2], rows, 1)
        seen["some"] = query_and_key(first, op)[0].clone()
        write_query(last, final, query)
        write_key(last, final, key, places)
        seen["every"], seen["keys"] = (x.clone() for x in query_and_key(last, final)[:2])
        seen["logits"] = tracer.result.logits[:, -1].clone()
    return seen


def queries_and_keys(model):
    """Made-up donors: queries of every row, keys of two places in every row."""
    shapes = (3, model.heads, model.head_dim), (3, 2, model.config.num_key_value_heads, model.head_dim)
    generator = torch.Generator().manual_seed(4)
    return tuple(torch.randn(*shape, generator=generator) for shape in shapes)


@case(truncated_logits)
def truncates_at_every_layer(model, backend):
    """All exits in one request, which ends after the last that is read."""
    layers, norm, head, scaling = model.layers, model.final_norm, model.lm_head, model.logits_scaling
    indices = range(len(layers) - 1)
    with torch.no_grad(), model.trace(IDS, backend=backend, logits_to_keep=1) as tracer:
        seen = nnsight.save({})
        for i in indices:
            seen[i] = truncated_logits(layers[i], norm, head, scaling).clone()
        tracer.stop()
    return seen


@case(
    edit_layers,
    edit_softmax,
    edit_linear,
    scores_of,
    attention_scores,
    sharpness,
    noise,
    best_heads,
    keep_heads,
    writes=True,
)
def edits_heads_by_phase(model, backend):
    """Two heads of each layer by sharpness before position 9, one at random from there on, and a linear mixer frozen there."""
    ops = {layer: model.attention_op(layer) for layer in model.softmax_layers}
    later = {"k": 1, "by": "random", "seed": 2, "linear": {model.linear_layers[0]: "freeze"}}
    edits, rows = {"prefill": {"k": 1}, "generation": later}, torch.arange(3)
    with torch.no_grad(), model.trace(IDS, backend=backend, logits_to_keep=1) as tracer:
        seen = nnsight.save({})
        seen["spoke"] = edit_layers(model, ops, edits, 9, 12, {}, rows, 11, 3)
        seen["logits"] = tracer.result.logits[:, -1].clone()
    return seen


@case(edit_layers, exposed, under, write_outputs, writes=True)
def hides_keys_by_phase(model, backend):
    ops = {layer: model.attention_op(layer) for layer in model.softmax_layers}
    columns, rows = {"needle": ENTRIES[:, 0].bool()}, torch.arange(3)
    later = {"mode": "balanced", "span": "needle", "renorm": True}
    edits = {"prefill": {"mode": "omit", "span": "needle"}, "generation": later}
    with torch.no_grad(), model.trace(IDS, backend=backend, logits_to_keep=1) as tracer:
        seen = nnsight.save({})
        edit_layers(model, ops, edits, 9, 12, columns, rows, 11, 3)
        seen["logits"] = tracer.result.logits[:, -1].clone()
    return seen


@case(read_cache, write_cache, slots, held_in, writes=True)
def continues_from_cache(model, backend):
    """A state transplant: row 1 goes on from row 0's recurrent states, and the cache never leaves the server."""
    lm, linear, rows = model.lm, model.linear_layers, torch.tensor([0, 1, 2])
    prefix = {"input_ids": IDS[:, :-1], "attention_mask": torch.ones_like(IDS[:, :-1]), "use_cache": True}
    last = {"input_ids": IDS[:, -1:], "attention_mask": torch.ones_like(IDS), "use_cache": True}
    with lm.session(backend=backend):
        seen = nnsight.save({})
        with torch.no_grad(), lm.trace(**prefix) as tracer:
            cache = tracer.result.cache
        saved = read_cache(cache)
        seen["prefix"] = read_cache(cache)
        write_cache(cache, saved, rows)
        with torch.no_grad(), lm.trace(**last, cache=cache) as tracer:
            seen["plain"] = tracer.result.logits[:, -1].clone()
        for i in linear:
            saved[i]["recurrent"][1] = saved[i]["recurrent"][0]
        write_cache(cache, saved, rows)
        with torch.no_grad(), lm.trace(**last, cache=cache) as tracer:
            seen["logits"] = tracer.result.logits[:, -1].clone()
        seen["after"] = read_cache(cache)
    return seen


@case(measure.answer, measure.next_token_loss, measure.drift)
def measures(model, backend):
    """Through the module's name, as the engine writes it: the whole module travels."""
    with torch.no_grad(), model.trace(IDS, backend=backend) as tracer:
        seen = nnsight.save({})
        seen["loss"] = measure.next_token_loss(tracer.result.logits, IDS)
        seen["drift"] = measure.drift(tracer.result.logits[:2], IDS[:2], AFTER)
        seen["answer"] = measure.answer(tracer.result.logits[:, -1], TOKENS)
    return seen


@case(remove, capture)
def session_of_uniform_names(model, backend):
    positions = torch.tensor([[5, 11]] * 3)
    with model.lm.session(backend=backend):
        seen = nnsight.save({})
        with torch.no_grad(), model.trace(IDS):
            donor = capture(model.mixers("G2")[-1], positions)
        with torch.no_grad(), model.trace(IDS.flip(1)) as tracer:
            remove(model.mixers("G1"))
            transplant(model.mixers("G2")[-1:], [donor], positions)
            seen["logits"] = tracer.result.logits[:, -1].clone()
    return seen


@case(remove, mixer_output, writes=True)
def uniform_names(model, backend):
    """The HybridModel itself is captured by the block."""
    with torch.no_grad(), model.trace(IDS, backend=backend) as tracer:
        seen = nnsight.save({})
        seen["embed"] = mixer_output(model.embed).clone()
        seen["input_norm"] = model.layers[0].input_norm.output.clone()
        remove(model.mixers("G0"))
        seen["mlp"] = model.layers[0].mlp.output.clone()
        seen["projected"] = model.layers[1].mixer.out_proj.input.clone()
        seen["softmax"] = mixer_output(model.layers[1].mixer).clone()
        remove(model.mixers("G1+L6"))
        seen["final_norm"] = model.final_norm.output.clone()
        seen["lm_head"] = model.lm_head.output.clone()
        seen["logits"] = tracer.result.logits[:, -1].clone()
    return seen


def edited(model, backend, edits, watch=(), start=0):
    """The engine's own block: the same file and line for every request, with other edits."""
    layers, embed, watch = model.layers, model.embed, {layer: model.attention_op(layer) for layer in watch}
    entering = torch.randn(3, 12, model.config.hidden_size, generator=torch.Generator().manual_seed(5))
    with torch.no_grad(), model.trace(IDS, backend=backend, logits_to_keep=1) as tracer:
        seen = nnsight.save({})
        enter(layers, start, entering)
        seen.update(apply_edits(layers, embed, edits, watch, ENTRIES))
        seen["answer"] = measure.answer(tracer.result.logits[:, -1], TOKENS)
        seen["logits"] = tracer.result.logits[:, -1].clone()
    return seen


@case(apply_edits, set_value, mixer_output, entry_attention, writes=True)
def edits_to_zero(model, backend):
    zero = [(i, "output", set_value, (None,)) for i in model.layout.layers_of("G2")]
    return edited(model, backend, zero, watch=model.softmax_layers)


@case(apply_edits, set_value, enter, writes=True)
def edits_to_mean_after_a_late_entry(model, backend):
    """The layers below do not run: what enters is not what they would have given."""
    mean = torch.linspace(-1, 1, model.config.hidden_size)
    return edited(model, backend, [(4, "output", set_value, (mean,))], start=4)


@case(apply_edits, zero_head, entry_attention, writes=True)
def edits_head(model, backend):
    """The layer whose head is removed is also watched: its attention is read, then its head is written."""
    layer = model.softmax_layers[1]
    return edited(model, backend, [(layer, "heads", zero_head, (0, model.heads))], watch=[layer])


@case(apply_edits, put_outputs, _at, writes=True)
def edits_to_donor(model, backend):
    donor = torch.randn(3, 1, model.config.hidden_size, generator=torch.Generator().manual_seed(3))
    whole = (-1, "output", put_outputs, (donor, torch.tensor([[11]] * 3), torch.arange(3)))
    row = (4, "output", put_outputs, (donor[:1], torch.tensor([[11]]), torch.tensor([1])))
    return edited(model, backend, [whole, row], watch=model.softmax_layers[:1])


@case(apply_edits, put_query, put_key, entry_attention, writes=True)
def edits_inside_attention(model, backend):
    """Both are made before the attention of their layer is read, and before its output is edited."""
    (first, *_, last), (query, key) = model.softmax_layers, queries_and_keys(model)
    one = (first, "inside", put_query, (model.attention_op(first), query[:2, None], torch.tensor([2, 0]), 1))
    places = torch.tensor([[1, 4], [0, 2], [5, 3]])
    more = [(last, "inside", put_query, (model.attention_op(last), query[:, None], torch.arange(3), -1))]
    more += [
        (last, "inside", put_key, (model.attention_op(last), key, places, torch.arange(3))),
        (last, "output", set_value, (None,)),
    ]
    return edited(model, backend, [one, *more], watch=[first, last])


@case(apply_edits, put_inputs, put_value, pass_on, skip, value_of, write_value, _site, writes=True)
def edits_of_what_enters(model, backend):
    """A layer's residual stream, a mixer's input, the values of its attention; and a layer that does not run."""
    last, width = model.softmax_layers[-1], model.config.hidden_size
    donor = torch.randn(3, 1, width, generator=torch.Generator().manual_seed(4))
    places, rows = torch.tensor([[11]] * 3), torch.arange(3)
    values = torch.randn(
        3, 1, model.config.num_key_value_heads, model.head_dim, generator=torch.Generator().manual_seed(6)
    )
    edits = [
        (2, "residual", put_inputs, (donor, places, rows)),
        (2, "input", put_inputs, (donor, places, rows)),
        (4, "residual", pass_on, ()),
        (last, "inside", put_value, (model.attention_op(last), values, places, rows)),
    ]
    return edited(model, backend, edits)


@case(map_outputs, pass_through, writes=True)
def maps_stand_in_for_layers(model, backend):
    width = model.config.hidden_size
    weight = torch.randn(width, width, generator=torch.Generator().manual_seed(8)) / width
    first, *_, last = model.linear_layers
    edits = [
        (first, "output", map_outputs, (weight, torch.ones(width))),
        (last, "residual", pass_through, (weight, torch.ones(width))),
    ]
    return edited(model, backend, edits)


@case(apply_edits, _read, writes=True)
def edits_and_takes_values(model, backend):
    """Every kind of value, at two positions or the last; after the edits of its place."""
    layers, embed, last, heads = model.layers, model.embed, model.softmax_layers[-1], model.heads
    op, edits = model.attention_op(last), [(last, "output", set_value, (None,))]
    takes = [(last, "inside", what, op, heads, torch.tensor([3, 11])) for what in ("query", "key", "value")]
    takes += [(last, place, place, op, heads, None) for place in ("residual", "input", "output")]
    takes += [(last, "gate", "gate", op, heads, None)] if model.gated else []
    with torch.no_grad(), model.trace(IDS, backend=backend) as tracer:
        seen = nnsight.save({})
        seen.update(apply_edits(layers, embed, edits, {}, None, takes))
        seen["logits"] = tracer.result.logits[:, -1].clone()
    return seen


@case(put_gate, write_gate, gates, writes=True)
def edits_the_gate(model, backend):
    """Of a model without gates the output is removed instead."""
    mixer, heads, gated, rows = model.layers[model.softmax_layers[-1]].mixer, model.heads, model.gated, torch.arange(3)
    gate = torch.randn(3, heads, model.head_dim, generator=torch.Generator().manual_seed(7))
    with torch.no_grad(), model.trace(IDS, backend=backend) as tracer:
        seen = nnsight.save({})
        if gated:
            seen["written"] = put_gate(mixer, heads, gate[:, None], rows, -1)
        if not gated:
            seen["written"] = set_value(mixer, None)
        seen["logits"] = tracer.result.logits[:, -1].clone()
    return seen


@case(write_state_head, writes=True)
def continues_with_one_heads_state(model, backend):
    lm, layer = model.lm, model.linear_layers[-2]
    rows, taken = torch.tensor([0, 1, 2]), torch.tensor([0])
    prefix = {"input_ids": IDS[:, :-1], "attention_mask": torch.ones_like(IDS[:, :-1]), "use_cache": True}
    last = {"input_ids": IDS[:, -1:], "attention_mask": torch.ones_like(IDS), "use_cache": True}
    with lm.session(backend=backend):
        seen = nnsight.save({})
        with torch.no_grad(), lm.trace(**prefix) as tracer:
            cache = tracer.result.cache
        saved = read_cache(cache)
        write_cache(cache, saved, rows)
        write_state_head(cache, layer, 0, torch.tensor([1]), saved[layer]["recurrent"][taken, 0])
        with torch.no_grad(), lm.trace(**last, cache=cache) as tracer:
            seen["logits"] = tracer.result.logits[:, -1].clone()
    return seen


@case(write_cache, apply_edits, state_stands, writes=True)
def continues_from_a_swapped_cache(model, backend):
    """The engine's state transplant: row 1 takes its states from row 0; the first edit is told so, the second not."""
    lm, layers, embed, linear = model.lm, model.layers, model.embed, model.linear_layers
    rows, swapped = torch.tensor([0, 1, 2]), torch.tensor([0, 0, 2])
    taken = {(i, "recurrent"): swapped for i in linear}
    prefix = {"input_ids": IDS[:, :-1], "attention_mask": torch.ones_like(IDS[:, :-1]), "use_cache": True}
    last = {"input_ids": IDS[:, -1:], "attention_mask": torch.ones_like(IDS), "use_cache": True}
    first = linear[0]
    with lm.session(backend=backend):
        seen = nnsight.save({})
        with torch.no_grad(), lm.trace(**prefix) as tracer:
            cache = tracer.result.cache
        saved = read_cache(cache)
        own = saved[first]["recurrent"].flatten(1)[:, :64]
        edits = [(first, "state", state_stands, (first, "recurrent", -1, own[[0]], torch.tensor([1])))]
        edits += [(first, "state", state_stands, (first, "recurrent", -1, own[[1]], torch.tensor([1])))]
        write_cache(cache, saved, rows)
        with torch.no_grad(), lm.trace(**last, cache=cache) as tracer:
            seen["plain"] = tracer.result.logits[:, -1].clone()
        write_cache(cache, saved, rows, taken)
        with torch.no_grad(), lm.trace(**last, cache=cache) as tracer:
            seen.update(apply_edits(layers, embed, edits, {}, None))
            seen["logits"] = tracer.result.logits[:, -1].clone()
    return seen
