"""What a backend compiles for a weight format: the parts that ``moe.kernel`` assembles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...shapes import ExpertSpec
from ..activations.row_layout import RowFormat
from ..moe.epilogue import Epilogue


@dataclass(frozen=True)
class Parts:
    """The kernels of a (backend, format, activations).

    Attributes:
        tiles: the routine of ``gemv.common``, for experts of few tokens.
        epilogue: of the stages, for what an expert does.
        row_format: what the rows of inputs hold beside bfloat16; None for nothing.
        quantize_row: the routine that makes it (``activations.quantize``); None where it is None.
        gemm: the routine of ``gemm.common``, for experts of many tokens; None for tiles always.
        gemm_row_format, gemm_quantize_row: the same of rows that only the GEMM reads.
        scratch_bytes: that the GEMM needs of each worker.
        interleave_a: whether the GEMM's A tiles hold the inputs 0, 2, 1, 3 of each four.
    """

    tiles: Any
    epilogue: Callable[[ExpertSpec], Epilogue]
    row_format: RowFormat | None = None
    quantize_row: Any = None
    gemm: Any = None
    gemm_row_format: RowFormat | None = None
    gemm_quantize_row: Any = None
    scratch_bytes: int = 0
    interleave_a: bool = False
