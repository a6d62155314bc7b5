"""How fast is the engine? The same cells four ways, side by side in one process, on one thread.

python benchmarks/sweep.py [--quick] [--json] [--pairs N] [--config qwen3.5-0.8b]

--quick leaves out the model of real dimensions. --json prints one JSON object alone on stdout. Progress goes to
stderr. benchmarks/README.md says what the columns mean.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # a script finds only what lies beside it

import encode_address
from benchmarks.cases import BUNDLED, CONFIGS, INTERVENTIONS, Case, bundled, random_weights
from benchmarks.runners import Batches, Done, floor, naive, ours, traces

TOLERANCE = 1e-4  # of a margin, in units of max(1, standard deviation of the logits)
FURTHER = 4  # cells beyond the blocks that are compared with the naive sweep
GROWTH_PAIRS = (25, 50, 100, 200, 400)
GROWTH_CELLS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Effort:
    """How much of each runner is measured; what is not run on all pairs is scaled per cell.

    Every runner runs `repeats` times, alternating, and those of the slope `slope_repeats` times; the minimum counts.
    `batch`, `naive_pairs`: of the naive sweep. `single_pairs`: of one-prompt batches and of traces. The slope is the
    time of `slope_cells` cells per pair less that of the blocks alone, on `slope_pairs` pairs, per further cell.
    """

    pairs: int
    batch: int
    naive_pairs: int
    single_pairs: int
    slope_pairs: int
    slope_cells: int
    repeats: int
    slope_repeats: int


def small(pairs: int) -> Effort:
    """For the bundled models."""
    few = min(25, pairs)
    return Effort(pairs, few, few, min(4, pairs), few, slope_cells=24, repeats=3, slope_repeats=6)


REAL = Effort(8, batch=4, naive_pairs=4, single_pairs=1, slope_pairs=1, slope_cells=60, repeats=2, slope_repeats=5)


@contextlib.contextmanager
def settled():
    """The garbage collector then looks only at what was made meanwhile, not at the libraries' own objects.

    A collection of those takes a third of a second, and would strike one runner or another by chance.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@settled()
def measure(case: Case, intervention: str, effort: Effort) -> tuple[dict[str, Any], dict[str, Any]]:
    """One row of the table, and how well the runners agree. Raises ValueError when they do not."""
    case = case.take(effort.pairs)
    some, single, few = (case.take(n) for n in (effort.naive_pairs, effort.single_pairs, effort.slope_pairs))
    blocks, many = case.blocks, case.subsets(effort.slope_cells)
    # Warm-up: nnsight reads its sources, the model takes its fingerprint.
    for warm in (ours, traces):
        warm(case.take(1), intervention, blocks[:1])
    size, size_many = Batches(), Batches()
    runners: dict[str, Callable[[], Done]] = {
        "ours": lambda: ours(case, intervention, blocks, size),
        "floor": lambda: floor(case, intervention, blocks, size),
        "naive": lambda: naive(some, intervention, blocks, effort.batch),
        "naive one": lambda: naive(single, intervention, blocks, 1),
        "trace": lambda: traces(single, intervention, blocks),
    }
    slopes: dict[str, Callable[[], Done]] = {
        "ours many": lambda: ours(few, intervention, many, size_many),
        "floor many": lambda: floor(few, intervention, many, size_many),
        "ours few": lambda: ours(few, intervention, blocks),
        "floor few": lambda: floor(few, intervention, blocks, size_many),
    }
    done: dict[str, Done] = {}
    seconds = dict.fromkeys((*runners, *slopes), float("inf"))
    peak = 0.0
    for repeat in range(max(effort.repeats, effort.slope_repeats)):
        both = {**(runners if repeat < effort.repeats else {}), **(slopes if repeat < effort.slope_repeats else {})}
        for name, run in both.items():
            with peak_memory() as memory:
                taken, result = timed(run)
            seconds[name] = min(seconds[name], taken)
            if repeat == 0:
                done[name] = result
                progress(f"{case.name} {intervention}: {name}, {taken:.2f} s")
            if name == "ours":
                peak = peak or memory[0]
        if repeat == 0:
            agreement = agree(case, intervention, done, many)
    progress(f"{case.name} {intervention}: measured")
    cells, further = len(case.hosts) * len(blocks), len(few.hosts) * (len(many) - len(blocks))
    per_cell = {name: seconds[name] / done[name].margin.numel() for name in ("naive", "naive one", "trace")}
    slope = {name: (seconds[f"{name} many"] - seconds[f"{name} few"]) / further for name in ("ours", "floor")}
    naive_tokens = done["naive"].tokens / done["naive"].margin.numel() * cells
    row = {
        "model": case.name,
        "intervention": intervention,
        "cells": cells,
        "token_ratio": naive_tokens / done["ours"].tokens,
        "speedup_over_naive": per_cell["naive"] / slope["ours"],
        "speedup_over_naive_one_prompt": per_cell["naive one"] / slope["ours"],
        "speedup_all_in": per_cell["naive"] * cells / seconds["ours"],
        "speedup_over_trace_per_cell": per_cell["trace"] / slope["ours"],
        "over_floor": seconds["ours"] / seconds["floor"],
        "nnsight_share": (slope["ours"] - slope["floor"]) / slope["ours"],
        "peak_rss_mb": peak,
        "naive_s_per_cell": per_cell["naive"],
        "naive_one_prompt_s_per_cell": per_cell["naive one"],
        "trace_s_per_cell": per_cell["trace"],
        "ours_s_per_cell": slope["ours"],
        "floor_s_per_cell": slope["floor"],
        "ours_all_in_s": seconds["ours"],
        "floor_s": seconds["floor"],
    }
    return row, {"model": case.name, "intervention": intervention, "batches": str(size), **agreement}


