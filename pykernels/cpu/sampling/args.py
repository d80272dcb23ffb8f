"""What the tasks of sampling read: the args, the rows' parameters, and what tasks leave each other.

R rows of a step are cut into chunks of ``CHUNK`` logits. Whatever is summed or compared across
chunks is so in their order, so results are the same bits on any number of workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba.core import types

from ...errors import PykernelsError
from ...ref.sampling import MAX_LOGPROBS
from ..intrin.descriptor import descriptor
from ..intrin.scalar import bits_from_f32, f32_from_bits
from ..jit import inlined

CHUNK = 16384
"""Logits of a task: 64 KiB, which stay in L2 while the task goes over them again."""
GROUP_VECTORS = 16
"""Vectors of a *group*, for which a row's summary keeps the largest logit of each lane."""
CANDIDATES = 4096
"""Logits that a worker takes aside to find the k-th largest; if more are left, it counts them
where they are."""
MAX_V = 1 << 24
"""Token ids are counted in float32 lanes."""

COLUMNS: dict[str, Any] = {
    "temperature": np.float32,
    "top_p": np.float32,
    "min_p": np.float32,
    "repetition": np.float32,
    "presence": np.float32,
    "frequency": np.float32,
    "top_k": np.int64,
    "logprobs": np.int64,
    "seed": np.int64,
    "draws": np.int64,
    "seen_row": np.int64,  # in `seen`; -1: no penalties
    "bias_start": np.int64,  # in `bias_ids` and `bias`
    "bias_count": np.int64,
    "mask_row": np.int64,  # in `mask`; -1: all are allowed
}
"""The parameters of each row (``ref.sampling.inputs.SamplingInputs`` says what they mean), a column
each. Biased ids that are no token's are skipped. Biases are finite, ``repetition`` is positive."""

TABLES = ("seen", "bias_ids", "bias", "mask")
"""What rows have entries of: addresses, 0 where no row has any."""

SAMPLING, sampling_at = descriptor(
    "sampling",
    (
        "count_at",  # address of the number of rows, R
        "V",
        "logits",  # float32 [R, V]
        "logits_stride",  # bytes
        *COLUMNS,  # addresses of the columns, [R_max] each
        *TABLES,  # int32 [.., V], int32 [N], float32 [N], int32 [.., ceil(V / 32)]
        "tokens",  # int64 [R]
        "logprobs_out",  # float32 [R]
        "top_ids",  # int64 [R, MAX_LOGPROBS]
        "top_logprobs",  # float32 [R, MAX_LOGPROBS]
        "adjusted",  # float32 [R_max, V]: rows with a mask, a bias or penalties, after them
        "maxima",  # float32 [R_max, maxima]: of the (adjusted) logits
        "partials",  # PARTIAL [R_max, chunks]
        "scratch",  # of worker 0; the next one's is scratch_stride on
        "scratch_stride",
    ),
)

PARTIAL, partial_at = descriptor(
    "partial",
    (
        "top",  # bits of the largest logit as it came; NaN if there is one
        "total",  # bits of the sum of exp(logit - top); where logprobs are wanted
        "best",  # bits of the largest adjusted logit
        "best_id",  # the lowest that has it
        "first_nan",  # id of the first adjusted logit that is NaN; -1: none
        "noisy",  # bits of the largest perturbed logit (draw)
        "noisy_id",
        "unused",
    ),
)
PARTIAL_BYTES = PARTIAL.itemsize


@dataclass(frozen=True)
class Sizes:
    """Memory that sampling from up to ``R`` rows of ``V`` logits on ``workers`` workers wants.

    Attributes, in bytes:
        adjusted: only rows that are adjusted touch theirs.
        maxima, partials: of all rows.
        scratch, scratch_stride: of all workers, of one.
    """

    adjusted: int
    maxima: int
    partials: int
    scratch: int
    scratch_stride: int


def sizes(R: int, V: int, workers: int) -> Sizes:
    """What a ``SAMPLING`` record's addresses point at.

    Raises:
        PykernelsError: a vocabulary that is too large to count in float32.
    """
    if not 0 < V < MAX_V:
        raise PykernelsError(f"a vocabulary of {V}", f"Sampling takes 1 .. {MAX_V - 1} tokens")
    lanes = 16  # the widest kernel's: one that was compiled before features were hidden may run
    groups = -(-V // (GROUP_VECTORS * lanes))
    stride = 4 * (CANDIDATES + groups * lanes + lanes)
    stride = (stride + 63) // 64 * 64
    return Sizes(
        adjusted=4 * R * V,
        maxima=4 * R * groups * lanes,
        partials=PARTIAL_BYTES * R * -(-V // CHUNK),
        scratch=stride * workers,
        scratch_stride=stride,
    )


@inlined
def word(value):
    """A float32 as a field of a record."""
    return types.int64(bits_from_f32(value))


@inlined
def number(word):
    """The float32 of such a field."""
    return f32_from_bits(types.uint32(word))


assert MAX_LOGPROBS <= 64, "top logprobs are sorted on the stack"
