"""The routed experts of one layer: packed weights, and calls of them on the pool.

``submit`` returns at once and the workers begin; ``sync`` waits. Between the two the caller runs
what does not need the result: the shared experts (SOSP'25 section 3.3).

On a machine with several NUMA nodes every expert is cut across them (``quant.split``): each node's
workers read their own slice from their own memory, and ``sync`` adds the nodes' partial results.
"""

from __future__ import annotations

import torch

from pykernels.cpu import make_kernel
from pykernels.errors import PykernelsError
from pykernels.quant import PackedExperts, Weight, get_format
from pykernels.quant.split import SplitExperts
from pykernels.registry import resolve
from pykernels.shapes import MoEShape
from pykernels.target import detect

from ..machine import tuning
from ..machine.memory import collapse
from ..workers.control import until_done
from ..workers.counters import Counters
from ..workers.locks import ForkSafeLock
from ..workers.pool import Pool, TaskError, default_pool, wait_all
from ..workers.reduce import nothing_added, reduce
from .launch import Part
from .sharding import make_room, slices_on, workers_of
from .ticket import Ticket

_binding = ForkSafeLock()


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
        gemm_from: tokens of an expert from which it takes the GEMM, as this machine was calibrated;
            counts from the first call on a pool.

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
        self.gemm_from = tuning.gemm_from(self.backend.name, fmt, activations)
        self.weights = make_room(shape, get_format(fmt), pool)
        self.counters = Counters()
        self._loaded, self._bytes_per_expert = False, 0
        self._bound: tuple[Pool, list[Part]] | None = None
        self._mark = object()  # on tickets, in place of self: that would be a reference cycle
        self._in_flight: dict[int, Ticket] = {}  # by id(ticket); they keep alive what is written

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
                after. If it requires a gradient, the result does not: it is detached.
            ids: int64 [T, topk] expert numbers. Any topk: it may be more than E, and an expert may
                come several times in a row; each adds to the sum.
            weights: real [T, topk], taken as float32.

        Raises:
            PykernelsError: inputs that do not fit, experts not loaded, a call already in flight (of
                these experts, or of others on the same pool).
        """
        ticket = None
        try:
            ticket = self._submit(x, ids, weights)
            for pool in ticket.pools:
                pool.hand_out()
        except BaseException:
            self._abandon(ticket)
            raise
        return ticket

    def sync(self, ticket: Ticket) -> torch.Tensor:
        """Waits for a call; returns its [T, H] result in the dtype of its x.

        Also if the pool was closed in between, or settled: the call has ended then.

        Raises:
            PykernelsError: the ticket is not the call in flight.
            TaskError: a task failed.
        """
        try:
            if not ticket.take():
                raise PykernelsError("another thread syncs this ticket", "sync each ticket once")
            return self._sync(ticket)
        finally:
            ticket.leave()

    def _sync(self, ticket: Ticket) -> torch.Tensor:
        """``sync``, of a ticket that no other thread has."""
        y, tokens, nbytes, partials, pools, calls, of, _, added = ticket
        if of is not self._mark or not calls:
            raise PykernelsError("this ticket is not the call in flight", "sync each ticket once")
        # If Ctrl-C comes before the tasks have ended, ``_in_flight`` keeps alive what they write.
        try:
            if partials:
                seconds, counted = wait_all(pools, calls), False
            else:
                counted = pools[0].end(calls[0], self.counters.address, tokens, nbytes)
                seconds = 0.0 if counted else pools[0].seconds
        except TaskError:
            calls.clear()
            self._in_flight.pop(id(ticket), None)
            raise
        if partials:
            reduce(partials, y, pools[0], added)
        calls.clear()
        self._in_flight.pop(id(ticket), None)
        if not counted:
            self.counters.add(tokens, nbytes, seconds)
        return y

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """``submit`` and ``sync`` in one. If Ctrl-C comes, the call ends before it is raised."""
        try:
            return self._sync(self._submit(x, ids, weights))
        except BaseException:
            self._abandon()
            raise

    def __del__(self) -> None:
        bound = getattr(self, "_bound", None)
        if bound is not None:  # a call whose ticket was lost may still read the weights
            open_ones = [part for part in bound[1] if not part.pool.ended]
            if open_ones:
                until_done(lambda: [part.settle() for part in open_ones])

    def _submit(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Ticket:
        """``submit`` before ``hand_out``: until then ``abandon`` finds the call."""
        if self._in_flight:
            self._check_in_flight()
        if not self._loaded:
            self._check_loaded()
        parts = self._bind()
        begun = parts[0].repeat(x, ids, weights) if len(parts) == 1 else None
        if begun is None:
            return self._begin(parts, x, ids, weights)
        part = parts[0]
        call, y, like = begun
        nbytes = part.active * self._bytes_per_expert
        ticket = Ticket(y, y.shape[0], nbytes, (), (part.pool,), [call], self._mark, {})
        self._in_flight[id(ticket)] = ticket
        part.make_spare(y, like)
        return ticket

    def _begin(
        self, parts: list[Part], x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> Ticket:
        """Begins a call of any layout, on the pool of every slice."""
        parts[0].check(x, ids, weights)
        for part in parts:  # before the workspace is written: a call of another layer may use it
            part.pool.claim()
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        several = len(parts) > 1
        partials = [torch.empty_like(y, dtype=torch.float32) for _ in parts if several]
        for part, out in zip(parts, partials or [y], strict=True):
            part.arrange(x, ids, weights, out)
        calls, likes = zip(*(part.begin() for part in parts), strict=True)
        nbytes = parts[0].active * self._bytes_per_expert
        pools = [part.pool for part in parts]
        added = nothing_added(y) if partials else None
        ticket = Ticket(y, y.shape[0], nbytes, partials, pools, list(calls), self._mark, {}, added)
        self._in_flight[id(ticket)] = ticket
        for part, call in zip(parts, calls, strict=True):
            if part.row_tasks:
                part.pool.wait_for_rows(call)  # then the caller may change x
            part.let_go()
        if not partials and likes[0] is not None:
            parts[0].make_spare(y, likes[0])
        return ticket

    def _abandon(self, ticket: Ticket | None = None) -> None:
        """Ends a call of this thread that was interrupted, and gives up its claims."""
        if ticket is not None:
            for pool, call in zip(ticket.pools, ticket.calls, strict=True):
                pool.settle(call)
        if self._bound is not None:
            for part in self._bound[1]:
                part.pool.release()
                part.pool.abandon()
                if not part.runs:  # else the workers use what it holds
                    part.let_go()

    def _check_in_flight(self) -> None:
        for key in list(self._in_flight):
            if (ticket := self._in_flight.get(key)) is None:
                continue
            for pool in ticket.pools:
                pool.abandon()  # Ctrl-C may have cut ``_abandon`` short
            if ticket.runs:
                raise PykernelsError(
                    "a call of these experts is in flight",
                    "sync it before the next submit; call pool.settle() if its ticket is lost",
                )
            self._in_flight.pop(key, None)  # it was settled; its ticket can still be synced

    def _bind(self) -> list[Part]:
        """The slices, bound to the current pool: plan and scratch depend on its threads."""
        pool = self._own_pool or default_pool()
        bound = self._bound
        if bound is None or bound[0] is not pool:
            bound = self._bind_to(pool)
        return bound[1]

    def _bind_to(self, pool: Pool) -> tuple[Pool, list[Part]]:
        with _binding.lock:  # so that no thread replaces parts whose call runs
            if self._bound is None or self._bound[0] is not pool:
                kernel = make_kernel(self.backend.name, self.weights.fmt.name, self.activations)
                slices = self.weights.slices
                workers = workers_of(pool, len(slices))
                pairs = zip(slices, workers, strict=True)
                parts = [Part(packed, kernel, each, self.gemm_from) for packed, each in pairs]
                # Unless a signal handler has bound them meanwhile: its call may run.
                if self._bound is None or self._bound[0] is not pool:
                    self._bound = pool, parts
            return self._bound

    def _check_loaded(self) -> None:
        if missing := self.missing():
            raise PykernelsError(
                f"{len(missing)} of {self.shape.E} experts are not loaded (first: {missing[0]})",
                "load_expert every one of them",
            )
        for part in self.weights.slices:
            collapse(part.gate_up)
            collapse(part.down)
        self._bytes_per_expert = self.weights.bytes_per_expert
        self._loaded = True
