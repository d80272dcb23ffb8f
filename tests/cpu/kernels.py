"""Which kernels the tests compile, as a table; and what stands in for other CPUs.

Compiling is most of a first run: the kernels of one (unit, format, activations) take about 5 s of a
processor. So a run compiles the rows of ``TRIED``, and ``pytest --all`` (``make test-all``)
everything.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any

import pytest

from pykernels.cpu.isa import Instructions, instructions
from pykernels.env import env
from pykernels.quant import FORMATS
from pykernels.registry import kernels
from pykernels.target import detect

DIFFERENT = ("bf16", "fp8", "int8", "int4", "q4_k", "q6_k")
"""Formats whose kernels differ most from each other's."""

SIBLINGS = tuple(name for name in FORMATS if name not in DIFFERENT)
"""The others: each one's kernels are those of another but for the width of a group or a number, a
bit of a code, a table or what has a scale. By default the tile of one token is tried, which reads
every code and scale (``gemv/test_tiles.py``)."""

TRIED: dict[str, dict[str, tuple[str, ...]]] = {
    # The backend that "auto" takes on this CPU.
    "fastest": {"bf16": DIFFERENT, "int8": ("int8", "q4_k")},
    # Backends of this CPU that "auto" does not take.
    "avx512": {"bf16": ("bf16", "fp8", "int8", "q4_k"), "int8": ("int8", "q4_k")},
    "avx2": {"bf16": ("fp8", "q4_k"), "int8": ("q6_k",)},
    "generic": {
        "bf16": ("bf16", "fp8", "int4", "q4_k", "q6_k"),
        "int8": ("int8", "q6_k"),
    },
    # Units that stand in for other CPUs: AMX tiles modelled without AMX, AVX-512 without its
    # extensions, its GEMM in float32, and integers in the way that this CPU does not prefer (as
    # bfloat16 or as int8 slices).
    "modelled amx": {"bf16": ("fp8", "q2_k"), "int8": ()},
    "base": {"bf16": ("fp8",), "int8": ()},
    "fma": {"bf16": ("q4_k",), "int8": ()},
    "other": {"bf16": (), "int8": ()},  # AMX's tiles of one token take int8 slices too
}
"""Formats that a unit is tried with, by the activations. The rest of them only with ``--all``. A
backend that is not here (one that somebody has just registered) is tried with all."""

only_with_all = pytest.mark.all


@functools.cache
def fastest() -> str:
    """The backend that "auto" takes here."""
    return next(b.name for b in kernels() if b.supports("bf16", detect()) is None)


def tried(unit: str, fmt: str, activations: str = "bf16") -> bool:
    """Whether a run without ``--all`` compiles these kernels."""
    row = TRIED.get("fastest" if unit == fastest() else unit)
    return row is None or fmt in row[activations]


def variant(
    unit: str, fmt: str, activations: str = "bf16", *values: Any, id: str = "", marks: Any = ()
) -> Any:
    """A test's parameters: ``values``, or else the first two."""
    marks = list(marks) if isinstance(marks, Iterable) else [marks]
    if not tried(unit, fmt, activations):
        marks.append(only_with_all)
    return pytest.param(*(values or (unit, fmt)), id=id or f"{unit}-{fmt}", marks=marks)


def formats(names: Iterable[str] = FORMATS) -> list[Any]:
    """Parameters of a test that compiles something for each format: ``DIFFERENT`` by default."""
    return [pytest.param(n, marks=() if n in DIFFERENT else only_with_all) for n in names]


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

VECTORS = [pytest.param("avx512", marks=needs_avx512), pytest.param("avx2", marks=needs_avx2)]
"""The vectors of ``activations.quantize_vectors``."""


def operations(base: bool = False) -> Instructions:
    """This CPU's, or (``base``) those of one with AVX-512 F, BW, VL and DQ alone."""
    with env.override(isa=NEWER if base else frozenset()):
        return instructions(detect())


def variants(*activations: str, names: Iterable[str] = FORMATS) -> list:
    """(backend, format, activations), those that cannot run here skipped with the reason."""
    params = []
    for backend, fmt, kind in itertools.product(kernels(), names, activations):
        if kind == "int8" and FORMATS[fmt].int8_kind is None:
            continue
        why = backend.supports(fmt, detect(), kind)
        marks = [pytest.mark.skip(reason=why)] if why else []
        values = (backend.name, fmt, kind)
        params.append(variant(*values, *values, id="-".join(values), marks=marks))
    return params
