"""The kernels of a (backend, format, activations), and where a job finds them.

``stages`` are compiled once for a backend; what depends on the format, the tiles of few tokens, the
GEMM of many and the annotation of input rows, they call by address.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from ..target import Target, detect
from . import gemm_amx, tile_avx512, tile_generic
from .activations import annotation
from .amx_state import request_permission
from .annotate import make_annotate
from .decode import TABLES
from .instructions import Instructions, instructions
from .intrin import amx
from .rows import Annotation
from .stages import Stages, make_stages

PORTABLE = {"generic": tile_generic}
"""Backends that are plain Numba: their tiles."""

NEVER = 1 << 62
"""``gemm_from`` of a kernel without a GEMM."""


@dataclass(frozen=True)
class MoEKernel:
    """What computes the experts of a layer.

    Attributes:
        stages: the tasks (``stages`` has their indices).
        tiles, gemm: addresses of the format's routines; 0 for none.
        annotation: what the rows of inputs hold beside bfloat16.
        annotate: address of what makes it; 0 for nothing to make.
        annotate_gemm: the same of rows that only the GEMM reads.
        sweep_tokens: that one call of the tiles takes where many share a slab of weights.
        int8: whether activations are int8.
        scratch_bytes: of each worker.
    """

    fmt: str
    backend: str
    activations: str
    stages: Stages
    tiles: int
    gemm: int
    annotation: Annotation | None
    annotate: int
    annotate_gemm: int
    sweep_tokens: int
    scratch_bytes: int

    @property
    def annotate_k(self) -> int:
        """Inputs that are annotated together: a task must own them all."""
        return self.annotation.k if self.annotation else 32

    @property
    def has_gemm(self) -> bool:
        return self.gemm != 0

    @property
    def int8(self) -> bool:
        return self.activations == "int8"


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
        amx_unit: ``intrin.amx``, ``intrin.amx_model`` where there is none, or None for no GEMM.
    """
    # Digits are for the few tokens of an expert that takes no GEMM: with many, two dot products
    # in bfloat16 are fewer than four.
    digits = amx_unit is not None and ops is not None and ops.vnni
    if ops is None:
        tiles = PORTABLE[backend].make_tiles(fmt, activations)
    else:
        tiles = tile_avx512.make_tiles(fmt, ops, activations, digits)
    how = annotation(fmt, activations, digits)
    gemm = gemm_amx.make_gemm(fmt, ops, activations, amx_unit) if amx_unit and ops else None
    return MoEKernel(
        fmt=fmt,
        backend=backend,
        activations=activations,
        stages=make_stages(ops),
        tiles=tiles.address,
        gemm=gemm.address if gemm else 0,
        annotation=how,
        annotate=_annotate_address(how, ops),
        annotate_gemm=_annotate_address(annotation(fmt, activations), ops),
        sweep_tokens=tile_avx512.sweep_tokens(fmt, activations),
        scratch_bytes=gemm_amx.SCRATCH_BYTES if gemm else 0,
    )
