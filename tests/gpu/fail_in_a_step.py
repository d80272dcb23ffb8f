"""A captured step of two GPUs, of which the second one fails: prints with what it ends."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.runner.batch import DeviceLost

from .two_gpus import bound, sums, two_gpus

H = 128
NOWHERE = 16
"""An address that no allocation has."""


@triton.jit
def _store_at(address):
    tl.store(tl.load(address).to(tl.pointer_type(tl.int32)), 1)


def main() -> None:
    gpus = two_gpus()
    made = bound(sums(gpus, 3, H), gpus, H)
    out = torch.zeros(1, dtype=torch.int32, device="cuda:1")
    address = torch.tensor([out.data_ptr()], device="cuda:1")
    graph = made.executable.gpus[1].graph
    launches = graph.launches

    def store() -> None:
        with torch.cuda.device(1):
            _store_at[(1,)](address)

    graph.launches = (*launches[:4], store, *launches[4:])
    made.assert_adds(1, 2, 3)
    made.executable.capture(torch.cuda.graph_pool_handle())
    made.assert_adds(2, 3, 3)
    address.fill_(NOWHERE)
    torch.cuda.synchronize("cuda:1")
    try:
        made.executable.run()
    except DeviceLost as error:
        print(error.cause, flush=True)


if __name__ == "__main__":
    main()
