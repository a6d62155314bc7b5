"""Write your own intervention: scale what a block writes, and read where the softmax layers then look.

python examples/my_first_intervention.py [MODEL]        MODEL: a bundled name (tiny-gdn), a hub name or a folder
"""

import sys

import nnsight
import torch

import encode_address as ea
from encode_address.interventions import final_attention, mixer_output

model = ea.load(sys.argv[1] if len(sys.argv) > 1 else "tiny-gdn")
prompt = ea.tasks.dictionary(model, "chat8").swaps(1)[0].clean
entry = list(prompt.span(f"entry {prompt.query}"))  # the tokens of the entry that is asked for
wrong = [choice for choice in prompt.choices if choice != prompt.answer]
# The attention call's name differs between models. Ask for it outside the trace, as nnsight needs it.
calls = {layer: model.attention_op(layer) for layer in model.softmax_layers}

print(f"right answer: {prompt.values[prompt.query]}; lead: of its logit over the best other value of the dictionary;")
print("L...: attention of that softmax layer's best head on the asked entry\n")
print(f"{'edit':11}{'answer':11}{'lead':>6}" + "".join(f"{f'L{layer}':>7}" for layer in calls))
edits = [(f"{block.name} x {scale}", block.layers, scale) for scale in (0.5, -1) for block in model.layout.blocks]
for name, changed, scale in [("none", (), 1), *edits]:
    with torch.no_grad(), model.trace(prompt) as tracer:
        seen = nnsight.save({})  # only what is saved leaves the trace
        for i in range(len(model.layout.kinds)):  # in the model's order: a layer that has run is gone
            if i in changed:
                mixer_output(model.layers[i].mixer)[:] *= scale
            if i in calls:
                seen[i] = final_attention(model.layers[i].mixer, calls[i])[0, :, entry].sum(-1).max()
        logits = tracer.result.logits[0, -1].save()
    # The bundled models shrug halving off. Flipping the sign shows which blocks the answer hangs on.
    answer, lead = model.tokenizer.decode(logits.argmax()).strip(), logits[prompt.answer] - logits[wrong].max()
    print(f"{name:11}{answer:11}{lead:6.1f}" + "".join(f"{seen[i]:7.2f}" for i in calls))
