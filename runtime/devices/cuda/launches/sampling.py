"""Sampling as launches: results go where the step's other results are, and stay there for the next
step."""

from __future__ import annotations

from pykernels.gpu.common.stream_memory import wait_value
from pykernels.gpu.sampling import count_tokens, sample
from pykernels.ref.sampling import Sampled
from pykernels.ref.sampling.inputs import SamplingInputs

from ....program.node import Node
from ....program.ops import SAMPLING, SAMPLING_TABLES
from ..memory.buffers import Memory
from .dense import Launch

ROWS = 64
"""Rows that are sampled at once: scratch is twice as large as their logits."""


def sample_requests(m: Memory, node: Node) -> Launch:
    """The same launches whatever the rows ask for: a row that has no penalties, biases or mask, or
    is greedy, leaves out what it does not need. Masks may come while what is before this runs."""
    logits = m.read(node, "logits")  # float32 [R, V]
    inputs = SamplingInputs(
        **{
            "logprobs" if name == "num_logprobs" else name: m.read(node, name)
            for name in (*SAMPLING, *SAMPLING_TABLES)
        }
    )
    out = Sampled(*(m.written(node, name) for name in Sampled._fields))
    seen, seen_row = inputs.seen, inputs.seen_row
    assert seen is not None and seen_row is not None
    parts = [
        (logits[at], inputs.rows(at), Sampled(*(result[at] for result in out)))
        for at in (slice(first, first + ROWS) for first in range(0, len(logits), ROWS))
    ]

    written = m.masks_written

    def launch() -> None:
        if written is not None:
            wait_value(written.data_ptr(), 1)
        for part in parts:
            sample(*part)
        count_tokens(out.tokens, seen_row, seen)

    return launch
