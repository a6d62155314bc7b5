"""Traces that use every function made for the inside of a trace; `test_out_of_process` runs them in two places.

A case takes a model and a backend (None: here) and gives a dict. Each trace block is written canonically (one
statement a line, no comments), because nested blocks travel as text and are found again by line.
"""

from dataclasses import dataclass

import nnsight
import torch

from encode_address import measure
from encode_address.interventions import (
    attention_row,
    capture,
    entry_attention,
    final_attention,
    head_outputs,
    mixer_output,
    query_and_key,
    read_cache,
    remove,
    remove_head,
    transplant,
    write_cache,
)
from encode_address.run.edits import (
    apply_edits,
    donor_stands,
    head_stands,
    projected_input,
    value_stands,
    write_donor,
    write_head,
    write_value,
)

IDS = torch.randint(20, 200, (3, 12), generator=torch.Generator().manual_seed(0))
TOKENS = IDS[:, :4]
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


@case(read_cache, write_cache, writes=True)
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


@case(measure.answer, measure.next_token_loss)
def measures(model, backend):
    """Through the module's name, as the engine writes it: the whole module travels."""
    with torch.no_grad(), model.trace(IDS, backend=backend) as tracer:
        seen = nnsight.save({})
        seen["loss"] = measure.next_token_loss(tracer.result.logits, IDS)
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
        remove(model.mixers("G2+L8"))
        seen["final_norm"] = model.final_norm.output.clone()
        seen["lm_head"] = model.lm_head.output.clone()
        seen["logits"] = tracer.result.logits[:, -1].clone()
    return seen


def edited(model, backend, edits, watch=()):
    """The engine's own block: the same file and line for every request, with other edits."""
    layers, embed, watch = model.layers, model.embed, {layer: model.attention_op(layer) for layer in watch}
    with torch.no_grad(), model.trace(IDS, backend=backend, logits_to_keep=1) as tracer:
        seen = nnsight.save({})
        seen.update(apply_edits(layers, embed, edits, watch, ENTRIES))
        seen["answer"] = measure.answer(tracer.result.logits[:, -1], TOKENS)
        seen["logits"] = tracer.result.logits[:, -1].clone()
    return seen


@case(apply_edits, write_value, value_stands, mixer_output, entry_attention, writes=True)
def edits_to_zero(model, backend):
    zero = (mixer_output, write_value, value_stands, (None,))
    return edited(model, backend, {i: zero for i in model.layout.layers_of("G2")}, watch=model.softmax_layers)


@case(apply_edits, write_value, writes=True)
def edits_to_mean(model, backend):
    mean = torch.linspace(-1, 1, model.config.hidden_size)
    return edited(model, backend, {2: (mixer_output, write_value, value_stands, ([mean],))})


@case(apply_edits, projected_input, write_head, head_stands, entry_attention, writes=True)
def edits_head(model, backend):
    """The layer whose head is removed is also watched: its attention is read, then its head is written."""
    layer = model.softmax_layers[1]
    return edited(model, backend, {layer: (projected_input, write_head, head_stands, (0, model.heads))}, watch=[layer])


@case(apply_edits, write_donor, donor_stands, writes=True)
def edits_to_donor(model, backend):
    donor = torch.randn(3, 1, model.config.hidden_size, generator=torch.Generator().manual_seed(3))
    whole = (mixer_output, write_donor, donor_stands, (donor, torch.tensor([[11]] * 3), None))
    row = (mixer_output, write_donor, donor_stands, (donor[:1], torch.tensor([[11]]), torch.tensor([1])))
    return edited(model, backend, {-1: whole, 4: row}, watch=model.softmax_layers[:1])
