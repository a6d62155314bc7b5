"""The decision rule: from a table of cells to a verdict. Pure functions of the table and the layout.

What is *selected* on the discovery split is *judged* on the confirmation split; the two share no dictionary. All
bounds are those of 95 % intervals over prompt pairs (see `stats`).

Task      The intact model answers: accuracy, lower bound >= .8.
Encode    The block whose outputs at the swapped tokens carry both the value and the key swap (lower bounds
          >= .5) while every other block's upper bounds are <= .1.
Address   The smallest set of blocks, grown greedily (singles; then, size by size, contiguous unions and the best
          smaller set with each block added), whose transplant at the final position
            - redirects the answer: lower bound >= .5 (below .9: partial);
            - more than every control: paired difference, lower bound >= .2 (identity and other-dictionary
              donors must leave the answer; permuted and random donors, every other block and, of a union, its
              own members must not redirect);
            - makes a head of a later softmax layer attend more to the donor's entry than to the host's (and at
              least .1 more than it did before);
            - moves an address, not the answer: with dissociation donors, key + index outcomes exceed payload.
          A set is not grown from blocks that redirect already, so two blocks that each suffice are redundant,
          not an Address of two.
Readers   Heads whose attention moves with the Address and whose removal costs >= 5 % of the logit gap (lower
          bound). They may differ between variants.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from encode_address.metrics import accuracy, attention, gap, heads, select
from encode_address.models.layout import Layout
from encode_address.stats import NOTHING, Estimate, difference, estimate, per_pair
from encode_address.verdict import REDIRECT_LOW, AddressEvidence, Claim, VariantVerdict, Verdict

TASK_LOW = 0.8
ENCODE_LOW, ENCODE_OTHERS_HIGH = 0.5, 0.1
REDIRECT_FULL = 0.9
CONTROL_LOW = 0.2
ATTENTION_MOVED = 0.1
READER_LOSS = 0.05
REMOVAL_DROP = 0.5
OUTCOMES = ("host_value_of_key_A", "host_value_at_index_j", "donor_value", "host_answer_kept")
NEEDED = ("experiment", "intervention", "position", "block", "donor", "swap", "reader", "mode", "redirected", "kept",
          "carried", "correct", "margin", "host_index", "donor_index", *OUTCOMES)  # fmt: skip
LEAVE_ANSWER, NO_REDIRECT = ("identity", "other-dictionary"), ("permuted", "random")


# -- the Address ---------------------------------------------------------------
def address_evidence(rows: pd.DataFrame, layout: Layout, name: str) -> AddressEvidence:
    """Judge one set of blocks ("G2", "G2+G3") on the transplant rows of one variant and split."""
    rows = select(rows, experiment="transplant", position="final")
    intact, rows = select(rows, intervention="none"), select(rows, intervention="transplant")
    own = select(rows, block=name, donor="same-dictionary")
    redirected = per_pair(own, "redirected")
    redirect = estimate(own["redirected"], own["pair"])
    controls, problems = {}, []
    if not _has_reader(layout, name):
        problems.append("no softmax layer follows it")
    if not redirect.low >= REDIRECT_LOW:
        problems.append(f"redirects {redirect}")
    for donor in LEAVE_ANSWER + NO_REDIRECT:
        control = select(rows, block=name, donor=donor)
        moved = 1 - per_pair(control, "kept") if donor in LEAVE_ANSWER else per_pair(control, "redirected")
        controls[donor] = difference(redirected, moved)
    for block in layout.blocks:  # a union's own members too: it must do what none of them does
        if block.name != name:
            other = select(rows, block=block.name, donor="same-dictionary")
            controls[block.name] = difference(redirected, per_pair(other, "redirected"))
    close = [f"{control} ({value})" for control, value in controls.items() if not value.low >= CONTROL_LOW]
    if close:
        problems.append(f"controls move as much: {', '.join(close)}")
    moved = moved_heads(own, intact, layout.readers_after(layout.layers_of(name)))
    if not moved:
        problems.append("no later softmax layer attends more to the donor's entry")
    dissociation = select(rows, block=name, donor="dissociation")
    outcomes = {o: estimate(dissociation[o], dissociation["pair"]) for o in OUTCOMES if o in dissociation}
    kind = _kind(outcomes)
    if dissociation.empty:
        problems.append("no dissociation donors were run")
    else:
        addressed = per_pair(dissociation, OUTCOMES[0]) + per_pair(dissociation, OUTCOMES[1])
        if not difference(addressed, per_pair(dissociation, OUTCOMES[2])).low > 0:
            problems.append("it carries the donor's answer, not an address")
    return AddressEvidence(name, redirect, controls, moved, outcomes, kind, tuple(problems))


def moved_heads(rows: pd.DataFrame, intact: pd.DataFrame, layers: Iterable[int]) -> dict[str, Estimate]:
    """Heads of these layers that come to attend more to the donor's entry than to the host's.

    The estimate is the paired difference donor's - host's after the transplant; it must exceed 0, and exceed the
    intact host's own by >= .1: a head may prefer the donor's place in the dictionary whatever is asked.
    """
    out = {}
    for head in heads(rows):
        if head[0] in set(layers):
            after, before = _preference(rows, head), _preference(intact, head)
            value = difference(after, 0 * after)
            if value.low > 0 and difference(after, before).low >= ATTENTION_MOVED:
                out[f"L{head[0]}H{head[1]}"] = value
    return out


def _preference(rows: pd.DataFrame, head: tuple[int, int]) -> pd.Series:
    """Per pair, a head's attention on the donor's entry minus that on the host's."""
    if f"attn.L{head[0]}H{head[1]}" not in rows or rows.empty:
        return pd.Series(dtype=float)
    shift = attention(rows, head, "donor_index") - attention(rows, head, "host_index")
    return shift.groupby(rows["pair"]).mean()


