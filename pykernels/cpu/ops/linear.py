"""A linear on the calling thread."""

from __future__ import annotations

import torch

from ...errors import PykernelsError
from ...quant import PackedMatrix
from ...quant.layout import K_BLOCK
from ...registry import resolve
from ...target import detect
from ..activations.row_layout import row_bytes
from ..gemm.common import MAX_BLOCKS
from ..linear import LINEAR, make_linear
from ..moe.kernel import NO_GEMM, make_routines, tables_address
from ..moe.plan import gemm_from_here
from .checks import floats, optional_floats
from .rows import make_rows, tile_steps
from .serial import Record, counted, run_tasks, scratch


def linear(
    x: torch.Tensor,
    weight: PackedMatrix,
    bias: torch.Tensor | None = None,
    *,
    activations: str = "bf16",
    kernel: str = "auto",
) -> torch.Tensor:
    """``x @ weight.T + bias`` on the calling thread alone.

    Args:
        x: float32, bfloat16 or float16 [M, K]; the kernels take it as bfloat16.
        weight: [N, K] in any weight format: ``PackedMatrix.of(fmt, [fmt.quantize(matrix)])``.
        bias: floats [N].
        activations: "bf16" for exact products, "int8" for ones of dynamically quantized inputs.
        kernel: a backend's name, or "auto".

    Returns:
        float32 [M, N].

    Raises:
        PykernelsError: inputs that do not fit, or a kernel that cannot run here.
    """
    check_matrix("weight", weight)
    x = floats("x", x, "M", weight.K)
    bias = optional_floats("bias", bias, weight.N)
    fmt = weight.fmt.name
    backend = resolve(kernel, fmt, detect(), activations)
    routines = make_routines(backend.name, fmt, activations)
    gemm_from = gemm_from_here(backend.name, fmt, activations) if routines.has_gemm else None
    M, padded = x.shape[0], weight.fmt.padded_k(weight.K)
    out = torch.empty(M, weight.N, dtype=torch.float32, device="cpu")
    rows, tiles = make_rows(x, padded, routines, M >= (gemm_from or NO_GEMM))
    blocks, block_bytes = weight.blocks.shape
    record = Record(
        LINEAR,
        count_at=counted(M),
        rows=rows,
        row_stride=row_bytes(padded, routines.row_formats[0]),
        k_blocks=padded // K_BLOCK,
        w=weight.blocks,
        block_bytes=block_bytes,
        scale=weight.scales,
        scale_bytes=weight.scales.shape[1],
        blocks=blocks,
        N=weight.N,
        bias=bias,
        out=out,
        out_stride=4 * weight.N,
        chunk=blocks,
        gemm_chunk=min(MAX_BLOCKS, blocks),
        gemm_from=gemm_from or NO_GEMM,
        tiles=routines.tiles,
        gemm=routines.gemm,
        tables=tables_address(),
        a_tiles=tiles,
        tile_steps=tile_steps(routines),
        scratch=scratch(routines.scratch_bytes),
    )
    run_tasks(make_linear(), record.address)
    return out


def check_matrix(name: str, matrix: object) -> None:
    """Raises PykernelsError unless it is packed weights in main memory."""
    if not isinstance(matrix, PackedMatrix):
        raise PykernelsError(
            f"{name} is a {type(matrix).__name__}, no PackedMatrix",
            "Pack it: PackedMatrix.of(fmt, [fmt.quantize(matrix)])",
        )
