"""The tile layout: one order of bytes that AMX and AVX-512 both read (SOSP'25 section 3.2, Figure
5).

A matrix [N, K] is padded with zeros to N_BLOCK x K_BLOCK and cut into blocks of 32 rows. A block is
one contiguous, 64-byte-aligned stream. Inside it, K runs in steps of 32; a step is two AMX B tiles
(rows 0-15, then rows 16-31 of the block); a tile is 16 rows of VNNI pairs, ``16 n x 2 k`` each:

    [block][k step][half][8 groups of 2 pair-rows r][j = n / 4][n % 4][k % 2]      wide order (bf16)
    [block][k step][half][8 groups][j = n / 4][2 pair-rows r][n % 4][k % 2]        byte order (8
    bit)

    [block][k step of 64][half][16 rows of fours][16 n][k % 4]                     fours (integers)

The byte order differs from the wide one inside a 64-byte group only: there the two pair-rows
alternate in runs of 8 bytes, so that after a byte-wise table lookup one ``vpunpcklbw`` yields
pair-row 0 and one ``vpunpckhbw`` pair-row 1, each a whole 64-byte AMX row in tile order.

Fours are the B tiles of TDPBSSD: a row holds, for 16 n, four inputs. Where a weight is 4 bits wide,
two rows share 64 bytes: the even row in the low halves, the odd one in the high halves.
"""

from __future__ import annotations

import torch

N_BLOCK = 32
"""Rows of a block: two AMX tiles side by side."""
K_STEP = 32
"""Inputs of one AMX tile."""
K_BLOCK = 128
"""Inputs of one scale block; K is padded to a multiple of it."""

_WIDE = (0, 4, 1, 5, 6, 2, 3, 7)
_BYTE = (0, 4, 1, 5, 2, 6, 3, 7)


def ceil_to(value: int, multiple: int) -> int:
    """The least multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


def padded(N: int, K: int) -> tuple[int, int]:
    """(N, K) as stored."""
    return ceil_to(N, N_BLOCK), ceil_to(K, K_BLOCK)


def pack_tiles(data: torch.Tensor, out: torch.Tensor) -> None:
    """Reorders ``data`` [N, K] into ``out`` [N / 32 blocks, bytes of a block] uint8.

    ``out`` may be strided in its first dimension (gate and up blocks alternate in one buffer).
    Elements are moved as opaque bits: 1 byte wide go to the byte order, 2 bytes to the wide order.
    """
    wide = data.element_size() == 2
    Np, Kp = padded(*data.shape)
    bits = data.contiguous().view(torch.int16 if wide else torch.uint8)
    if bits.shape != (Np, Kp):
        whole = torch.zeros(Np, Kp, dtype=bits.dtype)
        whole[: bits.shape[0], : bits.shape[1]] = bits
        bits = whole
    pairs = bits.view(torch.int32 if wide else torch.int16)  # the k % 2 axis moves as one element
    axes = pairs.view(Np // 32, 2, 4, 4, Kp // 32, 8, 2)
    order = _WIDE if wide else _BYTE
    blocks = out.view(pairs.dtype).view(Np // 32, -1)
    blocks.view(axes.permute(order[:-1]).shape).copy_(axes.permute(order[:-1]))


def unpack_tiles(blocks: torch.Tensor, N: int, K: int, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of ``pack_tiles``: [N / 32, bytes of a block] uint8 -> [N, K] of ``dtype``."""
    wide = dtype.itemsize == 2
    Np, Kp = padded(N, K)
    order = (_WIDE if wide else _BYTE)[:-1]
    axes = (Np // 32, 2, 4, 4, Kp // 32, 8, 2)
    pairs = blocks.contiguous().view(torch.int32 if wide else torch.int16)
    stored = pairs.view([axes[i] for i in order])
    inverse = [order.index(i) for i in range(len(order))]
    matrix = stored.permute(inverse).contiguous().view(Np, Kp // 2).view(dtype)
    return matrix[:N, :K].contiguous()


def pack_fours(data: torch.Tensor, out: torch.Tensor, bits: int) -> None:
    """Reorders int8 ``data`` [N, K] into ``out`` [N / 32, bytes of a block] uint8 as fours.

    Args:
        bits: 8, or 4 for values of -8 .. 7, of which two rows share a byte.
    """
    Np, Kp = padded(*data.shape)
    whole = torch.zeros(Np, Kp, dtype=torch.uint8)
    whole[: data.shape[0], : data.shape[1]] = data.view(torch.uint8)
    axes = whole.view(Np // 32, 2, 16, Kp // 64, 16, 4)
    rows = axes.permute(0, 3, 1, 4, 2, 5)  # [block][step][half][row][n][k % 4]
    if bits == 4:
        rows = (rows[:, :, :, 0::2] & 15) | (rows[:, :, :, 1::2] << 4)
    out.copy_(rows.reshape(Np // 32, -1))


def unpack_fours(blocks: torch.Tensor, N: int, K: int, bits: int) -> torch.Tensor:
    """The inverse of ``pack_fours``: -> int8 [N, K]."""
    Np, Kp = padded(N, K)
    if bits == 8:
        rows = blocks.reshape(Np // 32, Kp // 64, 2, 16, 16, 4).view(torch.int8)
    else:
        bytes_ = blocks.reshape(Np // 32, Kp // 64, 2, 8, 16, 4)
        pairs = torch.stack((bytes_ & 15, bytes_ >> 4), dim=4).view(torch.int8)
        rows = torch.where(pairs > 7, pairs - 16, pairs).reshape(Np // 32, Kp // 64, 2, 16, 16, 4)
    matrix = rows.permute(0, 2, 4, 1, 3, 5).reshape(Np, Kp)
    return matrix[:N, :K].contiguous()
