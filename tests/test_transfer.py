"""Output transplant between two models: against plain hooks and scikit-learn, its controls, what its rows say, what is refused."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.linear_model import Ridge
from transformers import AutoModelForCausalLM

import encode_address as ea
from encode_address import figures, maps
from encode_address.cross import transferred
from encode_address.cross.design import Asked
from encode_address.cross.outputs import final_outputs
from encode_address.cross.transfer import dry_run, transfer
from encode_address.cross.transferred import whole
from encode_address.cross.transplants import CONDITIONS, Site
from encode_address.errors import NameNotFound, RunError, TaskError
from encode_address.figures import transfer as figure
from encode_address.metrics import select
from encode_address.models.loading import BUNDLED_DIR
from encode_address.run.cells import EMBED
from encode_address.run.engine import Engine
from tests.oracle import Oracle, put
from tests.oracle_cases import ids_of

DONOR, HOST, LAYERS = "tiny-gdn", "tiny-mamba2", (4, 5, 6)
SMALL = {"source": "G2", "target": "G2", "n": 6, "fit": 60, "seeds": 2}


@pytest.fixture(scope="module")
def models():
    return ea.load(DONOR, device="cpu"), ea.load(HOST, device="cpu")


@pytest.fixture(scope="module")
def small(models, tmp_path_factory):
    return transfer(*models, **SMALL, out=tmp_path_factory.mktemp("transfer"))


@pytest.fixture(scope="module")
def oracles():
    modules = {name: AutoModelForCausalLM.from_pretrained(BUNDLED_DIR / name) for name in (DONOR, HOST)}
    return {name: Oracle(module, name) for name, module in modules.items()}


def asked(models, **changes) -> Asked:
    given = {**SMALL, "variants": None, "seed": 0, "quick": False, "text": None, "pool": "A", **changes}
    names = ("source", "target", "variants", "n", "seed", "quick", "fit", "seeds", "text", "pool")
    return Asked(*models, *(given[name] for name in names))


def groups(models, **changes):
    what = asked(models, **changes)
    return list(what.groups([what.setting("chat8", None, None)]))


# -- against plain hooks -------------------------------------------------------------
def test_the_outputs_are_those_of_the_hooks(models, oracles):
    prompts = [q.donor for q in groups(models)[0].questions]
    engine = Engine(models[0])
    found = final_outputs(engine, prompts + prompts[:2], (EMBED, *LAYERS))
    seen = oracles[DONOR].outputs(ids_of(prompts), (EMBED, *LAYERS))
    expected = torch.cat([seen[layer][:, -1] for layer in LAYERS], 1)
    assert np.abs(found.rows(prompts, LAYERS) - expected.double().numpy()).max() < 1e-5
    keys = [prompt.span(f"key {prompt.query}")[0] for prompt in prompts]
    assert np.allclose(found.rows(prompts, (EMBED,)), seen[EMBED][range(len(prompts)), keys], atol=1e-6)
    assert engine.layer_tokens == len(prompts) * len(prompts[0]) * 7 == engine.planned_layer_tokens


def test_a_mapped_row_is_what_hooks_and_scikit_learn_make_of_it(models, oracles, small):
    """Donor's outputs by hooks, the map by scikit-learn's Ridge at the penalty that was chosen, the host with hooks that write."""
    group = groups(models)[0]
    draw = group.arms[0].fit.draw

    def outputs(name, prompts):
        seen = oracles[name].outputs(ids_of(prompts), LAYERS)
        return torch.cat([seen[layer][:, -1] for layer in LAYERS], 1).double().numpy()

    x, y = outputs(DONOR, [b.donor for b in draw.fit])[12:], outputs(HOST, [b.host for b in draw.fit])[12:]
    rows = whole(small.table[small.table["dictionary_seed"] == 0], "mapped")
    penalty = rows["map_penalty"].iloc[0] * np.linalg.eigvalsh((c := x - x.mean(0)).T @ c)[-1]
    ridge = Ridge(penalty, solver="svd").fit(x, y)
    for question, (_, row) in zip(group.questions, rows.iterrows()):
        values = torch.tensor(ridge.predict(outputs(DONOR, [question.donor])), dtype=torch.float32).view(3, 1, 1, -1)
        edits = {layer: put(values[i], [question.host.final]) for i, layer in enumerate(LAYERS)}
        logits = oracles[HOST].logits(ids_of([question.host]), edits)[0]
        margin = logits[question.host.choices[question.donor_index]] - logits[question.host.answer]
        assert abs(row["margin"] - float(margin)) <= 1e-3 * float(logits.std())
        assert row["redirected"] == (int(logits.argmax()) == question.host.choices[question.donor_index])


# -- the table -----------------------------------------------------------------------
def test_every_condition_is_there_with_what_its_map_is(small):
    table = small.table
    assert {*CONDITIONS} | {"donor"} == {*table["condition"]}
    assert set(table.loc[table["condition"] == "other-source", "source"]) == {"G0", "G1"}
    for condition in CONDITIONS:
        rows = whole(select(table, variant="chat8"), condition)
        rows = rows[rows["source"] != "G1"]
        assert len(rows) == rows["pair"].nunique() == 12, condition  # two seeds of six pairs, numbered on
        assert rows["map_r2_test"].notna().all() == (condition not in ("host", "same-model"))
    assert table.loc[table["condition"] == "mean", "map_rank"].eq(0).all()
    assert set(select(table, condition="mapped")["keys"]) == {"disjoint", "shared"}
    curve = select(table, condition="mapped", keys="disjoint", variant="chat8", fit_keys=64)
    assert {*curve["fit_prompts"]} == {25, 50, 60}
    assert {*select(table, condition="mapped", fit_prompts=60)["fit_keys"]} == {8, 16, 32, 64}
    across = select(table, variant="list8", condition="mapped")
    assert set(across["fit_variant"]) == {"chat8"}
    assert len(across) == 12
    assert "attn.L7H0" in table


def test_files_maps_and_a_second_run(models, small):
    folder = small.folder
    assert folder.parts[-2:] == (HOST, f"transfer-{DONOR}")
    verdict, manifest = (json.loads((folder / f).read_text()) for f in ("verdict.json", "manifest.json"))
    assert verdict["sentence"] == small.sentence
    assert verdict["variants"]["chat8"]["source"] == "G2"
    assert len(pd.read_parquet(folder / "cells.parquet")) == len(small.table) == manifest["rows"]
    assert manifest["donor_model"]["model"] == DONOR
    names = [name.removesuffix(".json") for name in manifest["maps"]]
    assert "chat8-disjoint-seed1-G2-to-G2" in names
    about = {"donor": {"fingerprint": models[0].fingerprint}, "data": {"keys": "shared", "seed": 0}}
    assert maps.load(folder / "maps" / "chat8-shared-seed0-G2-to-G2", about).n_features_in_ == 192
    with pytest.raises(RunError, match="donor fingerprint"):
        maps.load(folder / "maps" / "chat8-shared-seed0-G2-to-G2", {"donor": {"fingerprint": models[1].fingerprint}})
    again = transfer(*models, **SMALL, out=folder.parent.parent)
    pd.testing.assert_frame_equal(again.table, small.table)
    took = json.loads((folder / "manifest.json").read_text())["this_run"]
    assert took["tokens_forwarded"] == took["donor"]["tokens_forwarded"] == 0
    summary = pd.read_csv(folder / "summary.csv")
    assert {"seeds", "seed_low", "seed_high", "map_r2_test", "attention_moved", "low", "high", "n"} <= {*summary}


def test_the_dry_run_foresees_what_runs(models, small, tmp_path):
    manifest = json.loads((small.folder / "manifest.json").read_text())
    said = dry_run(*models, **SMALL, out=tmp_path)
    assert "rows are stored" not in said
    assert f"{len(small.table) - sum(small.table['condition'] == 'donor'):,} cells" in said
    assert "rows are stored" in dry_run(*models, **SMALL, out=small.folder.parent.parent)
    assert "not known yet" in dry_run(*models, n=6, out=tmp_path)
    assert manifest["command"]["fit"] == 60
    assert not any(tmp_path.iterdir())


def test_several_blocks_on_both_sides(models, tmp_path):
    found = transfer(*models, "G1+G2", "G1,G2", n=2, fit=60, seeds=1, out=tmp_path)
    rows = whole(select(found.table, variant="chat8"), "mapped")
    assert set(rows["block"]) == set(rows["source"]) == {"G1+G2"}
    assert set(rows["layers"]) == {"2,4-6"}
    assert set(rows["map_features"]) == {256}
    assert set(found.table.loc[found.table["condition"] == "other-source", "source"]) == {"G0"}


def test_a_model_lends_to_itself_what_it_would_have_had(models, tmp_path):
    """One model as donor and host: the map to be found is the identity, which holds for any key."""
    host = models[1]
    found = transfer(host, host, "G2", "G2", n=12, fit=150, seeds=1, out=tmp_path)
    rows = found.table[found.table["variant"] == "chat8"]
    assert (
        whole(rows, "mapped")["redirected"].mean() >= 0.9 * whole(rows, "same-model")["redirected"].astype(float).mean()
    )
    assert whole(rows, "mapped")["map_r2_test"].min() > 0.95
    assert found.table["donor_model"].eq(HOST).all()


# -- what the rows say ---------------------------------------------------------------
def made(n=40, seeds=2, **rates) -> pd.DataFrame:
    """A table of every condition; `rates` are (redirected, kept) shares, "attention" whether the reader follows the map."""
    base = {
        "donor": (None, 1.0), "host": (0.0, 1.0), "same_model": (1.0, 0.0), "mapped": (1.0, 0.0), "mapped_self": (0.0, 1.0),
        "mapped_by_key": (0.9, 0.0), "shuffled": (0.0, 0.1), "mean": (0.0, 0.1), "other_source": (0.0, 0.9), "embedding": (0.1, 0.8), "attention": True,
    }  # fmt: skip
    base |= rates
    rows = []
    for name, share in base.items():
        for keys in ("disjoint", "shared") if name == "mapped" else ("disjoint",) if name != "attention" else ():
            for pair in range(n * seeds):
                moved, kept = (None if s is None else (pair % n) < s * n for s in share)
                follows = name in ("mapped", "same_model") and base["attention"]
                mapped = name not in ("donor", "host", "same_model")
                rows.append(
                    {
                        "experiment": "transfer", "variant": "chat8", "condition": name.replace("_", "-"),
                        "keys": keys if mapped else "", "source": {"other_source": "G1"}.get(name, name if name == "embedding" else "G2"),
                        "block": "G2", "fit_variant": "chat8", "fit_prompts": 100.0, "fit_keys": 64.0, "pair": pair,
                        "dictionary_seed": pair // n, "redirected": moved, "kept": kept, "choice_correct": kept,
                        "host_index": 1, "donor_index": 0, "map_r2_test": 0.5 if mapped else np.nan,
                        "attn.L7H1": [0.9, 0.1] if follows else [0.1, 0.9],
                    }
                )  # fmt: skip
    return pd.DataFrame(rows)


def concluded(table, models, **changes):
    setting = {
        "variant": "chat8",
        "source": Site("G2", LAYERS),
        "target": Site("G2", LAYERS),
        "others": (Site("G1", (2,)),),
    }
    return transferred.conclude(table, SimpleNamespace(**(setting | changes)), *models)


def test_it_holds_with_every_control(models):
    found = concluded(made(), models)
    assert found.status == "holds", found.why
    assert "mapped 1.00" in found.why
    assert found.figures["reader attention moved"] == ["L7H1"]
    assert found.figures["seeds"] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("rates", "status", "said"),
    [
        ({"donor": (None, 0.3)}, "undecided", "donor tiny-gdn"),
        ({"host": (0.0, 0.3)}, "undecided", "host tiny-mamba2"),
        ({"same_model": (0.2, 0.8)}, "undecided", "no Address"),
        ({"mapped": (0.1, 0.9)}, "does not hold", "mapped 0.1"),
        ({"mapped": (0.5, 0.5)}, "undecided", "mapped 0.5"),
        ({"shuffled": (0.9, 0.0)}, "does not hold", "a map of shuffled moves as much"),
        ({"mean": (0.9, 0.0)}, "does not hold", "a map of mean moves as much"),
        ({"mapped_self": (0.0, 0.5)}, "does not hold", "mapped-self"),
        ({"attention": False}, "does not hold", "no reader's attention moves"),
    ],
)
def test_it_does_not_hold_without_one(models, rates, status, said):
    found = concluded(made(**rates), models)
    assert (found.status, said in found.why) == (status, True), found.why


def test_shared_keys_alone_support_nothing(models):
    table = made()
    lost = (table["condition"] == "mapped") & (table["keys"] == "disjoint")
    table.loc[lost, ["redirected", "kept"]] = [False, True]
    found = concluded(table, models)
    assert found.status == "does not hold"
    assert "with shared keys 1.00" in found.why


def test_a_map_of_another_template_or_of_fewer_rows_decides_nothing(models):
    table = made(mapped=(0.1, 0.9))
    good = made()[lambda t: t["condition"] == "mapped"]
    more = [good.assign(fit_variant="list8"), good.assign(fit_prompts=50.0), good.assign(fit_keys=8.0)]
    assert concluded(pd.concat([table, *more], ignore_index=True), models).status == "does not hold"


def test_without_an_address_nothing_is_concluded(models):
    for side, option in (("source", "--source"), ("target", "--target")):
        found = concluded(made(), models, **{side: None})
        assert found.status == "undecided"
        assert option in found.why


# -- the figure ----------------------------------------------------------------------
def test_the_figure_shows_what_was_run_and_nothing_else(small, tmp_path):
    table, verdict = figures.read(small.folder)
    paths = figure.draw(table, verdict, tmp_path)
    assert {path.name for path in paths} == {"transfer-chat8.png", "transfer-chat8.pdf"}  # list8 has no maps of its own
    rows = select(table, variant="chat8")
    labels = [label for label, _ in figure.bars(rows)]
    assert labels[:4] == ["host", "same model", "mapped", "penalty by key"]
    assert {"source G0", "source G1", "embedding", "keys shared"} <= {*labels}
    assert "embedding" not in [label for label, _ in figure.bars(rows[rows["condition"] != "embedding"])]
    assert figure.draw(table[table["condition"] == "host"], verdict, tmp_path) == []


# -- bad input -----------------------------------------------------------------------
def test_what_cannot_be_is_said_before_anything_runs(models, tmp_path):
    for changes, error, said in (
        ({"source": "G9"}, NameNotFound, "G9"),
        ({"target": "G2,G7"}, NameNotFound, "G7"),
        ({"n": 1}, TaskError, "n of 2"),
        ({"seeds": 0}, TaskError, "one seed"),
        ({"fit": 20}, RunError, "too few fit prompts: 20 for 192 features of G2; it takes 25 or more"),
        ({"variants": ["chat9"]}, NameNotFound, "unknown variant"),
    ):
        with pytest.raises(error, match=said):
            transfer(*models, **{**SMALL, **changes}, out=tmp_path)
    assert not any(tmp_path.iterdir())
