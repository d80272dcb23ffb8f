"""Random matrices in the GPU's layouts, made on the GPU: quantizing 256 experts would take minutes.

Codes are uniform; scales are such that results stay of the size of a model's.
"""

from __future__ import annotations

import torch

from pykernels.errors import PykernelsError
from pykernels.gpu.gemm.weights import Matrices, empty_for_gpu
from pykernels.gpu.moe.fused_moe import GpuExperts
from pykernels.quant import get_format


def activations_for(format: str, rows: float, asked: str) -> str:
    """What was ``asked``; of "auto" fp8 where products bound an fp8 matrix, and bf16 elsewhere.

    Args:
        rows: of the matrix's inputs.

    Raises:
        PykernelsError: there are no such activations, or not with these weights.
    """
    if asked not in ("auto", "bf16", "fp8"):
        raise PykernelsError(f"a GPU has no {asked!r} activations", "Use bf16 or fp8")
    if asked == "fp8" and format != "fp8":
        raise PykernelsError(
            f"{format} weights are not multiplied with fp8 activations", "Use bf16, or --format fp8"
        )
    if asked != "auto":
        return asked
    return "fp8" if format == "fp8" and rows > 16 else "bf16"


def random_stack(name: str, count: int, N: int, K: int, device: torch.device) -> Matrices:
    """``count`` matrices [N, K].

    Raises:
        PykernelsError: a format or a K without a GPU layout.
    """
    stack = empty_for_gpu(get_format(name), count, N, K, device)
    kind, data, scale, size = stack.kind, stack.data, stack.scale, K**-0.5
    if kind in ("bf16", "fp8"):
        for matrix in data:
            values = torch.randn(N, K, device=device)
            matrix.copy_(values * size if kind == "bf16" else (values * 100).clamp(-448, 448))
    elif kind == "int8":
        data.random_(-127, 128)
    else:
        data.random_(0, 256)
    if kind == "fp8" and scale is not None:
        scale.fill_(size / 100)
    elif scale is not None:
        scale.uniform_(0, size / (64 if kind == "int8" else 4))
    halves = torch.full((count, N, K // 256, 2), size / 500, dtype=torch.float16, device=device)
    if kind == "q4_k":
        data.unflatten(2, (-1, 144))[..., :4] = halves.view(torch.uint8)
    elif kind == "q6_k":
        data[..., K // 256 * 208 : K // 256 * 212] = halves.view(torch.uint8).flatten(2)
    return stack


def random_experts(name: str, E: int, H: int, inter: int, device: torch.device) -> GpuExperts:
    """A layer of E experts."""
    stacks = (random_stack(name, 2 * E, inter, H, device), random_stack(name, E, H, inter, device))
    return GpuExperts(get_format(name), *stacks)
