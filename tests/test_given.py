"""Given values (another model's, a map's) against plain torch hooks, on both paths; what is refused; what it costs."""

from __future__ import annotations

import pytest
import torch

from encode_address.errors import RunError
from encode_address.models.loading import GROUND_TRUTH
from encode_address.run import edits as edits_module
from encode_address.run.cells import FINAL, FULL, Cell
from encode_address.run.engine import Engine
from encode_address.run.given import Given
from encode_address.run.store import Store
from tests import tiny
from tests.oracle import put
from tests.oracle_cases import agree, case, ids_of, moved, patched, untouched

NAMES = ("qwen3_5_text", "granite", *GROUND_TRUTH)


@pytest.fixture(params=NAMES)
def one(request):
    return case(request.param)


def values(layers, positions: int, width: int, seed: int) -> Given:
    generator = torch.Generator().manual_seed(seed)
    return Given({layer: torch.randn(positions, width, generator=generator) for layer in layers})


def given_cells(one, path: str, layers, where=lambda prompt: prompt.final) -> list[Cell]:
    """Every host with values of its own at `where`."""
    width = one.model.config.hidden_size
    out = []
    for seed, item in enumerate(one.questions):
        places = where(item.host)
        out.append(
            Cell(
                "transplant",
                item.host,
                path=path,
                layers=layers,
                where=places,
                given=values(layers, len(places), width, seed),
                outcomes=(("redirected", item.host.choices[item.donor_index]), ("kept", item.host.answer)),
                watch=one.watch,
                labels={"pair": item.pair},
            )
        )
    return out


def expect_given(one, cells) -> list[dict]:
    """Each cell alone: a whole forward in which hooks put the values into the mixers' outputs."""
    out = []
    for cell in cells:
        ids = ids_of([cell.host])
        edits = {layer: put(rows[None], [cell.where]) for layer, rows in cell.given.values.items()}
        seen = {"logits": one.oracle.logits(ids, edits)[0]}
        layers = sorted({layer for layer, _ in cell.watch})
        attention = one.oracle.attention(ids, layers, edits)
        out.append({**seen, **{layer: attention[layer][0] for layer in layers}})
    return out


@pytest.mark.parametrize("path", [FINAL, FULL])
def test_given_values_are_what_hooks_make_of_them(one, path):
    layers = one.units[1][1]
    cells = given_cells(one, path, layers)
    table = one.engine.run(cells)
    margins = agree(one, cells, table, expect_given(one, cells), 1e-5 if one.name not in GROUND_TRUTH else 1e-4)
    rest = one.engine.run(untouched(one, path))["margin"]
    assert moved(margins, rest) > 1e-3
    assert set(table["mode"]) == {"given"}
    assert table["donor_prompt"].nunique() == len(cells)
    assert list(table["donor_prompt"]) == [cell.given.digest for cell in cells]


def test_at_several_positions_on_the_full_path(one):
    cells = given_cells(one, FULL, one.units[1][1], lambda prompt: (*prompt.span("entry 1"), *prompt.final))
    agree(one, cells, one.engine.run(cells), expect_given(one, cells), 1e-4)


@pytest.mark.parametrize("path", [FINAL, FULL])
def test_a_models_own_values_given_equal_the_transplant_of_its_run(one, path):
    """What the engine takes from a donor's run itself, and the same numbers as plain tensors."""
    layers = one.units[1][1]
    lent = patched(one, path, layers)
    taken = one.oracle.outputs(ids_of([cell.donor for cell in lent]), layers)
    cells = [
        Cell(
            "transplant", c.host, path=path, layers=layers, where=c.where, outcomes=c.outcomes, labels={"pair": i},
            given=Given({layer: taken[layer][i, -1:].clone() for layer in layers}),
        )
        for i, c in enumerate(lent)
    ]  # fmt: skip
    same = one.engine.run(cells)["margin"] - one.engine.run(lent)["margin"]
    assert same.abs().max() < 1e-3


