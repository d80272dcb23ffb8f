"""MXFP4 as gpt-oss stores it: the experts of a layer in one tensor, gate and up rows in turns.

============================  ====================================================================
``X.gate_up_proj_blocks``     uint8 [E, 2 I, H / 32, 16]: two codes a byte, the first input lowest;
                              rows 2 i are gate's, 2 i + 1 up's
``X.gate_up_proj_scales``     uint8 [E, 2 I, H / 32], E8M0
``X.down_proj_blocks``, ...   uint8 [E, H, I / 32, 16], [E, H, I / 32]
============================  ====================================================================

Source: transformers, ``integrations/mxfp4.py`` (``convert_moe_packed_tensors``), and its gpt_oss.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pykernels.errors import PykernelsError
from pykernels.quant import Weight

from ..tensors.matrix import Lookup, Matrix
from ..tensors.safetensors import Checkpoint, TensorSlice

GROUP = 32


def check_config(config: dict[str, Any], folder: Path) -> None:
    """Accept a `quantization_config` of quant_method "mxfp4": all it says beside is what is not."""


def find(
    names: Lookup,
    block: str,
    E: int,
    H: int,
    I: int,  # noqa: E741
) -> list[tuple[Matrix, Matrix, Matrix]]:
    """(gate, up, down) of each expert stored as ``block.gate_up_proj_blocks``; [] if a part is
    missing (noted).

    Raises:
        PykernelsError: a part of another shape or dtype.
    """
    gate_up = _find(names, f"{block}.gate_up_proj", E, 2 * I, H)
    down = _find(names, f"{block}.down_proj", E, H, I)
    if gate_up is None or down is None:
        return []

    def matrix(
        parts: tuple[TensorSlice, TensorSlice], e: int, N: int, K: int, pick: int | None
    ) -> Matrix:
        data, scale = (TensorSlice(part.name, e) for part in parts)
        return Matrix(data, (N, K), scale, "mxfp4", pick=pick)

    return [
        (matrix(gate_up, e, I, H, 0), matrix(gate_up, e, I, H, 1), matrix(down, e, H, I, None))
        for e in range(E)
    ]


def _find(
    names: Lookup, key: str, E: int, N: int, K: int
) -> tuple[TensorSlice, TensorSlice] | None:
    data, scale = names.companion(key, "_blocks"), names.companion(key, "_scales")
    if data is None or scale is None:
        return None
    groups = K // GROUP
    for part, shape in ((data, (E, N, groups, GROUP // 2)), (scale, (E, N, groups))):
        info = names.checkpoint.tensors[part.name]
        if K % GROUP or info.shape != shape or info.dtype != "U8":
            raise PykernelsError(
                f"{part.name} is {info.dtype} {list(info.shape)}, the model's {[E, N, K]} needs U8 "
                f"{list(shape)}",
                names.checkpoint.mismatch,
            )
    return data, scale


def read(checkpoint: Checkpoint, source: Matrix) -> Weight:
    """A matrix of ``find``'s as a `Weight`: the file's codes and scales, a code a byte."""
    assert source.scale is not None
    blocks, scale = checkpoint.read(source.data), checkpoint.read(source.scale)
    if source.pick is not None:
        blocks, scale = blocks[source.pick :: 2], scale[source.pick :: 2]
    codes = torch.stack((blocks & 15, blocks >> 4), dim=3)  # [N, K / 32, 16, 2]
    return Weight(codes.view(len(blocks), -1), scale.contiguous())
