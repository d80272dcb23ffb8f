"""What integer kernels make of their inputs, bit for bit: int8 activations, or bf16 as slices.

int8 activations are of two kinds, each of groups along K with a float32 scale. All arithmetic is
float32, all rounding of codes to nearest even:

``q8``, groups of 128: ``scale = amax / 127``, ``q = round(x * (1 / scale))``, in -127 .. 127.
``q8_k``, groups of 256, ggml's ``block_q8_K`` (``quantize_row_q8_K_ref``): with ``max`` the first
value of the largest magnitude, ``inverse = -127 / max``, ``q = min(127, round(inverse * x))``,
``scale = 1 / inverse``; so the scale may be negative.

A group whose inverse scale is not finite (zeros, or all below 4e-37) has scale 0 and codes 0.

int8 slices keep bf16 inputs as exact as float32 sums are (``int8_slices``).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..errors import PykernelsError

GROUPS = {"q8": 128, "q8_k": 256}
"""Inputs of a scale."""

SLICES = 4
"""Signed bytes that a bf16 input is split into."""
SLICES_K = 128
"""Inputs that share a scale as int8 slices."""
SLICES_SHIFT = 8 * (SLICES - 1) - 2
"""Binary places that are kept below the largest input's 8 bits: with one more, an input of 255/256
of the range would round up to a first slice of 128."""


class Activations(NamedTuple):
    """Quantized rows.

    Attributes:
        q: int8 [T, K].
        scale: float32 [T, ceil(K / group)].
        kind: "q8" or "q8_k".
    """

    q: torch.Tensor
    scale: torch.Tensor
    kind: str


def quantize(x: torch.Tensor, kind: str) -> Activations:
    """Rows of finite values to int8.

    Args:
        x: [T, K], any float dtype, taken as float32. The last group of a row may be short.
        kind: "q8" or "q8_k".

    Raises:
        PykernelsError: no such kind.
    """
    if kind not in GROUPS:
        raise PykernelsError(f"there are no {kind!r} activations", f"Use {' or '.join(GROUPS)}")
    T, K = x.shape
    groups = _grouped(x.float(), GROUPS[kind])  # [T, G, group]
    if kind == "q8":
        scale = groups.abs().amax(2, keepdim=True) / 127
        inverse = 1 / scale
    else:
        peak = groups.gather(2, groups.abs().argmax(2, keepdim=True))
        inverse = torch.full_like(peak, -127) / peak  # -127 / peak would round twice in torch
        scale = 1 / inverse
    usable = inverse.isfinite()
    scale, inverse = torch.where(usable, scale, 0), torch.where(usable, inverse, 0)
    q = (groups * inverse).round().clamp(-127, 127).to(torch.int8)
    return Activations(q.view(T, -1)[:, :K].contiguous(), scale.squeeze(2), kind)


def dequantize(a: Activations, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """``q * scale`` [T, K], multiplied in ``dtype`` (exact in float64)."""
    wide = a.scale.to(dtype).repeat_interleave(GROUPS[a.kind], dim=1)
    return a.q.to(dtype) * wide[:, : a.q.shape[1]]


class Int8Slices(NamedTuple):
    """Rows as ``scale * sum_j q[j] * 256**(SLICES - 1 - j)``.

    Attributes:
        q: int8 [SLICES, T, K], the highest slice first.
        scale: float32 [T, ceil(K / SLICES_K)], powers of two.
    """

    q: torch.Tensor
    scale: torch.Tensor


def int8_slices(x: torch.Tensor) -> Int8Slices:
    """Rows of finite bf16 values as integers of 30 bits, in four signed bytes.

    The unit is ``2**-SLICES_SHIFT`` of the last bit of a group's largest input: inputs down to
    ``2**-SLICES_SHIFT`` of it are exact, of a smaller one it is the nearest integer, at most
    ``2**-(SLICES_SHIFT + 8)`` of the largest away, or ``2**-127``. (A float32 sum of the group's
    products is off by more: by ``2**-24`` of the largest.)

    Args:
        x: bf16 [T, K]. The last group of a row may be short.
    """
    T, K = x.shape
    groups = _grouped(x.float(), SLICES_K)  # [T, G, SLICES_K]
    largest = groups.abs().amax(2, keepdim=True)
    _, exponent = torch.frexp(largest)  # largest in [0.5, 1) * 2**exponent
    least = SLICES_SHIFT + 8 - 126  # of which the unit is a normal number
    exponent = torch.where(largest > 0, exponent, least).clamp(min=least)
    unit = (exponent - SLICES_SHIFT - 8).double()
    left = (groups.double() * 2.0**-unit).round().to(torch.int64)
    q = torch.empty(SLICES, *groups.shape, dtype=torch.int8, device=x.device)
    for j in reversed(range(SLICES)):
        low = (left + 128) % 256 - 128
        q[j] = low
        left = (left - low) >> 8
    return Int8Slices(q.view(SLICES, T, -1)[:, :, :K].contiguous(), (2.0**unit).float().squeeze(2))


def sums(q: torch.Tensor, group: int) -> torch.Tensor:
    """Sums of codes over groups of inputs, which a weight's offset is multiplied with.

    Args:
        q: int8 [T, K].
        group: inputs of a sum: 16 for ggml's ``bsums``.

    Returns:
        int32 [T, ceil(K / group)].
    """
    return _grouped(q, group).sum(2, dtype=torch.int32)


def _grouped(x: torch.Tensor, group: int) -> torch.Tensor:
    """[T, K] -> [T, groups, group], the last group filled with zeros."""
    T, K = x.shape
    return torch.nn.functional.pad(x, (0, -K % group)).view(T, -(-K // group), group)
