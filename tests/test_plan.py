"""The planner: every cell once, nothing mixed, nothing over the limits, and a cost that is what the steps take."""

from collections import Counter, defaultdict
from dataclasses import replace
from functools import cache
from itertools import groupby, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from encode_address.errors import RunError
from encode_address.run.cells import EMBED, FINAL, FULL, READ, Cell
from encode_address.run.plan import Bundle, Limits, hosts_of, plan, without_continuation
from encode_address.tasks.prompts import Prompt
from tests.test_cells import prompt

DEPTH = 6
ANSWER = (("correct", 1), ("swapped", 2))
FAMILY = [(0, 90), (0, 91), (1, 90), (2, 90)]  # first and last token: two share a prefix, the last has a dictionary
SHARED = ("prefixes", "reach", "entered", "starts")


def twin(host: Prompt) -> Prompt:
    """The same tokens, every entry one later: one prompt to run, another host to read."""
    entries = {f"entry {i}": (host.span(f"entry {i}")[0] + 1,) for i in range(len(host.keys))}
    return replace(host, spans={**host.spans, **entries})


def alone(host: Prompt) -> list[Cell]:
    """Cells of a host that have no donor."""
    layers = [(0,), (1,), (2, 4), (5,)]
    return [
        Cell("none", host, FULL, outcomes=ANSWER),
        Cell("none", host, FULL, outcomes=ANSWER, watch=((3, 0),)),
        *(Cell("none", host, READ, watch=((layer, head),)) for layer in (1, 3) for head in (0, 1)),
        *(Cell("truncate", host, layers=(layer,), outcomes=ANSWER[:n]) for layer in (0, 2, 5) for n in (1, 2)),
        *(Cell("remove", host, layers=ls, mode=m, outcomes=ANSWER) for ls in layers for m in ("zero", "mean")),
        *(Cell("remove", host, layers=ls, mode="zero", watch=((3, 0), (3, 1))) for ls in layers),
        *(Cell("heads", host, layers=(layer,), head=h, outcomes=ANSWER) for layer in (1, 3) for h in (0, 1)),
        *(Cell("remove", host, layers=ls, mode="zero", text=True) for ls in layers),
        Cell("none", host, text=True),
    ]


def paired(host: Prompt, donor: Prompt) -> list[Cell]:
    """Cells of a host with this donor."""
    end, start = ({"donor": donor, "where": p, "source": p, "outcomes": ANSWER} for p in (host.final, (0,)))
    cells = [Cell("transplant", host, layers=(EMBED,), mode="embeddings", **end)]
    for layers in ((0,), (3,), (1, 2, 5)):
        cells += [Cell("transplant", host, FULL, layers=layers, mode=mode, **end) for mode in ("outputs", "random")]
        cells += [Cell("transplant", host, layers=layers, mode=mode, **start) for mode in ("outputs", "random")]
        cells += [Cell("key", host, layers=layers, **start), Cell("query", host, FULL, layers=layers, **end)]
        if len(host) > 1:
            two = {"where": (0, *host.final), "source": (0, *host.final)}
            cells += [Cell("transplant", host, layers=layers, mode=m, **end | two) for m in ("outputs", "random")]
            cells += [Cell("transplant", host, FINAL, layers=layers, mode=m, **end) for m in ("outputs", "random")]
            cells += [Cell("query", host, FINAL, layers=layers, head=head, **end) for head in (-1, 1)]
            cells += [Cell("state", host, layers=layers, donor=donor, mode=mode) for mode in ("recurrent", "both")]
    return cells


@cache
def everything(path: str, length: int) -> list[Cell]:
    """The cells that can be made of the prompts of one length, on one path."""
    hosts = [prompt(length, first, last) for first, last in FAMILY]
    hosts.append(twin(hosts[-1]))
    cells = [cell for host in hosts for cell in alone(host)]
    cells += [cell for host, donor in product(hosts, hosts) for cell in paired(host, donor)]
    if length > 1:
        cells += [Cell("none", host, FINAL, outcomes=ANSWER) for host in hosts]
    return [cell for cell in cells if cell.path == path]


@st.composite
def plans(draw) -> list[Cell]:
    """Different cells of some paths and lengths, in any order."""
    paths = draw(st.sets(st.sampled_from([FINAL, FULL, READ]), min_size=1))
    lengths = draw(st.sets(st.sampled_from([1, 4, 6]), min_size=1))
    pool = [cell for path in sorted(paths) for length in sorted(lengths) for cell in everything(path, length)]
    at_least = draw(st.integers(0, min(30, len(pool))))
    return draw(st.lists(st.sampled_from(pool), min_size=at_least, max_size=40, unique=True)) if pool else []


@st.composite
def limits(draw) -> Limits:
    """Limits from "one cell at a time" to "all at once"."""
    tokens, kept, text_rows = (draw(st.integers(*ends)) for ends in ((1, 80), (0, 60), (1, 4)))
    fixed, grown = draw(st.integers(0, 3)), draw(st.integers(0, 1))
    return Limits(tokens, kept, lambda path, length: fixed + grown * length, text_rows)


