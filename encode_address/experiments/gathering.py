"""Gathering: where a latent value z is gathered, when it becomes readable, and in which arms (arXiv 2608.15022, on the sites of hybrids).

In parts, told apart by the columns `part`, `arm`, `donor` and `position`:

    lens           a Jacobian lens fitted on the arms' prompts and text; how far its halves agree
    entry          every arm without a patch: z's readout (R, L, M) and forced-choice accuracy of the same pass
    probe          whether z can be decoded at the last position in every arm, with a floor of labels permuted by instance
    grid           site x patch layer p x readout layer r: residual, mixer, mlp, query, key, value, state at the last position := a donor's
    controls       the same with donors of the same z (placebo), and with a random direction as long as the donor's difference
    passage        residual streams at the tokens that carry z (the asked key, or the passage) := a donor's
    necessity      mixers and MLPs := the mean of other prompts

The paper finds that softmax attention gathers z in a window of layers, MLPs and shallower layers do not; its grid does not separate softmax from
linear mixers. Here every layer is patched. The claim "softmax mixers gather, linear ones do not" does not hold where a linear mixer's patch
makes the answer the donor's (`transport` above 0 and above that of a random direction); it holds where only softmax mixers do.

An arm that is not solved (forced-choice accuracy not above chance, or below .5) is INVALID: only its entry is run, and nothing is read into
it. If that is the flexible arm, the conclusion is undecided.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from encode_address.experiments.address_payload import labels_of
from encode_address.experiments.base import Conclusion, Setting
from encode_address.gathering import behaviour, contrasts, lenses, pooling, probe
from encode_address.gathering.rows import CLEAN, CONCEPTS, grid_readings
from encode_address.gathering.sites import OUTPUTS, sites_of
from encode_address.metrics import select
from encode_address.run.reading import Reading
from encode_address.stats import Estimate
from encode_address.tasks.arms import ARMS, Arms, arms

SUMMARY = "gathering: where a latent value is gathered, by which mixers, and when it becomes readable"
PAPER, N, QUICK_N = "-", 60, 20
NEEDS_CIRCUIT, ADAPTIVE = False, True
VARIANTS = ("chat8", "class4")
OPTIONS = {"lens": lenses.LENSES, "lens_file": (), "span": ()}
MAIN = "flexible"
CONTROLS = ("placebo", "random")
ALSO = (*OUTPUTS, "state")  # sites of the arms beside the main one, and of the controls
PROBED = 3  # instances of the probe per pair


def task(model: Any, variant: str, **_options: Any) -> Arms:
    """The arms of one variant."""
    return arms(model, variant)


def steps(setting: Setting) -> Iterator[Reading]:
    """The unpatched arms first: what follows runs in those that are solved."""
    model, made, labels = setting.model, setting.task, labels_of(setting, "gathering")
    lens = lenses.KeptLens.of(setting)
    yield from lens.readings(labels)
    span, seed, pairs = int(setting.options["span"] or 1), setting.seed, made.pairs(setting.n, setting.seed)
    seen = []
    for arm in ARMS:
        for reading in grid_readings(model, made, pairs, arm, (), CLEAN, lens, labels, span, seed=seed):
            seen.append((yield reading))
    wrong = contrasts.invalid_arms(pd.concat(seen, ignore_index=True))
    yield probe.probe_reading(made.instances(PROBED * setting.n, setting.seed + 1), labels)
    if MAIN in wrong:
        return
    solved = [arm for arm in ARMS if arm not in wrong]
    for arm in solved:
        sites = sites_of(model) if arm == MAIN else sites_of(model, ALSO)
        yield from grid_readings(model, made, pairs, arm, sites, "donor", lens, labels, span, seed=seed)
    for donor in CONTROLS:
        some = made.pairs(setting.n, setting.seed, placebo=donor == "placebo")
        yield from grid_readings(model, made, some, MAIN, sites_of(model, ALSO), donor, lens, labels, span, seed=seed)
    where = carrier(made)
    yield from grid_readings(
        model, made, pairs, MAIN, sites_of(model, ("residual",)), "donor", lens, labels, where=where, seed=seed
    )
    for arm in solved:
        yield from grid_readings(
            model, made, pairs, arm, sites_of(model, ("mixer", "mlp")), "mean", lens, labels, span, seed=seed
        )


def carrier(made: Arms) -> str:
    """The span of the prompt that tells z: the passage of a class, the asked key of a dictionary."""
    return "passage" if made.family == "class" else "asked"


def carrier_said(rows: pd.DataFrame) -> str:
    """That span, from rows; "" where its patches were not run."""
    return next((where for where in ("passage", "asked") if len(select(rows, position=where))), "")


def main_rows(rows: pd.DataFrame, arm: str = MAIN, donor: str = "donor") -> pd.DataFrame:
    """An arm's grid at the last position under one sort of donor, its unpatched runs included."""
    some = select(rows, experiment="gathering", arm=arm, donor=donor)
    return some[some["position"].astype(str).str.startswith("last")] if len(some) else some


