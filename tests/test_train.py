"""Training: what goes in is what it says it is, growth changes nothing, a stopped run goes on to the bit."""

import dataclasses
import json
import random
from collections import Counter

import pytest
import torch

import encode_address as ea
from encode_address.errors import EncodeAddressError, ModelError, NameNotFound, StoreError
from encode_address.run.store import locked
from encode_address.tasks import Dictionary
from encode_address.tasks.lexicon import lexicon_for
from encode_address.train import measure, ship, train
from encode_address.train.build import build, grow, mixer
from encode_address.train.data import FORMATS, Asked, ask, held_out, story, text_batch
from encode_address.train.export import write_model
from encode_address.train.hooks import captured
from encode_address.train.loop import Run, _fade, _mass_on
from encode_address.train.recipe import BASE_STAGE, GROWN, GROWN_STAGE, ORIGIN, RECIPES, Drop, Guide, Stage
from encode_address.train.scan import use_recurrence
from encode_address.train.words import KEYS, POOLS, SURFACES, VALUES, task, tokenizer, vocabulary

ARCHITECTURES = ("gdn", "mamba2", "griffin")
TINY = Stage(
    "tiny", "lal", steps=10, muon=0.02, adam=4e-3, levels=((2, 8), (3, 128)), advance=0.01, rows=2, questions=2, text=0.3, warmup=2,
    sizes=(2, 4),
    guides=(Guide(1, "entry", 0.5), Guide(1, "key", 0.5)), drops=(Drop((2,), "dictionary", 0.5), Drop((0,), "answer", 0.5), Drop((1,), "text", 0.5)),
)  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def words(ids: torch.Tensor) -> list[str]:
    names = vocabulary()
    return [names[i] for i in ids.tolist()]


# -- words -----------------------------------------------------------------------------------
def test_every_word_is_one_token_and_no_key_is_a_value():
    names, tokens = vocabulary(), tokenizer()
    assert len(set(names)) == len(names) == len(tokens)
    assert len(names) % 8 == 0
    assert tokens(" ".join(names), add_special_tokens=False)["input_ids"] == list(range(len(names)))
    assert len(set(KEYS)) >= 128
    assert len(set(VALUES)) >= 32
    assert not set(KEYS) & set(VALUES)
    halves = [set(POOLS[pool][kind]) for kind in ("keys", "values") for pool in "AB"]
    assert not halves[0] & halves[1]
    assert not halves[2] & halves[3]
    assert (halves[0] | halves[1], halves[2] | halves[3]) == (set(KEYS), set(VALUES))
    assert sum(name.startswith("<reserved") for name in names) >= 64


def test_the_chat_template_is_the_wrapper_of_the_prompts():
    said = tokenizer().apply_chat_template(
        [{"role": "user", "content": "tell me the fig ."}], tokenize=False, add_generation_prompt=True
    )
    assert said == "<s> <user> tell me the fig . <assistant>"


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("surface", SURFACES)
def test_training_asks_as_the_task_does(tmp_path, form, surface):
    """The same wording, read by the task's own prompts and by the batches."""
    (tmp_path / "task.json").write_text(json.dumps(task()))
    variant = f"{form}8" + (f"/{surface}" if surface else "")
    prompt = Dictionary(variant, tokenizer(), lexicon_for(tokenizer(), tmp_path)).questions(1)[0].host
    batch = ask(form, 8, [surface], 1, torch.Generator().manual_seed(0))
    ours = words(batch.ids[0, : batch.answers[0] + 1])
    kinds = {**dict.fromkeys(KEYS, "K"), **dict.fromkeys(VALUES, "V")}
    assert [kinds.get(word, word) for word in ours] == [kinds.get(word, word) for word in prompt.text.split()]


# -- batches ---------------------------------------------------------------------------------
@pytest.mark.parametrize("form", FORMATS)
def test_a_batch_is_what_it_says(form):
    surfaces = ["", "far", "equals", "near", "gap"]
    batch = ask(form, 5, surfaces, 6, torch.Generator().manual_seed(1))
    for row, ids in enumerate(batch.ids):
        said = words(ids)
        keys, values = ([said[p] for p in places] for places in (batch.keys, batch.values))
        assert set(keys) < set(KEYS)
        assert set(values) < set(VALUES)
        assert len(set(keys)) == len(set(values)) == 5
        for turn, target in enumerate(batch.targets[row].tolist()):
            since = batch.answers[turn - 1] if turn else batch.question
            asked = {said[p] for p in batch.asked if since <= p <= batch.answers[turn]}
            assert asked == {keys[target]}
            assert said[batch.answers[turn] + 1] == values[target]
        assert said[batch.question - 1] == "."
        assert not (set(said[batch.ends[-1] + 1 : batch.question]) - {"."})
        notes = [said[i + 5] for i, word in enumerate(said) if word == "Note"]  # Note : tell me the X
        asked = [keys[t] for t, surface in zip(batch.targets[row].tolist(), surfaces) if surface in ("far", "near")]
        assert len(notes) == len(asked) == 2
        assert all(note in keys and note != key for note, key in zip(notes, asked))


