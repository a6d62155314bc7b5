"""What is trained, in which stages, and what is imposed meanwhile.

Every architecture grows: a six-layer base learns to look keys up; two layers that write nothing are added, a block and a
softmax layer; a second stage teaches the grown model to do without the old shortcuts, and gives the new block text. All help ends before the last fifth of the last stage.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from encode_address.train.words import KEYS

BASE, GROWN = "lallla", "lalallla"
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
    """An auxiliary loss: `weight` times -log of the attention of a softmax layer, from where an answer is given, on its
    target: of the dictionary's entry asked for, the later word and the separator after it (`entry`), or the value alone where
    that is the later word (`value`); or the `key` in the question."""

    layer: int
    target: str
    weight: float


@dataclass(frozen=True)
class Stage:
    """One run of the training loop.

    Rates are constant after `warmup` steps and fall over the last `decay` of them, linearly or as a `power`. `levels` is a curriculum of
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
    power: float = 1.0
    guides: tuple[Guide, ...] = ()
    guide_fade: tuple[float, float] = (0.55, 0.65)
    drops: tuple[Drop, ...] = ()
    drop_fade: tuple[float, float] = (0.65, 0.8)
    origin: dict[int, int] = field(default_factory=dict)  # growth: layer -> layer of the stage before


@dataclass(frozen=True)
class Recipe:
    """How one bundled model is made: its stages, and in words what they do not leave to the model."""

    architecture: str
    purpose: str
    stages: tuple[Stage, ...]
    imposed: tuple[str, ...]


# Text can rely on the new block, and on no other mixer: each of them may be silent at any time, whatever the others are.
TEXT_DROPS = tuple(Drop(layers, "text", 0.65) for layers in ((0,), (1,), (3,), (4, 5, 6), (7,)))
BASE_STAGE = Stage(
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
GROWN_STAGE = Stage(
    "grown",
    GROWN,
    steps=1600,
    muon=0.012,
    adam=3e-3,
    sizes=(8, 8, 8, 8, 4, 16),
    text=0.25,
    decay=0.7,
    power=2.0,  # the last fifth, without help, is calm: what was learned with help is to stay
    guides=(Guide(7, "entry", 0.5),),
    drops=(
        Drop((4, 5, 6), "dictionary", 0.6),  # keys are bound without the Address
        Drop((2, 3), "question", 0.9),  # the query is built by the Address alone
        Drop((2,), "lookup", 0.5),  # the new block is not needed to look up ...
        Drop((0,), "answer", 0.6),
        Drop((1,), "question", 0.3),
        *TEXT_DROPS,  # ... but for text
    ),
    origin=ORIGIN,
)
# The same, but the key is fetched by a softmax layer: most of the time no linear block may write at the answer.
FETCH_STAGE = replace(
    GROWN_STAGE,
    guides=(Guide(7, "entry", 0.5), Guide(3, "key", 0.5)),
    drops=(
        Drop((4, 5, 6), "dictionary", 0.5),
        Drop((4, 5, 6), "question", 0.8),
        Drop((0, 2), "answer", 0.8),
        *TEXT_DROPS,
    ),
)

# A Mamba-2 layer hands a value on to the separator by itself. Read there, the value would not be at its own token any more.
AT_VALUES = tuple(
    replace(stage, guides=tuple(replace(guide, target="value") for guide in stage.guides))
    for stage in (BASE_STAGE, GROWN_STAGE)
)

_GROUND_TRUTH = "A tiny trained hybrid with a known circuit: ground truth for this toolkit, not evidence for the paper."
_UNTIL = f"off for the last {1 - GROWN_STAGE.drop_fade[1]:.0%} of steps"
_READS = f"which softmax layer reads (auxiliary attention loss on L7, off for the last {1 - GROWN_STAGE.guide_fade[1]:.0%} of steps)"
_CIRCUIT = (
    _READS,
    "which block becomes Address (the only late block of the base it is grown from; the first layer forgets fast at the start "
    "and was dropped at the answer)",
    f"dictionary keys do not depend on the Address block (its mixers dropped at dictionary positions, {_UNTIL})",
    f"no other layer before the reader is needed to build the query (dropped at the question or the answer, {_UNTIL})",
    f"the block outside the circuit has text to work on (every other mixer dropped in two thirds of the text, {_UNTIL})",
)
RECIPES = {
    "tiny-gdn": Recipe("gdn", _GROUND_TRUTH, (BASE_STAGE, GROWN_STAGE), _CIRCUIT),
    "tiny-mamba2": Recipe("mamba2", _GROUND_TRUTH, AT_VALUES, _CIRCUIT),
    "tiny-griffin": Recipe(
        "griffin",
        "A tiny trained hybrid of another recurrence, for tests of this toolkit from end to end; not evidence for the paper.",
        (BASE_STAGE, GROWN_STAGE),
        _CIRCUIT,
    ),
    "tiny-gdn-negative": Recipe(
        "gdn",
        "A trained negative: it looks values up as well, but a softmax layer fetches the key, so no linear block is an Address.",
        (BASE_STAGE, FETCH_STAGE),
        (
            _READS,
            f"a softmax layer fetches the asked key (auxiliary attention loss on L3; linear blocks dropped at the question, {_UNTIL})",
        ),
    ),
}
