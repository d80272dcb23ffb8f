"""Each op of a program as jobs of the ring: one function an op, ``BINDERS`` by name.

A binder fills the op's record with addresses and sizes; kernels are in ``pykernels.cpu``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from pykernels.cpu import MoECall
from pykernels.cpu.activations.row_layout import row_bytes
from pykernels.cpu.attention.job import ATTENTION, PAGE
from pykernels.cpu.attention.kernel import make_attention
from pykernels.cpu.cache_write import GQA_WRITE, MLA_WRITE, make_gqa_write, make_mla_write
from pykernels.cpu.embedding import EMBED, make_embed
from pykernels.cpu.gemm.common import MAX_BLOCKS
from pykernels.cpu.gemv.common import MAX_TOKENS
from pykernels.cpu.linear import HEADS, LINEAR, make_heads, make_linear
from pykernels.cpu.moe.kernel import MoEKernel, tables_address
from pykernels.cpu.moe.plan import plan
from pykernels.cpu.rope import ROPE, make_rope_table
from pykernels.cpu.router import ROUTER, make_router
from pykernels.cpu.sampling import make_ops
from pykernels.quant.layout import K_BLOCK, ceil_to

from ..program import Node
from ..workers.moe_job import MOE, barrier_bytes, make_moe
from ..workers.ring_pool import Job
from .sampling import SAMPLING, sizes

if TYPE_CHECKING:
    from .cpu import CpuStep

_TASKS = 8
"""Tasks a worker of a linear: dynamic, so that a core that is slower takes fewer."""
_TASK_BYTES = 1 << 20


def row_kernel(step: CpuStep, node: Node, name: str) -> tuple[MoEKernel, bool] | None:
    """The kernel for whose rows a node reads a buffer, and whether its GEMM's A tiles are wanted;
    None if it reads floats."""
    if node.op == "linear" and name == node.inputs[0]:
        matrix = node.weights["weight"]
        return step.kernel_of(matrix.fmt.name, node.attrs.get("activations", "bf16")), True
    if node.op == "moe_ffn" and name == node.inputs[0]:
        experts = node.weights["experts"]
        return step.kernel_of(experts.fmt.name, node.attrs.get("activations", "bf16")), False
    return None


def _embed(step: CpuStep, node: Node) -> list[Job]:
    (ids,), (out,) = node.inputs, node.outputs
    table = node.weights["table"]
    opening, run = make_embed()
    record = step.record(
        EMBED, count_at=step.count_at(ids), ids=step.at(ids), table=step.keep(table),
        V=table.shape[0], H=table.shape[1], out=step.at(out), out_stride=step.stride(out), chunk=16,
    )  # fmt: skip
    return [Job(node.name, run.address, record, opening.address)]


def _rms_norm(step: CpuStep, node: Node) -> list[Job]:
    x, *adds = node.inputs
    index = adds.pop() if node.attrs.get("sampled") else None
    out, total = node.outputs[0], node.outputs[1] if len(node.outputs) > 1 else None
    forms, kernels = step.forms_of(out)
    weight = node.weights["weight"].float().contiguous()
    fields = {"weight": step.keep(weight), "eps": step.bits(node.attrs["eps"])}
    for i, name in enumerate(adds):
        fields |= {f"add{i}": step.at(name), "add_stride": step.stride(name)}
    if index is not None:
        fields["index"] = step.at(index)
    start = node.attrs.get("start", 0)  # a part of x's columns
    fields["x"] = step.at(x) + 4 * start
    return step.norm(node.name, out, total, fields, forms, kernels, x, K=len(weight))


def _linear(step: CpuStep, node: Node) -> list[Job]:
    (x,), (out,) = node.inputs, node.outputs
    matrix, bias = node.weights["weight"], node.weights.get("bias")
    kernel = step.kernel_of(matrix.fmt.name, node.attrs.get("activations", "bf16"))
    rows, jobs = step.rows(node, x, kernel, True)
    blocks = matrix.blocks.shape[0]
    workers = step.pool.threads
    chunk = max(1, min(blocks // (_TASKS * workers), _TASK_BYTES // matrix.blocks.shape[1]))
    gemm_chunk = max(1, min(MAX_BLOCKS, blocks // (2 * workers)))
    scratch, scratch_stride = step.scratch(kernel.scratch_bytes)
    opening, run = make_linear()
    record = step.record(
        LINEAR,
        count_at=step.count_at(x),
        rows=rows.address,
        row_stride=rows.stride,
        k_blocks=ceil_to(matrix.K, matrix.fmt.k_block) // K_BLOCK,
        w=step.keep(matrix.blocks),
        block_bytes=matrix.blocks.shape[1],
        scale=step.keep(matrix.scales),
        scale_bytes=matrix.scales.shape[1],
        blocks=blocks,
        N=matrix.N,
        bias=0 if bias is None else step.keep(bias.float().contiguous()),
        out=step.at(out),
        out_stride=step.stride(out),
        chunk=chunk,
        gemm_chunk=gemm_chunk,
        gemm_from=step.gemm_from(kernel),
        tiles=kernel.tiles,
        gemm=kernel.gemm,
        tables=tables_address(),
        a_tiles=rows.a_tiles,
        tile_steps=2 if kernel.int8 else 4,
        scratch=scratch,
        scratch_stride=scratch_stride,
    )
    return [*jobs, Job(node.name, run.address, record, opening.address)]


def _heads(step: CpuStep, node: Node) -> list[Job]:
    """x [T, G * x_head + ...] by a matrix of each head, to out [T, G * out_head + ...]; strides in
    numbers, ``attrs``."""
    x, (out,) = node.inputs[0], node.outputs
    heads, attrs = node.weights["heads"], node.attrs
    kernel = step.kernel_of(heads.fmt.name, "bf16")
    K = ceil_to(heads.K, heads.fmt.k_block)
    row_stride = row_bytes(K, kernel.row_formats[0])
    scratch, scratch_stride = step.scratch(MAX_TOKENS * row_stride)
    opening, run = make_heads()
    record = step.record(
        HEADS,
        count_at=step.count_at(x),
        G=heads.G,
        x=step.at(x),
        x_stride=step.stride(x),
        x_head=4 * attrs["x_head"],
        K=heads.K,
        k_blocks=K // K_BLOCK,
        w=step.keep(heads.blocks),
        w_head=heads.blocks.stride(0),
        block_bytes=heads.blocks.shape[2],
        scale=step.keep(heads.scales),
        scale_head=heads.scales[0].nbytes,
        scale_bytes=heads.scales.shape[2],
        blocks=heads.blocks.shape[1],
        N=heads.N,
        out=step.at(out),
        out_stride=step.stride(out),
        out_head=4 * attrs["out_head"],
        tiles=kernel.tiles,
        tables=tables_address(),
        quantize_row=kernel.quantize_row,
        row_stride=row_stride,
        scratch=scratch,
        scratch_stride=scratch_stride,
    )
    return [Job(node.name, run.address, record, opening.address)]


def _rope_table(step: CpuStep, node: Node) -> list[Job]:
    (positions,), (out,) = node.inputs, node.outputs
    frequencies = node.weights["frequencies"].float().contiguous()
    opening, run = make_rope_table()
    record = step.record(
        ROPE, count_at=step.count_at(positions), positions=step.at(positions),
        frequencies=step.keep(frequencies), half=len(frequencies),
        scale=step.bits(node.attrs.get("scale", 1.0)), out=step.at(out),
    )  # fmt: skip
    return [Job(node.name, run.address, record, opening.address)]


def _mla_write(step: CpuStep, node: Node) -> list[Job]:
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


def _gqa_write(step: CpuStep, node: Node) -> list[Job]:
    qkv, table, slots = node.inputs
    out, k, v = node.outputs
    attrs, pages = node.attrs, step.tensor(k)  # bf16 [pages, PAGE, KVH, D]
    opening, run = make_gqa_write()
    weights = {
        f"{name}_weight": step.keep(node.weights[name].float().contiguous())
        for name in ("q", "k")
        if name in node.weights
    }
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
        **weights,
    )
    return [Job(node.name, run.address, record, opening.address)]


def _attention(step: CpuStep, node: Node) -> list[Job]:
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


def _router(step: CpuStep, node: Node) -> list[Job]:
    (logits,), (ids, weights) = node.inputs, node.outputs
    spec, bias = node.attrs["spec"], node.weights.get("bias")
    opening, run = make_router()
    record = step.record(
        ROUTER,
        count_at=step.count_at(logits),
        logits=step.at(logits),
        logits_stride=step.stride(logits),
        bias=0 if bias is None else step.keep(bias.float().contiguous()),
        E=node.attrs["experts"],
        topk=spec.topk,
        sigmoid=spec.scoring == "sigmoid",
        renormalize=spec.renormalize,
        groups=spec.groups,
        group_topk=spec.group_topk,
        top2=spec.group_score == "top2",
        scale=step.bits(spec.scale),
        ids=step.at(ids),
        weights=step.at(weights),
        width=step.program.shape(ids)[1],
        chunk=8,
    )
    return [Job(node.name, run.address, record, opening.address)]


def _moe_ffn(step: CpuStep, node: Node) -> list[Job]:
    """Routed experts; or a dense MLP as the one expert that every token takes."""
    x, *routing = node.inputs
    (out,) = node.outputs
    experts = node.weights["experts"]
    kernel = step.kernel_of(experts.fmt.name, node.attrs.get("activations", "bf16"))
    rows, jobs = step.rows(node, x, kernel, False)
    T = step.most(x)
    topk = step.program.shape(routing[0])[1] if routing else 1
    cut = plan(experts.shape, experts.fmt, step.pool.threads, 1 if T <= MAX_TOKENS else T,
               step.gemm_from(kernel))  # fmt: skip
    call = MoECall(experts, kernel, step.workspace, step.pool.threads, cut)
    call.bind(T, topk, rows.address, rows.stride, step.at(out), step.stride(out))
    step.keep(call.job)
    step.calls.append(call)
    if routing:
        ids, weights = (step.at(name) for name in routing)
    else:
        ids = step.keep(torch.zeros(T, dtype=torch.int64))
        weights = step.keep(torch.ones(T))
    opening, run = make_moe()
    record = step.record(
        MOE, ring=step.pool.ring, count_at=step.count_at(x), job=call.address, ids=ids,
        weights=weights, barriers=step.room(barrier_bytes(experts.shape.E, call.down_chunks)),
    )  # fmt: skip
    return [*jobs, Job(node.name, run.address, record, opening.address)]


def _sample(step: CpuStep, node: Node) -> list[Job]:
    (logits,) = node.inputs
    tokens, logprobs, top_ids, top_logprobs = node.outputs
    R, V = step.program.shape(logits)
    need = sizes(R, V, step.pool.threads)
    record = np.zeros(1, SAMPLING)
    step.parameters.point_at(record[0])
    for field, name in (
        ("tokens", tokens), ("logprobs_out", logprobs), ("top_ids", top_ids),
        ("top_logprobs", top_logprobs), ("logits", logits),
    ):  # fmt: skip
        record[field] = step.at(name)
    for field in ("adjusted", "maxima", "partials", "scratch"):
        record[field] = step.room(getattr(need, field))
    record["count_at"], record["V"] = step.count_at(logits), V
    record["logits_stride"], record["scratch_stride"] = step.stride(logits), need.scratch_stride
    address = step.keep(record)
    names = ("scan", "draw", "finish")
    return [
        Job(f"{node.name}.{name}", run.address, address, opening.address)
        for name, (opening, run) in zip(names, make_ops(), strict=True)
    ]


BINDERS: dict[str, Callable[[CpuStep, Node], list[Job]]] = {
    "embed": _embed,
    "rms_norm": _rms_norm,
    "linear": _linear,
    "heads": _heads,
    "rope_table": _rope_table,
    "mla_write": _mla_write,
    "gqa_write": _gqa_write,
    "attention": _attention,
    "router": _router,
    "moe_ffn": _moe_ffn,
    "sample": _sample,
}
