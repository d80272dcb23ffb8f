"""NumPy models of the matrix instructions, so that layouts are tested on machines without them.

Source: Intel SDM volume 2, TDPBF16PS, TDPBSSD and VDPBF16PS. float32 results are exact sums rounded
once here; the hardware rounds after each pair.
"""

from __future__ import annotations

import numpy as np

TILE_ROWS, TILE_BYTES = 16, 64


def tdpbf16ps(c: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """``c + a @ b`` of bf16 tiles.

    Args:
        c: float32 [16, 16].
        a: float32 values of bf16 [16, 32]: row m holds k = 0 .. 31.
        b: float32 values of bf16 [16, 32]: row r holds, for 16 n, the pair k = 2r, 2r + 1.
    """
    pairs = b.reshape(TILE_ROWS, 16, 2)  # [r, n, k % 2]
    matrix = pairs.transpose(0, 2, 1).reshape(32, 16)  # [k, n]
    return (c + a.astype(np.float64) @ matrix).astype(np.float32)


def tdpbssd(c: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """``c + a @ b`` of int8 tiles in int32.

    Args:
        c: int32 [16, 16].
        a: int8 [16, 64]: row m holds k = 0 .. 63.
        b: int8 [16, 64]: row r holds, for 16 n, the four k = 4r .. 4r + 3.
    """
    fours = b.reshape(TILE_ROWS, 16, 4).astype(np.int64)
    matrix = fours.transpose(0, 2, 1).reshape(64, 16)
    return (c + a.astype(np.int64) @ matrix).astype(np.int32)


def vdpbf16ps(acc: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """``acc[n] + a[2n] b[2n] + a[2n + 1] b[2n + 1]``: one row of a B tile by a broadcast pair.

    Args:
        acc: float32 [16].
        a, b: float32 values of bf16 [32].
    """
    products = (a.astype(np.float64) * b).reshape(16, 2).sum(1)
    return (acc + products).astype(np.float32)
