"""The kernels of a (backend, format, activations), and where a call finds them.

The stages of experts are compiled once for an epilogue; what depends on the format, the tiles of
few tokens, the GEMM of many and the quantization of input rows, they call by address: so gate and
up may be in one format and down in another.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from ...quant.split import Experts
from ...registry import Backend, get_backend, load, resolve
from ...shapes import SWIGLU, ExpertSpec
from ...target import Target, detect
from ..activations.row_layout import RowFormat
from ..backends import portable
from ..backends.parts import Parts
from ..weights.lookup import TABLES
from .epilogue import Epilogue
from .stages import Stages, make_stages

NO_GEMM = 1 << 62
"""``gemm_from`` of a kernel without a GEMM."""


@dataclass(frozen=True)
class Routines:
    """What multiplies by the matrices of one format: linears, and the stages of experts.

    Attributes:
        epilogue: of stages around them, for what an expert does.
        tiles, gemm: addresses of the format's routines; 0 for none.
        row_formats: layout of the quantized inputs for the GEMV, and for the GEMM.
        quantize_row, gemm_quantize_row: addresses of what makes it; 0 for nothing to make.
        scratch_bytes: of each worker.
        interleave_a: whether A tiles hold the inputs 0, 2, 1, 3 of each four.
    """

    fmt: str
    backend: str
    activations: str
    epilogue: Callable[[ExpertSpec], Epilogue]
    tiles: int
    gemm: int
    row_formats: tuple[RowFormat | None, RowFormat | None]
    quantize_row: int
    gemm_quantize_row: int
    scratch_bytes: int
    interleave_a: bool

    @property
    def row_k(self) -> int:
        """Inputs that are quantized together."""
        return max(how.k if how else 32 for how in self.row_formats)

    @property
    def has_gemm(self) -> bool:
        return self.gemm != 0

    @property
    def int8(self) -> bool:
        """Whether activations are int8."""
        return self.activations == "int8"


@dataclass(frozen=True)
class MoEKernel:
    """What computes the experts of a layer.

    Attributes:
        gate_up, down: the routines of each stage's format.
        spec: what an expert does besides its products.
        stages: the tasks (``stages`` has their indices).
    """

    gate_up: Routines
    down: Routines
    spec: ExpertSpec
    stages: Stages

    @property
    def has_gemm(self) -> bool:
        return self.gate_up.has_gemm and self.down.has_gemm

    @property
    def scratch_bytes(self) -> int:
        """Scratch of each worker."""
        return max(self.gate_up.scratch_bytes, self.down.scratch_bytes)


def tables_address() -> int:
    """Address of the lookup tables that the tiles read."""
    return TABLES.data_ptr()


def join(gate_up: Routines, down: Routines | None = None, spec: ExpertSpec = SWIGLU) -> MoEKernel:
    """The kernel of experts with these routines; ``down``: None for those of ``gate_up``."""
    down = down or gate_up
    assert gate_up.activations == down.activations  # A tiles of both have as many steps
    return MoEKernel(gate_up, down, spec, make_stages(gate_up.epilogue(spec)))


def make_kernel(
    backend: str,
    fmt: str,
    activations: str = "bf16",
    down_fmt: str | None = None,
    spec: ExpertSpec = SWIGLU,
) -> MoEKernel:
    """The kernel of experts on one backend; the rest as in ``make_routines``.

    Args:
        fmt: weight format of gate and up; ``down_fmt``: of down, None for the same.
    """
    gate_up = make_routines(backend, fmt, activations)
    return join(gate_up, make_routines(backend, down_fmt or fmt, activations), spec)


def kernel_of(experts: Experts, kernel: str, activations: str) -> MoEKernel:
    """The kernel of packed experts, for a request as ``registry.resolve`` takes it.

    Raises:
        PykernelsError: there is no such kernel, or it cannot run here.
    """
    gate_up, down = (
        make_routines(resolve(kernel, fmt.name, detect(), activations).name, fmt.name, activations)
        for fmt in (experts.fmt, experts.down_fmt)
    )
    return join(gate_up, down, experts.shape.spec)


def make_routines(backend: str, fmt: str, activations: str = "bf16") -> Routines:
    """Compiles (or loads from the cache) the routines of a weight format.

    The caller has checked ``registry`` first: compiling for a CPU that lacks the instructions
    aborts.

    Args:
        activations: "bf16" (exact), or "int8".
    """
    return _make(get_backend(backend), fmt, activations, detect())


@functools.cache  # a machine whose features are hidden is another one
def _make(backend: Backend, fmt: str, activations: str, target: Target) -> Routines:
    made = load(backend.build)(fmt, activations)
    parts = made if isinstance(made, Parts) else portable.parts(fmt, activations, made)
    return assemble(backend.name, fmt, activations, parts)


def assemble(backend: str, fmt: str, activations: str, parts: Parts) -> Routines:
    """The routines of a backend's parts."""
    return Routines(
        fmt=fmt,
        backend=backend,
        activations=activations,
        epilogue=parts.epilogue,
        tiles=parts.tiles.address,
        gemm=parts.gemm.address if parts.gemm else 0,
        row_formats=(parts.row_format, parts.gemm_row_format),
        quantize_row=parts.quantize_row.address if parts.quantize_row else 0,
        gemm_quantize_row=parts.gemm_quantize_row.address if parts.gemm_quantize_row else 0,
        scratch_bytes=parts.scratch_bytes,
        interleave_a=parts.interleave_a,
    )
