"""The word pools of the paper (section 1.2) and the filter that keeps one-token words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_KEYS_A = (
    "apple banana cherry date elder fig grape lemon mango peach pear plum berry onion garlic ginger pepper tomato "
    "carrot potato walnut almond"
)
_VALUES_A = (
    "red blue green gold gray black white orange yellow amber rose lime olive azure steel ice fire stone wood iron"
)
_MORE_KEYS = (
    "lion tiger bear wolf fox deer horse sheep goat cow pig dog cat mouse rabbit eagle hawk owl duck goose crow "
    "snake frog fish shark whale seal chair table desk lamp door window bed sofa clock mirror bottle cup plate bowl "
    "spoon fork knife pen book paper phone camera radio piano guitar drum violin river lake ocean mountain hill "
    "forest desert island valley beach cloud rain snow storm wind moon star planet sun sky king queen prince doctor "
    "nurse teacher farmer pilot captain soldier judge lawyer artist singer dancer writer train plane boat ship truck "
    "car bus bike rocket wagon bread cheese butter milk honey sugar rice pasta soup cake pie cookie candy coffee tea "
    "juice wine beer water shirt dress coat hat shoe sock glove scarf belt ring watch hammer nail brush rope chain "
    "wheel box bag basket key lock bell flag map coin"
)
_VALUES_B = f"{_VALUES_A} silver pink purple brown glass sand salt ash ruby mint tan".replace(" olive", "")

PAPER_POOLS: dict[str, dict[str, list[str]]] = {
    "A": {"keys": _KEYS_A.split(), "values": _VALUES_A.split()},
    "B": {"keys": f"{_KEYS_A} {_MORE_KEYS}".split(), "values": _VALUES_B.split()},
}


def one_token(words: Sequence[str], tokenizer: Any, *, bare: bool) -> tuple[list[str], list[str]]:
    """Split words into (kept, dropped): kept are one token with a leading space, and when `bare` also without."""
    kept, dropped = [], []
    for word in words:
        forms = [f" {word}", word] if bare else [f" {word}"]
        single = all(len(tokenizer(form, add_special_tokens=False)["input_ids"]) == 1 for form in forms)
        (kept if single else dropped).append(word)
    return kept, dropped
