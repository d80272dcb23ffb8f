"""Which expert kernels exist, what each needs, and which one a request gets.

``auto`` takes the fastest one that this machine supports; a name asked for is that one or an error
that says why not. Nothing is ever replaced silently.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .amx_state import request_permission
from .env import env
from .errors import PykernelsError
from .quant import get_format
from .target import Target, detect

ACTIVATIONS = ("bf16", "int8")
"""What inputs are rounded to: bfloat16 (exact products), or 8 bits for each token and 128 or 256
inputs (the caller's choice: faster with many tokens, see ``quant.activations``)."""


@dataclass(frozen=True)
class Backend:
    """One family of expert kernels; all know every format of ``quant``.

    Attributes:
        features: of the CPU that it is written for.
        permission: asks this machine's system for what the features alone do not give; raises
            PykernelsError where it says no.
    """

    name: str
    doc: str
    features: tuple[str, ...]
    permission: Callable[[], None] | None = None

    def supports(self, fmt: str, target: Target, activations: str = "bf16") -> str | None:
        """None if this backend runs ``fmt`` on ``target``, else the reason why not."""
        if activations not in ACTIVATIONS:
            return f"there are no {activations!r} activations (only {', '.join(ACTIVATIONS)})"
        if activations == "int8" and get_format(fmt).int8_kind is None:
            return f"{fmt} weights are not multiplied with int8 activations"
        if missing := target.lacks(self.features):
            return f"this CPU lacks {', '.join(missing)}"
        if self.permission and target == detect():  # of another machine, nobody here can say
            try:
                self.permission()
            except PykernelsError as refusal:
                return refusal.cause
        return None


_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq")

_AMX = (*_AVX512, "avx512vbmi", "avx512bf16", "amx-tile", "amx-bf16", "amx-int8")

BACKENDS = (
    Backend("amx", "AMX tiles for many tokens, AVX-512 for one or two", _AMX, request_permission),
    Backend(
        "avx512",
        "AVX-512; its BF16, VNNI and VBMI instructions where the CPU has them",
        _AVX512,
    ),
    Backend("generic", "plain Numba, any CPU; float32 arithmetic", ()),
)
"""Fastest first."""


def kernels() -> tuple[Backend, ...]:
    """Every backend, fastest first."""
    return BACKENDS


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
    wanted = env.kernel if kernel == "auto" else kernel
    if wanted == "auto":
        return _first_able(fmt, target, activations)
    backend = next((b for b in BACKENDS if b.name == wanted), None)
    if backend is None:
        names = ", ".join(b.name for b in BACKENDS)
        raise PykernelsError(f"there is no expert kernel {wanted!r}", f"Use auto or one of {names}")
    if reason := backend.supports(fmt, target, activations):
        raise PykernelsError(
            f"kernel {wanted} cannot run {fmt} here: {reason}", _hint(fmt, target, activations)
        )
    return backend


_ACTIVATIONS_HINT = "Use bf16 activations, or int8 ones with an integer format"


def _hint(fmt: str, target: Target, activations: str) -> str:
    """What helps against a backend's refusal: another kernel, or other activations.

    The generic backend, the last one, lacks nothing of the CPU: its reason is the caller's.
    """
    if BACKENDS[-1].supports(fmt, target, activations):
        return _ACTIVATIONS_HINT
    if env.kernel == "auto":
        return "Use kernel auto"
    return "Unset PYKERNELS_KERNEL, which auto stands for here, or set it to auto"


def _first_able(fmt: str, target: Target, activations: str) -> Backend:
    """The fastest backend that can; where the generic one cannot, none can."""
    reasons = [backend.supports(fmt, target, activations) for backend in BACKENDS]
    if reasons[-1]:
        raise PykernelsError(
            f"no kernel can run this: {reasons[-1]}",
            _ACTIVATIONS_HINT,
        )
    return BACKENDS[reasons.index(None)]