def agree(case: Case, intervention: str, done: dict[str, Done], many: list) -> dict[str, float]:
    """The largest difference of a margin between the naive sweep and the others, further cells and floor included.

    Raises ValueError when one is above TOLERANCE x max(1, standard deviation of the logits), or when the
    interventions change nothing.
    """
    reference, pair = done["naive"], case.take(1)
    further = slice(len(case.blocks), len(case.blocks) + FURTHER)
    compared = {
        "naive, one prompt": (done["naive one"], reference),
        "traces": (done["trace"], reference),
        "ours": (done["ours"], reference),
        "ours, further cells": (done["ours many"].of(further), naive(pair, intervention, many[further], 1)),
        "floor, intact hosts": (done["floor"].of(slice(1)), naive(pair, "transplant", [()], 1)),
    }
    worst = 0.0
    for name, (one, other) in compared.items():
        rows = min(len(one.margin), len(other.margin))
        gap = (one.margin[:rows].double() - other.margin[:rows].double()).abs()
        relative = float((gap / other.spread[:rows].clamp(min=1)).max())
        if not relative <= TOLERANCE:
            raise ValueError(
                f"{case.name} {intervention}: {name} and the naive sweep differ by {relative:.2g} in a margin"
            )
        worst = max(worst, float(gap.max()))
    effect = float((reference.margin - done["floor"].margin[: len(reference.margin)]).abs().max())
    if not effect > 100 * TOLERANCE:
        raise ValueError(f"{case.name} {intervention}: patching moves no margin by more than {effect:.2g}")
    return {
        "max_difference": worst,
        "logit_std": float(reference.spread.mean()),
        "largest_effect": effect,
    }


