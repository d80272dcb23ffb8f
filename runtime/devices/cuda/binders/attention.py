"""Rope, cache writes and attention with grouped queries as launches; of latents: ``latents``.

Keys and values of the step's tokens are in the cache when they attend. A step may mix decodes and
prompts: the leading sequences of one token each attend by the decode kernel, which splits their
keys over the GPU, all others by the prefill kernel. Both launches have room for any mix, so they
can be captured; a sequence that is the other one's has no queries, or no keys.
"""

from __future__ import annotations

from typing import Any

from pykernels.errors import PykernelsError
from pykernels.gpu.attention.gqa_decode import gqa_decode
from pykernels.gpu.attention.gqa_prefill import gqa_prefill
from pykernels.gpu.plans.attention import MAX_HEAD
from pykernels.gpu.rope import rope_table as make_rope_table
from pykernels.gpu.rope_cache_write.gqa import gqa_rope_cache_write as write_keys_values
from pykernels.gpu.rope_cache_write.mla import mla_rope_cache_write as write_latents
from pykernels.shapes import Ragged

from ....program import Program
from ....program.node import Node
from ..memory.buffers import GpuBuffers
from . import latents
from .dense import Launch, void

_HINT = "Use device cpu, or --eager"


def check_heads(program: Program) -> None:
    """Raises PykernelsError for attention whose heads no GPU kernel can have.

    The kernels themselves say the same of their arguments: latents are read in blocks of a power
    of two, heads of other attention are padded to one.
    """
    for node in program.nodes:
        if node.op != "attention":
            continue
        dk, dv = node.attr("dk"), node.attr("dv")
        if dk != dv:
            latent = dv, dk - dv
            if any(size < 16 or size & (size - 1) for size in latent):
                raise PykernelsError(
                    "attention on a GPU has no latents of {} numbers with {} that are rotated, only"
                    " of powers of two from 16 on".format(*latent),
                    _HINT,
                )
        elif not 16 <= dk <= MAX_HEAD:
            raise PykernelsError(
                f"attention on a GPU has no heads of {dk} numbers, only of 16 to {MAX_HEAD}", _HINT
            )


def rope_table(m: GpuBuffers, node: Node) -> Launch:
    positions, out = m.read(node, "positions"), m.written(node, "out")  # [T], [T, 2, half]
    frequencies = m.weight(node, "frequencies")
    scale = node.attr("scale")
    return lambda: void(make_rope_table(positions, frequencies, scale, out))


def mla_rope_cache_write(m: GpuBuffers, node: Node) -> Launch:
    q, kv = m.read(node, "q"), m.read(node, "kv")
    angles, slot_mapping = m.read(node, "angles"), m.read(node, "slot_mapping")
    weight = m.weight(node, "kv_norm")
    NH, nope, start = node.attr("heads"), node.attr("nope"), node.attr("kv_start")
    L, R, eps = len(weight), 2 * angles.shape[2], node.attr("eps")
    rotated = m.written(node, "rotated").view(-1, NH, L + R)[..., L:]
    q = q[:, : NH * (nope + R)].unflatten(1, (NH, nope + R))[..., nope:]  # [T, NH, R]
    kv = kv[:, start : start + L + R]
    latent, rope, *rest = latents.caches(m, node)
    scale = rest[0] if rest else None
    interleaved = bool(node.attr("interleaved"))
    return lambda: void(
        write_latents(
            q, kv, angles, slot_mapping, latent, rope, weight, scale, eps, interleaved, rotated
        )
    )


def gqa_rope_cache_write(m: GpuBuffers, node: Node) -> Launch:
    qkv, angles = m.read(node, "qkv"), m.read(node, "angles")
    slot_mapping, k, v = (
        m.read(node, "slot_mapping"),
        m.written(node, "k"),
        m.written(node, "v"),
    )
    NH, D = node.attr("heads"), k.shape[3]
    out = m.written(node, "rotated").view(-1, NH, D)
    norms = [m.optional_weight(node, name) for name in ("q_norm", "k_norm")]
    scales = [
        m.written(node, name) if name in node.outputs else None for name in ("k_scale", "v_scale")
    ]
    options: dict[str, Any] = {
        "k_scale": scales[0],
        "v_scale": scales[1],
        "q_norm": norms[0],
        "k_norm": norms[1],
        "eps": node.attr("eps"),
        "interleaved": bool(node.attr("interleaved")),
        "heads": NH,
        "starts": (0, node.attr("k_start"), node.attr("v_start")),
        "v_norm": bool(node.attr("v_norm")),
        "out": out,
    }
    return lambda: void(write_keys_values(qkv, angles, slot_mapping, k, v, **options))


def attention(m: GpuBuffers, node: Node) -> Launch:
    if "latent" in node.inputs:
        return latents.attention(m, node)
    heads, dk, dv = node.attr("heads"), node.attr("dk"), node.attr("dv")
    q = m.read(node, "q").view(-1, heads, dk)  # [T, NH, dk]
    out = m.written(node, "out").view(-1, heads, dv)
    k, v = m.read(node, "k"), m.read(node, "v")
    options: dict[str, Any] = {
        "scale": node.attr("scale"),
        "k_scale": m.optional(node, "k_scale"),
        "v_scale": m.optional(node, "v_scale"),
        "window": node.attr("window") or None,
        "sinks": m.optional_weight(node, "sinks"),
    }
    table, lengths = m.read(node, "table"), m.read(node, "decode_lengths")
    first_q, first_out = q[: len(table)], out[: len(table)]  # a decoding sequence's one token
    chunks = _chunks(m, node)

    def launch() -> None:
        gqa_decode(first_q, k, v, table, lengths, out=first_out, **options)
        if chunks is not None:  # after the decodes, which write zeros to rows of chunks
            gqa_prefill(q, k, v, chunks, out=out, **options)

    return launch


def _chunks(m: GpuBuffers, node: Node) -> Ragged | None:
    """The chunks over pages, however many there are; None in decode steps."""
    if "chunk_starts" not in node.inputs:
        return None
    starts, lengths = m.read(node, "chunk_starts"), m.read(node, "chunk_lengths")
    keys, table = m.read(node, "chunk_keys"), m.read(node, "chunk_table")
    return Ragged(starts, lengths, keys, node.attr("chunk"), page_table=table)


def attention_metadata(m: GpuBuffers, node: Node) -> Launch:
    """Nothing is left to launch: the host has written it, and it crossed with the step's inputs
    (``inputs.Bucket``)."""
    return lambda: None
