"""A program on several devices as one program for each, with the handshake where they meet.

A buffer that one device writes and another reads is *submitted* as soon as it is written and
*waited for* just before it is first read: a channel, used once a step, with a node at each end.
Everything between runs in parallel with the other device. What a node needs from one peer uses one
channel, and nothing is sent twice.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from pykernels.errors import PykernelsError

from .analysis import dependencies, on_streams, ordered
from .node import Buffer, Node, repeated
from .port_kinds import port_kinds
from .program import Program

_Key = tuple[int, int, int]
"""Place of a node in the order of all: the number of a node of the whole program, -1, 0 or 1 for
in front of it, itself or behind it, and the channel."""


@dataclass(frozen=True)
class _Channel:
    """Buffers that ``reader``, a node's number, needs from another device.

    Attributes:
        writer: number of the last node that writes any of them.
    """

    number: int
    source: str
    to: str
    buffers: tuple[str, ...]
    writer: int
    reader: int


def partition(program: Program, unordered: Collection[str] = ("cpu",)) -> dict[str, Program]:
    """One program for each device, in the order in which the devices first appear.

    Args:
        unordered: devices that do not run the nodes of a stream one after the other: there only
            what shares a buffer is ordered.

    Raises:
        PykernelsError: two devices write one buffer or share a cache; a buffer is updated after
            another device has read it.
    """
    devices = list(dict.fromkeys(node.device for node in program.nodes))
    if len(devices) < 2:
        return dict.fromkeys(devices, program)
    keyed: list[tuple[_Key, Node]] = [((i, 0, 0), n) for i, n in enumerate(program.nodes)]
    agreed, written = _agreed(program, unordered), _users(program.nodes, writes=True)
    for channel in _channels(program):
        alike = not {channel.source, channel.to}.intersection(unordered)
        reader = program.nodes[channel.reader]
        sources = {device for name in reader.reads for device in written.get(name, ())}
        several = len(sources - {reader.device}) > 1
        keyed += _ends(reader, channel, several, agreed if alike else {})
    keyed.sort(key=lambda item: item[0])
    nodes = _with_spans([node for _, node in keyed], unordered)
    return {device: _part(program, device, nodes) for device in devices}


_Users = dict[str, dict[str, list[int]]]


def _users(nodes: Sequence[Node], reads: bool = False, writes: bool = False) -> _Users:
    """By buffer and device, the numbers of the nodes that read it, or write it, or either."""
    users: _Users = {}
    for i, node in enumerate(nodes):
        names = (*(node.reads if reads else ()), *(node.writes if writes else ()))
        for name in dict.fromkeys(names):
            users.setdefault(name, {}).setdefault(node.device, []).append(i)
    return users


def _channels(program: Program) -> list[_Channel]:
    holders: dict[str, set[str]] = {}
    writers: dict[str, tuple[int, str]] = {}
    channels: list[_Channel] = []
    ready: dict[tuple[str, str, int], int] = {}  # by source, target and writer, its channel
    users = _users(program.nodes, reads=True, writes=True)
    for i, node in enumerate(program.nodes):
        needed: dict[str, list[str]] = {}
        for name in dict.fromkeys(node.reads):
            if program.buffers[name].kind == "cache":
                _refuse_shared_cache(program, name, node, users[name])
            elif name in writers and node.device not in holders[name]:
                needed.setdefault(writers[name][1], []).append(name)
                holders[name].add(node.device)
        for source, names in needed.items():
            writer = max(writers[name][0] for name in names)
            number = ready.setdefault((source, node.device, writer), len(channels))
            if number < len(channels):  # what is ready at the same time goes together
                one = channels[number]
                channels[number] = replace(one, buffers=(*one.buffers, *names))
            else:
                channels.append(_Channel(number, source, node.device, tuple(names), writer, i))
        for name in node.writes:
            before = writers.get(name)
            if before is not None and before[1] != node.device:
                raise PykernelsError(
                    f"{name!r} of {program.name!r} is written on {before[1]} and on {node.device}",
                    "Keep the nodes that update a buffer on one device",
                )
            if len(holders.get(name, ())) > 1:  # the peer may not have read it yet
                raise PykernelsError(
                    f"{node.name} of {program.name!r} updates {name!r}, which another device reads",
                    "Update it before that device needs it",
                )
            if program.buffers[name].kind != "cache":
                writers[name], holders[name] = (i, node.device), {node.device}
    return channels


def _agreed(program: Program, unordered: Collection[str]) -> dict[str, str]:
    """By buffer, the kind of port that decides its dtype on all devices but those of
    ``unordered``, whose dtypes are the program's."""
    kinds = port_kinds(node for node in program.nodes if node.device not in unordered)
    for name, found in kinds.items():  # logits, which a sampler elsewhere reads
        buffer = program.buffers[name]
        if buffer.kind == "output" and buffer.dtype.is_floating_point:
            found.add("float32")
    return {
        name: next((kind for kind in ("index", "float32") if kind in found), "")
        for name, found in kinds.items()
    }


