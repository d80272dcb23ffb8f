"""Matrices as DeepSeek, compressed-tensors, AWQ and GPTQ store them, value by value; see `tiny`."""

from __future__ import annotations

import math
from typing import Any

import torch

INT4 = {"int4": 32, "int4-g128": 128, "int4-channel": None}
"""Schemes of 4-bit integers, and their group sizes."""
INT8 = {"int8-channel": "channel", "int8-tensor": "tensor"}
"""Schemes of 8-bit integers, and the strategies of their scales."""
NVFP4 = ("nvfp4", "modelopt")
"""Schemes of E2M1 with two scales: compressed-tensors' and ModelOpt's."""
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
ZEROS = {"awq": 128, "awq-g64": 64, "gptq": 32, "gptq-g128": 128, "gptq_v2": 64}
"""Schemes of 4-bit integers with zero points, and their group sizes."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which output of eight the bits 4 i of an AWQ word hold."""
IN_ORDER = tuple(range(8))
BLOCK = 128


def config(scheme: str) -> dict[str, Any]:
    """A `quantization_config` as DeepSeek and llm-compressor write it."""
    if scheme == "deepseek":
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        }
    if scheme == "modelopt":
        group = {"weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}}
        groups = {"group_0": group | {"targets": ["Linear"]}}
        return {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": groups}
    if scheme in ZEROS:
        found: dict[str, Any] = {"bits": 4, "group_size": ZEROS[scheme]}
        if scheme.startswith("awq"):
            return found | {"quant_method": "awq", "version": "gemm", "zero_point": True}
        kind = "gptq_v2" if scheme == "gptq_v2" else "gptq"
        found |= {"quant_method": "gptq", "checkpoint_format": kind, "desc_act": False}
        return found | {"sym": False, "true_sequential": True, "damp_percent": 0.01}
    weights: dict[str, Any] = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": None,
        "observer": "minmax",
        "observer_kwargs": {},
        "symmetric": True,
    }
    inputs: dict[str, Any] | None = {"num_bits": 8, "strategy": "token", "dynamic": True}
    if scheme in INT4:
        fmt, inputs = "pack-quantized", None
        weights |= {"num_bits": 4, "type": "int", "group_size": INT4[scheme]}
        weights["strategy"] = "group" if INT4[scheme] else "channel"
    elif scheme == "nvfp4":
        fmt = "nvfp4-pack-quantized"
        weights |= {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    elif scheme in INT8:
        fmt = "int-quantized"
        weights |= {"num_bits": 8, "type": "int", "strategy": INT8[scheme]}
    else:
        fmt = "float-quantized"
        weights |= {"num_bits": 8, "type": "float", "strategy": scheme}
        weights["block_structure"] = [BLOCK, BLOCK] if scheme == "block" else None
    group = {"input_activations": inputs, "targets": ["Linear"], "weights": weights}
    return {
        "config_groups": {"group_0": group},
        "format": fmt,
        "kv_cache_scheme": None,
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


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


def words(codes: torch.Tensor, order: tuple[int, ...] = IN_ORDER) -> torch.Tensor:
    """Codes [R, 8 C] of 4 bits -> int32 [R, C]; `order[i]`: which of eight bits 4 i .. hold."""
    eights = codes.to(torch.int64).view(len(codes), -1, 8)
    found = torch.zeros(eights.shape[:2], dtype=torch.int64)
    for i, j in enumerate(order):
        found |= eights[..., j] << 4 * i
    return signed(found)


def signed(found: torch.Tensor) -> torch.Tensor:
    """The lowest 32 bits of an int64, as int32."""
    found = found & (1 << 32) - 1
    return torch.where(found >= 1 << 31, found - (1 << 32), found).to(torch.int32)


def codes(found: torch.Tensor, order: tuple[int, ...] = IN_ORDER) -> torch.Tensor:
    """The inverse of `words`."""
    nibbles = torch.stack([found.long() >> 4 * i & 15 for i in range(8)], dim=2)
    eights = torch.empty_like(nibbles)
    eights[..., list(order)] = nibbles
    return eights.view(len(found), -1)


def less(scheme: str) -> int:
    """What GPTQModel subtracts of each word of a scheme's zero points, and adds to read it."""
    return 0x11111111 if scheme.startswith("gptq") and scheme != "gptq_v2" else 0


def zero_points(base: str, matrix: torch.Tensor, scheme: str) -> dict[str, torch.Tensor]:
    """AWQ's or GPTQ's tensors of a linear called `base`: a first group of outputs with the zero
    points 0 to 15 in turns, the others with those that fit."""
    (N, K), group = matrix.shape, ZEROS[scheme]
    groups = matrix.view(N, K // group, group)
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scale = ((high - low) / 15).half()
    zero = (-low / scale.float()).round().clamp(0, 15)
    zero[:, 0] = torch.arange(N) % 16
    q = (groups / scale.float()[..., None]).round() + zero[..., None]
    q = q.clamp(0, 15).view(N, K)
    tensors = {f"{base}.scales": scale.T.contiguous()}
    if scheme.startswith("awq"):
        tensors[f"{base}.qzeros"] = words(zero.T, AWQ_ORDER)
        return tensors | {f"{base}.qweight": words(q.T, AWQ_ORDER)}
    tensors[f"{base}.qzeros"] = signed(words(zero.T).long() - less(scheme))
    tensors[f"{base}.g_idx"] = (torch.arange(K) // group).to(torch.int32)
    return tensors | {f"{base}.qweight": words(q).T.contiguous()}


def zero_point_value(stored: dict[str, torch.Tensor], base: str, scheme: str) -> torch.Tensor:
    """What they stand for, in float32 [N, K]."""
    scale, q = stored[f"{base}.scales"].float(), stored[f"{base}.qweight"]
    order = AWQ_ORDER if scheme.startswith("awq") else IN_ORDER
    zero = codes(stored[f"{base}.qzeros"].long() + less(scheme), order)  # [groups, N]
    of_inputs = codes(q, order) if scheme.startswith("awq") else codes(q.T).T  # [K, N]
    each = len(of_inputs) // len(scale)
    step, middle = (part.repeat_interleave(each, dim=0) for part in (scale, zero))
    return (step * (of_inputs - middle)).T


def nvfp4(key: str, matrix: torch.Tensor, scheme: str) -> dict[str, torch.Tensor]:
    """The tensors of a matrix in NVFP4; the second scale is a power of two, and so has an exact
    inverse."""
    (N, K), layer = matrix.shape, key.removesuffix(".weight")
    groups = matrix.view(N, K // 16, 16)
    whole = torch.exp2((matrix.abs().max() / 6 / 448).log2().ceil())
    scale = (groups.abs().amax(2) / 6 / whole).to(torch.float8_e4m3fn)
    steps = groups / (scale.float() * whole).clamp(min=1e-9)[..., None]
    code = (steps.abs()[..., None] - E2M1).abs().argmin(-1) + 8 * (steps < 0)
    pairs = code.view(N, K // 2, 2).to(torch.uint8)
    packed = pairs[..., 0] | pairs[..., 1] << 4
    if scheme == "modelopt":
        tensors = {key: packed, f"{key}_scale": scale, f"{key}_scale_2": whole}
        return tensors | {f"{layer}.input_scale": torch.tensor(1.0)}
    tensors = {f"{key}_packed": packed, f"{key}_scale": scale}
    tensors[f"{key}_global_scale"] = 1 / whole.view(1)
    return tensors | {f"{layer}.input_global_scale": torch.ones(1)}


def nvfp4_value(stored: dict[str, torch.Tensor], key: str) -> torch.Tensor:
    """What they stand for, in float32 [N, K]."""
    packed = stored.get(f"{key}_packed", stored.get(key))
    assert packed is not None
    code = torch.stack((packed & 15, packed >> 4), dim=2).flatten(1).long()
    value = E2M1[code & 7] * torch.where(code > 7, -1, 1)
    scale = stored[f"{key}_scale"].float()
    divided = stored.get(f"{key}_global_scale")
    scale = scale * stored[f"{key}_scale_2"] if divided is None else scale / divided
    return value * scale.repeat_interleave(16, dim=1)


def holds(stored: dict[str, torch.Tensor], key: str) -> bool:
    """Whether a matrix called `key` is there, in whatever form."""
    return any(name in stored for name in (key, f"{key}_packed", _qweight(key)))


def _qweight(key: str) -> str:
    return f"{key.removesuffix('.weight')}.qweight"


def quantize(key: str, matrix: torch.Tensor, scheme: str) -> dict[str, torch.Tensor]:
    """The tensors of a matrix [N, K] called `key`; plain bfloat16 where groups do not fit."""
    N, K = matrix.shape
    if scheme in ZEROS:
        if K % ZEROS[scheme] or N % 8:
            return {key: matrix.to(torch.bfloat16)}
        return zero_points(key.removesuffix(".weight"), matrix, scheme)
    if scheme in INT4:
        group = INT4[scheme] or K
        if K % group:
            return {key: matrix.to(torch.bfloat16)}
        groups = matrix.view(N, K // group, group)
        scale = (groups.abs().amax(2) / 7.5).to(torch.bfloat16)
        q = (groups / scale.float()[..., None]).round().clamp(-8, 7).view(N, K)
        shape = torch.tensor([N, K])
        return {f"{key}_packed": words(q + 8), f"{key}_scale": scale, f"{key}_shape": shape}
    if scheme in NVFP4:
        return {key: matrix.to(torch.bfloat16)} if K % 16 else nvfp4(key, matrix, scheme)
    if scheme in INT8:  # as llm-compressor rounds: 255 steps, of which the lowest is -128
        channel = INT8[scheme] == "channel"
        amax = matrix.abs().amax(1, keepdim=True) if channel else matrix.abs().max().view(1)
        scale = (amax / 127.5).to(torch.bfloat16)
        q = (matrix / scale.float()).round().clamp(-128, 127).to(torch.int8)
        return {key: q, f"{key}_scale": scale}
    if scheme in ("deepseek", "block"):
        q, scale = blocks(matrix)
        if scheme == "deepseek":
            return {key: q, f"{key}_scale_inv": scale}
    else:
        amax = matrix.abs().amax(1, keepdim=True) if scheme == "channel" else matrix.abs().max()
        scale = amax.view(-1, 1) / 448 if scheme == "channel" else amax.view(1) / 448
        q = (matrix / scale).to(torch.float8_e4m3fn)
    tensors = {key: q, f"{key}_scale": scale.to(torch.bfloat16).float()}
    if scheme == "tensor":  # as checkpoints with static activations have it
        tensors[f"{key.removesuffix('.weight')}.input_scale"] = torch.ones(1)
    return tensors


def value_of(stored: dict[str, torch.Tensor], key: str, scheme: str | None = None) -> torch.Tensor:
    """What the tensors of a matrix stand for, in float32 [N, K]; one of `ZEROS` must be told."""
    if scheme and _qweight(key) in stored:
        return zero_point_value(stored, key.removesuffix(".weight"), scheme)
    scale = stored.get(f"{key}_scale", stored.get(f"{key}_scale_inv"))
    if scale is None:
        return stored[key].float()
    if any(f"{key}_{second}" in stored for second in ("scale_2", "global_scale")):
        return nvfp4_value(stored, key)
    if f"{key}_packed" in stored:
        N, K = stored[f"{key}_shape"].tolist()
        q = codes(stored[f"{key}_packed"])[:, :K] - 8
        return q.float() * scale.float().repeat_interleave(K // scale.shape[1], dim=1)
    q = stored[key]
    if scale.shape == (math.ceil(q.shape[0] / BLOCK), math.ceil(q.shape[1] / BLOCK)):
        scale = scale.repeat_interleave(BLOCK, 0)[: q.shape[0]]
        scale = scale.repeat_interleave(BLOCK, 1)[:, : q.shape[1]]
    return q.float() * scale
