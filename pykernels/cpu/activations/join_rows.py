"""Two groups of rows, one behind the other; how many each has differs from step to step."""

from __future__ import annotations

import functools
from typing import Any

from numba import carray, types

from ..intrin.descriptor import descriptor
from ..intrin.sync import as_pointer
from ..jit import task
from ..words import i64

JOIN, join_at = descriptor(
    "join_rows",
    (
        "first_count_at",  # addresses of the numbers of rows
        "last_count_at",
        "first",  # dense rows, a multiple of 4 bytes each
        "last",
        "row_bytes",
        "out",  # dense rows
    ),
)


@functools.cache
def make_join() -> tuple[Any, Any]:
    """Compiles (setup, run), tasks of ``JOIN``: one for all rows."""

    @task("join-rows-setup")
    def setup(address, index, worker):
        args = join_at(address)
        return 1 if i64(args.first_count_at, 0) + i64(args.last_count_at, 0) > 0 else 0

    @task("join-rows")
    def run(address, index, worker):
        args = join_at(address)
        words = args.row_bytes // 4
        head, tail = i64(args.first_count_at, 0) * words, i64(args.last_count_at, 0) * words
        out = carray(as_pointer(args.out), (head + tail,), types.int32)
        first = carray(as_pointer(args.first), (head,), types.int32)
        last = carray(as_pointer(args.last), (tail,), types.int32)
        for i in range(head):
            out[i] = first[i]
        for i in range(tail):
            out[head + i] = last[i]
        return 0

    return setup, run
