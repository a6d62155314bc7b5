"""What is verified about a model before any number is believed (design contract 2).

`load` runs the cheap part (names, kinds, every mixer write moves the logits); `encode-address check MODEL` runs
all. A failed check is a ModelError that names the model, the layer and what was seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import nnsight
import torch

from encode_address.errors import ModelError, TaskError
from encode_address.interventions import final_attention, mixer_output, query_and_key, truncated_logits
from encode_address.models.hybrid import HybridModel
from encode_address.run.steps import run_each

LENGTHS = (2, 17, 63, 64, 65, 93)  # prompts around the linear kernels' chunk length of 64


@dataclass(frozen=True)
class Finding:
    """One verified fact: what, whether it holds, and what was seen. `ok` None: stated, not judged."""

    name: str
    ok: bool | None
    seen: str


@dataclass(frozen=True)
class Report:
    """All findings about one model; `str(report)` is the one-screen report."""

    model: str
    lines: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return all(finding.ok is not False for finding in self.findings)

    def __str__(self) -> str:
        marks = {True: "ok    ", False: "FAILED", None: "      "}
        return "\n".join([*self.lines, *(f"  {marks[f.ok]} {f.name:<34} {f.seen}" for f in self.findings)])


def check(model: HybridModel, full: bool = True) -> Report:
    """Verify `model`; raise ModelError on the first failure of the cheap part, report the rest.

    Tolerances (float32): 1e-4 x max(1, standard deviation of the logits) between paths, 1e-5 for attention rows.
    In a lower precision, and on a GPU (whose kernels for one token and for many differ), they are stated, not judged.
    """
    exact = model.dtype == "float32" and model.device.type == "cpu"
    findings: list[Finding] = []
    for verify in (_kinds, _firing):
        findings.append(verify(model))
        if findings[-1].ok is False:
            raise ModelError(f"{model.name}: {findings[-1].name}: {findings[-1].seen}")
    if full:
        findings += [_identity(model), _split(model, exact), _padding(model, exact)]
        findings += [_attention(model, exact), _inner_firing(model), _truncation(model, exact)]
    layout = model.layout
    blocks = "  ".join(
        f"{b.name} [{b.span}]" + (f" -> L{b.reader}" if b.reader is not None else "") for b in layout.blocks
    )
    lines = (
        f"{model.name}: {type(model.module).__name__}, family {model.family.name} ({model.family.notes})",
        f"  {len(layout.kinds)} layers, {len(layout.linear_layers)} linear, {len(layout.softmax_layers)} softmax; "
        f"{model.heads} heads x {model.head_dim}; {model.dtype}, {model.attn_implementation}, {model.device}, "
        f"fingerprint {model.fingerprint}",
        f"  blocks  {blocks}",
    )
    return Report(model.name, lines, tuple(findings))


def random_ids(model: HybridModel, rows: int, length: int, seed: int = 0) -> torch.Tensor:
    """Ordinary (not special, not added) token ids, (rows, length)."""
    special = {*model.tokenizer.all_special_ids, *model.tokenizer.get_added_vocab().values()}
    size = min(len(model.tokenizer), model.config.vocab_size)
    ordinary = torch.tensor([i for i in range(size) if i not in special])
    generator = torch.Generator().manual_seed(seed)
    return ordinary[torch.randint(len(ordinary), (rows, length), generator=generator)]


def _kinds(model: HybridModel) -> Finding:
    name = "kinds agree with the config"
    layers = model.module.get_decoder().layers
    if len(layers) != len(model.layout.kinds):
        return Finding(name, False, f"the config names {len(model.layout.kinds)} layers, the module has {len(layers)}")
    for index, (layer, kind) in enumerate(zip(layers, model.layout.kinds)):
        attr = model.family.mixer_attr(kind)
        mixer, class_name = getattr(layer, attr, None), model.family.mixer_class(kind)
        if mixer is None:
            return Finding(name, False, f"L{index} should be {kind} but has no {attr}")
        if not type(mixer).__name__.endswith(class_name):
            found = type(mixer).__name__
            return Finding(name, False, f"L{index} should be {kind} but its {attr} is a {found}, not a {class_name}")
        if model.layers[index].mixer._module is not mixer:
            return Finding(name, False, f"L{index}: the name `mixer` does not lead to {attr}")
    return Finding(name, True, f"{len(layers)} layers")


def _firing(model: HybridModel) -> Finding:
    """Row i of one batch has noise added to layer i's mixer output; row L is untouched."""
    name = "a write to every mixer moves logits"
    count = len(model.layout.kinds)
    ids = random_ids(model, 1, 12).expand(count + 1, -1)
    noise = torch.randn(12, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    kinds = [model.family.returns(kind) for kind in model.layout.kinds]
    got, logits = model.ask(nudged, ids, noise)
    if not bool(torch.isfinite(logits[-1]).all()):
        seen = (
            f"the intact model's logits hold NaN or infinity in {model.dtype}: damaged weights, or try --dtype float32"
        )
        return Finding(name, False, seen)
    for i in range(count):
        if got[i] != kinds[i]:
            return Finding(name, False, f"L{i}: the mixer returned a {got[i]}, the family record says {kinds[i]}")
    moved = (logits[:-1] - logits[-1]).abs().amax(-1)
    still = [f"L{i}" for i in range(count) if not moved[i] > 1e-4 * max(1.0, float(logits[-1].std()))]
    if still:
        return Finding(name, False, f"writing to the mixer of {', '.join(still)} changed nothing")
    return Finding(name, True, f"smallest change of a logit {float(moved.min()):.3g}")


def nudged(model, ids, noise):
    """Row i of `ids` has noise added to layer i's mixer output: what each mixer returned, and the last logits (rows, vocab)."""
    layers = model.layers
    with torch.no_grad(), model.trace(ids) as tracer:
        seen = nnsight.save({"kinds": []})
        for i in range(len(layers)):
            seen["kinds"].append("tuple" if isinstance(layers[i].mixer.output, tuple) else "tensor")
            output = mixer_output(layers[i].mixer)
            output[i] += (noise * (1 + output.float().std().cpu())).to(output)
        seen["logits"] = tracer.result.logits[:, -1].float()
    return seen["kinds"], seen["logits"]


def untouched(model, ids):
    """All logits of `ids`, as they are and with every mixer's output replaced by itself: (batch, positions, vocab) each."""
    layers = model.layers
    with torch.no_grad(), model.trace(ids) as tracer:
        plain = tracer.result.logits.clone().save()
    with torch.no_grad(), model.trace(ids) as tracer:
        for i in range(len(layers)):
            output = mixer_output(layers[i].mixer)
            output[:] = output.clone()
        patched = tracer.result.logits.clone().save()
    return plain, patched


def _identity(model: HybridModel) -> Finding:
    plain, patched = model.ask(untouched, random_ids(model, 3, 20))
    worst = float((plain - patched).abs().max())
    return Finding("identity patch is bit-exact", bool(torch.equal(plain, patched)), f"max difference {worst:.1g}")


def _within(name: str, gaps: list[tuple[float, float, str]], exact: bool) -> Finding:
    """Judge (difference, scale of the logits, what) triples against 1e-4 x max(1, scale)."""
    difference, scale, what = max(gaps, key=lambda gap: gap[0] / max(1.0, gap[1]))
    ok = difference <= 1e-4 * max(1.0, scale)
    return Finding(
        name, bool(ok) if exact else None, f"max difference {difference:.2g} at {what} (logit std {scale:.2g})"
    )


def _split(model: HybridModel, exact: bool) -> Finding:
    gaps = []
    if model.family.continues and model.uncontinued:
        return Finding("split execution is not used", None, model.uncontinued)
    asked = [(random_ids(model, 2, length, seed=length),) for length in LENGTHS]
    for length, (whole, split) in zip(LENGTHS, model.ask(run_each, both_paths, asked)):
        gaps.append((float((whole - split).abs().max()), float(whole.std()), f"{length} tokens"))
    if not model.family.continues:
        return Finding("split execution is not used", True, f"it differs by {max(gap for gap, *_ in gaps):.2g}")
    return _within("split execution = full forward", gaps, exact)


def both_paths(model, ids):
    """Last logits (batch, vocab) of one full forward, and of the last token continued from its prefix's cache. To be asked."""
    with torch.no_grad(), model.trace(ids, logits_to_keep=1) as tracer:
        whole = tracer.result.logits[:, -1].float().clone().save()
    last = model.continuation(ids[:, -1:], ids.shape[1], model.prefix(ids[:, :-1]))
    with torch.no_grad(), model.lm.trace(**last) as tracer:
        split = tracer.result.logits[:, -1].float().clone().save()
    return whole, split


def path_gap(model: HybridModel, prompts: Sequence[Any]) -> dict[str, Any]:
    """How far the one-token path is from the full forward on these prompts (of equal length), in logits.

    In float32 on a CPU it is rounding; in a lower precision it is what patched rows must not be compared across.
    Returns `largest_logit_difference`, `logit_std`, `same_answer` (how many prompts) and `prompts` (of how many); nothing where
    the one-token path cannot be run.
    """
    if model.family.continues and model.uncontinued:
        return {}
    whole, split = model.ask(both_paths, torch.tensor([prompt.ids for prompt in prompts]))
    return {
        "largest_logit_difference": float((whole - split).abs().max()),
        "logit_std": float(whole.std()),
        "same_answer": int((whole.argmax(-1) == split.argmax(-1)).sum()),
        "prompts": len(prompts),
    }


def _inner_firing(model: HybridModel) -> Finding:
    """Row 2k of one batch has noise added to softmax layer k's last query, row 2k + 1 to its keys; the last to nothing."""
    name, indices = "a write to queries and keys does too", model.softmax_layers
    rows = 2 * len(indices) + 1
    ids = random_ids(model, 1, 12).expand(rows, -1)
    noise = torch.randn(12, model.head_dim, generator=torch.Generator().manual_seed(2))
    logits = model.ask(nudged_inside, ids, {i: model.attention_op(i) for i in indices}, noise)
    moved = (logits[:-1] - logits[-1]).abs().amax(-1)
    least = 1e-4 * max(1.0, float(logits[-1].std()))
    still = [f"{('query', 'keys')[r % 2]} of L{indices[r // 2]}" for r in range(rows - 1) if not moved[r] > least]
    if still:
        return Finding(name, False, f"writing to the {', '.join(still)} changed nothing")
    return Finding(name, True, f"smallest change of a logit {float(moved.min()):.3g}")


def nudged_inside(model, ids, ops, noise):
    """The last logits (rows, vocab) where row 2k of `ids` has noise added to the k-th softmax layer's last query, 2k + 1 to its keys."""
    layers = model.layers
    with torch.no_grad(), model.trace(ids, logits_to_keep=1) as tracer:
        for k, i in enumerate(ops):
            query, key, _ = query_and_key(layers[i].mixer, ops[i])
            query[2 * k, :, -1] += 10 * query.float().std() * noise[-1].to(query)  # enough to move any attention row
            key[2 * k + 1] += 10 * key.float().std() * noise.to(key)
        logits = tracer.result.logits[:, -1].float().clone().save()
    return logits


def _truncation(model: HybridModel, exact: bool) -> Finding:
    """The model "truncated" after its last layer is the model."""
    ours, own = model.ask(at_the_end, random_ids(model, 2, 20, seed=5))
    gap = float((ours - own).abs().max()), float(own.std()), "the last layer"
    return _within("exit after the last layer = logits", [gap], exact)


def at_the_end(model, ids):
    """The last logits (batch, vocab) of the model "truncated" after its last layer, and its own."""
    layer, norm, head = model.layers[-1], model.final_norm, model.lm_head
    scaling, cap = model.logits_scaling, model.logits_cap
    with torch.no_grad(), model.trace(ids, logits_to_keep=1) as tracer:
        ours = truncated_logits(layer, norm, head, scaling, cap=cap).float().clone().save()
        own = tracer.result.logits[:, -1].float().clone().save()
    return ours, own


def _padding(model: HybridModel, exact: bool) -> Finding:
    ids = random_ids(model, 1, 70, seed=3)[0].tolist()
    if not model.pads:
        try:
            model.encode([ids, ids[:9]])
        except TaskError as error:
            return Finding("left padding is refused", True, str(error))
        return Finding("left padding is refused", False, "prompts of different length were taken")
    short = (9, 57)
    batches = [model.encode(rows) for length in short for rows in ([ids[:length]], [ids[:length], ids])]
    seen = model.ask(run_each, first_logits, [(batch,) for batch in batches])
    alone, padded = seen[::2], seen[1::2]
    gaps = [
        (float((one - other).abs().max()), float(one.std()), f"{70 - length} pads")
        for length, one, other in zip(short, alone, padded)
    ]
    return _within("left padding changes nothing", gaps, exact)


def first_logits(model, batch):
    """The last logits (vocab,) of a batch's first row; `batch` as `HybridModel.encode` makes it."""
    with torch.no_grad(), model.lm.trace(**batch, use_cache=False) as tracer:
        logits = tracer.result.logits[0, -1].float().clone().save()
    return logits


def _attention(model: HybridModel, exact: bool) -> Finding:
    """Rows recomputed from queries and keys against the weights of the model's own eager attention."""
    name = "attention from q and k = eager"
    if model.remote:
        return Finding(name, None, "not asked on a server, whose attention cannot be set")
    ids = random_ids(model, 2, 40, seed=4)
    layers, indices = model.layers, model.softmax_layers
    ops = [model.attention_op(i) for i in indices]
    before = model.attn_implementation
    model.module.set_attn_implementation("eager")
    try:
        with torch.no_grad(), model.trace(ids):
            rows = nnsight.save([])
            for index, op in zip(indices, ops):
                rows.append((final_attention(layers[index].mixer, op), layers[index].mixer.output[1][:, :, -1].float()))
    finally:
        model.module.set_attn_implementation(before)
    worst, where = max((float((ours - eager).abs().max()), f"L{i}") for i, (ours, eager) in zip(indices, rows))
    ok = worst <= 1e-5
    return Finding(name, ok if exact else None, f"max difference {worst:.2g} at {where}")
