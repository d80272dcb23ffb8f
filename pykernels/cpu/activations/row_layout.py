"""A token's inputs as the tiles read them: one row of bytes, quantized once, read by every block.

====================  ==========================  ==================================================
offset (bytes)        what                        for
====================  ==========================  ==================================================
``0``                 bfloat16 [K]                bf16 products
``2 K``               float32 [K / act_k]         scales of int8 codes or slices
``2 K + K / 32``      float32 [K / sum_k]         sums of each group's bf16 inputs, or int8 codes
or the same           int32 [K / sum_k]           what the bias of the weights' codes has added to
                                                  each group's int8 products, negated
``C``                 int8 [K]                    int8 products
or ``C``              int8 [K / 64, SLICES, 64]   bf16 inputs as int8 slices
``C + SLICES K``      int32 [K / SLICES_K]        not 0 where an input's lowest slice is not
behind that           int32 [K / sum_k, SLICES]   what the bias of the weights' codes has added to
                                                  each group's sums of slices, negated; the first
                                                  three plus the magic number (``int8_slices``)
or there              float32 [K / sum_k]         for minima: the sums of inputs once more, in
                                                  SUM_UNITs of the slices' scale
or ``C``              float32 [K]                 bf16 inputs over the scale of their 128, a power
                                                  of two
====================  ==========================  ==================================================

K is padded, ``C = 2 K + K / 32 + K / 4`` rounded up to 64. Everything after the bfloat16 is made
from it by ``quantize_row``, and only where a format needs it: sums for its minima, magic number or
bias, codes for int8 activations, slices for bf16 ones that meet integer weights
(``quant.activations`` has the rules and the reference).
"""

from __future__ import annotations

from dataclasses import dataclass

from ...quant import get_format
from ...quant.activations import GROUPS, SLICES, SLICES_K
from ...quant.layout import ceil_to
from ..jit import inlined
from ..weights.layout import BIASES, INTEGERS, MAGIC_OFFSETS, MINIMA, SCALE_K
from ..words import f32, i32

_LINE = 64

SUM_UNIT = 256.0
"""The unit of the sums of inputs beside slices, times the slices' scale: that of all slices but the
lowest."""

FLOATS = {
    **dict.fromkeys(("fp8", "fp8-channel"), 60),
    **dict.fromkeys(("bf16", "f16", "int8", "int8-channel", "q8_0", "iq4_nl", "iq4_xs"), 1),
}
"""Formats whose weights may meet activations as float32, and ``RowFormat.power`` then: E4M3 is read
times 2**-120."""


@dataclass(frozen=True)
class RowFormat:
    """What a row holds beside its bfloat16 inputs.

    Attributes:
        kind: "sums", "q8", "q8_k", "int8_slices" or "floats".
        act_k: inputs of one activation scale (128 or 256; of no use to "sums").
        sum_k: inputs of one sum.
        bias: of the weights' codes.
        sums: whether the sums of the inputs themselves stand beside slices.
        power: the largest of 128 inputs is between 2**power and twice that as a float, unless all
            are below 2**(power - 127); so no product with small weights is lost.
    """

    kind: str
    act_k: int
    sum_k: int
    bias: int = 0
    sums: bool = False
    power: int = 0

    def __post_init__(self) -> None:
        assert self.kind != "int8_slices" or not (self.bias and self.sums), "they share their bytes"

    @property
    def k(self) -> int:
        """Inputs that are quantized together."""
        return self.sum_k if self.kind == "sums" else self.act_k

    @property
    def name(self) -> str:
        """Tells it from every other one."""
        return f"{self.kind}-{self.act_k}-{self.sum_k}-{self.bias}-{self.sums:d}-{self.power}"


