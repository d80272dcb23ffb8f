"""The second op: the best draw of a chunk, for rows where top-k and min-p leave out nothing.

It is an op of its own so that the largest logit of the whole row is known: of a row as models make
them few logits are near enough to it to win, and noise is made for these alone.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ..jit import inlined, task
from ..job import i64
from .job import CHUNK, sampling_at, word
from .passes import LEAST, make_passes
from .rows import heat_of, keeps_all, largest, partial_of, row_of

_ZERO = np.float32(0.0)


@inlined
def draws_by_chunks(job, r):
    """Whether the row is one of those."""
    return heat_of(job, r) > _ZERO and keeps_all(job, r)


@functools.cache
def make_draw() -> tuple[Any, Any]:
    """Compiles (open, run), tasks of ``SAMPLING``, to be run after the scan: one for a chunk of a
    row; none where no row asks for it."""
    P = make_passes()
    GROUP, STEP, best_draw = P.GROUP, P.STEP, P.best_draw
    CHUNK_GROUPS = CHUNK // GROUP

    @task("sampling-draw-open")
    def opening(address, index, worker):
        job = sampling_at(address)
        R = i64(job.count_at, 0)
        for r in range(R):
            if draws_by_chunks(job, r):
                return R * ((job.V + CHUNK - 1) // CHUNK)
        return 0

    @task("sampling-draw")
    def run(address, index, worker):
        job = sampling_at(address)
        chunks = (job.V + CHUNK - 1) // CHUNK
        r, chunk = index // chunks, index % chunks
        if not draws_by_chunks(job, r):
            return 0
        _, token, _ = largest(job, r)
        noisy = LEAST
        if token >= 0:
            groups = (job.V + GROUP - 1) // GROUP
            first = chunk * CHUNK_GROUPS
            heat = heat_of(job, r)
            noisy, token = best_draw(
                row_of(job, r), job.V, first, min(first + CHUNK_GROUPS, groups),
                job.maxima + STEP * groups * r, heat, i64(job.seed, r), i64(job.draws, r),
                token, LEAST, LEAST,
            )  # fmt: skip
        partial = partial_of(job, r, chunk)
        partial.noisy, partial.noisy_id = word(noisy), token
        return 0

    return opening, run