@settled()
def growth(case: Case) -> list[dict[str, Any]]:
    """Seconds of our whole plan of transplants as it grows, in pairs and in cells per pair; the minimum of two runs.

    `relative`, for pairs: the time per pair over that of the fewest pairs. For cells per pair: the time over the
    straight line through all of that axis. Linear growth is 1 throughout.
    """
    middle = GROWTH_PAIRS[len(GROWTH_PAIRS) // 2]
    plans = [("pairs", n, len(case.blocks)) for n in GROWTH_PAIRS]
    plans += [("cells_per_pair", middle, n) for n in GROWTH_CELLS]
    ours(case.take(2), "transplant", case.blocks)
    seconds = dict.fromkeys(plans, float("inf"))
    for _ in range(2):
        for plan in plans:
            part, subsets = case.take(plan[1]), case.subsets(plan[2])
            seconds[plan] = min(seconds[plan], timed(partial(ours, part, "transplant", subsets))[0])
        progress(f"{case.name}: growth")
    first = seconds[plans[0]] / plans[0][1]
    line = np.polyfit(GROWTH_CELLS, [seconds[plan] for plan in plans if plan[0] == "cells_per_pair"], 1)
    return [
        {
            "model": case.name,
            "intervention": "transplant",
            "grows": grows,
            "pairs": n,
            "cells_per_pair": each,
            "seconds": taken,
            "relative": taken / n / first if grows == "pairs" else taken / float(np.polyval(line, each)),
        }
        for (grows, n, each), taken in seconds.items()
    ]


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of one run, after the garbage of those before it is gone, and what it returned.

    With one thread that computes and waits for nothing they are the wall-clock seconds of a quiet machine, and on a
    busy one they do not count the others' turns.
    """
    gc.collect()
    start = time.process_time()
    result = run()
    return time.process_time() - start, result


@contextlib.contextmanager
def peak_memory():
    """Yields a list that holds, afterwards, the process's peak resident memory in MB within the block.

    Where the kernel cannot restart its count (outside Linux) it is the peak of the process so far.
    """
    peak: list[float] = []
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    yield peak
    try:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        peak.append(int(status["VmHWM"].split()[0]) / 1024)
    except (OSError, KeyError):
        unit = 1 << 20 if sys.platform == "darwin" else 1 << 10
        peak.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit)


def machine() -> dict[str, Any]:
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    return {"cpu": name, "cores": os.cpu_count(), "system": platform.system()}


def versions() -> dict[str, str]:
    found = {name: version(name) for name in ("torch", "transformers", "nnsight")}
    return {"encode_address": encode_address.__version__, **found, "python": platform.python_version()}


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(pairs: int, config: str | None) -> dict[str, Any]:
    """The whole benchmark; `config` names the model of real dimensions, or None for the bundled models alone."""
    rows, agreement, grown = [], [], []
    wall, cpu = time.perf_counter(), time.process_time()
    for name in BUNDLED:
        case = bundled(name, max(pairs, *GROWTH_PAIRS))
        for intervention in INTERVENTIONS:
            row, agreed = measure(case, intervention, small(pairs))
            rows.append(row)
            agreement.append(agreed)
        grown += growth(case)
    if config is not None:
        case = random_weights(config, REAL.pairs)
        for intervention in INTERVENTIONS:
            row, agreed = measure(case, intervention, REAL)
            rows.append(row)
            agreement.append(agreed)
    return {
        "threads": torch.get_num_threads(),
        "machine": machine(),
        "versions": versions(),
        "timing": "CPU seconds of the process, minimum of alternating runs after a warm-up",
        "wall_over_cpu": (time.perf_counter() - wall) / (time.process_time() - cpu),
        "rows": rows,
        "growth": grown,
        "agreement": agreement,
    }


def show(result: dict[str, Any]) -> str:
    """The result as aligned tables that are valid Markdown."""
    found = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    head = (
        f"{result['threads']} thread; {result['machine']['cpu']}, {result['machine']['cores']} cores; {found}\n"
        f"{result['timing']} (all in all, wall-clock time was {result['wall_over_cpu']:.2f} of it)"
    )
    rows = [{**row, "model": f"{row['model']} {row['intervention']}"} for row in result["rows"]]
    fields = [field for field in rows[0] if field not in ("model", "intervention")]
    turned = [{"": field, **{row["model"]: row[field] for row in rows}} for field in fields]
    return "\n\n".join([head, *(_table(part) for part in (turned, result["growth"], result["agreement"]))])


def _table(rows: list[dict[str, Any]]) -> str:
    grid = [list(rows[0]), *([_text(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*grid)]
    grid.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(f"{cell:<{w}}" for cell, w in zip(line, widths)) + " |" for line in grid)


def _text(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the bundled models only; under two minutes")
    parser.add_argument("--json", action="store_true", help="one JSON object alone on stdout")
    parser.add_argument("--pairs", type=int, default=100, help="prompt pairs for the bundled models (default 100)")
    names = sorted(path.stem for path in CONFIGS.glob("*.json"))
    parser.add_argument("--config", choices=names, default=names[0], help="the model of real dimensions")
    options = parser.parse_args(arguments)
    if options.pairs < 4:
        parser.error("--pairs must be at least 4")
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(sys.stderr):  # whatever a library prints is not the result
        result = run(options.pairs, None if options.quick else options.config)
    print(json.dumps(result, indent=1) if options.json else show(result))


if __name__ == "__main__":
    main()
