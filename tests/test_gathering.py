"""The grid's forwards: against plain hooks, identity patches, triangular influence, a value planted at a known layer, noise."""

from __future__ import annotations

import pytest
import torch

import encode_address
from encode_address.errors import NameNotFound
from encode_address.gathering import sites as places
from encode_address.gathering.sites import KINDS, Site, crossed, sites_of
from encode_address.gathering.traced import patch_batches, replacement
from encode_address.lens import fit
from encode_address.run.batch import ids_of
from tests import gathering_oracle as oracle
from tests.tiny import PATTERN, VOCAB, build, load_tiny, questions, toy_tokenizer

N, LENGTH, WIDTH = 3, 40, 48
DEPTH = len(PATTERN)


@pytest.fixture(scope="module", params=["qwen3_5_text", "granite"])
def setup(request):
    model, items = load_tiny(request.param), questions(N, length=LENGTH)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.stack([torch.randperm(len(VOCAB), generator=generator)[:9] for _ in range(N)])
    given = {
        "hosts": ids_of([item.host for item in items]),
        "donors": ids_of([item.donor for item in items]),
        "places": (torch.full((N, 1), LENGTH - 1),) * 2,
        "lens": (
            False,
            {i: torch.eye(WIDTH) + torch.randn(WIDTH, WIDTH, generator=generator) / 9 for i in range(DEPTH)},
        ),
        "concepts": tokens[:, :2],
        "rivals": tokens[:, 2:8].reshape(N, 2, 3),
        "asked": tokens[:, :4],
        "seeds": {layer: [layer * N + i for i in range(N)] for layer in range(DEPTH)},
    }
    return model, build(request.param), given


def run(model, given, sites, kind="donor", **changes):
    batch = {name: value for name, value in given.items() if name != "lens"} | changes
    (seen,) = model.ask(patch_batches, [batch], places.plain(model, sites), given["lens"], kind)
    return seen


def outputs_of(model, kinds=KINDS, layers=(0, 2, 5)):
    return [site for site in sites_of(model, kinds) if site.layer in layers and site.kind != "state"]


def test_the_grid_is_that_of_plain_hooks(setup):
    model, module, given = setup
    for positions in (given["places"][0], torch.tensor([[LENGTH - 3, LENGTH - 1]] * N)):
        sites = outputs_of(model)
        seen = run(model, given, sites, places=(positions, positions))
        clean = oracle.patched(module, given["hosts"], 0, "mixer", positions, None)
        for site in [None, *sites]:
            if site is None:
                streams, logits = clean
            else:
                values = oracle.captured(module, given["donors"], site.layer, site.kind, positions)
                streams, logits = oracle.patched(module, given["hosts"], site.layer, site.kind, positions, values)
            found = seen["clean" if site is None else site.name]
            for r in range(DEPTH):
                margin, rank = oracle.margins(
                    module, streams[r], given["lens"][1][r], given["concepts"], given["rivals"]
                )
                scale = max(1.0, float(margin.std()))
                assert (found["margin"][r] - margin).abs().max() < 1e-4 * scale, (site, r)
                assert ((found["rank"][r] - rank).abs() <= 1).all(), (site, r)
            assert torch.allclose(
                found["answer"]["logits"], logits.gather(1, given["asked"]), atol=1e-4 * float(logits.std()) + 1e-4
            )
            assert all(found["landed"])
            assert site is None or len(found["landed"]) == len(site.layers)


def test_states_are_those_of_a_continued_cache(setup):
    model, module, given = setup
    sites = [site for site in sites_of(model, ("state",)) if site.layer in (0, 5)]
    seen = run(model, given, sites)
    for site in [None, *sites]:
        streams, _ = oracle.state_patched(module, given["hosts"], given["donors"], None if site is None else site.layer)
        found = seen["clean" if site is None else site.name]
        for r in range(DEPTH):
            margin, _ = oracle.margins(module, streams[r], given["lens"][1][r], given["concepts"], given["rivals"])
            assert (found["margin"][r] - margin).abs().max() < 1e-3 * max(1.0, float(margin.std())), (site, r)
    assert not torch.equal(seen["state.L5"]["margin"][5], seen["clean"]["margin"][5])


def test_identity_patches_change_nothing(setup):
    model, _, given = setup
    several = Site("mixer", (5, 6), "G2")
    for sites in ([*outputs_of(model), several], sites_of(model, ("state",))):
        seen = run(model, given, sites, "identity")
        for site in sites:
            for name in ("margin", "rank"):
                assert torch.equal(seen[site.name][name], seen["clean"][name]), site
            assert torch.equal(seen[site.name]["answer"]["logits"], seen["clean"]["answer"]["logits"])


