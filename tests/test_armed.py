"""The models that continue a bundled one with the five arms: how they are trained, and that they answer what their cards say."""

import dataclasses
import json
import math
import random

import pytest
import torch

import encode_address as ea
from encode_address.models.cards import listing
from encode_address.models.loading import ARMED, BUNDLED_DIR, GROUND_TRUTH, card
from encode_address.tasks.arm_words import ARMS
from encode_address.train import arms, data, measure, ship, train
from encode_address.train.build import renewed
from encode_address.train.loop import Run
from encode_address.train.recipe import ALL_SURFACES, RECIPES
from encode_address.train.words import KEYS, POOLS, VALUES, unread, vocabulary

N = 24


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=ARMED)
def model(request):
    return ea.load(request.param)


def close(p: float, n: int) -> float:
    """How far below `p` a share of `n` may fall by chance (three standard errors; at the edges those of one miss)."""
    return 3 * math.sqrt(max(p * (1 - p), 1 / n) / n)


# -- batches ----------------------------------------------------------------------------------
NAMES = vocabulary()


def test_a_row_is_an_instance_asked_in_every_arm_and_each_is_scored_by_its_own_candidates():
    batch = arms.drawn("chat8", 3, random.Random(0))
    kinds = {"automatic": KEYS, "report": KEYS, "flexible": VALUES, "control": ("yes", "no"), "supplied": VALUES}
    notes = {"automatic": "next", "report": "repeat", "flexible": "value", "control": "secret", "supplied": "must"}
    assert set(batch.turns) == set(ARMS)
    assert {arm: choices.shape for arm, choices in batch.choices.items()} == {
        arm: (3, 2 if arm == "control" else 8) for arm in ARMS
    }
    for row in batch.ids.tolist():
        said = [NAMES[i] for i in row]
        assert said.count("Dictionary") == 1
        asked = {said[at - said[at::-1].index(":") :][0] for at in batch.at}
        assert len(asked) == 1
        for arm, at in batch.turns.items():
            start = at - said[at::-1].index("Note")
            assert notes[arm] in said[start:at]
            assert said[at - 1 : at + 1] == ["it", "is"]
            assert said[at + 1] in kinds[arm]
    logits = torch.zeros(3, 5, len(NAMES))
    logits[..., 0] = 9.0  # no candidate of any arm: a forced choice does not see it
    logits.scatter_(2, batch.answers[..., None], 1.0)
    assert batch.right(logits) == dict.fromkeys(batch.turns, 1.0)
    second = [*batch.turns][1]
    logits[0, 1, batch.answers[0, 1]] = -1.0
    assert batch.right(logits) == {**dict.fromkeys(batch.turns, 1.0), second: pytest.approx(2 / 3)}


def test_one_arm_alone_is_its_prompt_and_its_answer():
    instances = arms._arms("rev8", "A").instances(2, 5)
    for arm in ARMS:
        batch = arms.armed(instances, [arm])
        prompts = [instance[arm].prompt for instance in instances]
        assert batch.ids.tolist() == [[*prompt.ids, prompt.answer] for prompt in prompts]
        assert batch.at == [len(prompts[0]) - 1]


def test_training_draws_other_instances_every_time_of_both_pools_in_other_orders():
    rng = random.Random(1)
    batches = [arms.drawn("chat8", 1, rng) for _ in range(12)]
    assert len({tuple(batch.ids[0].tolist()) for batch in batches}) == 12
    assert len({tuple(batch.turns) for batch in batches}) > 6
    table = [{NAMES[i] for i in batch.ids[0, : min(batch.at) - 17].tolist()} & set(VALUES) for batch in batches]
    assert {tuple(len(words & set(POOLS[pool]["values"])) for pool in "AB") for words in table} == {(8, 0), (0, 8)}


@pytest.mark.parametrize("separators", [False, True])
def test_the_guide_looks_at_where_the_answer_is_printed(separators):
    instances = arms._arms("list8", "A").instances(3, 5)
    printed = {
        "automatic": 1,
        "report": 2,
        "flexible": 1,
        "control": 1,
        "supplied": 2,
    }  # report: and in the question ...
    for arm in ARMS:
        batch = arms.armed(instances, [arm])
        weights = torch.ones(3, 2, len(batch.ids[0]) - 1, len(batch.ids[0]) - 1)  # so that the mass counts positions
        assert batch.mass(weights, separators).tolist() == [printed[arm] * (1 + separators)] * 3
        if arm == "control":
            assert {NAMES[i] for i in batch.ids[:, batch.marker].tolist()} <= {"secret", "hidden"}
    order = ["report", "flexible"]
    batch = arms.armed(instances, order)
    weights = torch.zeros(3, 2, batch.ids.shape[1] - 1, batch.ids.shape[1] - 1)
    for row, value in enumerate(batch.answers[:, 1].tolist()):
        weights[row, 1, batch.turns["flexible"], batch.ids[row].tolist().index(value)] = 1.0
    assert batch.mass(weights, separators).tolist() == [0.0, 0.5] * 3  # one head of two, from its own turn


