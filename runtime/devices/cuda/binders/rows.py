"""Rows and columns that move between buffers and into the cache, as launches."""

from __future__ import annotations

from itertools import pairwise

import torch

from pykernels.gpu.cache_write import cache_write as write_rows

from ....program.node import Node
from ..memory.buffers import GpuBuffers
from .dense import Launch


def concat_rows(m: GpuBuffers, node: Node) -> Launch:
    parts = [m.tensor(name) for name in node.series("x")]
    return _copies(list(zip(m.written(node, "out").chunk(len(parts)), parts, strict=True)))


def take_rows(m: GpuBuffers, node: Node) -> Launch:
    out, x = m.written(node, "out"), m.read(node, "x")
    return _copies([(out, x.chunk(node.attr("parts"))[node.attr("part")])])


def concat_columns(m: GpuBuffers, node: Node) -> Launch:
    out, parts = m.written(node, "out"), [m.tensor(name) for name in node.series("x")]
    columns = [out[:, first:last] for first, last in pairwise(node.attr("starts"))]
    return _copies(list(zip(columns, parts, strict=True)))


def cache_write(m: GpuBuffers, node: Node) -> Launch:
    rows = [m.tensor(name).flatten(0, 1) for name in node.series("rows")]
    cache = [m.tensor(name) for name in node.series("cache")]
    slot_mapping = m.read(node, "slot_mapping")
    return lambda: write_rows(rows, cache, slot_mapping)


def _copies(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Launch:
    """Copies each second tensor to the first one."""

    def launch() -> None:
        for to, value in pairs:
            to.copy_(value)

    return launch


ROWS = {
    "concat_rows": concat_rows,
    "take_rows": take_rows,
    "concat_columns": concat_columns,
    "cache_write": cache_write,
}
"""By the names of nodes."""
