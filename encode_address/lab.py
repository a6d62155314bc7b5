"""`encode-address run`: one experiment of the paper on one model, into OUT/<model>/<experiment>/.

An experiment is a module of `encode_address.experiments` with

    SUMMARY, PAPER     one line, and the section of the paper
    N, QUICK_N         pairs per variant
    VARIANTS           where they are not chat8, list8 and rev8
    NEEDS_CIRCUIT      whether `find` must have said what the circuit is
    ADAPTIVE           whether later cells depend on results
    CIRCUIT_OF         the variant whose circuit is asked about, where its own variants have none
    OPTIONS            what only it can be told: name -> the values that it may have, its default first; () is any, default None.
                       `setting.options` has them, the verdict and the manifest say them
    task(model, variant, **options)     what it asks, where that is not the dictionary
    common(setting)    a list of cells' lists or readings that belong to no variant and run after them; made before anything
                       runs, so that what is missing is said at once
    steps(setting)     a generator of lists of cells, or of readings (`run.reading`), which is sent the table of each: where
                       ADAPTIVE, what comes later may depend on it
    conclude(rows, setting) -> Conclusion     what the rows of one variant say
    overall(rows, setting) -> dict     figures of all variants together; `setting` is that of any of them

This module draws the prompts, runs the cells, and writes table, summary, verdict and manifest.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd

from encode_address import circuit as main_job
from encode_address.errors import NameNotFound, TaskError
from encode_address.experiments import EXPERIMENTS
from encode_address.experiments.base import Circuit, Conclusion, Setting
from encode_address.metrics import summary
from encode_address.run.cells import Cell
from encode_address.run.engine import git_revision, versions
from encode_address.run.job import Job
from encode_address.run.reading import Reading
from encode_address.run.store import Store, stored_keys
from encode_address.tasks import dictionary, text_source

VARIANTS = main_job.VARIANTS
MORE = ".circuits"  # in a model's folder: quick finds of variants that its own `find` has not


@dataclass(frozen=True)
class Result:
    """What an experiment gave: a conclusion per variant, every row it rests on, and the folder they were written to."""

    conclusions: dict[str, Conclusion]
    table: pd.DataFrame
    folder: Path

    @property
    def sentence(self) -> str:
        """All conclusions in one line; what several variants share is said once."""
        said: dict[str, list[str]] = {}
        for variant, conclusion in self.conclusions.items():
            said.setdefault(str(conclusion), []).append(variant)
        return "; ".join(f"{', '.join(variants)}: {text}" for text, variants in said.items())


def named(name: str) -> ModuleType:
    """The experiment of that name. Raises NameNotFound, listing what there is."""
    if name not in EXPERIMENTS:
        raise NameNotFound(f"no experiment {name!r}: there are {', '.join(EXPERIMENTS)} (encode-address run --list)")
    return EXPERIMENTS[name]


def options_of(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of an experiment: those `given` (None: not given), the others' defaults. Raises NameNotFound for an option that
    it does not know, TaskError for a value that the option cannot have."""
    known: Mapping[str, Sequence[Any]] = getattr(named(name), "OPTIONS", {})
    given = {option: value for option, value in given.items() if value is not None}
    for option, value in given.items():
        if option not in known:
            others = [other for other, module in EXPERIMENTS.items() if option in getattr(module, "OPTIONS", {})]
            says = f"it is one of {', '.join(others)}" if others else "no experiment has"
            raise NameNotFound(f"{name} has no option {option!r}: {says}")
        if known[option] and value not in known[option]:
            raise TaskError(f"{option} {value!r} of {name}: use {' or '.join(map(str, known[option]))}")
    return {option: next(iter(values), None) for option, values in known.items()} | given


def listing() -> str:
    """A line per experiment: its name, its section of the paper, what it asks."""
    width = max(map(len, EXPERIMENTS))
    return "\n".join(f"{name:<{width}}  §{module.PAPER:<5} {module.SUMMARY}" for name, module in EXPERIMENTS.items())


