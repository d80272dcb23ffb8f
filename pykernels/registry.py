"""Which expert kernels exist, what each needs, and which one a request gets.

``auto`` takes the fastest one that this machine supports; a name asked for is that one or an error
that says why not. Nothing is ever replaced silently.

A kernel is registered here and nowhere else: a row of ``BACKENDS``, or ``register`` at run time.
Importing this imports no Numba and no torch, so that ``--help`` stays quick.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .amx_state import request_permission
from .env import env
from .errors import PykernelsError

if TYPE_CHECKING:
    from .target import Target

ACTIVATIONS = ("bf16", "int8")
"""What inputs are rounded to: bfloat16 (exact products), or 8 bits for each token and 128 or 256
inputs (the caller's choice: faster with many tokens, see ``quant.activations``)."""

Reference = str | Callable[..., Any]
"""A function, or where it is: "package.module:name", imported when it is first needed."""


@dataclass(frozen=True)
class Backend:
    """One family of expert kernels; all know every format of ``quant``.

    Attributes:
        features: of the CPU that it is written for, in LLVM's names.
        permission: asks this machine's system for what the features alone do not give; raises
            PykernelsError where it says no.
        build: ``build(fmt, activations)`` compiles ``cpu.backends.parts.Parts``. Or the tiles alone
            (``make_tiles`` of ``cpu.gemv.portable``): everything around them is then plain Numba.
        gemm_from: ``gemm_from(fmt, activations, target)``: tokens of an expert from which its GEMM
            is taken to win without a calibration, None for no GEMM; None for a backend without one.
        batch_invariant_to: ``batch_invariant_to(fmt, activations)``: tokens of a pass up to which
            each one's products by its tiles are the bits that it has alone, None for any number;
            None for a backend whose tiles always give these.
        instruction: ``instruction(activations, target)``: which of ``cpu.roofline.FLOPS`` it
            multiplies many tokens with; None for none of them.
        formats: that it has tiles of; none: those of ``tables``.
        tables: where dictionaries are ("package.module:name") that have its tiles by format, each
            some of the formats; none: every format.
    """

    name: str
    doc: str
    features: tuple[str, ...]
    permission: Callable[[], None] | None = None
    build: Reference = ""
    gemm_from: Reference | None = None
    batch_invariant_to: Reference | None = None
    instruction: Reference | None = None
    formats: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()

    def supports(self, fmt: str, target: Target, activations: str = "bf16") -> str | None:
        """None if this backend runs ``fmt`` on ``target``, else the reason why not."""
        if refusal := _refusal(fmt, activations) or self._cpu_refusal(target):
            return refusal
        if self.formats and fmt not in self.formats:
            return f"it has tiles of {', '.join(self.formats)} only"
        if self.tables and not any(fmt in pkgutil.resolve_name(name) for name in self.tables):
            return f"it has no tiles of {fmt}"
        return None

    def _cpu_refusal(self, target: Target) -> str | None:
        from .target import detect

        if missing := target.lacks(self.features):
            return f"this CPU lacks {', '.join(missing)}"
        if self.permission and target == detect():  # another machine's system cannot be asked
            try:
                self.permission()
            except PykernelsError as refusal:
                return refusal.cause
        return None


def _refusal(fmt: str, activations: str) -> str | None:
    """Why no backend at all multiplies ``fmt`` with these activations; None if they do."""
    from .quant import get_format

    if activations not in ACTIVATIONS:
        return f"there are no {activations!r} activations (only {', '.join(ACTIVATIONS)})"
    if activations == "int8" and get_format(fmt).int8_kind is None:
        return f"{fmt} weights are not multiplied with int8 activations"
    return None


_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq")

_AMX = (*_AVX512, "avx512vbmi", "avx512bf16", "amx-tile", "amx-bf16", "amx-int8")

_WEIGHTS = "pykernels.cpu.weights"
_VECTORS = (f"{_WEIGHTS}.dequant:_READERS",)
_VECTORS_AVX2 = (f"{_WEIGHTS}.codes_avx2:_ROWS", "pykernels.cpu.gemv.avx2_floats:_PRODUCTS")

_PORTABLE = "pykernels.cpu.gemv.portable:make_tiles"

BACKENDS = [
    Backend(
        "amx",
        "AMX tiles for many tokens, AVX-512 for one or two",
        _AMX,
        request_permission,
        build="pykernels.cpu.backends.amx:make",
        gemm_from="pykernels.cpu.backends.amx:gemm_from",
        batch_invariant_to="pykernels.cpu.backends.amx:batch_invariant_to",
        instruction="pykernels.cpu.backends.amx:instruction",
        tables=_VECTORS,
    ),
    Backend(
        "avx512",
        "AVX-512; its BF16, VNNI and VBMI instructions where the CPU has them",
        _AVX512,
        build="pykernels.cpu.backends.avx512:make",
        gemm_from="pykernels.cpu.backends.avx512:gemm_from",
        instruction="pykernels.cpu.backends.avx512:instruction",
        tables=_VECTORS,
    ),
    Backend(
        "avx2",
        "AVX2 and FMA; AVX-VNNI where the CPU has it",
        ("avx2", "fma", "f16c"),
        build="pykernels.cpu.backends.avx2:make",
        gemm_from="pykernels.cpu.backends.avx2:gemm_from",
        instruction="pykernels.cpu.backends.avx2:instruction",
        tables=_VECTORS_AVX2,
    ),
    Backend("generic", "plain Numba, any CPU; float32 arithmetic", (), build=_PORTABLE),
]
"""Fastest first; ``auto`` takes the first one that can run."""


def register(backend: Backend) -> Backend:
    """Adds a kernel for the rest of this process, as from a notebook, and returns it.

    It comes behind all others, so it is what its own name asks for and never ``auto``. One of the
    same name takes the place of the one before.
    """
    for index, known in enumerate(BACKENDS):
        if known.name == backend.name:
            BACKENDS[index] = backend
            return backend
    BACKENDS.append(backend)
    return backend


def kernels() -> tuple[Backend, ...]:
    """Every backend, fastest first."""
    return tuple(BACKENDS)


def names() -> tuple[str, ...]:
    """What ``--kernel`` and ``PYKERNELS_KERNEL`` may be: "auto" and every backend's name."""
    return ("auto", *(backend.name for backend in BACKENDS))


def get_backend(name: str) -> Backend:
    """The backend of this name; raises PykernelsError with the known names."""
    for backend in BACKENDS:
        if backend.name == name:
            return backend
    known = ", ".join(names()[1:])
    raise PykernelsError(f"there is no expert kernel {name!r}", f"Use auto or one of {known}")


def load(reference: Reference) -> Callable[..., Any]:
    """The function itself."""
    return pkgutil.resolve_name(reference) if isinstance(reference, str) else reference


def requested(kernel: str | None = None) -> str:
    """The kernel asked for: ``kernel``, or for None and "auto" what ``PYKERNELS_KERNEL`` says.

    Raises:
        PykernelsError: there is none of that name; it says so of the flag if that named it.
    """
    if kernel not in (None, "auto"):
        return get_backend(str(kernel)).name
    if env.kernel not in names():
        raise PykernelsError(
            f"PYKERNELS_KERNEL={env.kernel!r} cannot be used: there is no such expert kernel",
            f"Set it to one of {', '.join(names())}",
        )
    return env.kernel


def resolve(kernel: str, fmt: str, target: Target, activations: str = "bf16") -> Backend:
    """The backend for a request.

    Args:
        kernel: a backend's name, or "auto" (which ``PYKERNELS_KERNEL`` can narrow).
        fmt: a weight format's name.
        activations: one of ``ACTIVATIONS``.

    Raises:
        PykernelsError: no such backend or activations, or the one asked for cannot run here.
    """
    if activations not in ACTIVATIONS:
        raise PykernelsError(
            f"there are no {activations!r} activations", f"Use {' or '.join(ACTIVATIONS)}"
        )
    wanted = requested(kernel)
    if wanted == "auto":
        return _fastest(fmt, target, activations)
    backend = get_backend(wanted)
    if reason := backend.supports(fmt, target, activations):
        raise PykernelsError(
            f"kernel {wanted} cannot run {fmt} here: {reason}", _hint(fmt, activations)
        )
    return backend


_ACTIVATIONS_HINT = "Use bf16 activations, or int8 ones with an integer format"


def _hint(fmt: str, activations: str) -> str:
    """What helps against a backend's refusal: another kernel, or other activations."""
    if _refusal(fmt, activations):
        return _ACTIVATIONS_HINT
    if env.kernel == "auto":
        return "Use kernel auto"
    return "Unset PYKERNELS_KERNEL, which auto stands for here, or set it to auto"


def _fastest(fmt: str, target: Target, activations: str) -> Backend:
    """The fastest backend that can; the generic one lacks nothing of any CPU."""
    if reason := _refusal(fmt, activations):
        raise PykernelsError(f"no kernel can run this: {reason}", _ACTIVATIONS_HINT)
    return next(b for b in BACKENDS if b.supports(fmt, target, activations) is None)
