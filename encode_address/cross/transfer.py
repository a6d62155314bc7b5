"""`encode-address transfer`: a donor's Address output in another model, through a map (paper 3.11, 3.12), into OUT/<host>/transfer-<donor>/.

Donor and host read the same dictionary, each in its own wrapper; the donor asks key A, the host key B. At the host's last token
its Address outputs := M(the donor's). If they wrote the same address, up to a linear map, the host answers with the value of A. What is
run and against what it is held is in `transplants`; what the rows say in `transferred`.

The donor's job and the host's are two: `donor_part` gives plain tensors, `host_part` takes them, and the maps are fitted in between.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from encode_address import circuit as main_job
from encode_address import lab, maps
from encode_address.cross import outputs, transferred, transplants
from encode_address.cross.design import Asked, Group, Setting
from encode_address.cross.outputs import Outputs, final_outputs
from encode_address.cross.transplants import Fit, Site
from encode_address.maps import Moments, RidgeMap
from encode_address.run.cells import Cell, context_of
from encode_address.run.engine import git_revision, versions
from encode_address.run.job import Job
from encode_address.run.store import Store, stored_keys
from encode_address.tasks import Prompt


def transfer(
    donor: Any,
    host: Any,
    source: str | None = None,
    target: str | None = None,
    variants: Sequence[str] | str | None = None,
    n: int | None = None,
    seed: int = 0,
    *,
    quick: bool = False,
    fit: int | None = None,
    seeds: int | None = None,
    text: str | None = None,
    pool: str = "A",
    out: str | Path = "results",
    batch_tokens: int | None = None,
    fresh: bool = False,
) -> lab.Result:
    """Transplant the Address output of `donor` into `host` through maps, with controls, and write OUT/<host>/transfer-<donor>/.

    `source` ("G3", "G2+G3") names the donor's blocks, `target` ("G2", "G2,G3") the host's, all of them at once; what is not given comes
    from each model's stored verdict in `out`, and where there is none a quick `find` runs first. `n` test dictionaries (200) per
    variant and seed; maps are fitted on `fit` dictionaries (2,000). Split and maps are redrawn for each of `seeds` (3) from `seed` on.
    An interrupted run continues where it was; `fresh` forgets it. Raises EncodeAddressError subclasses for anything a user can mend.
    """
    started = time.monotonic()
    asked = Asked(donor, host, source, target, variants, n, seed, quick, fit, seeds, text, pool)
    known = [
        lab.circuits(model, asked.variants, seed, pool, out, text, batch_tokens)
        if given is None
        else lab.stored_circuits(model, asked.variants, out) or {}
        for model, given in ((donor, source), (host, target))
    ]
    settings = [asked.setting(v, known[0].get(v), known[1].get(v)) for v in asked.variants]
    groups = list(asked.groups(settings))  # whatever can be refused is refused before the folder is touched
    folder = Path(out) / host.slug / f"transfer-{donor.slug}"
    with Store(folder, fresh=fresh) as store:
        runner = _Runner(*(Job(model, asked.text, store, batch_tokens) for model in (donor, host)), store, folder)
        tables = [runner.run(group) for group in groups]
        table = pd.concat(tables, ignore_index=True).drop_duplicates("key", ignore_index=True)
        result = lab.Result({s.variant: transferred.conclude(table, s, donor, host) for s in settings}, table, folder)
        store.finish(table, **_files(result, settings, asked, runner, time.monotonic() - started))
    return result


def dry_run(donor: Any, host: Any, *args: Any, out: str | Path = "results", **kwargs: Any) -> str:
    """What `transfer` with these arguments costs from nothing."""
    batch_tokens, fresh = kwargs.pop("batch_tokens", None), kwargs.pop("fresh", False)
    names = ("source", "target", "variants", "n", "seed", "quick", "fit", "seeds", "text", "pool")
    given = {"seed": 0, "quick": False, "pool": "A", **dict(zip(names, args)), **kwargs}
    asked = Asked(donor, host, *(given.get(name) for name in names))
    known = [lab.stored_circuits(model, asked.variants, out) for model in (donor, host)]
    sides = ((donor, known[0], asked.source), (host, known[1], asked.target))
    missing = [model.name for model, found, named in sides if found is None and named is None]
    lines = []
    if missing:
        lines.append(
            f"  the circuit of {' and '.join(missing)} is not known yet: a quick `find` comes first, and says more"
        )
    else:
        settings = [asked.setting(v, (known[0] or {}).get(v), (known[1] or {}).get(v)) for v in asked.variants]
        groups = list(asked.groups(settings))
        jobs = {side: Job(model, asked.text, None, batch_tokens) for side, model in (("donor", donor), ("host", host))}
        context = _context(jobs["donor"], jobs["host"])
        for side, job in jobs.items():
            cells, cost = [], 0
            fitted: dict[int, Fit] = {}
            for group in groups:
                new = [fit for fit in group.fits if id(fit.draw) not in fitted]
                fitted |= {id(fit.draw): fit for fit in new}
                cells += _cells(group, donor, host, context)[side]
                cost += outputs.cost(group.prompts(side, new), group.layers(side)) if group.arms else 0
            tokens = cost // len(job.model.layout.kinds)
            lines.append(
                f"{job.model.name}: outputs for the maps, {tokens:,} tokens of forward; {job.engine.plan(cells)}"
            )
    stored = 0 if fresh else len(stored_keys(Path(out) / host.slug / f"transfer-{donor.slug}"))
    if stored:
        lines.append(f"  {stored:,} rows are stored; those that this command needs are not run again")
    return "\n".join(lines)


# -- the two jobs --------------------------------------------------------------------
def donor_part(job: Job, group: Group, fits: Sequence[Fit]) -> Outputs:
    """All that the donor gives for these maps and the test: its outputs at the last token, as plain tensors."""
    return final_outputs(job.engine, group.prompts("donor", fits), group.layers("donor"))


def host_targets(job: Job, group: Group, fits: Sequence[Fit]) -> Outputs:
    """What the maps are to give: the host's own outputs on the same dictionaries, as plain tensors."""
    return final_outputs(job.engine, group.prompts("host", fits), group.layers("host"))


