"""The routed experts of one layer outside a model's program: what eager modules call.

They are a program of one node (``one_node``), so a call is what the engine runs, job for job. On a
machine with several NUMA nodes every expert is cut across them (``quant.split``): each node's
workers read their own slice from their own memory, and the partial results are added in order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from pykernels.cpu.gemv.common import MAX_TOKENS
from pykernels.cpu.moe.call import BAD_EXPERT
from pykernels.cpu.moe.checks import bad_routing, check_call
from pykernels.errors import PykernelsError
from pykernels.quant import Biases, PackedExperts, Weight, get_format
from pykernels.quant.split import SplitExperts
from pykernels.registry import resolve
from pykernels.shapes import MoEShape
from pykernels.target import detect

from ...experts.sharding import allocate_experts, shared_packer, slices_on
from ...machine import tuning
from ...machine.memory import collapse
from ...machine.nodes import MemoryNodes
from ...workers.pool import TaskError, WorkerPool, default_pool
from .one_node import OneNode, one_layer

R = TypeVar("R")

_KEPT_BYTES = 64 << 20
"""Inputs and outputs of a call that a layer keeps for the next one of its size, at most."""


class CpuExperts:
    """``E`` experts of one layer. Any thread may call them: calls of a layer take turns.

    Args:
        shape: the layer.
        fmt: weight format, a name in ``quant.FORMATS``.
        down_fmt: of down, None for the same; ``fmt`` is then of gate and up.
        pool: the threads; None for the shared pool, looked up at each call. If they are dealt over
            NUMA nodes now, the weights are split across these now.
        kernel: a backend of ``pykernels.registry``, or "auto".
        activations: "bf16" for exact products, "int8" for ones of dynamically quantized inputs.

    Attributes:
        weights: the packed experts, as one or, on several nodes, as one slice each.
        gemm_from: tokens of an expert from which it takes the GEMM, as this machine was calibrated;
            counts from the first call on a pool.
        read_bytes: of the distinct experts that each call has touched, summed; ``read_seconds``:
            from the start of each call to its last task.

    Raises:
        PykernelsError: unknown format, a kernel that cannot run here, no memory, too narrow for the
            nodes that were asked for, a calibration of this machine that cannot be read.
    """

    def __init__(
        self,
        shape: MoEShape,
        fmt: str,
        pool: WorkerPool | None = None,
        kernel: str = "auto",
        activations: str = "bf16",
        down_fmt: str | None = None,
    ) -> None:
        self.shape = shape
        self._own_pool = pool
        down_fmt, target = down_fmt or fmt, detect()
        self.backend = resolve(kernel, fmt, target, activations)
        self.down_backend = resolve(kernel, down_fmt, target, activations)
        self._kernel, self.activations = kernel, activations
        self.gemm_from = max(
            tuning.gemm_from(self.backend.name, fmt, activations),
            tuning.gemm_from(self.down_backend.name, down_fmt, activations),
        )
        nodes = self.pool.memory
        self.weights = allocate_experts(
            shape, get_format(fmt), get_format(down_fmt), nodes, shared_packer(pool)
        )
        self.read_bytes, self.read_seconds = 0, 0.0
        self._loaded = False
        self._bound: OneNode | None = None
        self._bound_topk = 0
        self._turn = threading.Lock()

    @staticmethod
    def bytes_needed(shape: MoEShape, fmt: str, down_fmt: str | None = None) -> int:
        """Memory of the packed experts of one layer."""
        return PackedExperts.bytes_needed(shape, get_format(fmt), get_format(down_fmt or fmt))

    @staticmethod
    def bytes_by_node(
        shape: MoEShape, fmt: str, nodes: MemoryNodes, down_fmt: str | None = None
    ) -> list[int]:
        """Memory of the packed experts of each slice.

        Raises:
            PykernelsError: too narrow for the nodes that were asked for.
        """
        down = get_format(down_fmt or fmt)
        count = slices_on(shape, down, nodes)
        return SplitExperts.slice_bytes(shape, get_format(fmt), count, down)

    @property
    def nbytes(self) -> int:
        """Memory that the packed experts take."""
        return sum(part.nbytes for part in self.weights.slices)

    @property
    def pool(self) -> WorkerPool:
        return self._own_pool or default_pool()

    def load_expert(
        self, expert: int, gate: Weight, up: Weight, down: Weight, *, biases: Biases | None = None
    ) -> None:
        """Packs one expert: ``gate``, ``up`` [I, H] and ``down`` [H, I], in this layer's formats,
        and its biases, where ``shape.spec`` has them.

        Raises:
            PykernelsError: no such expert, or what does not fit its shape, formats and spec.
        """
        self.weights.pack(expert, gate, up, down, biases=biases)

    def missing(self) -> list[int]:
        """Experts that were not loaded yet."""
        return self.weights.missing()

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """``run`` with nothing meanwhile."""
        return self.run(x, ids, weights, lambda: None)[0]

    def run(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        meanwhile: Callable[[], R],
    ) -> tuple[torch.Tensor, R]:
        """The experts' weighted sum [T, H] in the dtype of x, and what ``meanwhile`` returns: it
        runs on this thread while the workers compute (SOSP'25 section 3.3), and calls no experts.

        What is in flight on the pool is finished first. Ctrl-C is raised when the call has ended.

        Args:
            x: bf16 or float32 [T, H] on the CPU, taken as bf16. If it requires a gradient, the
                result does not: it is detached.
            ids: int64 [T, topk] expert numbers; -1: none. Any topk: it may be more than E, and an
                expert may come several times in a row; each adds to the sum.
            weights: real [T, topk], taken as float32.

        Raises:
            PykernelsError: inputs that do not fit, experts not loaded, an expert that there is
                not, a pool that is closed.
            TaskError: a task failed.
        """
        if not self._loaded:
            self._check_loaded()
        check_call(x, ids, weights, self.shape.H)
        if not ids.numel():  # no token, or no expert
            zeros = torch.zeros(x.shape, dtype=x.dtype, device="cpu")
            return zeros, meanwhile()
        with self._turn:
            call = self._bind(*ids.shape)
            flight = call.begin(x, ids, weights)
            try:
                other = meanwhile()
            finally:  # also on an error: what it reads must live until then
                call.pool.wait(flight)
            try:
                y = call.result(x.dtype)
            except TaskError as error:
                if error.task < 0 and error.status == BAD_EXPERT:
                    raise bad_routing(ids, self.shape.E) from None
                raise
            self.read_bytes += call.step.expert_bytes
            self.read_seconds += flight.seconds
            if call.T * self.shape.H * 10 > _KEPT_BYTES:  # float32 in and out, and bf16 rows
                self._bound = None
        return y, other

    def _bind(self, T: int, topk: int) -> OneNode:
        """The layer's program on the current pool, for a call of this size."""
        pool, most = self.pool, max(T, MAX_TOKENS)
        bound = self._bound
        if bound is None or bound.pool is not pool or (bound.T, self._bound_topk) != (most, topk):
            self._bound = None  # its memory is free for the next one
            bound = one_layer(
                self.weights, pool, most, topk, self.activations, self._kernel, self.gemm_from
            )
            self._bound, self._bound_topk = bound, topk
        return bound

    def _check_loaded(self) -> None:
        if missing := self.missing():
            raise PykernelsError(
                f"{len(missing)} of {self.shape.E} experts are not loaded (first: {missing[0]})",
                "load_expert every one of them",
            )
        for part in self.weights.slices:
            collapse(part.gate_up)
            collapse(part.down)
        self._loaded = True
