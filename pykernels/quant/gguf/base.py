"""Formats of GGUF files: rows of blocks that hold their own scales.

``Weight.data`` is the rows of the file as they are, so a file's experts need no conversion, and
``unpack`` gives them back bit for bit. Block layouts: ``ggml-common.h`` of
github.com/ggml-org/llama.cpp; what the numbers are: its Python package ``gguf``.

Packed, codes are fours (see ``layout``) and the scales of 32 rows are one stream over the blocks of
a row: for each block the rows' fp16 scales, then their small ones (6 or 8 bits, a byte each, or two
of 4 bits in one), in columns of 32 rows.
"""

from __future__ import annotations

import functools
import warnings
from abc import abstractmethod
from typing import NamedTuple

import torch

from ...errors import PykernelsError
from ..format import Format, Weight, check_finite
from ..layout import N_BLOCK, pack_columns, pack_fours, unpack_columns, unpack_fours

_CHUNK = 1 << 20
"""Weights that are quantized at a time: what a search makes of them stays small."""


class Blocks(NamedTuple):
    """``B`` blocks taken apart.

    Attributes:
        codes: uint8 [B, inputs of a block], in the order of the inputs.
        halves: float16 [B, n]: the block's scales.
        small: uint8 [B, m]: what multiplies them for each group of inputs.
    """

    codes: torch.Tensor
    halves: torch.Tensor
    small: torch.Tensor


