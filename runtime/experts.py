"""The routed experts of one layer: packed weights, and calls of them on the pool.

``submit`` returns at once and the workers begin; ``sync`` waits. Between the two the caller runs
what does not need the result: the shared experts (SOSP'25 section 3.3).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pykernels.cpu import MoECall, make_kernel, make_pack, pack_job, packs_scales
from pykernels.errors import PykernelsError
from pykernels.quant import Format, PackedExperts, Packer, Weight, get_format
from pykernels.registry import resolve
from pykernels.shapes import MoEShape
from pykernels.target import detect

from .choices import chosen
from .memory import allocate
from .pool import Call, WorkerPool, default_pool


@dataclass
class Counters:
    """What the experts have done since the last ``reset``.

    Attributes:
        calls: fused MoE calls.
        tokens: tokens in them.
        bytes: weight bytes of the distinct experts that each call touched.
        seconds: from the start of each call to its last task, summed.
    """

    calls: int = 0
    tokens: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def reset(self) -> None:
        self.calls, self.tokens, self.bytes, self.seconds = 0, 0, 0, 0.0


@dataclass(frozen=True)
class Ticket:
    """A call in flight, to be given to ``sync``. It holds what the workers read and write."""

    y: torch.Tensor
    active: int
    inputs: tuple[torch.Tensor, ...]


class RoutedExperts:
    """``E`` experts of one layer in one weight format.

    Args:
        shape: the layer.
        fmt: weight format, a name in ``quant.FORMATS``.
        pool: the threads; None for the shared pool, looked up at each call.
        kernel: a backend of ``pykernels.registry``, or "auto".

    Attributes:
        choices: what this machine was calibrated to; counts from the first call on a pool.

    Raises:
        PykernelsError: unknown format, a kernel that cannot run here, no memory, a calibration of
            this machine that cannot be read.
    """

    def __init__(
        self,
        shape: MoEShape,
        fmt: str,
        pool: WorkerPool | None = None,
        kernel: str = "auto",
    ) -> None:
        self.shape = shape
        self._own_pool = pool
        self.weights = PackedExperts(shape, get_format(fmt), allocate, packer(pool))
        target = detect()
        self.backend = resolve(kernel, fmt, target)
        self.choices = chosen(self.backend.name, fmt, target.cpu)
        self.counters = Counters()
        self._bound: tuple[WorkerPool, MoECall] | None = None
        self._in_flight: tuple[Ticket, WorkerPool] | None = None

    @staticmethod
    def bytes_needed(shape: MoEShape, fmt: str) -> int:
        """Memory of the packed experts of one layer."""
        return PackedExperts.bytes_needed(shape, get_format(fmt))

    @property
    def nbytes(self) -> int:
        """Memory that the packed experts take."""
        return PackedExperts.bytes_needed(self.shape, self.weights.fmt)

    @property
    def pool(self) -> WorkerPool:
        return self._own_pool or default_pool()

    def load_expert(self, expert: int, gate: Weight, up: Weight, down: Weight) -> None:
        """Packs one expert: ``gate``, ``up`` [I, H] and ``down`` [H, I], in this layer's format.

        Raises:
            PykernelsError: no such expert, or a matrix of another shape or format.
        """
        self.weights.pack(expert, gate, up, down)

    def missing(self) -> list[int]:
        """Experts that were not loaded yet."""
        return self.weights.missing()

    def submit(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Ticket:
        """Starts a call and returns.

        Args:
            x: bf16 or float32 [T, H] on the CPU, taken as bf16. It is copied: change it freely
            after.
            ids: int64 [T, topk] expert numbers.
            weights: [T, topk], taken as float32.

        Raises:
            PykernelsError: inputs that do not fit, experts not loaded, a call already in flight.
        """
        if self._in_flight is not None:
            raise PykernelsError(
                "a call of these experts is in flight", "sync it before the next submit"
            )
        if missing := self.missing():
            raise PykernelsError(
                f"{len(missing)} of {self.shape.E} experts are not loaded (first: {missing[0]})",
                "load_expert every one of them",
            )
        pool, call = self._bind()
        y = torch.empty(x.shape, dtype=x.dtype)
        tasks, stages = call.prepare(x, ids, weights, y), call.kernel.stages
        pool.start(
            Call(
                gate_up=stages.gate_up.address,
                down=stages.down.address,
                job=call.address,
                active=tasks.active,
                i_chunks=tasks.i_chunks,
                down_chunks=tasks.down_chunks,
                pack=stages.pack.address,
                pack_tasks=tasks.pack_tasks,
                piece_active=int(call.job["piece_active"][0]),
                pieces=int(call.job["pieces"][0]),
            )
        )
        ticket = Ticket(y, tasks.active, (x, ids, weights))
        self._in_flight = ticket, pool
        return ticket

    def sync(self, ticket: Ticket) -> torch.Tensor:
        """Waits for a call; returns its [T, H] result in the dtype of its x.

        Raises:
            PykernelsError: the ticket is not the call in flight.
            TaskError: a task failed.
        """
        if self._in_flight is None or self._in_flight[0] is not ticket:
            raise PykernelsError("this ticket is not the call in flight", "sync each ticket once")
        pool = self._in_flight[1]
        self._in_flight = None
        seconds = pool.wait()
        self.counters.calls += 1
        self.counters.tokens += ticket.y.shape[0]
        self.counters.bytes += ticket.active * self.weights.bytes_per_expert
        self.counters.seconds += seconds
        return ticket.y

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """``submit`` and ``sync`` in one."""
        return self.sync(self.submit(x, ids, weights))

    def _bind(self) -> tuple[WorkerPool, MoECall]:
        """The descriptor for the pool of now: plan and scratch depend on its threads."""
        pool = self.pool
        if self._bound is None or self._bound[0] is not pool:
            kernel = make_kernel(self.backend.name, self.weights.fmt.name)
            self._bound = (
                pool,
                MoECall(
                    self.weights,
                    kernel,
                    pool.workspace,
                    pool.threads,
                    gemm_from=self.choices.gemm_from,
                ),
            )
        return self._bound


def packer(pool: WorkerPool | None) -> Packer:
    """``Format.pack`` on every worker of the pool: one task a 32-row block."""

    def pack(fmt: Format, weight: Weight, blocks: torch.Tensor, scales: torch.Tensor) -> None:
        scale = None if weight.scale is None else weight.scale.contiguous()
        weight = Weight(weight.data.contiguous(), scale)
        job, tasks = pack_job(fmt, weight, blocks, scales)
        address = make_pack(fmt.name).address
        workers = pool or default_pool()
        workers.start(Call(address, address, job.ctypes.data, tasks, i_chunks=1, down_chunks=0))
        workers.wait()
        if scale is not None and not packs_scales(fmt.name):
            fmt.pack_scales(scale, scales)

    return pack
