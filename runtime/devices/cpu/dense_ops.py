"""The ops around attention and experts as jobs: embedding, norms, linears, sampling."""

from __future__ import annotations

from pykernels.cpu.activations.row_layout import row_bytes
from pykernels.cpu.embedding import EMBED, make_embed, make_embed_packed
from pykernels.cpu.gemm.common import MAX_BLOCKS
from pykernels.cpu.gemv.common import MAX_TOKENS
from pykernels.cpu.linear import HEADS, LINEAR, make_heads, make_linear
from pykernels.cpu.moe.kernel import tables_address
from pykernels.cpu.sampling import SAMPLING as SAMPLING_JOB
from pykernels.cpu.sampling import make_ops, sizes
from pykernels.quant.layout import K_BLOCK, ceil_to

from ...matrix import PackedHeads, PackedMatrix
from ...ops import SAMPLING
from ...program import Node
from ...workers.job import Job
from .context import Context

_TASKS = 8
"""Tasks a worker of a linear: dynamic, so that a core that is slower takes fewer."""
_TASK_BYTES = 1 << 20

_COLUMNS = {"num_logprobs": "logprobs"}
_OUTPUTS = {"logprobs": "logprobs_out"}
"""Fields of the kernels' record that the op calls otherwise."""


def embed(step: Context, node: Node) -> list[Job]:
    ids, out = node.inputs["ids"], node.outputs["out"]
    table = node.weights["table"]
    (V, H), fields = table.shape, dict[str, int]()
    if isinstance(table, PackedMatrix):
        opening, run = make_embed_packed(table.fmt.name)
        fields = {
            "scale": step.keep(table.scales), "block_bytes": table.blocks.shape[1],
            "scale_bytes": table.scales.shape[1],
        }  # fmt: skip
        table = table.blocks
    else:
        opening, run = make_embed()
    record = step.record(
        EMBED, count_at=step.count_at(ids), ids=step.at(ids), table=step.keep(table), V=V, H=H,
        out=step.at(out), out_stride=step.stride(out), chunk=1 if fields else 16, **fields,
    )  # fmt: skip
    return [Job(node.name, run.address, record, opening.address)]


def rms_norm(step: Context, node: Node) -> list[Job]:
    x, out = node.inputs["x"], node.outputs["out"]
    weight = node.weights["weight"].float().contiguous()
    fields = {"weight": step.keep(weight), "eps": step.bits(node.attr("eps"))}
    if "rows" in node.inputs:
        fields["index"] = step.at(node.inputs["rows"])
    return step.norm(
        node.name, out, node.outputs.get("sum"), fields, step.forms_of(out), x,
        node.series("add"), K=len(weight),
    )  # fmt: skip


def linear(step: Context, node: Node) -> list[Job]:
    """x by a matrix; to columns of out from ``start`` on, where other ones write the rest."""
    x, out = node.inputs["x"], node.outputs["out"]
    matrix, bias = node.weights["weight"], node.weights.get("bias")
    kernel = step.kernel_of(matrix.fmt.name, node.attr("activations"))
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
        out=step.at(out) + 4 * node.attr("start"),
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


def per_head_linear(step: Context, node: Node) -> list[Job]:
    """x [T, G * x_head + ...] by a matrix of each head, to out [T, G * out_head]. Tokens of
    sequences with ``expand_from`` in the step are left out."""
    x, out = node.inputs["x"], node.outputs["out"]
    heads = node.weights["heads"]
    matrices, many = head_matrices(step, heads), node.attr("expand_from")
    scratch, scratch_stride = step.scratch(MAX_TOKENS * matrices["row_stride"])
    opening, run = make_heads()
    record = step.record(
        HEADS,
        count_at=step.count_at(x),
        G=heads.G,
        x=step.at(x),
        x_stride=step.stride(x),
        x_head=4 * node.attr("x_head"),
        K=heads.K,
        N=heads.N,
        out=step.at(out),
        out_stride=step.stride(out),
        out_head=4 * node.attr("out_head"),
        sequence=step.at(node.inputs["sequences"]) if many else 0,
        tokens_to=many,
        scratch=scratch,
        scratch_stride=scratch_stride,
        **matrices,
    )
    return [Job(node.name, run.address, record, opening.address)]


def head_matrices(step: Context, heads: PackedHeads) -> dict[str, int]:
    """Where the heads' weights lie and what multiplies them, as records have it."""
    kernel, K = step.kernel_of(heads.fmt.name, "bf16"), ceil_to(heads.K, heads.fmt.k_block)
    return {
        "k_blocks": K // K_BLOCK,
        "w": step.keep(heads.blocks),
        "w_head": heads.blocks.stride(0),
        "block_bytes": heads.blocks.shape[2],
        "scale": step.keep(heads.scales),
        "scale_head": heads.scales[0].nbytes,
        "scale_bytes": heads.scales.shape[2],
        "blocks": heads.blocks.shape[1],
        "tiles": kernel.tiles,
        "tables": tables_address(),
        "quantize_row": kernel.quantize_row,
        "row_stride": row_bytes(K, kernel.row_formats[0]),
    }


def sample_requests(step: Context, node: Node) -> list[Job]:
    logits = node.inputs["logits"]
    R, V = step.program.shape(logits)
    need = sizes(R, V, step.pool.threads)
    parameters = {_COLUMNS.get(name, name): step.at(node.inputs[name]) for name in SAMPLING}
    outputs = {_OUTPUTS.get(name, name): step.at(out) for name, out in node.outputs.items()}
    record = step.record(
        SAMPLING_JOB,
        count_at=step.count_at(logits),
        V=V,
        logits=step.at(logits),
        logits_stride=step.stride(logits),
        scratch_stride=need.scratch_stride,
        **parameters,
        **outputs,
        **{
            field: step.room(getattr(need, field))
            for field in ("adjusted", "maxima", "partials", "scratch")
        },
    )
    return [
        Job(f"{node.name}.{name}", run.address, record, opening.address)
        for name, (opening, run) in zip(("scan", "draw", "finish"), make_ops(), strict=True)
    ]
