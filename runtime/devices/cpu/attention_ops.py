"""Attention and what comes before it as jobs."""

from __future__ import annotations

import math

import torch

from pykernels.cpu.attention.expand import MATRICES
from pykernels.cpu.attention.expanded import Expanded
from pykernels.cpu.attention.job import ATTENTION, ITEM_BYTES, PAGE
from pykernels.cpu.attention.kernel import make_attention
from pykernels.cpu.cache_write import GQA_WRITE, MLA_WRITE, make_gqa_write, make_mla_write
from pykernels.cpu.rope import ROPE, make_rope_table

from ...kv_cache.layout import cache_inputs
from ...program import Node
from ...workers.job import Job
from .context import Context
from .dense_ops import head_matrices

_NEVER = 1 << 40


def rope_table(step: Context, node: Node) -> list[Job]:
    positions, out = node.inputs["positions"], node.outputs["out"]
    frequencies = node.weights["frequencies"].float().contiguous()
    opening, run = make_rope_table()
    record = step.record(
        ROPE, count_at=step.count_at(positions), positions=step.at(positions),
        frequencies=step.keep(frequencies), half=len(frequencies),
        scale=step.bits(node.attr("scale")), out=step.at(out),
    )  # fmt: skip
    return [Job(node.name, run.address, record, opening.address)]


def mla_rope_cache_write(step: Context, node: Node) -> list[Job]:
    q, kv, table, slots = (node.inputs[name] for name in ("q", "kv", "angles", "slots"))
    out, weight = node.outputs["rotated"], node.weights["kv_norm"].float().contiguous()
    half = step.program.shape(table)[2]
    # bf16 [pages, PAGE, L + R], or E4M3 [pages, PAGE, L], bf16 [pages, PAGE, R] and scales
    latents, *coded = (step.tensor(name) for name in cache_inputs(node).values())
    L = len(weight)
    rope = coded[0] if coded else latents[..., L:]
    opening, run = make_mla_write()
    record = step.record(
        MLA_WRITE,
        count_at=step.count_at(q),
        table=step.at(table),
        half=half,
        interleaved=node.attr("interleaved"),
        slots=step.at(slots),
        page_bytes=_bytes(latents, 0),
        token_bytes=_bytes(latents, 1),
        eps=step.bits(node.attr("eps")),
        q=step.at(q),
        q_stride=step.stride(q),
        nope=node.attr("nope"),
        NH=node.attr("heads"),
        kv=step.at(kv) + 4 * node.attr("kv_start"),
        kv_stride=step.stride(kv),
        weight=step.keep(weight),
        L=L,
        cache=latents.data_ptr(),
        scale=coded[1].data_ptr() if coded else 0,
        rope=rope.data_ptr(),
        rope_page_bytes=_bytes(rope, 0),
        rope_token_bytes=_bytes(rope, 1),
        out=step.at(out),
        out_stride=step.stride(out),
    )
    return [Job(node.name, run.address, record, opening.address)]


def gqa_rope_cache_write(step: Context, node: Node) -> list[Job]:
    qkv, table, slots = (node.inputs[name] for name in ("qkv", "angles", "slots"))
    out, caches = node.outputs["rotated"], cache_inputs(node)
    pages = step.tensor(caches["k"])  # bf16 or E4M3 [pages, PAGE, KVH, D]
    opening, run = make_gqa_write()
    norms: dict[str, int] = {}
    for name in ("q", "k"):
        if (weight := node.weights.get(f"{name}_norm")) is not None:
            norms[f"{name}_weight"] = step.keep(weight.float().contiguous())
            norms[f"{name}_norm"] = len(weight) // pages.shape[3]
    record = step.record(
        GQA_WRITE,
        count_at=step.count_at(qkv),
        table=step.at(table),
        half=step.program.shape(table)[2],
        interleaved=node.attr("interleaved"),
        slots=step.at(slots),
        page_bytes=_bytes(pages, 0),
        token_bytes=_bytes(pages, 1),
        eps=step.bits(node.attr("eps")),
        qkv=step.at(qkv),
        qkv_stride=step.stride(qkv),
        k_start=4 * node.attr("k_start"),
        v_start=4 * node.attr("v_start"),
        NH=node.attr("heads"),
        KVH=pages.shape[2],
        D=pages.shape[3],
        **{part: step.at(name) for part, name in caches.items()},
        head_bytes=_bytes(pages, 2),
        out=step.at(out),
        out_stride=step.stride(out),
        **norms,
    )
    return [Job(node.name, run.address, record, opening.address)]


