"""The ops of the ``cuda`` device: a function for each that binds a node to memory."""

from __future__ import annotations

from collections.abc import Callable

from ....program.node import Node
from ..memory.buffers import GpuBuffers
from . import attention, dense, experts, kv_pages, latents, sampling
from .delta_nets import DELTA_NETS
from .dense import Launch
from .pairs import PAIRS
from .rows import ROWS

BINDERS: dict[str, Callable[[GpuBuffers, Node], Launch]] = {
    "embed": dense.embed,
    "rms_norm": dense.rms_norm,
    "post_norm": dense.post_norm,
    "softcap": dense.softcap,
    "add": dense.add,
    "linear": dense.linear,
    "per_head_linear": latents.per_head,
    "rope_table": attention.rope_table,
    "mla_rope_cache_write": attention.mla_rope_cache_write,
    "gqa_rope_cache_write": attention.gqa_rope_cache_write,
    "attention_metadata": attention.attention_metadata,
    "select_rows": latents.select_rows,
    "attention": attention.attention,
    "attention_expanded": latents.attention_expanded,
    "router": experts.router,
    "split_routing": experts.split_routing,
    "place_routing": experts.place_routing,
    "rank_experts": experts.rank_experts,
    "load_experts": experts.load_experts,
    "unpack_experts": experts.unpack_experts,
    "load_weights": experts.load_weights,
    "shared_factor": experts.shared_factor,
    "sort_routing": experts.sort_routing,
    "moe_ffn": experts.moe_ffn,
    "list_pages": kv_pages.list_pages,
    "load_pages": kv_pages.load_pages,
    "store_rows": kv_pages.store_rows,
    **DELTA_NETS,
    **ROWS,
    **PAIRS,
    "join_rows": dense.join_rows,
    "sample_requests": sampling.sample_requests,
}
"""The ops of this device."""
