"""The tile layout: one order of bytes that AMX and AVX-512 both read (SOSP'25 3.2, Figure 5).

A matrix [N, K] is padded with zeros to N_BLOCK x K_BLOCK and cut into blocks of 32 rows. A block is
one contiguous, 64-byte-aligned stream. Inside it, K runs in steps of 32; a step is two AMX B tiles
(rows 0-15, then rows 16-31 of the block); a tile is 16 rows of VNNI pairs, ``16 n x 2 k`` each:

    wide order (bf16):   [block][k step][half][8 groups of 2 pair-rows r][n / 4][n % 4][k % 2]
    byte order (8 bit):  [block][k step][half][8 groups][n / 4][2 pair-rows r][n % 4][k % 2]
    fours (codes):       [block][k step of 64][half][16 rows of fours][16 n][k % 4]

The byte order differs from the wide one inside a 64-byte group only: there the two pair-rows
alternate in runs of 8 bytes, so that after a byte-wise table lookup one ``vpunpcklbw`` yields
pair-row 0 and one ``vpunpckhbw`` pair-row 1, each a whole 64-byte AMX row in tile order.

Fours are the B tiles of TDPBSSD: a row holds, for 16 n, four inputs. Where a code is 4 bits wide,
two rows share 64 bytes: the even row in the low halves, the odd one in the high halves. Codes of 5
and 6 bits have their low 4 bits so, and behind those 512 bytes of a tile, for each row, one or two
64-bit masks, little endian: bit ``4 n + k % 4`` of the first is bit 4 of that code, of the second
bit 5. Of codes of 2 bits four rows share 64 bytes, row r at bit ``2 (r % 4)``; those of 3 bits have
their low 2 bits so, and masks of bit 2 behind the 256 bytes.
"""

from __future__ import annotations

import torch

N_BLOCK = 32
"""Rows of a block: two AMX tiles side by side."""
K_STEP = 32
"""Inputs of one AMX tile."""
K_BLOCK = 128
"""Inputs of one FP8 scale block; most formats pad K to a multiple of it."""

_BITS = torch.arange(8, dtype=torch.uint8, device="cpu")
_WIDE = (0, 4, 1, 5, 6, 2, 3, 7)
_BYTE = (0, 4, 1, 5, 2, 6, 3, 7)


def ceil_to(value: int, multiple: int) -> int:
    """The least multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


def padded(N: int, K: int, k_block: int = K_BLOCK) -> tuple[int, int]:
    """(N, K) as stored by a format that pads K to ``k_block``."""
    return ceil_to(N, N_BLOCK), ceil_to(K, k_block)


def pack_tiles(data: torch.Tensor, out: torch.Tensor) -> None:
    """Reorders ``data`` [N, K] into ``out`` [N / 32 blocks, bytes of a block] uint8.

    ``out`` may be strided in its first dimension (gate and up blocks alternate in one buffer).
    Elements are moved as opaque bits: 1 byte wide go to the byte order, 2 bytes to the wide order.
    """
    wide = data.element_size() == 2
    Np, Kp = padded(*data.shape)
    bits = data.contiguous().view(torch.int16 if wide else torch.uint8)
    if bits.shape != (Np, Kp):
        whole = bits.new_zeros(Np, Kp)
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


def pack_fours(codes: torch.Tensor, out: torch.Tensor, bits: int) -> None:
    """Reorders codes [N, K], a byte each, into ``out`` [N / 32, bytes of a block] uint8 as fours.

    Args:
        codes: int8 or uint8; of fewer than 8 bits only the low ``bits`` are taken.
        out: its width says to what K is padded.
        bits: 2 to 6, or 8.
    """
    N, K = codes.shape
    blocks, steps = out.shape[0], out.shape[1] // (N_BLOCK * 64 * bits // 8)
    whole = out.new_zeros(blocks * N_BLOCK, steps * 64)
    whole[:N, :K] = codes.view(torch.uint8)
    axes = whole.view(blocks, 2, 16, steps, 16, 4)
    rows = axes.permute(0, 3, 1, 4, 2, 5).reshape(
        blocks, steps, 2, 16, 64
    )  # [..][row][4 n + k % 4]
    if bits == 8:
        out.copy_(rows.reshape(blocks, -1))
        return
    whole_bits = 2 if bits < 4 else 4  # of a code, in bytes that 8 / whole_bits rows share
    each = 8 // whole_bits
    low = rows[:, :, :, 0::each] & ((1 << whole_bits) - 1)
    for i in range(1, each):
        low = low | (rows[:, :, :, i::each] & ((1 << whole_bits) - 1)) << whole_bits * i
    parts = [low.reshape(blocks, steps, 2, 128 * whole_bits)]
    if bits > whole_bits:
        octets = rows.view(*rows.shape[:-1], 8, 8)
        masks = [
            ((octets >> bit & 1) << _BITS).sum(-1, dtype=torch.uint8)
            for bit in range(whole_bits, bits)
        ]
        parts.append(torch.stack(masks, dim=4).view(blocks, steps, 2, -1))
    out.copy_(torch.cat(parts, dim=3).view(blocks, -1))


def unpack_fours(blocks: torch.Tensor, N: int, K: int, bits: int) -> torch.Tensor:
    """The inverse of ``pack_fours``: -> uint8 [N, K], unsigned codes of ``bits`` bits."""
    count, steps = blocks.shape[0], blocks.shape[1] // (N_BLOCK * 64 * bits // 8)
    tiles = blocks.reshape(count, steps, 2, -1)
    if bits == 8:
        rows = tiles
    else:
        whole_bits = 2 if bits < 4 else 4
        each, end = 8 // whole_bits, 128 * whole_bits
        low = tiles[..., :end].reshape(count, steps, 2, 16 // each, 64)
        shifted = [low >> whole_bits * i & ((1 << whole_bits) - 1) for i in range(each)]
        rows = torch.stack(shifted, dim=4).view(count, steps, 2, 16, 64)
        masks = tiles[..., end:].reshape(count, steps, 2, 16, bits - whole_bits, 8, 1)
        for i in range(bits - whole_bits):
            plane = (masks[:, :, :, :, i] >> _BITS & 1) << whole_bits + i
            rows = rows | plane.view(rows.shape)
    axes = rows.reshape(count, steps, 2, 16, 16, 4).permute(0, 2, 4, 1, 3, 5)
    return axes.reshape(count * N_BLOCK, steps * 64)[:N, :K].contiguous()


def pack_columns(values: torch.Tensor, out: torch.Tensor) -> None:
    """Writes the scales of rows as columns: values [N, G] -> ``out`` [N / 32, ..., 32].

    ``out`` has room for at least G columns; it is zeroed where there is no row or no value.
    """
    N, G = values.shape
    whole = out.new_zeros(out.shape[0] * N_BLOCK, out.shape[1:-1].numel())
    whole[:N, :G] = values
    out.copy_(whole.view(out.shape[0], N_BLOCK, -1).transpose(1, 2).reshape(out.shape))


def unpack_columns(columns: torch.Tensor, N: int, G: int) -> torch.Tensor:
    """The inverse of ``pack_columns``: -> [N, G]."""
    rows = columns.flatten(1, -2).transpose(1, 2).reshape(columns.shape[0] * N_BLOCK, -1)
    return rows[:N, :G].clone(memory_format=torch.contiguous_format)
