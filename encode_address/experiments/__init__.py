"""One file per question: `cells(...)` makes the plan, `steps` and `conclude` are the whole experiment (see `lab`)."""

from encode_address.experiments import baseline, encode, readers, removal, transplant

# What `encode-address run` knows, in the paper's order; it names only what works.
EXPERIMENTS = {"transplant": transplant}

__all__ = ["EXPERIMENTS", "baseline", "encode", "readers", "removal", "transplant"]
