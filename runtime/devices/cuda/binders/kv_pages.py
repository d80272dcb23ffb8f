"""Pages of caches in main memory as launches (``passes.gpu.offload_kv``)."""

from __future__ import annotations

import torch

from pykernels.gpu import kv_pages

from ....kv_cache.layout import PAGE
from ....program.node import Node
from ..memory.buffers import GpuBuffers
from .dense import Launch, void


def list_pages(m: GpuBuffers, node: Node) -> Launch:
    table, lengths = m.read(node, "table"), m.read(node, "lengths")
    out, window = m.written(node, "pages"), node.attr("window")
    return lambda: void(kv_pages.list_pages(table, lengths, out, PAGE, window))


def load_pages(m: GpuBuffers, node: Node) -> Launch:
    pages, caches, staging = m.read(node, "pages"), _series(m, node, "cache"), _staging(m, node)
    return lambda: kv_pages.load_pages(pages, caches, staging)


def store_rows(m: GpuBuffers, node: Node) -> Launch:
    slots, caches, staging = (
        m.read(node, "slot_mapping"),
        _series(m, node, "cache"),
        _staging(m, node),
    )
    return lambda: kv_pages.store_rows(slots, staging, caches)


def _staging(m: GpuBuffers, node: Node) -> list[torch.Tensor]:
    return _series(m, node, "staging")


def _series(m: GpuBuffers, node: Node, name: str) -> list[torch.Tensor]:
    return [m.tensor(buffer) for buffer in node.series(name)]
