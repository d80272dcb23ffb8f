"""The ops around attention and experts as jobs: embedding, norms, linears, sampling."""

from __future__ import annotations

import numpy as np

from pykernels.cpu.activations.join_rows import JOIN, make_join
from pykernels.cpu.activations.post_norm import POST_NORM, make_post_norm
from pykernels.cpu.activations.row_layout import row_bytes
from pykernels.cpu.embedding import EMBED, make_embed, make_embed_packed
from pykernels.cpu.gemm.common import MAX_BLOCKS
from pykernels.cpu.gemv.common import MAX_TOKENS
from pykernels.cpu.linear import LINEAR, PER_HEAD_LINEAR, make_linear, make_per_head_linear
from pykernels.cpu.moe.kernel import tables_address
from pykernels.cpu.norm import ADD
from pykernels.cpu.sampling import SAMPLING as SAMPLING_JOB
from pykernels.cpu.sampling import make_ops, sizes
from pykernels.cpu.sampling.softcap import SOFTCAP, make_softcap
from pykernels.cpu.vectors import width
from pykernels.quant import PackedHeads, PackedMatrix
from pykernels.quant.layout import K_BLOCK, ceil_to
from pykernels.target import detect

from ...program import Node
from ...program.ops import SAMPLING, SAMPLING_TABLES
from ...workers.job import Job
from .context import Context

_TASKS = 8
"""Tasks a worker of a linear: dynamic, so that a core that is slower takes fewer."""
_TASK_BYTES = 1 << 20

_COLUMNS = {"num_logprobs": "logprobs"}
_OUTPUTS = {"logprobs": "logprobs_out"}
"""Fields of the kernels' record that the op calls otherwise."""


def embed(ctx: Context, node: Node) -> list[Job]:
    ids, out = node.inputs["ids"], node.outputs["out"]
    table = ctx.weight(node, "table")
    (V, H), fields = table.shape, dict[str, int]()
    if isinstance(table, PackedMatrix):
        setup, run = make_embed_packed(table.fmt.name)
        fields = {
            "scale": ctx.retain(table.scales),
            "block_bytes": table.blocks.shape[1],
            "scale_bytes": table.scales.shape[1],
        }
        table = table.blocks
    else:
        setup, run = make_embed()
    record = ctx.record(
        EMBED,
        count_at=ctx.count_at(ids),
        ids=ctx.at(ids),
        table=ctx.retain(table),
        V=V,
        H=H,
        out=ctx.at(out),
        out_stride=ctx.stride(out),
        chunk=1 if fields else 16,
        factor=ctx.bits(node.attr("scale")),
        **fields,
    )
    return [Job(node.name, run.address, record, setup.address)]


def join_rows(ctx: Context, node: Node) -> list[Job]:
    """The rows of both microbatches, one behind the other."""
    setup, run = make_join()
    out, fields = node.outputs["out"], dict[str, int]()
    for port, name in node.inputs.items():
        fields |= {f"{port}_count_at": ctx.count_at(name), port: ctx.at(name)}
    record = ctx.record(JOIN, row_bytes=ctx.stride(out), out=ctx.at(out), **fields)
    return [Job(node.name, run.address, record, setup.address)]


def rms_norm(ctx: Context, node: Node) -> list[Job]:
    x, out = node.inputs["x"], node.outputs["out"]
    weight = ctx.weight(node, "weight")
    fields = {"weight": ctx.retain(weight), "eps": ctx.bits(node.attr("eps"))}
    if "rows" in node.inputs:
        fields["index"] = ctx.at(node.inputs["rows"])
    return ctx.norm(
        node.name,
        out,
        node.outputs.get("sum"),
        fields,
        ctx.layouts_of(out),
        x,
        node.series("add"),
        K=len(weight),
    )


def post_norm(ctx: Context, node: Node) -> list[Job]:
    """What a branch gives to the residual stream."""
    out, adds = node.outputs["out"], node.series("add")
    weight, scale = ctx.weight(node, "weight"), ctx.optional(node, "scale")
    H = len(weight)
    addends = np.zeros(len(adds), ADD)
    for addend, name in zip(addends, adds, strict=True):
        addend["x"], addend["stride"] = ctx.at(name), ctx.stride(name)
    residual = {}
    if (x := node.inputs.get("x")) is not None:
        residual = {"x": ctx.at(x), "x_stride": ctx.stride(x)}
    setup, run = make_post_norm()
    scratch, scratch_stride = ctx.scratch(4 * H)
    record = ctx.record(
        POST_NORM,
        count_at=ctx.count_at(out),
        adds=ctx.retain(addends),
        add_count=len(adds),
        weight=ctx.retain(weight),
        scale=0 if scale is None else ctx.retain(scale),
        eps=ctx.bits(node.attr("eps")),
        H=H,
        out=ctx.at(out),
        out_stride=ctx.stride(out),
        scratch=scratch,
        scratch_stride=scratch_stride,
        **residual,
    )
    return [Job(node.name, run.address, record, setup.address)]


def softcap(ctx: Context, node: Node) -> list[Job]:
    """In place."""
    x = node.inputs["x"]
    setup, run = make_softcap(width(detect()))
    record = ctx.record(
        SOFTCAP,
        count_at=ctx.count_at(x),
        x=ctx.at(x),
        x_stride=ctx.stride(x),
        V=ctx.program.shape(x)[1],
        cap=ctx.bits(node.attr("cap")),
    )
    return [Job(node.name, run.address, record, setup.address)]


def add(ctx: Context, node: Node) -> list[Job]:
    """A sum, as a norm makes it before it normalises."""
    first, *others = node.series("x")
    out = node.outputs["out"]
    return ctx.norm(node.name, out, out, {}, [], first, tuple(others))


