"""The routed experts of one layer: packed weights, and calls of them on the pool.

``submit`` returns at once and the workers begin; ``sync`` waits. Between the two the caller runs
what does not need the result: the shared experts (SOSP'25 section 3.3).

On a machine with several NUMA nodes every expert is cut across them (``quant.split``): each node's
workers read their own slice from their own memory, and ``sync`` adds the nodes' partial results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from pykernels.cpu import make_kernel
from pykernels.errors import PykernelsError
from pykernels.quant import PackedExperts, Weight, get_format
from pykernels.quant.split import SplitExperts
from pykernels.registry import resolve
from pykernels.shapes import MoEShape
from pykernels.target import detect

from .choices import chosen
from .counters import Counters
from .launch import Part
from .pool import Pool, TaskError, WorkerPool, default_pool, wait_all
from .reduce import reduce
from .slices import make_room, slices_on, workers_of


class Ticket(NamedTuple):
    """A call in flight, to be given to ``sync``. It holds what the workers write.

    Attributes:
        y: the result's [T, H].
        tokens: T.
        bytes: of weights that the call reads.
        partials: float32 [T, H] of each node, if there are several.
        pools: those that work on it, each on
        calls: the one of this number.
    """

    y: torch.Tensor
    tokens: int
    bytes: int
    partials: Sequence[torch.Tensor]
    pools: Sequence[WorkerPool]
    calls: Sequence[int | None]

    @property
    def runs(self) -> bool:
        """Whether a pool has not been waited for yet."""
        pairs = zip(self.pools, self.calls, strict=True)
        return any(pool.running == call is not None for pool, call in pairs)


class RoutedExperts:
    """``E`` experts of one layer in one weight format.

    Args:
        shape: the layer.
        fmt: weight format, a name in ``quant.FORMATS``.
        pool: the threads; None for the shared pool, looked up at each call. If it is one on each of
            several NUMA nodes now, the weights are split across them now.
        kernel: a backend of ``pykernels.registry``, or "auto".
        activations: "bf16" for exact products, "int8" for ones of dynamically quantized inputs.

    Attributes:
        weights: the packed experts, as one or, on several nodes, as one slice each.
        choices: what this machine was calibrated to; counts from the first call on a pool.

    Raises:
        PykernelsError: unknown format, a kernel that cannot run here, no memory, too narrow for the
            nodes that were asked for, a calibration of this machine that cannot be read.
    """

    def __init__(
        self,
        shape: MoEShape,
        fmt: str,
        pool: Pool | None = None,
        kernel: str = "auto",
        activations: str = "bf16",
    ) -> None:
        self.shape = shape
        self._own_pool = pool
        target = detect()
        self.backend = resolve(kernel, fmt, target, activations)
        self.activations = activations
        self.choices = chosen(self.backend.name, fmt, target.cpu, activations)
        self.weights = make_room(shape, get_format(fmt), pool)
        self.counters = Counters()
        self._loaded, self._bytes_per_expert = False, 0
        self._bound: tuple[Pool, list[Part]] | None = None
        self._in_flight: Ticket | None = None

    @staticmethod
    def bytes_needed(shape: MoEShape, fmt: str) -> int:
        """Memory of the packed experts of one layer."""
        return PackedExperts.bytes_needed(shape, get_format(fmt))

    @staticmethod
    def bytes_by_node(shape: MoEShape, fmt: str, pool: Pool) -> list[int]:
        """The same on each node of a pool.

        Raises:
            PykernelsError: too narrow for the nodes that were asked for.
        """
        wanted = get_format(fmt)
        return SplitExperts.slice_bytes(shape, wanted, slices_on(shape, wanted, pool))

    @property
    def nbytes(self) -> int:
        """Memory that the packed experts take."""
        slices = self.weights.slices
        return sum(PackedExperts.bytes_needed(part.shape, part.fmt) for part in slices)

    @property
    def pool(self) -> Pool:
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
        """Starts a call and returns, with many tokens when the workers have copied their inputs.

        Args:
            x: bf16 or float32 [T, H] on the CPU, taken as bf16. It is copied: change it freely
                after.
            ids: int64 [T, topk] expert numbers.
            weights: [T, topk], taken as float32.

        Raises:
            PykernelsError: inputs that do not fit, experts not loaded, a call already in flight (of
                these experts, or of others on the same pool).
        """
        if self._in_flight is not None and self._in_flight.runs:
            raise PykernelsError(
                "a call of these experts is in flight", "sync it before the next submit"
            )
        if not self._loaded:
            self._check_loaded()
        parts = self._bind()
        partials: Sequence[torch.Tensor] = ()
        begun = parts[0].repeat(x, ids, weights) if len(parts) == 1 else None
        if begun is not None:
            active, y = begun
        else:
            active, y, partials = self._begin(parts, x, ids, weights)
        pools = [part.pool for part in parts]
        calls = [pool.running for pool in pools]
        nbytes = active * self._bytes_per_expert
        ticket = self._in_flight = Ticket(y, y.shape[0], nbytes, partials, pools, calls)
        for part in parts:
            if part.row_tasks:
                part.pool.wait_for_rows()  # then x is the caller's again
            part.held = None
        if not partials:
            parts[0].make_spare(y)
        return ticket

    def sync(self, ticket: Ticket) -> torch.Tensor:
        """Waits for a call; returns its [T, H] result in the dtype of its x.

        Raises:
            PykernelsError: the ticket is not the call in flight.
            TaskError: a task failed.
        """
        if self._in_flight is not ticket:
            raise PykernelsError("this ticket is not the call in flight", "sync each ticket once")
        self._in_flight = None
        y, tokens, nbytes, partials, pools, _ = ticket
        try:
            if not partials:
                pools[0].end(self.counters.address, tokens, nbytes)
                return y
            seconds = wait_all(pools)
        except TaskError as error:
            raise self._name_expert(error) from error.raised
        reduce(partials, y, pools[0])
        self.counters.add(tokens, nbytes, seconds)
        return y

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """``submit`` and ``sync`` in one."""
        return self.sync(self.submit(x, ids, weights))

    def _begin(
        self, parts: list[Part], x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> tuple[int, torch.Tensor, Sequence[torch.Tensor]]:
        """Begins a call of any layout, on the pool of every slice.

        Returns:
            the number of active experts, y, and each node's part of it, if there are several.
        """
        try:
            for part in parts:  # another call reads the workspace that this one is prepared in
                part.pool.claim()
            y = torch.empty_like(x, memory_format=torch.contiguous_format)
            partials = [torch.empty(x.shape) for _ in parts] if len(parts) > 1 else []
            for part, out in zip(parts, partials or [y], strict=True):
                part.arrange(x, ids, weights, out)
            actives = [part.begin() for part in parts]
        except BaseException:
            for part in parts:
                part.pool.release()
                if part.pool.running is None:
                    part.held = None
            raise
        return actives[0], y, partials

    def _bind(self) -> list[Part]:
        """The slices on the pool of now: plan and scratch depend on its threads."""
        pool = self._own_pool or default_pool()
        if self._bound is None or self._bound[0] is not pool:
            kernel = make_kernel(self.backend.name, self.weights.fmt.name, self.activations)
            slices = self.weights.slices
            workers = workers_of(pool, len(slices))
            pairs = zip(slices, workers, strict=True)
            gemm_from = self.choices.gemm_from
            self._bound = pool, [Part(packed, kernel, each, gemm_from) for packed, each in pairs]
        return self._bound[1]

    def _check_loaded(self) -> None:
        if missing := self.missing():
            raise PykernelsError(
                f"{len(missing)} of {self.shape.E} experts are not loaded (first: {missing[0]})",
                "load_expert every one of them",
            )
        self._bytes_per_expert = self.weights.bytes_per_expert
        self._loaded = True

    def _name_expert(self, error: TaskError) -> TaskError:
        """The same with the expert's number in the layer."""
        if error.active is None:
            return error
        expert = self._bind()[0].expert(error.active)
        return TaskError(error.status, error.stage, error.index, error.active, expert, error.raised)
