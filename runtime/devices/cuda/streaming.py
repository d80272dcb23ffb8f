"""Which steps stream their experts to the GPU, and what that takes: pinned memory, room for a
layer, and so many tokens that it pays."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median

import torch

from pykernels.errors import PykernelsError
from pykernels.gpu.moe.from_tiles import supports
from pykernels.quant import get_format
from pykernels.quant.split import Experts

from ...kv_cache.layout import PAGE
from ...machine.nodes import ONE_NODE, MemoryNodes
from ...machine.pinned import Pinned
from ...node import Node
from ...partition import partition
from ...passes.layers import moe_layers
from ...passes.stream_weights import PIECES, Ring, stream_weights
from ...placement import CPU, Placement
from ...program import Program
from ...weight_spec import WeightSpec
from ...weights import WeightStore
from ..cpu import weights as cpu
from ..gpus import Gpus, interpreted
from ..runner import Executable, Lowerable
from .capacity import room_for_steps, step_bytes
from .launches.streamed import resident_bytes
from .weights import expert_format

STREAM_TOKENS = (8192, 4096, 2048, 1024, 512)
"""What a step may have, if nobody says: all experts cross once a step, so as many as fit."""
RESERVED = 2048
"""Tokens of a streamed step for which an expert cache leaves room."""
STREAM_BUCKETS = (512, 1024, 2048, 4096)
"""Buckets of streamed steps: padding costs little beside what crosses."""
RINGS = (Ring(PIECES, PIECES + 1), Ring(PIECES, 2))
"""A layer loaded beside another one that is computed; where memory is short, a quarter of one."""
MEASURED = 64, 256
"""Tokens of the two steps that say what the CPU takes."""
_LINK_BYTES = 64 << 20
_ROUNDS = 3
_BY_TOKEN = ("tokens", "positions", "slot_mapping", "sequences")
_BY_SEQUENCE = {"query_starts": False, "page_rows": False, "query_lengths": True, "lengths": True}
"""Whether it is the number of tokens."""
_CHANGED = (*_BY_TOKEN, *_BY_SEQUENCE, "page_table")


@dataclass(frozen=True)
class Rates:
    """What a step costs by either way.

    Attributes:
        stream_s: seconds in which all streamed experts cross the link once.
        cpu_s, cpu_token_s: seconds of a step with the experts on the CPU, and of each token of it.
    """

    stream_s: float
    cpu_s: float
    cpu_token_s: float

    @classmethod
    def measured(
        cls, nbytes: int, link: float, few: tuple[int, float], many: tuple[int, float]
    ) -> Rates:
        """From bytes of experts and bytes a second of the link, and from two steps on the CPU:
        (tokens, seconds) each."""
        slope = max(0.0, (many[1] - few[1]) / max(1, many[0] - few[0]))
        return cls(nbytes / link, max(0.0, many[1] - slope * many[0]), slope)


def choose(tokens: int, rates: Rates) -> str:
    """ "stream" or "cpu": by which way a step of so many tokens takes less time."""
    by_cpu = rates.cpu_s + tokens * rates.cpu_token_s
    return "stream" if rates.stream_s < by_cpu else "cpu"


def turning_point(rates: Rates, most: int) -> int:
    """The most tokens up to ``most`` of a step that should not be streamed; 0: there is none."""
    if not rates.cpu_token_s:
        return 0 if choose(1, rates) == "stream" else most
    tokens = (rates.stream_s - rates.cpu_s) / rates.cpu_token_s
    return max(0, min(most, math.floor(tokens)))


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

    def nbytes(self, program: Program) -> int:
        """Bytes that cross in a step of such a program."""
        return sum(spec.nbytes for _, spec in self._experts(program))

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
        source = held.slices[0].arena[:_LINK_BYTES]
        target = torch.empty(source.shape, dtype=torch.uint8, device=device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.device(device):
            target.copy_(source, non_blocking=True)  # the first one wakes the link
            begin.record()
            for _ in range(_ROUNDS):
                target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
        return _ROUNDS * source.nbytes / max(1e-9, begin.elapsed_time(end) / 1e3)

    def _experts(self, program: Program) -> Iterator[tuple[Node, WeightSpec]]:
        for layer in moe_layers(program):
            node = layer.experts
            if self.layers is None or node.layer in self.layers:
                yield node, program.weight(node, "experts")


@dataclass(frozen=True)
class Sizes:
    """Of a runner's steps: pages of the cache and of a sequence, sequences, and rows of logits."""

    pages: int
    table_pages: int
    sequences: int
    logits: int

    def lower(self, model: Lowerable, T: int) -> Program:
        rows = min(T, max(self.logits, self.sequences))
        return model.lower(T, self.sequences, rows, self.pages, self.table_pages)


