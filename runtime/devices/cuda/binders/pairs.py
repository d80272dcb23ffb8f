"""Rows of tokens to the ranks of their experts, and back, as launches."""

from __future__ import annotations

from pykernels.gpu.moe.pairs import place_pairs as place
from pykernels.gpu.moe.pairs import sum_pairs as add_up
from pykernels.gpu.moe.pairs import take_pairs as take
from pykernels.ref.pairs import Taken

from ....program.node import Node
from ..memory.buffers import GpuBuffers
from .dense import Launch, void


def place_pairs(m: GpuBuffers, node: Node) -> Launch:
    ids, out = m.read(node, "ids"), (m.written(node, "places"), m.written(node, "counts"))
    starts = node.attr("starts")
    return lambda: void(place(ids, starts, out))


def take_pairs(m: GpuBuffers, node: Node) -> Launch:
    x, ids, weights, places = (m.read(node, name) for name in ("x", "ids", "weights", "places"))
    starts, member = node.attr("starts"), node.attr("member")
    out = Taken(*(m.written(node, name) for name in ("rows", "received_ids", "factors")))
    experts, room = starts[member : member + 2], len(out.rows)
    count, counted = m.written(node, "count"), m.read(node, "counts")[member : member + 1]

    def launch() -> None:
        take(x, ids, weights, places, experts, room, out)
        count.copy_(counted)

    return launch


def return_pairs(m: GpuBuffers, node: Node) -> Launch:
    x = m.read(node, "x").chunk(node.attr("parts"))[node.attr("part")]
    out, count, counted = m.written(node, "out"), m.written(node, "count"), m.read(node, "counted")

    def launch() -> None:
        out.copy_(x)
        count.copy_(counted)

    return launch


def sum_pairs(m: GpuBuffers, node: Node) -> Launch:
    rows = [m.tensor(name) for name in node.series("x")]
    ids, places, out = m.read(node, "ids"), m.read(node, "places"), m.written(node, "out")
    starts = node.attr("starts")
    return lambda: void(add_up(rows, ids, places, starts, out))


PAIRS = {
    "place_pairs": place_pairs,
    "take_pairs": take_pairs,
    "return_pairs": return_pairs,
    "sum_pairs": sum_pairs,
}
"""By the names of nodes."""
