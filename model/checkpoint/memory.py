"""How much memory a load plan needs, and whether the machine has it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from pykernels.errors import PykernelsError
from pykernels.quant import get_format
from runtime.devices.cpu.routed import CpuExperts
from runtime.engine import EngineConfig
from runtime.kv_cache.layout import PAGE
from runtime.machine.nodes import MemoryNodes
from runtime.machine.topology import Topology
from runtime.planning.placement import Placement

from ..modules.linear import Linear, linears
from ..modules.moe import FusedMoE
from .cache_cost import CacheCost
from .plan import Plan, PlannedDense
from .read import nbytes
from .tensors.safetensors import Checkpoint

GIB = 1 << 30
MIB = 1 << 20
ON_CPU = Placement()
CONVERTED = ("int8", "q6_k", "q4_k", "int4")
"""Formats that are offered where the experts do not fit, the largest first."""


def needed(plan: Plan, model: nn.Module, checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    """Bytes of main memory that loading for the eager forward takes at its peak.

    The largest single step is added: one tensor, or one expert, as stored and as float32.
    """
    total, step, ours = 0, 0, linears(model)
    for item in plan.items:
        if isinstance(item, PlannedDense):
            numel = math.prod(item.source.shape)
            total += _packed(ours, item) or numel * item.dtype.itemsize
            step = max(
                step, checkpoint.nbytes(item.source.data) + numel * (4 + item.dtype.itemsize)
            )
            continue
        module = model.get_submodule(item.name)
        if isinstance(module, FusedMoE):
            total += CpuExperts.bytes_needed(module.shape, *item.packed(module))
        else:
            total += sum(p.numel() for p in module.parameters()) * dtype.itemsize
        # One expert at a time: as stored, and as float32 if it is converted.
        stored = sum(checkpoint.nbytes(m.data) for m in item.experts[0])
        step = max(step, stored + 4 * sum(math.prod(m.shape) for m in item.experts[0]))
    return total + step


def _packed(ours: Mapping[str, Linear], item: PlannedDense) -> int | None:
    """Bytes of the matrix of a linear of ours; None if it is none."""
    if (linear := ours.get(item.name)) is None:
        return None
    return linear.packed_bytes(linear.packed_format(item.source.fmt or "bf16"))


@dataclass(frozen=True)
class Packed:
    """What a model's weights take when they are packed for the engine.

    Attributes:
        by_item: bytes of each item of the plan, by its name; ``step``: what one more takes while
            it is packed, at most.
        experts: bytes of all routed experts, in the formats that they get; ``converted``: and in
            smaller ones, by name.
    """

    by_item: dict[str, int]
    step: int
    experts: int
    converted: dict[str, int]

    def peak(self, placement: Placement = ON_CPU) -> int:
        """Peak of loading in main memory: of what is on the CPU, and of one more."""
        rest = sum(self.by_item.values()) - self.experts
        return self.step + sum(
            nbytes
            for nbytes, device in ((rest, placement.device), (self.experts, placement.experts))
            if not device.startswith("cuda")
        )

    def smaller(self, placement: Placement = ON_CPU) -> dict[str, int]:
        """``peak`` with the experts converted, by format, the largest first."""
        peak = self.peak(placement)
        if placement.experts.startswith("cuda"):
            return {}
        sizes = {fmt: peak - self.experts + n for fmt, n in self.converted.items()}
        return {fmt: n for fmt, n in sizes.items() if n < peak}


def needed_by_engine(
    plan: Plan, model: nn.Module, checkpoint: Checkpoint, wanted: str | None = None
) -> Packed:
    """What the engine needs, and the packed cache: matrices as they are stored or in the
    formats of rules, or in ``wanted``.
    """
    by_item: dict[str, int] = {}
    ours, step, experts = linears(model), 0, 0
    converted = dict.fromkeys(CONVERTED, 0)
    for item in plan.items:
        if isinstance(item, PlannedDense):
            packed = _packed(ours, item) or nbytes(checkpoint, item)
            by_item[item.name] = min(packed, _in_format(item.source.shape, wanted) or packed)
            step = max(step, 2 * checkpoint.nbytes(item.source.data))
            continue
        module = model.get_submodule(item.name)
        assert isinstance(module, FusedMoE)
        packed = CpuExperts.bytes_needed(module.shape, *item.packed(module))
        by_item[item.name] = packed
        experts += packed
        for name in CONVERTED:
            fits = min(module.shape.H, module.shape.I) % get_format(name).k_multiple == 0
            converted[name] += CpuExperts.bytes_needed(module.shape, name) if fits else packed
        stored = sum(checkpoint.nbytes(m.data) for m in item.experts[0])
        step = max(step, stored + 4 * sum(math.prod(m.shape) for m in item.experts[0]))
    return Packed(by_item, step, experts, converted)


def _in_format(shape: tuple[int, ...], name: str | None) -> int | None:
    """Bytes of a matrix in a format; None if it is none, or the format does not take it."""
    if name is None or len(shape) != 2:
        return None
    fmt = get_format(name)
    N, K = shape
    if K % fmt.k_multiple:
        return None
    return fmt.packed_bytes(N, K) + -(-N // 32) * fmt.scale_bytes(K)


def weight_bytes(fmt: str) -> float:
    """Bytes of one weight, its share of the scales included."""
    stored, K = get_format(fmt), 4096
    return (stored.block_bytes(K) + stored.scale_bytes(K)) / (32 * K)


def cache_pages(
    config: EngineConfig,
    longest: int,
    cost: CacheCost,
    weights: int,
    smaller: Mapping[str, int],
    on_gpu: int | None = None,
    states: int = 0,
) -> int:
    """Pages of the KV cache: what ``config`` asks for, else an eighth of the memory that is left,
    and two sequences of ``longest`` tokens at least.

    Args:
        cost: what a cache takes.
        weights: bytes that loading takes; ``smaller``: with the experts converted, by format.
        on_gpu: bytes that are free on the GPU that holds the cache, where ``check_engine`` is to
            follow for the weights; None: it is in main memory.
        states: bytes of the states of sequences and of their snapshots, besides.

    Raises:
        PykernelsError: weights, states and cache need more memory than is free, or the cache is
            smaller than a page.
    """
    free = available() - states
    if on_gpu is not None:
        on_gpu -= states
        if on_gpu < 0:
            raise PykernelsError(
                f"States of sequences of {size(states)}, and the GPU has {size(on_gpu + states)}"
                " free",
                "Ask for fewer snapshots or max_num_seqs",
            )
    elif states and weights > free:
        raise PykernelsError(
            f"The model's {size(weights)} and states of sequences of {size(states)} need more than"
            f" the {size(free + states)} that are free",
            "Ask for fewer snapshots or max_num_seqs",
        )
    share = (free - weights) // 8 if on_gpu is None else on_gpu // 4
    pages = pages_of(config, longest, cost, share)
    if config.kv_tokens is None and config.kv_bytes is None:
        if on_gpu is None:
            sequences = min(2, config.max_num_seqs)
            token = cost.of_token(-(-longest // PAGE) * sequences)
            check_engine(weights + states, token, longest, sequences, smaller)
        return pages
    if pages < 1:
        raise PykernelsError(
            f"kv_bytes={config.kv_bytes} is less than a page of {PAGE} tokens",
            f"Give {cost.nbytes(1)} or more",
        )
    nbytes = cost.nbytes(pages)
    if on_gpu is None:
        check_engine(weights + states, cost.of_token(1), PAGE, 1, smaller)
    if on_gpu is not None and nbytes > (most := max(0, on_gpu) + max(0, free)):
        raise PykernelsError(
            f"A KV cache of {size(nbytes)} for {pages * PAGE} tokens, and the GPU has"
            f" {size(max(0, on_gpu))} free, main memory {size(max(0, free))}",
            f"Ask for kv_tokens={cost.most_pages(most) * PAGE} at most",
        )
    if on_gpu is None and weights + nbytes > free:
        raise PykernelsError(
            f"The model's {size(weights)} and a KV cache of {size(nbytes)} for"
            f" {pages * PAGE} tokens need more than the {size(free)} that are free",
            f"Ask for kv_tokens={cost.most_pages(free - weights) * PAGE} at most",
        )
    return pages


def pages_of(config: EngineConfig, longest: int, cost: CacheCost, share: int) -> int:
    """Pages that ``config`` asks for, else those of as many sequences as fit into ``share`` bytes,
    two at least.

    Args:
        longest, cost: as in ``cache_pages``.
    """
    if config.kv_tokens is not None:
        return -(-config.kv_tokens // PAGE)
    if config.kv_bytes is not None:
        return cost.most_pages(config.kv_bytes)
    sequences, fit = min(2, config.max_num_seqs), cost.most_sequences(share, longest)
    return -(-longest // PAGE) * max(sequences, min(fit, config.max_num_seqs)) + 1


def check_engine(
    weights: int, token: int, context: int, sequences: int, smaller: Mapping[str, int]
) -> None:
    """Raise `PykernelsError` if weights and KV cache need more memory than is free now.

    Args:
        weights: bytes; ``token``: bytes of the cache for each token.
        context: positions of a sequence; ``sequences``: of that length, that the cache holds.
        smaller: bytes of the weights with their experts converted, by format.
    """
    free, cache = available(), token * context
    if weights > free:
        fits = next((fmt for fmt, total in smaller.items() if total + cache <= free), None)
        raise PykernelsError(
            f"The model needs {size(weights)} of main memory, {size(free)} are free",
            f"With its experts in {fits} it needs {size(smaller[fits])}: pykernels convert --format"
            f" {fits}"
            if fits
            else "Free memory, use a machine with more of it, or a smaller checkpoint",
        )
    if weights + cache * sequences > free:
        positions = (free - weights) // (token * sequences) // 64 * 64
        choices = [f"a context of {positions}"] if positions else []
        if sequences > 1 and weights + cache <= free:
            choices.append(f"max_num_seqs=1, which has room for {context}")
        fits = next((f for f, n in smaller.items() if n + cache * sequences <= free), None)
        if fits:
            choices.append(f"the experts in {fits} (pykernels convert --format {fits})")
        raise PykernelsError(
            f"The model's {size(weights)} and a KV cache of {size(cache * sequences)} for"
            f" {context * sequences} tokens need more than the {size(free)} that are free",
            f"Ask for {', or '.join(choices)}" if choices else "Free memory",
        )


def check_cache(token: int, pages: int, layers: int, weights: int) -> None:
    """Raise `PykernelsError` if main memory has no room for the caches of layers that a GPU has
    none for.

    Args:
        token: bytes of them per token; ``layers``: how many they are.
        weights: bytes of main memory that loading takes.
    """
    free, page = available() - weights, token * PAGE
    if pages * page > max(0, free):
        raise PykernelsError(
            f"Keys and values of {layers} layers, which the GPU has no room for, take"
            f" {size(pages * page)} of main memory, and the model leaves {size(max(0, free))}",
            f"Ask for kv_tokens={max(0, free) // page * PAGE} at most, or kv_dtype fp8",
        )


def check_behind(ram: int, weights: int) -> None:
    """Raise `PykernelsError` if there is no room for so much behind the KV cache."""
    free = available() - weights
    if ram > max(0, free):
        raise PykernelsError(
            f"{size(ram)} for what leaves the KV cache, and the model leaves {size(max(0, free))}"
            " of main memory free",
            "Give a smaller kv_ram_gib, kv_store_gib or kv_transfer_gib",
        )


def check(need: int) -> None:
    """Raise `PykernelsError` with both numbers if less main memory is free than is needed."""
    free = available()
    if need > free:
        raise PykernelsError(
            f"The model needs {size(need)} of main memory, {size(free)} are free",
            "Free memory, use a machine with more of it, or a smaller checkpoint",
        )


def check_nodes(
    plan: Plan, model: nn.Module, nodes: MemoryNodes, packed: Mapping[str, int] | None = None
) -> None:
    """Raise `PykernelsError` if a NUMA node has no room for its slices of the weights.

    The slices are bound to their node: where it has no room, Linux would kill the process.

    Args:
        packed: bytes of the plan's items by name, of which all are sliced; None: experts alone.
    """
    if len(nodes) < 2:
        return
    needs = [0.0] * len(nodes)
    for item in plan.items:
        if isinstance(item, PlannedDense):
            sizes = [(packed or {}).get(item.name, 0) / len(nodes)] * len(nodes)
        else:
            module = model.get_submodule(item.name)
            assert isinstance(module, FusedMoE)
            fmt, down_fmt = item.packed(module)
            by_node = CpuExperts.bytes_by_node(module.shape, fmt, nodes, down_fmt)
            sizes = [float(nbytes) for nbytes in by_node]
            if len(sizes) == 1:  # on all nodes in turns
                sizes = [sizes[0] / len(nodes)] * len(nodes)
        needs = [need + more for need, more in zip(needs, sizes, strict=True)]
    check_node_memory(needs, nodes)


def check_node_memory(needs: Sequence[float], nodes: MemoryNodes) -> None:
    """Raise `PykernelsError` if a NUMA node has fewer free bytes than it needs."""
    free = {node.number: node.memory_free for node in Topology.detect().nodes}
    for need, number in zip(needs, nodes.numbers, strict=True):
        if number is not None and need > free[number]:
            raise PykernelsError(
                f"NUMA node {number} gets {size(int(need))} of the weights, {size(free[number])}"
                " are free there",
                "Free memory on that node, or use --numa off",
            )


def available() -> int:
    """Bytes of main memory that a new allocation can have now, cgroup limits included."""
    return Topology.detect().memory_available


def size(nbytes: int) -> str:
    """`nbytes` as text: 1.5 GiB, 0.3 MiB."""
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.1f} MiB"
