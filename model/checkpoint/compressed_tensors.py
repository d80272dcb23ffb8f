"""Checkpoints of compressed-tensors (llm-compressor): what of them is read, and their int4 words.

Read are weights in 4-bit integers, symmetric, in groups of 32 or 128 inputs (format
"pack-quantized": Kimi-K2-Thinking's) or with a scale an output, in 8-bit integers with scales an
output or a tensor ("int-quantized", W8A8), and in E4M3 with scales a tensor, an output or a
128 x 128 block ("float-quantized"). How a checkpoint rounds activations is not imitated: they stay
bf16 unless the caller asks for int8 ones.

Which modules are quantized is told by their tensors, not by the lists of the config, nor by its
``quantization_status``: writers left "frozen" (calibrated) in configs of codes and of words.

===========================  ==================================================================
``X.weight_packed``          int32 [N, ceil(K / 8)]: input ``8 i + j`` in bits 4 j .. 4 j + 3 of
                             word i, 8 added
``X.weight_scale``           bfloat16 or float16 [N, ceil(K / group)], or float [N, 1]
``X.weight_shape``           integers [2]: N, K
``X.weight`` F8_E4M3         with ``X.weight_scale`` float [N, 1], [1] or [N / 128, K / 128]
``X.weight`` I8              with ``X.weight_scale`` float [N, 1] or [1]
``X.input_scale``            of static activations; left aside
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

IGNORED = r"\.input_scale$"
HINT = (
    "Get the checkpoint in bf16, in FP8 with 128x128 blocks as DeepSeek's are, or in "
    "compressed-tensors' symmetric int4 (groups of 32 or 128, or a scale an output), int8 or FP8"
)

_ORDERS = (None, False, "weight", "static")
"""``actorder``: "group" permutes the inputs; "weight" (or "static") only chose how to round."""

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
}


def check_config(config: dict[str, Any], folder: Path) -> None:
    """Raises `PykernelsError` for a `quantization_config` of compressed-tensors we cannot read."""

    def need(key: str, value: Any, accepted: tuple[Any, ...]) -> None:
        if value not in accepted:
            raise PykernelsError(
                f"{folder} is quantized by compressed-tensors with {key} {value!r}, which cannot "
                "be read",
                HINT,
            )

    need("quantization_status", config.get("quantization_status"), ("compressed", "frozen", None))
    need("kv_cache_scheme", config.get("kv_cache_scheme"), (None, {}))
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
        if weights["strategy"] == "block":
            need("block_structure", weights.get("block_structure"), ([128, 128],))


def unpack_int4(words: torch.Tensor, K: int) -> torch.Tensor:
    """int32 [N, ceil(K / 8)] -> int8 [N, K], values -8 .. 7."""
    # Little endian: a byte's low nibble comes first. Wide, in place: an expert is 15 million codes.
    pairs = words.contiguous().view(torch.uint8).to(torch.int16)
    pairs.bitwise_or_(pairs << 4).bitwise_and_(0x0F0F)
    return pairs.view(torch.int8)[:, :K].sub_(8)


def as_q8_0(codes: torch.Tensor, scale: torch.Tensor, name: str) -> Weight:
    """Codes of 4 bits with float16 scales of groups, as a `Weight` in q8_0: the same numbers.

    The integers of this house have bfloat16 scales, which cannot hold float16's 11 bits; ggml's
    blocks of 32 bytes and a float16 scale can, and a group is whole blocks.

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
    parts = halves.contiguous().view(torch.uint8).view(N, blocks, 2), codes.view(N, blocks, 32)
    return Weight(torch.cat([part.view(torch.uint8) for part in parts], dim=2).view(N, -1))
