"""The ops in which ranks meet, by the communicator that a program's memory has."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...program import Node
from .memory import Memory


def all_reduce(m: Memory, node: Node) -> None:
    m.ranks.all_reduce(*_out_and_x(m, node), node.attr("ranks"))


def all_gather(m: Memory, node: Node) -> None:
    m.ranks.all_gather(*_out_and_x(m, node), node.attr("ranks"))


def reduce_scatter(m: Memory, node: Node) -> None:
    m.ranks.reduce_scatter(*_out_and_x(m, node), node.attr("ranks"))


def send(m: Memory, node: Node) -> None:
    m.ranks.send([m.read(name) for name in node.reads], node.attr("peer"))


def recv(m: Memory, node: Node) -> None:
    m.ranks.recv([m.read(name) for name in node.writes], node.attr("peer"))


COLLECTIVES: dict[str, Callable[[Memory, Node], None]] = {
    op.__name__: op for op in (all_reduce, all_gather, reduce_scatter, send, recv)
}
"""By the names of nodes."""


def _out_and_x(m: Memory, node: Node) -> tuple[torch.Tensor, torch.Tensor]:
    return m.read(node.outputs["out"]), m.read(node.inputs["x"])
