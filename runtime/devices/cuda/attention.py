"""Rope, cache writes and attention as launches.

Every token attends by the decode kernels, as a sequence of its own: its keys and values, and those
of the tokens before it in the step, are in the cache by then: a step may mix prompts and decodes.
"""

from __future__ import annotations

from typing import Any

import torch

from pykernels.gpu.attention.gqa_decode import gqa_decode
from pykernels.gpu.attention.mla_decode import mla_decode
from pykernels.gpu.rope import rope_table as make_rope_table
from pykernels.gpu.rope_cache_write.gqa import gqa_rope_cache_write as write_keys_values
from pykernels.gpu.rope_cache_write.mla import mla_rope_cache_write as write_latents

from ...node import Node
from .dense import Launch, void
from .memory import Memory


def rope_table(m: Memory, node: Node) -> Launch:
    positions, out = m.read(node, "positions"), m.written(node, "out")  # [T], [T, 2, half]
    frequencies = m.weight(node, "frequencies")
    scale = node.attr("scale")
    return lambda: void(make_rope_table(positions, frequencies, scale, out))


def mla_rope_cache_write(m: Memory, node: Node) -> Launch:
    q, kv = m.read(node, "q"), m.read(node, "kv")
    angles, slot_mapping = m.read(node, "angles"), m.read(node, "slot_mapping")
    weight = m.weight(node, "kv_norm")
    NH, nope, start = node.attr("heads"), node.attr("nope"), node.attr("kv_start")
    L, R, eps = len(weight), 2 * angles.shape[2], node.attr("eps")
    rotated = m.written(node, "rotated").view(-1, NH, L + R)[..., L:]
    q = q[:, : NH * (nope + R)].unflatten(1, (NH, nope + R))[..., nope:]  # [T, NH, R]
    kv = kv[:, start : start + L + R]
    latent, rope, *rest = latent_caches(m, node)
    scale = rest[0] if rest else None
    interleaved = bool(node.attr("interleaved"))
    return lambda: void(
        write_latents(
            q, kv, angles, slot_mapping, latent, rope, weight, scale, eps, interleaved, rotated
        )
    )


def gqa_rope_cache_write(m: Memory, node: Node) -> Launch:
    qkv, angles = m.read(node, "qkv"), m.read(node, "angles")
    slot_mapping, k, v = m.read(node, "slot_mapping"), m.read(node, "k"), m.read(node, "v")
    NH, D = node.attr("heads"), k.shape[3]
    out = m.written(node, "rotated").view(-1, NH, D)
    norms = [m.optional_weight(node, name) for name in ("q_norm", "k_norm")]
    options: dict[str, Any] = {
        "k_scale": m.optional(node, "k_scale"),
        "v_scale": m.optional(node, "v_scale"),
        "q_norm": norms[0],
        "k_norm": norms[1],
        "eps": node.attr("eps"),
        "interleaved": bool(node.attr("interleaved")),
        "heads": NH,
        "starts": (0, node.attr("k_start"), node.attr("v_start")),
        "out": out,
    }
    return lambda: void(write_keys_values(qkv, angles, slot_mapping, k, v, **options))


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
    sinks = m.optional_weight(node, "sinks")
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
