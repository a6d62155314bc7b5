"""A checkpoint folder of a real family with a chat template: the path a researcher's own model takes."""

import json

import pytest
from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig

import encode_address as ea
from encode_address.circuit import report
from encode_address.tasks.pools import PAPER_POOLS
from tests import tiny
from tests.toy_tokenizers import toy_tokenizer

CLASSES = {
    "qwen": (Qwen3_5ForCausalLM, Qwen3_5TextConfig, tiny.qwen_settings),
    "granite": (GraniteMoeHybridForCausalLM, GraniteMoeHybridConfig, tiny.granite_settings),
}


@pytest.fixture(scope="module", params=CLASSES)
def checkpoint(request, tmp_path_factory):
    """A saved random model whose tokenizer splits bytes and has a chat template, and a text to go with it."""
    folder = tmp_path_factory.mktemp("hub") / f"random-{request.param}"
    tokenizer = toy_tokenizer(request.param)
    model_class, config_class, settings = CLASSES[request.param]
    module = model_class(config_class(**settings("lalal", vocab_size=len(tokenizer))))
    tiny.randomise(module).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    words = [word for pool in PAPER_POOLS.values() for words in pool.values() for word in words]
    text = folder.parent / "text.txt"
    text.write_text("\n".join(" ".join(words[i:] + words[:i]) for i in range(12)))
    return folder, text


def test_find_asks_it_in_the_papers_words_and_says_that_it_cannot_do_the_task(checkpoint, tmp_path):
    folder, text = checkpoint
    model = ea.load(str(folder))
    found = ea.find(model, ["chat8", "list8", "rev8"], n=4, text=str(text), out=tmp_path)
    assert found.folder == tmp_path / folder.name
    assert found.verdict.status == "UNDECIDED"
    assert "cannot do the task" in found.verdict.reason
    assert (found.verdict.encode, found.verdict.address, found.verdict.readers) == ((), (), ())
    manifest = json.loads((found.folder / "manifest.json").read_text())
    assert manifest["text_source"] == "text.txt"
    assert set(manifest["dropped_words"]) == {"chat8", "list8", "rev8"}
    hosts = found.table[(found.table["experiment"] == "transplant") & (found.table["intervention"] == "none")]
    assert {word for keys in hosts["keys"] for word in keys} <= set(PAPER_POOLS["A"]["keys"])
    assert "UNDECIDED" in report(found, model)


def test_the_checks_hold(checkpoint):
    assert ea.load(str(checkpoint[0])).check().ok


def test_without_a_text_the_remedy_is_named(checkpoint, tmp_path):
    with pytest.raises(ea.EncodeAddressError, match="--text FILE"):
        ea.find(ea.load(str(checkpoint[0])), ["chat8"], n=4, out=tmp_path)
    assert not list(tmp_path.iterdir())
