"""One op as a program of its own: what eager modules compute with."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pykernels.cpu import MoEWorkspace
from pykernels.quant import PackedMatrix
from pykernels.quant.split import Experts

from ...machine.memory import zeros
from ...planning.compile import Compiled
from ...planning.placement import CPU
from ...program import Builder
from ...program.weights import Ready, WeightStore
from ...workers.pool import InFlight, WorkerPool
from .step import CpuExecutable

_SERIAL = 1 << 14
"""Numbers that torch copies on this thread: others of its own would wait for the workers' cores."""


class OneNode:
    """An op of rows, bound to memory for at most T of them. One thread at a time may use it.

    Args:
        op: with an output "out" of float32 [T, N]; ``name``: of the node, as errors tell it.
        inputs: by name, the numbers of a row and their dtype.
        weights: by the op's names.
        kernel, gemm_from, workspaces: see ``CpuExecutable``.

    Raises:
        PykernelsError: weights that are sliced for other NUMA nodes, a kernel that cannot run here.
    """

    def __init__(
        self,
        op: str,
        name: str,
        T: int,
        inputs: Mapping[str, tuple[int, torch.dtype]],
        N: int,
        weights: Mapping[str, Ready],
        pool: WorkerPool,
        activations: str = "bf16",
        kernel: str = "auto",
        gemm_from: int | None = None,
        workspaces: dict[str, MoEWorkspace] | None = None,
    ) -> None:
        self.pool, self.T = pool, T
        b, store = Builder(name, {"T": T, "S": 1, "R": 1}), WeightStore()
        for port, (width, dtype) in inputs.items():
            b.buffer(port, "T", width, dtype=dtype, kind="input")
        b.buffer("out", "T", N, kind="output")
        specs = {port: store.add(port, value) for port, value in weights.items()}
        b.node(
            op,
            name,
            {port: port for port in inputs},
            {"out": "out"},
            specs,
            activations=activations,
        )
        with torch.inference_mode(False):  # else later calls could not write into these
            self._inputs = {
                port: zeros((T, width), dtype) for port, (width, dtype) in inputs.items()
            }
            self.step = CpuExecutable(
                Compiled.of(b.build(), pool.memory).parts[CPU],
                store,
                pool,
                self._inputs,
                {},
                kernel,
                gemm_from=gemm_from,
                workspaces=workspaces,
            )

    def begin(self, *inputs: torch.Tensor) -> InFlight:
        """Copies a call's inputs, [T or fewer, width] each in their order, and starts it.

        Raises:
            PykernelsError: the pool is closed, or the parent process's.
        """
        self.pool.finish()  # a call that Ctrl-C has cut off may still be reading its inputs
        for buffer, rows in zip(self._inputs.values(), inputs, strict=True):
            _copy(rows.detach(), buffer[: len(rows)])
        self.step.sizes[0] = self._count = len(inputs[0])
        return self.step.launch()

    def result(self, dtype: torch.dtype) -> torch.Tensor:
        """[rows, N] of the call that has begun.

        Raises:
            TaskError: a task failed.
        """
        self.step.result()
        out = self.step.outputs["out"][: self._count]
        y = torch.empty(out.shape, dtype=dtype, device="cpu")
        _copy(out.view(-1), y.view(-1))
        return y


def _copy(rows: torch.Tensor, to: torch.Tensor) -> None:
    """Copies rows to as many others, a few at a time."""
    if rows.numel() <= _SERIAL:
        to.copy_(rows)
        return
    step = max(1, _SERIAL // rows[:1].numel())
    for part, target in zip(rows.split(step), to.split(step), strict=True):
        target.copy_(part)


def one_linear(
    matrix: PackedMatrix, bias: torch.Tensor | None, pool: WorkerPool, T: int
) -> OneNode:
    """x [T, K] by a packed matrix, plus a bias [N]."""
    weights: dict[str, Ready] = {"weight": matrix}
    if bias is not None:
        weights["bias"] = bias
    return OneNode("linear", "linear", T, {"x": (matrix.K, torch.float32)}, matrix.N, weights, pool)


def one_layer(
    experts: Experts,
    pool: WorkerPool,
    T: int,
    topk: int,
    activations: str,
    kernel: str,
    gemm_from: int,
) -> OneNode:
    """The experts of a layer: x [T, H], ids and weights [T, topk]."""
    H = experts.shape.H
    inputs = {
        "x": (H, torch.float32),
        "ids": (topk, torch.int64),
        "weights": (topk, torch.float32),
    }
    return OneNode(
        "moe_ffn",
        "experts",
        T,
        inputs,
        H,
        {"experts": experts},
        pool,
        activations,
        kernel,
        gemm_from,
        pool.workspaces,
    )