def host_part(job: Job, group: Group, cells: Sequence[Cell]) -> pd.DataFrame:
    """The host's cells; what is transplanted into it are plain tensors."""
    return job.run(f"transfer {group.variant}", cells)


class _Runner:
    """Runs groups into one store, and keeps the maps that later groups use again."""

    def __init__(self, donor: Job, host: Job, store: Store, folder: Path) -> None:
        self.donor, self.host, self.store, self.folder = donor, host, store, folder
        self.context = _context(donor, host)
        self.maps: dict[str, RidgeMap] = {}
        self.saved: list[str] = []

    def run(self, group: Group) -> pd.DataFrame:
        """The rows of a group, each with what its map is. Nothing runs where all of them are stored."""
        cells = _cells(group, self.donor.model, self.host.model, self.context)
        places = [f"map {fit.id(self.context)} {group.variant} {group.seed}" for fit in group.fits]
        donor_rows = self.donor.run(f"transfer {group.variant}", cells["donor"])
        if not {*self.host.engine.keys(cells["host"]), *places} <= self.store.keys() and group.arms:
            cells = self._mapped(group, places)
        rows = pd.concat([donor_rows, host_part(self.host, group, cells["host"])], ignore_index=True)
        if not places:
            return rows
        facts = self.store.table(places).drop(columns="key")
        return rows.merge(facts, on="map", how="left", validate="many_to_one")

    def _mapped(self, group: Group, places: Sequence[str]) -> dict[str, list[Cell]]:
        """A group's cells with the values that its maps give. What its maps are is stored."""
        donor, host = self.donor.model, self.host.model
        names = {id(fit): fit.id(self.context) for fit in group.fits}
        new = [fit for fit in group.fits if names[id(fit)] not in self.maps]
        lent, own = donor_part(self.donor, group, new), host_targets(self.host, group, new)
        for fit in new:
            self.maps[names[id(fit)]] = found = transplants.fitted(fit, lent, own)
            if fit.kept:
                self.saved.append(_save(fit, found, donor, host, self.folder))
        asked = [(b.donor, b.host) for b in group.fresh], [(q.donor, q.host_asks_a) for q in group.questions]
        stored, rows = self.store.keys(), []
        for fit, place in zip(group.fits, places):
            fresh, test = (_moments(fit, lent, own, pairs) for pairs in asked)
            facts = transplants.facts(self.maps[names[id(fit)]], fresh, test)
            rows += [] if place in stored else [{"key": place, "map": names[id(fit)], **facts}]
        if rows:
            self.store.append(rows)

        def values(fit: Fit, prompts: Sequence[Prompt]) -> np.ndarray:
            return self.maps[names[id(fit)]].transform(lent.rows(prompts, fit.source.layers))

        return _cells(group, donor, host, self.context, values)


