"""What `transfer` is asked for, checked before anything runs: sites, test questions, draws and arms, by variant and seed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from encode_address.cross import transplants
from encode_address.cross.pairs import Both, Pairs, Question
from encode_address.cross.transplants import MAPPED, Arm, Draw, Fit, Site
from encode_address.errors import TaskError
from encode_address.experiments.base import Circuit, Heads
from encode_address.tasks import Prompt, Text, text_source

VARIANTS = ("chat8",)
N, QUICK_N = 200, 24
FIT, QUICK_FIT = 2000, 400  # paper 3.11
SEEDS, QUICK_SEEDS = 3, 1
FRESH = 200  # dictionaries of fit keys that no map is fitted on
DISTINCT_FIT = 800  # fit prompts where fewer distinct keys are asked: a point of the learning curve
ACROSS = ("chat8", "list8")  # fitted in the one template, tested in the other


@dataclass(frozen=True)
class Setting:
    """One variant: what is transplanted where, and the heads that are watched. A site is None where `find` names no Address."""

    variant: str
    source: Site | None
    target: Site | None
    others: tuple[Site, ...]
    watch: Heads


@dataclass(frozen=True)
class Group:
    """What is run together: the test questions of a variant and seed, and the arms that are tried on them.

    `fitted_in` is the setting of the maps, another variant's in the cross-template row. `alone`: with the hosts themselves.
    """

    variant: str
    fitted_in: Setting
    seed: int
    questions: tuple[Question, ...]
    fresh: tuple[Both, ...]
    arms: tuple[Arm, ...]
    labels: Mapping[str, Any]
    alone: bool = True

    @property
    def fits(self) -> list[Fit]:
        """The maps, each once."""
        return list({id(arm.fit): arm.fit for arm in self.arms}.values())

    def prompts(self, side: str, fits: Sequence[Fit]) -> list[Prompt]:
        """Everything that the donor, or the host, has to run: for these maps, and for the test."""
        draws = {id(fit.draw): fit.draw for fit in fits}.values()
        both = [getattr(one, side) for one in (*(both for draw in draws for both in draw.fit), *self.fresh)]
        if side == "donor":
            return both + [p for q in self.questions for p in (q.donor, q.donor_asks_b)]
        return both + [q.host_asks_a for q in self.questions]

    def layers(self, side: str) -> list[int]:
        """The layers that the maps need of the donor, or of the host."""
        sites = [fit.source if side == "donor" else fit.target for fit in self.fits]
        return sorted({layer for site in sites for layer in site.layers})


class Asked:
    """What was asked for, checked before anything runs."""

    def __init__(self, donor, host, source, target, variants, n, seed, quick, fit, seeds, text, pool) -> None:
        self.donor, self.host = donor, host
        self.variants = [variants] if isinstance(variants, str) else list(variants or VARIANTS)
        self.n = n if n is not None else QUICK_N if quick else N
        self.fit = fit if fit is not None else QUICK_FIT if quick else FIT
        self.seeds = seeds if seeds is not None else QUICK_SEEDS if quick else SEEDS
        if self.n < 2 or self.seeds < 1:
            raise TaskError("transfer needs n of 2 or more, and one seed or more")
        self.seed, self.pool = seed, pool
        self.text: Text = text_source(text, bundled=host.folder is not None)
        self.source, self.target = (name and name.replace(",", "+") for name in (source, target))
        for model, name in (
            (donor, self.source),
            (host, self.target),
        ):  # what does not exist is said before `find` runs
            if name:
                model.layout.layers_of(name)

    def setting(self, variant: str, donor: Circuit | None, host: Circuit | None) -> Setting:
        """One variant's blocks and heads, as named or as the circuits say."""
        source, target = (
            self._site(model, named, found)
            for model, named, found in ((self.donor, self.source, donor), (self.host, self.target, host))
        )
        others = tuple(
            Site(block.name, block.layers)
            for block in self.donor.layout.tabled
            if source is not None and not {*block.layers} <= {*source.layers}
        )
        after = self.host.layout.readers_after(target.layers) if target else self.host.softmax_layers
        readers = [head for head in (host.readers if host else ()) if head[0] in after]
        watch = readers or [(layer, head) for layer in after[:1] for head in range(self.host.heads)]
        return Setting(variant, source, target, others, tuple(watch))

    def _site(self, model: Any, named: str | None, found: Circuit | None) -> Site | None:
        names = named or "+".join(found.address if found else ())
        return Site(names, model.layout.layers_of(names)) if names else None

    def groups(self, settings: Sequence[Setting]) -> Iterator[Group]:
        """Variant by variant, seed by seed; after the template that the cross-template row is fitted in, that row."""
        across = {setting.variant: setting for setting in settings}.get(ACROSS[0])
        for setting in settings:
            for number in range(self.seeds):
                group, draw = self._group(setting, number)
                yield group
                if setting is across and draw is not None:
                    yield self._across(setting, draw, number, alone=ACROSS[1] not in self.variants)

    def _group(self, setting: Setting, number: int) -> tuple[Group, Draw | None]:
        seed, variant = self.seed + number, setting.variant
        disjoint, shared = (self._pairs(variant, keys, seed) for keys in ("disjoint", "shared"))
        questions = self._questions(disjoint, number)
        if setting.source is None or setting.target is None:
            return Group(variant, setting, seed, questions, (), (), self._labels(disjoint, seed)), None
        features = len(setting.source.layers) * self.donor.config.hidden_size
        draws = [self._draw(pairs, self.fit) for pairs in (disjoint, shared)]
        arms = [
            arm
            for draw in draws
            for arm in transplants.arms(draw, setting.source, setting.target, setting.others, features)
        ]
        for distinct in transplants.DISTINCT if number == 0 else ():
            if disjoint.size <= distinct < len(disjoint.words.fit_keys):
                draw = self._draw(disjoint, min(DISTINCT_FIT, self.fit), distinct)
                fit = Fit(draw, setting.source, setting.target, n=len(draw.fit))
                arms += [Arm(MAPPED, fit)] if fit.enough(features) else []
        fresh = tuple(disjoint.fresh(min(FRESH, self.fit)))
        return Group(variant, setting, seed, questions, fresh, tuple(arms), self._labels(disjoint, seed)), draws[0]

    def _across(self, setting: Setting, draw: Draw, number: int, alone: bool) -> Group:
        pairs = self._pairs(ACROSS[1], "disjoint", draw.seed)
        arm = Arm(MAPPED, Fit(draw, setting.source, setting.target, n=len(draw.fit)))
        questions, labels = self._questions(pairs, number), self._labels(pairs, draw.seed)
        fresh = tuple(pairs.fresh(min(FRESH, self.fit)))
        return Group(ACROSS[1], setting, draw.seed, questions, fresh, (arm,), labels, alone)

    def _pairs(self, variant: str, keys: str, seed: int) -> Pairs:
        return Pairs(self.donor, self.host, variant, keys=keys, seed=seed, text=self.text, pool=self.pool)

    def _questions(self, pairs: Pairs, number: int) -> tuple[Question, ...]:
        """The test; pairs are numbered on from seed to seed."""
        return tuple(replace(q, pair=number * self.n + q.pair) for q in pairs.questions(self.n))

    def _draw(self, pairs: Pairs, n: int, distinct: int | None = None) -> Draw:
        count = distinct or len(pairs.words.fit_keys)
        fit = tuple(pairs.fit(n, distinct))
        return Draw(pairs.variant, pairs.seed, pairs.keys, count, fit, limited=distinct is not None)

    def _labels(self, pairs: Pairs, seed: int) -> dict[str, Any]:
        return {
            "variant": pairs.variant,
            "surface": pairs.host.surface or "restate",
            "pool": pairs.host.pool,
            "split": "confirmation",
            "dictionary_seed": seed,
            "donor_model": self.donor.name,
        }
