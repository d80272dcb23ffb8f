"""ggml's types of tensors: the format in `pykernels.quant` that takes each as it is stored."""

from __future__ import annotations

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from pykernels.errors import PykernelsError
from pykernels.quant import FORMATS, Weight, get_format
from pykernels.quant.nvfp4 import NVFP4

FORMAT_OF = {
    kind: kind.lower()
    for kind in (
        "Q4_0",
        "Q4_1",
        "Q5_0",
        "Q5_1",
        "Q8_0",
        "Q2_K",
        "Q3_K",
        "Q4_K",
        "Q5_K",
        "Q6_K",
        "IQ4_NL",
        "IQ4_XS",
        "IQ3_S",
        "IQ3_XXS",
        "IQ2_S",
        "IQ2_XS",
        "IQ2_XXS",
        "IQ1_S",
        "IQ1_M",
        "TQ1_0",
        "TQ2_0",
        "Q1_0",
        "Q2_0",
        "MXFP4",
        "NVFP4",
        "F16",
    )
}
"""Formats by ggml's names; F32 and BF16 are floats, and so is F16 where it is no matrix."""

NAME_OF = {kind.value: kind.name for kind in GGMLQuantizationType} | {42: "Q2_0"}
"""ggml's names of types by their numbers in a file; the package `gguf` does not know all yet."""

BLOCK_OF = {kind.name: sizes for kind, sizes in GGML_QUANT_SIZES.items()} | {
    "Q1_0": (128, 18),
    "Q2_0": (64, 18),
}
"""By name, the numbers of a block and its bytes."""

MXFP4_BLOCK = 32
"""Inputs of a scale."""


def format_of(kind: str, name: str) -> str:
    """The format of a tensor `name` of that type. Raises `PykernelsError` if there is none."""
    fmt = FORMAT_OF.get(kind)
    if fmt is None or fmt not in FORMATS:
        known = ", ".join(k for k, f in FORMAT_OF.items() if f in FORMATS)
        raise PykernelsError(
            f"{name} is {kind}, for which there is no kernel", f"Get the model in one of {known}"
        )
    return fmt


def as_weight(
    rows: torch.Tensor, fmt: str, N: int, K: int, whole: torch.Tensor | None = None
) -> Weight:
    """The matrix [N, K] of rows as `GGUF.read` gives them: uint8 [N, row bytes], or floats.

    `whole`: NVFP4's second scale, a float32; None for 1.

    Raises `PykernelsError` for scales that are NaN or infinite.
    """
    if fmt == "nvfp4":
        return _nvfp4(
            rows, N, K, torch.ones(1, dtype=torch.float32, device="cpu") if whole is None else whole
        )
    if fmt == "mxfp4":
        return _mxfp4(rows, N, K)
    if fmt == "f16":
        return Weight(rows)
    weight: Weight = get_format(fmt).from_gguf(rows, N, K)  # type: ignore[attr-defined]
    return weight


def _mxfp4(rows: torch.Tensor, N: int, K: int) -> Weight:
    """Blocks of a scale (E8M0) and 32 codes, input i in the low half of byte i, i + 16 in the high
    half -> the same codes a byte each, and the scales."""
    blocks = rows.view(N, K // MXFP4_BLOCK, 1 + MXFP4_BLOCK // 2)
    codes = torch.cat([blocks[..., 1:] & 15, blocks[..., 1:] >> 4], dim=2)
    return Weight(codes.view(N, K), blocks[..., 0].contiguous())


def _nvfp4(rows: torch.Tensor, N: int, K: int, whole: torch.Tensor) -> Weight:
    """Blocks of 4 scales (E4M3, of which 0x7F is 0) and 64 codes: of each 16, input i in the low
    half of byte i, i + 8 in the high half."""
    blocks = rows.view(N, K // 64, 4 + 32)
    both = blocks[..., 4:].reshape(N, K // 16, 8)
    codes = torch.cat([both & 15, both >> 4], dim=2)
    scale = blocks[..., :4].reshape(N, K // 16)
    return NVFP4.join(codes.view(N, K), torch.where(scale == 0x7F, 0, scale), whole)
