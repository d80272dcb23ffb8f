"""Embedding, norms and products as launches."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pykernels.gpu.embedding import embed as embed_rows
from pykernels.gpu.gemm.linear import linear as multiply
from pykernels.gpu.handshake import combine
from pykernels.gpu.moe.router_logits import router_logits
from pykernels.gpu.norm import post_norm as behind_branch
from pykernels.gpu.norm import rms_norm as norm
from pykernels.gpu.norm import softcap as cap_logits

from ....program.node import Node
from ..memory.buffers import GpuBuffers

Launch = Callable[[], None]


def embed(m: GpuBuffers, node: Node) -> Launch:
    ids, out, table = m.read(node, "ids"), m.written(node, "out"), m.weight(node, "table")
    scale = node.attr("scale")
    return lambda: void(embed_rows(ids, table, scale, out=out))


def rms_norm(m: GpuBuffers, node: Node) -> Launch:
    weight = m.weight(node, "weight")
    H = len(weight)
    x = m.read(node, "x")[:, :H]  # [M, H]
    adds = [m.tensor(name)[:, :H] for name in node.series("add")]
    rows, out = m.optional(node, "rows"), m.written(node, "out")
    eps = node.attr("eps")
    if rows is None and not adds and "sum" not in node.outputs:
        return lambda: void(norm(x, weight, eps, out=(out, None)))
    if "sum" in node.outputs:
        total = m.written(node, "sum")
    else:
        total = torch.empty(out.shape, dtype=torch.float32, device=m.device)
    if rows is None:
        return lambda: void(combine(x, adds, weight, eps, (out, total)))
    indices = rows

    def launch() -> None:
        first, *others = (part.index_select(0, indices) for part in (x, *adds))
        combine(first, others, weight, eps, (out, total))

    return launch


def post_norm(m: GpuBuffers, node: Node) -> Launch:
    weight, scale = m.weight(node, "weight"), m.optional_weight(node, "scale")
    first, *others = (m.tensor(name)[:, : len(weight)] for name in node.series("add"))
    residual, out, eps = m.optional(node, "x"), m.written(node, "out"), node.attr("eps")
    if not others:
        return lambda: void(behind_branch(first, weight, eps, residual, scale, out))

    def launch() -> None:
        total = first.float()
        for part in others:
            total = total + part
        behind_branch(total, weight, eps, residual, scale, out)

    return launch


def softcap(m: GpuBuffers, node: Node) -> Launch:
    logits, cap = m.written(node, "x"), node.attr("cap")
    return lambda: void(cap_logits(logits, cap, out=logits))


def add(m: GpuBuffers, node: Node) -> Launch:
    first, *others = (m.tensor(name) for name in node.series("x"))
    out = m.written(node, "out")

    def launch() -> None:
        total = first.float()
        for part in others:
            total = total + part
        out.copy_(total)

    return launch


def join_rows(m: GpuBuffers, node: Node) -> Launch:
    first, last, out = m.read(node, "first"), m.read(node, "last"), m.written(node, "out")
    parts = (out[: len(first)], first), (out[len(first) :], last)

    def launch() -> None:
        for to, rows in parts:
            to.copy_(rows)

    return launch


def linear(m: GpuBuffers, node: Node) -> Launch:
    weight, bias = m.weight(node, "weight"), m.optional_weight(node, "bias")
    N, K = m.program.weight(node, "weight").shape
    x, out = m.read(node, "x")[:, :K], m.written(node, "out")
    start = node.attr("start")
    if isinstance(weight, torch.Tensor):  # logits: never rounded to bfloat16
        return _float32(x, weight, bias, out[:, start : start + N])
    parts = weight
    whole = len(parts) == 1 and out.shape[1] == N

    def launch() -> None:
        rows = x.contiguous()
        for part in parts:
            at = slice(part.start, part.start + part.matrix.N)
            bias_rows = None if bias is None else bias[at]
            if whole:
                multiply(rows, part.matrix, bias_rows, out=out)
            else:
                y = multiply(rows, part.matrix, bias_rows)
                out[:, start + at.start : start + at.stop] = y

    return launch


def _float32(
    x: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> Launch:
    if bias is None and out.is_contiguous():
        return lambda: void(router_logits(x, gate, out))

    def launch() -> None:
        y = router_logits(x, gate)
        out.copy_(y if bias is None else y + bias)

    return launch


def void(_: object) -> None:
    """A launch returns nothing."""
