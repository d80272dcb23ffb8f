"""Matrices as compressed-tensors stores them, written value by value; see `tiny`."""

from __future__ import annotations

from typing import Any

import torch

INT4 = {"int4": 32, "int4-g128": 128, "int4-channel": None}
"""Schemes of 4-bit integers, and their group sizes."""
INT8 = {"int8-channel": "channel", "int8-tensor": "tensor"}
"""Schemes of 8-bit integers, and the strategies of their scales."""
FP8 = ("channel", "tensor", "block")
"""Schemes of E4M3, and the strategies of their scales."""


def config(scheme: str) -> dict[str, Any]:
    """A `quantization_config` as llm-compressor writes it (Kimi-K2-Thinking's, for int4)."""
    weights: dict[str, Any] = {
        "actorder": None, "block_structure": None, "dynamic": False, "group_size": None,
        "observer": "minmax", "observer_kwargs": {}, "symmetric": True,
    }  # fmt: skip
    inputs = None
    if scheme in INT4:
        fmt = "pack-quantized"
        weights |= {"num_bits": 4, "type": "int", "group_size": INT4[scheme]}
        weights["strategy"] = "group" if INT4[scheme] else "channel"
    elif scheme in INT8:
        fmt = "int-quantized"
        weights |= {"num_bits": 8, "type": "int", "strategy": INT8[scheme]}
        inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    else:
        fmt = "float-quantized"
        weights |= {"num_bits": 8, "type": "float", "strategy": scheme}
        weights["block_structure"] = [128, 128] if scheme == "block" else None
        inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    return {
        "config_groups": {
            "group_0": {
                "input_activations": inputs, "output_activations": None, "targets": ["Linear"],
                "weights": weights,
            }
        },
        "format": fmt, "ignore": ["lm_head", "re:.*mlp.gate$"], "kv_cache_scheme": None,
        "quant_method": "compressed-tensors", "quantization_status": "compressed",
    }  # fmt: skip


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
    if scheme == "block":
        from .tiny import quantize as blocks

        codes, scale = blocks(matrix)
    else:
        amax = matrix.abs().amax(1, keepdim=True) if scheme == "channel" else matrix.abs().max()
        scale = amax.view(-1, 1) / 448 if scheme == "channel" else amax.view(1) / 448
        codes = (matrix / scale).to(torch.float8_e4m3fn)
    tensors = {key: codes, f"{key}_scale": scale.to(torch.bfloat16).float()}
    if scheme == "tensor":  # as checkpoints with static activations have it
        tensors[f"{key.removesuffix('.weight')}.input_scale"] = torch.ones(1)
    return tensors


def value_of(stored: dict[str, torch.Tensor], key: str) -> torch.Tensor | None:
    """What the tensors of `quantize` stand for, float32 [N, K]; None if they are not there."""
    scale = stored.get(f"{key}_scale")
    if scale is None:
        return None
    if f"{key}_packed" in stored:
        N, K = stored[f"{key}_shape"].tolist()
        words = stored[f"{key}_packed"].long()
        codes = torch.stack([(words >> 4 * j & 15) - 8 for j in range(8)], dim=2).view(N, K)
        return codes.float() * scale.float().repeat_interleave(K // scale.shape[1], dim=1)
    codes = stored[key]
    if scale.shape == (-(-codes.shape[0] // 128), -(-codes.shape[1] // 128)):
        from .tiny import dequantize as blocks

        return blocks(codes, scale)
    return codes.float() * scale