def next_sets(rows: pd.DataFrame, layout: Layout) -> list[str]:
    """The sets of blocks whose same-dictionary transplant must be measured next, [] when the search is over.

    `rows` are one variant's discovery rows. Nothing is grown once a set redirects: its supersets would redirect
    too, and hide that it does, whether or not it passes the rest.
    """
    for stage in _stages(rows, layout):
        missing = [name for name in stage if name not in _measured(rows)]
        if missing:
            return missing
        if redirecting(rows, layout, stage):
            return []
    return []


def redirecting(rows: pd.DataFrame, layout: Layout, names: Iterable[str] | None = None) -> list[str]:
    """Those of `names` (of all measured sets) that redirect and that a softmax layer follows, best first."""
    order = [name for name in (_measured(rows) if names is None else names) if _has_reader(layout, name)]
    values = {name: _redirect(rows, name) for name in order}
    return [name for name in sorted(values, key=lambda n: (-values[n].value, n)) if values[name].low >= REDIRECT_LOW]


def select_address(rows: pd.DataFrame, layout: Layout) -> list[AddressEvidence]:
    """The sets that redirect on the discovery split, passing ones first; the best single when none does."""
    names = redirecting(rows, layout)
    if not names:
        singles = [b.name for b in layout.blocks if b.name in _measured(rows)]
        names = sorted(singles, key=lambda name: -_redirect(rows, name).value)[:1]
    return sorted((address_evidence(rows, layout, name) for name in names), key=lambda e: not e.passes)


def _stages(rows: pd.DataFrame, layout: Layout) -> Iterable[list[str]]:
    """Singles; then, size by size, the contiguous unions and the best smaller set with each block added."""
    names = [block.name for block in layout.blocks]
    candidates = [block.name for block in layout.tabled]
    yield names
    smaller = candidates
    for size in range(2, len(candidates) + 1):
        best = max(smaller, key=lambda name: _redirect(rows, name).value).split("+")
        stage = ["+".join(candidates[i : i + size]) for i in range(len(candidates) - size + 1)]
        stage += ["+".join(sorted([*best, c], key=names.index)) for c in candidates if c not in best]
        smaller = list(dict.fromkeys(stage))
        yield smaller


