"""The second op: the best draw of a chunk, for rows where top-k and min-p leave out nothing.

It is an op of its own so that the largest logit of the whole row is known: of a row as models make
them few logits are near enough to it to win, and noise is made for these alone.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ..jit import inlined, task
from ..words import i64
from .args import CHUNK, sampling_at, word
from .passes import LEAST, make_passes
from .rows import heat_of, keeps_all, largest, partial_of, row_of

_ZERO = np.float32(0.0)


@inlined
def draws_by_chunks(args, r):
    """Whether the row is one of those."""
    return heat_of(args, r) > _ZERO and keeps_all(args, r)


@functools.cache
def make_draw() -> tuple[Any, Any]:
    """Compiles (setup, run), tasks of ``SAMPLING``, to be run after the scan: one for a chunk of a
    row; none where no row asks for it."""
    P = make_passes()
    GROUP, STEP, best_draw = P.GROUP, P.STEP, P.best_draw
    CHUNK_GROUPS = CHUNK // GROUP

    @task("sampling-draw-setup")
    def setup(address, index, worker):
        args = sampling_at(address)
        R = i64(args.count_at, 0)
        for r in range(R):
            if draws_by_chunks(args, r):
                return R * ((args.V + CHUNK - 1) // CHUNK)
        return 0

    @task("sampling-draw")
    def run(address, index, worker):
        args = sampling_at(address)
        chunks = (args.V + CHUNK - 1) // CHUNK
        r, chunk = index // chunks, index % chunks
        if not draws_by_chunks(args, r):
            return 0
        _, token, _ = largest(args, r)
        noisy = LEAST
        if token >= 0:
            groups = (args.V + GROUP - 1) // GROUP
            first = chunk * CHUNK_GROUPS
            heat = heat_of(args, r)
            noisy, token = best_draw(
                row_of(args, r),
                args.V,
                first,
                min(first + CHUNK_GROUPS, groups),
                args.maxima + STEP * groups * r,
                heat,
                i64(args.seed, r),
                i64(args.draws, r),
                token,
                LEAST,
                LEAST,
            )
        partial = partial_of(args, r, chunk)
        partial.noisy, partial.noisy_id = word(noisy), token
        return 0

    return setup, run
