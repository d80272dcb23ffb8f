"""Weights in the GPU's layouts, made of what is stored: in their own format where a kernel
multiplies it, else in bfloat16, dequantized once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from operator import is_

import torch
from torch.nn.functional import pad

from pykernels.gpu.gemm.weights import Matrices, empty_for_gpu, pack_for_gpu, supports_format
from pykernels.gpu.moe.experts import GpuExperts
from pykernels.quant import Format, Weight, get_format
from pykernels.quant.experts import check_expert

from ....program import Program
from ....program.node import Node
from ....program.weight_spec import WeightSpec
from ....program.weights import Expert, Layout, LayoutOf, WeightStore, naming
from ...cpu import weights as cpu
from .blocks import host_resident, stored_bytes, within

FP8_ROWS = 128
"""Rows of one E4M3 scale: matrices below each other share it only from a multiple of these on."""
AT_ONCE = 16
"""Experts that are brought into the GPU's layout at a time."""
DEQUANTIZED = 1 << 26
"""Numbers that are dequantized at a time, about."""


def layouts(
    program: Program, gpus: Mapping[str, torch.device], dtypes: Mapping[str, torch.dtype]
) -> LayoutOf:
    """The layout in which each node on a GPU reads its weights; CPU nodes keep the CPU's layouts.

    Args:
        gpus: by the names that nodes have as their device.
        dtypes: of the program's buffers on the GPUs.
    """
    on_cpu = cpu.layouts(program)
    readers = {
        name: (node, port)
        for node in program.nodes
        if "streamed" in node.inputs
        for port, name in node.weights.items()
    }

    def layout_of(node: Node, port: str) -> tuple[torch.device, Layout]:
        if node.device == "cpu":
            return on_cpu(node, port)
        if node.op == "load_weights":
            node, port = readers[node.weights[port]]
        elif node.role == "load" or "resident" in node.inputs:
            return cpu.CPU_DEVICE, cpu.packed
        spec = program.weight(node, port)
        layout = _layout(spec, node, port, dtypes)
        if "streamed" in node.inputs and spec.kind != "tensor":
            return cpu.CPU_DEVICE, host_resident(layout)
        return gpus[node.device], layout

    return layout_of


def _layout(spec: WeightSpec, node: Node, port: str, dtypes: Mapping[str, torch.dtype]) -> Layout:
    if spec.kind != "matrix":
        return {"tensor": cpu.vector, "heads": heads, "experts": experts}[spec.kind]
    # Logits are never rounded to bfloat16; their kernel reads a matrix that is.
    exact = node.op == "shared_factor"
    exact = exact or (node.op == "linear" and dtypes[node.outputs["out"]] == torch.float32)
    return dense if exact or port == "table" else matrix


@dataclass(frozen=True)
class MatrixRows:
    """Rows ``start ..`` of a weight, as one GPU matrix."""

    start: int
    matrix: Matrices


def gpu_format(fmt: Format, K: int) -> Format:
    """``fmt`` where the GPU multiplies it for K inputs, else bfloat16."""
    return get_format("bf16") if supports_format(fmt, K) else fmt


def matrix(spec: WeightSpec, store: WeightStore, device: torch.device) -> tuple[MatrixRows, ...]:
    """A matrix for products, its parts as one where their scales allow it; rows that fill up 32-row
    blocks are zeros."""
    stored = get_format(spec.fmt)
    fmt = gpu_format(stored, spec.shape[1])
    parts = [
        (part.at, _as(fmt, stored, weight))
        for part, weight in zip(spec.parts, store.matrices(spec), strict=True)
    ]
    if fmt.name != "fp8" or all(at % FP8_ROWS == 0 for at in spec.starts):
        parts = [(0, _stacked(parts))]
    return tuple(MatrixRows(at, pack_for_gpu(fmt, [weight]).to(device)) for at, weight in parts)