def experiment(
    name: str,
    model: Any,
    variants: Sequence[str] | str | None = None,
    n: int | None = None,
    seed: int = 0,
    *,
    quick: bool = False,
    text: str | None = None,
    pool: str = "A",
    out: str | Path = "results",
    batch_tokens: int | None = None,
    fresh: bool = False,
    **options: Any,
) -> Result:
    """Run the experiment `name` on `model` and write OUT/<model>/<name>/.

    Defaults are the paper's: chat8, list8 and rev8, n = 100 pairs; `quick` takes chat8 alone and fewer pairs. An
    interrupted run continues where it was; `fresh` forgets it. Experiments about a circuit take it from the stored
    verdict of `find`, which runs first, on few pairs, where there is none. `options` are those of this experiment alone.
    Raises EncodeAddressError subclasses for anything a user can mend.
    """
    module, folder = named(name), Path(out) / model.slug / name
    started = time.monotonic()
    settings, asked = _settings(name, model, variants, n, seed, quick, text, pool, **options)
    common = _common(module, settings)
    about = [circuit_of(module, setting) for setting in settings]
    known = circuits(model, about, seed, pool, out, text, batch_tokens) if module.NEEDS_CIRCUIT else {}
    settings = [
        replace(setting.within(known.get(variant)), folder=folder.parent) for setting, variant in zip(settings, about)
    ]
    with Store(folder, fresh=fresh) as store:
        job = Job(model, settings[0].text, store, batch_tokens)
        for setting in settings:
            steps, rows = module.steps(setting), None
            with suppress(StopIteration):
                while True:
                    rows = job.run(f"{name} {setting.variant}", steps.send(rows))
        for work in common:
            job.run(name, work)
        table = job.table()
        table = table.drop_duplicates("key", ignore_index=True)  # variants share what belongs to none of them
        conclusions = {s.variant: module.conclude(_of(table, s.variant), s) for s in settings}
        result = Result(conclusions, table, folder)
        files = {
            "summary__csv": summary(table).to_csv(index=False),
            "verdict__json": {
                "experiment": name,
                "paper": module.PAPER,
                "model": model.name,
                "sentence": result.sentence,
                "vocabulary": len(model.tokenizer),
                "variants": {
                    s.variant: {**conclusions[s.variant].as_dict(), **(s.circuit.as_dict() if s.circuit else {})}
                    for s in settings
                },
                **({"overall": module.overall(table, settings[0])} if hasattr(module, "overall") else {}),
                **({"options": settings[0].options} if settings[0].options else {}),
                "versions": versions(),
                **main_job.facts(model),
            },
            "manifest__json": {
                "command": {"experiment": name, **asked},
                **job.engine.facts(),
                "git": git_revision(),
                "rows": len(table),
                "this_run": {"seconds": round(time.monotonic() - started, 1), **job.account()},
            },
        }
        store.finish(table, **files)
    return result


def dry_run(name: str, model: Any, *args: Any, out: str | Path = "results", **kwargs: Any) -> str:
    """What `experiment` with these arguments costs from nothing, as far as that does not depend on results."""
    module = named(name)
    batch_tokens, fresh = kwargs.pop("batch_tokens", None), kwargs.pop("fresh", False)
    settings, _ = _settings(name, model, *args, **kwargs)
    common = _common(module, settings)
    lines = []
    about = [circuit_of(module, setting) for setting in settings]
    known = stored_circuits(model, about, out) if module.NEEDS_CIRCUIT else {}
    if module.NEEDS_CIRCUIT and known is None:
        lines.append("  the circuit is not known yet: a quick `find` comes first, and says which cells follow")
    else:
        cells: list[Cell] = []
        readings: list[Reading] = []
        steps = [module.steps(setting.within(known.get(variant))) for setting, variant in zip(settings, about)]
        for step in chain(*(islice(one, 1) if module.ADAPTIVE else one for one in steps), common):
            if isinstance(step, Reading):
                readings.append(step)
            else:
                cells += step  # none without an Address
        if cells or not readings:
            lines.append(f"{model.name} {name}: {Job(model, settings[0].text, None, batch_tokens).engine.plan(cells)}")
        if readings:
            readings = list({reading.key(""): reading for reading in readings}.values())
            tokens, open_ = sum(reading.tokens for reading in readings), sum(not reading.tokens for reading in readings)
            lines.append(
                f"{model.name} {name}: {len(readings)} readings of the model as it is, {tokens:,} tokens of forward"
                f"{f' without {open_} of them, whose size is not known beforehand' if open_ else ''}"
            )
        if module.ADAPTIVE:
            lines.append("  what follows from these results comes on top")
    stored = 0 if fresh else len(stored_keys(Path(out) / model.slug / name))
    if stored:
        lines.append(f"  {stored:,} rows are stored; those that this command needs are not run again")
    return "\n".join(lines)


