"""Each token's experts in two parts by where they are. Twin of ``ref.place_routing``."""

from __future__ import annotations

import functools
from typing import Any

from numba import carray, types

from .intrin.descriptor import descriptor
from .intrin.sync import as_pointer
from .jit import task
from .words import i64

PLACE, place_at = descriptor(
    "place_routing",
    (
        "count_at",  # address of the number of tokens
        "ids",  # int64 [T, topk]; -1: not here
        "slots",  # int32 [E]: the slot of each expert, negative if it has none
        "E",
        "topk",
        "local_ids",  # int64 [T, topk]: slots, -1 where an expert has none
        "remote_ids",  # int64 [T, topk]: the experts that have none, -1 where one has
    ),
)


@functools.cache
def make_place() -> tuple[Any, Any]:
    """Compiles (setup, run), tasks of ``PLACE``: one for all tokens of a step."""

    @task("place-routing-setup")
    def setup(address, index, worker):
        return 1 if i64(place_at(address).count_at, 0) > 0 else 0

    @task("place-routing")
    def run(address, index, worker):
        args = place_at(address)
        shape = (i64(args.count_at, 0) * args.topk,)
        ids = carray(as_pointer(args.ids), shape, types.int64)
        slots = carray(as_pointer(args.slots), (args.E,), types.int32)
        local = carray(as_pointer(args.local_ids), shape, types.int64)
        remote = carray(as_pointer(args.remote_ids), shape, types.int64)
        for i in range(len(ids)):
            expert = ids[i]
            local[i] = remote[i] = -1
            if 0 <= expert < args.E:
                if slots[expert] >= 0:
                    local[i] = slots[expert]
                else:
                    remote[i] = expert
        return 0

    return setup, run