def conclude(rows: pd.DataFrame, setting: Setting) -> Conclusion:
    """See above. Figures hold every part; the sentence holds what transports, and where."""
    rows = select(rows, experiment="gathering")
    depth, vocabulary = len(setting.layout.kinds), setting.model.config.vocab_size
    figures: dict[str, Any] = {"lens": setting.options["lens"], "limits": lenses.limits(setting)}
    halves = select(rows, part="lens")
    if len(halves):
        figures["lens split-half cosine"] = {f"L{r.layer}": round(r.cosine, 4) for r in halves.itertuples()}
    right, wrong = contrasts.accuracies(rows), contrasts.invalid_arms(rows)
    figures["arms"] = {
        arm: f"INVALID: {wrong[arm]}" if arm in wrong else f"accuracy {e} (chance {chance:.2f})"
        for arm, (e, chance) in right.items()
    }
    figures["entry"] = {
        measure: {
            f"{a} - {b}": contrasts.contrast(rows, a, b, measure, depth, vocabulary).as_dict()
            for a, b in contrasts.PAIRS
        }
        for measure in pooling.MEASURES
    }
    figures["two by two, M"] = {k: str(v) for k, v in contrasts.two_by_two(rows, "M", depth, vocabulary).items()}
    probed = probe.summarise(select(rows, part="probe"))
    figures["probe"] = {arm: {k: round(v, 3) for k, v in said.items()} for arm, said in probed.items()}
    invalid = f"INVALID and not interpreted: {', '.join(wrong)}. " if wrong else ""
    if MAIN in wrong:
        return Conclusion("undecided", f"{invalid}The {MAIN} arm: {wrong[MAIN]}", figures)
    return _grid(rows, setting, figures, invalid, [arm for arm in right if arm not in wrong])


def _grid(
    rows: pd.DataFrame, setting: Setting, figures: dict[str, Any], invalid: str, solved: Sequence[str]
) -> Conclusion:
    depth, vocabulary = len(setting.layout.kinds), setting.model.config.vocab_size
    own = main_rows(rows)
    said, shifts = pooling.answers(own), pooling.shifts(own, CONCEPTS, vocabulary, pooling.MEASURES)
    noise = pooling.answers(main_rows(rows, donor="random"))
    profiles = {site: behaviour.depth_profile(select(said, site=site)) for site in said["site"].unique()}
    figures["donor - distractor"] = {site: _lines(table) for site, table in profiles.items()}
    figures["controls, donor - distractor"] = {
        donor: {
            site: _lines(behaviour.depth_profile(some))
            for site, some in pooling.answers(main_rows(rows, donor=donor)).groupby("site")
        }
        for donor in CONTROLS
    }
    window = behaviour.edges(profiles["residual"])
    figures["edges (residual stream)"] = window
    for concept in ("address", "redirected"):
        mixers = select(shifts, site="mixer")
        figures[f"matched distance, {concept}, mixers"] = {
            f"L{p}": str(e) for p, e in pooling.profile(mixers, f"dM.{concept}", depth).items()
        }
        table = pooling.strata(select(shifts, site="mixer"), f"dM.{concept}")
        figures[f"strata, {concept}, mixers"] = {
            f"{r.mixer}, {r.crossed} softmax layers crossed": str(Estimate(r.value, r.n, r.low, r.high))
            for r in table.itertuples()
        }
        figures[f"concentration, {concept}"] = _concentration(mixers, window, concept, depth)
    best = transporters(said, noise)
    figures["transporting mixers"] = {f"L{p} ({kind})": str(e) for p, (kind, e) in best.items()}
    peak = max(best, key=lambda p: best[p][1].value, default=None)
    if peak is not None:
        table, _ = behaviour.calibration(shifts, said, peak, "redirected", depth)
        figures[f"calibration at L{peak}"] = {
            r.site: f"readout {r.readout}, answer {r.answer}, ratio {r.ratio if r.ratio.n else 'not measurable'}, r {r.r:.2f}"
            for r in table.itertuples()
        } or "not measurable: no layer lies between the patch and the answer"
        everyone = pooling.answers(select(rows, donor="donor"))
        everyone = everyone[everyone["position"].astype(str).str.startswith("last")]
        figures["arm specificity"] = behaviour.specificity(everyone, "mixer", peak, solved, MAIN)
    passage = pooling.answers(select(rows, arm=MAIN, donor="donor", position=carrier(setting.task)))
    figures[f"passage ({carrier(setting.task)})"] = _lines(behaviour.depth_profile(passage))
    figures["necessity"] = {
        f"{r.site}.L{r.layer}, {r.arm}": f"{r.effect}" + (f", beyond control {r.beyond}" if r.beyond.n else "")
        for r in contrasts.necessity(rows, solved).itertuples()
    }
    return _verdict(setting, best, profiles, window, figures, invalid)


