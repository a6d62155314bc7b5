"""The main job: find the Encode-Address circuit of a model, with evidence, or say that it is not there.

Everything is measured on two disjoint sets of dictionaries: blocks and heads are selected on the discovery split
and reported on the confirmation split. What counts as found is in `rule`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from encode_address import rule
from encode_address.errors import TaskError
from encode_address.experiments import baseline, encode, readers, removal, transplant
from encode_address.experiments.base import Heads
from encode_address.experiments.removal import Unit
from encode_address.metrics import accuracy, heads, perplexity, select, summary
from encode_address.models.check import path_gap
from encode_address.models.loading import card
from encode_address.run.cells import Cell
from encode_address.run.engine import git_revision, versions
from encode_address.run.job import Job
from encode_address.run.store import Store, stored_keys
from encode_address.stats import estimate
from encode_address.tasks import Dictionary, Prompt, Text, dictionary, text_source
from encode_address.verdict import Verdict, sentence

VARIANTS = ("chat8", "list8", "rev8")
N = 100
QUICK_N = 60
DISCOVERY_SEED = 10_000  # added to the seed: the confirmation split has the paper's own draws
DISCOVERY_SHARE, DISCOVERY_LEAST = 0.6, 30  # selection needs fewer pairs than the report does
EXAMPLES = 25
GAP_PROMPTS = 8  # on which the one-token path is compared with the full forward
SCREEN = 30  # lines of blocks, above which only marked ones are shown


@dataclass(frozen=True)
class Found:
    """The result of `find`: the verdict, every row it rests on, and the folder they were written to."""

    verdict: Verdict
    table: pd.DataFrame
    folder: Path


def find(
    model: Any,
    variants: Sequence[str] = VARIANTS,
    n: int = N,
    seed: int = 0,
    text: str | None = None,
    pool: str = "A",
    out: str | Path = "results",
    *,
    batch_tokens: int | None = None,
    fresh: bool = False,
) -> Found:
    """Find the circuit of `model` and write DIR/<slug>/ (cells, summary, verdict, manifest).

    `n` pairs per variant on the confirmation split, and 0.6 n (at least 30) for discovery; `text` is the source of
    perplexity and mean removal (see `tasks.text_source`). `batch_tokens` bounds a trace (default: by free memory).
    An interrupted run continues where it was; `fresh` forgets it. Raises EncodeAddressError subclasses for anything
    a user can mend.
    """
    source, tasks = _tasks(model, variants, n, text, pool)
    folder = Path(out) / model.slug
    started = time.monotonic()
    # Whatever can be refused is refused before the folder is touched: `fresh` forgets what is in it.
    chunks = _chunks(model, source)
    drawn = {variant: _draw(variant, task, n, seed) for variant, task in tasks.items()}
    hosts = [item.host for item in drawn[variants[0]][0][0]["questions"]]
    with Store(folder, fresh=fresh) as store:
        job = _Job(model, source, store, batch_tokens)
        job.run("text", job.text_cells(chunks))
        for variant, (new, old) in drawn.items():
            selected = job.discover(f"{variant} discovery", *old)
            job.run(f"{variant} confirmation", job.confirmation_cells(*new, *selected))
        table = job.table()
        verdict = rule.judge(table, model.layout, list(variants))
        files = {
            "summary__csv": summary(table).to_csv(index=False),
            "verdict__json": {**verdict.as_dict(), "model": model.name, "versions": versions(), **facts(model)},
            "manifest__json": {
                "command": {"variants": list(variants), "n": n, "seed": seed, "pool": pool, "text": source.name},
                **job.engine.facts(),
                "git": git_revision(),
                "rows": len(table),
                "dropped_words": {variant: list(task.dropped) for variant, task in tasks.items()},
                "path_gap": path_gap(model, hosts[:GAP_PROMPTS]),
                "this_run": {"seconds": round(time.monotonic() - started, 1), **job.account()},
            },
        }
        store.finish(table, **files)
    return Found(verdict, table, folder)


def dry_run(
    model: Any,
    variants: Sequence[str] = VARIANTS,
    n: int = N,
    seed: int = 0,
    text: str | None = None,
    pool: str = "A",
    out: str | Path = "results",
    *,
    batch_tokens: int | None = None,
    fresh: bool = False,
) -> str:
    """What `find` with these arguments costs from nothing, as far as that does not depend on results."""
    source, tasks = _tasks(model, variants, n, text, pool)
    job = _Job(model, source, None, batch_tokens)
    cells = job.text_cells(_chunks(model, source))
    for variant, task in tasks.items():
        new, old = _draw(variant, task, n, seed)
        cells += job.discovery_cells(*old, readers.all_heads(model))
        cells += job.confirmation_cells(*new, readers.first_heads(model), [], [])
    lines = [
        f"{model.name}: {job.engine.plan(cells)}",
        "  the heads and the unions of blocks that discovery selects come on top",
    ]
    stored = 0 if fresh else len(stored_keys(Path(out) / model.slug))
    if stored:
        lines.append(f"  {stored:,} rows are stored; those that this command needs are not run again")
    return "\n".join(lines)


def _tasks(
    model: Any, variants: Sequence[str], n: int, text: str | None, pool: str
) -> tuple[Text, dict[str, Dictionary]]:
    if n < 2 or not variants:
        raise TaskError("find needs at least one variant and n of 2 or more; claims need about 40 pairs")
    source = text_source(text, bundled=model.folder is not None)
    return source, {variant: dictionary(model, variant, source, pool) for variant in variants}


class _Job(Job):
    """What `find` measures, and how discovery leads to what is confirmed."""

    @property
    def blocks(self) -> list[Unit]:
        return removal.blocks(self.model.layout)

    def text_cells(self, chunks: Sequence[Prompt]) -> list[Cell]:
        """The loss on text, intact and without each block or layer."""
        units = self.blocks + removal.single_layers(self.model.layout)
        return removal.text_cells(chunks, units, {"split": "confirmation"})

    def discovery_cells(self, items: dict[str, list], labels: dict, watch: Heads) -> list[Cell]:
        """What discovery measures whatever it finds."""
        return [
            *baseline.cells(items["swaps"], watch, labels),
            *encode.cells(items["value"] + items["key"], self.blocks, labels),
        ]

    def discover(self, what: str, items: dict[str, list], labels: dict) -> tuple[list, list, list[str]]:
        """Select heads and sets of blocks: (heads to watch, causal heads, sets that the confirmation must test)."""
        rows = self.run(what, self.discovery_cells(items, labels, readers.all_heads(self.model)))
        intact = select(rows, experiment="baseline")
        candidates = readers.candidates(intact)
        watch = sorted({*candidates, *readers.top_per_layer(intact)})
        causal = self.run(what, readers.cells(items["swaps"], candidates, labels))
        moved = self.run(what, transplant.host_cells(items["questions"], watch=watch, labels=labels))
        first, *controls = transplant.DONORS
        while names := rule.next_sets(moved, self.model.layout):
            moved = pd.concat([moved, self._transplants(what, items, names, [first], watch, labels)])
        if names := rule.redirecting(moved, self.model.layout):
            moved = pd.concat([moved, self._transplants(what, items, names, controls, watch, labels)])
        names = rule.causal_heads(pd.concat([intact, causal]))
        chosen = [head for head in heads(intact) if f"L{head[0]}H{head[1]}" in names]
        return watch, chosen, [e.name for e in rule.select_address(moved, self.model.layout)]

    def confirmation_cells(
        self, items: dict[str, list], labels: dict, watch: Heads, chosen: Heads, sets: Sequence[str]
    ) -> list[Cell]:
        """On new dictionaries: every block and layer, and what discovery selected."""
        swaps, questions = items["swaps"], items["questions"]
        single = removal.single_layers(self.model.layout)
        units = self.blocks + [self._unit(name) for name in sets if "+" in name]
        few = ("same-dictionary", "identity")
        out = [
            *baseline.cells(swaps, watch, labels),
            *removal.cells(swaps, self.blocks, "zero", watch, labels),
            *removal.cells(swaps, self.blocks, "mean", watch, labels),
            *removal.cells(swaps, single, "zero", watch, labels),
            *encode.cells(items["value"] + items["key"], self.blocks, labels),
            *readers.cells(swaps, chosen, labels),
            *transplant.host_cells(questions, watch=watch, labels=labels),
            *transplant.cells(questions, units, watch=watch, labels=labels),
            *transplant.host_cells(questions, "question", watch, labels),
            *transplant.cells(questions, units, few, "question", watch, labels),
        ]
        if sets:
            out += transplant.example_cells(questions[:EXAMPLES], self._unit(sets[0]), watch, labels)
        return out

    def _transplants(self, what, items, names, donors, watch, labels) -> pd.DataFrame:
        units = [self._unit(name) for name in names]
        return self.run(what, transplant.cells(items["questions"], units, donors, watch=watch, labels=labels))

    def _unit(self, name: str) -> Unit:
        return name, self.model.layout.layers_of(name)


def _chunks(model: Any, source: Text) -> list[Prompt]:
    return source.chunks(model.tokenizer, "test", n=source.count)


def _draw(variant: str, task: Dictionary, n: int, seed: int) -> tuple[tuple[dict, dict], tuple[dict, dict]]:
    """(items, labels) of the confirmation split, which is drawn first and has the paper's own draws, and of discovery."""
    used: dict[str, set] = {"swaps": set(), "questions": set(), "value": set(), "key": set()}
    about = {"variant": variant, "surface": task.surface or "restate", "pool": task.pool}
    new = _items(task, n, seed, used)
    fewer = min(n, max(DISCOVERY_LEAST, round(DISCOVERY_SHARE * n)))
    old = _items(task, fewer, seed + DISCOVERY_SEED, used)
    first = {**about, "split": "discovery", "dictionary_seed": seed + DISCOVERY_SEED}
    return (new, {**about, "split": "confirmation", "dictionary_seed": seed}), (old, first)


