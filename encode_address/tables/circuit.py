"""The tables of the paper's appendix that look at parts of the circuit: every model has its own (specification 5.1, 5.10)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from encode_address.experiments import encode_linear as projection
from encode_address.experiments import routes as ways
from encode_address.experiments import state as states
from encode_address.experiments import steer as edits
from encode_address.experiments import upstream as before
from encode_address.experiments import writers as scan
from encode_address.metrics import select
from encode_address.run.projection import UNITS
from encode_address.tables.results import Results, mean
from encode_address.tables.table import Line, Table, build

CARRIERS = {
    "recurrent state": "recurrent", "conv state": "conv", "both states": "both", "output": "transplant", "mixers' input": "input",
    "block's input": "residual",
}  # fmt: skip
PLACES = ("value", "delimiter", "value and delimiter", "dictionary", "final")
ARMS = (
    ("kv", "clean"),
    ("state", "clean"),
    ("both", "clean"),
    ("both", "identity"),
    ("kv", "permuted"),
    ("state", "permuted"),
)


def state(models: Sequence[Results]) -> Table:
    """Sections 3.9, 3.10: the share redirected by a block's states before the last token, and by its input at it."""

    def lines(model: Results) -> Iterator[Line]:
        for variant in model.variants("state"):
            rows = model.of(variant, "state")
            for unit in (*model.blocks, "all linear"):
                yield (variant, unit), {said: states.redirected(rows, unit, what) for said, what in CARRIERS.items()}

    caption = (
        "State transplant: the share of hosts that answer with the donor's entry when the states of a block before the last token are the donor's; beside it, "
        "with the host's states, its output at the last token, what its mixers get there, and what enters the block."
    )
    return build("state", caption, ("variant", "block"), list(CARRIERS), models, lines)


def upstream(models: Sequence[Results]) -> Table:
    """Section 3.10: the Address of donors that run without another block."""

    def lines(model: Results) -> Iterator[Line]:
        for variant in model.variants("upstream"):
            rows = model.of(variant, "upstream")
            for without in rows["without"].unique():
                donors = select(rows, donor="itself", without=without)
                shares = {
                    "redirected": before.redirected(rows, without),
                    "the donor's own accuracy": mean(donors, "correct"),
                }
                yield (variant, "+".join(model.circuit(variant).address), without or "nothing"), shares

    caption = (
        "Upstream: the Address of donors that run without other blocks is put into the intact host at the last token; the share of hosts that answer with the "
        "donor's entry, and of those donors that answer right themselves."
    )
    columns = ["redirected", "the donor's own accuracy"]
    return build("upstream", caption, ("variant", "Address", "donor without"), columns, models, lines)


def steer(models: Sequence[Results]) -> Table:
    """Section 3.7 put to use: how often an edit redirects, and what it costs."""

    def lines(model: Results) -> Iterator[Line]:
        for variant in model.variants("steer"):
            rows = model.of(variant, "steer")
            for arm in ("output", "state", "random"):
                yield (
                    (variant, "+".join(model.circuit(variant).address), arm),
                    {
                        "redirected": edits.redirected(rows, arm),
                        **{
                            f"{site}: perplexity": edits.perplexity_ratio(rows, site, arm)
                            for site in ("continuation", "unrelated")
                        },
                        **{f"{site}: KL": edits.kl(rows, site, arm) for site in ("continuation", "unrelated")},
                    },
                )

    caption = (
        "Steering by the Address: the share of answers redirected by the donor's output, by its states, and by a random edit of the output's size; what the "
        "edit costs the text after the redirected answer and unrelated text: perplexity as a multiple of that without the edit, and KL in nats per token."
    )
    columns = [
        "redirected",
        *(f"{site}: {cost}" for site in ("continuation", "unrelated") for cost in ("perplexity", "KL")),
    ]
    return build("steer", caption, ("variant", "Address", "edit"), columns, models, lines)


def encode_linear(models: Sequence[Results]) -> Table:
    """Section 3.6: what is left when a block is a map of each token."""

    def lines(model: Results) -> Iterator[Line]:
        for variant in model.variants("encode-linear"):
            rows = model.of(variant, "encode-linear", "encode-linear-text")
            for block in (name for name in model.blocks if "+" not in name):
                for unit in UNITS:
                    arms = [arm for arm in projection.ARMS if (arm, unit) != (projection.ZEROED, "layers")]
                    about = (variant, block, unit)
                    yield (*about, "accuracy"), {arm: projection.kept(rows, block, arm, unit) for arm in arms}
                    yield (
                        (*about, "perplexity"),
                        {arm: projection.perplexity_ratio(rows, block, arm, unit) for arm in arms},
                    )

    caption = (
        "A block as a linear map of each token, of its whole layers or of its mixers alone: accuracy, and perplexity as a multiple of the intact model's. "
        "Beside the map: the same fitted on text only, the constant mean, a map of shuffled pairs, mixers set to zero."
    )
    keys = ("variant", "block", "replaced", "measure")
    return build("encode-linear", caption, keys, list(projection.ARMS), models, lines)


