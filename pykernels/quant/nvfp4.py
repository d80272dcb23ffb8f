"""NVFP4: E2M1 elements in groups of 16 inputs with an E4M3 scale, under one float32 scale.

A weight is ``code * (scale * whole)``. Codes are MXFP4's; scales are at least 0. The float32 scale
is one of a matrix (GGUF's type has none), and is kept for each output and 256 inputs, so that any
part of a matrix has its own.
"""

from __future__ import annotations

import torch

from ..errors import PykernelsError
from .format import Format, Weight, check_finite, check_held
from .layout import N_BLOCK, pack_columns, pack_fours, unpack_columns, unpack_fours
from .mxfp4 import VALUES, nearest_code

GROUP = 16
SUPER_K = 256
"""Inputs of a float32 scale."""
_GROUPS = SUPER_K // GROUP
_BYTES = 4 + _GROUPS
_LARGEST = 6 * 448
"""Of a code times a scale."""


class NVFP4(Format):
    """``data`` uint8 [N, K], a code a byte; ``scale`` uint8 [N, 20 ceil(K / 256)]: for each 256
    inputs the float32 scale, then 16 in E4M3."""

    name = "nvfp4"
    dtype = torch.uint8
    scale_dtypes = (torch.uint8,)
    bits = 4
    k_block = SUPER_K
    int8_kind = "q8"
    error = "0.178 of the amax of 16 inputs, and 2**-10 / 448 of the matrix's"

    def _quantize(self, matrix: torch.Tensor) -> Weight:
        N, K = matrix.shape
        x = torch.zeros(N, -(-K // GROUP) * GROUP, dtype=torch.float32, device="cpu")
        x[:, :K] = matrix
        groups = x.view(N, -1, GROUP)
        amax = groups.abs().amax(2)  # [N, groups]
        check_finite(amax, self.name)
        whole = amax.max() / _LARGEST
        whole = torch.where(whole > 0, whole, torch.ones_like(whole))
        check_held(whole * _LARGEST, amax, self.name)
        scale = (amax / 6 / whole).clamp(max=448).to(torch.float8_e4m3fn)
        step = (scale.float() * whole)[..., None]
        codes = nearest_code(torch.where(step > 0, groups / step, 0))
        return self.join(codes.view(N, -1)[:, :K].contiguous(), scale, whole)

    @staticmethod
    def join(codes: torch.Tensor, scale: torch.Tensor, whole: torch.Tensor) -> Weight:
        """A weight of codes uint8 [N, K], E4M3 scales [N, ceil(K / 16)] (or their bytes), and the
        matrix's float32 scale []."""
        N, groups = scale.shape
        supers = -(-groups // _GROUPS)
        joined = torch.zeros(N, supers, _BYTES, dtype=torch.uint8, device="cpu")
        joined[..., :4] = whole.float().reshape(1).view(torch.uint8)
        padded = torch.zeros(N, supers * _GROUPS, dtype=torch.uint8, device="cpu")
        padded[:, :groups] = scale.view(torch.uint8)
        joined[..., 4:] = padded.view(N, supers, _GROUPS)
        return Weight(codes, joined.view(N, -1))

    def dequantize(self, weight: Weight) -> torch.Tensor:
        K = weight.data.shape[1]
        whole, scale = self._split(weight)
        scales = (scale.view(torch.float8_e4m3fn).float() * whole).flatten(1)
        return VALUES[weight.data.long()] * scales.repeat_interleave(GROUP, dim=1)[:, :K]

    def scale_shape(self, N: int, K: int) -> tuple[int, int] | None:
        return N, -(-K // SUPER_K) * _BYTES

    def scale_bytes(self, K: int) -> int:
        """Bytes of a block's scales: of 256 inputs float32 [32 outputs], then E4M3 [16, 32]."""
        return self.padded_k(K) // SUPER_K * N_BLOCK * _BYTES

    def check(self, weight: Weight, N: int, K: int, name: str = "weight") -> None:
        super().check(weight, N, K, name)
        if (most := int(weight.data.max())) > 15:
            raise PykernelsError(f"{name} has codes up to {most}", "Give one 4-bit code a byte")
        whole, scale = self._split(weight)
        if not whole.isfinite().all() or int(scale.max()) > 126:
            raise PykernelsError(
                f"{name} has scales that are NaN, infinite or less than 0", "Check the checkpoint"
            )

    def pack_data(self, data: torch.Tensor, blocks: torch.Tensor) -> None:
        pack_fours(data, blocks, self.bits)

    def unpack_data(self, blocks: torch.Tensor, N: int, K: int) -> torch.Tensor:
        return unpack_fours(blocks, N, K, self.bits)

    def pack_scales(self, scale: torch.Tensor, scales: torch.Tensor) -> None:
        whole, small = self._split(Weight(scale, scale))
        wide, narrow = self._columns(scales)
        pack_columns(whole.view(torch.int32).squeeze(2), wide)
        pack_columns(small.flatten(1), narrow)

    def unpack_scales(self, scales: torch.Tensor, N: int, K: int) -> torch.Tensor:
        supers = -(-K // SUPER_K)
        wide, narrow = self._columns(scales)
        whole = unpack_columns(wide, N, supers).view(torch.uint8).view(N, supers, 4)
        small = unpack_columns(narrow, N, supers * _GROUPS).view(N, supers, _GROUPS)
        return torch.cat((whole, small), dim=2).view(N, -1)

    @staticmethod
    def _split(weight: Weight) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [N, supers, 1] and the bytes of E4M3 [N, supers, 16]."""
        assert weight.scale is not None
        parts = weight.scale.view(len(weight.scale), -1, _BYTES)
        return parts[..., :4].contiguous().view(torch.float32), parts[..., 4:].contiguous()

    @staticmethod
    def _columns(scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of packed scales: int32 [N / 32, supers, 1, 32] and uint8 [.., 16, 32]."""
        stream = scales.unflatten(1, (-1, N_BLOCK * _BYTES))
        wide, narrow = stream[..., : 4 * N_BLOCK].view(torch.int32), stream[..., 4 * N_BLOCK :]
        return wide.unflatten(2, (-1, N_BLOCK)), narrow.unflatten(2, (_GROUPS, N_BLOCK))
