"""`encode-address paper DIR`: every experiment on every model, then every figure and table of the paper, and a page of what came out.

`run` runs or resumes what is missing, into DIR/<model>/ and DIR/<model>/<experiment>/, as `find` and `run` do. `write` loads no model: it
makes figures, tables and the page from whatever DIR holds, of every model in it, what `transfer` and `replace` left included, a line per donor.
What was not run is an en dash, nowhere a published value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from encode_address import circuit, lab, tables
from encode_address.compare import compare
from encode_address.compare import write as write_comparison
from encode_address.compare.results import Source, sources
from encode_address.errors import EncodeAddressError, StoreError
from encode_address.experiments import EXPERIMENTS
from encode_address.figures import draw_all, draw_paper
from encode_address.figures.gathered import gathered_models
from encode_address.run.store import write_text
from encode_address.verdict import sentence

DASH = "–"
CROSS = {
    "transfer": "does the donor's Address output, through a map, move the host's lookup?",
    "replace": "does the donor's block, between two maps, do the work of the host's?",
}


# -- running ----------------------------------------------------------------------------------------------------------
def run(
    model: Any,
    out: str | Path,
    *,
    quick: bool = False,
    n: int | None = None,
    seed: int = 0,
    text: str | None = None,
    pool: str = "A",
    batch_tokens: int | None = None,
    **options: Any,
) -> dict[str, str]:
    """Run `find` and every experiment on `model`; returns, by name, why an experiment could not be run.

    `options` are those of single experiments, each given to those that know it. Raises StoreError, and whatever `find` raises: without it there
    is nothing to ask the others.
    """
    common = {"seed": seed, "text": text, "pool": pool, "out": out, "batch_tokens": batch_tokens}
    circuit.find(model, **_find(quick, n), **common)
    refused = {}
    for name in EXPERIMENTS:
        try:
            lab.experiment(name, model, n=n, quick=quick, **common, **_known(name, options))
        except StoreError:
            raise
        except EncodeAddressError as error:
            refused[name] = str(error)
    return refused


def dry_run(model: Any, out: str | Path, *, quick: bool = False, n: int | None = None, **rest: Any) -> str:
    """What `run` costs from nothing, as far as that does not depend on results."""
    common = {name: rest.pop(name) for name in ("seed", "text", "pool", "batch_tokens") if name in rest}
    lines = [circuit.dry_run(model, **_find(quick, n), **common, out=out)]
    for name in EXPERIMENTS:
        try:
            lines.append(lab.dry_run(name, model, n=n, quick=quick, **common, out=out, **_known(name, rest)))
        except EncodeAddressError as error:
            lines.append(f"{model.name} {name}: cannot be run: {error}")
    return "\n".join(lines)


def _find(quick: bool, n: int | None) -> dict[str, Any]:
    variants = ("chat8",) if quick else circuit.VARIANTS
    return {"variants": variants, "n": n if n is not None else circuit.QUICK_N if quick else circuit.N}


def _known(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Those of `options` that are given, and that an experiment knows."""
    own = getattr(EXPERIMENTS[name], "OPTIONS", {})
    return {key: value for key, value in options.items() if key in own and value is not None}


# -- writing ----------------------------------------------------------------------------------------------------------
def write(folder: str | Path) -> dict[str, list[Path]]:
    """Figures, tables, DIR/compare.csv and DIR/results.md of every model whose results DIR holds; returns the files, by kind.

    Raises EncodeAddressError where there are none.
    """
    folder = Path(folder)
    found = [source for source in sources(folder) if source.folder != folder]
    frame, results = compare(folder), folder / "results.md"
    rows, verdicts = gathered_models(folder)
    write_text(results, page(found, frame))
    return {
        "figures": [path for source in found for path in draw_all(source.folder)] + draw_paper(folder, rows, verdicts),
        "tables": tables.write([tables.Results(m, rows[m], verdicts[m] or {}) for m in rows], folder / "tables"),
        "pages": [write_comparison(frame, folder), results],
    }


def by_model(found: Sequence[Source]) -> dict[str, dict[str, Source]]:
    """model -> what was run on it -> its run, `find` first, then in the paper's order; "transfer from DONOR" is of one donor."""
    out: dict[str, dict[str, Source]] = {}
    for source in sorted(found, key=lambda source: (source.model, *_place(source))):
        out.setdefault(source.model, {})[_name(source)] = source
    return out


def _name(source: Source) -> str:
    donor = source.verdict.get("donor")
    return f"{source.experiment} from {donor}" if donor else source.experiment


def _place(source: Source) -> tuple[int, str]:
    order = ["find", *EXPERIMENTS, *CROSS]
    return order.index(source.experiment) if source.experiment in order else len(order), source.verdict.get("donor", "")


