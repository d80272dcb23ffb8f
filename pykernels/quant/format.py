"""What a weight format is to the rest of the house."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from ..errors import PykernelsError
from .layout import K_BLOCK, N_BLOCK, pack_tiles, padded, unpack_tiles
from .weight import Weight

Mover = Callable[[torch.Tensor, torch.Tensor], None]
"""``layout.pack_tiles`` or its like: writes data [N, K] to blocks uint8 [N / 32, block bytes]."""


class Format(ABC):
    """A weight format: its numbers (quantize, dequantize) and its bytes (pack, unpack).

    Attributes:
        name: as on the command line.
        dtype: of ``Weight.data``.
        error: bound on ``|dequantize(quantize(w)) - w|``, as a person would state it.
    """

    name: str
    dtype: torch.dtype
    error: str

    @abstractmethod
    def quantize(self, matrix: torch.Tensor) -> Weight:
        """float [N, K] -> this format, within ``error``."""

    @abstractmethod
    def dequantize(self, weight: Weight) -> torch.Tensor:
        """-> float32 [N, K], exact."""

    @abstractmethod
    def scale_shape(self, N: int, K: int) -> tuple[int, int] | None:
        """Shape of ``Weight.scale`` for a matrix [N, K]; None if the format has no scales."""

    @property
    def scaled(self) -> bool:
        return self.scale_shape(1, 1) is not None

    def block_bytes(self, K: int) -> int:
        """Bytes of one packed 32-row block."""
        return N_BLOCK * padded(1, K)[1] * self.dtype.itemsize

    def packed_bytes(self, N: int, K: int) -> int:
        """Bytes of a packed matrix without its scales."""
        return padded(N, K)[0] // N_BLOCK * self.block_bytes(K)

    def packed_scales(self, N: int, K: int) -> tuple[int, int]:
        """Shape of the packed scales: float32 [32-row blocks, 128-wide groups], or no groups."""
        Np, Kp = padded(N, K)
        return Np // N_BLOCK, Kp // K_BLOCK if self.scaled else 0

    def check(self, weight: Weight, N: int, K: int, name: str = "weight") -> None:
        """Raises PykernelsError unless ``weight`` is a matrix [N, K] in this format."""
        if tuple(weight.data.shape) != (N, K):
            raise PykernelsError(
                f"{name} has shape {tuple(weight.data.shape)}, expected {(N, K)}",
                "Check that the config.json belongs to this checkpoint",
            )
        if weight.data.dtype != self.dtype:
            raise PykernelsError(
                f"{name} is {weight.data.dtype}, format {self.name} holds {self.dtype}",
                "Convert the tensor or load it in its own format",
            )
        expected = self.scale_shape(N, K)
        found = None if weight.scale is None else tuple(weight.scale.shape)
        if found != expected:
            raise PykernelsError(
                f"{name} has scales of shape {found}, format {self.name} needs {expected}",
                "Check the checkpoint's weight_scale_inv tensors and weight_block_size",
            )

    def pack(
        self,
        weight: Weight,
        blocks: torch.Tensor,
        scales: torch.Tensor,
        mover: Mover = pack_tiles,
    ) -> None:
        """Writes the tile layout.

        Args:
            weight: [N, K] in this format.
            blocks: uint8 [N / 32, block_bytes(K)]; its first dimension may be strided.
            scales: float32 ``packed_scales(N, K)``, likewise.
            mover: reorders the bytes; ``runtime`` has one that uses every core.
        """
        mover(weight.data, blocks)
        if weight.scale is not None:
            scales.copy_(self._scales_by_block(weight.scale, scales.shape[0]))

    def unpack(self, blocks: torch.Tensor, scales: torch.Tensor, N: int, K: int) -> Weight:
        """The inverse of ``pack``."""
        data = unpack_tiles(blocks, N, K, self.dtype)
        return Weight(data, self._scales_by_weight(scales) if self.scaled else None)

    def _scales_by_block(self, scale: torch.Tensor, blocks: int) -> torch.Tensor:
        return scale.repeat_interleave(K_BLOCK // N_BLOCK, dim=0)[:blocks]

    def _scales_by_weight(self, scales: torch.Tensor) -> torch.Tensor:
        return scales[:: K_BLOCK // N_BLOCK].contiguous()
