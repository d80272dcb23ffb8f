"""Attention over some of the keys of a step, as striped prompts have it (``passes.shard``)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pykernels import ref
from pykernels.ref.attention import read_pages
from pykernels.ref.partial_attention import (
    Partial,
    merge_attention,
    merge_sinks,
    partial_attention,
)

from ...kv_cache.layout import cache_inputs
from ...program import Node
from .memory import RefBuffers


def attention_block(m: RefBuffers, node: Node) -> None:
    """Each token's sequence up to its position, among the keys of a block."""
    names = "positions", "sequences", "key_positions", "key_sequences"
    positions, sequences, key_positions, key_sequences = (m.read(node.inputs[n]) for n in names)
    mask = (sequences[:, None] == key_sequences) & (key_positions <= positions[:, None])
    table = torch.arange(-(-len(key_positions) // _page(m, node)), dtype=torch.int64, device="cpu")
    keys, values = keys_values(m, node, table, len(key_positions))
    part = _attend(
        m, node, slice(None), keys, values, mask & _in_window(node, positions, key_positions)
    )
    if "out" in node.inputs:
        before = m.read(node.inputs["out"]).view_as(part[0]), m.read(node.inputs["lse"])
        part = merge_attention(before, part)
    _write(m, node, part)


def attention_prefix(m: RefBuffers, node: Node) -> None:
    """Each token's sequence as far as it was before the step."""
    names = "positions", "sequences", "prefix_lengths"
    positions, sequences, lengths = (m.read(node.inputs[n]) for n in names)
    out = torch.zeros(
        len(positions), node.attr("heads"), node.attr("dv"), dtype=torch.float32, device="cpu"
    )
    lse = torch.full(out.shape[:2], float("-inf"), dtype=torch.float32, device="cpu")
    for sequence in sequences[sequences >= 0].unique().tolist():
        (at,) = torch.where(sequences == sequence)
        length = int(lengths[at[0]])
        if not length:
            continue
        table = m.full(node.inputs["page_table"])[sequence]
        keys, values = keys_values(m, node, table, length)
        mask = _in_window(
            node, positions[at], torch.arange(length, dtype=torch.int64, device="cpu")
        )
        out[at], lse[at] = _attend(m, node, at, keys, values, mask)
    part = out, lse
    if "sinks" in node.weights:
        part = merge_sinks(part, m.weight(node, "sinks"))
    _write(m, node, part)


def cache_write(m: RefBuffers, node: Node) -> None:
    """Rows of a block to their slots, in every part of the cache."""
    slot_mapping = m.read(node.inputs["slot_mapping"])
    rows = [_rows(m, name)[: len(slot_mapping)] for name in node.series("rows")]
    ref.cache_write(rows, [m.full(name) for name in node.series("cache")], slot_mapping)


PARTIAL: dict[str, Callable[[RefBuffers, Node], None]] = {
    op.__name__: op for op in (attention_block, attention_prefix, cache_write)
}
"""By the names of nodes."""


def keys_values(
    m: RefBuffers, node: Node, table: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first keys and values of a table's pages, float32 [length, KVH, D]; a latent's values are
    the first part of its keys."""
    cache = {part: m.full(name) for part, name in cache_inputs(node).items()}

    def rows(part: str) -> torch.Tensor:
        scales = cache.get(f"{part}_scale")
        return read_pages(cache[part], table, length, scales, torch.float32)

    if "k" in cache:
        return rows("k"), rows("v")
    latent = rows("latent")
    keys = torch.cat([latent, rows("rope")], -1) if "rope" in cache else latent
    return keys[:, None], keys[:, None]


def _page(m: RefBuffers, node: Node) -> int:
    return m.full(next(iter(cache_inputs(node).values()))).shape[1]


def _rows(m: RefBuffers, name: str) -> torch.Tensor:
    """A block's rows, one behind the other."""
    return m.full(name).flatten(0, 1)


def _in_window(node: Node, positions: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """bool [Q, K]: whether keys [K] are in the window of positions [Q], if there is one."""
    window = node.attr("window") or torch.iinfo(torch.int64).max
    return keys > positions[:, None] - window


def _attend(
    m: RefBuffers,
    node: Node,
    at: slice | torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
) -> Partial:
    q = m.read(node.inputs["q"]).flatten(1).unflatten(1, (node.attr("heads"), node.attr("dk")))[at]
    return partial_attention(q, keys, values[..., : node.attr("dv")], mask, node.attr("scale"))


def _write(m: RefBuffers, node: Node, part: Partial) -> None:
    m.write(node.outputs["out"], part[0])
    m.write(node.outputs["lse"], part[1])
