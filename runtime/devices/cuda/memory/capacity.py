"""How many tokens a step may have, by what fits into a GPU's memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

from pykernels.gpu.gemm.unpack import SCRATCH

from ....passes.defer import defer
from ....passes.keep_routing import keep_routing
from ....planning.placement import CPU, Placement, place
from ....program import Program
from ....program.analysis import experts_per_token
from ....program.node import Node
from ....program.partition import partition
from ....program.sizes import StepSizes
from ....program.weight_spec import WeightSpec
from ....runner.paged_runner import Lowerable
from ...gpus import HEADROOM, Gpus, free_bytes, interpreted
from .buffers import dtypes, planned
from .weights import gpu_bytes

STEP_TOKENS = (4096, 2048, 1024, 512)
"""What a step may have, if nobody says: as many as fit, so that weights are read seldom. Beside
experts on the CPU, and at the least, the last one."""
EXPANDED_BYTES = 512 << 20
"""Expanded keys and values take so many at a time, unless one head's are more by themselves."""
_UNPACKED_KEYS = 2 << 30  # ``worth_unpacking``'s most


def place_on(
    gpus: Gpus,
    model: Lowerable,
    num_pages: int,
    experts: str,
    placed: Mapping[str, str] = MappingProxyType({}),
    by_layer: Mapping[int, str] | None = None,
) -> Placement:
    """Where a model's nodes run beside a cache of so many pages: unless they fit, routed experts on
    the CPU, all else on GPUs. The other arguments: see ``placement.place``."""
    caches = {name: part.nbytes for name, part in model.caches(num_pages).items()}
    free = {name: n - HEADROOM for name, n in free_bytes(gpus).items()}
    program = model.lower()
    return place(program, experts, free, gpu_bytes, placed, caches, by_layer)


def step_tokens(
    model: Lowerable,
    gpus: Gpus,
    placement: Placement,
    sizes: StepSizes,
    deferred: int = 0,
) -> int:
    """The token budget of a step.

    Args:
        gpus: in the interpreter the fewest.
        placement: of the model's nodes.
        sizes: of any step.
        deferred: experts of a token that are.
    """
    if interpreted(gpus) or placement.experts == CPU:
        return STEP_TOKENS[-1]
    for T in STEP_TOKENS[:-1]:
        rooms = _rooms(model, gpus, placement, sizes.of(T), deferred)
        if all(room >= 0 for room in rooms.values()):
            return T
    return STEP_TOKENS[-1]


def room_for_experts(
    model: Lowerable, gpus: Gpus, sizes: StepSizes, placement: Placement
) -> dict[str, int]:
    """Bytes of each GPU that experts may take beside the rest of a model, its cache and its steps;
    below 0 where these alone are too much.

    Args:
        gpus: in Triton's interpreter any number fit.
        sizes: of the largest step.
        placement: of all that is no routed expert.
    """
    if interpreted(gpus):
        return dict.fromkeys(gpus, 1 << 62)
    return _rooms(model, gpus, placement, sizes)


def _rooms(
    model: Lowerable, gpus: Gpus, placement: Placement, sizes: StepSizes, deferred: int = 0
) -> dict[str, int]:
    """Bytes that are free on each GPU beside weights, cache and steps."""
    program = keep_routing(model.lower(sizes))
    rooms = room_for_steps(model, gpus, placement, program, sizes.pages)
    # Steps have room for experts wherever these are: some may be on a GPU besides.
    whole = replace(placement, experts=placement.device)
    parts = partition(whole.stage(defer(whole.apply(program), deferred)))
    return {name: room - step_bytes(parts[name]) for name, room in rooms.items()}


def room_for_steps(
    model: Lowerable, gpus: Gpus, placement: Placement, program: Program, pages: int
) -> dict[str, int]:
    """Bytes of each GPU that are left beside the weights that are yet to come and the cache.

    Args:
        program: any of the model's; ``pages``: of the cache.
    """
    parts = partition(placement.apply(program))
    caches, rooms = model.caches(pages), dict[str, int]()
    for name, free in free_bytes(gpus).items():
        part, device = parts[name], gpus[name]
        read = {spec.name: spec for spec in _weights(part)}
        missing = [
            spec
            for spec in read.values()
            if spec.name not in placement.staged and not model.store.is_made(spec, device)
        ]
        cached = sum(cache.nbytes for key, cache in caches.items() if key in part.buffers)
        rooms[name] = free - HEADROOM - cached - sum(map(gpu_bytes, missing))
    return rooms


def _weights(program: Program) -> Iterator[WeightSpec]:
    for node in program.nodes:
        for name in node.weights.values():
            yield program.weights[name]


def step_bytes(program: Program) -> int:
    """Bytes that a step's buffers take, and what its launches allocate beside them."""
    return planned(program, dtypes(program)).nbytes + max(
        (_temporary(program, node) for node in program.nodes), default=0
    )


def _temporary(program: Program, node: Node) -> int:
    T = program.sizes["T"]
    if node.op == "moe_ffn":  # rows of pairs: sorted, permuted, within experts, behind them
        _, H, inner = program.weight(node, "experts").shape
        each = experts_per_token(program, node.inputs["ids"]) if "ids" in node.inputs else 1
        return 2 * T * each * (3 * H + 2 * inner) + SCRATCH
    if node.op == "attention_expanded":
        return EXPANDED_BYTES
    if node.op == "attention" and "k_scale" in node.inputs:
        table, k = program.shape(node.inputs["page_table"]), program.shape(node.inputs["k"])
        room = 4 * table[0] * table[1] * k[1] * k[2] * k[3]
        return room if room <= _UNPACKED_KEYS else 0
    return 0
