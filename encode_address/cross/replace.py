"""`encode-address replace`: a donor's block in place of a host's (paper 3.13, 3.14), into OUT/<host>/replace-<donor>/.

Does another architecture's Address, its layers as they are and no weight updated, do the work of the host's, through two linear
maps? What is put in place of the block, and against what it is held, is in `stand_ins`; what the rows say in `replaced`.

If any smooth function would do, the linear map or the donor's block without its mixers would restore as much; if any trained
mixer would do, the donor's other blocks would; if the block were not needed, its removal would cost nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from encode_address import circuit as main_job
from encode_address import lab, maps
from encode_address.cross import replaced, stand_ins
from encode_address.cross.pairs import Pairs
from encode_address.cross.stand_ins import Plan
from encode_address.errors import NameNotFound, RunError, TaskError
from encode_address.experiments.base import Circuit, Conclusion, Heads
from encode_address.metrics import summary
from encode_address.run.cells import Cell
from encode_address.run.engine import git_revision, versions
from encode_address.run.job import Job
from encode_address.run.stitch import Stitch, said
from encode_address.run.store import Store, stored_keys
from encode_address.tasks import Text, text_source

VARIANTS = ("chat8",)
N, QUICK_N = 200, 24
FIT_PER_TEST = 7.5  # the paper: 1500 dictionaries for the fit, 200 for the test


@dataclass(frozen=True)
class Setting:
    """One variant: the slot settings with what stands in, the cells, and what is known of the rows that maps are fitted on."""

    variant: str
    plans: tuple[Plan, ...]
    standing: dict[str, dict[str, tuple]]
    cells: list[Cell]
    heads: Heads
    alignment: dict[str, Any]


def replace(
    donor: Any,
    host: Any,
    slot: str | Sequence[str] = "address",
    source: str | None = None,
    target: str | None = None,
    truncate: int | None = None,
    variants: Sequence[str] | str | None = None,
    n: int | None = None,
    seed: int = 0,
    *,
    quick: bool = False,
    fit: int | None = None,
    text: str | None = None,
    pool: str = "A",
    out: str | Path = "results",
    batch_tokens: int | None = None,
    fresh: bool = False,
) -> lab.Result:
    """Put blocks of `donor` in place of blocks of `host`, with every baseline, and write OUT/<host>/replace-<donor>/.

    `slot`: "address", "encode" or "both" (the Encode slot first, then the Address with that in place), or several of them.
    `source` and `target` name the donor's and the host's blocks of the slot (of the Address in "both"); what is not given comes
    from each model's stored verdict in `out`, and where there is none a quick `find` runs first. Several targets are written
    with commas; a source may be a union, "G2+G3". `truncate`: stop the host after that layer, and count the best of the
    dictionary's values as the answer. `n` test dictionaries (200) have keys that the `fit` dictionaries (7.5 n) have not.
    Raises EncodeAddressError subclasses for anything a user can mend.
    """
    started = time.monotonic()
    asked = _Asked(donor, host, slot, source, target, truncate, variants, n, seed, quick, fit, text, pool)
    known = [
        {} if not asked.lacks(side) else lab.circuits(model, asked.variants, seed, pool, out, text, batch_tokens)
        for side, model in enumerate((donor, host))
    ]
    stored = lab.stored_circuits(host, asked.variants, out)
    settings = [asked.setting(v, (known[0].get(v), (known[1] or stored or {}).get(v))) for v in asked.variants]
    folder = Path(out) / host.slug / f"replace-{donor.slug}"
    with Store(folder, fresh=fresh) as store:
        job = Job(host, asked.text, store, batch_tokens)
        for setting in settings:
            job.run(f"replace {setting.variant}", setting.cells)
        table = job.table()
        conclusions = {s.variant: _together(_concluded(table, s, donor, truncate)) for s in settings}
        result = lab.Result(conclusions, table, folder)
        kept = _keep_maps(job, settings, folder)
        store.finish(table, **_files(result, settings, asked, job, kept, time.monotonic() - started))
    return result


def dry_run(donor: Any, host: Any, *args: Any, out: str | Path = "results", **kwargs: Any) -> str:
    """What `replace` with these arguments costs from nothing."""
    batch_tokens, fresh = kwargs.pop("batch_tokens", None), kwargs.pop("fresh", False)
    asked = _Asked(donor, host, *_positional(args, kwargs))
    known = [lab.stored_circuits(model, asked.variants, out) for model in (donor, host)]
    lines = []
    if any(found is None and asked.lacks(side) for side, found in enumerate(known)):
        names = [model.name for side, model in enumerate((donor, host)) if known[side] is None and asked.lacks(side)]
        lines.append(
            f"  the circuit of {' and '.join(names)} is not known yet: a quick `find` comes first, and says which cells follow"
        )
    else:
        settings = [asked.setting(v, ((known[0] or {}).get(v), (known[1] or {}).get(v))) for v in asked.variants]
        cells = [cell for setting in settings for cell in setting.cells]
        lines.append(
            f"{donor.name} -> {host.name} replace: {Job(host, asked.text, None, batch_tokens).engine.plan(cells)}"
        )
    stored = 0 if fresh else len(stored_keys(Path(out) / host.slug / f"replace-{donor.slug}"))
    if stored:
        lines.append(f"  {stored:,} rows are stored; those that this command needs are not run again")
    return "\n".join(lines)


def _positional(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments of `replace` after the models, in order."""
    names = ("slot", "source", "target", "truncate", "variants", "n", "seed", "quick", "fit", "text", "pool")
    defaults = {"slot": "address", "seed": 0, "quick": False, "pool": "A"}
    given = {**defaults, **dict(zip(names, args)), **kwargs}
    return [given.get(name) for name in names]


