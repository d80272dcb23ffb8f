"""Rows of the op table that lowering never makes: passes add them for ranks and for GPUs.

Ranks meet in collectives, and in sends between two of them. A program is that of one rank; its
peers are in these nodes alone, as `ranks`, the members of the group in order, or as the `peer` of a
send. All members run the collectives of a group in the same order (``analysis`` keeps it), and the
order of sums is that of the ranks: all get the same numbers.

On a GPU nodes write what kernels read of a step besides activations and weights
(``passes.gpu.metadata``).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from .op import Attr, Op, Port

ALL_TOKENS = "TW"
"""The dimension of the tokens of all ranks, where each has as many ("T")."""

_RANKS = {"ranks": Attr(tuple)}


def _members(node: Mapping[str, Any]) -> str | None:
    ranks = node["ranks"]
    if len(set(ranks)) < max(2, len(ranks)) or not all(isinstance(rank, int) for rank in ranks):
        return f"its group {ranks} is not of two different ranks or more"
    return None


def _gathered(node: Mapping[str, Any]) -> str | None:
    """All members' rows are as many as a member's by the number of members."""
    own, every, count = node["own"], node["every"], len(node["ranks"])
    if isinstance(own, int) and isinstance(every, int):
        fits = every == count * own
    else:
        fits = (own, every) == ("T", ALL_TOKENS)
    if not fits:
        return f"{own} rows of each of {count} ranks are not {every} rows"
    return _members(node)


def _columns(node: Mapping[str, Any]) -> str | None:
    starts, own = node["starts"], node["own"]
    widths = [last - first for first, last in pairwise(starts)]
    if len(widths) != len(node["ranks"]) or starts[-1] != node["every"] or own not in widths:
        return f"{own} columns are none of the parts {starts} of {node['every']}"
    return _members(node)


COLLECTIVES: dict[str, Op] = {
    # The sum of all members' x, which each of them gets.
    "all_reduce": Op(
        inputs={"x": Port("activation", ("T", "H"))},
        outputs={"out": Port("activation", ("T", "H"))},
        attrs=_RANKS,
        rule=_members,
    ),
    # The rows of all members one behind the other, in the order of `ranks`.
    "all_gather": Op(
        inputs={"x": Port("any", ("own", "H"))},
        outputs={"out": Port("any", ("every", "H"))},
        attrs=_RANKS,
        rule=_gathered,
    ),
    # The columns of all members beside each other; the r-th one has `starts[r]` up to
    # `starts[r + 1]`.
    "gather_columns": Op(
        inputs={"x": Port("activation", ("T", "own"))},
        outputs={"out": Port("activation", ("T", "every"))},
        attrs={**_RANKS, "starts": Attr(tuple)},
        rule=_columns,
    ),
    # The sum of all members' x, of which each gets its own rows.
    "reduce_scatter": Op(
        inputs={"x": Port("activation", ("every", "H"))},
        outputs={"out": Port("activation", ("own", "H"))},
        attrs=_RANKS,
        rule=_gathered,
    ),
    # A token's row to the rank of each of its experts, of which the r-th member has `starts[r]` up
    # to `starts[r + 1]`. Rows come sorted by the rank that sent them, and by expert; with them the
    # expert among this rank's, -1 behind the last row, and its factor. `counts`: rows of each rank.
    "dispatch": Op(
        inputs={
            "x": Port("activation", ("T", "H")),
            "ids": Port("index", ("T", "topk")),
            "weights": Port("float32", ("T", "topk")),
        },
        outputs={
            "rows": Port("activation", ("rows", "H")),
            "own_ids": Port("index", ("rows", "1")),
            "factors": Port("float32", ("rows", "1")),
            "counts": Port("index", ("members",)),
        },
        attrs={**_RANKS, "starts": Attr(tuple)},
        rule=_members,
    ),
    # What experts have made of those rows back to their tokens, and its sum.
    "combine": Op(
        inputs={
            "rows": Port("activation", ("rows", "H")),
            "ids": Port("index", ("T", "topk")),
            "counts": Port("index", ("members",)),
        },
        outputs={"out": Port("activation", ("T", "H"))},
        attrs={**_RANKS, "starts": Attr(tuple)},
        rule=_members,
    ),
    # Buffers to another rank, and from it: the n-th receive from a peer gets what its n-th send to
    # this rank has sent.
    "send": Op(
        inputs={"value": Port("any", None, repeated=True)},
        outputs={},
        attrs={"peer": Attr(int)},
    ),
    "recv": Op(
        inputs={},
        outputs={"value": Port("any", None, repeated=True)},
        attrs={"peer": Attr(int)},
    ),
}


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
SEQUENCES = {
    name: Port(port.kind, port.dims, True) for name, port in {**RAGGED, **METADATA}.items()
}
"""Of attention: as the engine has them, or as a GPU's kernels read them."""
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


METADATA_OPS: dict[str, Op] = {
    # What attention's kernels read of the step's sequences. The host writes it in front of the
    # step; it crosses with the inputs. Chunks are sequences of `expand_from` tokens or more where
    # tokens attend to latents, else all behind the leading ones of one token each; of `chunk`
    # tokens at most.
    "attention_metadata": Op(
        inputs=RAGGED,
        outputs=METADATA,
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
