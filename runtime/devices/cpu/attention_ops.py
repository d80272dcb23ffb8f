"""Attention and what comes before it as jobs."""

from __future__ import annotations

from pykernels.cpu.attention.job import ATTENTION, PAGE
from pykernels.cpu.attention.kernel import make_attention
from pykernels.cpu.cache_write import GQA_WRITE, MLA_WRITE, make_gqa_write, make_mla_write
from pykernels.cpu.rope import ROPE, make_rope_table

from ...program import Node
from ...workers.job import Job
from .context import Context


def rope_table(step: Context, node: Node) -> list[Job]:
    (positions,), (out,) = node.inputs, node.outputs
    frequencies = node.weights["frequencies"].float().contiguous()
    opening, run = make_rope_table()
    record = step.record(
        ROPE, count_at=step.count_at(positions), positions=step.at(positions),
        frequencies=step.keep(frequencies), half=len(frequencies),
        scale=step.bits(node.attrs.get("scale", 1.0)), out=step.at(out),
    )  # fmt: skip
    return [Job(node.name, run.address, record, opening.address)]


def mla_write(step: Context, node: Node) -> list[Job]:
    q, kv, table, slots = node.inputs
    out, cache = node.outputs
    attrs, pages = node.attrs, step.tensor(cache)  # bf16 [pages, PAGE, L + R]
    half = step.program.shape(table)[2]
    L = pages.shape[2] - 2 * half
    opening, run = make_mla_write()
    record = step.record(
        MLA_WRITE,
        count_at=step.count_at(q),
        table=step.at(table),
        half=half,
        interleaved=attrs["interleaved"],
        slots=step.at(slots),
        page_bytes=pages.stride(0) * 2,
        token_bytes=pages.stride(1) * 2,
        eps=step.bits(attrs["eps"]),
        q=step.at(q),
        q_stride=step.stride(q),
        nope=attrs["nope"],
        NH=attrs["heads"],
        kv=step.at(kv) + 4 * attrs.get("kv_start", 0),
        kv_stride=step.stride(kv),
        weight=step.keep(node.weights["weight"].float().contiguous()),
        L=L,
        cache=step.at(cache),
        out=step.at(out),
        out_stride=step.stride(out),
    )
    return [Job(node.name, run.address, record, opening.address)]


def gqa_write(step: Context, node: Node) -> list[Job]:
    qkv, table, slots = node.inputs
    out, k, v = node.outputs
    attrs, pages = node.attrs, step.tensor(k)  # bf16 [pages, PAGE, KVH, D]
    opening, run = make_gqa_write()
    norms: dict[str, int] = {}
    for name in ("q", "k"):
        if (weight := node.weights.get(name)) is not None:
            norms[f"{name}_weight"] = step.keep(weight.float().contiguous())
            norms[f"{name}_norm"] = len(weight) // pages.shape[3]
    record = step.record(
        GQA_WRITE,
        count_at=step.count_at(qkv),
        table=step.at(table),
        half=step.program.shape(table)[2],
        interleaved=attrs.get("interleaved", 0),
        slots=step.at(slots),
        page_bytes=pages.stride(0) * 2,
        token_bytes=pages.stride(1) * 2,
        eps=step.bits(attrs.get("eps", 0.0)),
        qkv=step.at(qkv),
        qkv_stride=step.stride(qkv),
        NH=attrs["heads"],
        KVH=pages.shape[2],
        D=pages.shape[3],
        k=step.at(k),
        v=step.at(v),
        head_bytes=pages.stride(2) * 2,
        out=step.at(out),
        out_stride=step.stride(out),
        **norms,
    )
    return [Job(node.name, run.address, record, opening.address)]


def attention(step: Context, node: Node) -> list[Job]:
    q, k, positions, sequences, table, *rest = node.inputs
    (out,), attrs = node.outputs, node.attrs
    v = rest[0] if rest else k  # in latents the values are a part of the keys
    pages, tables = step.tensor(k), step.tensor(table)
    NH, KVH, T = attrs["heads"], attrs["kv_heads"], step.most(q)
    kernel = make_attention(attrs["dk"], attrs["dv"])
    S = min(T, tables.shape[0])
    room = kernel.workspace(NH, KVH, T, S, S * tables.shape[1] * PAGE)
    head_bytes = pages.stride(2) * 2 if pages.ndim == 4 else 0
    scratch, scratch_stride = step.scratch(kernel.scratch_bytes)
    record = step.record(
        ATTENTION,
        sizes=step.count_at(q),
        sequence=step.at(sequences),
        positions=step.at(positions),
        page_table=step.at(table),
        page_table_stride=tables.stride(0),
        q=step.at(q),
        q_stride=step.stride(q),
        k=step.at(k),
        v=step.at(v),
        page_bytes=pages.stride(0) * 2,
        token_bytes=pages.stride(1) * 2,
        k_head_bytes=head_bytes,
        v_head_bytes=head_bytes,
        NH=NH,
        KVH=KVH,
        scale=step.bits(attrs["scale"]),
        window=attrs.get("window", 0),
        sinks=step.keep(node.weights["sinks"]) if "sinks" in node.weights else 0,
        out=step.at(out),
        out_stride=step.stride(out),
        items=step.shared("items", room.items_bytes),
        items_capacity=room.items_capacity,
        combines=step.shared("combines", room.combines_bytes),
        combines_capacity=room.combines_capacity,
        partial=step.shared("partial", room.partial_bytes),
        partial_bytes=room.partial_bytes,
        scratch=scratch,
        scratch_stride=scratch_stride,
    )
    return [
        Job(node.name, kernel.run.address, record, kernel.open.address),
        Job(f"{node.name}.combine", kernel.combine.address, record, kernel.combine_open.address),
    ]