class GGUF(Format):
    """What these formats share; one of them is ``split``, ``join``, ``values`` and ``fit``.

    Attributes:
        k_multiple: inputs of a block.
        stored_bytes: bytes of a block in a file.
        halves_at: where a stored block has its fp16 scales.
        halves, small: how many scales of each kind a block has.
        share: what ``error`` is of the largest weight (or the widest range) in a block,
        floor: and what fp16 scales add to it.
    """

    dtype = torch.uint8
    stored_bytes: int
    halves_at: slice
    halves: int
    small: int
    share: float
    floor: float

    @abstractmethod
    def split(self, raw: torch.Tensor) -> Blocks:
        """uint8 [B, stored_bytes] -> its parts."""

    @abstractmethod
    def join(self, blocks: Blocks) -> torch.Tensor:
        """The inverse of ``split``."""

    @abstractmethod
    def values(self, blocks: Blocks) -> torch.Tensor:
        """-> float32 [B, k_multiple], rounded as ggml rounds: scales first, then each weight."""

    @abstractmethod
    def fit(self, x: torch.Tensor) -> Blocks:
        """float32 [B, k_multiple] -> blocks close to it."""

    def stored_halves(self, raw: torch.Tensor) -> torch.Tensor:
        """uint8 [B, stored_bytes] -> float16 [B, halves], without taking the rest apart."""
        return raw[:, self.halves_at].contiguous().view(torch.float16)

    def from_gguf(self, raw: torch.Tensor, N: int, K: int) -> Weight:
        """The matrix [N, K] of a GGUF file's tensor.

        Args:
            raw: the tensor's bytes, of any shape and dtype; they are not copied if contiguous.

        Raises:
            PykernelsError: K does not fit the format, there are too few or too many bytes, or not
                all scales are finite.
        """
        rows = self.data_shape(N, K)
        if raw.nbytes != rows[0] * rows[1]:
            raise PykernelsError(
                f"{raw.nbytes} bytes are no {self.name} matrix {(N, K)}, which has "
                f"{rows[0] * rows[1]}",
                "Check the tensor's type and shape in the GGUF file",
            )
        data = raw.contiguous().flatten().view(torch.uint8)
        if not self.stored_halves(data.view(-1, self.stored_bytes)).isfinite().all():
            raise PykernelsError(
                f"a {self.name} matrix {(N, K)} has scales that are NaN or infinite",
                "Check the GGUF file",
            )
        return Weight(data.view(rows))

    def _quantize(self, matrix: torch.Tensor) -> Weight:
        rows = self.data_shape(*matrix.shape)
        amax = matrix.abs().max()
        check_finite(amax, self.name)
        if 0 < float(amax) * self.share < self.floor:
            _tell_of_coarse_scales(self.name, self.floor / self.share, self.floor)
        chunk = max(1, _CHUNK // self.k_multiple)
        # Contiguous: sums of a transposed view, as of K = k_multiple, are of another order.
        blocks = matrix.float().contiguous().view(-1, self.k_multiple)
        lots = blocks.split(chunk)  # [B, k_multiple] each
        fitted = [self.fit(lot) for lot in lots]
        if not all(lot.halves.isfinite().all() for lot in fitted):
            raise PykernelsError(
                f"a matrix holds weights up to {float(amax):.3g}, too large for the "
                f"fp16 scales of {self.name}",
                "Use bf16 or int8 for these weights",
            )
        return Weight(torch.cat([self.join(lot) for lot in fitted]).view(rows))

    def dequantize(self, weight: Weight) -> torch.Tensor:
        return self.values(self._split(weight)).view(self.logical_shape(weight))

    def scale_shape(self, N: int, K: int) -> tuple[int, int] | None:
        return None

    def logical_shape(self, weight: Weight) -> tuple[int, int]:
        N, row_bytes = weight.data.shape
        return N, row_bytes // self.stored_bytes * self.k_multiple

    def data_shape(self, N: int, K: int) -> tuple[int, int]:
        self.padded_k(K)
        return N, K // self.k_multiple * self.stored_bytes

    def scale_bytes(self, K: int) -> int:
        per_block = N_BLOCK * (2 * self.halves + self.small)
        return self.padded_k(K) // self.k_multiple * per_block

    def pack(self, weight: Weight, blocks: torch.Tensor, scales: torch.Tensor) -> None:
        parts = self._split(weight)
        N, K = self.logical_shape(weight)
        pack_fours(parts.codes.view(N, K), blocks, self.bits)
        halves, small = self._columns(scales)
        pack_columns(
            parts.halves.view(torch.int16).view(N, K // self.k_multiple * self.halves), halves
        )
        pack_columns(parts.small.view(N, K // self.k_multiple * self.small), small)

    def unpack(self, blocks: torch.Tensor, scales: torch.Tensor, N: int, K: int) -> Weight:
        codes = unpack_fours(blocks, N, K, self.bits).view(-1, self.k_multiple)
        halves, small = (
            unpack_columns(columns, N, K // self.k_multiple * count).view(len(codes), count)
            for columns, count in zip(self._columns(scales), (self.halves, self.small), strict=True)
        )
        parts = Blocks(codes, halves.view(torch.float16), small)
        return Weight(self.join(parts).view(self.data_shape(N, K)))

    def _split(self, weight: Weight) -> Blocks:
        return self.split(weight.data.reshape(-1, self.stored_bytes))

    def _columns(self, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of packed scales: int16 [N / 32, blocks of a row, n, 32] and uint8 [.., m, 32].

        Integers, since a copy may quiet a NaN.
        """
        wide, narrow = 2 * N_BLOCK * self.halves, N_BLOCK * self.small
        stream = scales.unflatten(1, (-1, wide + narrow))
        halves, small = stream[..., :wide].view(torch.int16), stream[..., wide:]
        return halves.unflatten(2, (-1, N_BLOCK)), small.unflatten(2, (self.small, N_BLOCK))


@functools.cache
def _tell_of_coarse_scales(name: str, least: float, floor: float) -> None:
    """Warns, once a process. No error: it may be an expert that was never trained nor is asked."""
    warnings.warn(
        f"a matrix that becomes {name} has no weight above {least:.2g}: fp16 scales are too coarse"
        f" for it, errors are up to {floor:g} whatever its weights. Use bf16 or int8 for these",
        stacklevel=2,
    )
