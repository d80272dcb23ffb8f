"""FP8 weights as DeepSeek-V3 stores them: E4M3 codes and one float32 scale per 128x128 block.

Source: DeepSeek-V3's `inference/kernel.py` (`weight_quant`, `weight_dequant`) and section 3.3 of
its report: scale = amax / 448, weight = code * scale (the checkpoint says `weight_scale_inv`).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .architecture import FP8_BLOCK

E4M3_MAX = 448.0


def quantize_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize float matrices [..., N, K].

    Returns the codes, float8_e4m3fn [..., N, K], never NaN, and the scales, float32
    [..., ceil(N/128), ceil(K/128)]; a block of zeros has scale 1. Edge blocks may be smaller.
    """
    *lead, rows, columns = weight.shape
    pad_rows, pad_columns = -rows % FP8_BLOCK, -columns % FP8_BLOCK
    padded = F.pad(weight.float(), (0, pad_columns, 0, pad_rows))
    blocks = padded.unflatten(-1, (-1, FP8_BLOCK)).unflatten(-3, (-1, FP8_BLOCK))
    # [..., row block, row, column block, column]
    amax = blocks.abs().amax(dim=(-3, -1))
    scale = torch.where(amax > 0, amax / E4M3_MAX, 1.0)
    scaled = weight.float() / _spread(scale, rows, columns)
    return scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


def dequantize_blocks(codes: Tensor, scale: Tensor) -> Tensor:
    """The float32 matrices [..., N, K] that `codes` and `scale` stand for."""
    return codes.float() * _spread(scale, codes.shape[-2], codes.shape[-1])


def fake_quantize(weight: Tensor) -> Tensor:
    """`weight` rounded to what its FP8 form can hold, as float32 of the same shape."""
    return dequantize_blocks(*quantize_blocks(weight))


def _spread(scale: Tensor, rows: int, columns: int) -> Tensor:
    wide = scale.repeat_interleave(FP8_BLOCK, dim=-2).repeat_interleave(FP8_BLOCK, dim=-1)
    return wide[..., :rows, :columns]