def works(cells, chosen: set[int]) -> set[str]:
    return {cell.work for i, cell in enumerate(cells) if i in chosen}


# -- properties ---------------------------------------------------------------------------------
@given(plans(), limits(), st.sets(st.integers(0, 39)))
@settings(max_examples=150, deadline=None)
def test_every_pending_cell_is_in_exactly_one_step(cells, bounds, chosen):
    done = works(cells, chosen)
    made = plan(cells, DEPTH, bounds, done)
    pending = [cell for cell in cells if cell.work not in done]
    assert Counter(cell for bundle in made.bundles for step in bundle.steps for cell in step) == Counter(pending)
    assert made.cells == len(pending)
    assert all(step for bundle in made.bundles for step in bundle.steps)


@given(plans(), limits())
@settings(max_examples=150, deadline=None)
def test_a_step_is_one_trace_and_fits(cells, bounds):
    """Full path: one edit, so that it is one write, and one shape, so that its rows stack. The rest mixes freely."""
    for bundle in plan(cells, DEPTH, bounds).bundles:
        each = bounds.per_prompt(bundle.path, bundle.length)
        assert bundle.path != READ or len(bundle.steps) == 1
        for step in bundle.steps:
            rows = len(step)
            if bundle.path == FULL:
                assert len({(c.intervention, c.mode, c.layers, c.head) for c in step}) == 1
                assert len({(len(c.where), len(c.source), c.donor is None, c.text) for c in step}) == 1
                assert len({(len(c.outcomes), len(c.host.choices)) for c in step}) == 1
                assert len({frozenset(layer for layer, _ in c.watch) for c in step}) == 1
                weight = bounds.text_rows if step[0].text else 1
                assert rows == 1 or rows * bundle.length * weight <= bounds.tokens
            elif bundle.path == FINAL:
                assert rows == 1 or (rows <= bounds.tokens and rows * each <= bounds.kept)
            else:
                hosts = len({cell.host.digest for cell in bundle.cells})
                assert hosts == 1 or hosts * bundle.length <= bounds.tokens


@given(plans(), limits())
@settings(max_examples=150, deadline=None)
def test_a_bundle_mixes_nothing_and_fits(cells, bounds):
    """One path, length and number of dictionary keys; its prompts fit, or are a pair; hosts do not come and go."""
    for bundle in plan(cells, DEPTH, bounds).bundles:
        assert {(c.path, len(c.host)) for c in bundle.cells} == {(bundle.path, bundle.length)}
        assert len({(len(c.host.keys), c.text) for c in bundle.cells}) == 1
        assert Counter(bundle.pending) == Counter(bundle.cells)
        needed = {p.ids for c in bundle.cells for p in (c.host, c.donor) if p is not None}
        each = bounds.per_prompt(bundle.path, bundle.length)
        assert bundle.path == READ or len(needed) <= 2 or len(needed) * each <= bounds.kept
        runs = [one for one, _ in groupby((c.host.ids, c.path == READ and c.host.digest) for c in bundle.cells)]
        assert len(runs) == len(set(runs))


@given(plans(), limits())
@settings(max_examples=150, deadline=None)
def test_a_bundle_keeps_the_cells_of_a_host_together(cells, bounds):
    """So that its prefix runs once. Where its prompts do not fit, those of each of its donors are together."""
    place = {cell: i for i, bundle in enumerate(plan(cells, DEPTH, bounds).bundles) for cell in bundle.cells}
    hosts = defaultdict(list)
    for cell in cells:
        hosts[cell.path, len(cell.host.keys), cell.text, cell.host.digest].append(cell)
    for (path, *_), own in hosts.items():
        host, pairs = own[0].host, defaultdict(list)
        for cell in own:
            pairs[(cell.donor or host).digest].append(cell)
        whole = len({host.digest, *pairs}) <= bounds.prompts(path, len(host))
        for together in [own] if whole else pairs.values():
            assert len({place[cell] for cell in together}) == 1


@given(plans(), limits(), st.sets(st.integers(0, 39)))
@settings(max_examples=150, deadline=None)
def test_what_is_done_drops_out_and_changes_nothing_else(cells, bounds, chosen):
    """So an interrupted run that goes on forms the traces, and so the sums, of one that was not."""
    done = works(cells, chosen)
    after = iter(plan(cells, DEPTH, bounds, done).bundles)
    for before in plan(cells, DEPTH, bounds).bundles:
        steps = (tuple(cell for cell in step if cell.work not in done) for step in before.steps)
        if left := tuple(step for step in steps if step):
            bundle = next(after)
            assert bundle.steps == left
            assert bundle.cells == before.cells
            for name in SHARED:
                assert getattr(bundle, name) == getattr(before, name)
    assert next(after, None) is None


@given(plans(), limits())
@settings(max_examples=50, deadline=None)
def test_halved_limits_still_plan_everything(cells, bounds):
    """Down to one cell at a time."""
    for _ in range(8):
        made = plan(cells, DEPTH, bounds)
        assert Counter(cell for bundle in made.bundles for cell in bundle.pending) == Counter(cells)
        bounds = bounds.halved()
    assert bounds.tokens == 1
    assert all(len(step) == 1 for bundle in made.bundles for step in bundle.steps if bundle.path != READ)


