"""How much memory a load plan needs, and whether the machine has it."""

from __future__ import annotations

import math

import torch
from torch import nn

from pykernels.errors import PykernelsError
from runtime.experts.routed import RoutedExperts
from runtime.machine.topology import Topology
from runtime.workers.pool import Pool

from ..modules.moe import FusedMoE
from .plan import Dense, Plan
from .safetensors import Checkpoint

GIB = 1 << 30
MIB = 1 << 20


def needed(
    plan: Plan, model: nn.Module, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
) -> tuple[int, int]:
    """(main memory, device memory) in bytes that loading takes at its peak.

    Packed experts are in main memory, the rest on `device` (if that is the CPU, device memory is
    0). The largest single step is added: one tensor, or one expert, as stored and as float32.
    """
    experts = dense = step = 0
    for item in plan.items:
        if isinstance(item, Dense):
            numel = math.prod(item.source.shape)
            dense += numel * item.dtype.itemsize
            step = max(
                step, checkpoint.nbytes(item.source.data) + numel * (4 + item.dtype.itemsize)
            )
            continue
        module = model.get_submodule(item.name)
        if isinstance(module, FusedMoE):
            experts += RoutedExperts.bytes_needed(module.shape, *item.packed(module))
        else:
            dense += sum(p.numel() for p in module.parameters()) * dtype.itemsize
        # One expert at a time: as stored, and as float32 if it is converted.
        stored = sum(checkpoint.nbytes(m.data) for m in item.experts[0])
        step = max(step, stored + 4 * sum(math.prod(m.shape) for m in item.experts[0]))
    if device.type == "cpu":
        return experts + dense + step, 0
    return experts + step, dense


def needed_by_engine(plan: Plan, model: nn.Module, checkpoint: Checkpoint) -> int:
    """Bytes that weights take in the engine, at the peak of loading: packed, as they are stored."""
    total = step = 0
    for item in plan.items:
        if isinstance(item, Dense):
            matrix = item.source
            each = checkpoint.nbytes(matrix.data)
            total += each + (checkpoint.nbytes(matrix.scale) if matrix.scale else 0)
            step = max(step, 2 * each)
            continue
        module = model.get_submodule(item.name)
        assert isinstance(module, FusedMoE)
        total += RoutedExperts.bytes_needed(module.shape, *item.packed(module))
        stored = sum(checkpoint.nbytes(m.data) for m in item.experts[0])
        step = max(step, stored + 4 * sum(math.prod(m.shape) for m in item.experts[0]))
    return total + step


def check_engine(weights: int, token: int, context: int, cached: int) -> None:
    """Raise `PykernelsError` if weights and KV cache need more memory than is free now.

    Args:
        weights: bytes; ``token``: bytes of the cache for each token.
        context: positions of a sequence; ``cached``: tokens that the cache holds.
    """
    free = available()
    if weights > free:
        raise PykernelsError(
            f"The model needs {size(weights)} of main memory, {size(free)} are free",
            "Free memory, use a machine with more of it, or a smaller checkpoint",
        )
    if weights + token * cached > free:
        fits = (free - weights) // token * context // cached // 64 * 64
        raise PykernelsError(
            f"The model's {size(weights)} and a KV cache of {size(token * cached)} for {cached}"
            f" tokens need more than the {size(free)} that are free",
            f"Ask for a context of {fits}" if fits else "Free memory, or use a smaller checkpoint",
        )


def check(main: int, on_device: int, device: torch.device) -> None:
    """Raise `PykernelsError` with both numbers if less memory is free now than is needed."""
    free = available()
    if main > free:
        raise PykernelsError(
            f"The model needs {size(main)} of main memory, {size(free)} are free",
            "Free memory, use a machine with more of it, or a smaller checkpoint",
        )
    if on_device:
        free = torch.cuda.mem_get_info(device)[0]
        if on_device > free:
            raise PykernelsError(
                f"All but the experts needs {size(on_device)} on {device}, {size(free)} are free",
                "Free memory on the GPU or use --device cpu",
            )


def check_nodes(plan: Plan, model: nn.Module, pool: Pool) -> None:
    """Raise `PykernelsError` if a NUMA node has no room for its slices of the experts.

    The slices are bound to their node: where it has no room, Linux would kill the process.
    """
    needs = [0] * len(pool.pools)
    for item in plan.items:
        if isinstance(item, Dense):
            continue
        module = model.get_submodule(item.name)
        if isinstance(module, FusedMoE):
            fmt, down_fmt = item.packed(module)
            sizes = RoutedExperts.bytes_by_node(module.shape, fmt, pool, down_fmt)
            for i, nbytes in enumerate(sizes):
                needs[i] += nbytes
    free = {node.number: node.memory_free for node in Topology.detect().nodes}
    for need, each in zip(needs, pool.pools, strict=True):
        if each.node is not None and need > free[each.node]:
            raise PykernelsError(
                f"NUMA node {each.node} gets {size(need)} of experts, {size(free[each.node])} are"
                " free there",
                "Free memory on that node, or use --numa off",
            )


def available() -> int:
    """Bytes of main memory that a new allocation can have now, cgroup limits included."""
    return Topology.detect().memory_available


def size(nbytes: int) -> str:
    """`nbytes` as text: 1.5 GiB, 0.3 MiB."""
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.1f} MiB"