def _items(task: Dictionary, n: int, seed: int, used: dict[str, set]) -> dict[str, list]:
    return {
        "swaps": task.swaps(n, seed, used["swaps"]),
        "questions": task.questions(n, seed, used["questions"]),
        "value": task.entries(n, "value", seed, used["value"]),
        "key": task.entries(n, "key", seed, used["key"]),
    }


def facts(model: Any) -> dict[str, Any]:
    """What a verdict says of the model itself: its layout, and what was imposed in its training."""
    layout = model.layout
    return {
        "layout": {
            "blocks": [{"name": b.name, "layers": list(b.layers), "reader": b.reader} for b in layout.blocks],
            "softmax": list(layout.softmax_layers),
        },
        "split": "confirmation",
        "imposed": card(model).get("imposed", []),
    }


def report(found: Found, model: Any) -> str:
    """The one screen: a line per block and variant, then the verdict in one sentence.

    As in the paper's tables, a block that no softmax layer follows has no line; of a large model only the blocks
    that carry a mark have one. Their rows are in the table all the same.
    """
    new = select(found.table, split="confirmation")
    text = select(new, experiment="text")
    blocks = model.layout.tabled
    lines = [
        f"{model.name}: {len(found.table)} cells; confirmation split",
        f"  {'variant':<10} {'block':<7} {'layers':<8} {'removed':>8} {'perplexity':>11} "
        f"{'value/key swap':>15} {'transplant (final)':>22}  mark",
    ]
    for verdict in found.verdict.variants:
        rows = select(new, variant=verdict.variant)
        units = [(b.name, b.span) for b in blocks] + [("+".join(verdict.address.names), "")]
        units = [(name, span) for i, (name, span) in enumerate(units) if i < len(blocks) or "+" in name]
        if len(blocks) * len(found.verdict.variants) > SCREEN:
            units = [(name, span) for name, span in units if _mark(name, verdict)]
        lines.append(_line(verdict.variant, "intact", "", rows, text))
        lines += [_line(verdict.variant, name, span, rows, text, _mark(name, verdict)) for name, span in units]
        lines += [f"  {verdict.variant:<10} tied with {', '.join(verdict.ties)}"] if verdict.ties else []
    return "\n".join([*lines, "", sentence({**found.verdict.as_dict(), "model": model.name})])


