"""NVFP4 as compressed-tensors ("nvfp4-pack-quantized") and NVIDIA's ModelOpt store it.

=============================  ===================================================================
``X.weight_packed``, or        uint8 [N, K / 2]: two E2M1 codes a byte, the first input lowest; the
ModelOpt's ``X.weight``        first name is compressed-tensors'
``X.weight_scale``             float8_e4m3fn [N, K / 16]
``X.weight_global_scale``      float32 [1]: compressed-tensors' second scale, which divides
``X.weight_scale_2``           float32 []: ModelOpt's, which multiplies
``X.input_scale``, ...         of activations in NVFP4; ignored
=============================  ===================================================================

ModelOpt's first checkpoints say what they are in ``hf_quant_config.json`` alone, which is not read:
a matrix is in NVFP4 if its tensors are. Source: ``compressors/nvfp4`` of
github.com/vllm-project/compressed-tensors, ``export/quant_utils.py`` of NVIDIA/Model-Optimizer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pykernels.errors import PykernelsError
from pykernels.quant import Weight
from pykernels.quant.nvfp4 import GROUP, NVFP4

from ..tensors.matrix import Lookup, Matrix
from ..tensors.safetensors import Checkpoint

DIVIDES = "divides"
"""``Matrix.layout`` where the second scale divides."""


def check_config(config: dict[str, Any], folder: Path) -> None:
    """Raise `PykernelsError` for a `quantization_config` of ModelOpt that is not read."""
    algorithm = config.get("quant_algo")
    if algorithm != "NVFP4":
        raise PykernelsError(
            f"{folder} is quantized by ModelOpt with quant_algo {algorithm!r}, which cannot be"
            " read",
            "Get it in NVFP4, in bf16, or in FP8 with 128x128 blocks",
        )


def find(names: Lookup, key: str, shape: tuple[int, ...]) -> Matrix | None:
    """The matrix [N, K] stored as ``key`` or ``key_packed``; None if a part is missing (noted).

    Raises:
        PykernelsError: a part of another shape or dtype.
    """
    packed = f"{key}_packed" in names.stored
    data = names.companion(key, "_packed" if packed else "")
    scale = names.companion(key, "_scale")
    whole = names.companion(key, "_global_scale" if packed else "_scale_2")
    if data is None or scale is None or whole is None:
        return None
    N, K = shape if len(shape) == 2 else (0, 0)
    needed = {
        data: ("U8", ((N, K // 2),)),
        scale: ("F8_E4M3", ((N, K // GROUP),)),
        whole: ("F32", ((1,), ())),
    }
    for part, (dtype, shapes) in needed.items():
        info = names.checkpoint.tensors[part.name]
        if not N or K % GROUP or info.dtype != dtype or info.shape not in shapes:
            raise PykernelsError(
                f"{part.name} is {info.dtype} {list(info.shape)}, the model's {list(shape)} in"
                f" NVFP4 needs {dtype} {list(shapes[0])}",
                names.checkpoint.mismatch,
            )
    return Matrix(data, shape, scale, "nvfp4", whole=whole, layout=DIVIDES if packed else "")


def read(checkpoint: Checkpoint, source: Matrix) -> Weight:
    """A matrix of ``find``'s as a `Weight`: the file's codes and scales, a code a byte."""
    assert source.scale is not None and source.whole is not None
    both, scale = checkpoint.read(source.data), checkpoint.read(source.scale)
    whole = checkpoint.read(source.whole).flatten()[0]
    codes = torch.stack((both & 15, both >> 4), dim=2).view(len(both), -1)
    return NVFP4.join(codes, scale, 1 / whole if source.layout == DIVIDES else whole)
