"""Attention and what comes before it as jobs."""

from __future__ import annotations

import math

import torch

from pykernels.cpu.attention.args import ATTENTION, ITEM_BYTES, PAGE
from pykernels.cpu.attention.expand import MATRICES
from pykernels.cpu.attention.expanded import Expanded
from pykernels.cpu.attention.kernel import make_attention
from pykernels.cpu.cache_write import (
    GQA_ROPE_CACHE_WRITE,
    MLA_ROPE_CACHE_WRITE,
    make_gqa_rope_cache_write,
    make_mla_rope_cache_write,
)
from pykernels.cpu.rope import ROPE, make_rope_table

from ...kv_cache.layout import cache_inputs
from ...program import Node
from ...workers.job import Job
from .context import Context
from .dense_ops import head_matrices

_NO_EXPANSION = 1 << 40


def rope_table(ctx: Context, node: Node) -> list[Job]:
    positions, out = node.inputs["positions"], node.outputs["out"]
    frequencies = ctx.weight(node, "frequencies")
    setup, run = make_rope_table()
    record = ctx.record(
        ROPE,
        count_at=ctx.count_at(positions),
        positions=ctx.at(positions),
        frequencies=ctx.retain(frequencies),
        half=len(frequencies),
        scale=ctx.bits(node.attr("scale")),
        out=ctx.at(out),
    )
    return [Job(node.name, run.address, record, setup.address)]


def mla_rope_cache_write(ctx: Context, node: Node) -> list[Job]:
    q, kv, table, slot_mapping = (
        node.inputs[name] for name in ("q", "kv", "angles", "slot_mapping")
    )
    out, weight = node.outputs["rotated"], ctx.weight(node, "kv_norm")
    half = ctx.program.shape(table)[2]
    # bf16 [pages, PAGE, L + R], or E4M3 [pages, PAGE, L], bf16 [pages, PAGE, R] and scales
    cache = _cache(ctx, node)
    latents, L = cache["latent"], len(weight)
    coded = "rope" in cache
    rope = cache["rope"] if coded else latents[..., L:]
    setup, run = make_mla_rope_cache_write()
    record = ctx.record(
        MLA_ROPE_CACHE_WRITE,
        count_at=ctx.count_at(q),
        table=ctx.at(table),
        half=half,
        interleaved=node.attr("interleaved"),
        slot_mapping=ctx.at(slot_mapping),
        page_bytes=_bytes(latents, 0),
        token_bytes=_bytes(latents, 1),
        eps=ctx.bits(node.attr("eps")),
        q=ctx.at(q),
        q_stride=ctx.stride(q),
        nope=node.attr("nope"),
        NH=node.attr("heads"),
        kv=ctx.at(kv) + 4 * node.attr("kv_start"),
        kv_stride=ctx.stride(kv),
        weight=ctx.retain(weight),
        L=L,
        cache=latents.data_ptr(),
        scale=cache["latent_scale"].data_ptr() if coded else 0,
        rope=rope.data_ptr(),
        rope_page_bytes=_bytes(rope, 0),
        rope_token_bytes=_bytes(rope, 1),
        out=ctx.at(out),
        out_stride=ctx.stride(out),
    )
    return [Job(node.name, run.address, record, setup.address)]


def gqa_rope_cache_write(ctx: Context, node: Node) -> list[Job]:
    qkv, table, slot_mapping = (node.inputs[name] for name in ("qkv", "angles", "slot_mapping"))
    out, cache = node.outputs["rotated"], _cache(ctx, node)
    pages = cache["k"]  # bf16 or E4M3 [pages, PAGE, KVH, D]
    setup, run = make_gqa_rope_cache_write()
    norms: dict[str, int] = {}
    for name in ("q", "k"):
        if (weight := ctx.optional(node, f"{name}_norm")) is not None:
            norms[f"{name}_weight"] = ctx.retain(weight)
            norms[f"{name}_norm"] = len(weight) // pages.shape[3]
    if node.attr("v_norm"):
        norms["v_weight"] = ctx.retain(
            torch.ones(pages.shape[3], dtype=torch.float32, device="cpu")
        )
    record = ctx.record(
        GQA_ROPE_CACHE_WRITE,
        count_at=ctx.count_at(qkv),
        table=ctx.at(table),
        half=ctx.program.shape(table)[2],
        interleaved=node.attr("interleaved"),
        slot_mapping=ctx.at(slot_mapping),
        page_bytes=_bytes(pages, 0),
        token_bytes=_bytes(pages, 1),
        eps=ctx.bits(node.attr("eps")),
        qkv=ctx.at(qkv),
        qkv_stride=ctx.stride(qkv),
        k_start=4 * node.attr("k_start"),
        v_start=4 * node.attr("v_start"),
        NH=node.attr("heads"),
        KVH=pages.shape[2],
        D=pages.shape[3],
        **{part: tensor.data_ptr() for part, tensor in cache.items()},
        head_bytes=_bytes(pages, 2),
        out=ctx.at(out),
        out_stride=ctx.stride(out),
        **norms,
    )
    return [Job(node.name, run.address, record, setup.address)]


