"""What llama.cpp's converter makes of gated delta nets (``Qwen3NextModel.modify_tensors`` and
``_LinearAttentionVReorderBase`` in its conversion/qwen.py), and the way back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Put = Callable[[torch.Tensor], object]


def changes(name: str) -> bool:
    """Whether a tensor of the model's is one of these, or a norm beside them."""
    return "linear_attn" in name or name.endswith("norm.weight")


def stored(
    name: str, tensor: torch.Tensor, cfg: Any, tiled: bool
) -> list[tuple[str, torch.Tensor, Put]]:
    """(name in the package's table, what is stored, what puts its values back into the model).

    Args:
        tiled: value heads go over the key heads in turns (Qwen3.5).
    """
    if name.endswith("norm.weight") and "linear_attn" not in name:
        return [(name, tensor + 1, lambda v: tensor.copy_(v - 1))]
    if name.endswith("A_log"):
        order = _order(cfg, tiled, 1)
        return [(name, -tensor.exp()[order], lambda v: _put(tensor, order, v.neg().log()))]
    if name.endswith("dt_bias"):
        order = _order(cfg, tiled, 1)
        name = name.replace("dt_bias", "dt_proj.bias")
        return [(name, tensor[order], lambda v: _put(tensor, order, v))]
    if name.endswith("in_proj_qkvz.weight"):
        qkv, z = _of_groups(cfg)
        return [
            (name.replace("qkvz", part), tensor[rows], lambda v, r=rows: _put(tensor, r, v))
            for part, rows in (("qkv", qkv), ("z", z))
        ]
    DV = cfg.linear_value_head_dim
    keys = torch.arange(2 * cfg.linear_num_key_heads * cfg.linear_key_head_dim)
    if "in_proj_qkv" in name or "conv1d" in name:
        order = torch.cat([keys, len(keys) + _order(cfg, tiled, DV)])
        return [(name, tensor[order].squeeze(), lambda v: _put(tensor, order, v))]
    if "in_proj_z" in name:
        order = _order(cfg, tiled, DV)
        return [(name, tensor[order], lambda v: _put(tensor, order, v))]
    if "in_proj_a." in name or "in_proj_b." in name:
        order = _order(cfg, tiled, 1)
        return [(name, tensor[order], lambda v: _put(tensor, order, v))]
    if "linear_attn.out_proj" in name:
        order = _order(cfg, tiled, DV)
        return [(name, tensor[:, order], lambda v: _put(tensor.T, order, v.T))]
    return [(name, tensor, tensor.copy_)]


def _order(cfg: Any, tiled: bool, size: int) -> torch.Tensor:
    """Of so many numbers of each value head, the model's place of each stored one."""
    HK, HV = cfg.linear_num_key_heads, cfg.linear_num_value_heads
    places = torch.arange(HV * size).view(HK, HV // HK, size)
    return (places.transpose(0, 1) if tiled else places).flatten()


def _of_groups(cfg: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of ``in_proj_qkvz`` that are queries, keys and values, and those of their gates."""
    DK, HK = cfg.linear_key_head_dim, cfg.linear_num_key_heads
    values = cfg.linear_num_value_heads // HK * cfg.linear_value_head_dim
    rows = torch.arange(HK * 2 * (DK + values)).view(HK, -1)
    q, k, v, z = (part.flatten() for part in rows.split([DK, DK, values, values], 1))
    return torch.cat([q, k, v]), z


def _put(tensor: torch.Tensor, order: torch.Tensor, values: torch.Tensor) -> None:
    tensor[order] = values.view(tensor[order].shape)
