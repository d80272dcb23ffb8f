"""What streaming experts to the GPU takes: pinned memory, and room for a layer."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from pykernels.errors import PykernelsError
from pykernels.gpu.moe.from_tiles import ExpertTiles, copy_experts, supports
from pykernels.gpu.moe.rank_experts import MAX_EXPERTS
from pykernels.gpu.moe.tiles.gather import gatherable
from pykernels.quant import get_format
from pykernels.quant.split import Experts

from ...kv_cache.layout import PAGE
from ...machine.nodes import ONE_NODE, MemoryNodes
from ...machine.pinned import Pinned
from ...passes.defer import defer
from ...passes.keep_routing import keep_routing
from ...passes.layers import check_routed, moe_layers
from ...passes.split_experts import split_experts
from ...passes.stream_weights import PIECES, Ring, resident, stream_weights
from ...planning.placement import CPU, Placement
from ...program import Program
from ...program.node import Node
from ...program.partition import partition
from ...program.sizes import StepSizes
from ...program.weight_spec import WeightSpec
from ...program.weights import WeightStore
from ...runner.paged_runner import Lowerable
from ..cpu import weights as cpu
from ..gpus import Gpus, interpreted
from .memory.capacity import room_for_steps, step_bytes
from .memory.weights import expert_format, resident_bytes

STREAM_TOKENS = (32768, 16384, 8192, 4096, 2048, 1024, 512)
"""What a step may have, if nobody says: all experts cross once a step, so as many as fit, up to
``balanced_tokens``."""
OPS_PER_BYTE = 2048
"""What a GPU computes while a byte crosses its link, about: 110 TFLOP/s beside 55 GB/s."""
RESERVED = 2048
"""Tokens of a streamed step for which an expert cache leaves room."""
RINGS = (Ring(PIECES, PIECES + 1), Ring(PIECES, 2))
"""A layer loaded beside another one that is computed; where memory is short, a quarter of one."""
_LINK_BYTES = 64 << 20
_ROUNDS = 3


@dataclass(frozen=True)
class Streaming:
    """How the experts of a runner's steps are streamed.

    Attributes:
        tokens: budget of a step.
        nodes: that have a slice of the experts each.
        layers: whose experts are; None: all.
    """

    ring: Ring
    tokens: int
    nodes: MemoryNodes = ONE_NODE
    layers: frozenset[int] | None = None

    def apply(self, program: Program) -> Program:
        """The program with its experts streamed."""
        return stream_weights(program, resident_bytes, self.ring, self.layers, self.nodes)

    def whole(self, program: Program) -> bool:
        """Whether no experts are left to the CPU."""
        return len([*self._experts(program)]) == len(moe_layers(program))

    def gathers(self, program: Program) -> bool:
        """Whether a kernel can bring the experts that a table names."""
        return all(
            spec.shape[0] <= MAX_EXPERTS
            and spec.moe is not None
            and gatherable(spec.moe, get_format(spec.fmt), get_format(spec.down_fmt))
            for _, spec in self._experts(program)
        )

    def split(self, program: Program, share: float) -> Program:
        """The program with that share of each layer's experts streamed."""
        return split_experts(program, share, resident_bytes, self.ring, self.nodes)

    def nbytes(self, program: Program) -> int:
        """Bytes that cross in a step of such a program."""
        return sum(
            spec.nbytes - len(resident(program, node.layer)) * spec.bytes_per_expert
            for node, spec in self._experts(program)
        )

    def pin(self, program: Program, store: WeightStore, pinned: Pinned) -> tuple[Streaming, str]:
        """Pins the experts, layer by layer; those that are, and why not all are, or "".

        Args:
            program: any of the model's, placed.
        """
        layers = set[int]()
        for node, spec in self._experts(program):
            held: Experts = store.get(spec, cpu.HERE, cpu.packed)
            for part in held.slices:
                if reason := pinned.add(part.arena):
                    return replace(self, layers=frozenset(layers)), reason
            assert node.layer is not None
            layers.add(node.layer)
        return replace(self, layers=frozenset(layers)), ""

    def link_rate(self, program: Program, store: WeightStore, device: torch.device) -> float:
        """Bytes a second from pinned experts to a GPU, while nothing else runs."""
        if device.type != "cuda":  # the interpreter reads main memory as it is
            return math.inf
        _, spec = next(self._experts(program))
        held: Experts = store.get(spec, cpu.HERE, cpu.packed)
        part = held.slices[0]
        count = min(part.shape.E, max(1, _LINK_BYTES // part.bytes_per_expert))
        tiles = ExpertTiles.empty(part.shape, part.fmt, part.down_fmt, count, device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.device(device):
            copy_experts(part, range(count), tiles)  # the first one wakes the link
            begin.record()
            for _ in range(_ROUNDS):
                copy_experts(part, range(count), tiles)
            end.record()
            end.synchronize()
        return _ROUNDS * tiles.nbytes / max(1e-9, begin.elapsed_time(end) / 1e3)

    def _experts(self, program: Program) -> Iterator[tuple[Node, WeightSpec]]:
        for layer in moe_layers(program):
            node = layer.experts
            if self.layers is None or node.layer in self.layers:
                yield node, program.weight(node, "experts")


def plan_streaming(
    model: Lowerable,
    gpus: Gpus,
    placement: Placement,
    sizes: StepSizes,
    deferred: int = 0,
    tokens: int | None = None,
) -> Streaming:
    """How a model's experts are streamed from main memory to the GPUs of their layers.

    Args:
        gpus: in Triton's interpreter there is always room.
        placement: of the model's nodes, experts on the CPU.
        sizes: of any step; ``deferred``: experts of a token that are.
        tokens: budget of a step; None: as many of ``STREAM_TOKENS`` as fit.

    Raises:
        PykernelsError: experts that cannot be streamed, and why.
    """
    program = keep_routing(model.lower(sizes.of(1)))
    if reason := _why_not(program):
        raise PykernelsError(f"experts cannot be streamed: {reason}", "Leave prefill at cpu")
    if interpreted(gpus):
        return Streaming(RINGS[0], tokens or STREAM_TOKENS[-1], model.store.nodes)
    free = room_for_steps(model, gpus, placement, program, sizes.pages)
    short, most = "", balanced_tokens(*_crossing(program), sizes.table_pages * PAGE)
    for ring in RINGS:
        for T in (tokens,) if tokens else (T for T in STREAM_TOKENS if most >= T):
            found = Streaming(ring, T, model.store.nodes)
            needed = _step_bytes(found, model, placement, sizes, deferred, T)
            full = [name for name in free if needed[name] > free[name]]
            if not full:
                return found
            room, need = (max(0, of[full[0]]) / 2**30 for of in (free, needed))
            short = f"{full[0]} has {room:.1f} GiB for steps, which need {need:.1f}"
    raise PykernelsError(
        f"experts cannot be streamed: {short} with two layers of experts on their way",
        "Ask for fewer max_num_batched_tokens or kv_tokens, or leave prefill at cpu",
    )


def balanced_tokens(nbytes: int, numbers: int, positions: int) -> int:
    """The most of ``STREAM_TOKENS`` with which a GPU is no slower than its link; no more than one
    sequence has, or 4,096.

    Args:
        nbytes: of all experts; ``numbers``: of the experts that a token takes.
        positions: of the longest sequence.
    """
    most = OPS_PER_BYTE * nbytes // (2 * numbers)
    return max([4096, *(T for T in STREAM_TOKENS if most >= T <= positions)])


def _crossing(program: Program) -> tuple[int, int]:
    """Bytes of a program's experts, and numbers of those that a token takes."""
    nbytes = numbers = 0
    for layer in moe_layers(program):
        spec = program.weight(layer.experts, "experts")
        _, H, I = spec.shape  # noqa: E741
        nbytes, numbers = nbytes + spec.nbytes, numbers + 3 * layer.topk * H * I
    return nbytes, numbers


def wanted_streaming(
    prefill: str,
    model: Lowerable,
    gpus: Gpus,
    placement: Placement,
    sizes: StepSizes,
    deferred: int = 0,
    tokens: int | None = None,
) -> Streaming | None:
    """``plan_streaming`` as far as ``EngineConfig.prefill`` asks for it; None: nothing is streamed,
    with a warning where it could not be.

    Raises:
        PykernelsError: what is asked for cannot be.
    """
    if prefill == "cpu" or placement.experts != CPU:
        if prefill in ("stream", "split"):
            check_routed(keep_routing(model.lower(sizes.of(1))), f"prefill {prefill}")
            raise PykernelsError(
                f"prefill {prefill} with the experts on the GPU: nothing has to cross",
                "Keep the experts on the CPU (experts cpu), or leave prefill at auto",
            )
        return None
    if prefill == "auto" and interpreted(gpus):  # no link whose rate there is to measure
        return None
    try:
        return plan_streaming(model, gpus, placement, sizes, deferred, tokens)
    except PykernelsError as error:
        if prefill != "auto":
            raise
        warnings.warn(f"{error.cause}; the CPU computes those of prompts", stacklevel=4)
        return None


def streaming_bytes(
    model: Lowerable, placement: Placement, sizes: StepSizes, tokens: int | None = None
) -> dict[str, int]:
    """Memory of each GPU that streamed steps take where there is room.

    Args:
        tokens: budget of a step; None: ``RESERVED`` of them.
    """
    found = Streaming(RINGS[0], tokens or RESERVED)
    return _step_bytes(found, model, placement, sizes, 0, found.tokens)


def _step_bytes(
    streaming: Streaming,
    model: Lowerable,
    placement: Placement,
    sizes: StepSizes,
    deferred: int,
    T: int,
) -> dict[str, int]:
    program = streaming.apply(placement.apply(keep_routing(model.lower(sizes.of(T)))))
    program = defer(program, deferred)
    parts = partition(placement.stage(program))
    return {name: step_bytes(part) for name, part in parts.items() if name != CPU}


def _why_not(program: Program) -> str | None:
    """Why a model's experts cannot cross, as a clause."""
    for layer in moe_layers(program):
        node = layer.experts
        spec = program.weight(node, "experts")
        if (activations := node.attr("activations")) != "bf16":
            return f"{node.name} has {activations} activations, which no kernel of the GPU takes"
        fmt, down, (_, H, I) = get_format(spec.fmt), get_format(spec.down_fmt), spec.shape  # noqa: E741
        if reason := supports(fmt, down, H, I, expert_format(spec)):
            return reason
    return None