def test_a_class_is_reported_and_continued_from_its_passage_or_where_it_is_printed():
    instances = arms._arms("class4", "A").instances(3, 5)
    words = set(instances[0]["report"].passage.replace(",", " ").split())
    read = {"automatic": 5, "report": 5 + 1, "flexible": 1, "control": 1, "supplied": 1}  # three members, two commas
    for arm in ARMS:
        batch = arms.armed(instances, [arm])
        weights = torch.ones(3, 2, len(batch.ids[0]) - 1, len(batch.ids[0]) - 1)
        assert batch.mass(weights, separators=False).tolist() == [read[arm]] * 3
        assert {NAMES[i] for i in batch.ids[0, list(batch.passage)].tolist()} == words | {","}


def test_a_class_is_looked_up_by_its_label_or_a_member():
    members, symbols = arms.class_words()
    generator = torch.Generator().manual_seed(0)
    batch = data.ask("list", 4, ["plain"] * 5, 40, generator, lists=(tuple(members), symbols), members=members)
    named = 0
    for row, targets in zip(batch.ids.tolist(), batch.targets.tolist()):
        said = [NAMES[i] for i in row]
        for place, answer, target in zip(batch.asked, batch.answers, targets):
            label = said[batch.keys[target]]
            assert said[answer + 1] == said[batch.values[target]] in symbols
            assert said[place] in (label, *members[label])
            named += said[place] != label
    assert 70 <= named <= 130  # of 200, half


# -- words that were never read -----------------------------------------------------------------
def test_words_called_unread_are_in_no_story_and_no_dictionary():
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    batches = [data.text_batch(200, rng, test=test) for test in (False, True)]
    batches += [data.ask(form, 8, ALL_SURFACES, 8, generator).ids for form in data.FORMATS]
    seen = {NAMES[i] for batch in batches for i in batch.unique().tolist()}
    assert not seen & set(unread())
    assert {"secret", "hidden", "one", "yes", "no", "repeat"} <= set(unread())


@pytest.mark.parametrize("name", GROUND_TRUTH)
def test_words_that_were_never_read_begin_anew_and_nothing_else_changes(name):
    before, after = ea.load(name).module, ea.load(name).module
    old = before.model.embed_tokens.weight.detach().clone()
    renewed(after, 0)
    new, rows = after.model.embed_tokens.weight.detach(), [NAMES.index(word) for word in unread()]
    kept = [i for i in range(len(NAMES)) if i not in rows]
    assert torch.equal(old[kept], new[kept])

    def alike(weight):
        unit = torch.nn.functional.normalize(weight[rows], dim=1)
        return float((unit @ unit.T)[~torch.eye(len(rows), dtype=bool)].mean())

    assert alike(old) > 0.95
    assert alike(new) < 0.6
    ids = data.ask("chat", 8, [""], 4, torch.Generator().manual_seed(0)).ids
    with torch.no_grad():
        assert torch.equal(before(input_ids=ids).logits[..., kept], after(input_ids=ids).logits[..., kept])


# -- training ---------------------------------------------------------------------------------
@pytest.fixture
def short(monkeypatch):
    """Recipes of two steps a stage, of lookups and of arms, without the measures of every model."""
    few = {"steps": 2, "text": 0.0, "rows": 2}
    armed = few | {"arms": 1.0, "arm_instances": 1, "arms_of": (("class4",),)}
    recipes = {
        name: dataclasses.replace(
            RECIPES[name],
            stages=tuple(
                dataclasses.replace(stage, **some) for stage, some in zip(RECIPES[name].stages, (few, armed, armed))
            ),
        )
        for name in ARMED
    }
    monkeypatch.setattr("encode_address.train.RECIPES", recipes)
    monkeypatch.setattr("encode_address.train.scores", lambda model: {"perplexity": 1.0})  # measured in test_train
    monkeypatch.setattr("encode_address.train.circuit", lambda model: {})
    monkeypatch.setattr("encode_address.train.arms.N", 2)


