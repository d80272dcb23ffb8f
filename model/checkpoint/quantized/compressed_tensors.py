"""Checkpoints of compressed-tensors (llm-compressor): which are read, and unpacking of int4.

These weights are read: symmetric 4-bit integers with a scale per group of 32 or 128 inputs (format
"pack-quantized": Kimi-K2-Thinking's) or per output, 8-bit integers with a scale per output or per
tensor ("int-quantized", W8A8), and E4M3 with a scale per tensor, output or 128 x 128 block
("float-quantized"), and NVFP4 ("nvfp4-pack-quantized", see `nvfp4`). The checkpoint's quantization
of activations and of the KV cache is ignored:
activations stay bf16 unless the caller asks for int8, and so does the cache but for FP8.

A module is quantized if its stored tensors are. The lists in the config are not read, nor its
``quantization_status``: some writers leave "frozen" (calibrated) there after they have compressed.

===========================  ==================================================================
``X.weight_packed``          int32 [N, ceil(K / 8)]: input ``8 i + j`` in bits 4 j .. 4 j + 3 of
                             word i, 8 added
``X.weight_scale``           bfloat16 or float16 [N, ceil(K / group)], or float [N, 1]
``X.weight_shape``           integers [2]: N, K
``X.weight`` F8_E4M3         with ``X.weight_scale`` float [N, 1], [1] or [N / 128, K / 128]
``X.weight`` I8              with ``X.weight_scale`` float [N, 1] or [1]
``X.input_scale``, ...       of static activations, ``X.input_zero_point`` too; ignored
``X.k_scale``, ``X.v_scale``  of a `kv_cache_scheme`; ignored
===========================  ==================================================================

Source: github.com/vllm-project/compressed-tensors, ``compressors/pack_quantized`` and
``naive_quantized``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pykernels.errors import PykernelsError
from pykernels.quant import Weight
from pykernels.quant.gguf import Blocks, Blocks32

from .words import unpack_nibbles

IGNORED = {
    r"\.(input|output)_((global_)?scale|zero_point)$": (
        "the checkpoint's static scales of activations are left out: where a rule quantizes"
        " activations, each token has a scale of its own"
    ),
    r"\.[qkv]_(scale|zero_point)$": (
        "the checkpoint's scales for keys and values in FP8 are left out: they are kept in"
        " bfloat16, and with kv_dtype fp8 they have scales of their own"
    ),
}
"""Tensors that are not read, and the note that says so."""
HINT = (
    "Get the checkpoint in bf16, in FP8 with 128x128 blocks as DeepSeek's are, in AWQ, in GPTQ, or "
    "in compressed-tensors' symmetric int4 (groups of 32 or 128, or a scale an output), int8 or FP8"
)

_ORDERS = (None, False, "weight", "static")
"""``actorder``: "group" permutes the inputs; "weight" (or "static") only affects the rounding."""

_WEIGHTS: dict[str, dict[str, tuple[Any, ...]]] = {
    "pack-quantized": {
        "num_bits": (4,),
        "type": ("int", None),
        "symmetric": (True,),
        "strategy": ("group", "channel"),
        "actorder": _ORDERS,
    },
    "int-quantized": {
        "num_bits": (8,),
        "type": ("int", None),
        "symmetric": (True,),
        "strategy": ("channel", "tensor"),
        "actorder": _ORDERS,
    },
    "float-quantized": {
        "num_bits": (8,),
        "type": ("float",),
        "symmetric": (True,),
        "strategy": ("channel", "tensor", "block"),
    },
    "nvfp4-pack-quantized": {
        "num_bits": (4,),
        "type": ("float",),
        "symmetric": (True,),
        "strategy": ("tensor_group",),
    },
}


def check_config(config: dict[str, Any], folder: Path) -> None:
    """Raise `PykernelsError` for a `quantization_config` of compressed-tensors that is not read."""

    def need(key: str, value: Any, accepted: tuple[Any, ...]) -> None:
        if value not in accepted:
            raise PykernelsError(
                f"{folder} is quantized by compressed-tensors with {key} {value!r}, which cannot "
                "be read",
                HINT,
            )

    need("quantization_status", config.get("quantization_status"), ("compressed", "frozen", None))
    need("transform_config", config.get("transform_config"), (None, {}))
    sparsity = config.get("sparsity_config") or {"format": "dense"}
    dense = isinstance(sparsity, dict) and sparsity.get("format") == "dense"
    need("sparsity_config", sparsity, (sparsity,) if dense else ())
    groups = config.get("config_groups")
    need("config_groups", groups, (groups,) if isinstance(groups, dict) and groups else ())
    for group in dict(groups or {}).values():
        need("a group", group, (group,) if isinstance(group, dict) else ())
        fmt = group.get("format") or config.get("format")
        need("format", fmt, tuple(_WEIGHTS))
        weights = group.get("weights") or {}
        need("weights", weights, (weights,) if isinstance(weights, dict) else ())
        for key, accepted in _WEIGHTS[str(fmt)].items():
            need(key, weights.get(key), accepted)
        if weights["strategy"] == "group":
            need("group_size", weights.get("group_size"), (32, 128))
        if weights["strategy"] == "tensor_group":
            need("group_size", weights.get("group_size"), (16,))
        if weights["strategy"] == "block":
            need("block_structure", weights.get("block_structure"), ([128, 128],))


def unpack_int4(words: torch.Tensor, K: int) -> torch.Tensor:
    """int32 [N, ceil(K / 8)] -> int8 [N, K], values -8 .. 7."""
    return unpack_nibbles(words).view(torch.int8)[:, :K].sub_(8)


def as_q4_0(codes: torch.Tensor, scale: torch.Tensor, name: str) -> Weight:
    """int4 with float16 group scales as a `Weight` in q4_0, which stands for the same numbers.

    The int4 formats here have bfloat16 scales, which lack float16's mantissa bits. q4_0 has the
    same codes, with a float16 scale per 32 inputs: a group of 32 or 128 is whole blocks of it.

    Args:
        codes: int8 [N, K], K a multiple of 32.
        scale: float16 [N, ceil(K / group)], groups of 32 or 128.

    Raises:
        PykernelsError: scales that are NaN or infinite.
    """
    if not scale.isfinite().all():
        raise PykernelsError(f"{name} has scales that are NaN or infinite", "Check the checkpoint")
    N, blocks = len(codes), codes.shape[1] // 32
    per_group = 1 if scale.shape[1] == blocks else 4
    halves = scale.repeat_interleave(per_group, dim=1)[:, :blocks]
    bits = codes.view(torch.uint8).view(-1, 32) & 15
    parts = Blocks(bits, halves.reshape(-1, 1), bits[:, :0])
    return Weight(Blocks32(bits=4, minimum=False).join(parts).view(N, -1))
