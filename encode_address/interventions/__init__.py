"""Interventions and readouts to be used INSIDE an nnsight trace.

Each is a module-level function of a few lines that uses torch only, takes envoys and tensors and returns
tensors, so that it runs unchanged locally and on a server that has never seen this package. None loops over
prompts and none computes a metric (those are in `measure`).
"""

from encode_address.interventions.attention import (
    attention_scores,
    best_heads,
    exposed,
    keep_heads,
    noise,
    scores_of,
    sharpness,
    under,
    write_outputs,
)
from encode_address.interventions.heads import head_outputs, remove_head
from encode_address.interventions.outputs import capture, mixer_output, remove, transplant
from encode_address.interventions.query_key import (
    attention_row,
    entry_attention,
    final_attention,
    gates,
    query_and_key,
    value_of,
    write_gate,
    write_key,
    write_query,
    write_value,
)
from encode_address.interventions.state import held_in, read_cache, slots, write_cache, write_state_head
from encode_address.interventions.truncate import truncated_logits

__all__ = [
    "attention_row",
    "attention_scores",
    "best_heads",
    "capture",
    "entry_attention",
    "exposed",
    "final_attention",
    "gates",
    "head_outputs",
    "held_in",
    "keep_heads",
    "mixer_output",
    "noise",
    "query_and_key",
    "read_cache",
    "remove",
    "remove_head",
    "scores_of",
    "sharpness",
    "slots",
    "transplant",
    "truncated_logits",
    "under",
    "value_of",
    "write_cache",
    "write_gate",
    "write_key",
    "write_outputs",
    "write_query",
    "write_state_head",
    "write_value",
]
