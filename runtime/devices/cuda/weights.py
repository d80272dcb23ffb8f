"""Packed weights in the GPU's layouts: in their own format where a kernel multiplies it, else in
bfloat16, dequantized once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import torch

from pykernels.gpu.gemm.weights import Matrices, pack_for_gpu, supports_format
from pykernels.gpu.moe.experts import Experts
from pykernels.quant import Format, PackedExperts, Weight, get_format
from pykernels.quant.layout import N_BLOCK

from ...matrix import PackedHeads, PackedMatrix

FP8_ROWS = 128
"""Rows of one E4M3 scale: matrices below each other share it only from a multiple of these on."""


AT_ONCE = 16
"""Experts that are unpacked at a time."""

V = TypeVar("V")
_made: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def _once(make: Callable[[Any, torch.device], V]) -> Callable[[Any, torch.device], V]:
    """Makes a GPU layout once per packed weight and device: all buckets share it."""

    @wraps(make)
    def cached(packed: Any, device: torch.device) -> V:
        source = getattr(packed, "packed", packed)
        own = _made.setdefault(source, {})
        key = make.__name__, device
        if key not in own:
            own[key] = make(source, device)
        return own[key]

    return cached


def is_made(packed: Any, device: torch.device) -> bool:
    """Whether a packed weight lies on the device already, for another engine."""
    made = _made.get(getattr(packed, "packed", packed), {})
    return any(where == device for _, where in made)


@dataclass(frozen=True)
class Rows:
    """Rows ``start ..`` of a packed matrix, as one GPU matrix."""

    start: int
    matrix: Matrices


def gpu_format(fmt: Format, K: int) -> Format:
    """``fmt`` where the GPU multiplies it for K inputs, else bfloat16."""
    return get_format("bf16") if supports_format(fmt, K) else fmt


@_once
def matrix(packed: PackedMatrix, device: torch.device) -> tuple[Rows, ...]:
    """A packed matrix on the GPU; rows that fill up 32-row blocks are zero."""
    fmt = gpu_format(packed.fmt, packed.K)
    return tuple(
        Rows(start, pack_for_gpu(fmt, [_as(fmt, packed.fmt, weight)]).to(device))
        for start, weight in _runs(packed)
    )


@_once
def dense(packed: PackedMatrix, device: torch.device) -> torch.Tensor:
    """bfloat16 [N, K], dequantized."""
    runs = [packed.fmt.dequantize(weight).to(torch.bfloat16) for _, weight in _runs(packed)]
    return torch.cat(runs).contiguous().to(device)


@_once
def heads(packed: PackedHeads, device: torch.device) -> torch.Tensor:
    """bfloat16 [G, N, K], dequantized."""
    fmt = packed.fmt
    stack = [
        fmt.dequantize(fmt.unpack(blocks, scales, packed.N, packed.K)).to(torch.bfloat16)
        for blocks, scales in zip(packed.blocks, packed.scales, strict=True)
    ]
    return torch.stack(stack).contiguous().to(device)


@_once
def experts(packed: Any, device: torch.device) -> Experts:
    """All experts of a layer on the GPU.

    A few are unpacked at a time, so the CPU never holds a second set.
    """
    source: PackedExperts = packed
    shape = source.shape
    fmt = _expert_format(source)
    stacks = Experts.empty(fmt, shape.E, shape.H, shape.I, device, shape.spec)

    def unpacked(e: int) -> Experts:
        gate, up, down = source.unpack(e)
        biases = source.biases(e)
        weights = (_as(fmt, source.fmt, gate), _as(fmt, source.fmt, up))
        return Experts.pack(
            fmt,
            [(*weights, _as(fmt, source.down_fmt, down))],
            torch.device("cpu"),
            shape.spec,
            [] if biases is None else [biases],
        )

    with ThreadPoolExecutor(AT_ONCE) as workers:
        for first in range(0, shape.E, AT_ONCE):
            batch = range(first, min(first + AT_ONCE, shape.E))
            for e, one in zip(batch, workers.map(unpacked, batch), strict=True):
                _place(stacks, one, e)
    return stacks


def _place(stacks: Experts, one: Experts, e: int) -> None:
    """Copies an expert to its place in the stacks."""
    _copy(stacks.gate_up, one.gate_up, 2 * e)
    _copy(stacks.down, one.down, e)
    for stack, part, first in (
        (stacks.gate_up_bias, one.gate_up_bias, 2 * e),
        (stacks.down_bias, one.down_bias, e),
    ):
        if stack is not None and part is not None:
            stack[first : first + len(part)] = part


def experts_bytes(packed: Any) -> int:
    """GPU memory that ``experts`` takes, bytes."""
    source = packed if isinstance(packed, PackedExperts) else packed.packed
    shape, fmt = source.shape, _expert_format(source)
    if fmt.name == "bf16":
        return 3 * 2 * shape.E * shape.H * shape.I
    return int(source.bytes_per_expert) * shape.E


def _expert_format(source: PackedExperts) -> Format:
    """One format for gate, up and down: the kernels take no two."""
    shape = source.shape
    same = source.fmt.name == source.down_fmt.name
    fits = not supports_format(source.fmt, shape.H) and not supports_format(source.fmt, shape.I)
    return source.fmt if same and fits else get_format("bf16")


def _as(fmt: Format, stored: Format, weight: Weight) -> Weight:
    """A weight in ``fmt``, which is its own or bfloat16."""
    if fmt.name == stored.name:
        return weight
    return Weight(stored.dequantize(weight).to(torch.bfloat16))


def _copy(stack: Matrices, part: Matrices, first: int) -> None:
    stack.data[first : first + len(part)] = part.data
    if stack.scale is not None and part.scale is not None:
        stack.scale[first : first + len(part)] = part.scale


def _runs(packed: PackedMatrix) -> Iterator[tuple[int, Weight]]:
    """(first row, weight) of the stacked matrices, together where their scales allow it."""
    starts = packed.starts
    if packed.fmt.name != "fp8" or all(start % FP8_ROWS == 0 for start in starts):
        starts = (0,)
    for start, end in zip(starts, (*starts[1:], packed.N), strict=True):
        at = slice(start // N_BLOCK, -(-end // N_BLOCK))
        rows = packed.fmt.unpack(packed.blocks[at], packed.scales[at], end - start, packed.K)
        yield start, rows
