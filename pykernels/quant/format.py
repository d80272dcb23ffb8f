"""What a weight format is to the rest of the house, and a matrix in one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from ..errors import PykernelsError
from .layout import K_BLOCK, N_BLOCK, ceil_to, pack_tiles, padded, unpack_tiles

_PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""What is quantized: numbers that are no codes without their scales."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix [N, K] (N outputs, K inputs) and the scales of its format, if it has any.

    ==================  ==================================  ========================================
    format              ``data``                            ``scale`` (multiply to dequantize)
    ==================  ==================================  ========================================
    ``bf16``, ``f16``   bfloat16, float16 [N, K]            None
    ``fp8``             float8_e4m3fn [N, K]                float32 [ceil(N / 128), ceil(K / 128)]
    ``fp8-channel``     float8_e4m3fn [N, K]                float32 [N, 1]
    ``int8``, ``int4``  int8 [N, K], a number a byte        bfloat16 [N, ceil(K / group)]
    ``int8-channel``,   the same                            float32 [N, 1]
    ``int4-channel``
    ``int4-zp``,        uint8 [N, K], a code a byte         float16 [N, 2 ceil(K / group)]: each
    ``int4-zp-g128``                                        group's scale and zero point, in turns
    ``mxfp4``           uint8 [N, K], a code a byte         uint8 [N, ceil(K / 32)], E8M0
    ``nvfp4``           the same                            uint8 [N, 20 ceil(K / 256)]: a float32
                                                            and 16 E4M3 scales, in turns
    ``q4_k``, ``q5_k``  uint8 [N, K / 256 * 144 or 176]     None: a GGUF file's rows hold their own
    ``q6_k``, ``q3_k``  uint8 [N, K / 256 * 210 or 110]     None
    ``q2_k``,           uint8 [N, K / 256 * 84],            None
    ``iq4_xs``          uint8 [N, K / 256 * 136]
    ``iq3_s``,          uint8 [N, K / 256 * 110 or 98]      None
    ``iq3_xxs``
    ``iq2_s``,          uint8 [N, K / 256 * 82 or 74]       None
    ``iq2_xs``
    ``iq2_xxs``         uint8 [N, K / 256 * 66]             None
    ``iq1_s``,          uint8 [N, K / 256 * 50 or 56]       None
    ``iq1_m``
    ``tq1_0``,          uint8 [N, K / 256 * 54 or 66]       None
    ``tq2_0``
    ``q2_0``, ``q1_0``  uint8 [N, K / 64 or 128 * 18]       None
    ``q8_0``, ``q4_0``  uint8 [N, K / 32 * 34 or 18]        None
    ``q4_1``, ``q5_0``  uint8 [N, K / 32 * 20 or 22]        None
    ``q5_1``,           uint8 [N, K / 32 * 24],             None
    ``iq4_nl``          uint8 [N, K / 32 * 18]
    ==================  ==================================  ========================================

    What N and K are is therefore the format's to say: ``Format.logical_shape``.
    """

    data: torch.Tensor
    scale: torch.Tensor | None = None