def transporters(said: pd.DataFrame, noise: pd.DataFrame) -> dict[int, tuple[str, Estimate]]:
    """The mixers whose patch makes the answer the donor's, more than a random direction does: layer -> (kind, transport)."""
    found = {}
    for layer, some in select(said, site="mixer").groupby("layer"):
        moved = pooling.two_way(some, some["transport"], rate=True)
        beyond = pooling.gap((some, "transport"), (select(noise, site="mixer", layer=layer), "transport"))
        if moved.low > 0 and beyond.low > 0:
            found[int(layer)] = some["mixer"].iloc[0], moved
    return found


def _verdict(
    setting: Setting, best: Mapping[int, tuple[str, Estimate]], profiles: Mapping[str, pd.DataFrame], window: Mapping[str, Any],
    figures: dict[str, Any], invalid: str,
) -> Conclusion:  # fmt: skip
    mlps = profiles.get("mlp")
    from_mlp = [f"L{r.layer}" for r in mlps.itertuples() if r.transport.low > 0] if mlps is not None else []
    by_kind = {
        kind: ", ".join(f"L{p} {e}" for p, (k, e) in best.items() if k == kind) or "none"
        for kind in ("linear", "softmax")
    }
    other = {
        verdict: [f"L{p}" for p in select(profiles["mixer"], verdict=verdict)["layer"]]
        for verdict in (behaviour.CARRIED, behaviour.DESTRUCTION)
    }
    where = window["window"]
    parts = [
        f"{invalid}In the {MAIN} arm the donor's answer is installed by linear mixers {by_kind['linear']}",
        f"by softmax mixers {by_kind['softmax']}",
        f"by MLPs {', '.join(from_mlp) or 'none'}",
        *(
            [f"the donor's own value is carried by mixers {', '.join(carried)}"]
            if (carried := other[behaviour.CARRIED])
            else []
        ),
        *([f"the task is destroyed at mixers {', '.join(lost)}"] if (lost := other[behaviour.DESTRUCTION]) else []),
        f"in the residual stream {f'L{where[0]} to L{where[1]}' if isinstance(where, list) else where}"
        f" (lower edge {window['lower']}, upper edge {window['upper']})",
    ]
    limits_said = f". Limits: {'; '.join(figures['limits'])}" if figures["limits"] else ""
    said = f"{'; '.join(parts)}{limits_said}"
    if not best:
        return Conclusion(
            "undecided", f"no single mixer at the last position installs the donor's answer. {said}", figures
        )
    kinds = {kind for kind, _ in best.values()}
    return Conclusion("holds" if kinds == {"softmax"} and not from_mlp else "does not hold", said, figures)


def _concentration(mixers: pd.DataFrame, window: Mapping[str, Any], concept: str, depth: int) -> dict[str, str]:
    where, out = window["window"], {}
    for measure in pooling.MEASURES:
        if not isinstance(where, list):
            out[measure] = "not measurable: no window"
            continue
        ratio, gap = pooling.concentration(mixers, f"d{measure}.{concept}", depth, *where)
        out[measure] = (
            f"{ratio}, difference {gap}" if ratio.n else "not measurable: nothing shallower, or nothing above 0"
        )
    return out


def _lines(table: pd.DataFrame) -> dict[str, str]:
    """A profile as text."""
    out = {}
    for r in table.itertuples():
        said = [f"transport {r.transport}"] if r.transport.n else []
        said += [f"carry {r.carry}"] if r.carry.n else []
        out[f"L{r.layer}"] = ", ".join([*said, f"accuracy {r.accuracy.value:.2f}", r.verdict])
    return out