def row_format(fmt: str, activations: str, exact: str = "bf16") -> RowFormat | None:
    """What the tiles of a weight format need of a row; None for nothing beside bfloat16.

    bf16 activations need sums where weights have minima or a magic number; int8 ones codes, scales
    and sums, which a bias of the weights' codes makes integers.

    Args:
        exact: how integer weights meet bf16 activations (``gemv.dot``): as "bf16", as bf16 plus a
            "magic" number, or as "int8_slices" of the activations; or "floats", as those but for
            weights of 8 bits and floats, which meet activations as float32.
    """
    bias, minima = BIASES.get(fmt, 0), fmt in MINIMA
    if activations == "bf16" and exact == "floats" and fmt in FLOATS:
        return RowFormat("floats", 128, 128, power=FLOATS[fmt])
    if activations == "bf16" and exact in ("int8_slices", "floats") and fmt in INTEGERS:
        return RowFormat("int8_slices", SLICES_K, SCALE_K[fmt], bias, minima)
    if activations == "bf16":
        wanted = minima or (exact == "magic" and fmt in MAGIC_OFFSETS)
        return RowFormat("sums", 0, SCALE_K[fmt]) if wanted else None
    kind = get_format(fmt).int8_kind
    assert kind is not None, "registry lets no other format pass"
    return RowFormat(kind, GROUPS[kind], SCALE_K[fmt], bias)


def row_bytes(K: int, how: RowFormat | None) -> int:
    """Bytes of a row of K (padded) inputs in its format: an odd number of cache lines.

    So the same inputs of up to 64 tokens, which a tile reads together, are in as many sets of the
    cache; rows 4 KiB apart would share one.
    """
    return (ceil_to(_bytes(K, how), _LINE) // _LINE | 1) * _LINE


def _bytes(K: int, how: RowFormat | None) -> int:
    if how is None:
        return 2 * K
    codes = _codes(K)
    if how.kind == "sums":
        return codes
    if how.kind == "int8_slices":
        each = 4 * SLICES if how.bias else 4 if how.sums else 0
        return codes + SLICES * K + 4 * (K // SLICES_K) + each * (K // how.sum_k)
    return codes + (4 * K if how.kind == "floats" else K)


def _codes(K: int) -> int:
    return (2 * K + K // 32 + K // 4 + 63) // 64 * 64


_codes_of = inlined(_codes)


@inlined
def scale_at(row, K, index):
    """Address of the ``index``-th activation scale."""
    return row + 2 * K + 4 * index


@inlined
def sum_at(row, K, index):
    """Address of the ``index``-th sum."""
    return row + 2 * K + K // 32 + 4 * index


@inlined
def codes_at(row, K):
    """Address of a row's int8 codes."""
    return row + _codes_of(K)


@inlined
def float_at(row, K, k):
    """Address of input k as a float."""
    return codes_at(row, K) + 4 * k


@inlined
def slices_at(row, K, k, j):
    """Address of the slices number ``j``, the highest first, of inputs k to the next 64th."""
    return row + _codes_of(K) + k // 64 * (64 * SLICES) + 64 * j + k % 64


@inlined
def lowest_at(row, K, index):
    """Address of whether one of the ``index``-th ``SLICES_K`` inputs has a lowest slice."""
    return row + _codes_of(K) + SLICES * K + 4 * index


@inlined
def offset_at(row, K, index, j):
    """Address of what a bias has added to a group's sum of slices number ``j``, negated."""
    return lowest_at(row, K, K // SLICES_K) + 4 * (index * SLICES + j)


@inlined
def unit_sum_at(row, K, index):
    """Address of the ``index``-th sum of inputs in SUM_UNITs of the slices' scale."""
    return lowest_at(row, K, K // SLICES_K) + 4 * index


@inlined
def has_lowest(row, K, block):
    """Not 0 where an input of a block of 128 has a lowest slice: three are not all."""
    return i32(lowest_at(row, K, block), 0)


@inlined
def activation_scale(row, K, k, ACT_K):
    """The activation scale of input k."""
    return f32(scale_at(row, K, k // ACT_K), 0)


@inlined
def group_sum(row, K, group):
    """The ``group``-th sum."""
    return f32(sum_at(row, K, group), 0)


@inlined
def unit_sum(row, K, group):
    """The ``group``-th sum in SUM_UNITs of the slices' scale."""
    return f32(unit_sum_at(row, K, group), 0)
