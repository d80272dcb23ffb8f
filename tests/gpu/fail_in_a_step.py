"""A captured step of two GPUs, of which the second one fails: prints with what it ends."""

from __future__ import annotations

import torch

from runtime.runner.batch import DeviceLost

from .two_gpus import bound, sums, two_gpus

H = 128


def main() -> None:
    gpus = two_gpus()
    made = bound(sums(gpus, 3, H), gpus, H)
    index = torch.zeros(1, dtype=torch.int64, device="cuda:1")
    rows, out = torch.zeros(4, device="cuda:1"), torch.zeros(1, device="cuda:1")
    graph = made.executable.gpus[1].graph
    launches = graph.launches
    gather = lambda: torch.index_select(rows, 0, index, out=out)  # noqa: E731
    graph.launches = (*launches[:4], gather, *launches[4:])
    made.assert_adds(1, 2, 3)
    made.executable.capture(torch.cuda.graph_pool_handle())
    made.assert_adds(2, 3, 3)
    index.fill_(1 << 40)
    torch.cuda.synchronize("cuda:1")
    try:
        made.executable.run()
    except DeviceLost as error:
        print(error.cause, flush=True)


if __name__ == "__main__":
    main()