def _cells(group: Group, donor: Any, host: Any, context: str, values: Any = None) -> dict[str, list[Cell]]:
    """The donor's cells, and the host's."""
    setting, labels = group.fitted_in, group.labels
    out: dict[str, list[Cell]] = {"donor": [], "host": []}
    if group.alone:
        out["donor"] = transplants.donor_cells(group.questions, labels)
        target = setting.target or Site("", ())
        out["host"] = transplants.host_cells(group.questions, target, setting.watch, labels)
    width = host.config.hidden_size
    for arm in group.arms:
        out["host"] += transplants.mapped_cells(arm, group.questions, width, context, setting.watch, labels, values)
    return out


def _moments(fit: Fit, donor: Outputs, host: Outputs, pairs: Sequence[tuple[Prompt, Prompt]]) -> Moments:
    """The rows of (donor's, host's) prompts at the sites of a map."""
    x = donor.rows([prompt for prompt, _ in pairs], fit.source.layers)
    return Moments().add(x, host.rows([prompt for _, prompt in pairs], fit.target.layers))


def _save(fit: Fit, found: RidgeMap, donor: Any, host: Any, folder: Path) -> str:
    draw = fit.draw
    about = {
        "donor": {
            "model": donor.name,
            "fingerprint": donor.fingerprint,
            "site": f"{fit.source.name} outputs, last token",
        },
        "host": {"model": host.name, "fingerprint": host.fingerprint, "site": f"{fit.target.name} outputs, last token"},
        "data": {
            "variant": draw.variant,
            "keys": draw.keys,
            "seed": draw.seed,
            "prompts": fit.n,
            "digest": draw.digest,
        },
    }
    name = f"{draw.variant}-{draw.keys}-seed{draw.seed}-{fit.source.name}-to-{fit.target.name}".replace("/", "-")
    return maps.save(found, folder / "maps" / name, about).name


def _context(donor: Job, host: Job) -> str:
    """What determines both models' outputs."""
    return context_of({"donor": donor.engine.facts(), "host": host.engine.facts()})


def _files(
    result: lab.Result, settings: Sequence[Setting], asked: Asked, runner: _Runner, seconds: float
) -> dict[str, Any]:
    donor, host = asked.donor, asked.host
    variants = {
        s.variant: {
            **result.conclusions[s.variant].as_dict(),
            "source": s.source.name if s.source else None,
            "target": s.target.name if s.target else None,
            "readers": [f"L{layer}H{head}" for layer, head in s.watch],
        }
        for s in settings
    }
    command = {"experiment": "transfer", "donor": donor.name, "host": host.name, "source": asked.source}
    command |= {"target": asked.target, "variants": asked.variants, "n": asked.n, "fit": asked.fit, "seed": asked.seed}
    command |= {"seeds": asked.seeds, "pool": asked.pool, "text": asked.text.name}
    return {
        "summary__csv": transferred.summary(result.table, settings, host).to_csv(index=False),
        "verdict__json": {
            "experiment": "transfer",
            "paper": "3.12",
            "model": host.name,
            "donor": donor.name,
            "sentence": result.sentence,
            "vocabulary": len(host.tokenizer),
            "variants": variants,
            "versions": versions(),
            **main_job.facts(host),
        },
        "manifest__json": {
            "command": command,
            **runner.host.engine.facts(),
            "donor_model": runner.donor.engine.facts(),
            "git": git_revision(),
            "rows": len(result.table),
            "maps": sorted(runner.saved),
            "this_run": {
                "seconds": round(seconds, 1),
                **runner.host.account(),
                "donor": runner.donor.account(),
            },
        },
    }
