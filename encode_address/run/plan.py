"""Cells -> bundles -> steps, and what they cost. Pure: neither a model nor torch.

A *bundle* is cells that share prompts: what they have in common (prefixes, donors, the residual stream below the
first touched layer) runs once. A *step* is the cells of one trace. Prompts of different length never share a
bundle, so nothing is padded. What is already done drops out of its step and changes nothing else, not even what
the bundle shares: an interrupted run that goes on forms the same traces, and so the same sums, as one that was not.

Cost is counted in tokens that pass one decoder layer; `Plan.tokens` divides by the number of layers. A forward
that stops early, or enters late, counts for the layers it ran.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from encode_address.errors import RunError
from encode_address.run.cells import EMBED, FINAL, FULL, READ, Cell, Run
from encode_address.tasks.prompts import Prompt

JOB_TOKENS = 200_000  # of a job on a server: seconds to minutes, and what is lost when it fails
JOB_BYTES = 256 << 20  # of activations that a job brings back
STEP_ROWS = 512  # of a one-token trace; more are no faster


@dataclass(frozen=True)
class Limits:
    """What may be in memory at once.

    `tokens`: forwarded in one trace. `kept`: bytes of what a bundle keeps of its prompts, and of the caches of one
    step. `per_prompt(path, length)`: bytes that a bundle keeps of one prompt (0: not known). `text_rows`: how many times more a
    token costs whose logits are all needed. `step_rows`: of a one-token trace.
    """

    tokens: int
    kept: int
    per_prompt: Callable[[str, int], int]
    text_rows: int = 8
    step_rows: int = STEP_ROWS

    def prompts(self, path: str, length: int, text: bool = False) -> int:
        """Distinct prompts of a bundle; at least a donor and a host."""
        if path == READ:
            return self.rows(path, length, text)
        return max(2, self.kept // max(1, self.per_prompt(path, length)))

    def rows(self, path: str, length: int, text: bool = False) -> int:
        """Rows of one trace of a path."""
        if path == FINAL:
            return max(1, min(self.step_rows, self.tokens, self.kept // max(1, self.per_prompt(path, length))))
        return max(1, self.tokens // length // (self.text_rows if text else 1))

    def halved(self) -> Limits:
        halves = {name: max(1, getattr(self, name) // 2) for name in ("tokens", "kept", "step_rows")}
        return replace(self, **halves)


@dataclass(frozen=True)
class Bundle:
    """Cells of one path and one prompt length. `steps` are to be run; `cells` are all, those done included."""

    path: str
    length: int
    steps: tuple[tuple[Cell, ...], ...]
    cells: tuple[Cell, ...]

    @cached_property
    def pending(self) -> list[Cell]:
        return [cell for step in self.steps for cell in step]

    @cached_property
    def prefixes(self) -> list[tuple[int, ...]]:
        """Final path: the distinct prefixes of hosts, of donors' states, and of the runs that are one token long."""
        prompts = (p for cell in self.cells for p in _continued(cell))
        return list(dict.fromkeys(prompt.ids[:-1] for prompt in prompts))

    @cached_property
    def reach(self) -> dict[tuple, tuple[Run, int]]:
        """The distinct runs that values are taken from, by their key: each with the last layer that is needed."""
        found: dict[tuple, tuple[Run, int]] = {}
        for cell in self.cells:
            for run, edit in cell.sources:
                _, last = found.get(run.key, (run, EMBED))
                found[run.key] = run, max(last, *edit.layers)
        return found

    @cached_property
    def stages(self) -> list[tuple[bool, list[Run], int]]:
        """Those runs in groups that can share a trace, in an order in which each has what it needs: (whether they are
        one token long, runs, last layer that is needed)."""
        groups: dict[tuple, list[tuple[Run, int]]] = {}
        for run, last in self.reach.values():
            short = self.path == FINAL and run.at_the_end
            shape = () if short else tuple(edit.shape for edit in run.edits)
            groups.setdefault((run.depth, short, shape), []).append((run, last))
        ordered = sorted(groups.items(), key=lambda group: group[0][0])
        return [(key[1], [run for run, _ in some], max(last for _, last in some)) for key, some in ordered]

    @cached_property
    def entered(self) -> list[Prompt]:
        """Full path: hosts whose residual stream is kept, for edits that enter above the first layer.

        Empty where the run that reads it would cost as much as it saves.
        """
        late = [cell for cell in self.cells if cell.start]
        hosts = hosts_of(late)
        saved = sum(cell.start for cell in late)
        return hosts if saved > len(hosts) * max((cell.start for cell in late), default=0) else []

    @cached_property
    def starts(self) -> list[int]:
        """Layers at which steps enter; empty when every step runs from the embeddings."""
        return sorted({cell.start for cell in self.cells if cell.start}) if self.entered else []

    @property
    def last_read(self) -> int:
        """Read path: the last layer that has to run."""
        return max(_last_read(cell) for cell in self.pending)

    def layer_tokens(self, depth: int) -> int:
        """Tokens x layers that running this bundle forwards, on a model of `depth` layers."""
        length = self.length
        if self.path == READ:
            return len(hosts_of(self.cells)) * length * (1 + self.last_read)
        capture = sum(len(some) * (1 if short else length) * (1 + last) for short, some, last in self.stages)
        if self.path == FINAL:
            return len(self.prefixes) * (length - 1) * depth + capture + len(self.pending) * depth
        enter = len(self.entered) * max(self.starts, default=0)
        run = sum(cell.rows * ((cell.end or depth) - (cell.start if self.entered else 0)) for cell in self.pending)
        return capture + length * (enter + run)

    def traces(self, limits: Limits) -> int:
        """Traces that running this bundle takes."""
        rows = max(1, limits.tokens // self.length)
        chunks = {FINAL: len(self.prefixes), FULL: len(self.entered), READ: 0}[self.path]
        captures = sum(
            -(-len(some) // (limits.rows(FINAL, self.length) if short else rows)) for short, some, _ in self.stages
        )
        return len(self.steps) - (-chunks // rows) + captures


@dataclass(frozen=True)
class Plan:
    """What is to be run, and what it will cost before it is."""

    bundles: tuple[Bundle, ...]
    depth: int
    limits: Limits
    floor_layer_tokens: int
    cells: int
    shared: tuple[int, int] = (0, 0)
    note: str = ""
    wire: tuple[int, int, int] | None = None

    @property
    def layer_tokens(self) -> int:
        """Tokens x layers. `shared` are those, and the traces, that serve all bundles: the means of a text."""
        return self.shared[0] + sum(bundle.layer_tokens(self.depth) for bundle in self.bundles)

    @property
    def tokens(self) -> int:
        """Tokens forwarded, in whole forwards."""
        return -(-self.layer_tokens // self.depth)

    @property
    def floor(self) -> int:
        """The least tokens that these cells can take: what they share of a prompt runs once, and no further than needed."""
        return -(-self.floor_layer_tokens // self.depth)

    @property
    def traces(self) -> int:
        return self.shared[1] + sum(bundle.traces(self.limits) for bundle in self.bundles)

    def jobs(self, room: int | None = None) -> list[list[Bundle]]:
        """The bundles in groups, at least one each: what a server runs at once. `room`: tokens x layers of a group."""
        groups: list[list[Bundle]] = []
        most = room or JOB_TOKENS * self.depth
        left = 0
        for bundle in self.bundles:
            cost = bundle.layer_tokens(self.depth)
            if not groups or cost > left:
                groups.append([])
                left = most
            groups[-1].append(bundle)
            left -= cost
        return groups

    @property
    def cache_bytes(self) -> int:
        """The most bytes of caches that are held at once: those of a bundle's prefixes, and one step's copies."""
        sizes = [0]
        for bundle in self.bundles:
            if bundle.path == FINAL:
                rows = len(bundle.prefixes) + max(map(len, bundle.steps))
                sizes.append(rows * self.limits.per_prompt(FINAL, bundle.length))
        return max(sizes)

    def __str__(self) -> str:
        known = self.limits.per_prompt(FINAL, 1) > 0
        cached = f"{self.cache_bytes / 1e6:,.0f} MB of cached state at most" if known else "cached state unconfirmed"
        return (
            f"{self.cells:,} cells, {self.tokens:,} tokens of forward, floor {self.floor:,} "
            f"({self.traces:,} traces, {cached}){self.note}{self._sent}"
        )

    @property
    def _sent(self) -> str:
        """What goes to a server and comes back (`wire`: jobs, bytes up, bytes down), where that was asked for."""
        if self.wire is None:
            return ""
        jobs, up, down = self.wire
        said = f"{jobs:,} job{'s' if jobs > 1 else ''}, {_size(up)} up, at most {_size(down)} down"
        return f"; on a server {said}"


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e6 else f"{count / 1e3:,.0f} kB"


def plan(
    cells: Sequence[Cell],
    depth: int,
    limits: Limits,
    done: Collection[str] = (),
    shared: tuple[int, int] = (0, 0),
    note: str = "",
) -> Plan:
    """Plan cells (each of different work) on a model of `depth` layers; `done` holds the work that is not needed."""
    bundles = tuple(_pending(_bundles(cells, limits), done))
    pending = [cell for bundle in bundles for cell in bundle.pending]
    return Plan(bundles, depth, limits, shared[0] + _floor(pending, depth), len(pending), shared, note)


def _floor(cells: Sequence[Cell], depth: int) -> int:
    """Tokens x layers that no way to bundle these cells goes below: what a prompt is needed for runs once, and no
    further than one of its cells needs."""
    once: dict[tuple, int] = {}
    starts: dict[tuple, list[int]] = {}
    total = 0

    def need(what: tuple, cost: int) -> None:
        once[what] = max(cost, once.get(what, 0))

    for cell in cells:
        length, ids = len(cell.host), cell.host.ids
        tokens = 1 if cell.path == FINAL else length
        if cell.path == READ:
            need((READ, ids), tokens * (1 + _last_read(cell)))
            continue
        total += tokens * (cell.end or depth)
        if cell.path == FINAL:
            for prompt in _continued(cell):
                need((FINAL, prompt.ids[:-1]), (length - 1) * depth)
        for run, edit in cell.sources:
            short = cell.path == FINAL and run.at_the_end
            need((cell.path, run.key), (1 if short else length) * (1 + max(edit.layers)))
        if cell.rows > 1:
            need((FULL, Run(cell.host).key), tokens * depth)
        if cell.path == FULL:
            starts.setdefault(ids, []).append(tokens * cell.start)
    return total + sum(once.values()) - sum(sum(saved) - max(saved) for saved in starts.values())


def _continued(cell: Cell) -> list[Prompt]:
    """Final path: the prompts whose prefix's cache a cell needs."""
    needed = [cell.host, *(run.prompt for run, _ in cell.sources if run.at_the_end)]
    return needed + [edit.donor for _, edit in cell.every_edit if edit.verb == "state"]


def without_continuation(cells: Sequence[Cell], why: str) -> tuple[list[Cell], str]:
    """The cells for a model whose runs do not continue from a cache (`why`): final-path cells as full forwards, and a note.

    Raises RunError for a state transplant, which has no other path.
    """
    if any(edit.verb == "state" for cell in cells for edit in cell.edits):
        raise RunError(f"{why}: state transplants do not run on it")
    moved = [replace(cell, path=FULL) if cell.path == FINAL else cell for cell in cells]
    count = sum(cell.path == FINAL for cell in cells)
    note = f"; {why}: {count:,} final-position cells run as full forwards"
    return moved, note if count else ""


def hosts_of(cells: Iterable[Cell]) -> list[Prompt]:
    """The hosts of cells. Equal ids with other spans are other hosts: their entries lie elsewhere."""
    return list({cell.host.digest: cell.host for cell in cells}.values())


def _pending(bundles: Iterator[Bundle], done: Collection[str]) -> Iterator[Bundle]:
    """What is left of bundles when `done` work drops out; steps keep their other cells."""
    for bundle in bundles:
        steps = [tuple(cell for cell in step if cell.work not in done) for step in bundle.steps]
        if left := tuple(step for step in steps if step):
            yield replace(bundle, steps=left)


def _bundles(cells: Sequence[Cell], limits: Limits) -> Iterator[Bundle]:
    """Cut cells of one path and shape into bundles whose distinct prompts fit; a host's cells follow one another."""
    shapes: dict[tuple, dict[str, list[Cell]]] = {}
    for cell in cells:
        shape = (cell.path, len(cell.host), len(cell.host.keys), cell.text, cell.rows)
        shapes.setdefault(shape, {}).setdefault(cell.host.digest, []).append(cell)
    for (path, length, _, text, each), hosts in shapes.items():
        limit, rows = limits.prompts(path, length, text), max(1, limits.rows(path, length, text) // each)
        chosen: list[Cell] = []
        prompts: set[str] = set()
        for group in _uncut(hosts.values(), limit):
            own = {prompt.digest for cell in group for prompt in cell.prompts}
            if chosen and len(prompts | own) > limit:
                yield Bundle(path, length, tuple(_steps(path, chosen, rows)), tuple(chosen))
                chosen, prompts = [], set()
            chosen += group
            prompts |= own
        yield Bundle(path, length, tuple(_steps(path, chosen, rows)), tuple(chosen))


def _uncut(hosts: Iterable[list[Cell]], limit: int) -> Iterator[list[Cell]]:
    """What a bundle holds whole: the cells of a host; those of one of its donors where a host's prompts do not fit."""
    for cells in hosts:
        donors: dict[tuple, list[Cell]] = {}
        for cell in cells:
            donors.setdefault(tuple(prompt.digest for prompt in cell.prompts), []).append(cell)
        yield from [cells] if len({digest for some in donors for digest in some}) <= limit else donors.values()


def _steps(path: str, cells: Sequence[Cell], rows: int) -> Iterator[tuple[Cell, ...]]:
    """Cut a bundle into traces: at most `rows` rows, and on the full path one edit and one shape."""
    groups: dict[tuple, list[Cell]] = {}
    for cell in cells:
        edit = (tuple(edit.shape for edit in cell.edits), cell.exit)
        read = (frozenset(layer for layer, _ in cell.watch), len(cell.outcomes), len(cell.host.choices))
        groups.setdefault((edit, read) if path == FULL else (), []).append(cell)
    for group in groups.values():
        if path == READ:
            yield tuple(group)  # all reads of a host come from one forward
            continue
        for start in range(0, len(group), rows):
            yield tuple(group[start : start + rows])


def _last_read(cell: Cell) -> int:
    """Read path: the last layer that a cell needs (-1: none)."""
    return max((*cell.layers, *(layer for layer, _ in cell.watch)), default=EMBED)
