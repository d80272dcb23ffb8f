"""Matrices as DeepSeek and compressed-tensors store them, written value by value; see `tiny`."""

from __future__ import annotations

import math
from typing import Any

import torch

INT4 = {"int4": 32, "int4-g128": 128, "int4-channel": None}
"""Schemes of 4-bit integers, and their group sizes."""
INT8 = {"int8-channel": "channel", "int8-tensor": "tensor"}
"""Schemes of 8-bit integers, and the strategies of their scales."""
BLOCK = 128


def config(scheme: str) -> dict[str, Any]:
    """A `quantization_config` as DeepSeek and llm-compressor write it."""
    if scheme == "deepseek":
        return {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        }  # fmt: skip
    weights: dict[str, Any] = {
        "actorder": None, "block_structure": None, "dynamic": False, "group_size": None,
        "observer": "minmax", "observer_kwargs": {}, "symmetric": True,
    }  # fmt: skip
    inputs: dict[str, Any] | None = {"num_bits": 8, "strategy": "token", "dynamic": True}
    if scheme in INT4:
        fmt, inputs = "pack-quantized", None
        weights |= {"num_bits": 4, "type": "int", "group_size": INT4[scheme]}
        weights["strategy"] = "group" if INT4[scheme] else "channel"
    elif scheme in INT8:
        fmt = "int-quantized"
        weights |= {"num_bits": 8, "type": "int", "strategy": INT8[scheme]}
    else:
        fmt = "float-quantized"
        weights |= {"num_bits": 8, "type": "float", "strategy": scheme}
        weights["block_structure"] = [BLOCK, BLOCK] if scheme == "block" else None
    group = {"input_activations": inputs, "targets": ["Linear"], "weights": weights}
    return {
        "config_groups": {"group_0": group}, "format": fmt, "kv_cache_scheme": None,
        "ignore": ["lm_head", "re:.*mlp.gate$"], "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }  # fmt: skip


def blocks(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 with a scale a block, block by block."""
    N, K = matrix.shape
    codes = torch.empty(N, K, dtype=torch.float8_e4m3fn)
    scale = torch.empty(math.ceil(N / BLOCK), math.ceil(K / BLOCK))
    for i, j in torch.cartesian_prod(*(torch.arange(n) for n in scale.shape)).tolist():
        where = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
        scale[i, j] = matrix[where].abs().max() / 448
        codes[where] = (matrix[where] / scale[i, j]).to(torch.float8_e4m3fn)
    return codes, scale


def quantize(key: str, matrix: torch.Tensor, scheme: str) -> dict[str, torch.Tensor]:
    """The tensors of a matrix [N, K] called `key`; plain bfloat16 where groups do not fit."""
    N, K = matrix.shape
    if scheme in INT4:
        group = INT4[scheme] or K
        if K % group:
            return {key: matrix.to(torch.bfloat16)}
        groups = matrix.view(N, K // group, group)
        scale = (groups.abs().amax(2) / 7.5).to(torch.bfloat16)
        codes = (groups / scale.float()[..., None]).round().clamp(-8, 7).to(torch.int64).view(N, K)
        words = torch.zeros(N, K // 8, dtype=torch.int64)
        for j in range(8):
            words |= (codes[:, j::8] + 8) << 4 * j
        words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
        shape = torch.tensor([N, K])
        return {f"{key}_packed": words, f"{key}_scale": scale, f"{key}_shape": shape}
    if scheme in INT8:  # as llm-compressor rounds: 255 steps, of which the lowest is -128
        channel = INT8[scheme] == "channel"
        amax = matrix.abs().amax(1, keepdim=True) if channel else matrix.abs().max().view(1)
        scale = (amax / 127.5).to(torch.bfloat16)
        codes = (matrix / scale.float()).round().clamp(-128, 127).to(torch.int8)
        return {key: codes, f"{key}_scale": scale}
    if scheme in ("deepseek", "block"):
        codes, scale = blocks(matrix)
        if scheme == "deepseek":
            return {key: codes, f"{key}_scale_inv": scale}
    else:
        amax = matrix.abs().amax(1, keepdim=True) if scheme == "channel" else matrix.abs().max()
        scale = amax.view(-1, 1) / 448 if scheme == "channel" else amax.view(1) / 448
        codes = (matrix / scale).to(torch.float8_e4m3fn)
    tensors = {key: codes, f"{key}_scale": scale.to(torch.bfloat16).float()}
    if scheme == "tensor":  # as checkpoints with static activations have it
        tensors[f"{key.removesuffix('.weight')}.input_scale"] = torch.ones(1)
    return tensors


def value_of(stored: dict[str, torch.Tensor], key: str) -> torch.Tensor:
    """What the tensors of a matrix stand for, in float32 [N, K]."""
    scale = stored.get(f"{key}_scale", stored.get(f"{key}_scale_inv"))
    if scale is None:
        return stored[key].float()
    if f"{key}_packed" in stored:
        N, K = stored[f"{key}_shape"].tolist()
        words = stored[f"{key}_packed"].long()
        codes = torch.stack([(words >> 4 * j & 15) - 8 for j in range(8)], dim=2).view(N, K)
        return codes.float() * scale.float().repeat_interleave(K // scale.shape[1], dim=1)
    codes = stored[key]
    if scale.shape == (math.ceil(codes.shape[0] / BLOCK), math.ceil(codes.shape[1] / BLOCK)):
        scale = scale.repeat_interleave(BLOCK, 0)[: codes.shape[0]]
        scale = scale.repeat_interleave(BLOCK, 1)[:, : codes.shape[1]]
    return codes.float() * scale
