"""The programs of several ranks as one program, whose nodes lie on the ranks' devices.

Where ranks meet a device then reads what another one has written, and ``program.partition`` puts
channels there as between any two devices. A collective becomes nodes that read the members'
buffers; nothing of it waits for all. The first rank keeps all names: its caches are the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from pykernels.errors import PykernelsError

from ...program import Buffer, Node, Program, repeated
from .meetings import check_meetings


def replica(name: str, device: str) -> str:
    """What a buffer or a node of the first rank is called on the device of another one."""
    return f"{device}.{name}"


def join(programs: Sequence[Program], devices: Sequence[str]) -> Program:
    """One program of all ranks.

    Nodes on other ranks that nothing needs are left out. Inputs have the same names for all ranks.

    Args:
        programs: by rank, as ``shard`` and ``stripe`` make them, experts streamed or not, each with
            all nodes on one device.
        devices: by rank, where its nodes are then; all different.

    Raises:
        PykernelsError: fewer devices than ranks, or the same one twice; nodes on several devices;
            a collective that has no such form (``dispatch``, ``combine``); ranks that do not meet.
    """
    _refuse(programs, devices)
    if len(programs) == 1:
        return programs[0].on(devices[0])
    check_meetings(programs)
    ranks = [
        _Rank(program, device, device if r else "")
        for r, (program, device) in enumerate(zip(programs, devices, strict=True))
    ]
    nodes = _in_lockstep(ranks)
    buffers = {name: buffer for rank in ranks for name, buffer in rank.buffers.items()}
    weights = {name: spec for program in programs for name, spec in program.weights.items()}
    first = programs[0]
    joined = replace(
        first,
        name=f"{first.name} on {len(programs)} ranks",
        nodes=tuple(nodes),
        buffers=buffers,
        weights=weights,
    )
    return _needed(joined).check().rewritten_by("join")


def _refuse(programs: Sequence[Program], devices: Sequence[str]) -> None:
    name = programs[0].name
    if len(devices) != len(programs) or len(set(devices)) < len(devices):
        raise PykernelsError(
            f"{len(programs)} ranks of {name!r} on {', '.join(devices)}",
            "Give each rank a device of its own",
        )
    for program in programs:
        several = sorted({node.device for node in program.nodes})
        if len(several) > 1:
            raise PykernelsError(
                f"rank {program.rank} of {name!r} has nodes on {' and '.join(several)}",
                "Keep all of a rank on its own device",
            )
        for node in program.nodes:
            if "ranks" in node.attrs and node.op not in _FORMS:
                raise PykernelsError(
                    f"{node.name} of {name!r} is a {node.op}, which has no form on joined ranks",
                    f"Use {', '.join(_FORMS)}",
                )


class _Rank:
    """A rank's nodes, renamed and on its device, as far as they have their place.

    Args:
        prefix: in front of its names; "" of the first rank.

    Attributes:
        nodes: in order; ``done``: how many of them have their place.
        buffers: by name, of all that they name.
        sent: by peer, what it has sent to it, each a tuple of names, in order; ``received``: how
            many of those of a peer it has received.
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
        self._alias: dict[str, str] = {}

    def name(self, buffer: str) -> str:
        """What a buffer of its program is called."""
        if not self._prefix or self._program.buffers[buffer].kind == "input":
            return buffer
        return replica(buffer, self._prefix)

    def new(self, name: str, like: str) -> str:
        """A buffer like another one of its own."""
        self.buffers[name] = replace(self.buffers[like], name=name, kind="scratch")
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


def _in_lockstep(ranks: Sequence[_Rank]) -> list[Node]:
    """All ranks' nodes: each rank goes on until it meets others, and these come there, too."""
    nodes = list[Node]()
    while any(rank.next is not None for rank in ranks):
        before = sum(rank.done for rank in ranks)
        for rank in ranks:
            while (node := rank.next) is not None and "ranks" not in node.attrs:
                if "peer" not in node.attrs:
                    nodes.append(node)
                elif not _passed(rank, node, ranks):
                    break
                rank.done += 1
        meeting = [n for rank in ranks if (n := rank.next) is not None and "ranks" in n.attrs]
        if len(meeting) == len(ranks):
            nodes += _FORMS[meeting[0].op](_Meeting(ranks, meeting))
            for rank in ranks:
                rank.done += 1
        assert sum(rank.done for rank in ranks) > before, "ranks wait for each other"
    return nodes


def _passed(rank: _Rank, node: Node, ranks: Sequence[_Rank]) -> bool:
    """Whether a value is sent, or one that was sent is received."""
    peer: int = node.attr("peer")
    if node.op == "send":
        rank.sent.setdefault(peer, []).append(node.series("value"))
        return True
    sent, number = ranks[peer].sent.get(rank.rank, []), rank.received.get(peer, 0)
    if number == len(sent):
        return False
    rank.receive(node.series("value"), sent[number])
    rank.received[peer] = number + 1
    return True


@dataclass(frozen=True)
class _Meeting:
    """The nodes of one collective, by rank."""

    ranks: Sequence[_Rank]
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
    like: Node, op: str, inputs: Mapping[str, str], out: str, name: str, attrs: Mapping[str, Any]
) -> Node:
    """A node in the place of another one."""
    return replace(
        like,
        op=op,
        inputs=inputs,
        outputs={"out": out},
        weights={},
        attrs=MappingProxyType(dict(attrs)),
        name=name,
    )


def _all_reduce(meeting: _Meeting) -> list[Node]:
    return meeting.on_each("add")


def _all_gather(meeting: _Meeting) -> list[Node]:
    return meeting.on_each("concat_rows")


def _gather_columns(meeting: _Meeting) -> list[Node]:
    return meeting.on_each("concat_columns", starts=meeting.nodes[0].attr("starts"))


def _reduce_scatter(meeting: _Meeting) -> list[Node]:
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


_FORMS: dict[str, Callable[[_Meeting], list[Node]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "gather_columns": _gather_columns,
    "reduce_scatter": _reduce_scatter,
}


def _needed(program: Program) -> Program:
    """The program without nodes that neither its outputs nor its caches need."""
    kept, read = list[Node](), set[str]()
    for node in reversed(program.nodes):
        lasting = any(program.buffers[name].kind != "scratch" for name in node.writes)
        if lasting or read & set(node.writes):
            kept.append(node)
            read |= set(node.reads)
    named = {name for node in kept for name in (*node.reads, *node.writes)}
    buffers: dict[str, Buffer] = {n: b for n, b in program.buffers.items() if n in named}
    weights = {name: program.weights[name] for node in kept for name in node.weights.values()}
    return replace(program, nodes=tuple(kept[::-1]), buffers=buffers, weights=weights)


def with_replicas(program: Program, device: str) -> Program:
    """The program whose first rank, on another device than the engine's caches, has replicas of
    these."""
    names = {
        name
        for node in program.nodes
        if node.device == device
        for name in (*node.reads, *node.writes)
        if program.buffers[name].kind == "cache"
    }

    def renamed(ports: Mapping[str, str]) -> dict[str, str]:
        return {p: replica(name, device) if name in names else name for p, name in ports.items()}

    nodes = tuple(
        replace(node, inputs=renamed(node.inputs), outputs=renamed(node.outputs))
        for node in program.nodes
    )
    buffers = {
        name if name not in names else replica(name, device): buffer
        if name not in names
        else replace(buffer, name=replica(name, device))
        for name, buffer in program.buffers.items()
    }
    return replace(program, nodes=nodes, buffers=buffers).check()