def writers(models: Sequence[Results]) -> Table:
    """Section 3.4: recovery by what is patched and where; the ways and controls of the writer that was found."""

    def lines(model: Results) -> Iterator[Line]:
        for variant in model.variants("writers"):
            rows = model.of(variant, "writers")
            blocks = [name for name in model.blocks if "+" not in name]
            for block in blocks:
                yield (variant, "output", block), {place: scan.recovered(rows, block, place) for place in scan.PLACES}
            yield (variant, "embeddings", "all"), {"value": scan.recovered(rows, "embed", "value")}
            for mode in ("both", "recurrent"):
                places = [place for place, of in scan.STATES if of == mode]
                for block in (*blocks, scan.ALL_STATES):
                    shares = {place: scan.recovered(rows, block, place, "state", site=mode) for place in places}
                    yield (variant, "states" if mode == "both" else "recurrent states", block), shares
            if writer := scan.writer_of(rows):
                for arm in scan.CONTROLS:
                    yield (variant, f"control: {arm}", writer[0]), {writer[1]: scan.recovered(rows, *writer, arm)}
                for arm, readers in scan.way_figures(rows, *writer).items():
                    for way, share in readers.get(scan.ALL_READERS, {}).items():
                        yield (
                            (variant, f"{way} {'opened' if arm == 'open' else 'blocked'}", writer[0]),
                            {writer[1]: share},
                        )

    caption = (
        "Writers: the share of the difference between clean and corrupted prompt that is recovered when outputs or states of the clean one are put into the "
        "corrupted one, by place (the asked entry's value, the token after it, both; after the dictionary; the last token). Controls, and the ways V, K and Q "
        "in all later softmax layers, are those of the unit and place with most recovery."
    )
    return build("writers", caption, ("variant", "patched", "unit"), PLACES, models, lines)


def routes(models: Sequence[Results]) -> Table:
    """Section 3.18: keys and values against states, at two cuts."""

    def lines(model: Results) -> Iterator[Line]:
        for variant in model.variants("routes"):
            rows = model.of(variant, "routes")
            for arm, donor in ARMS:
                shares = {}
                for cut in ways.CUTS:
                    shares[f"{cut}: recovery"] = ways.recovery(rows, arm, donor, cut)
                    shares[f"{cut}: answers as clean"] = ways.carried(rows, arm, donor, cut)
                yield (variant, arm, donor), shares

    caption = (
        "Routes: the share of the gap between corrupted and clean prompt that is recovered when keys and values (kv), states, or both before the cut are those "
        "of the donor, and the share that answers as the clean prompt; the cut is the dictionary's end or before the last token."
    )
    columns = [f"{cut}: {what}" for cut in ways.CUTS for what in ("recovery", "answers as clean")]
    return build("routes", caption, ("variant", "taken", "donor"), columns, models, lines)


def probes(models: Sequence[Results]) -> Table:
    """Section 3.18: what a probe reads off each layer's state."""

    def lines(model: Results) -> Iterator[Line]:
        for variant in model.variants("routes"):
            rows = model.of(variant, "routes")
            known = ways.probed(rows)
            floor = ways.floors(rows)[0] if known else {}
            for mark, by_layer in known.items():
                told = {f"L{layer}": share for layer, share in by_layer.items()}
                yield (
                    (variant, mark),
                    {**told, "presence": floor["floor_correct"], "shuffled": floor["shuffled_correct"]},
                )

    layers = sorted({int(layer) for model in models for layer in select(model.table, part="probes")["layer"].unique()})
    caption = (
        "Probes: the share of prompts whose bound value a linear probe tells from one layer's recurrent state, by the token after which it is read; what the "
        "probe tells from which values are present, and from states with shuffled labels."
    )
    columns = [*(f"L{layer}" for layer in layers), "presence", "shuffled"]
    return build("probes", caption, ("variant", "read after"), columns, models, lines)


CIRCUIT = (state, upstream, steer, encode_linear, writers, routes, probes)
