"""The rows of the op table that passes add for GPUs: what attention and experts there read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .kv_offload import KV_OFFLOAD
from .op import Attr, Op, Port


def _index(*dims: str, optional: bool = False) -> Port:
    return Port("index", dims, optional)


RAGGED = {
    "positions": _index("T"),
    "sequences": _index("T"),  # row of the page table of each token's sequence
    "page_table": _index("tables", "table_pages"),
    # The same by sequences: first token and tokens in the step, keys, row of the page table.
    "query_starts": _index("S", optional=True),
    "query_lengths": _index("S", optional=True),
    "lengths": _index("S", optional=True),
    "page_rows": _index("S", optional=True),
}
# What attention on a GPU reads of the same (`attention_metadata`, ``passes.gpu.metadata``).
METADATA = {
    # Sequences in the order of the batch: pages of each, and keys of those whose one token attends
    # by the decode kernel; 0 for the others.
    "table": _index("rows", "table_pages", optional=True),
    "decode_lengths": _index("rows", optional=True),
    # Keys of each sequence, where its pages come from main memory (``passes.gpu.offload_kv``).
    "key_lengths": _index("rows", optional=True),
    # Tokens that attend to latents one by one: row of `table`, pages, and keys; 0 for the others.
    "token_rows": _index("T", optional=True),
    "token_table": _index("T", "table_pages", optional=True),
    "token_lengths": _index("T", optional=True),
    # Chunks, which attend by the prefill kernels, those with the most keys first: first token,
    # tokens, keys with those of its own tokens, row of its first key where keys become rows, pages.
    "chunk_starts": _index("chunks", optional=True),
    "chunk_lengths": _index("chunks", optional=True),
    "chunk_keys": _index("chunks", optional=True),
    "chunk_rows": _index("chunks", optional=True),
    "chunk_table": _index("chunks", "table_pages", optional=True),
    # On the host: all tokens that are not expanded are among so many first ones; most tokens of a
    # sequence that is; keys of all of these.
    "expansion": _index("3", optional=True),
}
WINDOWS = {  # the same pages of layers with a window that have pages of their own
    "window_table": METADATA["table"],
    "window_chunk_table": METADATA["chunk_table"],
}
SEQUENCES = {
    name: Port(port.kind, port.dims, True) for name, port in {**RAGGED, **METADATA}.items()
}
"""Sequences of attention as the engine has them, or as a GPU's kernels read them."""
ORDER = {  # ``SortedPairs``: tokens' choices by expert
    "pairs": Port("int32", ("pairs",), True),
    "starts": Port("int32", ("experts + 1",), True),
    "positions": Port("int32", ("T", "topk"), True),
}


def sequences_rule(node: Mapping[str, Any]) -> str | None:
    """Attention reads its sequences in one of both ways."""
    if "positions" in node and "sequences" in node and "page_table" in node:
        return None
    if any(name in node for name in ("decode_lengths", "token_lengths", "chunk_lengths")):
        return None
    return "it reads neither `positions`, `sequences` and `page_table` nor attention's metadata"


def order_rule(node: Mapping[str, Any]) -> str | None:
    """The parts of an order come together."""
    if len({name in node for name in ORDER}) > 1:
        return f"{', '.join(f'`{name}`' for name in ORDER)} come together"
    return None


def _factor_rule(node: Mapping[str, Any]) -> str | None:
    if node["N"] != 1 or node["topk"] != 1 or node["experts"] != 1:
        return "it is the factor of one expert"
    return order_rule(node)


METADATA_OPS: dict[str, Op] = {
    **KV_OFFLOAD,
    # A shared expert's factor, the sigmoid of a linear, as the choice of one expert of one: a
    # decode step's `linear` and `router` in one launch.
    "shared_factor": Op(
        inputs={
            "x": Port("activation", ("T", ">K")),
            "slot_mapping": Port("index", ("T",), True),
        },
        outputs={
            "ids": Port("index", ("T", "topk")),
            "weights": Port("float32", ("T", "topk")),
            **ORDER,
        },
        weights={"weight": Port("", ("N", "K"))},
        attrs={"experts": Attr(int)},
        rule=_factor_rule,
    ),
    # What attention's kernels read of the step's sequences. The host writes it in front of the
    # step; it crosses with the inputs. Chunks are sequences of `expand_from` tokens or more where
    # tokens attend to latents, else all behind the leading ones of one token each; of `chunk`
    # tokens at most.
    "attention_metadata": Op(
        inputs={**RAGGED, "window_page_table": _index("tables", "table_pages", optional=True)},
        outputs={**METADATA, **WINDOWS},
        attrs={"expand_from": Attr(int, 0), "chunk": Attr(int, 0)},
    ),
    # Rows of a table, by number.
    "select_rows": Op(
        inputs={"table": _index("M", "N"), "rows": _index("T")},
        outputs={"out": _index("T", "N")},
    ),
    # Tokens' choices in the order in which `moe_ffn` takes them: by expert.
    "sort_routing": Op(
        inputs={"ids": _index("T", "topk")},
        outputs={name: Port(port.kind, port.dims) for name, port in ORDER.items()},
        attrs={"experts": Attr(int)},
    ),
}
