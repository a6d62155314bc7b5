"""What is trained, in which stages, and what is imposed meanwhile.

Both architectures grow: a six-layer base learns to look keys up; three layers that write nothing are added; a second
stage teaches the grown model to do without the old shortcuts. All help ends before the last fifth of the last stage.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from encode_address.train.words import KEYS

BASE, GROWN = "lallla", "lalalllal"
ORIGIN = {0: 0, 1: 1, 4: 2, 5: 3, 6: 4, 7: 5}  # layer of the grown model -> layer of the base
ALL_SURFACES = ("equals", "is", "", "plain", "far", "near", "gap")


@dataclass(frozen=True)
class Stage:
    """One run of the training loop.

    Rates are constant after `warmup` steps and fall linearly over the last `decay` of them. `levels` is a curriculum of
    (entries, words in use): the next comes when the running accuracy passes `advance`. Help that is *imposed* fades between
    two shares of the steps: `read_fade` for `read` (an auxiliary loss: attention of softmax layer `read_layer` from the
    answer's position on the entry asked for), `drop_fade` for mixers set to zero: those of `keyless_layers` at the
    dictionary's positions in `keyless` of the batches, those of `shortcut_layers` at the answer in `shortcut` of them.
    """

    name: str
    pattern: str
    steps: int
    muon: float
    adam: float
    levels: tuple[tuple[int, int], ...] = ((8, len(KEYS)),)
    advance: float = 0.75
    surfaces: tuple[str, ...] = ALL_SURFACES
    questions: int = 6
    rows: int = 24
    text: float = 0.15
    warmup: int = 20
    decay: float = 0.35
    read: float = 0.0
    read_layer: int = -1
    read_fade: tuple[float, float] = (0.55, 0.65)
    keyless: float = 0.0
    keyless_layers: tuple[int, ...] = ()
    shortcut: float = 0.0
    shortcut_layers: tuple[int, ...] = ()
    drop_fade: tuple[float, float] = (0.65, 0.8)
    origin: dict[int, int] = field(default_factory=dict)  # growth: layer -> layer of the stage before


def stages() -> tuple[Stage, ...]:
    """The recipe, the same for both architectures."""
    base = Stage(
        "base",
        BASE,
        steps=1500,
        muon=0.02,
        adam=4e-3,
        levels=((3, 32), (8, 32), (8, len(KEYS))),
        surfaces=("equals", "is", "", "plain", "far", "near"),
        text=0.0,
        warmup=50,
        decay=0.3,
        read=0.5,
        read_layer=5,
        read_fade=(0.45, 0.55),
    )
    grown = Stage(
        "grown",
        GROWN,
        steps=1200,
        muon=0.012,
        adam=3e-3,
        read=0.5,
        read_layer=7,
        keyless=0.5,
        keyless_layers=(4, 5, 6),
        shortcut=0.3,
        shortcut_layers=(0, 1, 2, 3),
        origin=ORIGIN,
    )
    return base, grown


def imposed(recipe: tuple[Stage, ...]) -> list[str]:
    """What a recipe does not leave to the model, for its card."""
    last = recipe[-1]

    def until(fade: tuple[float, float]) -> str:
        return f"off for the last {1 - fade[1]:.0%} of steps"

    return [
        f"which softmax layer reads (auxiliary attention loss on L{last.read_layer}, {until(last.read_fade)})",
        "which block starts as Address (the only late block of the base that the model is grown from)",
        f"dictionary keys do not depend on the Address block (its mixers dropped at dictionary positions, {until(last.drop_fade)})",
        f"the earlier softmax and linear layers are not needed at the answer (dropped there, {until(last.drop_fade)})",
    ]
