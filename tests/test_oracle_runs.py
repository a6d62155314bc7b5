"""Several edits at once, and donors' runs under edits of their own, against whole forwards with plain torch hooks.

Every verb is shown to move the answer, to be nothing when the donor is the host, and to be what the oracle says, on the
one-token path and on whole prompts. The dualities of the paper's query-key intervention hold exactly.
"""

from __future__ import annotations

import pytest

from encode_address.errors import RunError
from encode_address.models.loading import GROUND_TRUTH
from encode_address.run.cells import FINAL, FULL, PATCHES, Cell, Edit
from encode_address.run.engine import Engine
from tests.oracle_cases import MODELS, PAIRS, agree, case, mean_outputs, moved, patched, untouched
from tests.oracle_runs import Runs, expect_runs

INSIDE = ("query", "key", "value", "gate")


@pytest.fixture(params=MODELS)
def one(request):
    return case(request.param)


def gated(one) -> bool:
    assert one.model.gated == (one.model.family.name == "qwen3_5")
    return one.model.gated


def verbs(one) -> list[str]:
    return [verb for verb in PATCHES if verb != "gate" or gated(one)]


def layers_for(one, verb: str) -> tuple[int, ...]:
    return one.model.softmax_layers[-1:] if verb in INSIDE else one.units[1][1]


def compare(one, cells):
    """Run cells, of whatever paths, and compare every row with the oracle's."""
    table = one.engine.run(cells)
    runs = Runs(one.oracle, lambda: mean_outputs(one.name))
    # A trained model amplifies rounding, the more so without a block: one prompt at a time has other sums than a batch.
    return table, agree(one, cells, table, expect_runs(runs, cells), 1e-4)


@pytest.mark.parametrize("path", [FINAL, FULL])
def test_every_verb_at_the_last_position(one, path):
    _, rest = compare(one, untouched(one, path, one.watch))
    for verb in verbs(one):
        layers = layers_for(one, verb)
        _, changed = compare(one, patched(one, path, layers, "dissociation", verb=verb, watch=one.watch))
        ignored = ("key", "value") if one.name in GROUND_TRUTH else ()  # a trained reader does not read the last token
        if verb not in ignored:
            assert moved(changed, rest) > 1e-3, verb
        _, same = compare(one, patched(one, path, layers, "host", verb=verb))
        assert moved(same, rest) <= 1e-4, verb


def test_one_head_of_the_query_and_of_the_gate(one):
    softmax = one.model.softmax_layers[-1:]
    for verb in ("query", "gate") if gated(one) else ("query",):
        for path in (FINAL, FULL):
            compare(one, patched(one, path, softmax, "dissociation", verb=verb, head=1))


def test_a_gate_that_is_not_there_is_one_clear_line():
    one = case("granite")
    with pytest.raises(RunError, match="GraniteMoeHybridForCausalLM: its softmax layers have no output gate to edit"):
        one.engine.run(patched(one, FINAL, one.model.softmax_layers[-1:], verb="gate"))


def test_every_verb_at_earlier_positions(one):
    for verb in verbs(one):
        if verb not in ("query", "gate"):
            where = {"where": lambda prompt: (*prompt.span("entry 1"), *prompt.final)}
            compare(one, patched(one, FULL, layers_for(one, verb), "dissociation", verb=verb, **where))


def answers(item) -> tuple:
    return ("redirected", item.host.choices[item.donor_index]), ("kept", item.host.answer)


def removals(one, mode: str) -> list[Cell]:
    cells = []
    for item in one.questions:
        for name, where in (("final", item.host.final), ("entry", item.host.span("entry 0")), ("all", ())):
            for block, layers in one.units:
                labels = {"pair": item.pair, "position": name, "block": block}
                cell = Cell(
                    "remove", item.host, layers=layers, where=where, mode=mode, outcomes=answers(item), labels=labels
                )
                assert cell.path == (FINAL if name == "final" else FULL)
                cells.append(cell)
    return cells


