"""The same bits from eager calls and from replays of a captured one, in turns."""

from __future__ import annotations

from collections.abc import Callable

import torch


def assert_replays_alike(
    run: Callable[[], torch.Tensor], expected: torch.Tensor, times: int
) -> None:
    """``run`` gives ``expected`` each time, eagerly and from one CUDA graph of it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(times):
        assert torch.equal(run(), expected)
        captured.fill_(float("nan"))
        graph.replay()
        assert torch.equal(captured, expected)