# -- by hand ------------------------------------------------------------------------------------
PLAIN = [prompt(10, first) for first in range(10, 310)]  # without a dictionary
A, B = PLAIN[:2]
LOOSE = Limits(1000, 100_000, lambda path, length: 1000, 1)


def transplants(host: Prompt, donor: Prompt, layers, **more) -> list[Cell]:
    end = {"donor": donor, "where": host.final, "source": host.final}
    return [Cell("transplant", host, layers=(layer,), **{"mode": "outputs", **end, **more}) for layer in layers]


def removals(host: Prompt, layers) -> list[Cell]:
    return [Cell("remove", host, layers=(layer,), mode="zero", outcomes=ANSWER) for layer in layers]


def only(made) -> Bundle:
    assert len(made.bundles) == 1
    return made.bundles[0]


def test_bundles_are_cut_between_hosts_by_hand():
    """Three prompts fit. A with two donors; then B would be a fourth prompt with its donor, so it starts anew."""
    c, d = PLAIN[2:4]
    cells = [*transplants(A, B, (0, 1)), *transplants(c, d, (0, 1)), *transplants(A, c, (0, 1))]
    three, two = (Limits(1000, kept, lambda path, length: 1, 1) for kept in (3, 2))
    bundles = [bundle.cells for bundle in plan(cells, 4, three).bundles]
    assert bundles == [(*cells[:2], *cells[4:]), tuple(cells[2:4])]
    bundles = [bundle.cells for bundle in plan(cells, 4, two).bundles]  # A and its donors do not fit: pair by pair
    assert bundles == [tuple(cells[:2]), tuple(cells[4:]), tuple(cells[2:4])]


# -- equal tokens, other spans ------------------------------------------------------------------
ENTRIES = prompt(10, 2)  # with a dictionary
MOVED = twin(ENTRIES)


def test_equal_tokens_with_other_spans_are_two_hosts():
    cells = [cell for host in (ENTRIES, MOVED, A) for cell in removals(host, (0, 1))]
    assert hosts_of(cells) == [ENTRIES, MOVED, A]
    assert hosts_of(reversed(cells)) == [A, MOVED, ENTRIES]
    assert hosts_of([]) == []


def test_both_hosts_of_equal_tokens_have_their_residual_stream_kept():
    """Their attention is read below the first touched layer, and their entries lie elsewhere."""
    cells = [replace(cell, watch=((1, 0),)) for host in (ENTRIES, MOVED) for cell in removals(host, (2, 3))]
    made = plan(cells, 4, LOOSE)
    assert (only(made).entered, only(made).starts) == ([ENTRIES, MOVED], [2, 3])
    assert made.layer_tokens == 2 * 10 * 3 + 2 * 10 * (2 + 1)
    assert plan(removals(ENTRIES, (3,)) + removals(MOVED, (3,)), 4, LOOSE).bundles[0].entered == []


def test_both_hosts_of_equal_tokens_are_read():
    cells = [Cell("none", host, watch=((2, 0),)) for host in (ENTRIES, MOVED, ENTRIES)]
    made = plan(cells, 4, LOOSE)
    assert (made.layer_tokens, made.traces) == (2 * 10 * 3, 1)


def test_hosts_of_equal_tokens_are_not_read_in_one_forward_when_only_one_fits():
    cells = [Cell("none", host, watch=((2, 0),)) for host in (ENTRIES, MOVED)]
    one = replace(LOOSE, tokens=10)
    assert [bundle.cells for bundle in plan(cells, 4, one).bundles] == [(cells[0],), (cells[1],)]


# -- models whose runs do not continue from a cache ---------------------------------------------
JAMBA = "jamba does not continue exactly from a cache"


def test_final_cells_of_a_family_that_does_not_continue_run_as_full_forwards():
    kept = [*removals(A, (1,)), Cell("none", A, watch=((3, 0),))]
    final = transplants(A, B, (0, 1), labels={"pair": 3})
    final.append(Cell("query", A, layers=(3,), donor=B, where=(9,), source=(9,)))
    moved, note = without_continuation([final[0], *kept, *final[1:]], JAMBA)
    assert moved[1:3] == kept
    assert [cell.path for cell in moved] == [FULL, FULL, READ, FULL, FULL]
    for before, after in zip(final, [moved[0], *moved[3:]]):
        assert after.columns() == {**before.columns(), "path": FULL}
        assert (after.where, after.source, after.outcomes) == (before.where, before.source, before.outcomes)
    assert note == "; jamba does not continue exactly from a cache: 3 final-position cells run as full forwards"
    assert str(plan(moved, 4, LOOSE, note=note)).endswith(note)
    assert without_continuation(kept, JAMBA) == (kept, "")  # nothing moved, nothing to note


def test_a_state_transplant_is_refused_where_the_state_is_not_in_the_cache():
    cells = [*removals(A, (0,)), Cell("state", A, layers=(1,), donor=B, mode="recurrent")]
    with pytest.raises(RunError, match=r"^jamba does not continue exactly from a cache: state transplants do not run"):
        without_continuation(cells, JAMBA)