def dense(spec: WeightSpec, store: WeightStore, device: torch.device) -> torch.Tensor:
    """bfloat16 [N, K], dequantized."""
    out = torch.zeros(spec.shape, dtype=torch.bfloat16, device=device)
    for part, weight in zip(spec.parts, store.matrices(spec), strict=True):
        _dequantize(get_format(spec.fmt), weight, out[part.at : part.at + part.shape[0]])
    return out


def heads(spec: WeightSpec, store: WeightStore, device: torch.device) -> torch.Tensor:
    """bfloat16 [G, N, K], dequantized."""
    out = torch.empty(spec.shape, dtype=torch.bfloat16, device=device)
    for head, weight in zip(out, store.matrices(spec), strict=True):
        _dequantize(get_format(spec.fmt), weight, head)
    return out


def experts(spec: WeightSpec, store: WeightStore, device: torch.device) -> GpuExperts:
    """Experts of a layer on the GPU: all of them, a subset, or empty slots. While they are brought
    there, a few at a time take main memory."""
    assert spec.moe is not None
    shape = spec.moe
    stacks = GpuExperts.empty(expert_format(spec), shape.E, shape.H, shape.I, device, shape.spec)
    if spec.is_expert_slots:
        return stacks
    numbered = enumerate(cpu.experts_of(spec, store))
    last: tuple[Expert, GpuExperts] | None = None

    def made(own: tuple[int, Callable[[], Expert]]) -> tuple[int, Expert, GpuExperts]:
        e, stored = own[0], own[1]()
        if last is not None and all(map(is_, stored, last[0])):  # in random models all are
            return e, stored, last[1]
        return e, stored, _packed(spec, e, stored)

    with ThreadPoolExecutor(AT_ONCE) as workers:
        while few := list(islice(numbered, AT_ONCE)):
            for e, stored, one in workers.map(made, few):
                _place(stacks, one, e)
                last = stored, one
    return stacks


def place_expert(
    stacks: GpuExperts, spec: WeightSpec, tiles: cpu.Experts, expert: int, slot: int
) -> None:
    """Brings an expert of the CPU's tiles into a slot of ``stacks``, which ``spec`` says, by way of
    its matrices on the CPU."""
    one = _packed(spec, slot, (tiles.unpack(expert), tiles.biases(expert)))
    _place(stacks, one, slot)


def _packed(spec: WeightSpec, e: int, expert: Expert) -> GpuExperts:
    """One expert in the GPU's layout, on the CPU."""
    assert spec.moe is not None
    fmt, shape = expert_format(spec), spec.moe
    stored, stored_down = get_format(spec.fmt), get_format(spec.down_fmt)
    (gate, up, down), biases = expert
    weights = _as(fmt, stored, gate), _as(fmt, stored, up), _as(fmt, stored_down, down)
    with naming(spec, e):
        check_expert(shape, (fmt, fmt), e, weights, biases)
    given = [] if biases is None else [biases]
    return GpuExperts.pack(fmt, [weights], torch.device("cpu"), shape.spec, given)


def gpu_bytes(spec: WeightSpec) -> int:
    """GPU memory that a weight takes, about: of what is dequantized, two bytes a number."""
    if spec.moe is None:
        return 2 * math.prod(spec.shape)
    if expert_format(spec).name == "bf16":
        return 3 * 2 * math.prod(spec.shape)
    return spec.bytes_per_expert * spec.moe.E


def layout_bytes(program: Program, node: Node, port: str, dtypes: Mapping[str, torch.dtype]) -> int:
    """Bytes of a matrix as a node on a GPU reads it, at most, each of its tensors aligned."""
    spec = program.weight(node, port)
    layout = _layout(spec, node, port, dtypes)
    meta = torch.device("meta")
    if layout is experts:
        return resident_bytes(spec)
    if layout is not matrix:
        return stored_bytes(torch.empty(spec.shape, dtype=torch.bfloat16, device=meta))
    N, K = spec.shape
    fmt = gpu_format(get_format(spec.fmt), K)
    apart = tuple(empty_for_gpu(fmt, 1, part.shape[0], K, meta) for part in spec.parts)
    return max(stored_bytes(empty_for_gpu(fmt, 1, N, K, meta)), stored_bytes(apart))


