"""Which AVX-512 operations this CPU has as one instruction, and what stands in for the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..target import Target
from .intrin import avx512, avx512_base, avx512_bits, avx512_bytes

EXTENSIONS = {
    "avx512bf16": (avx512, ("dot_bf16", "store_bf16")),
    "avx512vbmi": (avx512_bytes, ("lookup_64", "lookup_128", "first_words", "second_words")),
    "avx512vnni": (avx512_bytes, ("dot_u8i8", "dot_words")),
    "gfni": (avx512_bits, ("high_nibbles", "high_nibbles_flipped", "set_planes")),
}
"""The operations of each extension beyond AVX-512 F, BW, VL and DQ."""


@dataclass(frozen=True)
class Instructions:
    """The operations that not every AVX-512 CPU has.

    Attributes:
        name: tells sets of them apart.
        int8_slices: ``prefers_int8_slices``.
        fma: ``prefers_fma``.
        vnni: whether products of 8 bits are one instruction.
    """

    name: str
    int8_slices: bool
    fma: bool
    vnni: bool
    dot_bf16: Callable
    store_bf16: Callable
    lookup_64: Callable
    lookup_128: Callable
    first_words: Callable
    second_words: Callable
    dot_u8i8: Callable
    dot_words: Callable
    high_nibbles: Callable
    high_nibbles_flipped: Callable
    set_planes: Callable


def instructions(target: Target) -> Instructions:
    """The fastest set that ``target`` runs (it has AVX-512 F, BW, VL and DQ)."""
    found: dict[str, Callable] = {}
    for extension, (module, names) in EXTENSIONS.items():
        if target.lacks((extension,)):
            module = avx512_base
        found |= {name: getattr(module, name) for name in names}
    have = [
        extension.removeprefix("avx512")
        for extension in EXTENSIONS
        if not target.lacks((extension,))
    ]
    name = "avx512" + "".join(f"-{name}" for name in have)
    vnni = not target.lacks(("avx512vnni",))
    return Instructions(name, prefers_int8_slices(target), prefers_fma(target), vnni, **found)


def prefers_int8_slices(target: Target) -> bool:
    """Whether integer weights better meet bfloat16 inputs as int8 slices (``gemv.dot``) on
    AVX-512: three or four ``vpdpbusd`` for two ``vdpbf16ps`` and what dequantization takes.

    Intel's cores begin two ``vpdpbusd`` of 512 bits a cycle, but one ``vdpbf16ps`` in two; AMD's as
    many of either. Where there is no ``vdpbf16ps``, it is six operations.
    """
    if target.lacks(("avx512vnni",)):
        return False
    return bool(target.lacks(("avx512bf16",))) or target.vendor == "GenuineIntel"


def prefers_fma(target: Target) -> bool:
    """Whether many tokens are better multiplied in float32 (``gemm.fma``) than by ``vdpbf16ps``.

    Intel's cores begin two ``vfmadd231ps`` of 512 bits a cycle, but one ``vdpbf16ps``, of twice as
    many products, in two; AMD's as many of either.
    """
    return bool(target.lacks(("avx512bf16",))) or target.vendor == "GenuineIntel"