@pytest.mark.parametrize("mode", ["zero", "mean"])
def test_removal_at_some_positions(one, mode):
    compare(one, removals(one, mode))


def test_whole_layers_removed(one):
    softmax, outcome = one.model.softmax_layers[0], answers
    cells = [
        Cell(
            "remove",
            item.host,
            layers=layers,
            mode="layer",
            outcomes=outcome(item),
            watch=watch,
            labels={"pair": item.pair},
        )
        for item in one.questions
        for layers, watch in (((0,), one.watch), (one.units[1][1], one.watch), ((softmax,), ()))
    ]
    compare(one, cells)
    with pytest.raises(RunError, match="a removed layer has no attention to watch"):
        Cell("remove", one.questions[0].host, layers=(softmax,), mode="layer", watch=((softmax, 0),))
    with pytest.raises(RunError, match="a whole layer is removed at all positions"):
        Cell("remove", one.questions[0].host, layers=(0,), mode="layer", where=(1,))


def test_every_linear_head_removed(one):
    layer = one.model.linear_layers[-1]
    cells = [
        Cell("heads", item.host, layers=(layer,), head=head, outcomes=answers(item), labels={"pair": item.pair})
        for item in one.questions
        for head in range(one.model.heads_of(layer))
    ]
    table, _ = compare(one, cells)
    assert table.groupby("pair")["margin"].nunique().min() > 1


def test_a_truncated_model_under_edits(one):
    last = one.model.softmax_layers[0]
    layers = one.units[0][1]
    cells = [
        Cell(
            "truncate",
            item.host,
            layers=(last,),
            also=(edit,),
            outcomes=answers(item),
            labels={"pair": item.pair, "e": i},
        )
        for item in one.questions
        for i, edit in enumerate(
            [
                Edit("remove", layers),
                Edit("transplant", layers, item.host.final, item.dissociation, item.host.final),
            ]
        )
    ]
    table, _ = compare(one, cells)
    plain = [
        Cell("truncate", i.host, layers=(last,), outcomes=answers(i), labels={"pair": i.pair}) for i in one.questions
    ]
    intact = one.engine.run(plain)
    assert moved(table["margin"][::2], intact["margin"]) > 1e-3


def compounds(one) -> list[Cell]:
    """The interventions of the paper's circuit experiments, on every question swap."""
    softmax, (block, later) = one.model.softmax_layers[-1], (one.units[1][1], one.units[2][1])
    early, cells = one.units[0][1], []
    for item in one.questions:
        host, donor, end = item.host, item.dissociation, item.host.final
        everywhere = tuple(range(len(host)))
        moved_block = Edit("transplant", later, end, donor, end)
        removed = (Edit("remove", block),)

        def hold(verb: str, under=(), layers=(softmax,), host=host, end=end) -> Edit:
            return Edit(verb, layers, end, host, end, under=under)

        makes = {
            # the Address from a donor in which another block was removed (upstream)
            "upstream": Cell("transplant", host, layers=later, where=end, donor=donor, source=end, under=removed),
            # the reader's query held at the host's while the Address is transplanted, and taken alone (mediation)
            "query held": Cell("transplant", host, layers=block, where=end, donor=donor, source=end, also=(hold("query"),)),
            "query alone": Cell("query", host, layers=(softmax,), where=end, donor=host, source=end, under=(moved_block,)),
            "key and value held": Cell(
                "transplant", host, layers=block, where=end, donor=donor, source=end, also=(hold("key"), hold("value"))
            ),
            # queries and keys of a run without a block, in the intact model, and the other way round (query-key)
            "keys without": Cell(
                "key", host, layers=(softmax,), where=everywhere, donor=host, source=everywhere, under=removed
            ),
            "both without": Cell(
                "key", host, layers=(softmax,), where=everywhere, donor=host, source=everywhere, under=removed,
                also=(hold("query", removed),),
            ),
            "rescued": Cell("query", host, FULL, (softmax,), end, host, end, also=removed),
            # an earlier layer's output from the transplanted run, the chain of readers (scaling)
            "reader alone": Cell(
                "transplant", host, layers=one.model.softmax_layers[:1], where=end, donor=host, source=end,
                under=(Edit("transplant", early, end, donor, end),),
            ),
            "between held": Cell(
                "transplant", host, layers=early, where=end, donor=donor, source=end,
                also=(hold("transplant", layers=(*one.model.softmax_layers[:1], *block)),),
            ),
            # two donors deep
            "twice": Cell(
                "query", host, layers=(softmax,), where=end, donor=host, source=end,
                under=(Edit("transplant", later, end, donor, end, under=removed),),
            ),
            "two edits": Cell("none", host, also=(Edit("remove", block), Edit("heads", (softmax,), head=0))),
        }  # fmt: skip
        for name, cell in makes.items():
            given = {"outcomes": answers(item), "watch": one.watch, "labels": {"pair": item.pair, "what": name}}
            fields = {f: getattr(cell, f) for f in cell.__dataclass_fields__ if f not in given}
            cells.append(Cell(**fields | {"path": cell.path if cell.path == FULL else ""}, **given))
    return cells


