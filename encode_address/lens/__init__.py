"""The Jacobian lens: what a residual stream says through the layers above it and the model's own head (arXiv 2608.15022)."""

from encode_address.lens.files import import_published, load, save
from encode_address.lens.fitted import Lens, logit_lens
from encode_address.lens.fitting import fit, merge, rows_of
from encode_address.lens.reading import Reading, read
from encode_address.lens.traced import head_rows, lens_logits, summed_gradients

__all__ = [
    "Lens",
    "Reading",
    "fit",
    "head_rows",
    "import_published",
    "lens_logits",
    "load",
    "logit_lens",
    "merge",
    "read",
    "rows_of",
    "save",
    "summed_gradients",
]
