"""What follows from a program alone: which nodes wait for which, and where its buffers may lie.

Two nodes are ordered by the buffers that they share (one writes, the other reads or writes), by
the program's order where a device runs its nodes in order, and by the channels between devices.
All that is here rests on that order, *before*: memory is used again only when everything that
touched it is before what comes next, so reuse never makes a node wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pykernels.errors import PykernelsError

from .node import Node
from .program import Program

ALIGN = 64
"""Bytes: buffers begin at multiples of it."""


@dataclass(frozen=True)
class Order:
    """Which nodes of a program are complete before which.

    Attributes:
        direct: by node, the nodes that it waits for, without those that these wait for.
        before: by node, a bit for every node that is complete before it begins.
    """

    direct: tuple[tuple[int, ...], ...]
    before: tuple[int, ...]

    def is_before(self, first: int, second: int) -> bool:
        """Whether node ``first`` is complete when node ``second`` begins."""
        return bool(self.before[second] >> first & 1)


def dependencies(program: Program, in_order: bool = False) -> Order:
    """The order of a program's nodes.

    Args:
        in_order: whether its device runs them one after the other, as a stream does.
    """
    if in_order:
        return ordered([[i - 1] if i else [] for i in range(len(program.nodes))])
    return ordered(_hazards(program.nodes))


def on_streams(program: Program) -> Order:
    """The order on a device that runs the nodes of each stream (``Node.stream``) one after the
    other; across streams only what shares a buffer waits."""
    waits = _hazards(program.nodes)
    last: dict[str, int] = {}
    for i, node in enumerate(program.nodes):
        if node.stream in last:
            waits[i].append(last[node.stream])
        last[node.stream] = i
    return ordered(waits)


def ordered(waits: Sequence[Sequence[int]]) -> Order:
    """The order in which each node waits for some of the nodes in front of it."""
    direct, before = list[tuple[int, ...]](), list[int]()
    for predecessors in waits:
        seen, kept = 0, list[int]()
        for i in sorted(set(predecessors), reverse=True):
            if not seen >> i & 1:
                kept.append(i)
                seen |= before[i] | 1 << i
        direct.append(tuple(kept))
        before.append(seen)
    return Order(tuple(direct), tuple(before))


def _hazards(nodes: Sequence[Node]) -> list[list[int]]:
    """The nodes that each node waits for because of a shared buffer: the writers of what it reads,
    and the writers and the readers of what it overwrites. Slices of one linear, which write other
    columns of the same buffer, do not wait for each other. The collectives of one group, and the
    sends to a peer or the receives from it, follow each other: its other members run them in that
    order, too."""
    writers: dict[str, list[int]] = {}
    readers: dict[str, list[int]] = {}
    meetings: dict[tuple[object, ...], int] = {}
    numbers = {node.name: i for i, node in enumerate(nodes)}
    waits: list[list[int]] = []
    for i, node in enumerate(nodes):
        parallel = _parallel_write(node, nodes, writers)
        hazards = [
            j
            for name in (*node.reads, *node.writes)
            if name != parallel
            for j in writers.get(name, [])
        ]
        if parallel is not None:  # its memory must be free, for which the first one has waited
            hazards += waits[writers[parallel][0]]
        for name in node.writes:
            hazards += readers.get(name, [])
        if node.op == "wait" and node.attr("since"):
            hazards.append(numbers[node.attr("since")])
        if (meeting := _meeting(node)) is not None:
            if meeting in meetings:
                hazards.append(meetings[meeting])
            meetings[meeting] = i
        for name in node.reads:
            if name != parallel:
                readers.setdefault(name, []).append(i)
        for name in node.writes:
            if name == parallel:
                writers[name].append(i)
            else:
                writers[name], readers[name] = [i], []
        waits.append(hazards)
    return waits


def _meeting(node: Node) -> tuple[object, ...] | None:
    """What a node of several ranks has in common with those that it must not pass."""
    if "ranks" in node.attrs:
        return ("ranks", *node.attr("ranks"))
    return (node.op, node.attr("peer")) if "peer" in node.attrs else None


def _parallel_write(
    node: Node, nodes: Sequence[Node], writers: Mapping[str, list[int]]
) -> str | None:
    """The buffer of which a slice of a linear writes its own columns, as the slices before it have
    (``passes.numa``)."""
    if node.numa is None or "out" not in node.inputs:
        return None
    out = node.outputs["out"]
    others = [nodes[j] for j in writers.get(out, [])]
    alike = all(other.numa is not None and _stem(other) == _stem(node) for other in others)
    return out if others and alike else None


def _stem(slice_: Node) -> str:
    return slice_.name.rpartition(".node")[0]


@dataclass(frozen=True)
class Life:
    """When the memory of a buffer is in use.

    Attributes:
        start: the first node that touches it, or the one after which a peer may; -1: a peer may
            from the beginning on.
        by_peer: whether it is a peer that touches it first.
        users: a bit for every node that touches it, and for those that end a peer's reading.
        ends: False if a peer may read it to the end.
    """

    start: int
    by_peer: bool
    users: int
    ends: bool


def liveness(program: Program) -> dict[str, Life]:
    """The life of each buffer that a node names.

    What was submitted lives until the node after which the peer has read it, and what is waited for
    from the node on after which the peer may write it (``ops``: "submit", "wait").
    """
    numbers = {node.name: i for i, node in enumerate(program.nodes)}
    lives: dict[str, Life] = {}
    for i, node in enumerate(program.nodes):
        users, start, ends, by_peer = 1 << i, i, True, node.op == "wait"
        if node.op == "submit":
            ends = bool(node.attr("until"))
            users |= 1 << numbers[node.attr("until")] if ends else 0
        elif by_peer:
            start = numbers[node.attr("since")] if node.attr("since") else -1
        for name in (*node.reads, *node.writes):
            life = lives.get(name)
            if life is None:
                lives[name] = Life(start, by_peer, users, ends)
            else:
                lives[name] = replace(life, users=life.users | users, ends=life.ends and ends)
    return lives


@dataclass(frozen=True)
class MemoryPlan:
    """Where buffers lie in one arena of ``nbytes``.

    Attributes:
        offsets: by buffer, multiples of ``ALIGN``.
    """

    offsets: Mapping[str, int]
    nbytes: int


def buffer_bytes(program: Program) -> dict[str, int]:
    """Bytes of each "scratch" buffer in the largest step."""
    return {
        name: math.prod(program.shape(name)) * buffer.dtype.itemsize
        for name, buffer in program.buffers.items()
        if buffer.kind == "scratch"
    }


def plan_memory(
    program: Program, order: Order, sizes: Mapping[str, int] | None = None
) -> MemoryPlan:
    """Lays buffers over each other where one's life is before the other's; the largest first, each
    at the lowest place that is free.

    Args:
        order: of the device that runs the program.
        sizes: bytes by buffer; None: ``buffer_bytes``.
    """
    lives = liveness(program)
    sizes = buffer_bytes(program) if sizes is None else sizes
    padded = {name: -(-n // ALIGN) * ALIGN for name, n in sizes.items() if name in lives}
    names = sorted(padded, key=lambda name: (-padded[name], lives[name].start))
    users = _bits([lives[name].users for name in names], len(program.nodes))
    rest = ~_bits([_complete_at_start(lives[name], order) for name in names], len(program.nodes))
    ends = np.array([lives[name].ends for name in names], np.bool_)
    places = np.zeros((len(names), 2), np.int64)  # offset and end
    for i, name in enumerate(names):
        # Of those that have a place: over before it starts, or to start when it is over.
        before = ends[:i] & ~(users[:i] & rest[i]).any(1)
        behind = ends[i] & ~(users[i] & rest[:i]).any(1)
        offset = 0
        for first, end in sorted(places[:i][~(before | behind)].tolist()):
            if offset + padded[name] <= first:
                break
            offset = max(offset, end)
        places[i] = offset, offset + padded[name]
    offsets = dict(zip(names, places[:, 0].tolist(), strict=True))
    return MemoryPlan(offsets, int(places[:, 1].max(initial=0)))


def _bits(sets: Sequence[int], nodes: int) -> NDArray[np.uint64]:
    """[sets, words]: sets of nodes, a bit for each."""
    words = -(-nodes // 64)
    data = b"".join(each.to_bytes(8 * words, "little") for each in sets)
    return np.frombuffer(data, "<u8").reshape(len(sets), words)


def _complete_at_start(life: Life, order: Order) -> int:
    """The nodes that are complete when a buffer is touched first."""
    if life.start < 0:
        return 0
    before = order.before[life.start]
    return before | 1 << life.start if life.by_peer else before


def critical_path(
    program: Program, cost: Callable[[Node], float], order: Order | None = None
) -> tuple[float, tuple[Node, ...]]:
    """The longest chain of nodes that wait for each other, and what it costs: no device is faster.

    Args:
        cost: of a node, in any unit.
        order: None: that of the buffers alone.
    """
    order = order or dependencies(program)
    best: list[tuple[float, int]] = []  # cost up to a node's end, and the node before it
    for i, node in enumerate(program.nodes):
        until, previous = max(((best[j][0], j) for j in order.direct[i]), default=(0.0, -1))
        best.append((until + cost(node), previous))
    if not best:
        return 0.0, ()
    at = max(range(len(best)), key=lambda i: best[i][0])
    total, path = best[at][0], list[Node]()
    while at >= 0:
        path.append(program.nodes[at])
        at = best[at][1]
    return total, tuple(reversed(path))


def experts_per_token(program: Program, ids: str) -> int:
    """How many experts of a token a buffer of ids names at most: behind ``split_routing`` fewer
    than its width, since the others are -1."""
    node = program.writers[ids]
    if node.op == "place_routing":
        return experts_per_token(program, node.inputs["ids"])
    if node.op != "split_routing":
        return program.shape(ids)[1]
    whole, last = experts_per_token(program, node.inputs["ids"]), node.attr("last")
    return whole - last if node.outputs["first_ids"] == ids else min(whole, last)


def share_of_experts(program: Program, node: Node) -> float:
    """The part of its layer's routed experts that a node computes, deferred or not: those of its
    rank; all but for those that another device has in slots ("cached"), or just these."""
    if node.role not in ("routed", "cached", "deferred"):
        return 1.0
    own = program.weight(node, "experts") if "experts" in node.weights else None
    if own is not None and own.full is not None:
        return own.shape[0] / own.full.shape[0]
    cached = [n for n in program.nodes if n.role == "cached" and n.layer == node.layer]
    if not cached:
        return 1.0
    weight = program.weight(cached[0], "experts")
    assert weight.full is not None
    return 1 - weight.shape[0] / weight.full.shape[0]


def refuse_devices(program: Program, device: str) -> None:
    """Raises PykernelsError for nodes that are not on this device."""
    for node in program.nodes:
        if node.device != device:
            raise PykernelsError(
                f"{node.name} of {program.name!r} is on {node.device!r}, not on {device!r}",
                "Partition the program first",
            )
