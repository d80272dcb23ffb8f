"""The rows of the op table at which the parts of a program on several devices meet: the two ends of
a channel, which ``partition`` puts there, and sums that devices make without one."""

from __future__ import annotations

from .op import Attr, Op, Port

_ENDS = {"channel": Attr(int), "kinds": Attr(tuple, ())}
"""`kinds`: of each value between devices that choose their own precision, the kind of port that
decides it on both; "": none does."""

CHANNELS: dict[str, Op] = {
    # `until` names a node of the same program: the peer may read what was submitted until that node
    # has run ("": to the end).
    "submit": Op(
        inputs={"value": Port("any", None, repeated=True)},
        outputs={},
        attrs={**_ENDS, "to": Attr(str), "until": Attr(str, "")},
        asynchronous=True,
    ),
    # The peer may write what is waited for from the node `since` on ("": from the beginning).
    "wait": Op(
        inputs={},
        outputs={"value": Port("any", None, repeated=True)},
        attrs={**_ENDS, "source": Attr(str), "since": Attr(str, "")},
        asynchronous=True,
    ),
    # The sum of the x of all members, devices of one program, which run this node at once and store
    # their parts in each other's memory; in their order, not rounded.
    "one_shot_all_reduce": Op(
        inputs={"x": Port("activation", ("T", "H"))},
        outputs={"out": Port("float32", ("T", "H"))},
        attrs={"members": Attr(tuple)},
    ),
}
