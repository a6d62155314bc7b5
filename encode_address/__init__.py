"""Find, cut, move and stitch the Encode-Address circuit of hybrid language models.

    import encode_address as ea
    model = ea.load("tiny-gdn")
    table = ea.experiment("transplant", model).table

The words (layer, block, reader, donor, host, cell, ...) are those of ARCHITECTURE.md.
"""

import nnsight

__version__ = "0.1.0"

# What runs inside a trace travels by value: a server has never seen this package.
nnsight.register("encode_address")

from encode_address import experiments, interventions, measure, metrics, stats, tasks  # noqa: E402
from encode_address.circuit import find  # noqa: E402
from encode_address.errors import EncodeAddressError  # noqa: E402
from encode_address.lab import experiment  # noqa: E402
from encode_address.models.hybrid import HybridModel  # noqa: E402
from encode_address.models.loading import load  # noqa: E402
from encode_address.run.cells import Cell  # noqa: E402
from encode_address.run.engine import Engine  # noqa: E402
from encode_address.steering import steer  # noqa: E402

__all__ = [
    "Cell",
    "EncodeAddressError",
    "Engine",
    "HybridModel",
    "experiment",
    "experiments",
    "find",
    "interventions",
    "load",
    "measure",
    "metrics",
    "stats",
    "steer",
    "tasks",
]
