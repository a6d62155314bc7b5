"""How many jobs, bytes and seconds does an experiment take on a server? Side by side with one trace per cell, in one run.

python benchmarks/remote.py [--model tiny-gdn] [--pairs N] [--naive N] [--json]

The server is the light one of the tests, on this machine: it speaks NDIF's protocol, and has no queue and no network between, so
what a job costs by itself is least there. The naive loop sends every cell as a job of its own (its prefix, its donor and itself in
one session, which is kind to it); the first N cells are run so, and scaled. Both sides' answers are compared. --json prints one JSON
object alone on stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # a script finds only what lies beside it

from tests.remote.light import Light
from tests.remote.stack import TRUSTED

TOLERANCE = 1e-4  # of a margin, in units of max(1, standard deviation of the logits)


def plans(model: Any, pairs: int) -> dict[str, list[Any]]:
    """Experiment -> its cells, as `encode-address run` makes them."""
    from encode_address.experiments import removal, state, transplant
    from encode_address.tasks import dictionary

    task, units = dictionary(model, "chat8"), removal.blocks(model.layout)
    questions, swaps = task.questions(pairs), task.swaps(pairs)
    return {
        "removal": removal.cells(swaps, units, "zero", [], {}),
        "transplant": transplant.host_cells(questions) + transplant.cells(questions, units),
        "state": state.cells(questions, units),
    }


def measured(model: Any, cells: list[Any], one_by_one: bool) -> tuple[dict[str, float], Any]:
    """What running `cells` took, and the table."""
    import pandas as pd

    from encode_address.run.engine import Engine

    client, started = model.where, time.monotonic()
    before = client.jobs, client.up, client.down
    engine = Engine(model)
    table = pd.concat([engine.run([cell]) for cell in cells]) if one_by_one else engine.run(cells)
    after = client.jobs, client.up, client.down
    jobs, up, down = (b - a for a, b in zip(before, after))
    return {"jobs": jobs, "up": up, "down": down, "seconds": time.monotonic() - started}, table.reset_index(drop=True)


def row(model: Any, name: str, cells: list[Any], naive: int) -> dict[str, Any]:
    ours, table = measured(model, cells, False)
    few = cells[:: max(1, len(cells) // naive)][:naive]  # of every kind
    single, other = measured(model, few, True)
    same = table.set_index("key").loc[other["key"]].reset_index()
    off = ((same["margin"] - other["margin"]).abs() / other["spread"].clip(lower=1)).max()
    if not off <= TOLERANCE:
        raise SystemExit(f"error: {name}: the two ways differ by {off:.2g} standard deviations of the logits")
    scaled = {what: value * len(cells) / len(few) for what, value in single.items()}
    ratios = {f"{what}_ratio": scaled[what] / ours[what] for what in ours}
    return {"experiment": name, "cells": len(cells), "naive_cells": len(few), **ours, **ratios, "off": float(off)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny-gdn")
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--naive", type=int, default=20, help="cells of the naive loop that are run")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        light = Light(Path(folder))
        try:
            os.environ.update(light.client(), NDIF_API_KEY=TRUSTED)  # before nnsight reads it
            import encode_address

            model = encode_address.load(asked.model, remote=True)
            made = plans(model, asked.pairs)
            measured(model, made["removal"][:1], False)  # the server loads the model
            rows = [row(model, name, cells, asked.naive) for name, cells in made.items()]
        finally:
            light.down()
    if asked.json:
        return print(json.dumps({"model": asked.model, "rows": rows}, indent=1))
    print(f"{asked.model}, naive over ours:")
    for one in rows:
        print(
            f"  {one['experiment']:<11}{one['cells']:5} cells  {one['jobs']} jobs ({one['jobs_ratio']:.0f} x fewer)  "
            f"{one['up'] / 1e3:.0f} kB up ({one['up_ratio']:.0f} x less)  {one['down'] / 1e3:.0f} kB down "
            f"({one['down_ratio']:.1f} x less)  {one['seconds']:.1f} s ({one['seconds_ratio']:.0f} x less)"
        )


if __name__ == "__main__":
    main()
