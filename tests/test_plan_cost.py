"""What a plan says it will cost: that of its traces, and never less than the floor."""

from collections import defaultdict
from dataclasses import replace
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from encode_address.run.cells import FINAL, FULL, READ, Cell
from encode_address.run.plan import Limits, plan
from tests.test_cells import prompt
from tests.test_plan import ANSWER, DEPTH, LOOSE, PLAIN, A, B, limits, only, plans, removals, transplants, works

UNLIMITED = Limits(1 << 60, 1 << 60, lambda path, length: 1, 1)


def least(cells, depth: int) -> int:
    """Tokens x layers below which no bundling can go: each prompt once, and no further than one of its cells needs."""
    once: dict[tuple, int] = defaultdict(int)
    starts: dict[tuple, list[int]] = defaultdict(list)
    total = 0
    for cell in cells:
        host, tokens = cell.host, 1 if cell.path == FINAL else len(cell.host)
        if cell.path == READ:
            last = max([*cell.layers, *(layer for layer, _ in cell.watch)])
            once[READ, host.ids] = max(once[READ, host.ids], tokens * (1 + last))
            continue
        total += tokens * depth
        if cell.path == FINAL:
            once |= {(FINAL, p.ids[:-1]): (len(host) - 1) * depth for p in (host, cell.donor) if p is not None}
        else:
            starts[host.ids].append(len(host) * max(0, min(cell.layers, default=0)))
        own = [cell.donor] if cell.donor is not None and cell.intervention != "state" else []
        for p in own + ([host] if cell.mode == "random" else []):
            once[cell.path, "own", p.ids] = max(once[cell.path, "own", p.ids], tokens * (1 + max(cell.layers)))
    return total + sum(once.values()) - sum(sum(s) - max(s) for s in starts.values())


PAIRS = [(prompt(6, a), prompt(6, b)) for a, b in ((0, 1), (0, 3), (1, 0), (4, 4), (3, 1), (5, 6))]
EDITS = ["transplant", "random", "state", "query", "key", "remove", "truncate"]


def uniform(pairs, edits, layers) -> list[Cell]:
    """What experiments run: the same edits of the same layers on every pair."""
    cells = []
    for edit, touched, (host, donor) in product(edits, layers, pairs):
        end = {"donor": donor, "where": host.final, "source": host.final}
        if edit in ("remove", "truncate"):
            cells.append(Cell(edit, host, layers=touched, mode="zero" if edit == "remove" else "", outcomes=ANSWER))
        elif edit == "state":
            cells.append(Cell(edit, host, layers=touched, donor=donor, mode="both"))
        else:
            verb, mode = ("transplant", edit) if edit == "random" else (edit, "")
            cells.append(Cell(verb, host, layers=touched, mode=mode, **end))
    return list({cell.work: cell for cell in cells}.values())


