"""One thread: small models gain little from two, and lose much when another process wants the cores."""

import torch

torch.set_num_threads(1)
