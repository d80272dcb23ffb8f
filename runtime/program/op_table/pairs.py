"""The rows of the op table by which tokens' rows go to the ranks of their experts, and back: what
``dispatch`` and ``combine`` become where ranks are parts of one program (``passes.shard.join``).

Pairs are of a token and one of its experts; a buffer has room for all of them, and says how many
there are (``Buffer.filled``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .op import Attr, Op, Port

_IDS = Port("index", ("T", "topk"))
_COUNT = Port("index", ("1",))


def _member(node: Mapping[str, Any]) -> str | None:
    if not 0 <= node["member"] < len(node["starts"]) - 1:
        return f"there is no member {node['member']} of {len(node['starts']) - 1}"
    return None


PAIRS: dict[str, Op] = {
    # The place of each pair among those of the member that has its expert, from `starts[i]` up to
    # `starts[i + 1]`; -1 of no expert. How many pairs each member has.
    "place_pairs": Op(
        inputs={"ids": _IDS},
        outputs={"places": _IDS, "counts": Port("index", ("members",))},
        attrs={"starts": Attr(tuple)},
    ),
    # The pairs of a member in their places: rows of tokens, experts among the member's (-1 behind
    # the last pair), factors; and how many they are.
    "take_pairs": Op(
        inputs={
            "x": Port("activation", ("T", "H")),
            "ids": _IDS,
            "weights": Port("float32", ("T", "topk")),
            "places": _IDS,
            "counts": Port("index", ("members",)),
        },
        outputs={
            "rows": Port("activation", ("room", "H")),
            "received_ids": Port("index", ("room", "1")),
            "factors": Port("float32", ("room", "1")),
            "count": _COUNT,
        },
        attrs={"starts": Attr(tuple), "member": Attr(int)},
        rule=_member,
    ),
    # The rows of part `part` of `parts`, of which as many are wanted as `counted` says.
    "return_pairs": Op(
        inputs={"x": Port("activation", ("every", "H")), "counted": _COUNT},
        outputs={"out": Port("activation", ("room", "H")), "count": _COUNT},
        attrs={"part": Attr(int), "parts": Attr(int)},
    ),
    # Each token's sum of what its experts have made, of the rows of each member.
    "sum_pairs": Op(
        inputs={
            "x": Port("activation", ("room", "H"), repeated=True),
            "count": Port("index", ("1",), repeated=True),
            "ids": _IDS,
            "places": _IDS,
        },
        outputs={"out": Port("activation", ("T", "H"))},
        attrs={"starts": Attr(tuple)},
    ),
}
