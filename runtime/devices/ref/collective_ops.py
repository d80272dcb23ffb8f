"""The ops in which ranks meet, by the communicator that a program's memory has."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch

from ...program import Node
from .memory import RefBuffers


def all_reduce(m: RefBuffers, node: Node) -> None:
    m.ranks.all_reduce(*_out_and_x(m, node), node.attr("ranks"))


def all_gather(m: RefBuffers, node: Node) -> None:
    m.ranks.all_gather(*_out_and_x(m, node), node.attr("ranks"))


def gather_columns(m: RefBuffers, node: Node) -> None:
    out, x = _out_and_x(m, node)
    widths = [last - first for first, last in pairwise(node.attr("starts"))]
    came = [x.new_empty(len(x), width) for width in widths]
    m.ranks.all_to_all(came, [x] * len(widths), node.attr("ranks"))
    out.copy_(torch.cat(came, 1))


def reduce_scatter(m: RefBuffers, node: Node) -> None:
    m.ranks.reduce_scatter(*_out_and_x(m, node), node.attr("ranks"))


def dispatch(m: RefBuffers, node: Node) -> None:
    """Pairs of a token and an expert, sorted by expert, to the ranks that have these."""
    ranks, topk = node.attr("ranks"), m.read(node.inputs["ids"]).shape[1]
    order, counts = _sorted_pairs(m, node)
    ids, factors = (m.read(node.inputs[name]).flatten()[order] for name in ("ids", "weights"))
    x = m.read(node.inputs["x"])[order // topk]
    came = m.full(node.outputs["counts"])
    m.ranks.all_to_all(came.split(1), counts.split(1), ranks)
    rows, received_ids, weights = (
        m.full(node.outputs[n]) for n in ("rows", "received_ids", "factors")
    )
    received_ids.fill_(-1)
    first = node.attr("starts")[ranks.index(m.ranks.rank)]
    for out, value in ((rows, x), (received_ids[:, 0], ids), (weights[:, 0], factors)):
        parts = out[: int(came.sum())].split(came.tolist())
        m.ranks.all_to_all(parts, value.split(counts.tolist()), ranks)
    received_ids[: int(came.sum())] -= first


def combine(m: RefBuffers, node: Node) -> None:
    """Rows back to where they came from, in the order of ``dispatch``, and their sums."""
    topk = m.read(node.inputs["ids"]).shape[1]
    order, counts = _sorted_pairs(m, node)
    came, rows = m.full(node.inputs["counts"]).tolist(), m.full(node.inputs["rows"])
    back = rows.new_empty(len(order), rows.shape[1])
    parts = back.split(counts.tolist())
    m.ranks.all_to_all(parts, rows[: sum(came)].split(came), node.attr("ranks"))
    out = m.read(node.outputs["out"])
    out.zero_().index_add_(0, order // topk, back)


def _sorted_pairs(m: RefBuffers, node: Node) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of the pairs of a token and an expert by expert, and how many go to each rank."""
    ids = m.read(node.inputs["ids"]).flatten()
    order = ids.argsort(stable=True)[int((ids < 0).sum()) :]
    edges = torch.tensor(node.attr("starts"), dtype=torch.int64, device="cpu")
    return order, torch.searchsorted(ids[order], edges).diff()


def send(m: RefBuffers, node: Node) -> None:
    m.ranks.send([m.read(name) for name in node.reads], node.attr("peer"))


def recv(m: RefBuffers, node: Node) -> None:
    m.ranks.recv([m.read(name) for name in node.writes], node.attr("peer"))


_OPS: tuple[Callable[[RefBuffers, Node], None], ...] = (
    all_reduce,
    all_gather,
    gather_columns,
    reduce_scatter,
    dispatch,
    combine,
    send,
    recv,
)
COLLECTIVES = {op.__name__: op for op in _OPS}
"""By the names of nodes."""


def _out_and_x(m: RefBuffers, node: Node) -> tuple[torch.Tensor, torch.Tensor]:
    return m.read(node.outputs["out"]), m.read(node.inputs["x"])
