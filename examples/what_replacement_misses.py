"""What does a donor's Address between two ridge maps miss in the host's place? And what would a linear map do there?

python examples/what_replacement_misses.py [--donor tiny-gdn] [--host tiny-mamba2] [--n 200]

For two models with one tokenizer and their Address in G2, as the bundled ones are; `encode-address replace` is the whole design.
"""

import argparse

import numpy as np
import pandas as pd
import torch

import encode_address as ea
from encode_address.cross.pairs import Pairs
from encode_address.maps import Moments, RidgeMap
from encode_address.run.stitch import classes, run_layers

parser = argparse.ArgumentParser()
parser.add_argument("--donor", default="tiny-gdn")
parser.add_argument("--host", default="tiny-mamba2")
parser.add_argument("--n", type=int, default=200, help="test dictionaries; no dictionary of the fit has their words")
asked = parser.parse_args()
torch.set_grad_enabled(False)
donor, host, text = ea.load(asked.donor), ea.load(asked.host), ea.tasks.text_source("bundled", bundled=True)
pairs = Pairs(donor, host, "chat8", text=text)
test = [one.host for one in pairs.test(asked.n)]
prompts, wanted = torch.tensor([one.ids for one in test]), torch.tensor([one.answer for one in test])
# As in `replace`: of six prompts (dictionaries, lines) four are fitted, one chooses the penalty, one tells the error.
seen = [[one.host for one in pairs.fit(round(7.5 * asked.n))], text.chunks(host.tokenizer, "train", 200)]
label = np.array([name for part in seen for prompt in part for name in classes(prompt)])
role = np.concatenate([np.repeat(np.arange(len(part)) % 6, len(part[0])) for part in seen])


def read(model, part):
    """What enters the block and what it adds, (prompts, positions, d_model) each; prompts of one length."""
    layers, found = model.layout.layers_of("G2"), []
    for some in torch.tensor([prompt.ids for prompt in part]).split(128):
        with model.trace(some, logits_to_keep=1) as tracer:
            entering = model.layers[layers[0]].input.clone().save()
            left = model.layers[layers[-1]].output.clone().save()
            tracer.stop()
        found.append((entering, left - entering))
    return [torch.cat(values) for values in zip(*found)]


def flat(parts):
    """Token rows (tokens, d_model) of prompts of several lengths."""
    return torch.cat([part.flatten(0, 1) for part in parts]).double().numpy()


(h1, w1), (h2, w2), (h, write) = (read(host, part) for part in (*seen, test))
residual, target = flat([h1, h2]), flat([w1, w2])  # what enters the host's block, and what the block adds to it
varies = ((write - write.mean(0)) ** 2).sum(-1)[:, -1]  # at the final position, where the address is


def sums(x, y, where, alike):
    """Moments of token rows; `alike`: each class of positions is weighted to vary as much about its own mean."""
    rows, whole = [where & (label == name) for name in np.unique(label[where])], Moments()
    for one in (Moments().add(x[kept], y[kept]) for kept in rows):
        for name in ("n", "xx", "xy", "yy") if alike else ():  # yy last: the others are divided by it
            setattr(one, name, getattr(one, name) * len(y) * y.var() / one.yy)
        whole.merge(one)
    return whole


def fit(x, alike=False, where=True, kind="ridge", y=target):
    """The ridge map from token rows x to y, at all positions or some."""
    return RidgeMap(kind=kind).fit_moments(*(sums(x, y, where & part, alike) for part in (role < 4, role == 4)))


def mapped(ridge, values):
    return torch.tensor(ridge.predict(flat([values]))).float().view(*values.shape[:-1], -1)


def behind_entry(model, zeroed=False):
    """What the model's block adds behind its entry map: token rows of the fit, and (prompts, positions, d) of the test."""
    layers, without = [model.layers[i] for i in model.layout.layers_of("G2")], " without mixers" if zeroed else ""
    native = flat([read(model, part)[0] for part in seen])
    entry = fit(residual, y=native)
    streams = [mapped(entry, part).split(128) for part in (h1, h2, h)]
    *made, made_test = [torch.cat([run_layers(layers, x, None, zeroed) - x for x in stream]) for stream in streams]
    for name, ridge, x, y in (("entry", entry, residual, native), ("exit", fit(flat(made)), flat(made), target)):
        r2 = [ridge.error_on(sums(x, y, part, False)).r2 for part in (role < 4, role == 5)]
        print(f"{model.name}{without}: R2 of {name} map {r2[0]:.3f} on fitted prompts, {r2[1]:.3f} on others")
    return flat(made), made_test


def show(name, adds, at_final=None):
    """A row of the table: the host with `adds` for what its block adds, `at_final` at the final position."""
    last, right = host.layout.layers_of("G2")[-1], 0
    adds = adds if at_final is None else torch.cat([adds[:, :-1], at_final[:, -1:]], 1)
    for ids, answers, left in zip(*(one.split(128) for one in (prompts, wanted, h + adds))):
        with host.trace(ids, logits_to_keep=1) as tracer:
            host.layers[last].output[:] = left
            said = tracer.result.logits[:, -1].argmax(-1).save()
        right += int((said == answers).sum())
    missed = ea.stats.ratio(pd.Series(((adds - write)[:, -1] ** 2).sum(-1)), pd.Series(varies))
    print(f"{name:55}{ea.stats.wilson(right, len(test))!s:>18}{missed!s:>22}")


(foreign, foreign_test), (own, own_test) = behind_entry(donor), behind_entry(host)
still, still_test = behind_entry(donor, zeroed=True)
share = 100 * varies.sum() / ((write - write.mean((0, 1))) ** 2).sum()
print(f"{share:.2f} % of the variance of what the host's Address adds is between prompts at the final position\n")
print(f"{f'{donor.name} -> {host.name}, n = {len(test)}':55}{'accuracy':>18}{'missed at final':>22}")
show("host's own Address", write)
show("nothing", 0 * write)
everywhere, final = mapped(fit(foreign), foreign_test), label == "final"
show("every token weighs alike: host's own, two maps", mapped(fit(own), own_test))
show("  donor's, two maps", everywhere)
show("  the same, exact at the final position", everywhere, write)
show("  the same, exact everywhere else", write, everywhere)
show("  linear map", mapped(fit(residual), h))
show("position classes weigh alike: donor's, two maps", mapped(fit(foreign, True), foreign_test))
show("  the same without its mixers", mapped(fit(still, True), still_test))
show("  linear map", mapped(fit(residual, True), h))
show("fitted at the final position, exact elsewhere: donor's", write, mapped(fit(foreign, where=final), foreign_test))
show("  linear map", write, mapped(fit(residual, where=final), h))
show("  constant", write, mapped(fit(residual, where=final, kind="mean"), h))
