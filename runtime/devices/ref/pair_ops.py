"""Rows of tokens to the ranks of their experts, and back."""

from __future__ import annotations

from pykernels import ref
from pykernels.ref.pairs import Taken

from ...program import Node
from .memory import RefBuffers


def place_pairs(m: RefBuffers, node: Node) -> None:
    out = m.read(node.outputs["places"]), m.read(node.outputs["counts"])
    ref.place_pairs(m.read(node.inputs["ids"]), node.attr("starts"), out)


def take_pairs(m: RefBuffers, node: Node) -> None:
    x, ids, weights, places = (
        m.read(node.inputs[name]) for name in ("x", "ids", "weights", "places")
    )
    out = Taken(*(m.full(node.outputs[name]) for name in ("rows", "received_ids", "factors")))
    starts, member = node.attr("starts"), node.attr("member")
    experts = starts[member], starts[member + 1]
    ref.take_pairs(x, ids, weights, places, experts, len(out.rows), out)
    m.write(node.outputs["count"], m.read(node.inputs["counts"])[member])


def return_pairs(m: RefBuffers, node: Node) -> None:
    rows = m.full(node.inputs["x"]).chunk(node.attr("parts"))[node.attr("part")]
    m.write(node.outputs["out"], rows)
    m.write(node.outputs["count"], m.read(node.inputs["counted"]))


def sum_pairs(m: RefBuffers, node: Node) -> None:
    rows = [m.full(name) for name in node.series("x")]
    ids, places = (m.read(node.inputs[name]) for name in ("ids", "places"))
    ref.sum_pairs(rows, ids, places, node.attr("starts"), m.read(node.outputs["out"]))


PAIRS = {op.__name__: op for op in (place_pairs, take_pairs, return_pairs, sum_pairs)}
"""By the names of nodes."""