def attention(step: Context, node: Node) -> list[Job]:
    q, sinks = node.inputs["q"], node.weights.get("sinks")
    pages, tables = _keys(step, node), step.tensor(node.inputs["page_table"])
    NH, KVH, T = node.attr("heads"), node.attr("kv_heads"), step.most(q)
    kernel = make_attention(node.attr("dk"), node.attr("dv"), codes=pages.shape[-1] * _coded(pages))
    S = min(T, tables.shape[0])
    room = kernel.workspace(NH, KVH, T, S, S * tables.shape[1] * PAGE)
    head_bytes = _bytes(pages, 2) if pages.ndim == 4 else 0
    out = node.outputs["out"]
    record = step.record(
        ATTENTION,
        **_reads(step, node, kernel.scratch_bytes),
        tokens_to=node.attr("expand_from") or _NEVER,
        k_head_bytes=head_bytes,
        v_head_bytes=head_bytes,
        KVH=KVH,
        window=node.attr("window"),
        sinks=step.keep(sinks.float().contiguous()) if sinks is not None else 0,  # [NH]
        out=step.at(out),
        out_stride=step.stride(out),
        items=step.shared("items", room.items_bytes),
        items_capacity=room.items_capacity,
        combines=step.shared("combines", room.combines_bytes),
        combines_capacity=room.combines_capacity,
        partial=step.shared("partial", room.partial_bytes),
        partial_bytes=room.partial_bytes,
    )
    return [
        Job(node.name, kernel.run.address, record, kernel.open.address),
        Job(f"{node.name}.combine", kernel.combine.address, record, kernel.combine_open.address),
    ]


def attention_expanded(step: Context, node: Node) -> list[Job]:
    q, q_nope, table = (node.inputs[name] for name in ("q", "q_nope", "page_table"))
    out, weights, pages = node.outputs["out"], node.weights, _keys(step, node)
    NH, T, L = node.attr("heads"), step.most(q), weights["uv"].K
    R = math.prod(step.program.shape(q)[1:]) // NH - L
    matrices = [head_matrices(step, weights[name]) for name in ("uk", "uv")]
    kernel = Expanded(L, R, node.attr("nope"), node.attr("dv"), _coded(pages))
    row_bytes = max(fields["row_stride"] for fields in matrices)
    items = kernel.items(NH, T, min(T, step.tensor(table).shape[0]))
    w_uk, w_uv = (step.record(MATRICES, **fields) for fields in matrices)
    record = step.record(
        ATTENTION,
        **_reads(step, node, kernel.scratch_bytes(row_bytes)),
        tokens_from=node.attr("expand_from"),
        tokens_to=_NEVER,
        KVH=NH,
        q_nope=step.at(q_nope),
        q_nope_stride=step.stride(q_nope),
        w_uk=w_uk,
        w_uv=w_uv,
        out=step.at(out),
        out_stride=step.stride(out),
        items=step.shared("items", items * ITEM_BYTES),
        items_capacity=items,
    )
    return [step.later(node.name, record, node.attr("expand_from"), kernel.compile)]


def _reads(step: Context, node: Node, scratch_bytes: int) -> dict[str, int]:
    """Fields of ``ATTENTION``: what it reads, and scratch."""
    q, positions, sequences, table = (
        node.inputs[name] for name in ("q", "positions", "sequences", "page_table")
    )
    parts = {part: step.at(name) for part, name in cache_inputs(node).items()}
    pages, keys = _keys(step, node), next(iter(parts.values()))
    scratch, scratch_stride = step.scratch(scratch_bytes)
    return {
        "sizes": step.count_at(q),
        "sequence": step.at(sequences),
        "positions": step.at(positions),
        "page_table": step.at(table),
        "page_table_stride": step.tensor(table).stride(0),
        "q": step.at(q),
        "q_stride": step.stride(q),
        "k": keys,
        "v": parts.get("v", keys),  # in latents the values are a part of the keys
        "page_bytes": _bytes(pages, 0),
        "token_bytes": _bytes(pages, 1),
        "k_scale": parts.get("k_scale", parts.get("latent_scale", 0)),
        "v_scale": parts.get("v_scale", parts.get("latent_scale", 0)),
        "rope": parts.get("rope", 0),
        "NH": node.attr("heads"),
        "scale": step.bits(node.attr("scale")),
        "scratch": scratch,
        "scratch_stride": scratch_stride,
    }


def _keys(step: Context, node: Node) -> torch.Tensor:
    """The keys, or the latents, of the cache that a node reads."""
    return step.tensor(next(iter(cache_inputs(node).values())))


def _coded(pages: torch.Tensor) -> bool:
    return pages.dtype == torch.float8_e4m3fn


def _bytes(pages: torch.Tensor, dim: int) -> int:
    """From one page, token or head to the next."""
    return pages.stride(dim) * pages.element_size()
