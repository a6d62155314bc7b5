"""Arms: what is done to attention, or to the linear mixers, in each phase; plain data, hashable, one column per word."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Head = tuple[int, int]
KEEP = "keep"  # every key stays visible


@dataclass(frozen=True)
class Edit:
    """An edit of one phase (see `attention.forward`). `k` heads of each layer by a rule, or the named `heads` (layer, head) and no
    others; a `mode` that hides keys by the `span` they lie in; or what the linear mixers of `layers` put out."""

    k: int | None = None
    by: str = "sharp"
    seed: int = 0
    heads: tuple[Head, ...] | None = None
    mode: str = ""
    span: str = "needle"
    renorm: bool = False
    linear: str = ""
    layers: tuple[int, ...] = ()

    def plain(self, softmax_layers: Sequence[int]) -> dict[str, Any]:
        """As a dict that a trace takes."""
        out: dict[str, Any] = {}
        if self.k is not None:
            out = {"k": self.k, "by": self.by, "seed": self.seed}
        if self.heads is not None:
            out["heads"] = {layer: [head for own, head in self.heads if own == layer] for layer in softmax_layers}
        if self.mode:
            out |= {"mode": self.mode, "span": self.span, "renorm": self.renorm}
        if self.linear:
            out["linear"] = dict.fromkeys(self.layers, self.linear)
        return out


@dataclass(frozen=True)
class Arm:
    """What is done in the two phases, None being nothing, and the columns that say so. `part` is the question it belongs to;
    `together`: run in one forward, as its baseline is; `twice`: on prompts that state context and question twice."""

    part: str
    prefill: Edit | None = None
    generation: Edit | None = None
    labels: tuple[tuple[str, Any], ...] = ()
    together: bool = False
    twice: bool = False

    @property
    def columns(self) -> dict[str, Any]:
        """Its factors as columns; what does not apply is empty."""
        return {"part": self.part, "twice": self.twice, **dict(self.labels)}

    @property
    def spans(self) -> set[str]:
        """The spans that its edits name."""
        return {edit.span for edit in (self.prefill, self.generation) if edit and edit.mode and edit.mode != "null"}

    def labelled(self, **labels: Any) -> Arm:
        return replace(self, labels=(*self.labels, *labels.items()))


BOTH = "both"
PHASES = ("prefill", "generation", BOTH)


def in_phase(part: str, phase: str, edit: Edit, **kwargs: Any) -> Arm:
    """An arm with one edit in a phase, or in both."""
    first, second = phase in ("prefill", BOTH), phase in ("generation", BOTH)
    return Arm(part, edit if first else None, edit if second else None, **kwargs).labelled(phase=phase)


def sweep(
    heads: int, ks: Sequence[int], fixed: Mapping[int, tuple[Head, ...]], seeds: Sequence[int], twice: bool = False
) -> list[Arm]:
    """All, none, and `ks` heads per layer, in each phase, by each rule; `fixed`: k -> the heads of a list that does not change.

    The first arm is the intact model's. On prompts that state everything twice: by sharpness alone.
    """
    part = "twice" if twice else "sweep"
    out = [Arm(part, twice=twice).labelled(k=heads, by="intact", phase="")]
    for phase in PHASES:
        out.append(in_phase(part, phase, Edit(k=0), twice=twice).labelled(k=0, by="none"))
        for k in ks:
            chosen: list[tuple[str, Edit]] = [("sharp", Edit(k=k))]
            if not twice:
                chosen += [(by, Edit(k=k, by=by)) for by in ("l2", "bottom")]
                chosen += [(f"random {seed}", Edit(k=k, by="random", seed=seed)) for seed in seeds]
                chosen += [("fixed", Edit(heads=fixed[k]))] if k in fixed else []
            out += [in_phase(part, phase, edit, twice=twice).labelled(k=k, by=by) for by, edit in chosen]
    return out


GENERATION_MODES = (KEEP, "omit", "only", "balanced", "null")
PREFILL_MODES = (KEEP, "omit", "only", "null")


def grid() -> list[Arm]:
    """Which keys may be seen in which phase: all combinations, not renormalised (the paper) and renormalised; then spans of the needle's
    length elsewhere, and the question, hidden instead of the needle."""
    out = []
    for renorm in (False, True):
        for before in PREFILL_MODES:
            for after in GENERATION_MODES:
                edits = [None if m == KEEP else Edit(mode=m, renorm=renorm and m != "null") for m in (before, after)]
                out.append(Arm("grid", *edits).labelled(prefill=before, generation=after, renorm=renorm, span="needle"))
    for span in (*random_spans(), "question"):
        edit = Edit(mode="omit", span=span)
        out.append(Arm("grid", None, edit).labelled(prefill=KEEP, generation="omit", renorm=False, span=span))
    return out


def random_spans() -> list[str]:
    """Names of spans as long as the needle that lie elsewhere in the context."""
    return [f"elsewhere {i}" for i in range(5)]


def drops(every: Sequence[Head]) -> list[Arm]:
    """Every head alone silenced, at generation and in both phases."""
    return [
        in_phase("drop", phase, Edit(heads=tuple(one for one in every if one != head))).labelled(layer=head[0], head=head[1])
        for phase in ("generation", BOTH)
        for head in every
    ]  # fmt: skip


def curves(rankings: Mapping[str, Sequence[Head]]) -> list[Arm]:
    """The first n heads of each ranking kept everywhere: at generation, and (random ones apart) in both phases."""
    return [
        in_phase("curve", phase, Edit(heads=tuple(sorted(order[:n])))).labelled(by=name, size=n)
        for name, order in rankings.items()
        for phase in (("generation",) if name.startswith("random") else ("generation", BOTH))
        for n in sizes(len(order))
    ]


def sizes(count: int, most: int = 16) -> list[int]:
    """How many of `count` heads a keep-curve keeps: all numbers but none and all, or about `most` of them, closest at the beginning."""
    every = range(1, count)
    if len(every) <= most:
        return list(every)
    return sorted({round((count - 1) ** (i / (most - 1))) for i in range(most)})


def linear(
    layers: Sequence[int], blocks: Mapping[str, Sequence[int]], matched: Collection[tuple[int, ...]]
) -> list[Arm]:
    """The linear mixers: all, each block, and random sets of layers as large as a block, silenced; all frozen; all of another context."""
    out = [Arm("linear", together=True).labelled(linear="intact", block="", phase="")]
    sets = {"all": tuple(layers), **{name: tuple(own) for name, own in blocks.items()}}
    sets |= {f"random {i}": own for i, own in enumerate(matched)}
    asked = [("zero", phase, name) for name in sets for phase in PHASES]
    asked += [("freeze", "generation", "all"), *(("swap", phase, "all") for phase in PHASES)]
    for how, phase, name in asked:
        edit = Edit(linear=how, layers=sets[name])
        out.append(in_phase("linear", phase, edit, together=True).labelled(linear=how, block=name))
    return out
