"""A token's inputs as the tiles read them: one row of bytes, annotated once, read by every block.

====================  ==========================  ==================================================
offset (bytes)        what                        for
====================  ==========================  ==================================================
``0``                 bfloat16 [K]                bf16 products
``2 K``               float32 [K / act_k]         scales of int8 codes or digits
``2 K + K / 32``      float32 [K / sum_k]         sums of each group's bf16 inputs, or int8 codes
or the same           int32 [K / sum_k]           what the bias of the weights' codes has added to
                                                  each group's int8 products, negated
``C``                 int8 [K]                    int8 products
or ``C``              int8 [K / 64, DIGITS, 64]   bf16 inputs as digits
``C + DIGITS K``      int32 [K / DIGITS_K]        not 0 where an input's lowest digit is not
behind that           int32 [K / sum_k, DIGITS]   what the bias of the weights' codes has added to
                                                  each group's sums of digits, negated; of the
                                                  first three lifted (``digits``)
or there              float32 [K / sum_k]         for minima: the sums of inputs once more, in
                                                  SUM_UNITs of the digits' scale
====================  ==========================  ==================================================

K is padded, ``C = 2 K + K / 32 + K / 4`` rounded up to 64. Everything behind the bfloat16 is made
from it by ``annotate``, and only where a format asks: sums for its minima, lift or bias, codes for
int8 activations, digits for bf16 ones that meet integer weights (``quant.activations`` has the
rules and the reference).
"""

from __future__ import annotations

from dataclasses import dataclass

from ...quant.activations import DIGITS, DIGITS_K
from ...quant.layout import ceil_to
from ..jit import inlined
from ..job import f32, i32

_LINE = 64

SUM_UNIT = 256.0
"""What a digits' sum of inputs is in, times their scale: what they count but for the lowest."""


@dataclass(frozen=True)
class Annotation:
    """What is made of a row.

    Attributes:
        kind: "sums", "q8", "q8_k" or "digits".
        act_k: inputs of one activation scale (128 or 256; of no use to "sums").
        sum_k: inputs of one sum.
        bias: of the weights' codes.
        sums: whether the sums of the inputs themselves are asked for beside digits.
    """

    kind: str
    act_k: int
    sum_k: int
    bias: int = 0
    sums: bool = False

    def __post_init__(self) -> None:
        assert self.kind != "digits" or not (self.bias and self.sums), "they share a place"

    @property
    def k(self) -> int:
        """Inputs that are annotated together."""
        return self.sum_k if self.kind == "sums" else self.act_k

    @property
    def name(self) -> str:
        """Tells it from every other one."""
        return f"{self.kind}-{self.act_k}-{self.sum_k}-{self.bias}-{self.sums:d}"


def row_bytes(K: int, how: Annotation | None) -> int:
    """Bytes of a row of K (padded) inputs with its annotation: an odd number of cache lines.

    So the same inputs of up to 64 tokens, which a tile reads together, are in as many sets of the
    cache; rows 4 KiB apart would share one.
    """
    return (ceil_to(_bytes(K, how), _LINE) // _LINE | 1) * _LINE


def _bytes(K: int, how: Annotation | None) -> int:
    if how is None:
        return 2 * K
    codes = _codes(K)
    if how.kind == "sums":
        return codes
    if how.kind == "digits":
        each = 4 * DIGITS if how.bias else 4 if how.sums else 0
        return codes + DIGITS * K + 4 * (K // DIGITS_K) + each * (K // how.sum_k)
    return codes + K


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
def digits_at(row, K, k, digit):
    """Address of the digits number ``digit``, the highest first, of inputs k to the next 64th."""
    return row + _codes_of(K) + k // 64 * (64 * DIGITS) + 64 * digit + k % 64


@inlined
def lowest_at(row, K, index):
    """Address of whether one of the ``index``-th ``DIGITS_K`` inputs has a lowest digit."""
    return row + _codes_of(K) + DIGITS * K + 4 * index


@inlined
def offset_at(row, K, index, digit):
    """Address of what a bias has added to a group's sum of digits, negated, lifted (``digits``)."""
    return lowest_at(row, K, K // DIGITS_K) + 4 * (index * DIGITS + digit)


@inlined
def unit_sum_at(row, K, index):
    """Address of the ``index``-th sum of inputs in SUM_UNITs of the digits' scale."""
    return lowest_at(row, K, K // DIGITS_K) + 4 * index


@inlined
def has_lowest(row, K, block):
    """Not 0 where an input of a block of 128 has a lowest digit: three are not all."""
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
    """The ``group``-th sum in SUM_UNITs of the digits' scale."""
    return f32(unit_sum_at(row, K, group), 0)
