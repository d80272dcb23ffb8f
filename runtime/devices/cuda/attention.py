"""Rope, cache writes and attention as launches.

Every token attends by the decode kernels, as a sequence of its own: its keys and values, and those
of the tokens before it in the step, are in the cache by then: a step may mix prompts and decodes.
"""

from __future__ import annotations

import torch

from pykernels.gpu.attention import kv_write as cache
from pykernels.gpu.attention.gqa_decode import gqa_decode
from pykernels.gpu.attention.mla_decode import mla_decode
from pykernels.gpu.norm import rms_norm

from ...node import Node
from .dense import Launch, void
from .memory import Memory


def rope_table(m: Memory, node: Node) -> Launch:
    positions, out = m.read(node, "positions"), m.written(node, "out")  # [T], [T, 2, half]
    frequencies = node.weights["frequencies"].to(m.device, torch.float32)
    scale = node.attr("scale")

    def launch() -> None:
        angles = positions.float()[:, None] * frequencies
        torch.cos(angles, out=out[:, 0])
        torch.sin(angles, out=out[:, 1])
        if scale != 1.0:
            out.mul_(scale)

    return launch


def mla_rope_cache_write(m: Memory, node: Node) -> Launch:
    q, kv, angles, slot_mapping = (
        m.read(node, port) for port in ("q", "kv", "angles", "slot_mapping")
    )
    weight = node.weights["kv_norm"].to(m.device)
    NH, nope, start = node.attr("heads"), node.attr("nope"), node.attr("kv_start")
    L, R, eps = len(weight), 2 * angles.shape[2], node.attr("eps")
    rotated = m.written(node, "rotated").view(-1, NH, L + R)[..., L:]
    q = q[:, : NH * (nope + R)].unflatten(1, (NH, nope + R))[..., nope:]  # [T, NH, R]
    caches = latent_caches(m, node)
    interleaved = bool(node.attr("interleaved"))

    def launch() -> None:
        latent = rms_norm(kv[:, start : start + L], weight, eps)[0]
        rope = _rotate(kv[:, None, start + L : start + L + R], angles, interleaved)[:, 0]
        cache.mla_write(latent, rope.to(latent.dtype), slot_mapping, *caches)
        rotated.copy_(_rotate(q, angles, interleaved))

    return launch


def gqa_rope_cache_write(m: Memory, node: Node) -> Launch:
    qkv, angles, slot_mapping = (m.read(node, port) for port in ("qkv", "angles", "slot_mapping"))
    k_cache, v_cache = m.read(node, "k"), m.read(node, "v")
    scales = m.optional(node, "k_scale"), m.optional(node, "v_scale")
    NH, (KVH, D) = node.attr("heads"), k_cache.shape[2:]
    starts = 0, node.attr("k_start"), node.attr("v_start")
    q, k, v = (
        qkv[:, first : first + heads * D].unflatten(1, (heads, D))
        for first, heads in zip(starts, (NH, KVH, KVH), strict=True)
    )
    out = m.written(node, "rotated").view(-1, NH, D)
    eps, interleaved = node.attr("eps"), bool(node.attr("interleaved"))
    norms = [
        None if node.weights.get(name) is None else node.weights[name].to(m.device)
        for name in ("q_norm", "k_norm")
    ]

    def launch() -> None:
        rows = []
        for x, weight in zip((q, k), norms, strict=True):
            if weight is not None:  # of a head, or of all heads together
                x = rms_norm(x.reshape(-1, len(weight)), weight, eps)[0].view(x.shape)
            rows.append(_rotate(x, angles, interleaved))
        out.copy_(rows[0])
        cache.kv_write(rows[1].to(v.dtype), v, slot_mapping, k_cache, v_cache, *scales)

    return launch


def attention(m: Memory, node: Node) -> Launch:
    heads, dk, dv = node.attr("heads"), node.attr("dk"), node.attr("dv")
    q = m.read(node, "q").view(-1, heads, dk)  # [T, NH, dk]
    out = m.written(node, "out").view(-1, heads, dv)
    table, lengths, scale = m.tokens_table, m.key_lengths, node.attr("scale")
    if "latent" in node.inputs:
        latent, rope, *rest = latent_caches(m, node)
        latent_scale = rest[0] if rest else None
        return lambda: void(
            mla_decode(
                q[..., :dv],
                q[..., dv:],
                latent,
                rope,
                table,
                lengths,
                scale=scale,
                latent_scale=latent_scale,
                out=out,
            )
        )
    k, v = m.read(node, "k"), m.read(node, "v")
    k_scale, v_scale = m.optional(node, "k_scale"), m.optional(node, "v_scale")
    sinks = node.weights.get("sinks")
    sinks = None if sinks is None else sinks.to(m.device).contiguous()
    window = node.attr("window") or None
    return lambda: void(
        gqa_decode(
            q,
            k,
            v,
            table,
            lengths,
            scale=scale,
            k_scale=k_scale,
            v_scale=v_scale,
            window=window,
            sinks=sinks,
            out=out,
        )
    )


def attention_expanded(m: Memory, node: Node) -> Launch:
    """Nothing: here ``attention`` and ``per_head_linear`` leave no sequence out."""
    return lambda: None


def latent_caches(m: Memory, node: Node) -> tuple[torch.Tensor, ...]:
    """(latents, their rotated parts, scales where they are E4M3) of a node's cache; in bfloat16
    the runner keeps both parts under one buffer's name."""
    name = node.inputs["latent"]
    if "rope" in node.inputs:
        return tuple(m.read(node, port) for port in ("latent", "rope", "latent_scale"))
    return m.caches[name], m.caches[f"{name}.rope"]


def _rotate(x: torch.Tensor, angles: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x [T, heads, D] in float32 with its first numbers rotated by angles [T, 2, half]."""
    cos, sin = angles[:, None, 0], angles[:, None, 1]  # [T, 1, half]
    R = 2 * cos.shape[-1]
    head, rest = x[..., :R].float(), x[..., R:].float()
    a, b = (head[..., 0::2], head[..., 1::2]) if interleaved else head.chunk(2, -1)
    a, b = a * cos - b * sin, a * sin + b * cos
    both = torch.stack([a, b], -1).flatten(-2) if interleaved else torch.cat([a, b], -1)
    return torch.cat([both, rest], -1)