# -- the page ---------------------------------------------------------------------------------------------------------
def page(found: Sequence[Source], frame: pd.DataFrame) -> str:
    """What came out, as Markdown: every experiment's conclusion per model, the paper's claims beside it, and the figures behind it."""
    models = by_model(found)
    return "\n".join([*_head(models), *_conclusions(models), *_claims(models, frame), *_details(models)]) + "\n"


def _head(models: dict[str, dict[str, Source]]) -> Iterator[str]:
    yield "# Results"
    yield ""
    yield (
        "Written by `encode-address paper` from the tables beside it. *Holds* and *does not hold* are about the paper's claim (arXiv 2611.01909), "
        f"*undecided* means that the rows do not say; {DASH} was not run. Brackets are 95 % intervals over prompt pairs."
    )
    for model, own in models.items():
        imposed = own["find"].verdict.get("imposed") if "find" in own else None
        if imposed:
            yield ""
            yield f"`{model}` was trained for this toolkit; imposed in its training, and so no evidence for the paper: {'; '.join(imposed)}."
    yield ""


def _conclusions(models: dict[str, dict[str, Source]]) -> Iterator[str]:
    yield "## Conclusions"
    yield ""
    yield from _table(["experiment", "section", "asks", *(f"`{m}`" for m in models)], _conclusion_lines(models))
    yield ""


def _conclusion_lines(models: dict[str, dict[str, Source]]) -> Iterator[list[str]]:
    circuits = [own["find"].verdict["status"] if "find" in own else DASH for own in models.values()]
    yield ["`find`", "", "is the circuit there?", *circuits]
    for name, module in EXPERIMENTS.items():
        asks = module.SUMMARY.partition(": ")[2]
        said = [_statuses(own[name].verdict) if name in own else DASH for own in models.values()]
        yield [f"`{name}`", module.PAPER, asks, *said]
    lent = {name: source for own in models.values() for name, source in own.items() if source.experiment in CROSS}
    for name, source in sorted(lent.items(), key=lambda item: _place(item[1])):
        said = [_statuses(own[name].verdict) if name in own else DASH for own in models.values()]
        yield [f"`{name}`", source.verdict["paper"], CROSS[source.experiment], *said]


def _statuses(verdict: dict[str, Any]) -> str:
    """ "holds", or where variants differ "holds (chat8, list8), undecided (rev8)"."""
    known = _by_status(verdict)
    if len(known) == 1:
        return next(iter(known))
    return ", ".join(f"{status} ({', '.join(variants)})" for status, variants in known.items())


def _by_status(verdict: dict[str, Any]) -> dict[str, list[str]]:
    out: dict[str, list[str]] = {}
    for variant, said in verdict["variants"].items():
        out.setdefault(said["status"], []).append(variant)
    return out


def _claims(models: dict[str, dict[str, Source]], frame: pd.DataFrame) -> Iterator[str]:
    yield "## Beside the paper's pattern"
    yield ""
    yield (
        "Shapes of results, not numbers: which block, which direction (`encode-address compare` says on which figures)."
    )
    yield ""
    shapes = frame[frame["kind"] == "shape"]
    lines = []
    for (claim, paper), some in shapes.groupby(["condition", "source"], sort=False):
        lines.append([claim, paper, *(_results(some[some["model"] == model]) for model in models)])
    yield from _table(["claim", "of the paper's models", *(f"`{m}`" for m in models)], lines)
    yield ""


def _results(rows: pd.DataFrame) -> str:
    by_result = {result: ", ".join(some["variant"].dropna()) for result, some in rows.groupby("result", sort=False)}
    if len(by_result) < 2:
        return next(iter(by_result), DASH).replace("not run", DASH)
    return ", ".join(f"{result} ({variants})" for result, variants in by_result.items())


def _details(models: dict[str, dict[str, Source]]) -> Iterator[str]:
    yield "## What it rests on"
    for model, own in models.items():
        yield ""
        yield f"### {model}"
        yield ""
        for name, source in own.items():
            if name == "find":
                yield f"- `find`: {sentence(source.verdict)}"
                continue
            for status, variants in _by_status(source.verdict).items():
                first = variants[0]
                why = source.verdict["variants"][first]["why"]
                yield f"- `{name}`: **{status}** ({', '.join(variants)}). {first}, n = {_pairs(source, first)}: {why}"


def _pairs(source: Source, variant: str) -> int:
    rows = source.rows[source.rows["variant"] == variant]
    return rows["pair"].nunique()


def _table(head: list[str], lines: Sequence[list[str]] | Iterator[list[str]]) -> Iterator[str]:
    for line in (head, ["---"] * len(head), *lines):
        yield f"| {' | '.join(cell.replace('|', '/') for cell in line)} |"
