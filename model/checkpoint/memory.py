"""How much memory a load plan needs, and whether the machine has it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import torch
from torch import nn

from pykernels.errors import PykernelsError
from runtime.experts.routed import RoutedExperts
from runtime.machine.topology import Topology
from runtime.workers.pool import Pool

from ..modules.linear import Linear, linears
from ..modules.moe import FusedMoE
from ..modules.placement import Placement
from .load import nbytes
from .plan import Dense, Plan
from .safetensors import Checkpoint

GIB = 1 << 30
MIB = 1 << 20


def needed(
    plan: Plan, model: nn.Module, checkpoint: Checkpoint, dtype: torch.dtype, placement: Placement
) -> dict[str, int]:
    """Bytes of each device ("cpu": main memory) that loading takes at its peak.

    Packed experts are in main memory, the rest where `placement` says. The largest single step is
    added there: one tensor, or one expert, as stored and as float32.
    """
    needs, step, ours = Counter[str](cpu=0), 0, linears(model)
    for item in plan.items:
        device = placement.of(item.name)
        if isinstance(item, Dense):
            numel = math.prod(item.source.shape)
            needs[device] += _packed(ours, item) or numel * item.dtype.itemsize
            step = max(
                step, checkpoint.nbytes(item.source.data) + numel * (4 + item.dtype.itemsize)
            )
            continue
        module = model.get_submodule(item.name)
        if isinstance(module, FusedMoE):
            formats = item.packed(module)
            needs["cpu"] += RoutedExperts.bytes_needed(module.cpu_shape, *formats)
            if module.pinned is not None:
                needs[device] += len(module.pinned.pinned) * module.pinned.expert_bytes
        else:
            needs[device] += sum(p.numel() for p in module.parameters()) * dtype.itemsize
        # One expert at a time: as stored, and as float32 if it is converted.
        stored = sum(checkpoint.nbytes(m.data) for m in item.experts[0])
        step = max(step, stored + 4 * sum(math.prod(m.shape) for m in item.experts[0]))
    needs["cpu"] += step
    return dict(needs)


def _packed(ours: Mapping[str, Linear], item: Dense) -> int | None:
    """Bytes of the matrix of a linear of ours; None if it is none."""
    if (linear := ours.get(item.name)) is None:
        return None
    return linear.packed_bytes(linear.packed_format(item.source.fmt or "bf16"))


def needed_by_engine(plan: Plan, model: nn.Module, checkpoint: Checkpoint) -> int:
    """Bytes that weights take in the engine, at the peak of loading: packed, as they are stored."""
    total, step, ours = 0, 0, linears(model)
    for item in plan.items:
        if isinstance(item, Dense):
            matrix = item.source
            each = checkpoint.nbytes(matrix.data)
            total += _packed(ours, item) or nbytes(checkpoint, item)
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


def check(needs: Mapping[str, int]) -> None:
    """Raise `PykernelsError` with both numbers if a device has less memory free than is needed."""
    free = available()
    if needs["cpu"] > free:
        raise PykernelsError(
            f"The model needs {size(needs['cpu'])} of main memory, {size(free)} are free",
            "Free memory, use a machine with more of it, or a smaller checkpoint",
        )
    for device, need in needs.items():
        if device == "cpu":
            continue
        free = torch.cuda.mem_get_info(device)[0]
        if need > free:
            raise PykernelsError(
                f"All but the experts needs {size(need)} on {device}, {size(free)} are free",
                "Free memory on the GPU, place less there (--rules), or use --device cpu",
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
            sizes = RoutedExperts.bytes_by_node(module.cpu_shape, fmt, pool, down_fmt)
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