class _Asked:
    """What was asked for, checked before anything runs."""

    def __init__(self, donor, host, slot, source, target, truncate, variants, n, seed, quick, fit, text, pool) -> None:
        if donor.remote or host.remote:
            raise RunError(
                "replace runs one model's layers inside the other's forward: load both models without remote=True"
            )
        self.donor, self.host, self.source, self.target, self.truncate = donor, host, source, target, truncate
        self.slots = slot.split(",") if isinstance(slot, str) else list(slot)
        if not self.slots or not {*self.slots} <= {*stand_ins.SLOTS}:
            raise NameNotFound(f"no slot {slot!r}: use {', '.join(stand_ins.SLOTS)}, or several with commas")
        self.variants = [variants] if isinstance(variants, str) else list(variants or VARIANTS)
        self.n = n if n is not None else QUICK_N if quick else N
        self.fit = fit if fit is not None else round(self.n * FIT_PER_TEST)
        if self.n < 2:
            raise TaskError("replace needs n of 2 or more")
        depth = len(host.layout.kinds)
        if truncate is not None and not 0 <= truncate < depth:
            raise NameNotFound(f"no layer {truncate} to stop after: {host.name} has {depth} layers, from 0")
        self.seed, self.pool = seed, pool
        self.text: Text = text_source(text, bundled=host.folder is not None)
        for model, names in ((donor, source), (host, target)):  # what does not exist is said before `find` runs
            for name in names.split(",") if names else ():
                model.layout.layers_of(name)

    def lacks(self, side: int) -> bool:
        """Whether the circuit of the donor (0) or host (1) must be known."""
        return (self.source, self.target)[side] is None or "both" in self.slots

    def setting(self, variant: str, circuits: tuple[Circuit | None, Circuit | None]) -> Setting:
        """One variant, with its prompts and cells."""
        donor, host, truncate = self.donor, self.host, self.truncate
        plans = tuple(stand_ins.plan(name, donor, host, circuits, self.source, self.target) for name in self.slots)
        for plan in plans:
            if truncate is not None and plan.every[-1].layers[-1] > truncate:
                raise RunError(
                    f"{host.name} stopped after L{truncate} does not reach {plan.targets}: truncate above it"
                )
        pairs = Pairs(donor, host, variant, seed=self.seed, text=self.text, pool=self.pool)
        rows, alignment = stand_ins.fit_rows(donor, host, pairs, self.fit, self.text)
        items, readers = pairs.test(self.n), circuits[1].readers if circuits[1] else ()
        chunks = self.text.chunks(host.tokenizer, "test", n=self.text.count if self.text.lines else 8)
        labels = {"variant": variant, "surface": pairs.host.surface or "restate", "pool": pairs.host.pool}
        labels |= {"dictionary_seed": self.seed, "split": "confirmation", "donor_model": donor.name}
        labels |= {} if truncate is None else {"cut": str(truncate)}
        standing: dict[str, dict[str, tuple]] = {}
        cells: list[Cell] = []
        for plan in plans:
            after = host.layout.readers_after(plan.every[-1].layers)
            heads = readers or tuple((layer, head) for layer in after[:1] for head in range(host.heads))
            standing[plan.name] = arms = stand_ins.arms(donor, host, plan, rows, self.seed)
            cells += stand_ins.cells(items, plan, arms, labels, heads, truncate)
            if truncate is None:
                cells += stand_ins.text_cells(chunks, plan, arms, labels)
        return Setting(variant, plans, standing, cells, heads, alignment)