@pytest.mark.parametrize("name", ARMED)
def test_training_continues_the_bundled_weights_without_a_screen(short, tmp_path, name):
    recipe = RECIPES[name]
    begun = []

    class Seen(Run):
        def train(self, on_step):
            begun.append({key: value.clone() for key, value in self.model.state_dict().items()})
            return super().train(on_step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("encode_address.train.Run", Seen)
        lines = []
        folder = train(name, 1, tmp_path, lines.append)
    start, trained = ea.load(recipe.start), ea.load(str(folder))
    same = [i for i, word in enumerate(NAMES) if word not in unread()]
    for key, value in start.module.state_dict().items():
        rows = same if len(value) == len(NAMES) else slice(None)  # embeddings, and the tied head
        assert torch.equal(begun[0][key][rows], value[rows]), key
    assert [line["stage"] for line in lines] == [stage.name for stage in recipe.stages] == ["words", "arms", "settle"]
    assert start.layout == trained.layout
    assert start.fingerprint != trained.fingerprint
    assert set(lines[-1]["arms"]["class4"]) == set(ARMS)
    facts = json.loads((folder / "card.json").read_text())
    assert (facts["continues"], facts["arms"]["instances"], "base" in facts) == (recipe.start, 2, False)
    assert set(facts["arms"]["accuracy"]) == set(arms.MEASURED)


def test_the_log_of_the_arms_survives_a_stop(tmp_path):
    few = {"steps": 2, "pattern": "la", "arms": 1.0, "text": 0.0, "arm_instances": 1, "drops": (), "guides": ()}
    stage = dataclasses.replace(RECIPES[ARMED[0]].stages[1], **few)
    whole = Run(stage, "mamba2", 0, tmp_path, None)
    whole.train()
    again = Run(stage, "mamba2", 0, tmp_path, None)
    assert again.resume()
    assert again.arms == whole.arms
    assert again.arms


# -- what is bundled ----------------------------------------------------------------------------
def test_a_bundled_model_answers_the_arms_as_its_card_says(model):
    said = card(model)["arms"]
    found = arms.arm_accuracy(model.module, pool=said["pool"], n=N, seed=3)
    assert set(found) == set(said["accuracy"]) == set(arms.MEASURED)
    for variant, by in said["accuracy"].items():
        for arm, right in by.items():
            assert found[variant][arm] >= right - close(right, N), (variant, arm)


def test_a_bundled_model_still_looks_up_and_tells_stories(model):
    facts = card(model)
    for form in ("chat", "list", "rev"):
        right = facts["accuracy"][f"{form}8"]
        assert measure.accuracy(model.module, form, "", rows=48) >= right - close(right, 48)
    assert measure.perplexity(model.module) == pytest.approx(facts["perplexity"], rel=0.01)


def test_the_model_it_continues_answers_the_flexible_arm_of_dictionaries_alone():
    found = arms.arm_accuracy(ea.load(GROUND_TRUTH[1]).module, ("chat8", "class4"), n=N)
    assert found["chat8"].pop("flexible") > 0.9
    chance = {"chat8": 1 / 8, "class4": 1 / 4}
    for variant, by in found.items():
        for arm, right in by.items():
            expected = 1 / 2 if arm == "control" else chance[variant]
            assert right <= expected + 4 * math.sqrt(expected * (1 - expected) / N), (variant, arm)


def test_the_listing_has_the_arms_of_these_models_only():
    paragraphs = {part.split(":")[0]: part for part in listing().split("\n\n")}
    for name, text in paragraphs.items():
        assert text.count("arms of ") == (len(arms.MEASURED) if name in ARMED else 0)
    facts = json.loads((BUNDLED_DIR / ARMED[0] / "card.json").read_text())
    assert f"report {facts['arms']['accuracy']['chat8']['report']:.3f}" in paragraphs[ARMED[0]]


def test_the_demands_on_these_models_are_met_only_by_what_they_say():
    good = {
        "arms": {"accuracy": {v: dict.fromkeys(ARMS, 0.96) for v in arms.MEASURED}},
        "perplexity": 4.2,
        "continues": "tiny-gdn",
    }
    assert [d["met"] for d in ship.arm_demands(good, 4.0)] == [True, True, True]
    good["arms"]["accuracy"]["rev8"]["automatic"] = 0.9
    assert [d["met"] for d in ship.arm_demands(good, 4.0)] == [False, True, True]
    good["arms"]["accuracy"]["class4"]["report"] = 0.5
    assert [(d["met"], d["value"]) for d in ship.arm_demands(good, 3.0)] == [(False, 0.9), (False, 0.5), (False, 1.4)]
