"""Where programs of several ranks meet: whether they agree, and the bytes that cross."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from pykernels.errors import PykernelsError

from ...program import Node, Program

_Line = tuple[str, tuple[int, ...]]
"""Ranks that meet again and again: the members of a group, or a sender and its receiver."""
_Meeting = tuple[object, ...]


def check_meetings(programs: Sequence[Program]) -> None:
    """Raises PykernelsError unless the programs, by rank, meet in the same order with buffers of
    the same sizes: else a rank would wait for ever."""
    lines: dict[_Line, dict[int, list[tuple[str, _Meeting]]]] = {}
    for program in programs:
        for node in program.nodes:
            if (met := _meeting(program, node)) is not None:
                line, meeting = met
                by_rank = lines.setdefault(line, {rank: [] for rank in line[1]})
                by_rank[program.rank].append((node.name, meeting))
    for (_, (first, *others)), by_rank in lines.items():
        for other in others:
            for i in range(max(len(by_rank[first]), len(by_rank[other]))):
                own, its = _at(by_rank[first], i), _at(by_rank[other], i)
                if own[1] != its[1]:
                    raise PykernelsError(
                        f"rank {first} of {programs[0].name!r} comes to {own[0]}, where rank"
                        f" {other} comes to {its[0]}",
                        "Shard all ranks' programs in the same way",
                    )


def _at(meetings: Sequence[tuple[str, _Meeting]], i: int) -> tuple[str, _Meeting]:
    return meetings[i] if i < len(meetings) else ("its end", ())


def _meeting(program: Program, node: Node) -> tuple[_Line, _Meeting] | None:
    """The ranks that a node meets, and what they must have at that place, too."""
    if "ranks" in node.attrs:
        reads = () if node.op == "gather_columns" else node.reads  # each has its own width
        sizes = (_size(program, name) for name in (*reads, *node.writes))
        return ("ranks", node.attr("ranks")), (node.op, *sizes)
    if "peer" not in node.attrs:
        return None
    if node.op == "send":
        ends, names = (program.rank, node.attr("peer")), node.reads
    else:
        ends, names = (node.attr("peer"), program.rank), node.writes
    return ("send", ends), tuple(_size(program, name) for name in names)


def _size(program: Program, name: str) -> tuple[object, ...]:
    return (*program.shape(name), program.buffers[name].dtype)


def sent_bytes(program: Program) -> dict[str, int]:
    """Bytes that a rank sends to others in the largest step, by op, each once to every rank that
    needs it (a ring sends as many). Tokens are taken to choose all experts alike."""
    by_device: dict[str, int] = {}
    for node in program.nodes:
        if (count := _BYTES.get(node.op)) is not None:
            by_device[node.op] = by_device.get(node.op, 0) + count(program, node)
    return by_device


def _nbytes(program: Program, names: Sequence[str]) -> int:
    shapes = ((program.shape(name), program.buffers[name].dtype) for name in names)
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)


def _others(program: Program, node: Node) -> tuple[int, int]:
    """How many ranks are in a node's group besides this one, and in all."""
    count = len(node.attr("ranks"))
    return count - 1, count


def _all_reduce(program: Program, node: Node) -> int:
    others, count = _others(program, node)  # a part to each, then the sum of the own part to each
    return 2 * others * _nbytes(program, node.reads) // count


def _all_gather(program: Program, node: Node) -> int:
    return _others(program, node)[0] * _nbytes(program, node.reads)


def _reduce_scatter(program: Program, node: Node) -> int:
    others, count = _others(program, node)
    return others * _nbytes(program, node.reads) // count


def _send(program: Program, node: Node) -> int:
    return _nbytes(program, node.reads)


def _pairs(program: Program, node: Node, names: Sequence[str]) -> int:
    """Rows of these buffers, one for each pair of a token and an expert that is on another rank."""
    others, count = _others(program, node)
    pairs = math.prod(program.shape(node.inputs["ids"]))
    row = sum(_nbytes(program, [name]) // program.shape(name)[0] for name in names)
    return others * pairs * row // count


def _dispatch(program: Program, node: Node) -> int:
    return _pairs(
        program, node, [node.outputs[port] for port in ("rows", "received_ids", "factors")]
    )


def _combine(program: Program, node: Node) -> int:
    return _pairs(program, node, [node.inputs["rows"]])


_BYTES: dict[str, Callable[[Program, Node], int]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "gather_columns": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "send": _send,
    "dispatch": _dispatch,
    "combine": _combine,
}