def _has_reader(layout: Layout, name: str) -> bool:
    return bool(layout.readers_after(layout.layers_of(name)))


def _measured(rows: pd.DataFrame) -> set[str]:
    return set(select(rows, experiment="transplant", position="final", donor="same-dictionary")["block"])


def _redirect(rows: pd.DataFrame, name: str) -> Estimate:
    own = select(rows, experiment="transplant", position="final", block=name, donor="same-dictionary")
    return estimate(own["redirected"], own["pair"]) if len(own) else NOTHING


def _kind(outcomes: dict[str, Estimate]) -> str:
    for outcome, kind in zip(OUTCOMES, ("key", "index", "payload")):
        if outcome in outcomes and outcomes[outcome].low >= REDIRECT_LOW:
            return kind
    return "mixed" if outcomes else ""


# -- the other claims ------------------------------------------------------------
def judge_task(rows: pd.DataFrame) -> Claim:
    """Does the intact model do the task?"""
    value = accuracy(select(rows, experiment="baseline"))
    evidence = (_evidence("task", "intact", "accuracy", value),)
    if value.low >= TASK_LOW:
        return Claim("found", (), "", evidence)
    if value.value >= TASK_LOW:
        return Claim("not found", (), f"n is too small to tell whether the model does the task: {value}", evidence)
    return Claim("not found", (), f"the intact model cannot do the task: accuracy {value}", evidence)


def carried(rows: pd.DataFrame, block: str) -> dict[str, Estimate]:
    """The share of value and of key swaps that a block's outputs carry."""
    rows = select(rows, experiment="encode", block=block)
    if rows.empty:
        return {}
    return {swap: estimate(g["carried"], g["pair"]) for swap, g in rows.groupby("swap")}


def select_encode(rows: pd.DataFrame, layout: Layout) -> str | None:
    """The block that carries both swaps best on the discovery split."""
    worst = {b.name: min((e.low for e in carried(rows, b.name).values()), default=0.0) for b in layout.blocks}
    best = max(worst, key=lambda name: worst[name])
    return best if worst[best] >= ENCODE_LOW else None


def judge_encode(rows: pd.DataFrame, layout: Layout, chosen: str | None) -> Claim:
    """Does `chosen` alone carry the swaps on the confirmation split?"""
    values = {block.name: carried(rows, block.name) for block in layout.blocks}
    evidence = tuple(
        _evidence("encode", block, f"carried, {swap} swap", value)
        for block, swaps in values.items()
        for swap, value in swaps.items()
    )
    if chosen is None:
        return Claim("not found", (), "no block's outputs carry both the value and the key swap", evidence)
    low = [f"{swap} swap {value}" for swap, value in values[chosen].items() if not value.low >= ENCODE_LOW]
    if low or len(values[chosen]) < 2:
        return Claim("not found", (), f"{chosen} does not carry it on new dictionaries: {', '.join(low)}", evidence)
    others = {
        f"{block} {swap} swap {value}": value.value
        for block, swaps in values.items()
        if block != chosen
        for swap, value in swaps.items()
        if not value.high <= ENCODE_OTHERS_HIGH
    }
    if others and max(others.values()) <= ENCODE_OTHERS_HIGH:
        few = next(iter(others))
        return Claim(
            "not found", (), f"{chosen} carries the swaps; n is too small to tell that {few} does not", evidence
        )
    if others:
        return Claim("not found", (), f"{chosen} carries the swaps, but so do others: {', '.join(others)}", evidence)
    return Claim("found", (chosen,), "", evidence)


def removal_only(rows: pd.DataFrame, layout: Layout, claimed: Sequence[str]) -> tuple[str, ...]:
    """Blocks whose removal breaks the task (accuracy falls by >= .5) but that carry neither swap and no claim."""
    intact = select(rows, experiment="baseline")
    out = []
    for block in layout.blocks:
        removed = select(rows, experiment="removal", block=block.name, mode="zero")
        if len(removed) and difference(per_pair(intact, "correct"), per_pair(removed, "correct")).low >= REMOVAL_DROP:
            out.append(block.name)
    carries = {name for name in out if any(e.low >= ENCODE_LOW for e in carried(rows, name).values())}
    return tuple(name for name in out if name not in claimed and name not in carries)


