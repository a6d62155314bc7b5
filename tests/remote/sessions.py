"""What a job can be beyond `out_of_process_cases`: whole functions that open their own traces.

Each takes a model and ids and gives plain values. Trace blocks are written canonically.
"""

from dataclasses import dataclass

import nnsight
import torch

from tests.out_of_process_cases import IDS


def in_one_job(model, backend, functions):
    """What the functions give, called one after the other in one session; here where `backend` is None."""
    with model.lm.session(backend=backend):
        out = nnsight.save([function(model, IDS) for function in functions])
    return out


def one(model, ids, layer):
    with torch.no_grad(), model.trace(ids, logits_to_keep=1) as tracer:
        inner = model.layers[layer].mixer.out_proj.input[:, -1].clone()
        logits = tracer.result.logits[:, -1].clone()
    return {"inner": inner, "logits": logits}


def each(model, ids, layers):
    for layer in layers:
        yield layer, one(model, ids, layer)


def nested_plain_values(model, ids):
    return {"rows": [one(model, ids, layer) for layer in (0, 2)], "rest": (1, 2.5, "x", None, True, {})}


def traces_in_a_generator(model, ids):
    return dict(each(model, ids, [0, 2]))


@dataclass(frozen=True)
class Plan:
    layer: int

    def run(self, model, ids):
        return one(model, ids, self.layer)


def modules_called_on_values_of_an_earlier_trace(model, ids):
    with torch.no_grad(), model.trace(ids):
        x = model.layers[3].output.clone()
    with torch.no_grad(), model.trace(ids[:1, :1], logits_to_keep=1):
        logits = model.lm_head(model.final_norm(x[:, -1])).clone()
    return logits


def state_swapped_in_a_cache(model, ids):
    prefix = {"input_ids": ids[:, :-1], "attention_mask": torch.ones_like(ids[:, :-1]), "use_cache": True}
    last = {"input_ids": ids[:, -1:], "attention_mask": torch.ones_like(ids), "use_cache": True}
    with torch.no_grad(), model.lm.trace(**prefix) as tracer:
        cache = tracer.result.cache
    for layer in model.linear_layers:
        states = cache.layers[layer].recurrent_states[0]
        states[0] = states[1].clone()
    with torch.no_grad(), model.lm.trace(**last, cache=cache) as tracer:
        logits = tracer.result.logits[:, -1].clone()
    return logits


def cache_handed_on(model, ids):
    prefix = {"input_ids": ids[:, :-2], "attention_mask": torch.ones_like(ids[:, :-2]), "use_cache": True}
    with torch.no_grad(), model.lm.trace(**prefix) as tracer:
        cache = tracer.result.cache
    rows = []
    for end in (ids.shape[1] - 1, ids.shape[1]):
        step = {"input_ids": ids[:, end - 1 : end], "attention_mask": torch.ones_like(ids[:, :end]), "use_cache": True}
        with torch.no_grad(), model.lm.trace(**step, cache=cache) as tracer:
            cache = tracer.result.cache
            logits = tracer.result.logits[:, -1].clone()
        rows.append(logits)
    return rows


def layers_skipped_before_another_trace(model, ids):
    with torch.no_grad(), model.trace(ids, logits_to_keep=1, use_cache=False) as tracer:
        x = model.layers[2].output.clone()
        for layer in list(model.layers)[3:]:
            layer.skip(x)
        early = tracer.result.logits[:, -1].clone()
    return {"early": early, "then": one(model, ids, 0)}


def stops_in_the_last_trace(model, ids):
    first = one(model, ids, 0)
    with torch.no_grad(), model.trace(ids) as tracer:
        x = model.layers[2].output.clone()
        tracer.stop()
    return {"first": first, "x": x}


def query_of_another_prompt(model, ids):
    """The attention operation is found by name where the model is."""
    layer = model.softmax_layers[0]
    with torch.no_grad(), model.trace(ids, use_cache=False):
        op = [name for name in model.layers[layer].mixer.source.names if name.startswith("attention_interface")][-1]
        query = getattr(model.layers[layer].mixer.source, op).inputs[0][1].clone()
    with torch.no_grad(), model.trace(ids.flip(0), use_cache=False) as tracer:
        positional, named = getattr(model.layers[layer].mixer.source, op).inputs
        getattr(model.layers[layer].mixer.source, op).inputs = ((positional[0], query, *positional[2:]), named)
        logits = tracer.result.logits[:, -1].clone()
    return {"query": query, "logits": logits}


def many_traces(model, ids):
    rows = []
    for layer in model.linear_layers:
        with torch.no_grad(), model.trace(ids, logits_to_keep=1) as tracer:
            output = model.layers[layer].mixer.output
            output[:, -1] = output[:, 0]
            logits = tracer.result.logits[:, -1].clone()
        rows.append(logits)
    return rows


def modules_called_outside_of_any_trace(model, ids):
    with torch.no_grad(), model.trace(ids):
        x = model.layers[3].output.clone()
    with torch.no_grad():
        logits = model.lm_head(model.final_norm(x[:, -1])).clone()
    return logits


def stops_before_another_trace(model, ids):
    with torch.no_grad(), model.trace(ids) as tracer:
        x = model.layers[2].output.clone()
        tracer.stop()
    return {"x": x, "then": one(model, ids, 0)}


FUNCTIONS = (
    nested_plain_values,
    traces_in_a_generator,
    Plan(2).run,
    modules_called_on_values_of_an_earlier_trace,
    state_swapped_in_a_cache,
    cache_handed_on,
    layers_skipped_before_another_trace,
    query_of_another_prompt,
    many_traces,
    stops_in_the_last_trace,
)
# What only a trusted job can do, and how a sandbox refuses it.
TRUSTED_ONLY = (
    (modules_called_outside_of_any_trace, "'NoneType' object has no attribute 'switch'"),
    (stops_before_another_trace, "BrokenPipeError"),
)
