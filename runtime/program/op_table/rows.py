"""The rows of the op table that move rows and columns: where microbatches are joined, and what
collectives become where ranks are parts of one program (``passes.shard.join``)."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from .collectives import ALL_TOKENS
from .op import Attr, Op, Port


def parts_fault(part: Any, every: Any, count: int) -> str | None:
    """Why ``count`` parts of so many rows do not make all of them."""
    if isinstance(part, int) and isinstance(every, int):
        fits = every == count * part
    else:
        fits = (part, every) == ("T", ALL_TOKENS)
    return None if fits else f"{count} times {part} rows are not {every} rows"


def _concat_rows(node: Mapping[str, Any]) -> str | None:
    count = sum(1 for name in node if name[:1] == "x" and name[1:].isdecimal())
    return parts_fault(node.get("own"), node["every"], count)


def _take_rows(node: Mapping[str, Any]) -> str | None:
    if not 0 <= node["part"] < node["parts"]:
        return f"there is no part {node['part']} of {node['parts']}"
    return parts_fault(node["own"], node["every"], node["parts"])


def _concat_columns(node: Mapping[str, Any]) -> str | None:
    widths = [last - first for first, last in pairwise(node["starts"])]
    if sum(widths) != node["every"]:
        return f"columns {node['starts']} are not all of {node['every']}"
    return None


ROWS: dict[str, Op] = {
    # The rows of both microbatches, one behind the other.
    "join_rows": Op(
        inputs={"first": Port("float32", ("A", "H")), "last": Port("float32", ("B", "H"))},
        outputs={"out": Port("float32", ("T", "H"))},
    ),
    # Rows of several buffers, each of which has as many, one behind the other.
    "concat_rows": Op(
        inputs={"x": Port("any", ("own", "H"), repeated=True)},
        outputs={"out": Port("any", ("every", "H"))},
        rule=_concat_rows,
    ),
    # The rows of part `part` of `parts` alike.
    "take_rows": Op(
        inputs={"x": Port("any", ("every", "H"))},
        outputs={"out": Port("any", ("own", "H"))},
        attrs={"part": Attr(int), "parts": Attr(int)},
        rule=_take_rows,
    ),
    # Columns of logits beside each other: the i-th ones from `starts[i]` to the next.
    "concat_columns": Op(
        inputs={"x": Port("float32", None, repeated=True)},
        outputs={"out": Port("float32", ("T", "every"))},
        attrs={"starts": Attr(tuple)},
        rule=_concat_columns,
    ),
}