def test_edits_of_hosts_and_of_donors(one):
    cells = compounds(one)
    table, _ = compare(one, cells)
    assert {cell.path for cell in cells} == {FINAL, FULL}
    intact = one.engine.run(untouched(one, FULL))["margin"]
    for what, rows in table.groupby("what"):
        assert len(rows) == PAIRS
        assert moved(rows["margin"], intact) > 1e-4, f"{one.name}: {what} does nothing"


def test_a_plan_of_them_says_what_it_takes(one):
    engine = Engine(one.model, one.text, batch_tokens=400)
    cells = compounds(one)
    planned = engine.plan(cells)
    engine.run(cells)
    assert (engine.tokens, engine.traces) == (planned.tokens, planned.traces)
    assert engine.tokens >= engine.floor


def test_rescue_and_necessity_are_dual(one):
    """Restoring the query in a run without a block, and putting that run's keys into the intact one, read the same
    attention; restoring both is the intact attention (paper section 3.8)."""
    softmax, block = one.model.softmax_layers[-1], one.units[2][1]
    watch = tuple((softmax, head) for head in range(one.model.heads))

    def rows(**kw):
        cells = []
        for item in one.questions:
            host, end, everywhere = item.host, item.host.final, tuple(range(len(item.host)))
            places = {"query": end, "key": everywhere}
            fields = {"layers": (softmax,), "donor": host, "outcomes": answers(item), "watch": watch}
            verb, under, also = kw["verb"], kw.get("under", ()), kw.get("also", ())
            more = tuple(
                edit
                if edit.verb == "remove"
                else Edit(edit.verb, (softmax,), places[edit.verb], host, places[edit.verb])
                for edit in also
            )
            cells.append(
                Cell(verb, host, FULL, where=places[verb], source=places[verb], under=under, also=more, **fields)
            )
        table = one.engine.run(
            [
                Cell(**{f: getattr(c, f) for f in c.__dataclass_fields__} | {"labels": {"pair": i}})
                for i, c in enumerate(cells)
            ]
        )
        return table[[f"attn.L{softmax}H{head}" for head in range(one.model.heads)]].to_numpy().tolist()

    removed = Edit("remove", block)
    rescued = rows(verb="query", also=(removed,))
    inserted = rows(verb="key", under=(removed,))
    both = rows(verb="query", also=(removed, Edit("key", (softmax,), (0,), None)))
    intact = rows(verb="query")
    flat = lambda table: [x for row in table for head in row for x in head]  # noqa: E731
    assert flat(rescued) == pytest.approx(flat(inserted), abs=1e-5)
    assert flat(both) == pytest.approx(flat(intact), abs=1e-5)
    assert max(abs(a - b) for a, b in zip(flat(rescued), flat(intact))) > 1e-6