def linear(ctx: Context, node: Node) -> list[Job]:
    """x by a matrix; to columns of out from ``start`` on, where other ones write the rest."""
    x, out = node.inputs["x"], node.outputs["out"]
    matrix, bias = ctx.weight(node, "weight"), ctx.optional(node, "bias")
    kernel = ctx.kernel_of(matrix.fmt.name, node.attr("activations"))
    rows, jobs = ctx.rows(node, x, kernel, True)
    blocks = matrix.blocks.shape[0]
    workers = ctx.workers(node)
    chunk = max(1, min(blocks // (_TASKS * workers), _TASK_BYTES // matrix.blocks.shape[1]))
    gemm_chunk = max(1, min(MAX_BLOCKS, blocks // (2 * workers)))
    scratch, scratch_stride = ctx.scratch(kernel.scratch_bytes)
    setup, run = make_linear()
    record = ctx.record(
        LINEAR,
        count_at=ctx.count_at(x),
        rows=rows.address,
        row_stride=rows.stride,
        k_blocks=ceil_to(matrix.K, matrix.fmt.k_block) // K_BLOCK,
        w=ctx.retain(matrix.blocks),
        block_bytes=matrix.blocks.shape[1],
        scale=ctx.retain(matrix.scales),
        scale_bytes=matrix.scales.shape[1],
        blocks=blocks,
        N=matrix.N,
        bias=0 if bias is None else ctx.retain(bias),
        out=ctx.at(out) + 4 * node.attr("start"),
        out_stride=ctx.stride(out),
        chunk=chunk,
        gemm_chunk=gemm_chunk,
        gemm_from=ctx.gemm_from(kernel),
        tiles=kernel.tiles,
        gemm=kernel.gemm,
        tables=tables_address(),
        a_tiles=rows.a_tiles,
        tile_steps=2 if kernel.int8 else 4,
        scratch=scratch,
        scratch_stride=scratch_stride,
    )
    return [*jobs, Job(node.name, run.address, record, setup.address, node=node.numa)]


def per_head_linear(ctx: Context, node: Node) -> list[Job]:
    """x [T, G * x_head + ...] by a matrix of each head, to out [T, G * out_head]. Tokens of
    sequences with ``expand_from`` in the step are left out."""
    x, out = node.inputs["x"], node.outputs["out"]
    heads, first = ctx.weight(node, "heads"), node.attr("first")
    matrices, many = head_matrices(ctx, heads), node.attr("expand_from")
    scratch, scratch_stride = ctx.scratch(MAX_TOKENS * matrices["row_stride"])
    setup, run = make_per_head_linear()
    record = ctx.record(
        PER_HEAD_LINEAR,
        count_at=ctx.count_at(x),
        G=heads.G,
        x=ctx.at(x) + 4 * first * node.attr("x_head"),
        x_stride=ctx.stride(x),
        x_head=4 * node.attr("x_head"),
        K=heads.K,
        N=heads.N,
        out=ctx.at(out) + 4 * first * node.attr("out_head"),
        out_stride=ctx.stride(out),
        out_head=4 * node.attr("out_head"),
        sequence=ctx.at(node.inputs["sequences"]) if many else 0,
        tokens_to=many,
        scratch=scratch,
        scratch_stride=scratch_stride,
        **matrices,
    )
    return [Job(node.name, run.address, record, setup.address, node=node.numa)]


def head_matrices(ctx: Context, heads: PackedHeads) -> dict[str, int]:
    """Where the heads' weights lie and what multiplies them, as records have it."""
    kernel, K = ctx.kernel_of(heads.fmt.name, "bf16"), ceil_to(heads.K, heads.fmt.k_block)
    return {
        "k_blocks": K // K_BLOCK,
        "w": ctx.retain(heads.blocks),
        "w_head": heads.blocks.stride(0),
        "block_bytes": heads.blocks.shape[2],
        "scale": ctx.retain(heads.scales),
        "scale_head": heads.scales[0].nbytes,
        "scale_bytes": heads.scales.shape[2],
        "blocks": heads.blocks.shape[1],
        "tiles": kernel.tiles,
        "tables": tables_address(),
        "quantize_row": kernel.quantize_row,
        "row_stride": row_bytes(K, kernel.row_formats[0]),
    }


def sample_requests(ctx: Context, node: Node) -> list[Job]:
    logits = node.inputs["logits"]
    R, V = ctx.program.shape(logits)
    need = sizes(R, V, ctx.pool.threads)
    parameters = {
        _COLUMNS.get(name, name): ctx.at(node.inputs[name])
        for name in (*SAMPLING, *SAMPLING_TABLES)
    }
    outputs = {
        _OUTPUTS.get(name, name): ctx.at(out)
        for name, out in node.outputs.items()
        if name not in SAMPLING_TABLES
    }
    record = ctx.record(
        SAMPLING_JOB,
        count_at=ctx.count_at(logits),
        V=V,
        logits=ctx.at(logits),
        logits_stride=ctx.stride(logits),
        scratch_stride=need.scratch_stride,
        **parameters,
        **outputs,
        **{
            field: ctx.allocate(getattr(need, field))
            for field in ("adjusted", "maxima", "partials", "scratch")
        },
    )
    jobs = [
        Job(f"{node.name}.{name}", run.address, record, setup.address)
        for name, (setup, run) in zip(("scan", "draw", "finish"), make_ops(), strict=True)
    ]
    if "masks_written" in node.inputs:
        jobs[0].wait_for = ctx.at(node.inputs["masks_written"])
    return jobs
