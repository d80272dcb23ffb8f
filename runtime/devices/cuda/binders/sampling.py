"""Sampling as launches, and how rows are sampled: columns in the block of the step's inputs, tables
apart from it. Results go where the step's other results are, and stay there for the next step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from pykernels.gpu.common.stream_memory import supports as why_no_flags
from pykernels.gpu.common.stream_memory import wait_value
from pykernels.gpu.sampling import count_tokens, sample
from pykernels.ref.sampling import Sampled
from pykernels.ref.sampling.inputs import SamplingInputs

from ....program.node import Node
from ....program.ops import SAMPLING, SAMPLING_TABLES
from ....program.step_inputs import MASKS_WRITTEN, sampling_dtype
from ....runner.sampling import SamplingBatch
from ..memory.blocks import Shape
from ..memory.buffers import GpuBuffers
from .dense import Launch

ROWS = 64
"""Rows that are sampled at once: scratch is twice as large as their logits."""
_LONG = ("seed", "draws")
_DTYPES = {
    name: torch.int64
    if name in _LONG
    else torch.float32
    if sampling_dtype(name) == torch.float32
    else torch.int32
    for name in SAMPLING
}
"""The dtypes of the columns on a GPU."""


def sample_requests(m: GpuBuffers, node: Node) -> Launch:
    """Launches the same kernels whatever the rows ask for: a greedy row, or one without penalties,
    biases or a mask, skips what it does not need. Masks may be written while earlier nodes run."""
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

    written = m.optional(node, "masks_written") if waits_for_masks(m.device) else None

    def launch() -> None:
        if written is not None:
            wait_value(written.data_ptr(), 1)
        for part in parts:
            sample(*part)
        count_tokens(out.tokens, seen_row, seen)

    return launch


def waits_for_masks(device: torch.device) -> bool:
    """Whether a step on the GPU can begin before its masks are there."""
    return device.type == "cuda" and why_no_flags() is None


class SamplingColumns:
    """The columns of up to R rows, in a block that is staged for each step.

    Attributes:
        shapes: by buffer, the columns [R].
    """

    def __init__(self, sampling: SamplingBatch, R: int) -> None:
        self._sampling, self._R, self._version = sampling, R, -1
        self.shapes: dict[str, Shape] = {
            f"sampling.{name}": ((R,), dtype) for name, dtype in _DTYPES.items()
        }

    def stage(self, block: Mapping[str, np.ndarray], kept: bool = True) -> None:
        """Writes what has changed since the last step.

        Args:
            block: the columns on the host.
            kept: nothing else was written there since.
        """
        sampling = self._sampling
        changed = SAMPLING if not kept or self._version != sampling.version else ("draws",)
        for name in changed:
            block[f"sampling.{name}"][:] = sampling.columns[name][: self._R]
        self._version = sampling.version


class SamplingTables:
    """The tables: biases cross when the batch changes, only as far as rows have any. Masks stay in
    pinned memory, where the sampler reads them: they may be written when its step already runs.
    What penalties go by is on the GPU only.

    Attributes:
        tensors: by buffer.
    """

    def __init__(self, sampling: SamplingBatch, device: torch.device) -> None:
        self._sampling, self._version = sampling, -1
        self.tensors = {
            f"sampling.{name}": torch.zeros_like(table, device=device)
            for name, table in sampling.tables.items()
            if name != "mask"
        }
        self.tensors |= {"sampling.mask": sampling.tables["mask"], "sampling.seen": sampling.seen}
        self.tensors[MASKS_WRITTEN] = sampling.masks_written

    def send(self) -> None:
        """Copies what the step needs; the tables are free again when its results are there."""
        sampling = self._sampling
        if self._version != sampling.version:
            self._version = sampling.version
            self._send("bias_ids", sampling.biases)
            self._send("bias", sampling.biases)

    def _send(self, name: str, count: int) -> None:
        if count:
            table = self.tensors[f"sampling.{name}"]
            table[:count].copy_(self._sampling.tables[name][:count], non_blocking=True)
