"""Every (backend, format, activations) as test parameters, and what stands in for other CPUs."""

from __future__ import annotations

import itertools
import os

import pytest

from pykernels.cpu.isa import Instructions, instructions
from pykernels.env import env
from pykernels.quant import FORMATS
from pykernels.registry import kernels
from pykernels.target import detect

NEWER = frozenset({"avx512bf16", "avx512vbmi", "avx512vnni", "gfni"})
"""Extensions of AVX-512 that the base set spells out in other instructions."""


def lacks(*features: str) -> bool:
    """Whether this CPU lacks AVX-512 or one of its extensions."""
    return bool(detect().lacks(("avx512f", "avx512bw", "avx512vl", "avx512dq", *features)))


needs_avx512 = pytest.mark.skipif(lacks(), reason="this CPU has no AVX-512")
needs_avx2 = pytest.mark.skipif(
    bool(detect().lacks(("avx2", "fma", "f16c"))), reason="this CPU has no AVX2"
)
needs_vnni = pytest.mark.skipif(lacks("avx512vnni"), reason="this CPU has no AVX512-VNNI")
needs_bf16 = pytest.mark.skipif(lacks("avx512bf16"), reason="this CPU has no AVX512-BF16")


UNLIKE = ("bf16", "f16", "fp8", "q8_0", "int4", "int4-zp-g128", "q4_k", "q6_k", "iq4_nl")
"""Formats whose tiles differ most."""
EVERY = len(os.sched_getaffinity(0)) >= 8
"""Whether there are cores enough to compile all formats of all backends."""
_AMX = not detect().lacks(("amx-tile", "amx-bf16", "amx-int8"))


def tried(backend: str, fmt: str) -> bool:
    """Whether a format is tried of a backend on this CPU: those of ``UNLIKE`` alone of AVX2 beside
    AVX-512, and of every backend of a CPU with AMX, which has four."""
    return EVERY or fmt in UNLIKE or not (_AMX or (backend == "avx2" and not lacks()))


ALIKE = frozenset(("q4_0", "q4_1", "q5_0", "q5_1", "int4-zp"))
"""Formats whose tiles, which have tests of their own, differ from another's in a scale or a bit
alone: a call of experts is the same."""

VECTORS = [
    pytest.param("avx512", marks=needs_avx512), pytest.param("avx2", marks=needs_avx2)
]  # fmt: skip
"""Of ``activations.quantize_vectors``."""


def operations(base: bool = False) -> Instructions:
    """This CPU's, or (``base``) those of one with AVX-512 F, BW, VL and DQ alone."""
    with env.override(isa=NEWER if base else frozenset()):
        return instructions(detect())


def variants(*activations: str) -> list:
    """(backend, format, activations), those that cannot run here skipped with the reason."""
    found = []
    for backend, fmt, kind in itertools.product(kernels(), FORMATS, activations):
        if kind == "int8" and FORMATS[fmt].int8_kind is None:
            continue
        if not tried(backend.name, fmt) or fmt in ALIKE:
            continue
        why = backend.supports(fmt, detect(), kind)
        marks = [pytest.mark.skip(reason=why)] if why else []
        name = f"{backend.name}-{fmt}-{kind}"
        found.append(pytest.param(backend.name, fmt, kind, id=name, marks=marks))
    return found