def gap_losses(rows: pd.DataFrame) -> dict[str, Estimate]:
    """Per head, the share of the intact logit gap that its removal costs."""
    intact = gap(select(rows, experiment="baseline"))
    out = {}
    removals = select(rows, experiment="readers")
    for name, removed in removals.groupby("reader") if len(removals) else ():
        out[str(name)] = difference(intact / intact.mean(), gap(removed) / intact.mean(), unit=False)
    return dict(sorted(out.items(), key=lambda item: -item[1].value))


def causal_heads(rows: pd.DataFrame) -> list[str]:
    """Heads whose removal costs at least 5 % of the gap, the costliest first."""
    return [name for name, loss in gap_losses(rows).items() if loss.low >= READER_LOSS]


def judge_readers(rows: pd.DataFrame, address: AddressEvidence | None, chosen: Sequence[str]) -> Claim:
    """Which of the `chosen` heads lose gap when removed *and* move with the Address?"""
    losses = {name: loss for name, loss in gap_losses(rows).items() if name in chosen}
    evidence = [_evidence("readers", name, "share of the gap lost", loss) for name, loss in losses.items()]
    causal = [name for name in losses if losses[name].low >= READER_LOSS]
    if address is None or not address.passes:
        return Claim("not found", (), "without an Address no head can be seen to follow it", tuple(evidence))
    evidence += [_evidence("readers", h, "attention on donor's - host's entry", v) for h, v in address.moved.items()]
    names = tuple(name for name in causal if name in address.moved)
    if names:
        return Claim("found", names, "", tuple(evidence))
    seen = f"heads that move: {', '.join(address.moved) or 'none'}; heads that lose gap: {', '.join(causal) or 'none'}"
    return Claim("not found", (), f"no head both moves and loses gap ({seen})", tuple(evidence))


def judge_address(
    rows: pd.DataFrame, layout: Layout, chosen: Sequence[AddressEvidence]
) -> tuple[Claim, AddressEvidence | None, tuple[str, ...]]:
    """Judge the discovery split's choice on the confirmation split: the claim, its evidence, and ties."""
    first = {e.name: e for e in chosen if e.name in _measured(rows)}
    judged = [address_evidence(rows, layout, name) for name in first]
    passing = [e for e in judged if e.passes and first[e.name].passes]
    passing.sort(key=lambda e: e.redirect.value, reverse=True)
    shown = passing or judged
    evidence = [_evidence("address", e.name, "redirected", e.redirect) for e in shown]
    for e in shown[:1]:
        evidence += [_evidence("address", e.name, f"redirected - {c}", v) for c, v in e.controls.items()]
        evidence += [_evidence("address", e.name, outcome, v) for outcome, v in e.outcomes.items()]
        evidence += [_evidence("address", e.name, f"{h} attention, donor - host", v) for h, v in e.moved.items()]
    if not passing:
        strong = [e for e in judged if e.redirects]
        if len(strong) > 1 and not any("+" in e.name for e in strong):
            reason = f"{' and '.join(e.name for e in strong)} each redirect alone: the Address is redundant"
        elif strong:
            reason = f"{strong[0].name}: {'; '.join(strong[0].problems or first[strong[0].name].problems)}"
        else:
            best = max(judged, key=lambda e: e.redirect.value, default=None)
            reason = f"no set of blocks redirects the answer (best: {best.name} {best.redirect})" if best else "none"
        return Claim("not found", (), reason, tuple(evidence)), None, ()
    best = passing[0]
    ties = tuple(e.name for e in passing[1:])
    status = "found" if best.redirect.value >= REDIRECT_FULL else "partial"
    reason = "" if status == "found" else f"redirects {best.redirect}, below {REDIRECT_FULL}"
    return Claim(status, tuple(best.name.split("+")), reason, tuple(evidence)), best, ties