def plan_streaming(
    model: Lowerable,
    gpus: Gpus,
    placement: Placement,
    sizes: Sizes,
    tokens: int | None = None,
) -> Streaming:
    """How a model's experts are streamed from main memory to the GPUs of their layers.

    Args:
        gpus: in Triton's interpreter there is always room.
        placement: of the model's nodes, experts on the CPU.
        tokens: budget of a step; None: as many of ``STREAM_TOKENS`` as fit.

    Raises:
        PykernelsError: experts that cannot be streamed, and why.
    """
    program = sizes.lower(model, 1)
    if reason := _why_not(program):
        raise PykernelsError(f"experts cannot be streamed: {reason}", "Leave prefill at cpu")
    if interpreted(gpus):
        return Streaming(RINGS[0], tokens or STREAM_TOKENS[-1], model.store.nodes)
    free = room_for_steps(model, gpus, placement, program, sizes.pages)
    short = ""
    for ring in RINGS:
        for T in (tokens,) if tokens else STREAM_TOKENS:
            found = Streaming(ring, T, model.store.nodes)
            needed = _step_bytes(found, model, placement, sizes, T)
            full = [name for name in free if needed[name] > free[name]]
            if not full:
                return found
            room, need = (max(0, of[full[0]]) / 2**30 for of in (free, needed))
            short = f"{full[0]} has {room:.1f} GiB for steps, which need {need:.1f}"
    raise PykernelsError(
        f"experts cannot be streamed: {short} with two layers of experts on their way",
        "Ask for fewer max_num_batched_tokens or kv_tokens, or leave prefill at cpu",
    )


def streaming_bytes(
    model: Lowerable, placement: Placement, sizes: Sizes, tokens: int | None = None
) -> dict[str, int]:
    """Memory of each GPU that streamed steps take where there is room.

    Args:
        tokens: budget of a step; None: ``RESERVED`` of them.
    """
    found = Streaming(RINGS[0], tokens or RESERVED)
    return _step_bytes(found, model, placement, sizes, found.tokens)


def _step_bytes(
    streaming: Streaming, model: Lowerable, placement: Placement, sizes: Sizes, T: int
) -> dict[str, int]:
    parts = partition(streaming.apply(placement.apply(sizes.lower(model, T))))
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


def step_seconds(
    step: Executable,
    arrays: Mapping[str, torch.Tensor],
    sizes: torch.Tensor,
    tokens: int,
    vocabulary: int,
) -> float:
    """Seconds of a step of one prompt of random tokens, the median of a few.

    Its keys and values go to the cache's first places, which nobody reads before they are written.

    Args:
        arrays: inputs of the step, which are as before when it returns; ``sizes``: of it.
    """
    before = {name: arrays[name].clone() for name in _CHANGED}
    at = torch.arange(tokens, dtype=torch.int64, device="cpu")
    pages = -(-tokens // PAGE)
    random = torch.randint(0, vocabulary, (tokens,), dtype=torch.int64, device="cpu")
    for name, values in zip(_BY_TOKEN, (random, at, at, torch.zeros_like(at)), strict=True):
        arrays[name][:tokens] = values
    for name, counts in _BY_SEQUENCE.items():
        arrays[name][0] = tokens if counts else 0
    arrays["page_table"][0, :pages] = at[:pages]
    sizes[0], sizes[1], sizes[2] = tokens, 1, 0
    times = list[float]()
    for _ in range(1 + _ROUNDS):
        start = time.perf_counter()
        step.run()
        times.append(time.perf_counter() - start)
    for name, array in before.items():
        arrays[name].copy_(array)
    return median(times[1:])