def test_influence_is_lower_triangular(setup):
    """Nothing below the patched layer moves, and at it something does, but where the last token's own key and value hardly count."""
    model, _, given = setup
    sites = [*outputs_of(model), Site("mixer", (5, 6), "G2")]
    for some in (sites, sites_of(model, ("state",))):
        seen = run(model, given, some)
        for site in some:
            before, first = site.layers[0], seen[site.name]["margin"]
            assert torch.equal(first[:before], seen["clean"]["margin"][:before]), site
            moved = (first[site.layer] - seen["clean"]["margin"][site.layer]).abs().max()
            assert moved > (0 if site.layer else -1), site  # at layer 0 the last tokens of both prompts may agree


def planted(where):
    """A model in which one layer's mixer alone adds to the residual stream."""
    module = build("granite")
    with torch.no_grad():
        for i, layer in enumerate(module.model.layers):
            layer.shared_mlp.output_linear.weight.zero_()
            out = layer.mamba.out_proj if layer.mamba is not None else layer.self_attn.o_proj
            for parameter in out.parameters() if i != where else ():
                parameter.zero_()
    return encode_address.load(module, tokenizer=toy_tokenizer())


@pytest.mark.parametrize("where", [3, 4])
def test_a_value_is_found_at_the_layer_that_writes_it(where):
    """A linear layer (3) and a softmax one (4): what the donor says becomes readable where that mixer, or the stream from it on, is
    patched, by exactly what the donor's own run has, and nowhere else. Above it J is the identity, below it is not."""
    model, items = planted(where), questions(N, length=LENGTH)
    hosts, donors = ids_of([item.host for item in items]), ids_of([item.donor for item in items])
    lens = fit(model, [list(range(4, 30)), list(range(40, 66))], skip=4, width=WIDTH)
    assert all(torch.allclose(lens.matrix(r), torch.eye(WIDTH), atol=1e-6) == (r >= where) for r in range(DEPTH))
    own, other = (model_says(model, ids) for ids in (hosts, donors))
    most = (other - own).argmax(1)  # what the donor says more than the host does
    rivals = torch.stack([row.topk(4).indices for row in own - other])
    given = {
        "hosts": hosts, "donors": donors, "places": (torch.full((N, 1), LENGTH - 1),) * 2,
        "lens": (False, {r: lens.matrix(r) for r in lens.readable}),
        "concepts": most[:, None], "rivals": rivals[:, None], "asked": most[:, None], "seeds": {},
    }  # fmt: skip
    seen = run(model, given, sites_of(model, ("residual", "mixer", "mlp")))
    expected = ((other - own).gather(1, most[:, None]) - (other - own).gather(1, rivals).mean(1, keepdim=True))[:, 0]
    assert (expected > 0.03).all()
    for site in sites_of(model, ("residual", "mixer", "mlp")):
        shift = (seen[site.name]["margin"] - seen["clean"]["margin"])[..., 0]
        writes = (site.kind == "mixer" and site.layer == where) or (site.kind == "residual" and site.layer >= where)
        for r in range(DEPTH):
            there = expected if writes and r >= site.layer else torch.zeros(N)
            assert torch.allclose(shift[r], there, atol=1e-3), (site, r)


def model_says(model, ids):
    with torch.no_grad(), model.trace(ids, logits_to_keep=1) as tracer:
        logits = tracer.result.logits[:, -1].float().save()
    return logits


def test_noise_is_as_long_as_the_difference():
    generator = torch.Generator().manual_seed(0)
    own, other = torch.randn(2, 3, 2, 4, 5, generator=generator)
    noisy = replacement(own, other, "random", [1, 2, 3])
    assert torch.allclose((noisy - own).norm(dim=(2, 3)), (other - own).norm(dim=(2, 3)), rtol=1e-5)
    assert (
        torch.nn.functional.cosine_similarity((noisy - own).flatten(2), (other - own).flatten(2), -1).abs() < 0.9
    ).all()
    assert torch.equal(noisy[1:], replacement(own[1:], other[1:], "random", [2, 3]))  # whatever else is in the batch
    mean = replacement(own, own[:0], "mean", [])
    assert torch.allclose(mean[0], (own[1] + own[2]) / 2, atol=1e-6)


def test_sites_by_kind(setup):
    model = setup[0]
    names = {kind: [site.layer for site in sites_of(model, (kind,))] for kind in KINDS}
    softmax = [i for i, kind in enumerate(PATTERN) if kind == "a"]
    assert names["residual"] == names["mixer"] == names["mlp"] == [*range(DEPTH)]
    assert names["query"] == names["key"] == names["value"] == softmax
    assert names["state"] == [i for i in range(DEPTH) if i not in softmax]
    assert [crossed(model.layout, 1, r) for r in range(1, DEPTH)] == [0, 1, 1, 2, 2, 2, 3, 3]
    assert Site("mixer", (5, 6), "G2").reads(9) == range(6, 9)
    assert Site("residual", (5,)).reads(9) == range(6, 9)
    with pytest.raises(NameNotFound, match="no site kind 'head'"):
        sites_of(model, ("head",))
