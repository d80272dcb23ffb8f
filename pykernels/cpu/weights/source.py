"""How a format's rows are read to be packed, and what reads bytes at any address."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from numba import carray, types

from ..intrin.sync import as_pointer
from ..jit import inlined


@dataclass(frozen=True)
class Source:
    """How a format's rows are read.

    Attributes:
        bits: of a code.
        quad: ``quad(row, k, K) -> uint32``: the codes of inputs k .. k + 3 of the row at that
            address, a byte each, the first in the lowest; k is a multiple of 4.
        scale_k: inputs that scales are packed for together; 0 where a format packs its few scales
            itself.
        halves, small: scales of 16 and 8 bits that are written for each ``scale_k`` inputs.
        floats: whether the former are of 32 bits instead.
        half: ``half(row, scale_row, g, i) -> uint16``: the i-th of the 16-bit scales of the g-th
            ``scale_k`` inputs; ``scale_row`` is the address of the row's separate scales.
        byte: ``byte(row, scale_row, g, i) -> uint8``: likewise the small ones.
    """

    bits: int
    quad: Callable
    scale_k: int = 0
    half: Callable | None = None
    halves: int = 1
    small: int = 0
    byte: Callable | None = None
    floats: bool = False


@inlined
def u8(address):
    return types.uint32(carray(as_pointer(address), (1,), types.uint8)[0])


@inlined
def u16(address):
    return types.uint16(u8(address) | (u8(address + 1) << types.uint32(8)))


@inlined
def u32(address):
    """Four bytes at any address (LLVM makes one load of them)."""
    octets = carray(as_pointer(address), (4,), types.uint8)
    low = types.uint32(octets[0]) | (types.uint32(octets[1]) << types.uint32(8))
    high = types.uint32(octets[2]) | (types.uint32(octets[3]) << types.uint32(8))
    return low | (high << types.uint32(16))


@inlined
def nibbles(address, high):
    """The low or the high halves of four bytes."""
    return (u32(address) >> types.uint32(4 * high)) & types.uint32(0x0F0F0F0F)


@inlined
def twos(codes, k):
    """Four of 128 codes of 2 bits: number 32 j + i is in byte i at bit 2 j."""
    at = codes + k % 256 // 128 * 32 + k % 32
    return (u32(at) >> types.uint32(k % 128 // 32 * 2)) & types.uint32(0x03030303)
