"""int8 and int4, symmetric, one bfloat16 scale for each output and group of inputs, or one float32
scale for each output.

``w = q * scale`` with ``q`` in -127 .. 127 (int8; with one scale an output -128 too) or -8 .. 7
(int4). Scales of groups are bfloat16, as in Kimi-K2's compressed-tensors INT4 checkpoints (group
32); quantization rounds the scale first, so that nothing is lost to it. A scale of all an output's
inputs is coarse for 4 bits; checkpoints of 8 bits (W8A8) and KTransformers' AMXINT4 have it.
Integers of 8 bits are exact in bfloat16: with bf16 activations the products are those of the
dequantized weights.
"""

from __future__ import annotations

import torch

from ..errors import PykernelsError
from .activations import GROUPS
from .channel import ChannelScales, channel_scale
from .format import Format, Weight, check_finite, check_held
from .layout import K_BLOCK, N_BLOCK, pack_columns, pack_fours, unpack_columns, unpack_fours


class Integer(Format):
    """Group-wise symmetric integers.

    Args:
        name: as on the command line.
        bits: 8 or 4.
        group: inputs of one scale, one of ``groups``.
    """

    groups: tuple[int, ...] = (32, K_BLOCK)

    dtype = torch.int8
    scale_dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
    int8_kind = "q8"

    def __init__(self, name: str, bits: int, group: int) -> None:
        if bits not in (4, 8) or group not in self.groups:
            raise PykernelsError(
                f"int{bits} in groups of {group}", "Use 4 or 8 bits, group 32 or 128"
            )
        self.name, self.bits, self.group = name, bits, group
        self.low, self.high = (-127, 127) if bits == 8 else (-8, 7)
        self.error = (
            f"half a step: group amax / {self.high} / 2 * (1 + 2**-7), since the step is rounded"
            " up to bfloat16 (codes to nearest even), and 2**-134 (bfloat16 scales)"
        )

    def _quantize(self, matrix: torch.Tensor) -> Weight:
        N, K = matrix.shape
        groups = -(-K // self.group)
        whole = torch.zeros(N, groups * self.group, dtype=torch.float32, device="cpu")
        whole[:, :K] = matrix
        amax = whole.view(N, groups, self.group).abs().amax(dim=2)
        check_finite(amax, self.name)
        # Rounded up to bfloat16, so that amax still fits.
        exact = channel_scale(amax, self.high)
        scale = exact.to(torch.bfloat16)
        scale = torch.where(scale.float() < exact, _next_up(scale), scale)
        check_held(torch.round(amax / scale.float()) * scale.float(), amax, self.name)
        q = torch.round(matrix.float() / self._expand(scale, K)).clamp(self.low, self.high)
        return Weight(q.to(torch.int8), scale)

    def dequantize(self, weight: Weight) -> torch.Tensor:
        assert weight.scale is not None
        return weight.data.float() * self._expand(weight.scale, weight.data.shape[1])

    def scale_shape(self, N: int, K: int) -> tuple[int, int] | None:
        return N, -(-K // self.group)

    def scale_bytes(self, K: int) -> int:
        """bfloat16 [groups, 32 outputs] of a block."""
        return self.padded_k(K) // self.group * N_BLOCK * 2

    def check(self, weight: Weight, N: int, K: int, name: str = "weight") -> None:
        super().check(weight, N, K, name)
        low, high = int(weight.data.min()), int(weight.data.max())
        if low < self.low or high > self.high:
            raise PykernelsError(
                f"{name} holds {low} .. {high}, {self.name} takes {self.low} .. {self.high}",
                "Quantize it symmetrically",
            )

    def pack_data(self, data: torch.Tensor, blocks: torch.Tensor) -> None:
        pack_fours(data, blocks, self.bits)

    def unpack_data(self, blocks: torch.Tensor, N: int, K: int) -> torch.Tensor:
        codes = unpack_fours(blocks, N, K, self.bits).view(torch.int8)
        return codes if self.bits == 8 else (codes ^ 8) - 8  # 4 bits with their sign extended

    def pack_scales(self, scale: torch.Tensor, scales: torch.Tensor) -> None:
        pack_columns(scale, scales.view(torch.bfloat16).unflatten(1, (-1, N_BLOCK)))

    def unpack_scales(self, scales: torch.Tensor, N: int, K: int) -> torch.Tensor:
        columns = scales.view(torch.bfloat16).unflatten(1, (-1, N_BLOCK))
        return unpack_columns(columns, N, -(-K // self.group))

    def _expand(self, scale: torch.Tensor, K: int) -> torch.Tensor:
        return scale.float().repeat_interleave(self.group, dim=1)[:, :K]


class IntegerChannel(ChannelScales, Integer):
    """Symmetric integers with one float32 scale an output, all codes used: llm-compressor's W8A8.

    Nothing is folded but the scales of int8 activations, so these have large groups: ``q8_k``. K is
    padded to whole ones.
    """

    groups = (0,)  # all of an output's inputs
    int8_kind = "q8_k"
    k_block = GROUPS["q8_k"]

    def __init__(self, name: str, bits: int) -> None:
        super().__init__(name, bits, 0)
        self.low = -self.high - 1
        self.steps = self.high + 0.5  # of the largest magnitude, on either side of zero
        self.error = (
            f"half a step: output amax / {self.steps} / 2 (codes to nearest even), and"
            f" 2**{bits - 151} (float32 scales)"
        )

    def _quantize(self, matrix: torch.Tensor) -> Weight:
        amax = matrix.float().abs().amax(1, keepdim=True)
        check_finite(amax, self.name)
        scale = channel_scale(amax, self.steps)
        check_held(torch.round(amax / scale) * scale, amax, self.name)
        q = torch.round(matrix.float() / scale).clamp(self.low, self.high)
        return Weight(q.to(torch.int8), scale)

    def _expand(self, scale: torch.Tensor, K: int) -> torch.Tensor:
        return scale.float()


def _next_up(x: torch.Tensor) -> torch.Tensor:
    """The next larger bfloat16 of positive ones."""
    return (x.view(torch.int16) + 1).view(torch.bfloat16)