@given(
    st.lists(st.sampled_from(PAIRS), min_size=1, unique=True),
    st.lists(st.sampled_from(EDITS), min_size=1, unique=True),
    st.lists(st.sampled_from([(0,), (1,), (3,), (5,)]), min_size=1, unique=True),
    limits(),
)
@settings(max_examples=150, deadline=None)
def test_limits_never_make_a_plan_cheaper_and_without_them_it_costs_its_floor(pairs, edits, layers, bounds):
    cells = uniform(pairs, edits, layers)
    free, made = plan(cells, DEPTH, UNLIMITED), plan(cells, DEPTH, bounds)
    assert free.tokens == free.floor == made.floor == -(-least(cells, DEPTH) // DEPTH)
    assert made.tokens >= made.floor
    more = plan(cells, DEPTH, bounds, shared=(60, 7))
    assert (more.tokens, more.floor) == (made.tokens + 60 // DEPTH, made.floor + 60 // DEPTH)
    assert (more.traces, more.cells) == (made.traces + 7, made.cells)


@given(plans(), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_the_order_of_the_cells_costs_nothing(cells, rng):
    shuffled = rng.sample(cells, len(cells))
    one, other = (plan(some, DEPTH, UNLIMITED) for some in (cells, shuffled))
    for name in ("layer_tokens", "floor", "traces", "cache_bytes", "cells"):
        assert getattr(one, name) == getattr(other, name)


@given(plans(), limits())
@settings(max_examples=150, deadline=None)
def test_steps_enter_late_exactly_where_that_saves(cells, bounds):
    for bundle in plan(cells, DEPTH, bounds).bundles:
        if bundle.path == FULL:
            late = [cell for cell in bundle.cells if min(cell.layers, default=0) > 0]
            hosts, tops = {cell.host.digest for cell in late}, [min(cell.layers) for cell in late]
            plain = len(bundle.cells) * DEPTH
            entering = len(hosts) * max(tops, default=0) + plain - sum(tops)
            captured = sum(len(runs) * (1 + last) for _, runs, last in bundle.stages)
            assert bundle.layer_tokens(DEPTH) == bundle.length * (captured + min(plain, entering))
            assert {host.digest for host in bundle.entered} == (hosts if entering < plain else set())
            assert bundle.starts == (sorted(set(tops)) if entering < plain else [])


# -- the floor ----------------------------------------------------------------------------------
@given(plans(), limits(), st.sets(st.integers(0, 39)))
@settings(max_examples=200, deadline=None)
def test_the_floor_is_each_prompt_run_once(cells, bounds, chosen):
    """Of what is left to do, and no plan is cheaper."""
    done = works(cells, chosen)
    pending = [cell for cell in cells if cell.work not in done]
    made = plan(cells, DEPTH, bounds, done)
    assert made.floor_layer_tokens == least(pending, DEPTH) <= made.layer_tokens
    finished = plan(cells, DEPTH, bounds, {cell.work for cell in cells})
    assert finished.floor_layer_tokens == finished.layer_tokens == 0


def test_the_floor_of_a_resumed_plan_is_that_of_what_is_left():
    """The traces stay as they were, and so run more of a donor, or more hosts, than what is left needs."""
    cells = transplants(A, B, (0, 1, 2))
    made = plan(cells, 4, LOOSE, {cells[2].work})
    assert made.floor_layer_tokens == 2 * 9 * 4 + 2 + 2 * 4  # the donor's last token up to layer 1
    assert made.layer_tokens == 2 * 9 * 4 + 3 + 2 * 4  # up to layer 2
    reads = [Cell("none", host, watch=((2, 0),)) for host in (A, B)]
    made = plan(reads, 4, LOOSE, {reads[1].work})
    assert (made.floor_layer_tokens, made.layer_tokens) == (10 * 3, 2 * 10 * 3)
    edits = removals(A, (1, 2, 3))
    made = plan(edits, 4, LOOSE, {cell.work for cell in edits[1:]})
    assert (made.floor_layer_tokens, made.layer_tokens) == (10 * 4, 10 * (3 + 3))  # nothing to share any more


def test_the_floor_of_an_uneven_plan_enters_each_host_where_that_saves():
    """A is edited twice, B once: kept for both it would save nothing, kept for A it saves layer 0 once."""
    made = plan(removals(A, (1, 2)) + removals(B, (3,)), 4, LOOSE)
    assert (made.layer_tokens, only(made).entered) == (10 * 3 * 4, [])
    assert made.floor_layer_tokens == 10 * 2 + 10 * (3 + 2) + 10 * 4
    made = plan(transplants(A, B, (0,)) + transplants(B, A, (3,)), 4, LOOSE)  # A's last token to 3, B's to 0
    assert made.layer_tokens == 2 * 9 * 4 + 2 * 4 + 2 * 4
    assert made.floor_layer_tokens == 2 * 9 * 4 + (1 + 4) + 2 * 4


def test_the_floor_does_not_rise_when_a_donor_runs_in_two_bundles():
    """Two prompts fit: the donor of both hosts, and its prefix, run twice."""
    c = PLAIN[2]
    cells = transplants(A, c, (0,)) + transplants(B, c, (0,))
    made = plan(cells, 4, Limits(1000, 2, lambda path, length: 1, 1))
    assert made.layer_tokens == 4 * 9 * 4 + 2 * 1 + 2 * 4
    assert made.floor_layer_tokens == plan(cells, 4, LOOSE).layer_tokens == 3 * 9 * 4 + 1 + 2 * 4


# -- by hand ------------------------------------------------------------------------------------
def test_a_transplant_of_three_blocks_at_the_final_position_by_hand():
    """Two prefixes of 9 tokens through 4 layers, the donor's last token up to layer 2, three tokens of their own."""
    made = plan(transplants(A, B, (0, 1, 2)), 4, LOOSE)
    assert made.layer_tokens == 2 * 9 * 4 + 1 * 3 + 3 * 4 == 87
    assert (made.cells, made.tokens, made.floor) == (3, 22, 22)
    assert made.traces == 3  # prefixes, donor, cells
    assert made.cache_bytes == (2 + 3) * 1000
    assert only(made).prefixes == [A.ids[:-1], B.ids[:-1]]


def test_pairs_the_other_way_round_share_their_prefixes():
    """The same two prompts as host and donor, and the hosts themselves: no prefix more."""
    both = transplants(A, B, (0, 1, 2)) + transplants(B, A, (0, 1, 2))
    both += [Cell("none", host, FINAL, outcomes=ANSWER) for host in (A, B)]
    assert plan(both, 4, LOOSE).layer_tokens == 2 * 9 * 4 + 2 * 3 + 8 * 4
    last = prompt(10, 10, last=91)  # A but for its last token
    assert plan(transplants(A, last, (0,)), 4, LOOSE).layer_tokens == 1 * 9 * 4 + 1 * 1 + 1 * 4


def test_what_a_state_transplant_and_noise_need_of_the_host_by_hand():
    """A state comes with its prefix's cache; noise is added to the host's own output, so its last token runs too."""
    state = Cell("state", A, layers=(1,), donor=B, mode="recurrent")
    assert plan([state], 4, LOOSE).layer_tokens == 2 * 9 * 4 + 4
    assert plan(transplants(A, B, (1,), mode="random"), 4, LOOSE).layer_tokens == 2 * 9 * 4 + 2 * 2 + 4


def test_removal_enters_late_by_hand():
    """Layers 0-2 once for 10 tokens, kept before 1, 2 and 3; then 3, 2 and 1 layers."""
    made = plan(removals(A, (1, 2, 3)), 4, LOOSE)
    assert made.layer_tokens == 10 * 3 + 10 * (3 + 2 + 1) == 90
    assert (made.tokens, made.floor, made.traces, made.cache_bytes) == (23, 23, 4, 0)
    assert (only(made).entered, only(made).starts) == ([A], [1, 2, 3])


def test_removal_does_not_enter_late_where_that_saves_nothing():
    """Layers 0-2 for a single removal at layer 3: kept for nobody else."""
    made = plan(removals(A, (0, 3)), 4, LOOSE)
    assert (made.tokens, only(made).entered, only(made).starts) == (20, [], [])
    assert plan(removals(A, (3,)), 4, LOOSE).tokens == 10
    assert plan(removals(A, (2, 3)), 4, LOOSE).layer_tokens == 10 * 3 + 10 * (2 + 1)


def test_a_transplant_at_an_earlier_position_by_hand():
    """The donor up to layer 2, layers 0-1 of the host once, then 3 and 2 of 4 layers."""
    made = plan(transplants(A, B, (1, 2), where=(3,), source=(3,)), 4, LOOSE)
    assert made.layer_tokens == 10 * 3 + 10 * 2 + 10 * (3 + 2)
    assert made.traces == 4  # donor, host, two edits


def test_truncation_at_every_layer_is_one_forward():
    cells = [Cell("truncate", A, layers=(layer,), outcomes=ANSWER) for layer in range(4)]
    cells += [Cell("none", A, watch=((3, head),)) for head in range(8)]
    made = plan(cells, 4, LOOSE)
    assert (made.cells, made.tokens, made.floor, made.traces) == (12, 10, 10, 1)


def test_reads_stop_after_the_last_layer_that_is_read():
    cells = [Cell("truncate", host, layers=(1,), outcomes=ANSWER) for host in (A, B)]
    cells.append(Cell("none", A, watch=((2, 0),)))
    made = plan(cells, 4, LOOSE)
    assert (made.layer_tokens, made.traces, only(made).last_read) == (2 * 10 * 3, 1, 2)
    cost = [plan(cells, 4, LOOSE, {cells[done].work}).layer_tokens for done in (1, 2)]
    assert cost == [2 * 10 * 3, 2 * 10 * 2]  # every host of the bundle runs, that of a finished cell too


def test_traces_are_counted_as_the_limits_cut_them():
    """25 tokens: two prefixes at a time. 5,000 bytes kept: five prompts to a bundle, five rows of one token."""
    cells = [cell for i in range(5) for cell in transplants(PLAIN[i], PLAIN[(i + 1) % 5], (0, 1))]
    tight = Limits(25, 5_000, lambda path, length: 1000, 1)
    assert [len(step) for step in only(plan(cells, 4, tight)).steps] == [5, 5]
    assert plan(cells, 4, tight).traces == 3 + 1 + 2
    assert plan(cells, 4, tight).cache_bytes == (5 + 5) * 1000
    assert [len(step) for step in only(plan(removals(A, (0,)) + removals(B, (0,)), 4, tight)).steps] == [2]


def test_a_text_costs_more_rows_than_an_answer():
    """All logits of a text are needed, and memory for them."""
    cells = [Cell("none", chunk, text=True) for chunk in PLAIN[:4]]
    cells += [Cell("none", chunk, outcomes=ANSWER) for chunk in PLAIN[:4]]
    bounds = Limits(40, 100, lambda path, length: 1, 2)
    assert [[len(step) for step in bundle.steps] for bundle in plan(cells, 4, bounds).bundles] == [[2, 2], [4]]


def test_a_step_of_one_token_rows_ends_at_512():
    cells = [cell for host in PLAIN for cell in transplants(host, A, range(4))]
    made = plan(cells, 4, UNLIMITED)
    assert [len(step) for step in only(made).steps] == [512, 512, 176]
    assert str(made).startswith("1,200 cells, 3,901 tokens of forward, floor 3,901 (5 traces, ")


def test_the_line_that_a_dry_run_prints():
    made = plan([], 4, LOOSE)
    assert str(made) == "0 cells, 0 tokens of forward, floor 0 (0 traces, 0 MB of cached state at most)"
    made = replace(made, cells=1200, shared=(14_300 * 4, 7), floor_layer_tokens=13_900 * 4, note="; a note")
    assert str(made).startswith("1,200 cells, 14,300 tokens of forward, floor 13,900 (7 traces, 0 MB")
    assert str(made).endswith("at most); a note")
    big = Limits(1000, 1 << 40, lambda path, length: 250_000_000, 1)
    line = "3 cells, 22 tokens of forward, floor 22 (3 traces, 1,250 MB of cached state at most)"
    assert str(plan(transplants(A, B, (0, 1, 2)), 4, big)) == line