def _of(table: pd.DataFrame, variant: str) -> pd.DataFrame:
    """A variant's rows, and those of no variant."""
    return table[(table["variant"] == variant) | table["variant"].isna()]


def _common(module: ModuleType, settings: Sequence[Setting]) -> list[list[Cell] | Reading]:
    """The work that belongs to no variant. Raises what the experiment raises where something is missing for it."""
    return module.common(settings[0]) if hasattr(module, "common") else []


def _settings(
    name: str,
    model: Any,
    variants: Sequence[str] | str | None = None,
    n: int | None = None,
    seed: int = 0,
    quick: bool = False,
    text: str | None = None,
    pool: str = "A",
    **given: Any,
) -> tuple[list[Setting], dict[str, Any]]:
    module, options = named(name), options_of(name, given)
    own = list(getattr(module, "VARIANTS", VARIANTS))
    chosen = [variants] if isinstance(variants, str) else list(variants or (own[:1] if quick else own))
    pairs = n if n is not None else module.QUICK_N if quick else module.N
    if pairs < 2:
        raise TaskError("an experiment needs n of 2 or more")
    source = text_source(text, bundled=model.folder is not None)
    made = getattr(module, "task", None)
    tasks = [made(model, v, **options) if made else dictionary(model, v, source, pool) for v in chosen]
    settings = [Setting(model, v, task, pairs, seed, source, options=options) for v, task in zip(chosen, tasks)]
    asked = {"variants": chosen, "n": pairs, "seed": seed, "pool": tasks[0].pool if made else pool, "text": source.name}
    return settings, asked | options


def circuit_of(module: ModuleType, setting: Setting) -> str:
    """The variant whose circuit a setting is about."""
    return getattr(module, "CIRCUIT_OF", setting.variant)


def stored_circuits(model: Any, variants: Sequence[str], out: str | Path) -> dict[str, Circuit] | None:
    """The circuit of each variant, from the verdicts that `find` stored, if they have all of them."""
    known: dict[str, Circuit] = {}
    for place in (Path(out) / model.slug / MORE, Path(out)):  # what was asked for stands before what was needed
        path = place / model.slug / "verdict.json"
        if path.is_file():
            said = json.loads(path.read_text()).get("variants") or {}
            known |= {name: Circuit.of(verdict) for name, verdict in said.items()}
    return known if all(variant in known for variant in variants) and known else None


def circuits(
    model: Any,
    variants: Sequence[str],
    seed: int,
    pool: str,
    out: str | Path,
    text: str | None,
    batch_tokens: int | None,
) -> dict[str, Circuit]:
    """The circuit of each variant; a quick `find` says those that none has said. It leaves a result of `find` that is there as it is."""
    known = stored_circuits(model, variants, out)
    if known is None:
        found = (Path(out) / model.slug / "verdict.json").is_file()
        place = Path(out) / model.slug / MORE if found else out
        have = stored_circuits(model, (), out) or {}
        asked = [variant for variant in dict.fromkeys(variants) if variant not in have]
        main_job.find(model, asked, main_job.QUICK_N, seed, text, pool, place, batch_tokens=batch_tokens)
        known = stored_circuits(model, variants, out)
    return known or {}
