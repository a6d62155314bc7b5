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
class Drop:
    """Mixers of `layers` set to zero in a share `often` of the batches, at some positions.

    `where`: "dictionary" (before the first question), "question" (from there on), "answer" (where an answer is given and
    the position before, unless that is the key), "lookup" (everywhere in a dictionary batch), "text" (everywhere in a
    text batch).
    """

    layers: tuple[int, ...]
    where: str
    often: float


@dataclass(frozen=True)
class Guide:
    """An auxiliary loss: `weight` times -log of the attention of a softmax layer, from where an answer is given, on the
    dictionary's `entry` asked for or on the `key` in the question."""

    layer: int
    target: str
    weight: float


@dataclass(frozen=True)
class Stage:
    """One run of the training loop.

    Rates are constant after `warmup` steps and fall linearly over the last `decay` of them. `levels` is a curriculum of
    (entries, words in use): the next comes when the running accuracy passes `advance`; on the last, `sizes` are drawn
    instead, if given. Help that is *imposed* fades between two shares of the steps: `guides` in `guide_fade`, `drops`
    (which begin with the last level) in `drop_fade`.
    """

    name: str
    pattern: str
    steps: int
    muon: float
    adam: float
    levels: tuple[tuple[int, int], ...] = ((8, len(KEYS)),)
    sizes: tuple[int, ...] = ()
    advance: float = 0.75
    surfaces: tuple[str, ...] = ALL_SURFACES
    questions: int = 6
    rows: int = 24
    text: float = 0.15
    warmup: int = 20
    decay: float = 0.35
    guides: tuple[Guide, ...] = ()
    guide_fade: tuple[float, float] = (0.55, 0.65)
    drops: tuple[Drop, ...] = ()
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
        guides=(Guide(5, "entry", 0.5),),
        guide_fade=(0.45, 0.55),
        drops=(Drop((0,), "answer", 0.5),),
        drop_fade=(0.8, 0.95),
    )
    grown = Stage(
        "grown",
        GROWN,
        steps=1200,
        muon=0.012,
        adam=3e-3,
        guides=(Guide(7, "entry", 0.5),),
        sizes=(8, 8, 8, 8, 4, 16),
        text=0.25,
        decay=0.5,
        drops=(
            Drop((4, 5, 6), "dictionary", 0.5),
            Drop((2, 3), "question", 0.9),
            Drop((2, 8), "lookup", 0.5),
            Drop((0,), "answer", 0.3),
            Drop((1,), "question", 0.3),
            Drop((3, 4, 5, 6, 7), "text", 0.8),
            Drop((8,), "text", 0.4),
        ),
        origin=ORIGIN,
    )
    return base, grown


def imposed(recipe: tuple[Stage, ...]) -> list[str]:
    """What a recipe does not leave to the model, for its card."""
    last = recipe[-1]

    def until(fade: tuple[float, float]) -> str:
        return f"off for the last {1 - fade[1]:.0%} of steps"

    return [
        f"which softmax layer reads (auxiliary attention loss on L{last.guides[0].layer}, {until(last.guide_fade)})",
        "which block starts as Address (the only late block of the base that the model is grown from)",
        f"dictionary keys do not depend on the Address block (its mixers dropped at dictionary positions, {until(last.drop_fade)})",
        f"the earlier softmax and linear layers are not needed at the answer (dropped there, {until(last.drop_fade)})",
    ]
