"""What a HybridModel is on a server. Torch only: these functions travel there by value."""

from __future__ import annotations

import types
from typing import Any

import torch


def continuation(last, length, cache):
    """See `HybridModel.continuation`."""
    # Without a mask of full length nnsight makes one of one token, and the softmax layers mask wrongly, silently.
    mask = torch.ones(len(last), length, dtype=torch.long, device=last.device)
    # Some models count positions from 0 again when they are not given.
    positions = torch.full_like(last, length - 1)
    known = {"input_ids": last, "attention_mask": mask, "position_ids": positions}
    return {**known, "cache": cache, "use_cache": True}


def view(lm: Any, facts: dict[str, Any]) -> types.SimpleNamespace:
    """What a HybridModel is on a server: its uniform names and plain facts, nothing else.

    `attention_op` is not among them: it must be called outside a trace.
    """
    blocks = facts["blocks"]

    def mixers(names):
        layers = []
        for name in names.split("+"):
            layers += [int(name[1:])] if name[0] == "L" else blocks[name].layers
        return [lm.layers[i].mixer for i in sorted(set(layers))]

    def trace(prompts, **kwargs):
        kwargs.setdefault("use_cache", False)
        if isinstance(prompts, torch.Tensor):
            kwargs = {"input_ids": prompts, "attention_mask": torch.ones_like(prompts), **kwargs}
            return lm.trace(**kwargs)
        return lm.trace(prompts, **kwargs)

    def stop(tracer):
        pass

    def prefix(ids):
        with torch.no_grad(), trace(ids, use_cache=True, logits_to_keep=1) as tracer:
            cache = tracer.result.cache.save()
        return cache

    names = {"layers": lm.layers, "embed": lm.embed, "final_norm": lm.final_norm, "lm_head": lm.lm_head}
    known = {
        "mixers": mixers,
        "trace": trace,
        "prefix": prefix,
        "stop": stop,
        "continuation": continuation,
        "held": None,
    }
    return types.SimpleNamespace(lm=lm, **known, **names, **facts)
