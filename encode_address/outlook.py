"""`encode-address plan`: what a model is and what an experiment on it would take, without its weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from encode_address import circuit, lab
from encode_address.models import loading, real
from encode_address.models.families import refuse

VOCABULARY = "tiny-gdn"  # whose tokenizer, words and text stand in where a checkpoint's own are not fetched
OWN = "own"


def sketch(
    name: str, dtype: str | None = None, revision: str | None = None, tokenizer: str | None = None
) -> tuple[real.Sketch, real.Facts | None]:
    """The model of that name without weights, and the facts that it was made from, if they ship with the package.

    `tokenizer`: "own", a bundled model's name, a folder or a hub name. By default a model whose facts are shipped is not
    looked up on the hub: its prompts are then made of a bundled model's words.
    """
    known = real.facts(name)
    bundled = loading.bundled_folder(name)
    source = known.hub if known else str(bundled or name)
    config = known.config if known else loading.read_config(name, source, revision)
    refuse(config, name)
    asked = tokenizer or (VOCABULARY if known else OWN)
    folder = loading.bundled_folder(asked) if asked != OWN else bundled
    words = loading.read_tokenizer(name, source if asked == OWN else str(folder or asked), revision)
    return real.Sketch(
        config, words, name, loading.pick_dtype(dtype), folder, known.unconfirmed if known else ()
    ), known


def outlook(
    name: str,
    experiment: str = "find",
    *,
    variants: Sequence[str] | None = None,
    n: int | None = None,
    seed: int = 0,
    quick: bool = False,
    text: str | None = None,
    pool: str = "A",
    dtype: str | None = None,
    revision: str | None = None,
    tokenizer: str | None = None,
    batch_tokens: int | None = None,
) -> str:
    """A few lines: layers, blocks and readers, the weights' size, and the forward tokens, traces and caches of an experiment.

    Raises EncodeAddressError subclasses for anything a user can mend.
    """
    if experiment != "find":
        lab.named(experiment)  # before a model is made
    model, known = sketch(name, dtype, revision, tokenizer)
    lines = [*_model(model), *_stand_in(known, tokenizer)]
    if experiment == "find":
        chosen = list(variants or (["chat8"] if quick else circuit.VARIANTS))
        pairs = n if n is not None else circuit.QUICK_N if quick else circuit.N
        asked = (model, chosen, pairs, seed, text, pool)
        cost = circuit.dry_run(*asked, batch_tokens=batch_tokens, fresh=True)
    else:
        options: dict[str, Any] = {"n": n, "seed": seed, "quick": quick, "text": text, "pool": pool}
        cost = lab.dry_run(experiment, model, variants, batch_tokens=batch_tokens, fresh=True, **options)
    return "\n".join([*lines, cost])


def _model(model: real.Sketch) -> list[str]:
    layout = model.layout
    blocks = "  ".join(
        f"{b.name} [{b.span}]" + (f" -> L{b.reader}" if b.reader is not None else "") for b in layout.blocks
    )
    lines = [
        f"{model.name}: family {model.family.name}, {len(layout.kinds)} layers, {len(layout.linear_layers)} linear, "
        f"{len(layout.softmax_layers)} softmax",
        f"  blocks  {blocks}",
    ]
    if model.unconfirmed:
        return [*lines, f"  unconfirmed: {', '.join(model.unconfirmed)}; so no sizes are given"]
    heads, size = (
        f"{model.heads} heads x {model.head_dim}",
        f"{model.weight_bytes / 1e6:,.0f} MB of weights in {model.dtype}",
    )
    return [*lines, f"  {heads}; {model.parameters:,} parameters, {size}"]


def _stand_in(known: real.Facts | None, tokenizer: str | None) -> list[str]:
    if known is None or tokenizer is not None:
        return []
    return [
        f"  prompts in the words of {VOCABULARY}; --tokenizer own fetches {known.hub}'s tokenizer, whose prompts have other lengths"
    ]
