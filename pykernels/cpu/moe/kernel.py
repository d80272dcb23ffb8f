"""The kernels of a (backend, format, activations), and where a job finds them.

``stages`` are compiled once for a backend; what depends on the format, the tiles of few tokens, the
GEMM of many and the annotation of input rows, they call by address.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from ...amx_state import request_permission
from ...target import Target, detect
from ..activations.quantize import annotation, make_annotate
from ..activations.row_layout import Annotation
from ..gemm import amx as gemm_amx
from ..gemm import avx512, fma
from ..gemv import amx as gemv_amx
from ..gemv import avx512 as gemv_avx512
from ..gemv import portable
from ..intrin import amx
from ..isa import Instructions, instructions
from ..weights.layout import PACKINGS
from ..weights.lookup import TABLES
from .stages import Stages, make_stages

PORTABLE = {"generic": portable}
"""Backends that are plain Numba: their tiles."""

NEVER = 1 << 62
"""``gemm_from`` of a kernel without a GEMM."""


@dataclass(frozen=True)
class MoEKernel:
    """What computes the experts of a layer.

    Attributes:
        stages: the tasks (``stages`` has their indices).
        tiles, gemm: addresses of the format's routines; 0 for none.
        annotations: what the rows of inputs hold beside bfloat16: all, and such as only the GEMM
            reads.
        annotate, annotate_gemm: addresses of what makes it; 0 for nothing to make.
        int8: whether activations are int8.
        scratch_bytes: of each worker.
    """

    fmt: str
    backend: str
    activations: str
    stages: Stages
    tiles: int
    gemm: int
    annotations: tuple[Annotation | None, Annotation | None]
    annotate: int
    annotate_gemm: int
    scratch_bytes: int

    @property
    def annotate_k(self) -> int:
        """Inputs that are annotated together: a task must own them all."""
        return max(how.k if how else 32 for how in self.annotations)

    @property
    def has_gemm(self) -> bool:
        return self.gemm != 0

    @property
    def int8(self) -> bool:
        return self.activations == "int8"

    @property
    def tile_fours(self) -> bool:
        """Whether A tiles hold the inputs 0, 2, 1, 3 of each four (``gemm``)."""
        return PACKINGS[self.fmt].fours and not self.int8


def tables_address() -> int:
    """Address of the decoding tables that the tiles read."""
    return TABLES.data_ptr()


def make_kernel(
    backend: str, fmt: str, activations: str = "bf16", target: Target | None = None
) -> MoEKernel:
    """Compiles (or loads from the cache) the kernels for a weight format.

    The caller has asked ``registry`` first: compiling for a CPU that lacks the instructions aborts.

    Args:
        activations: "bf16" (exact), or "int8".
        target: None for this machine.
    """
    ops = None if backend in PORTABLE else instructions(target or detect())
    if backend == "amx":
        request_permission()
        return build_kernel(backend, fmt, activations, ops, amx)
    return build_kernel(backend, fmt, activations, ops)


def _annotate_address(how: Annotation | None, ops: Instructions | None) -> int:
    return make_annotate(how, ops is None).address if how else 0


@functools.cache
def build_kernel(
    backend: str,
    fmt: str,
    activations: str,
    ops: Instructions | None,
    amx_unit: Any = None,
) -> MoEKernel:
    """The kernels of a backend's parts.

    Args:
        ops: the AVX-512 operations, or None for the generic tiles.
        amx_unit: ``intrin.amx``, ``intrin.amx_model`` where there is none, or None for the AVX-512
            GEMM.
    """
    digits = ops is not None and (ops.digits or amx_unit is not None)
    exact = "decoded" if ops is None else "digits" if digits else "lifted"
    if ops is None:
        tiles = PORTABLE[backend].make_tiles(fmt, activations)
    elif amx_unit is not None and activations == "bf16":
        tiles = gemv_amx.make_tiles(fmt, ops, amx_unit)
    else:
        tiles = gemv_avx512.make_tiles(fmt, ops, activations, digits)
    # Multiply-adds take minima into the weights: they need no sums of the inputs.
    by_fma = ops is not None and ops.fma and amx_unit is None and activations == "bf16"
    hows = annotation(fmt, activations, exact), None if by_fma else annotation(fmt, activations)
    gemm, scratch_bytes = None, 0
    if ops is not None and amx_unit is not None:
        gemm = gemm_amx.make_gemm(fmt, ops, activations, amx_unit)
        scratch_bytes = gemm_amx.SCRATCH_BYTES
    elif ops is not None and by_fma:
        gemm = fma.make_gemm(fmt, ops)
        scratch_bytes = fma.SCRATCH_BYTES
    elif ops is not None:
        gemm = avx512.make_gemm(fmt, ops, activations)
        scratch_bytes = avx512.SCRATCH_BYTES
    return MoEKernel(
        fmt=fmt,
        backend=backend,
        activations=activations,
        stages=make_stages(ops),
        tiles=tiles.address,
        gemm=gemm.address if gemm else 0,
        annotations=hows,
        annotate=_annotate_address(hows[0], ops),
        annotate_gemm=_annotate_address(hows[1], ops),
        scratch_bytes=scratch_bytes,
    )
