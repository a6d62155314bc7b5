"""One file per question. Each has `cells(...)`, the plan, and `run(model, ...)`, the table; defaults are the paper's."""

from encode_address.experiments import baseline, encode, readers, removal, transplant

__all__ = ["baseline", "encode", "readers", "removal", "transplant"]
