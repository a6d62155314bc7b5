"""What the rule says: claims with their evidence, per variant and overall. Plain records, no rules."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from encode_address.stats import Estimate

REDIRECT_LOW = 0.5


@dataclass(frozen=True)
class AddressEvidence:
    """All that is known of one set of blocks as an Address. `problems` is empty when it passes."""

    name: str
    redirect: Estimate
    controls: dict[str, Estimate]
    moved: dict[str, Estimate]
    outcomes: dict[str, Estimate]
    kind: str
    problems: tuple[str, ...]

    @property
    def passes(self) -> bool:
        return not self.problems

    @property
    def redirects(self) -> bool:
        return self.redirect.low >= REDIRECT_LOW


@dataclass(frozen=True)
class Claim:
    """One claim on one variant: "found", "partial" or "not found", what it names, and why."""

    status: str
    names: tuple[str, ...] = ()
    reason: str = ""
    evidence: tuple[dict[str, Any], ...] = ()

    @property
    def holds(self) -> bool:
        return self.status != "not found"


@dataclass(frozen=True)
class VariantVerdict:
    """The claims on one variant of the task."""

    variant: str
    task: Claim
    encode: Claim
    address: Claim
    readers: Claim
    address_kind: str = ""
    ties: tuple[str, ...] = ()
    removal_only: tuple[str, ...] = ()
    attention_only: tuple[str, ...] = ()

    @property
    def claims(self) -> dict[str, Claim]:
        return {"task": self.task, "encode": self.encode, "address": self.address, "readers": self.readers}


@dataclass(frozen=True)
class Verdict:
    """FOUND or UNDECIDED, with what holds on every variant, and the reason."""

    status: str
    encode: tuple[str, ...]
    address: tuple[str, ...]
    readers: tuple[str, ...]
    address_kind: str
    reason: str
    variants: tuple[VariantVerdict, ...] = field(default=())

    def as_dict(self) -> dict[str, Any]:
        """The content of `verdict.json`."""
        per_variant = {
            v.variant: {
                "encode": list(v.encode.names),
                "address": list(v.address.names),
                "readers": list(v.readers.names),
                "address_kind": v.address_kind,
                "ties": list(v.ties),
                "removal_only": list(v.removal_only),
                "attention_moved_answer_did_not": list(v.attention_only),
                "status": {name: claim.status for name, claim in v.claims.items()},
                "reason": {name: claim.reason for name, claim in v.claims.items() if claim.reason},
            }
            for v in self.variants
        }
        return {
            "status": self.status,
            "encode": list(self.encode),
            "address": list(self.address),
            "readers": list(self.readers),
            "address_kind": self.address_kind,
            "reason": self.reason,
            "evidence": [e for v in self.variants for claim in v.claims.values() for e in claim.evidence],
            "variants": per_variant,
        }


def sentence(verdict: dict[str, Any]) -> str:
    """A verdict in one sentence, from what `verdict.json` says."""
    held = {part: _held(verdict, part, ", " if part == "readers" else "+") for part in ("encode", "address", "readers")}
    kind = f" (by {verdict['address_kind']})" if verdict.get("address_kind") else ""
    tail = f" - {verdict['reason']}" if verdict.get("reason") else ""
    claims = f"Encode {held['encode']}, Address {held['address']}{kind}, readers {held['readers']}"
    return f"{verdict['status']} in {verdict.get('model', 'the model')}: {claims}{tail}."


def _held(verdict: dict[str, Any], part: str, joint: str) -> str:
    """What holds a claim; where the variants differ, on which of them."""
    held: dict[str, list[str]] = {}
    for name, variant in (verdict.get("variants") or {"": verdict}).items():
        held.setdefault(joint.join(variant.get(part) or ()), []).append(name)
    if len(held) == 1:
        return next(iter(held)) or "none"
    return "; ".join(f"{names} on {' and '.join(on)}" for names, on in held.items() if names) or "none"