def _concluded(
    table: pd.DataFrame, setting: Setting, donor: Any, truncate: int | None
) -> Iterator[tuple[str, Conclusion]]:
    """The conclusion of each slot setting of a variant."""
    rows = table[table["variant"] == setting.variant]
    for plan in setting.plans:
        some, controls = rows[rows["role"] == plan.name], stand_ins.controls(donor.layout, plan)
        yield plan.name, replaced.conclude(some, controls, setting.heads, truncate)


def _together(concluded: Iterator[tuple[str, Conclusion]]) -> Conclusion:
    """One conclusion of a variant: it holds where it holds in every slot."""
    found = dict(concluded)
    statuses = {one.status for one in found.values()}
    status = statuses.pop() if len(statuses) == 1 else "does not hold" if "does not hold" in statuses else "undecided"
    why = " | ".join(f"{name} slot: {one.why}" for name, one in found.items())
    return Conclusion(status, why, {name: dict(one.figures) for name, one in found.items()})


def _keep_maps(job: Job, settings: Sequence[Setting], folder: Path) -> list[str]:
    """Save the maps that this run fitted (a run that found all its rows has fitted none); returns their names."""
    kept = []
    for setting in settings:
        for plan in setting.plans:
            for arm, standing in setting.standing[plan.name].items():
                for place, one in zip(plan.every, standing):
                    if isinstance(one, Stitch) and one.data in job.engine._fitted:
                        kept += _keep(
                            one, job.engine.fitted(one), folder, f"{setting.variant}-{plan.name}-{arm}-{place.target}"
                        )
    return sorted(kept)


def _keep(one: Stitch, fitted: Any, folder: Path, name: str) -> list[str]:
    kept, slot = [], one.slot
    for side, ridge in zip(("entry", "exit"), fitted.maps):
        if ridge is not None:
            about = {
                "host": {"model": slot.host.name, "fingerprint": slot.host.fingerprint, "layers": list(slot.layers)},
                "donor": {"model": slot.donor.name, "fingerprint": slot.donor.fingerprint, "layers": list(one.kind[1])},
                "arm": said(one.kind), "map": side, "data": slot.shared, "seed": slot.seed,
            }  # fmt: skip
            file = f"{name}-{side}".replace(", ", "-").replace(" ", "-").replace("/", "-")
            kept.append(maps.save(ridge, folder / "maps" / file, about).name)
    return kept


def _files(result: lab.Result, settings: Sequence[Setting], asked: _Asked, job: Job, kept: list[str], seconds: float) -> dict[str, Any]:  # fmt: skip
    donor, host = asked.donor, asked.host
    table = summary(result.table)
    compared = [
        {
            "experiment": "replace",
            "variant": s.variant,
            "role": plan.name,
            "block": plan.targets,
            "source": plan.sources,
        }
        | {"arm": "donor - best control", "measure": replaced.measure_of(asked.truncate)}
        | result.conclusions[s.variant].figures[plan.name]["donor - best control"]
        for s in settings
        for plan in s.plans
    ]
    command = {"experiment": "replace", "donor": donor.name, "host": host.name, "slot": asked.slots}
    command |= {"source": asked.source, "target": asked.target, "truncate": asked.truncate, "variants": asked.variants}
    command |= {"n": asked.n, "fit": asked.fit, "seed": asked.seed, "pool": asked.pool, "text": asked.text.name}
    variants = {
        s.variant: {
            **result.conclusions[s.variant].as_dict(),
            "readers": [f"L{layer}H{head}" for layer, head in s.heads],
            "alignment": s.alignment,
        }
        for s in settings
    }
    return {
        "summary__csv": pd.concat([table, pd.DataFrame(compared)], ignore_index=True).to_csv(index=False),
        "verdict__json": {
            "experiment": "replace", "paper": "3.13", "model": host.name, "donor": donor.name,
            "sentence": result.sentence, "vocabulary": len(host.tokenizer), "variants": variants, "versions": versions(),
            **main_job.facts(host),
        },
        "manifest__json": {
            "command": command, **job.engine.facts(), "donor_fingerprint": donor.fingerprint, "git": git_revision(),
            "rows": len(result.table), "maps": kept,
            "this_run": {"seconds": round(seconds, 1), **job.account()},
        },
    }  # fmt: skip
