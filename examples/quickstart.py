"""Watch one address move: remove, then transplant, each block of a hybrid model on one prompt.

python examples/quickstart.py [MODEL]        MODEL: a bundled name (tiny-gdn), a hub name or a folder
"""

import sys

import nnsight
import torch

import encode_address as ea
from encode_address.interventions import capture, remove, transplant

model = ea.load(sys.argv[1] if len(sys.argv) > 1 else "tiny-gdn")
print(model)

# Two prompts with the same dictionary: the host asks one of its keys, the donor another.
pair = ea.tasks.dictionary(model, "chat8").questions(1)[0]
host, donor, final = pair.host, pair.donor, torch.tensor([pair.host.final])
asked, other = host.values[pair.host_index], host.values[pair.donor_index]
with torch.no_grad(), model.trace(host) as tracer:
    intact = tracer.result.logits[0, -1].argmax().save()
print(f"\n{host.text}\nanswer: {model.tokenizer.decode(intact).strip()}, right: {asked}; the donor asks for: {other}\n")

# A removal says what the answer needs. It is no proof of a role: the first block is needed for any text at all.
# A transplant says what a block carries: if its output at the last token is the address, the host, which is
# otherwise left alone, looks up the donor's entry in its own dictionary.
print(f"{'block':8}{'removed':12}{'transplanted':14}")
for name in model.blocks:
    with torch.no_grad(), model.trace(host) as tracer:
        remove(model.mixers(name))
        removed = tracer.result.logits[0, -1].argmax().save()
    with torch.no_grad(), model.trace(donor):
        outputs = nnsight.save([capture(mixer, final) for mixer in model.mixers(name)])
    with torch.no_grad(), model.trace(host) as tracer:
        transplant(model.mixers(name), outputs, final)
        moved = tracer.result.logits[0, -1].argmax().save()
    without, answer = (model.tokenizer.decode(token).strip() for token in (removed, moved))
    print(f"{name:8}{without:12}{answer:14}{'<- the address moved' if answer == other else ''}")
