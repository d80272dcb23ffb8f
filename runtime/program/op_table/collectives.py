"""The rows of the op table in which ranks meet: passes add them.

Ranks meet in collectives, and in sends between two of them. A program is that of one rank; its
peers are in these nodes alone, as `ranks`, the members of the group in order, or as the `peer` of a
send. All members run the collectives of a group in the same order (``analysis`` keeps it), and the
order of sums is that of the ranks: all get the same numbers.
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
    local, every, count = node["own"], node["every"], len(node["ranks"])
    if isinstance(local, int) and isinstance(every, int):
        fits = every == count * local
    else:
        fits = (local, every) == ("T", ALL_TOKENS)
    if not fits:
        return f"{local} rows of each of {count} ranks are not {every} rows"
    return _members(node)


def _columns(node: Mapping[str, Any]) -> str | None:
    starts, local = node["starts"], node["own"]
    widths = [last - first for first, last in pairwise(starts)]
    if len(widths) != len(node["ranks"]) or starts[-1] != node["every"] or local not in widths:
        return f"{local} columns are none of the parts {starts} of {node['every']}"
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
        inputs={"x": Port("float32", ("T", "own"))},
        outputs={"out": Port("float32", ("T", "every"))},
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
            "received_ids": Port("index", ("rows", "1")),
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
