"""Embedding, norms and products as launches."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pykernels.gpu.embedding import embed as embed_rows
from pykernels.gpu.gemm.linear import linear as multiply
from pykernels.gpu.moe.router_logits import router_logits
from pykernels.gpu.norm import rms_norm as norm_rows

from ...matrix import PackedMatrix
from ...node import Node
from . import weights
from .memory import Memory

Launch = Callable[[], None]


def embed(m: Memory, node: Node) -> Launch:
    ids, out, table = m.read(node, "ids"), m.written(node, "out"), node.weights["table"]
    if isinstance(table, PackedMatrix):
        table = weights.dense(table, m.device)
    table = table.to(m.device, torch.bfloat16)
    return lambda: void(embed_rows(ids, table, out=out))


def rms_norm(m: Memory, node: Node) -> Launch:
    weight = node.weights["weight"].to(m.device)
    x = m.read(node, "x")[:, : len(weight)]  # [M, H]
    adds = [m.tensor(name) for name in node.series("add")]
    rows, out = m.optional(node, "rows"), m.written(node, "out")
    total = m.written(node, "sum") if "sum" in node.outputs else None
    eps = node.attr("eps")
    if not adds and rows is None and x.dtype == out.dtype:
        return lambda: void(norm_rows(x, weight, eps, out=(out, None)))

    def launch() -> None:
        parts = [part if rows is None else part.index_select(0, rows) for part in (x, *adds)]
        summed = parts[0].float()
        for part in parts[1:]:
            summed = summed + part
        if total is not None:
            total.copy_(summed)
        out.copy_(norm_rows(summed, weight, eps)[0])

    return launch


def linear(m: Memory, node: Node) -> Launch:
    packed, bias = node.weights["weight"], node.weights.get("bias")
    x, out = m.read(node, "x")[:, : packed.K], m.written(node, "out")
    start = node.attr("start")
    bias = None if bias is None else bias.to(m.device)
    if out.dtype == torch.float32:  # logits: never rounded to bfloat16
        gate = weights.dense(packed, m.device)
        return _float32(x, gate, bias, out[:, start : start + packed.N])
    parts = weights.matrix(packed, m.device)
    whole = len(parts) == 1 and out.shape[1] == packed.N

    def launch() -> None:
        rows = x.contiguous()
        for part in parts:
            at = slice(part.start, part.start + part.matrix.N)
            own = None if bias is None else bias[at]
            if whole:
                multiply(rows, part.matrix, own, out=out)
            else:
                y = multiply(rows, part.matrix, own)
                out[:, start + at.start : start + at.stop] = y

    return launch


def _float32(
    x: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> Launch:
    def launch() -> None:
        y = router_logits(x.contiguous(), gate)
        out.copy_(y if bias is None else y + bias)

    return launch


def per_head_linear(m: Memory, node: Node) -> Launch:
    matrices = weights.heads(node.weights["heads"], m.device)  # [G, N, K]
    G, N, K = matrices.shape
    x_head, out_head = node.attr("x_head"), node.attr("out_head")
    x = m.read(node, "x").flatten(1)[:, : G * x_head].unflatten(1, (G, x_head))[..., :K]
    out = m.written(node, "out").flatten(1).unflatten(1, (G, out_head))[..., :N]
    transposed = matrices.transpose(1, 2)

    def launch() -> None:
        y = torch.bmm(x.transpose(0, 1), transposed)  # [G, T, N]
        out.copy_(y.transpose(0, 1))

    return launch


def void(_: object) -> None:
    """A launch returns nothing."""
