"""A rank of several that become one program, and what collectives become there: nodes of each rank
over buffers that others write."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from ...program import Node, Program, repeated
from ...program.node import Dim

_TAKEN = ("rows", "received_ids", "factors", "count")


def replica(name: str, device: str) -> str:
    """What a buffer or a node of the first rank is called on the device of another one."""
    return f"{device}.{name}"


class Rank:
    """A rank's nodes, renamed and on its device, as far as they have their place.

    Args:
        prefix: in front of its names; "" of the first rank.

    Attributes:
        nodes: in order; ``done``: how many of them have their place.
        buffers: by name, of all that they name.
        sent: by peer, what it has sent to it, each a tuple of names, in order; ``received``: how
            many of those of a peer it has received.
        placed, counted: by what ``dispatch`` would write its counts to: the places of its pairs,
            and how many pairs of each rank it has.
    """

    def __init__(self, program: Program, device: str, prefix: str) -> None:
        self._program, self._prefix = program, prefix
        self.rank, self.device, self.done = program.rank, device, 0
        self.nodes = [self._renamed(node) for node in program.nodes]
        self.buffers = {
            self.name(name): replace(buffer, name=self.name(name))
            for name, buffer in program.buffers.items()
        }
        self.sent: dict[int, list[tuple[str, ...]]] = {}
        self.received: dict[int, int] = {}
        self.placed: dict[str, str] = {}
        self.counted: dict[str, list[str]] = {}
        self._alias: dict[str, str] = {}

    def name(self, buffer: str) -> str:
        """What a buffer of its program is called."""
        if not self._prefix or self._program.buffers[buffer].kind == "input":
            return buffer
        return replica(buffer, self._prefix)

    def new(self, name: str, like: str, shape: tuple[Dim, ...] = (), filled: str = "") -> str:
        """A buffer like another one of its own."""
        one = self.buffers[like]
        shape = shape or one.shape
        self.buffers[name] = replace(one, name=name, shape=shape, kind="scratch", filled=filled)
        return name

    @property
    def next(self) -> Node | None:
        """The node that has its place next; None behind the last one."""
        if self.done == len(self.nodes):
            return None
        node = self.nodes[self.done]
        inputs = {port: self._alias.get(name, name) for port, name in node.inputs.items()}
        return replace(node, inputs=inputs)

    def receive(self, names: Sequence[str], values: Sequence[str]) -> None:
        """Reads ``values``, which another rank has sent, where it would read ``names``."""
        self._alias |= zip(names, values, strict=True)

    def _renamed(self, node: Node) -> Node:
        inputs = {port: self.name(name) for port, name in node.inputs.items()}
        outputs = {port: self.name(name) for port, name in node.outputs.items()}
        name = replica(node.name, self._prefix) if self._prefix else node.name
        return replace(node, inputs=inputs, outputs=outputs, device=self.device, name=name)


@dataclass(frozen=True)
class Meeting:
    """The nodes of one collective, by rank."""

    ranks: Sequence[Rank]
    nodes: Sequence[Node]

    def values(self, port: str = "x") -> list[str]:
        """By rank, what it brings."""
        return [node.inputs[port] for node in self.nodes]

    def on_each(self, op: str, **attrs: Any) -> list[Node]:
        """On each rank a node over the values of all."""
        return [
            _node(node, op, repeated("x", self.values()), node.outputs["out"], node.name, attrs)
            for node in self.nodes
        ]


def _node(
    like: Node,
    op: str,
    inputs: Mapping[str, str],
    out: str | Mapping[str, str],
    name: str,
    attrs: Mapping[str, Any],
) -> Node:
    """A node in the place of another one."""
    return replace(
        like,
        op=op,
        inputs=inputs,
        outputs={"out": out} if isinstance(out, str) else out,
        weights={},
        attrs=MappingProxyType(dict(attrs)),
        name=name,
    )


def _all_reduce(meeting: Meeting) -> list[Node]:
    return meeting.on_each("add")


def _all_gather(meeting: Meeting) -> list[Node]:
    return meeting.on_each("concat_rows")


def _gather_columns(meeting: Meeting) -> list[Node]:
    return meeting.on_each("concat_columns", starts=meeting.nodes[0].attr("starts"))


def _reduce_scatter(meeting: Meeting) -> list[Node]:
    """Each rank takes from its own sum the rows of each other one, which adds them up in the order
    of ranks."""
    count, taken, parts = len(meeting.ranks), list[Node](), list[dict[int, str]]()
    for to in range(count):
        parts.append({})
        for source, (rank, node) in enumerate(zip(meeting.ranks, meeting.nodes, strict=True)):
            name = f"{node.name}.rows{to}"
            parts[to][source] = rank.new(name, node.outputs["out"])
            attrs = {"part": to, "parts": count}
            taken.append(_node(node, "take_rows", {"x": node.inputs["x"]}, name, name, attrs))
    sums = [
        _node(node, "add", repeated("x", own.values()), node.outputs["out"], node.name, {})
        for node, own in zip(meeting.nodes, parts, strict=True)
    ]
    return [*taken, *sums]


def _dispatch(meeting: Meeting) -> list[Node]:
    """Each rank takes the pairs of each member from its tokens; a member has them one behind the
    other, with room for all pairs of each rank."""
    count, placed, concats = len(meeting.ranks), list[Node](), list[Node]()
    taken: dict[str, list[dict[str, str]]] = {}
    for rank, node in zip(meeting.ranks, meeting.nodes, strict=True):
        (whole, H), ids = rank.buffers[node.outputs["rows"]].shape, node.inputs["ids"]
        room = int(whole) // count
        places, counts = (f"{node.name}.{name}" for name in ("places", "counts"))
        rank.new(places, ids)
        rank.new(counts, ids, (count,))
        pairs, starts = {"ids": ids, "places": places}, {"starts": node.attr("starts")}
        made = {"places": places, "counts": counts}
        placed.append(_node(node, "place_pairs", {"ids": ids}, made, places, starts))
        for to in range(count):
            names = {port: f"{node.name}.{port}{to}" for port in _TAKEN}
            rank.new(names["count"], ids, (1,))
            rank.new(names["rows"], node.outputs["rows"], (room, H), names["count"])
            for port in ("received_ids", "factors"):
                rank.new(names[port], node.outputs[port], (room, 1))
            inputs = {**node.inputs, **pairs, "counts": counts}
            name = f"{node.name}.take{to}"
            attrs = {**starts, "member": to}
            placed.append(_node(node, "take_pairs", inputs, names, name, attrs))
            taken.setdefault(node.name, []).append(names)
        # ``combine`` finds them by the buffer that it would read.
        rank.placed[node.outputs["counts"]] = places
    for to, (rank, node) in enumerate(zip(meeting.ranks, meeting.nodes, strict=True)):
        from_each = [taken[other.name][to] for other in meeting.nodes]
        rank.counted[node.outputs["counts"]] = [names["count"] for names in from_each]
        for port in ("rows", "received_ids", "factors"):
            parts = repeated("x", [names[port] for names in from_each])
            name, out = f"{node.name}.{port}", node.outputs[port]
            concats.append(_node(node, "concat_rows", parts, out, name, {}))
    return [*placed, *concats]


def _combine(meeting: Meeting) -> list[Node]:
    """The rows of each rank go back there, which sums up those of its tokens."""
    count, returned, sums = len(meeting.ranks), list[Node](), list[Node]()
    back: list[tuple[dict[str, str], dict[str, str]]] = [({}, {}) for _ in meeting.ranks]
    for source, (rank, node) in enumerate(zip(meeting.ranks, meeting.nodes, strict=True)):
        rows, counts = node.inputs["rows"], node.inputs["counts"]
        whole, H = rank.buffers[rows].shape
        for to, counted in enumerate(rank.counted[counts]):
            name, made = f"{node.name}.rows{to}", f"{node.name}.count{to}"
            rank.new(made, node.inputs["ids"], (1,))
            rank.new(name, rows, (int(whole) // count, H), made)
            attrs = {"part": to, "parts": count}
            read, written = {"x": rows, "counted": counted}, {"out": name, "count": made}
            returned.append(_node(node, "return_pairs", read, written, name, attrs))
            back[to][0][f"x{source}"] = name
            back[to][1][f"count{source}"] = made
    for (values, counts_), rank, node in zip(back, meeting.ranks, meeting.nodes, strict=True):
        places = rank.placed[node.inputs["counts"]]
        inputs = {**values, **counts_, "ids": node.inputs["ids"], "places": places}
        starts = {"starts": node.attr("starts")}
        sums.append(_node(node, "sum_pairs", inputs, node.outputs["out"], node.name, starts))
    return [*returned, *sums]


FORMS: dict[str, Callable[[Meeting], list[Node]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "gather_columns": _gather_columns,
    "reduce_scatter": _reduce_scatter,
    "dispatch": _dispatch,
    "combine": _combine,
}
"""By op, the nodes that take its place on all ranks."""
