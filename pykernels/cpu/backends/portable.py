"""Any CPU: whatever tiles, with everything around them in plain Numba and no GEMM."""

from __future__ import annotations

from typing import Any

from ..activations.quantize_portable import make_quantize_row
from ..activations.row_layout import row_format
from ..moe.epilogue_portable import make_epilogue
from .parts import Parts


def parts(fmt: str, activations: str, tiles: Any) -> Parts:
    """The parts around ``tiles``, a routine as ``gemv.portable.make_tiles`` compiles it."""
    how = row_format(fmt, activations)
    quantize_row = make_quantize_row(how) if how else None
    return Parts(
        tiles,
        make_epilogue,
        how,
        quantize_row,
        gemm_row_format=how,
        gemm_quantize_row=quantize_row,
    )