def test_keys_are_asked_with_replacement_and_evenly():
    targets = ask("chat", 4, [""] * 6, 400, torch.Generator().manual_seed(2)).targets
    counts = Counter(targets.flatten().tolist())
    assert min(counts.values()) > 500
    assert any(len(set(row)) < 4 for row in targets.tolist())


def test_test_stories_are_about_what_training_never_joins():
    rng = random.Random(0)
    for test in (False, True):
        for _ in range(50):
            said = story(rng, 60, test)
            topics = {word for word in said if word in ("horse", "dog", "door", "water", "song", "snow")}
            places = {word for word in said if word in ("river", "house", "road", "bridge", "tower")}
            assert test or not any(held_out(topic, place) for topic in topics for place in places)
    assert text_batch(3, random.Random(0)).shape == (3, 57)


# -- models -----------------------------------------------------------------------------------
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_growth_changes_no_logit(architecture):
    small = build(architecture, "lallla", 0).eval()
    large = grow(small, architecture, GROWN, ORIGIN, 1).eval()
    ids = ask("rev", 4, ["", "far"], 2, torch.Generator().manual_seed(3)).ids
    with torch.no_grad():
        assert torch.equal(small(ids, use_cache=False).logits, large(ids, use_cache=False).logits)
    new = set(range(len(GROWN))) - set(ORIGIN)
    for i, layer in enumerate(large.model.layers):
        module = mixer(layer)
        outs = [module.get_submodule(name) for name in ("out_proj", "o_proj", "linear_out") if hasattr(module, name)]
        assert [bool((out.weight == 0).all()) for out in outs] == [i in new]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_same_seed_gives_the_same_weights_and_leaves_the_random_state_alone(architecture):
    before = torch.get_rng_state()
    one, same, other = (build(architecture, "la", seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)


def test_the_recurrence_of_training_is_that_of_the_class_and_so_is_its_gradient():
    batch = ask("rev", 4, ["", "far"], 3, torch.Generator().manual_seed(6)).ids
    plain, fast = build("griffin", "lla", 0), build("griffin", "lla", 0)
    use_recurrence(fast)
    seen = []
    for model in (plain, fast):
        logits = model(batch, use_cache=False).logits
        logits.square().mean().backward()
        seen.append((logits.detach(), {name: p.grad for name, p in model.named_parameters()}))
    (logits, gradients), (ours, our_gradients) = seen
    torch.testing.assert_close(ours, logits, rtol=1e-5, atol=1e-5)
    assert gradients.keys() == our_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(our_gradients[name], gradient, rtol=1e-4, atol=1e-7, msg=name)
    assert gradients["model.layers.0.temporal_block.rg_lru.recurrent_param"].abs().min() > 0


# -- the loop ---------------------------------------------------------------------------------
def state(run: Run) -> dict:
    return {name: value.clone() for name, value in run.model.state_dict().items()}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("at", [1, 7])
def test_a_stopped_run_goes_on_to_the_bit(monkeypatch, tmp_path, architecture, at):
    monkeypatch.setattr("encode_address.train.loop.SAVE_EVERY", at)
    monkeypatch.setattr("encode_address.train.loop.LOG_EVERY", 1)
    whole = Run(TINY, architecture, 0, tmp_path, None)
    whole.train()
    whole.checkpoint.unlink()
    stopped = Run(dataclasses.replace(TINY), architecture, 0, tmp_path, None)

    def stop(line: dict) -> None:
        if line["step"] == at + 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped.train(stop)
    again = Run(TINY, architecture, 0, tmp_path, None)
    assert again.resume()
    assert again.step == (at if at > 1 else 1)
    again.train()
    first, second = state(whole), state(again)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert (again.step, again.level, again.accuracy) == (whole.step, whole.level, whole.accuracy)
    assert not any(module._forward_hooks for module in again.model.modules())


def test_what_is_imposed_ends_before_the_last_fifth():
    for recipe in RECIPES.values():
        last = recipe.stages[-1]
        for fade in (last.guide_fade, last.drop_fade):
            assert _fade(0.0, fade) == 1.0
            assert 0 < _fade(sum(fade) / 2, fade) < 1
            assert all(_fade(share, fade) == 0.0 for share in (0.8, 0.9, 1.0))
        assert recipe.imposed


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_dropping_silences_the_named_mixers_at_the_named_positions_only(tmp_path, architecture):
    run = Run(TINY, architecture, 0, tmp_path, None)
    batch = ask("chat", 3, ["", "far"], 2, torch.Generator().manual_seed(4))
    length = batch.ids.shape[1] - 1
    seen: dict[int, torch.Tensor] = {}

    def keep(i: int):
        def hook(module, inputs, output):
            seen[i] = (output[0] if isinstance(output, tuple) else output).abs().amax((0, 2))

        return hook

    def silent(*drops: Drop, asked: Asked | None = batch) -> dict[int, set[int]]:
        with run._silenced(list(drops), asked):
            handles = [mixer(layer).register_forward_hook(keep(i)) for i, layer in enumerate(run.model.model.layers)]
            with torch.no_grad():
                run.model(batch.ids[:, :-1], use_cache=False)
            for handle in handles:
                handle.remove()
        return {i: {p for p, size in enumerate(seen[i].tolist()) if size == 0} for i in seen}

    before = {p - 1 for p in batch.answers if p - 1 not in batch.asked}
    everywhere, late = set(range(length)), set(range(batch.question, length))
    assert silent() == {0: set(), 1: set(), 2: set()}
    assert silent(Drop((0,), "answer", 1.0), Drop((2,), "dictionary", 1.0)) == {
        0: {*batch.answers, *before},
        1: set(),
        2: everywhere - late,
    }
    assert silent(Drop((1,), "question", 1.0), Drop((1, 2), "dictionary", 1.0)) == {
        0: set(),
        1: everywhere,
        2: everywhere - late,
    }
    assert silent(Drop((0, 2), "lookup", 1.0)) == {0: everywhere, 1: set(), 2: everywhere}
    assert silent(Drop((1,), "text", 1.0), asked=None) == {0: set(), 1: everywhere, 2: set()}


def test_drops_are_drawn_as_often_as_they_say_and_fade(tmp_path):
    run = Run(TINY, "gdn", 0, tmp_path, None)
    assert not any(run._drawn(0.0, ("dictionary", "answer", "text")) for _ in range(50)), "not before the last level"
    run.level = 1
    drawn = [run._drawn(0.0, ("dictionary", "answer")) for _ in range(400)]
    assert {drop.where for drops in drawn for drop in drops} == {"dictionary", "answer"}
    assert 150 < sum(TINY.drops[0] in drops for drops in drawn) < 250
    assert not any(run._drawn(0.8, ("dictionary", "answer", "text")) for _ in range(50))


def test_a_guide_looks_at_the_entry_asked_for_and_its_separator_or_at_the_asked_key():
    batch = ask("list", 3, ["", "is"], 2, torch.Generator().manual_seed(5))
    length = batch.ids.shape[1] - 1
    weights = torch.zeros(2, 2, length, length)
    for row, targets in enumerate(batch.targets.tolist()):
        for turn, target in enumerate(targets):
            weights[row, 0, batch.answers[turn], batch.ends[target]] = 0.5
            weights[row, 1, batch.answers[turn], batch.ends[target] + 1] = 0.25
    assert _mass_on("entry", weights, batch).tolist() == [[0.375] * 2] * 2
    assert _mass_on("value", weights, batch).tolist() == [[0.25] * 2] * 2
    assert _mass_on("key", weights, batch).tolist() == [[0.0] * 2] * 2
    restated, once = batch.asked[:2], batch.asked[2:]
    weights[0, :, batch.answers[0], restated] = 0.25
    weights[1, 0, batch.answers[1], once] = 0.5
    weights[:, :, batch.answers[1], restated] = 0.125  # the earlier question's key is not asked for again
    assert _mass_on("key", weights, batch).tolist() == [[0.5, 0.0], [0.0, 0.25]]


def test_a_reversed_entry_is_read_after_its_key_whatever_the_target():
    batch = ask("rev", 3, [""], 1, torch.Generator().manual_seed(5))
    weights = torch.rand(1, 2, *[batch.ids.shape[1] - 1] * 2)
    end = batch.keys[int(batch.targets[0, 0])]
    expected = weights[0, :, batch.answers[0], end : end + 2].sum(1).mean()
    for target in ("value", "entry"):
        assert _mass_on(target, weights, batch)[0, 0] == pytest.approx(float(expected))


# -- the command ------------------------------------------------------------------------------
@pytest.fixture
def short(monkeypatch):
    """Recipes of two steps, and small measures."""
    stages = tuple(dataclasses.replace(stage, steps=2, rows=2, questions=1) for stage in (BASE_STAGE, GROWN_STAGE))
    recipes = {name: dataclasses.replace(recipe, stages=stages) for name, recipe in RECIPES.items()}
    monkeypatch.setattr("encode_address.train.RECIPES", recipes)
    monkeypatch.setattr("encode_address.train.scores", lambda model: measure.scores(model, rows=8))
    monkeypatch.setattr("encode_address.train.circuit", lambda model: measure.circuit(model, rows=8))
    return monkeypatch


def test_train_writes_a_model_that_loads_and_says_what_it_is(short, tmp_path):
    short.setattr("encode_address.train.SCREEN_LATE", 0.0)
    short.setattr("encode_address.train.SCREEN_FIRST", 1.0)
    lines = []
    folder = train("tiny-mamba2", 3, tmp_path, lines.append)
    assert [(line["stage"], line["step"]) for line in lines] == [("base", 2), ("grown", 2)]
    model = ea.load(str(folder))
    assert [block.span for block in model.layout.blocks] == ["0", "2", "4-6"]
    assert len(ea.tasks.dictionary(model, "chat8/far").questions(2)) == 2
    card = json.loads((folder / "card.json").read_text())
    assert card == json.loads((folder.parent / "card.json").read_text())
    assert (card["seed"], card["steps"], card["status"]) == (3, {"base": 2, "grown": 2}, "finished")
    assert set(card["accuracy"]) >= {"chat8", "list8/far", "rev16"}
    assert set(card["circuit"]["blocks"]) == {"G0", "G1", "G2"}
    assert set(card["circuit"]["softmax"]) == {"L1", "L3", "L7"}
    assert len(card["circuit"]["sets"]) == 4
    assert all("/" not in word or word.startswith("encode-address") for word in card["command"].split())
    again = train("tiny-mamba2", 3, tmp_path, lines.append)
    assert (again, len(lines)) == (folder, 2)  # nothing is trained twice
    with locked(tmp_path / "tiny-mamba2-seed3"), pytest.raises(StoreError, match="in use by another run"):
        train("tiny-mamba2", 3, tmp_path)


def test_a_base_without_a_late_address_is_not_grown_and_its_card_says_so(short, tmp_path):
    with pytest.raises(ModelError, match=r"tiny-gdn, seed 5: the base's late block redirects .* take another seed"):
        train("tiny-gdn", 5, tmp_path)
    card = json.loads((tmp_path / "tiny-gdn-seed5" / "card.json").read_text())
    assert card["status"].startswith("not grown: the base's late block redirects")
    assert not (tmp_path / "tiny-gdn-seed5" / "model").exists()


def test_an_unknown_recipe_is_one_line():
    with pytest.raises(
        NameNotFound,
        match="no recipe for 'tiny': there is one for tiny-gdn, tiny-mamba2, tiny-griffin, tiny-gdn-negative",
    ):
        train("tiny")
    assert issubclass(NameNotFound, EncodeAddressError)


def test_the_score_is_of_the_entry_asked_for(tmp_path):
    """A model that always says one word is right as often as that word is the answer."""
    model = build("mamba2", "la", 0).eval()
    batch = ask("chat", 8, [""], 64, torch.Generator().manual_seed(measure.SEED))
    said = batch.ids[:, batch.answers[0] + 1]
    with torch.no_grad():
        picked = model(batch.ids[:, : batch.answers[0] + 1], use_cache=False).logits[:, -1].argmax(-1)
    assert measure.accuracy(model, "chat", "", 8, 64) == round(float((picked == said).float().mean()), 4)
    write_model(model, tmp_path, {"name": "x"})
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "granitemoehybrid"


# -- measures ---------------------------------------------------------------------------------
class Copier(torch.nn.Module):
    """Says what its last "mixer" output names: a model whose circuit is known by construction.

    Layer 0 finds the asked key; layer 1 finds the value of the key that layer 0 wrote.
    """

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.config = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
        layers = [torch.nn.Module() for _ in range(3)]
        layers[0].linear_attn, layers[1].self_attn, layers[2].linear_attn = (torch.nn.Identity() for _ in range(3))
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList(layers)

    def forward(self, input_ids, **options):
        asked = ask(self.form, 8, [""], 1, torch.Generator().manual_seed(0))
        rows, length = input_ids.shape
        key = torch.zeros(rows, length, 1)
        key[:, -1, 0] = input_ids[:, asked.asked[-1]].float()
        key = self.model.layers[0].linear_attn(key)[:, -1, 0]
        hit = input_ids[:, asked.keys] == key[:, None].long()
        value = (input_ids[:, asked.values] * hit).sum(1)
        self.model.layers[2].linear_attn(torch.ones(rows, length, 1))
        logits = torch.nn.functional.one_hot(value, len(vocabulary())).float()[:, None]
        return type("Output", (), {"logits": logits})


@pytest.mark.parametrize("form", FORMATS)
def test_the_measures_find_a_circuit_that_is_known(form):
    model = Copier(form)
    assert measure.accuracy(model, form, "", rows=16) == 1.0
    assert measure.redirected(model, [0], form, "", rows=16) == 1.0
    assert measure.redirected(model, [2], form, "", rows=16) == 0.0
    with captured(model, [0]) as seen:
        measure.accuracy(model, form, "", rows=4)
    assert seen[0].shape[::2] == (4, 1)
    assert measure.carried(model, [0], "value", form, "", rows=16) == 0.0  # it reads the words themselves


# -- the choice of a seed -----------------------------------------------------------------------
def finished(seed: int, redirect: float = 1.0, other: float = 0.0, ratio: float = 1.5, keys: float = 1.0) -> dict:
    no, yes = ({"value": {"chat8": share}, "key": {"chat8": share}} for share in (0.0, 0.9))
    block = {"redirected": {"chat8": other}, "removed": {"chat8": 1.0}, "carried": no, "perplexity_ratio": ratio}
    address = {"redirected": {"chat8": redirect}, "removed": {"chat8": 0.1}, "carried": no, "perplexity_ratio": 1.0}
    first = {"redirected": {"chat8": 0.0}, "removed": {"chat8": 0.0}, "carried": yes, "perplexity_ratio": 99.0}
    card = {
        "seed": seed,
        "status": "finished",
        "wall_seconds": {},
        "base": {},
        "perplexity": 4.0,
        "accuracy": dict.fromkeys(("chat8", "list8", "rev8"), 1.0),
        "circuit": {
            "blocks": {"G0": first, "G1": block, "G2": address},
            "sets": {"G0+G1": other},
            "address": "G2",
            "accuracy_without_address_in": {"keys": {"chat8": keys}},
        },
    }
    return card | {"demands": ship.demands(card)}


def test_the_seed_that_meets_most_demands_is_shipped_and_of_equals_the_lowest():
    good, idle, weak = finished(2), finished(0, ratio=1.1), finished(1, redirect=0.8, keys=0.5)
    assert [sum(d["met"] for d in card["demands"]) for card in (good, idle, weak)] == [7, 6, 5]
    assert ship.choose([idle, weak, good]) is good
    assert ship.choose([good, finished(1), weak])["seed"] == 1
    assert ship.choose([{"seed": 0, "status": "not grown"}]) is None
    assert [d["value"] for d in good["demands"]] == [1.0, 1.0, 1.0, 0.9, 1.0, 1.0, 1.5]


def test_ship_copies_the_model_and_lists_every_seed(tmp_path, monkeypatch):
    monkeypatch.setattr(ship, "RECIPES", {"tiny-gdn": RECIPES["tiny-gdn"]})
    failed = {"seed": 4, "status": "not grown: it was so", "wall_seconds": {}, "base": {"late_redirects": 0.1}}
    for card in (finished(3), failed):
        folder = tmp_path / "trained" / f"tiny-gdn-seed{card['seed']}"
        (folder / "model").mkdir(parents=True)
        (folder / "card.json").write_text(json.dumps(card))
        (folder / "model" / "weights").write_text(str(card["seed"]))
    target = tmp_path / "bundled"
    assert ship.ship(tmp_path / "trained", target) == ["tiny-gdn: seed 3 of 2; not met: nothing"]
    assert (target / "tiny-gdn" / "weights").read_text() == "3"
    card = json.loads((target / "tiny-gdn" / "card.json").read_text())
    assert [(row["seed"], row["status"]) for row in card["seeds"]] == [(3, "finished"), (4, failed["status"])]
    assert card["selection"] == ship.RULE
    text = {part: (target / f"text-{part}.txt").read_text().splitlines() for part in ("train", "test")}
    assert all(len(line.split()) == 57 for part in text.values() for line in part)
    assert not set(text["train"]) & set(text["test"])
    with pytest.raises(StoreError, match="no finished seed of tiny-gdn"):
        ship.ship(tmp_path / "nothing", target)
