"""Run cells on a local model: plan, trace, and turn what was read into rows.

`paths` holds the three ways to run a bundle, `plan` what goes into one. Baseline (`none`) cells exist on every
path, so that a patched row is compared with one that took the same path.
"""

from __future__ import annotations

import gc
import platform
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import nnsight
import pandas as pd
import torch
import transformers

from encode_address.errors import JobTimeout, RunError, ServerError
from encode_address.run.batch import ids_of, watched
from encode_address.run.cells import Cell, Edit, context_of, layers_said
from encode_address.run.memory import limits, out_of_memory
from encode_address.run.paths import PATHS, Step
from encode_address.run.plan import JOB_BYTES, JOB_TOKENS, Bundle, Plan, plan, without_continuation
from encode_address.run.projection import StandIn, costs
from encode_address.run.steps import mixer_sums, run_bundles, run_each, run_step
from encode_address.run.store import Store
from encode_address.run.wire import wire
from encode_address.tasks.text import Text

SMALL = 5_000_000  # parameters of a model that runs best, on a CPU, with one thread


class Engine:
    """Runs cells on one model, and keeps account of what that took.

    `text` is the source of mean removal. `batch_tokens` bounds the tokens of one trace (default: from free memory).
    `on_rows` is called with the number of rows each trace finished, `warn` with a line that the user should see. Where the
    model is elsewhere, several bundles are one job.
    """

    def __init__(
        self,
        model: Any,
        text: Text | None = None,
        batch_tokens: int | None = None,
        on_rows: Callable[[int], Any] | None = None,
        warn: Callable[[str], Any] = lambda line: print(f"warning: {line}", file=sys.stderr),
    ) -> None:
        if batch_tokens is not None and batch_tokens < 1:
            raise RunError(f"batch tokens must be 1 or more, not {batch_tokens}")
        self.model, self.text, self.warn = model, text, warn
        self.on_rows = on_rows or (lambda n: None)
        self.depth = len(model.layout.kinds)
        self.layer_tokens = self.traces = 0  # forwarded so far: tokens x layers, traces
        self.planned_layer_tokens = self.floor_layer_tokens = 0
        self.limits = limits(model, batch_tokens)
        self._means: dict[int, torch.Tensor] | None = None
        self._fitted: dict[str, dict[Any, Any]] = {}
        self._warned = False

    @property
    def tokens(self) -> int:
        """Tokens forwarded so far, in whole forwards."""
        return -(-self.layer_tokens // self.depth)

    @property
    def planned(self) -> int:
        """Tokens that the plans of the runs so far foresaw."""
        return -(-self.planned_layer_tokens // self.depth)

    @property
    def floor(self) -> int:
        """The least tokens that those runs could have taken (see `Plan.floor`)."""
        return -(-self.floor_layer_tokens // self.depth)

    def count(self, tokens: int, layers: int | None = None) -> None:
        """Keep account of one trace that takes `tokens` tokens through `layers` layers (default: all)."""
        self.layer_tokens += tokens * (self.depth if layers is None else layers)
        self.traces += 1

    def foresee(self, tokens: int) -> None:
        """Keep account of whole forwards that were planned elsewhere (a reading)."""
        self.planned_layer_tokens += tokens * self.depth
        self.floor_layer_tokens += tokens * self.depth

    # -- running -----------------------------------------------------------------
    def plan(self, cells: Sequence[Cell], done: Collection[str] = ()) -> Plan:
        """What running `cells` would take; `done` holds the row keys (see `keys`) that are there already."""
        cells, note = self._fitting(cells)
        works = self._works(cells, self.keys(cells), done)
        made = self._plan(works, note)
        return replace(made, wire=wire(self, made)) if self.model.weightless else made

    def keys(self, cells: Sequence[Cell]) -> list[str]:
        """The row keys of cells."""
        context = context_of(self.facts())
        return [cell.key(context) for cell in self._fitting(cells)[0]]

    def run(self, cells: Sequence[Cell], store: Store | None = None) -> pd.DataFrame:
        """The table of `cells`, one row per cell in their order; rows already in `store` are not run again."""
        if not cells:
            return pd.DataFrame()
        with own_threads(self.model):
            return self._run(self._fitting(cells)[0], store)

    def _run(self, cells: Sequence[Cell], store: Store | None) -> pd.DataFrame:
        keys = self.keys(cells)
        if len(set(keys)) != len(keys):
            raise RunError("two cells of one plan are the same; label them apart")
        works = self._works(cells, keys, store.keys() if store else ())
        self.on_rows(len(cells) - sum(len(twins) for _, twins in works.values()))
        first = self._plan(works)
        self.planned_layer_tokens += first.layer_tokens
        self.floor_layer_tokens += first.floor_layer_tokens
        facts, fresh = self.facts(), []
        for batch, seen in self._traces(works, first):
            rows = [
                {"key": key, **twin.columns(), **measured, **facts}
                for cell, measured in zip(batch, self._rows(batch, seen))
                for key, twin in works[cell.work][1]
            ]
            if store:
                store.append(rows)
            else:
                fresh.extend(rows)
            self.on_rows(len(rows))
        table = store.table(keys) if store else pd.DataFrame(fresh)
        return table.set_index("key").loc[keys].reset_index()

    def _works(
        self, cells: Sequence[Cell], keys: Sequence[str], done: Collection[str]
    ) -> dict[str, tuple[Cell, list[tuple[str, Cell]]]]:
        """work -> the cell that runs, and those (with their keys) that get its row. Cells that differ in their labels
        only run once; work whose rows are all done has no receivers."""
        works: dict[str, tuple[Cell, list[tuple[str, Cell]]]] = {}
        for key, cell in zip(keys, cells):
            _, twins = works.setdefault(cell.work, (cell, []))
            if key not in done:
                twins.append((key, cell))
        return works

    def _plan(self, works: Mapping[str, tuple[Cell, list]], note: str = "") -> Plan:
        done = {work for work, (_, twins) in works.items() if not twins}
        cells = [cell for cell, _ in works.values()]
        shared = (0, 0)
        if self._means is None and any(
            edit.mode == "mean" for c in cells if c.work not in done for _, edit in c.every_edit
        ):
            chunks = self._mean_chunks()
            rows = max(1, self.limits.tokens // len(chunks[0]))
            shared = sum(map(len, chunks)) * self.depth, -(-len(chunks) // rows)
        maps = [e.map for c in cells if c.work not in done for _, e in c.every_edit if e.map is not None]
        fits = costs(maps, self.limits.tokens, self._fitted)
        return plan(cells, self.depth, self.limits, done, (shared[0] + fits[0], shared[1] + fits[1]), note)

    def _traces(self, works: Mapping[str, tuple[Cell, list]], first: Plan) -> Iterator[tuple[Sequence[Cell], dict]]:
        """Run a plan; when memory runs out, plan what is left with smaller batches. When a server ends a job because it takes too
        long, cut what is left into jobs of half the size, once."""
        current, finished, elsewhere, room = first, set(), self.model.elsewhere, None
        while True:
            try:
                for job in current.jobs(room) if elsewhere else [[one] for one in current.bundles]:
                    for step, value in self._asked(job) if elsewhere else self._streamed(job[0]):
                        for batch, seen in self._seen(step, value):
                            yield batch, seen
                            finished.update(cell.work for cell in batch)
                return
            except JobTimeout:
                if room is not None:
                    raise
                room, self.limits = sum(one.layer_tokens(self.depth) for one in job) // 2, self.limits.halved()
                self.warn("the server ended a job that took too long: the rest goes in jobs of half its size")
                current = self._plan({work: entry for work, entry in works.items() if work not in finished})
                continue
            except Exception as error:
                if not out_of_memory(error):
                    raise
                length, limits = max(one.length for one in job), self.limits
                if all(max(limits.rows(one.path, one.length), limits.tokens // one.length) <= 1 for one in job):
                    raise RunError(
                        f"out of memory with one prompt of {length} tokens: use --dtype bfloat16, shorter prompts, "
                        "or a device with more memory"
                    ) from error
            gc.collect()
            if self.model.device.type == "cuda":
                torch.cuda.empty_cache()
            smaller = self.limits.halved()
            if not self._warned:
                self._warned = True
                self.warn(
                    f"out of memory: batches are halved to {smaller.tokens} tokens, and further where needed "
                    "(--batch-tokens sets them)"
                )
            self.limits = smaller
            rest = {work: entry for work, entry in works.items() if work not in finished}
            current = self._plan(rest)

    def _streamed(self, bundle: Bundle) -> Iterator[tuple[Step, dict | None]]:
        """The steps of a bundle with what they saw, one after the other."""
        bank: dict[str, Any] = {}
        for step in PATHS[bundle.path](self, bundle):
            self.count(step.tokens, step.layers)
            yield step, run_step(self.model, step.data, bank)

    def _asked(self, job: Sequence[Bundle]) -> Iterator[tuple[Step, dict | None]]:
        """The same of several bundles, run at once where the model is: only what was seen comes back."""
        steps = [list(PATHS[bundle.path](self, bundle)) for bundle in job]
        every = [step for some in steps for step in some]
        for step in every:
            self.count(step.tokens, step.layers)
        sourced = sorted({layer for step in every for layer in step.sourced})
        seen = self.model.ask(run_bundles, [[step.data for step in some] for some in steps], sourced)
        yield from zip(every, (value for values in seen for value in values))

    def _seen(self, step: Step, seen: dict[str, Any] | None) -> Iterator[tuple[Sequence[Cell], dict]]:
        """What a step saw, by cells. Raises RunError for logits that are no numbers, and for an edit that did not fire."""
        parts = list(step.results(seen)) if step.cells else []
        for cells, part in parts:
            counts = {len(value) for one in (part.get("answer"), part.get("loss")) if one for value in one.values()}
            if self.model.elsewhere and counts - {len(cells)}:
                raise ServerError(
                    f"{self.model.place} answered {sorted(counts)} of {len(cells)} prompts: its packages may differ from those "
                    "here; compare them with encode-address remote status"
                )
        named = [(layer, self._named(served[0])) for (layer, *_), served in step.writes]
        for _, part in parts:
            measured = torch.isfinite(part["loss"]["loss"]) if "loss" in part else part.get("answer", {}).get("finite")
            if measured is not None and not bool(measured.all()):
                what = named[0][1] if named else self.model.name
                raise RunError(f"NaN or infinite logits: {what}; try --dtype float32")
        for number, (layer, what) in enumerate(named):
            if not bool(seen["landed"][number]):
                raise RunError(f"the intervention did not fire: what {what} wrote does not stand at layer {layer}")
        yield from parts

    def _fitting(self, cells: Sequence[Cell]) -> tuple[Sequence[Cell], str]:
        why = self.model.uncontinued
        return without_continuation(cells, why) if why else (cells, "")

    def facts(self) -> dict[str, Any]:
        """The columns that are the same for every row of this model; with its cell they determine a row."""
        model = self.model
        return {
            "model": model.name,
            "fingerprint": model.fingerprint,
            "revision": model.revision or "",
            "dtype": model.dtype,
            "attn_implementation": model.attn_implementation,
            "device": torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else model.device.type,
            "where": model.place,
            "text_source": self.text.name if self.text else "",
            "text_sha256": self.text.sha256 if self.text else "",
            "versions": " ".join(f"{name}={version}" for name, version in versions().items()),
        }

    def each(
        self, function: Callable[..., Any], batches: Iterable[tuple[int, int, Sequence[Any]]], layers: int | None = None
    ) -> Iterator[Any]:
        """What `function(model, *arguments)` gives for each of `batches`: (tokens, bytes of what comes back, arguments). One
        after the other here; elsewhere many in one job. Each is one trace through `layers` layers (default: all)."""
        held: list[Sequence[Any]] = []
        tokens = size = 0
        for more, back, arguments in batches:
            self.count(more, layers)
            if not self.model.elsewhere:
                yield self.model.ask(function, *arguments)
                continue
            if held and (tokens + more > JOB_TOKENS or size + back > JOB_BYTES):
                yield from self.model.ask(run_each, function, held)
                held, tokens, size = [], 0, 0
            held, tokens, size = [*held, arguments], tokens + more, size + back
        if held:
            yield from self.model.ask(run_each, function, held)

    # -- what paths need -----------------------------------------------------------
    def means(self) -> dict[int, torch.Tensor]:
        """The mean output of every mixer over the text's train part: one (d_model,) tensor per layer."""
        if self._means is None:
            chunks = self._mean_chunks()
            size = max(1, self.limits.tokens // len(chunks[0]))
            batches = [ids_of(chunks[start : start + size]) for start in range(0, len(chunks), size)]
            for ids in batches:
                self.count(ids.numel())
            sums, count = self.model.ask(mixer_sums, batches), sum(ids.numel() for ids in batches)
            self._means = {layer: (total / count).float() for layer, total in enumerate(sums)}
        return self._means

    def fitted(self, standing: StandIn) -> Any:
        """What stands in for replaced layers, fitted at first use and kept: its `columns`, and what it does (`write`)."""
        if standing.data not in self._fitted:
            self._fitted[standing.data] = standing.fit(self)
        return self._fitted[standing.data][standing.kind]

    def _mean_chunks(self) -> list:
        if self.text is None:
            raise RunError("mean removal needs a text: pass --text")
        return self.text.chunks(self.model.tokenizer, "train", n=self.text.count)

    def _named(self, edit: Edit) -> str:
        return f"{edit.verb} {edit.mode} at layers {layers_said(edit.layers) or '-'} ({self.model.name})"

    # -- rows --------------------------------------------------------------------
    def _rows(self, cells: Sequence[Cell], seen: dict[str, Any]) -> list[dict[str, Any]]:
        maps = [[edit.map for edit in cell.edits if edit.map is not None] for cell in cells]
        rows: list[dict[str, Any]] = [
            dict(self.fitted(max(found, key=lambda one: one.layers)).columns) if found else {} for found in maps
        ]
        if "loss" in seen:
            columns = {name: values.tolist() for name, values in seen["loss"].items()}
            return [row | dict(zip(columns, values)) for row, values in zip(rows, zip(*columns.values()))]
        if "answer" in seen:
            self._answers(rows, cells, {name: value.tolist() for name, value in seen["answer"].items()})
        attention = {layer: mass.tolist() for layer, mass in seen["attention"].items()}
        place = {layer: {head: at for at, head in enumerate(heads)} for layer, heads in watched(cells).items()}
        for i, (row, cell) in enumerate(zip(rows, cells)):
            for layer, head in cell.watch:
                row[f"attn.L{layer}H{head}"] = attention[layer][i][place[layer][head]]
        return rows

    def _answers(self, rows: list[dict], cells: Sequence[Cell], answer: dict[str, list]) -> None:
        words = self.model.tokenizer.convert_ids_to_tokens(answer["predicted"])
        for i, (row, cell) in enumerate(zip(rows, cells)):
            row |= {"said": words[i], "spread": answer["spread"][i]}
            predicted, logits, asked = answer["predicted"][i], answer["logits"][i], len(cell.outcomes)
            for name, token in cell.outcomes:
                row[name] = predicted == token
            if asked > 1:
                row["margin"] = logits[0] - logits[1]
            if asked and cell.host.choices:
                row["chance"] = 1 / len(cell.host.choices)
                among = logits[asked : asked + len(cell.host.choices)]
                row["choice_correct"] = cell.host.choices[among.index(max(among))] == cell.outcomes[0][1]


def threads(model: Any) -> int:
    """The threads that a model runs with: one for a small model on a CPU.

    Its matrices gain at most a third from a second thread, and lose an order of magnitude when another process
    wants that core: waiting threads spin. A fixed number also keeps sums, and so the table, the same.
    """
    small = model.device.type == "cpu" and sum(p.numel() for p in model.module.parameters()) < SMALL
    return 1 if small else torch.get_num_threads()


@contextmanager
def own_threads(model: Any) -> Iterator[None]:
    """Run a model with its own number of threads, and give the process its number back."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads(model))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def git_revision() -> str:
    """The revision of this package's own repository, "+" when there are changes; "" when it is installed."""
    folder = Path(__file__).resolve().parents[2]
    git = ["git", "-C", str(folder)]
    try:
        if not (folder / ".git").exists():
            return ""
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head + ("+" if changed.strip() else "")


def versions() -> dict[str, str]:
    """Versions that a result depends on; optional kernels, which transformers uses when they are there, included."""
    from encode_address import __version__

    kernels = {}
    for package in ("flash-linear-attention", "causal-conv1d", "mamba-ssm"):
        with suppress(PackageNotFoundError):
            kernels[package] = version(package)
    return {
        "encode_address": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "nnsight": nnsight.__version__,
        "python": platform.python_version(),
        **kernels,
    }