def experts_within(spec: WeightSpec, memory: torch.Tensor) -> GpuExperts:
    """A layer's experts over the first bytes of ``memory``, uint8 [``resident_bytes`` or more]."""
    experts_: GpuExperts = within(_alike(spec), memory)
    return experts_


def resident_bytes(spec: WeightSpec) -> int:
    """Bytes of a layer's experts as the GPU's kernels read them."""
    return stored_bytes(_alike(spec))


def _alike(spec: WeightSpec) -> GpuExperts:
    """Experts of that layout without memory."""
    assert spec.moe is not None
    E, H, I = spec.shape  # noqa: E741
    return GpuExperts.empty(expert_format(spec), E, H, I, torch.device("meta"), spec.moe.spec)


def _stacked(parts: Sequence[tuple[int, Weight]]) -> Weight:
    """Parts below each other, each from its row on, as one matrix; zeros between them."""
    datas, scales = list[torch.Tensor](), list[torch.Tensor]()
    for i, (at, weight) in enumerate(parts):
        last = i + 1 == len(parts)
        gap = 0 if last else parts[i + 1][0] - at - weight.data.shape[0]
        datas.append(_padded(weight.data, gap))
        if weight.scale is not None:
            whole = weight.scale.shape[0] == weight.data.shape[0]  # else a scale for 128 rows
            scales.append(_padded(weight.scale, gap if whole else 0))
    return Weight(torch.cat(datas), torch.cat(scales) if scales else None)


def _padded(rows: torch.Tensor, count: int) -> torch.Tensor:
    """The rows, and so many zeros below them."""
    if not count:
        return rows
    bits = rows.view(torch.uint8)
    return pad(bits, (0, 0, 0, count)).view(rows.dtype)


def _dequantize(fmt: Format, weight: Weight, out: torch.Tensor) -> None:
    """Writes a matrix [N, K] in bfloat16, some rows at a time."""
    N, K = fmt.logical_shape(weight)
    step = max(FP8_ROWS, DEQUANTIZED // K // FP8_ROWS * FP8_ROWS)
    for first in range(0, N, step):
        last = min(first + step, N)
        scale = weight.scale
        if scale is not None:
            whole = scale.shape[0] == N
            scale = scale[first:last] if whole else scale[first // FP8_ROWS : -(-last // FP8_ROWS)]
        rows = fmt.dequantize(Weight(weight.data[first:last], scale))
        out[first:last] = rows.to(torch.bfloat16)


def _place(stacks: GpuExperts, one: GpuExperts, e: int) -> None:
    """Copies an expert to its place in the stacks."""
    _copy(stacks.gate_up, one.gate_up, 2 * e)
    _copy(stacks.down, one.down, e)
    for stack, part, first in (
        (stacks.gate_up_bias, one.gate_up_bias, 2 * e),
        (stacks.down_bias, one.down_bias, e),
    ):
        if stack is not None and part is not None:
            stack[first : first + len(part)] = part


def expert_format(spec: WeightSpec) -> Format:
    """One format for gate, up and down: the kernels take no two."""
    fmt, (_, H, I) = get_format(spec.fmt), spec.shape  # noqa: E741
    same = spec.fmt == spec.down_fmt
    fits = not supports_format(fmt, H) and not supports_format(fmt, I)
    return fmt if same and fits else get_format("bf16")


def _as(fmt: Format, stored: Format, weight: Weight) -> Weight:
    """A weight in ``fmt``, which is its own or bfloat16."""
    if fmt.name == stored.name:
        return weight
    return Weight(stored.dequantize(weight).to(torch.bfloat16))


def _copy(stack: Matrices, part: Matrices, first: int) -> None:
    stack.data[first : first + len(part)] = part.data
    if stack.scale is not None and part.scale is not None:
        stack.scale[first : first + len(part)] = part.scale
