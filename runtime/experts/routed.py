"""The routed experts of one layer: packed weights, and calls of them on the pool.

``submit`` returns at once and the workers begin; ``sync`` waits. Between the two the caller runs
what does not need the result: the shared experts (SOSP'25 section 3.3).

On a machine with several NUMA nodes every expert is cut across them (``quant.split``): each node's
workers read their own slice from their own memory, and ``sync`` adds the nodes' partial results.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pykernels.cpu import make_routines
from pykernels.cpu.moe.call import BAD_EXPERT
from pykernels.cpu.moe.kernel import join
from pykernels.errors import PykernelsError
from pykernels.quant import Biases, PackedExperts, Weight, get_format
from pykernels.quant.split import SplitExperts
from pykernels.registry import resolve
from pykernels.shapes import MoEShape
from pykernels.target import detect

from ..machine import tuning
from ..machine.memory import collapse
from ..machine.nodes import MemoryNodes
from ..workers.pool import InFlight, WorkerPool, default_pool
from .call import ExpertsCall
from .sharding import make_room, shared_packer, slices_on


@dataclass
class Counters:
    """What the experts of a layer have done since the last ``reset``.

    Attributes:
        calls: fused MoE calls; ``tokens``: in them.
        bytes: of the weights of the distinct experts that each call touched.
        seconds: from the start of each call to its last task, summed.
    """

    calls: int = 0
    tokens: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def add(self, tokens: int, nbytes: int, seconds: float) -> None:
        """Counts a call."""
        self.calls += 1
        self.tokens += tokens
        self.bytes += nbytes
        self.seconds += seconds

    def reset(self) -> None:
        """Sets all of them to 0."""
        self.calls = self.tokens = self.bytes = 0
        self.seconds = 0.0


@dataclass
class Ticket:
    """A call in flight, to be given to ``sync``. It keeps alive what the workers write.

    Attributes:
        y: the result's [T, H].
        call: its descriptors; ``flight``: its jobs, None once it was synced.
        ids: its routing.
        of: identifies the ``RoutedExperts`` that it belongs to.
    """

    y: torch.Tensor
    call: ExpertsCall
    flight: InFlight | None
    ids: torch.Tensor
    of: object


class RoutedExperts:
    """``E`` experts of one layer.

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
        self.activations = activations
        self.gemm_from = max(
            tuning.gemm_from(self.backend.name, fmt, activations),
            tuning.gemm_from(self.down_backend.name, down_fmt, activations),
        )
        nodes = self.pool.memory
        self.weights = make_room(
            shape, get_format(fmt), get_format(down_fmt), nodes, shared_packer(pool)
        )
        self.counters = Counters()
        self._loaded, self._bytes_per_expert = False, 0
        self._bound: tuple[WorkerPool, ExpertsCall] | None = None
        self._mark = object()  # on tickets, in place of self: that would be a reference cycle

    @staticmethod
    def bytes_needed(shape: MoEShape, fmt: str, down_fmt: str | None = None) -> int:
        """Memory of the packed experts of one layer."""
        return PackedExperts.bytes_needed(shape, get_format(fmt), get_format(down_fmt or fmt))

    @staticmethod
    def bytes_by_node(
        shape: MoEShape, fmt: str, nodes: MemoryNodes, down_fmt: str | None = None
    ) -> list[int]:
        """The same of each slice.

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

    def submit(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Ticket:
        """Starts a call and returns. What is in flight on the pool is finished first.

        Args:
            x: bf16 or float32 [T, H] on the CPU, taken as bf16. The ticket keeps it and the others
                alive; they must not change before ``sync``. If it requires a gradient, the result
                does not: it is detached.
            ids: int64 [T, topk] expert numbers. Any topk: it may be more than E, and an expert may
                come several times in a row; each adds to the sum.
            weights: real [T, topk], taken as float32.

        Raises:
            PykernelsError: inputs that do not fit, experts not loaded, a pool that is closed.
        """
        if not self._loaded:
            self._check_loaded()
        call = self._bind()
        call.check(x, ids, weights)
        make = torch.empty_like if ids.numel() else torch.zeros_like  # no task will write it
        y = make(x, memory_format=torch.contiguous_format)
        return Ticket(y, call, call.start(x, ids, weights, y), ids, self._mark)

    def sync(self, ticket: Ticket) -> torch.Tensor:
        """Waits for a call; returns its [T, H] result in the dtype of its x.

        Ctrl-C is raised when the call has ended.

        Raises:
            PykernelsError: the ticket was synced, or is another layer's; the routing names an
                expert that there is not.
            TaskError: a task failed.
        """
        flight, call = ticket.flight, ticket.call
        if ticket.of is not self._mark or flight is None:
            raise PykernelsError(
                "this ticket was synced, or is of other experts", "sync each ticket once"
            )
        ticket.flight = None
        call.pool.wait(flight)
        if (error := flight.error) is not None:
            bad_routing = error.task < 0 and error.status == BAD_EXPERT
            raise call.bad_routing(ticket.ids) if bad_routing else error
        nbytes = flight.result * self._bytes_per_expert
        self.counters.add(ticket.y.shape[0], nbytes, flight.seconds)
        return ticket.y

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """``submit`` and ``sync`` in one."""
        return self.sync(self.submit(x, ids, weights))

    def _bind(self) -> ExpertsCall:
        """The slices, bound to the current pool: plan and scratch depend on its threads."""
        pool = self._own_pool or default_pool()
        bound = self._bound
        if bound is None or bound[0] is not pool:
            weights = self.weights
            gate_up = make_routines(self.backend.name, weights.fmt.name, self.activations)
            down = make_routines(self.down_backend.name, weights.down_fmt.name, self.activations)
            kernel = join(gate_up, down, self.shape.spec)
            call = ExpertsCall(weights.slices, kernel, pool, self.gemm_from)
            self._bound = bound = pool, call
        return bound[1]

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
