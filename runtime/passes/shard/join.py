"""The programs of several ranks as one program, whose nodes lie on the ranks' devices.

Where ranks meet a device then reads what another one has written, and ``program.partition`` puts
channels there as between any two devices. A collective becomes nodes that read the members'
buffers; nothing of it waits for all. The first rank keeps all names: its caches are the engine's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pykernels.errors import PykernelsError

from ...program import Buffer, Node, Program, repeated
from ...program.op_table.sandwich import NORMS
from .forms import FORMS, Meeting, Rank, replica
from .meetings import check_meetings
from .merge import one_shot_sums

__all__ = ["join", "replica", "with_replicas"]


def join(programs: Sequence[Program], devices: Sequence[str], one_shot: int = 0) -> Program:
    """One program of all ranks.

    Nodes on other ranks that nothing needs are left out. Inputs have the same names for all ranks.

    Args:
        programs: by rank, as ``shard`` and ``stripe`` make them, experts streamed or not, each with
            all nodes on one device.
        devices: by rank, where its nodes are then; all different.
        one_shot: see ``one_shot_sums``.

    Raises:
        PykernelsError: fewer devices than ranks, or the same one twice; nodes on several devices;
            ranks that do not meet.
    """
    _refuse(programs, devices)
    if len(programs) == 1:
        return programs[0].on(devices[0])
    check_meetings(programs)
    ranks = [
        Rank(program, device, device if r else "")
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
    # A device whose sum nobody needs would not meet the others.
    summed = one_shot_sums(_needed(joined), one_shot)
    return _needed(_without_sums(summed)).check().rewritten_by("join")


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


def _in_lockstep(ranks: Sequence[Rank]) -> list[Node]:
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
            nodes += FORMS[meeting[0].op](Meeting(ranks, meeting))
            for rank in ranks:
                rank.done += 1
        assert sum(rank.done for rank in ranks) > before, "ranks wait for each other"
    return nodes


def _passed(rank: Rank, node: Node, ranks: Sequence[Rank]) -> bool:
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


def _without_sums(program: Program) -> Program:
    """The program whose norms add up what ranks bring, where nothing else reads the sum: they are
    one launch with their addends."""
    parts = {node.outputs["out"]: node.series("x") for node in program.nodes if node.op == "add"}
    for node in program.nodes:
        adds = node.series("add") if node.op in NORMS else ()
        for name in node.reads:
            if name in parts and name not in adds:
                del parts[name]
    nodes = list[Node]()
    for node in program.nodes:
        adds = node.series("add") if node.op in NORMS else ()
        if not parts.keys() & set(adds):
            nodes.append(node)
            continue
        inputs = {port: name for port, name in node.inputs.items() if name not in adds}
        every = [part for name in adds for part in parts.get(name, (name,))]
        nodes.append(replace(node, inputs={**inputs, **repeated("add", every)}))
    return replace(program, nodes=tuple(nodes))


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
    buffers = dict[str, Buffer]()
    for buffer in program.buffers.values():
        if buffer.name in names:
            buffer = replace(buffer, name=replica(buffer.name, device))
        buffers[buffer.name] = buffer
    return replace(program, nodes=nodes, buffers=buffers).check()