# -- the verdict -------------------------------------------------------------------
def judge_variant(rows: pd.DataFrame, layout: Layout, variant: str) -> VariantVerdict:
    """All claims on one variant: selected on its discovery rows, judged on its confirmation rows."""
    rows = select(rows, variant=variant)
    found, new = select(rows, split="discovery"), select(rows, split="confirmation")
    task = judge_task(new)
    encode = judge_encode(new, layout, select_encode(found, layout))
    address, evidence, ties = judge_address(new, layout, select_address(found, layout))
    readers = judge_readers(new, evidence, causal_heads(found))
    moved_only = []
    for block in layout.tabled:
        seen = address_evidence(new, layout, block.name)
        if seen.moved and not seen.redirects:
            moved_only.append(block.name)
    claims = {"encode": encode, "address": address, "readers": readers}
    if not task.holds:  # what a model that cannot do the task seems to do is not evidence
        claims = {
            k: Claim("not found", (), "the intact model cannot do the task", c.evidence) for k, c in claims.items()
        }
    return VariantVerdict(
        variant,
        _labelled(task, variant),
        **{name: _labelled(claim, variant) for name, claim in claims.items()},
        address_kind=evidence.kind if evidence and task.holds else "",
        ties=ties,
        removal_only=removal_only(new, layout, encode.names + address.names),
        attention_only=tuple(name for name in moved_only if name not in address.names),
    )


def judge(table: pd.DataFrame, layout: Layout, variants: Sequence[str]) -> Verdict:
    """FOUND when Encode, Address and a reader hold on every variant, with the same blocks; else UNDECIDED.

    Readers may differ between variants (the paper's do): `readers` lists those of any variant.
    """
    absent = {column: None for column in NEEDED if column not in table}
    verdicts = tuple(judge_variant(table.assign(**absent), layout, variant) for variant in variants)
    common = {}
    for part in ("encode", "address"):
        held = {getattr(v, part).names for v in verdicts}
        common[part] = held.pop() if len(held) == 1 else ()
    readers = tuple(dict.fromkeys(name for v in verdicts for name in v.readers.names))
    kinds = sorted({v.address_kind for v in verdicts if v.address_kind})
    kind = kinds[0] if len(kinds) == 1 else "mixed" if kinds else ""
    failing = [(v, name, claim) for v in verdicts for name, claim in v.claims.items() if not claim.holds]
    if not failing and common["encode"] and common["address"]:
        partial = [v.variant for v in verdicts if v.address.status == "partial"]
        reason = (
            f"partial on {', '.join(partial)}: the transplant redirects less than {REDIRECT_FULL}" if partial else ""
        )
        return Verdict("FOUND", common["encode"], common["address"], readers, kind, reason, verdicts)
    return Verdict("UNDECIDED", common["encode"], common["address"], readers, kind, _why(verdicts, failing), verdicts)


def _why(verdicts: Sequence[VariantVerdict], failing: list) -> str:
    """The reason in one line: shared reasons once, then what differs by variant."""
    incapable = [v.variant for v in verdicts if not v.task.holds]
    if len(incapable) == len(verdicts):
        return verdicts[0].task.reason
    reasons = [f"{v.variant}: {v.task.reason}" for v in verdicts if not v.task.holds]
    reasons += [f"{v.variant}: {claim.reason}" for v, name, claim in failing if name != "task" and v.task.holds]
    if len(verdicts) > 1:
        for part in ("encode", "address"):
            held = {v.variant: "+".join(getattr(v, part).names) for v in verdicts}
            if len(set(held.values())) > 1:
                holding = ", ".join(f"{name or 'none'} on {variant}" for variant, name in held.items())
                reasons.insert(0, f"the variants disagree ({part}: {holding})")
    return "; ".join(dict.fromkeys(reasons))


def _evidence(claim: str, what: str, measure: str, value: Estimate) -> dict[str, Any]:
    return {"claim": claim, "what": what, "measure": measure, **value.as_dict()}


def _labelled(claim: Claim, variant: str) -> Claim:
    evidence = tuple({"variant": variant, **e} for e in claim.evidence)
    return Claim(claim.status, claim.names, claim.reason, evidence)
