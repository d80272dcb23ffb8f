"""The kernels of a (backend, format, activations), and where a job finds them.

The stages are compiled once for an epilogue; what depends on the format, the tiles of few tokens,
the GEMM of many and the quantization of input rows, they call by address.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ...registry import Backend, get_backend, load
from ...target import Target, detect
from ..activations.row_layout import RowFormat
from ..backends import portable
from ..backends.parts import Parts
from ..weights.lookup import TABLES
from .stages import Stages, make_stages

NEVER = 1 << 62
"""``gemm_from`` of a kernel without a GEMM."""


@dataclass(frozen=True)
class MoEKernel:
    """What computes the experts of a layer.

    Attributes:
        stages: the tasks (``stages`` has their indices).
        tiles, gemm: addresses of the format's routines; 0 for none.
        row_formats: what the rows of inputs hold beside bfloat16: all, and such as only the GEMM
            reads.
        quantize_row, gemm_quantize_row: addresses of what makes it; 0 for nothing to make.
        scratch_bytes: of each worker.
        interleave_a: whether A tiles hold the inputs 0, 2, 1, 3 of each four.
    """

    fmt: str
    backend: str
    activations: str
    stages: Stages
    tiles: int
    gemm: int
    row_formats: tuple[RowFormat | None, RowFormat | None]
    quantize_row: int
    gemm_quantize_row: int
    scratch_bytes: int
    interleave_a: bool

    @property
    def row_k(self) -> int:
        """Inputs that are quantized together: a task must own them all."""
        return max(how.k if how else 32 for how in self.row_formats)

    @property
    def has_gemm(self) -> bool:
        return self.gemm != 0

    @property
    def int8(self) -> bool:
        """Whether activations are int8."""
        return self.activations == "int8"


def tables_address() -> int:
    """Address of the lookup tables that the tiles read."""
    return TABLES.data_ptr()


def make_kernel(backend: str, fmt: str, activations: str = "bf16") -> MoEKernel:
    """Compiles (or loads from the cache) the kernels for a weight format.

    The caller has checked ``registry`` first: compiling for a CPU that lacks the instructions
    aborts.

    Args:
        activations: "bf16" (exact), or "int8".
    """
    return _make(get_backend(backend), fmt, activations, detect())


@functools.cache  # a machine whose features are hidden is another one
def _make(backend: Backend, fmt: str, activations: str, target: Target) -> MoEKernel:
    made = load(backend.build)(fmt, activations)
    parts = made if isinstance(made, Parts) else portable.parts(fmt, activations, made)
    return assemble(backend.name, fmt, activations, parts)


def assemble(backend: str, fmt: str, activations: str, parts: Parts) -> MoEKernel:
    """The kernel of a backend's parts."""
    return MoEKernel(
        fmt=fmt,
        backend=backend,
        activations=activations,
        stages=make_stages(parts.epilogue),
        tiles=parts.tiles.address,
        gemm=parts.gemm.address if parts.gemm else 0,
        row_formats=(parts.row_format, parts.gemm_row_format),
        quantize_row=parts.quantize_row.address if parts.quantize_row else 0,
        gemm_quantize_row=parts.gemm_quantize_row.address if parts.gemm_quantize_row else 0,
        scratch_bytes=parts.scratch_bytes,
        interleave_a=parts.interleave_a,
    )
