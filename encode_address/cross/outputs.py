"""The donor's part, and what maps are fitted to: mixer outputs at the last token, as plain tensors.

One model, its prompts in, tensors out. Nothing here knows that there is another model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import nnsight
import numpy as np
import torch

from encode_address.interventions import mixer_output
from encode_address.run.batch import ids_of, in_batches
from encode_address.run.cells import EMBED
from encode_address.run.engine import own_threads
from encode_address.tasks import Prompt


@dataclass(frozen=True)
class Outputs:
    """Of prompts by their digest: layer -> (d_model,) mixer output at the last token, on the CPU. EMBED stands for the
    token embedding, without its context, of the key that is asked for."""

    values: Mapping[str, Mapping[int, torch.Tensor]]

    def rows(self, prompts: Sequence[Prompt], layers: Sequence[int]) -> np.ndarray:
        """(prompts, layers x d_model), float64: the layers of a block side by side."""
        found = [torch.cat([self.values[prompt.digest][layer] for layer in layers]) for prompt in prompts]
        return torch.stack(found).double().numpy()


def final_outputs(engine: Any, prompts: Sequence[Prompt], layers: Sequence[int]) -> Outputs:
    """Run each distinct prompt once, as it is, up to the last of `layers`."""
    model, layers = engine.model, sorted({*layers})
    last, found = max(layers), {}
    engine.planned_layer_tokens += (tokens := cost(prompts, layers))
    engine.floor_layer_tokens += tokens
    distinct = list({prompt.digest: prompt for prompt in prompts}.values())
    groups = [[distinct[i] for i in some] for some in in_batches(distinct, engine.limits.tokens)]
    each = 4 * len(layers) * model.config.hidden_size
    batches = ((len(some) * len(some[0]), len(some) * each, (ids_of(some), layers, _asked_at(some))) for some in groups)
    with own_threads(model):
        for some, seen in zip(groups, engine.each(final_tokens, batches, 1 + last)):
            for row, prompt in enumerate(some):
                found[prompt.digest] = {layer: values[row].cpu() for layer, values in seen.items()}
    return Outputs(found)


def cost(prompts: Sequence[Prompt], layers: Sequence[int]) -> int:
    """Tokens x layers that `final_outputs` takes."""
    return sum(map(len, {p.digest: p for p in prompts}.values())) * (1 + max(layers))


def _asked_at(prompts: Sequence[Prompt]) -> torch.Tensor:
    """(prompts,) the position of each dictionary's key that is asked for."""
    return torch.tensor([prompt.span(f"key {prompt.query}")[0] for prompt in prompts])


def final_tokens(model, ids, wanted, keys):
    """Layer -> (batch, d_model), float32: mixer outputs at the last token; EMBED: embeddings at the positions `keys` (batch,)."""
    layers, embed = model.layers, model.embed
    with torch.no_grad(), model.trace(ids, logits_to_keep=1) as tracer:
        seen = nnsight.save({})
        for layer in wanted:
            if layer == EMBED:
                output = mixer_output(embed)
                seen[layer] = output[torch.arange(len(output), device=output.device), keys.to(output.device)].float()
            else:
                seen[layer] = mixer_output(layers[layer].mixer)[:, -1].float()
        model.stop(tracer)
    return seen