def test_given_and_lent_values_share_a_batch_and_need_no_run(one):
    layers = one.units[1][1]
    lent, cells = patched(one, FINAL, layers), given_cells(one, FINAL, layers)
    table = Engine(one.model).run(lent + cells)
    apart = [Engine(one.model).run(some)["margin"].to_numpy() for some in (lent, cells)]
    assert table["margin"].to_numpy() == pytest.approx([*apart[0], *apart[1]], abs=1e-3)
    engine = Engine(one.model)
    plan = engine.plan(cells)
    depth, length = len(one.model.layout.kinds), len(cells[0].host)
    assert plan.tokens == plan.floor == len(cells) * length  # the hosts' prefixes, and a token each: no donor runs
    engine.run(cells)
    assert engine.tokens == plan.tokens
    assert engine.layer_tokens == len(cells) * length * depth


def test_rows_are_stored_by_the_digest(tmp_path):
    one = case("granite")
    cells = given_cells(one, FINAL, one.units[1][1])
    engine = Engine(one.model)
    with Store(tmp_path) as store:
        engine.run(cells, store)
        assert engine.plan(given_cells(one, FINAL, one.units[1][1]), store.keys()).cells == 0
        other = values(one.units[1][1], 1, one.model.config.hidden_size, 99)
        again = Cell("transplant", cells[0].host, layers=cells[0].layers, where=cells[0].where, given=other)
        assert engine.plan([again], store.keys()).cells == 1


def test_the_digest_is_of_the_values_unless_it_is_named():
    a, b = values((1, 2), 1, 4, 0), values((1, 2), 1, 4, 0)
    assert a.digest == b.digest != values((1, 2), 1, 4, 1).digest
    assert Given({2: a.values[1], 1: a.values[2]}).digest != a.digest
    assert Given(a.values, "map 1 of prompt 2").digest == "map 1 of prompt 2"


def test_a_write_that_does_not_land_is_an_error(monkeypatch):
    one = case("granite")
    monkeypatch.setattr(edits_module, "transplant", lambda mixers, donor, positions, rows: None)
    for path in (FINAL, FULL):
        with pytest.raises(RunError, match="did not fire: what transplant given at layers"):
            one.engine.run(given_cells(one, path, one.units[1][1]))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layers": (1, 2)}, "those of the layers that are patched"),
        ({"where": (4, 5)}, "a row for each patched position"),
        ({"mode": "outputs"}, "of the mode given"),
        ({"source": (5,)}, "no donor and no source"),
        ({"intervention": "input"}, "input has no mode"),
        ({"intervention": "none", "layers": ()}, "those of the layers that are patched"),
        ({"given": None, "mode": "given"}, "of the mode given"),
        ({"where": ()}, "a row for each patched position"),
    ],
)
def test_what_makes_no_sense_is_refused(changes, said):
    host = tiny.questions(1)[0].host
    plain = {"intervention": "transplant", "host": host, "layers": (1,), "where": (5,), "path": FULL}
    Cell(**plain, given=values((1,), 1, 4, 0))
    with pytest.raises(RunError, match=said):
        Cell(**{**plain, "given": values((1,), 1, 4, 0), **changes})


def test_given_values_have_no_donor():
    item = tiny.questions(1)[0]
    with pytest.raises(RunError, match="no donor and no source"):
        Cell("transplant", item.host, layers=(1,), where=(5,), donor=item.donor, given=values((1,), 1, 4, 0))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({1: torch.full((1, 4), float("nan"))}, "NaN or infinite"),
        ({1: torch.full((1, 4), float("inf"))}, "NaN or infinite"),
        ({1: torch.zeros(4)}, "positions, d_model"),
        ({1: torch.zeros(1, 4), 2: torch.zeros(2, 4)}, "positions, d_model"),
        ({}, "positions, d_model"),
    ],
)
def test_values_that_are_none_are_refused(rows, said):
    with pytest.raises(RunError, match=said):
        Given(rows)