def attention(ctx: Context, node: Node) -> list[Job]:
    q, sinks = node.inputs["q"], ctx.optional(node, "sinks")
    pages, tables = _keys(ctx, node), ctx.tensor(node.inputs["page_table"])
    NH, KVH, T = node.attr("heads"), node.attr("kv_heads"), ctx.most(q)
    kernel = make_attention(node.attr("dk"), node.attr("dv"), codes=pages.shape[-1] * _coded(pages))
    S = min(T, tables.shape[0])
    workspace = kernel.workspace(NH, KVH, T, S, S * tables.shape[1] * PAGE)
    head_bytes = _bytes(pages, 2) if pages.ndim == 4 else 0
    out = node.outputs["out"]
    record = ctx.record(
        ATTENTION,
        **_reads(ctx, node, kernel.scratch_bytes),
        tokens_to=node.attr("expand_from") or _NO_EXPANSION,
        k_head_bytes=head_bytes,
        v_head_bytes=head_bytes,
        KVH=KVH,
        window=node.attr("window"),
        sinks=ctx.retain(sinks.float().contiguous()) if sinks is not None else 0,  # [NH]
        out=ctx.at(out),
        out_stride=ctx.stride(out),
        items=ctx.shared("items", workspace.items_bytes),
        items_capacity=workspace.items_capacity,
        combines=ctx.shared("combines", workspace.combines_bytes),
        combines_capacity=workspace.combines_capacity,
        partial=ctx.shared("partial", workspace.partial_bytes),
        partial_bytes=workspace.partial_bytes,
    )
    return [
        Job(node.name, kernel.run.address, record, kernel.setup.address),
        Job(f"{node.name}.combine", kernel.combine.address, record, kernel.combine_setup.address),
    ]


def attention_expanded(ctx: Context, node: Node) -> list[Job]:
    q, q_nope, table = (node.inputs[name] for name in ("q", "q_nope", "page_table"))
    out, pages = node.outputs["out"], _keys(ctx, node)
    uk, uv = ctx.weight(node, "uk"), ctx.weight(node, "uv")
    NH, T, L = node.attr("heads"), ctx.most(q), uv.K
    R = math.prod(ctx.program.shape(q)[1:]) // NH - L
    matrices = [head_matrices(ctx, heads) for heads in (uk, uv)]
    kernel = Expanded(L, R, node.attr("nope"), node.attr("dv"), _coded(pages))
    row_bytes = max(fields["row_stride"] for fields in matrices)
    items = kernel.items(NH, T, min(T, ctx.tensor(table).shape[0]))
    w_uk, w_uv = (ctx.record(MATRICES, **fields) for fields in matrices)
    record = ctx.record(
        ATTENTION,
        **_reads(ctx, node, kernel.scratch_bytes(row_bytes)),
        tokens_from=node.attr("expand_from"),
        tokens_to=_NO_EXPANSION,
        KVH=NH,
        q_nope=ctx.at(q_nope),
        q_nope_stride=ctx.stride(q_nope),
        w_uk=w_uk,
        w_uv=w_uv,
        out=ctx.at(out),
        out_stride=ctx.stride(out),
        items=ctx.shared("items", items * ITEM_BYTES),
        items_capacity=items,
    )
    return [ctx.compile_lazily(node.name, record, node.attr("expand_from"), kernel.compile)]


def _reads(ctx: Context, node: Node, scratch_bytes: int) -> dict[str, int]:
    """Fields of ``ATTENTION``: what it reads, and scratch."""
    q, positions, sequences, table = (
        node.inputs[name] for name in ("q", "positions", "sequences", "page_table")
    )
    parts = {part: tensor.data_ptr() for part, tensor in _cache(ctx, node).items()}
    pages = _keys(ctx, node)
    scratch, scratch_stride = ctx.scratch(scratch_bytes)
    return {
        "sizes": ctx.count_at(q),
        "sequence": ctx.at(sequences),
        "positions": ctx.at(positions),
        "page_table": ctx.at(table),
        "page_table_stride": ctx.tensor(table).stride(0),
        "q": ctx.at(q),
        "q_stride": ctx.stride(q),
        "k": pages.data_ptr(),
        "v": parts.get("v", pages.data_ptr()),  # in latents the values are a part of the keys
        "page_bytes": _bytes(pages, 0),
        "token_bytes": _bytes(pages, 1),
        "k_scale": parts.get("k_scale", parts.get("latent_scale", 0)),
        "v_scale": parts.get("v_scale", parts.get("latent_scale", 0)),
        "rope": parts.get("rope", 0),
        "NH": node.attr("heads"),
        "scale": ctx.bits(node.attr("scale")),
        "scratch": scratch,
        "scratch_stride": scratch_stride,
    }


def _keys(ctx: Context, node: Node) -> torch.Tensor:
    """The keys, or the latents, of the cache that a node reads."""
    cache = _cache(ctx, node)
    return cache["k"] if "k" in cache else cache["latent"]


def _cache(ctx: Context, node: Node) -> dict[str, torch.Tensor]:
    """The parts of the cache that a node reads, by their names."""
    return {part: ctx.tensor(name) for part, name in cache_inputs(node).items()}


def _coded(pages: torch.Tensor) -> bool:
    return pages.dtype == torch.float8_e4m3fn


def _bytes(pages: torch.Tensor, dim: int) -> int:
    """From one page, token or head to the next."""
    return pages.stride(dim) * pages.element_size()