class Format(ABC):
    """A weight format: its numbers (quantize, dequantize) and its bytes (pack, unpack).

    Attributes:
        name: as on the command line.
        dtype: of ``Weight.data``.
        scale_dtypes: that ``Weight.scale`` may have; packed, they are the same numbers.
        bits: of one packed weight, scales not counted.
        error: bound on ``|dequantize(quantize(w)) - w|``, as a person would state it.
        k_block: inputs to a multiple of which K is padded in the tile layout.
        k_multiple: what K itself must be a multiple of.
        int8_kind: the ``activations`` that integer kernels multiply it with; None if it has none.
    """

    name: str
    dtype: torch.dtype
    scale_dtypes: tuple[torch.dtype, ...] = ()
    bits: int
    error: str
    k_block: int = K_BLOCK
    k_multiple: int = 1
    int8_kind: str | None = None

    def quantize(self, matrix: torch.Tensor) -> Weight:
        """float [N, K] -> this format, within ``error``.

        Raises:
            PykernelsError: no matrix, not on the CPU, no plain floats, K no multiple of
                ``k_multiple``, or weights that the format has no numbers for.
        """
        if not matrix.is_cpu:
            raise PykernelsError(
                f"a matrix on {matrix.device} cannot become {self.name}",
                "Copy it with .cpu() first",
            )
        if matrix.ndim != 2 or not matrix.numel():
            raise PykernelsError(
                f"a tensor of shape {tuple(matrix.shape)} cannot become {self.name}",
                "Give a matrix [N, K] with at least one weight",
            )
        if matrix.dtype not in _PLAIN:
            raise PykernelsError(
                f"a matrix of {matrix.dtype} cannot become {self.name}",
                "Give its values as float32, codes times their scales",
            )
        matrix = matrix.detach()
        if matrix.dtype is torch.float64:  # which becomes float32 first, or less
            finite = matrix[matrix.isfinite()].abs()
            check_held(finite.float(), finite, self.name)
        return self._quantize(matrix)

    @abstractmethod
    def _quantize(self, matrix: torch.Tensor) -> Weight:
        """``quantize`` of a matrix with at least one weight."""

    @abstractmethod
    def dequantize(self, weight: Weight) -> torch.Tensor:
        """-> float32 [N, K], exact."""

    @abstractmethod
    def scale_shape(self, N: int, K: int) -> tuple[int, int] | None:
        """Shape of ``Weight.scale`` for a matrix [N, K]; None if the format has no scales."""

    def logical_shape(self, weight: Weight) -> tuple[int, int]:
        """(N, K) of the matrix that ``weight`` stands for."""
        N, K = weight.data.shape
        return N, K

    def data_shape(self, N: int, K: int) -> tuple[int, int]:
        """Shape of ``Weight.data`` for a matrix [N, K]."""
        return N, K

    def padded_k(self, K: int) -> int:
        """K as packed. Raises PykernelsError unless K is a multiple of ``k_multiple``."""
        if K % self.k_multiple:
            raise PykernelsError(
                f"{self.name} takes matrices whose inputs are a multiple of {self.k_multiple}, "
                f"not {K}",
                "Use another format for these experts, such as int4",
            )
        return ceil_to(K, self.k_block)

    def block_bytes(self, K: int) -> int:
        """Bytes of one packed 32-row block without its scales."""
        return N_BLOCK * self.padded_k(K) * self.bits // 8

    def packed_bytes(self, N: int, K: int) -> int:
        """Bytes of a packed matrix without its scales."""
        return padded(N, K)[0] // N_BLOCK * self.block_bytes(K)

    def scale_bytes(self, K: int) -> int:
        """Bytes of one 32-row block's packed scales; 0 if the format has none."""
        return 0

    def check(self, weight: Weight, N: int, K: int, name: str = "weight") -> None:
        """Raises PykernelsError unless ``weight`` is a matrix [N, K] in this format, on the CPU,
        and its scales are finite."""
        if not isinstance(weight, Weight):
            raise PykernelsError(
                f"{name} is a {type(weight).__name__}, no Weight",
                f"Make it one with get_format({self.name!r}).quantize",
            )
        self.padded_k(K)
        for part in (weight.data, weight.scale):
            if part is not None and not part.is_cpu:
                raise PykernelsError(f"{name} is on {part.device}", "Copy it with .cpu() first")
        expected_data = self.data_shape(N, K)
        if tuple(weight.data.shape) != expected_data:
            raise PykernelsError(
                f"{name} has shape {tuple(weight.data.shape)}, expected {expected_data}",
                "Check that the config.json belongs to this checkpoint",
            )
        if weight.data.dtype != self.dtype:
            raise PykernelsError(
                f"{name} is {weight.data.dtype}, format {self.name} holds {self.dtype}",
                "Convert the tensor or load it in its own format",
            )
        expected = self.scale_shape(N, K)
        actual = None if weight.scale is None else tuple(weight.scale.shape)
        if actual != expected:
            raise PykernelsError(
                f"{name} has scales of shape {actual}, format {self.name} needs {expected}",
                "Check the checkpoint's weight scales and the group or block size in its config",
            )
        if weight.scale is not None and weight.scale.dtype not in self.scale_dtypes:
            raise PykernelsError(
                f"{name} has scales of {weight.scale.dtype}, format {self.name} holds"
                f" {self.scale_dtypes[0]}",
                "Convert the scales, if that loses nothing",
            )
        if weight.scale is not None and not weight.scale.isfinite().all():
            raise PykernelsError(
                f"{name} has scales that are NaN or infinite", "Check the checkpoint"
            )

    def pack(self, weight: Weight, blocks: torch.Tensor, scales: torch.Tensor) -> None:
        """Writes the tile layout: the reference of ``pykernels.cpu.weights.pack``, on one thread.

        Args:
            weight: [N, K] in this format.
            blocks: uint8 [N / 32, block_bytes(K)]; its first dimension may be strided.
            scales: uint8 [N / 32, scale_bytes(K)], likewise.
        """
        self.pack_data(weight.data, blocks)
        if weight.scale is not None:
            self.pack_scales(weight.scale, scales)

    def unpack(self, blocks: torch.Tensor, scales: torch.Tensor, N: int, K: int) -> Weight:
        """The inverse of ``pack``."""
        return Weight(self.unpack_data(blocks, N, K), self.unpack_scales(scales, N, K))

    def pack_data(self, data: torch.Tensor, blocks: torch.Tensor) -> None:
        """The weights' half of ``pack``."""
        pack_tiles(data, blocks)

    def unpack_data(self, blocks: torch.Tensor, N: int, K: int) -> torch.Tensor:
        """The weights' half of ``unpack``."""
        return unpack_tiles(blocks, N, K, self.dtype)

    def pack_scales(self, scale: torch.Tensor, scales: torch.Tensor) -> None:
        """The scales' half of ``pack``."""
        raise AssertionError(f"{self.name} has no scales to pack")

    def unpack_scales(self, scales: torch.Tensor, N: int, K: int) -> torch.Tensor | None:
        """The scales' half of ``unpack``."""
        return None


def check_finite(amax: torch.Tensor, name: str) -> None:
    """Raises PykernelsError unless the largest magnitudes of a matrix's parts are finite.

    NaN and infinities have no place in these codes: they would become ordinary numbers, or make NaN
    of all weights that share their scale.
    """
    if not amax.isfinite().all():
        raise PykernelsError(
            f"a matrix that is to become {name} holds NaN or infinities",
            "Check the checkpoint; bf16 keeps them as they are",
        )


def check_held(largest: torch.Tensor, amax: torch.Tensor, name: str) -> None:
    """Raises PykernelsError unless ``largest``, what a format makes of finite magnitudes ``amax``,
    is finite too: rounded up, the last numbers of float32 would become infinities."""
    if not largest.isfinite().all():
        raise PykernelsError(
            f"a matrix holds weights up to {float(amax.max()):.5g}, too large for {name}",
            "Check the checkpoint",
        )
