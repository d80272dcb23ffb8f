"""Which expert kernels exist, what each needs, and which one a request gets.

``auto`` takes the fastest one that this machine supports; a name asked for is that one or an error
that says why not. Nothing is ever replaced silently.
"""

from __future__ import annotations

from dataclasses import dataclass

from .env import env
from .errors import PykernelsError
from .target import Target

FORMATS = ("bf16", "fp8", "int8", "int4", "int4-g128", "mxfp4")
"""Weight formats that have kernels; ``quant.FORMATS`` are those that can be read and packed."""


@dataclass(frozen=True)
class Backend:
    """One family of expert kernels: the CPU features and weight formats that it is written for."""

    name: str
    doc: str
    features: tuple[str, ...]
    formats: tuple[str, ...]

    def supports(self, fmt: str, target: Target) -> str | None:
        """None if this backend runs ``fmt`` on ``target``, else the reason why not."""
        if fmt not in self.formats:
            return f"it has no {fmt} kernel (only {', '.join(self.formats)})"
        if missing := target.lacks(self.features):
            return f"this CPU lacks {', '.join(missing)}"
        return None


_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq")

_AMX = (*_AVX512, "avx512vbmi", "avx512bf16", "amx-tile", "amx-bf16", "amx-int8")

BACKENDS = (
    Backend("amx", "AMX tiles for many tokens, AVX-512 for few", _AMX, tuple(FORMATS)),
    Backend(
        "avx512",
        "AVX-512; its BF16, VNNI and VBMI instructions where the CPU has them",
        _AVX512,
        tuple(FORMATS),
    ),
    Backend("generic", "plain Numba, any CPU; float32 arithmetic", (), tuple(FORMATS)),
)
"""Fastest first."""


def kernels() -> tuple[Backend, ...]:
    """Every backend, fastest first."""
    return BACKENDS


def resolve(kernel: str, fmt: str, target: Target) -> Backend:
    """The backend for a request.

    Args:
        kernel: a backend's name, or "auto" (which ``PYKERNELS_KERNEL`` can narrow).
        fmt: a weight format's name.

    Raises:
        PykernelsError: no such backend, or the one asked for cannot run here.
    """
    wanted = env.kernel if kernel == "auto" else kernel
    if wanted == "auto":
        if able := [b for b in BACKENDS if b.supports(fmt, target) is None]:
            return able[0]
        raise PykernelsError(
            f"no expert kernel runs {fmt} here", f"Convert to one of {', '.join(FORMATS)}"
        )
    backend = next((b for b in BACKENDS if b.name == wanted), None)
    if backend is None:
        names = ", ".join(b.name for b in BACKENDS)
        raise PykernelsError(f"there is no expert kernel {wanted!r}", f"Use auto or one of {names}")
    if reason := backend.supports(fmt, target):
        raise PykernelsError(f"kernel {wanted} cannot run {fmt} here: {reason}", "Use kernel auto")
    return backend
