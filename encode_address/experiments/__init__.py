"""One file per question: `cells(...)` makes the plan, `steps` and `conclude` are the whole experiment (see `lab`)."""

from encode_address.experiments import (
    baseline,
    encode,
    encode_linear,
    minimal,
    pruning,
    query_key,
    readers,
    removal,
    scaling,
    state,
    state_rank,
    steer,
    transplant,
    upstream,
)

# What `encode-address run` knows, in the paper's order; it names only what works.
EXPERIMENTS = {
    "pruning": pruning,
    "removal": removal,
    "transplant": transplant,
    "query-key": query_key,
    "state": state,
    "encode": encode,
    "upstream": upstream,
    "scaling": scaling,
    "steer": steer,
    "encode-linear": encode_linear,
    "minimal": minimal,
    "state-rank": state_rank,
}

__all__ = [
    "EXPERIMENTS",
    "baseline",
    "encode",
    "encode_linear",
    "minimal",
    "pruning",
    "query_key",
    "readers",
    "removal",
    "scaling",
    "state",
    "state_rank",
    "steer",
    "transplant",
    "upstream",
]
