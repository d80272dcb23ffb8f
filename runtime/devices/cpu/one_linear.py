"""One linear as a program of its own: what eager modules multiply with."""

from __future__ import annotations

import torch

from pykernels.quant import PackedMatrix

from ...program import Builder
from ...program.weights import WeightStore
from ...workers.pool import WorkerPool
from .step import CpuExecutable


class OneLinear:
    """A packed matrix, bound to memory for at most T rows.

    Args:
        bias: [N].
    """

    def __init__(
        self, matrix: PackedMatrix, bias: torch.Tensor | None, pool: WorkerPool, T: int
    ) -> None:
        self.pool, self.T = pool, T
        b = Builder("linear", {"T": T, "S": 1, "R": 1})
        b.buffer("x", "T", matrix.K, kind="input")
        b.buffer("y", "T", matrix.N, kind="output")
        store = WeightStore()
        weights = {"weight": store.add("weight", matrix)}
        if bias is not None:
            weights["bias"] = store.add("bias", bias)
        b.node("linear", "linear", {"x": "x"}, {"out": "y"}, weights)
        self._x = torch.zeros(T, matrix.K, dtype=torch.float32, device="cpu")
        self._step = CpuExecutable(b.build(), store, pool, {"x": self._x}, {})

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [M, N] of x [M, K], M <= T; the next call overwrites it."""
        self._x[: len(x)] = x
        self._step.sizes[0] = len(x)
        self._step.run()
        return self._step.outputs["y"][: len(x)]