def _mark(name: str, verdict: Any) -> str:
    if name in verdict.encode.names:
        return "Encode"
    if name == "+".join(verdict.address.names) or name in verdict.address.names:
        return "Address" + (" (partial)" if verdict.address.status == "partial" else "")
    if name in verdict.removal_only:
        return "removal-only"
    return "attention moved, answer did not" if name in verdict.attention_only else ""


def _line(variant: str, name: str, span: str, rows: pd.DataFrame, text: pd.DataFrame, mark: str = "") -> str:
    intact = name == "intact"
    removed = (
        select(rows, experiment="baseline") if intact else select(rows, experiment="removal", block=name, mode="zero")
    )
    loss = select(text, intervention="none") if intact else select(text, block=name, mode="zero")
    final = select(rows, experiment="transplant", block=name, donor="same-dictionary", position="final")
    swaps = rule.carried(rows, name)
    cells = [
        f"{accuracy(removed).value:.2f}" if len(removed) else "",
        f"{perplexity(loss['loss']):.4g}" if len(loss) else "",
        " / ".join(f"{swaps[s].value:.2f}" for s in ("value", "key") if s in swaps),
        str(estimate(final["redirected"], final["pair"])) if len(final) else "",
    ]
    return (
        f"  {variant:<10} {name:<7} {span:<8} {cells[0]:>8} {cells[1]:>11} {cells[2]:>15} {cells[3]:>22}  {mark}"
    ).rstrip()