def _refuse_shared_cache(
    program: Program, name: str, node: Node, users: Mapping[str, Sequence[int]]
) -> None:
    for device, numbers in users.items():
        if device != node.device:
            raise PykernelsError(
                f"{name!r} of {program.name!r} is kept on {node.device};"
                f" {program.nodes[numbers[0]].name} on {device} uses it too",
                "Keep the nodes of one cache on one device",
            )


def _ends(
    reader: Node, channel: _Channel, several: bool, agreed: Mapping[str, str]
) -> list[tuple[_Key, Node]]:
    suffix = f".{channel.source}" if several else ""
    values = MappingProxyType(repeated("value", channel.buffers))
    marks: dict[str, Any] = {"layer": reader.layer, "role": reader.role}
    common: dict[str, Any] = {"channel": channel.number}
    if agreed:
        common["kinds"] = tuple(agreed[name] for name in channel.buffers)
    submit = Node(
        "submit",
        inputs=values,
        device=channel.source,
        name=f"{reader.name}.submit{suffix}",
        attrs=MappingProxyType({**common, "to": channel.to}),
        **marks,
    )
    wait = Node(
        "wait",
        outputs=values,
        device=channel.to,
        name=f"{reader.name}.wait{suffix}",
        attrs=MappingProxyType({**common, "source": channel.source}),
        **marks,
    )
    return [
        ((channel.writer, 1, channel.number), submit),
        ((channel.reader, -1, channel.number), wait),
    ]


def _with_spans(nodes: Sequence[Node], unordered: Collection[str]) -> list[Node]:
    """The nodes with ``until`` and ``since``: when a peer may touch what goes over a channel."""
    ends = {
        (node.op, node.attrs["channel"]): i
        for i, node in enumerate(nodes)
        if node.op in ("submit", "wait")
    }
    waits: list[list[int]] = [[] for _ in nodes]
    local: dict[str, list[int]] = {}
    for i, node in enumerate(nodes):
        local.setdefault(node.device, []).append(i)
        if node.op == "wait":
            waits[i].append(ends["submit", node.attrs["channel"]])
    for device, device_nodes in local.items():
        part = Program("", tuple(nodes[i] for i in device_nodes), {}, {})
        order = dependencies(part) if device in unordered else on_streams(part)
        for i, direct in zip(device_nodes, order.direct, strict=True):
            waits[i] += [device_nodes[j] for j in direct]
    before = ordered(waits).before
    reads, writes = _users(nodes, reads=True), _users(nodes, writes=True)
    of_device = {device: sum(1 << i for i in numbers) for device, numbers in local.items()}
    spans = list(nodes)
    for (op, channel), i in ends.items():
        node = nodes[i]
        device_nodes = local[node.device]
        if op == "wait":
            # The peer writes there before it submits; with other things, perhaps long before.
            submit = ends["submit", channel]
            begun = before[submit] & of_device[node.device]
            for name in node.writes:
                for j in writes[name].get(nodes[submit].device, ()):
                    begun &= before[j]
            span = {"since": nodes[begun.bit_length() - 1].name if begun else ""}
        else:
            peer = ends["wait", channel]
            readers = 1 << peer
            for name in node.reads:
                for j in reads[name].get(nodes[peer].device, ()):
                    readers |= 1 << j if j > peer else 0
            later = device_nodes[bisect(device_nodes, i) :]
            free = next((j for j in later if not readers & ~before[j]), None)
            span = {"until": "" if free is None else nodes[free].name}
        spans[i] = replace(node, attrs=MappingProxyType({**node.attrs, **span}))
    return spans


def _part(program: Program, device: str, nodes: Sequence[Node]) -> Program:
    device_nodes = tuple(node for node in nodes if node.device == device)
    written = {name for node in device_nodes if node.op != "wait" for name in node.writes}
    buffers: dict[str, Buffer] = {}
    for name in dict.fromkeys(
        name for node in device_nodes for name in (*node.reads, *node.writes)
    ):
        buffer = program.buffers[name]
        is_copy = buffer.kind == "output" and name not in written
        buffers[name] = replace(buffer, kind="scratch") if is_copy else buffer
    name = f"{program.name} on {device}"
    part = replace(program, name=name, nodes=device_nodes, buffers=buffers)
    return part.check()
