"""Order, lives of buffers, memory plans and partitions, of programs small enough to see through."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pykernels.errors import PykernelsError
from runtime.program import Builder, Program, repeated
from runtime.program.analysis import (
    ALIGN,
    buffer_bytes,
    critical_path,
    dependencies,
    liveness,
    on_streams,
    plan_memory,
)
from runtime.program.partition import partition
from runtime.program.weight_spec import WeightSpec

T, H = 4, 32
NBYTES = 4 * T * H
SQUARE = WeightSpec.matrix("square", "bf16", [("square", 4, 4)])


def norms(edges: dict[str, tuple[str, ...]], devices: dict[str, str] | None = None) -> Program:
    """A norm for each name, of the sum of others and the input "in"; the last one is the output."""
    b = Builder("norms", {"T": T, "S": 1, "R": 1})
    b.buffer("in", "T", H, kind="input")
    last = list(edges)[-1]
    for name, reads in edges.items():
        b.buffer(name, "T", H, kind="output" if name == last else "scratch")
        first, *adds = reads or ("in",)
        b.node(
            "rms_norm",
            name,
            {"x": first, **repeated("add", adds)},
            {"out": name},
            {"weight": WeightSpec.tensor("ones", H)},
            eps=1e-6,
        )
    program = b.build()
    nodes = tuple(
        replace(node, device=(devices or {}).get(node.name, "cpu")) for node in program.nodes
    )
    return replace(program, nodes=nodes)


FORK = {"a": (), "left": ("a",), "right": ("a",), "far": ("right",), "join": ("left", "far")}


def test_a_node_waits_for_what_it_reads_and_no_more() -> None:
    order = dependencies(norms(FORK))
    assert order.direct == ((), (0,), (0,), (2,), (3, 1))  # the join's reading of a is implied
    assert not order.is_before(1, 2) and order.is_before(0, 4)
    in_order = dependencies(norms(FORK), in_order=True)
    assert in_order.direct == ((), (0,), (1,), (2,), (3,))


def test_a_write_waits_for_readers_and_for_the_write_before() -> None:
    b = Builder("place", {"T": 2, "S": 1, "R": 1})
    b.buffer("x", "T", 4, kind="input")
    for name in ("y", "normed"):
        b.buffer(name, "T", 4 if name == "normed" else 8, kind="output")
    b.node("linear", "write", {"x": "x"}, {"out": "y"}, {"weight": SQUARE})
    b.node(
        "rms_norm",
        "read",
        {"x": "y"},
        {"out": "normed"},
        {"weight": WeightSpec.tensor("ones", 4)},
        eps=1.0,
    )
    b.node(
        "linear",
        "update",
        {"x": "x", "out": "y"},
        {"out": "y"},
        {"weight": SQUARE},
        start=4,
    )
    assert dependencies(b.build()).direct == ((), (0,), (1,))


def overlaps(program: Program, in_order: bool) -> set[frozenset[str]]:
    plan = plan_memory(program, dependencies(program, in_order))
    places = {name: range(at, at + NBYTES) for name, at in plan.offsets.items()}
    return {
        frozenset((a, b))
        for a, x in places.items()
        for b, y in places.items()
        if a != b and x.start < y.stop and y.start < x.stop
    }


def test_memory_is_used_again_behind_all_that_touched_it() -> None:
    edges = {**FORK, "end": ("join",)}
    program = norms(edges)
    assert buffer_bytes(program) == dict.fromkeys(("a", "left", "right", "far", "join"), NBYTES)
    # far waits for right alone: left may still read a then. On a stream left is over.
    anywhere = {frozenset((name, "join")) for name in ("a", "right")}
    assert overlaps(program, in_order=False) and overlaps(program, in_order=False) <= anywhere
    assert frozenset(("a", "far")) in overlaps(program, in_order=True)
    assert plan_memory(program, dependencies(program, True)).nbytes == 3 * NBYTES
    offsets = plan_memory(program, dependencies(program)).offsets.values()
    assert all(at % ALIGN == 0 for at in offsets)


def test_critical_path() -> None:
    cost = {"a": 1.0, "left": 5.0, "right": 2.0, "far": 2.0, "join": 1.0}
    total, path = critical_path(norms(FORK), lambda node: cost[node.name])
    assert total == 7.0 and [node.name for node in path] == ["a", "left", "join"]


def handshake(program: Program) -> dict[str, list[str]]:
    return {
        device: [
            f"{node.op} {node.attrs['channel']}" if node.op in ("submit", "wait") else node.name
            for node in part.nodes
        ]
        for device, part in partition(program).items()
    }


CUT = {"a": (), "b": ("a",), "slow": ("a",), "c": ("b",), "d": ("c", "slow"), "e": ("d", "a")}
"""``slow`` is on the other device; only d reads it."""


def test_a_cut_submits_early_and_waits_late() -> None:
    parts = handshake(norms(CUT, {name: "gpu" for name in CUT if name != "slow"}))
    assert parts == {
        "gpu": ["a", "submit 0", "b", "c", "wait 1", "d", "e"],
        "cpu": ["wait 0", "slow", "submit 1"],
    }


def test_what_comes_together_may_be_written_before_it_is_sent() -> None:
    """As a deferred sum is, beside that of the next layer."""
    edges = {"a": (), "late": ("a",), "b": ("a",), "s": ("b",), "c": ("b", "late", "s")}
    gpu = partition(norms(edges, dict.fromkeys("abc", "gpu")))["gpu"]
    [wait] = [node for node in gpu.nodes if node.op == "wait"]
    assert len(wait.writes) == 2 and wait.attr("since") == "late.submit"


def test_a_peer_may_touch_what_was_sent_and_nothing_is_twice() -> None:
    edges = {"a": (), "s1": ("a",), "s2": ("a", "s1"), "b": ("a",), "c": ("b", "s2"), "d": ("c",)}
    program = norms(edges, {name: "gpu" for name in edges if name[0] != "s"})
    parts = partition(program)
    assert handshake(program) == {
        "gpu": ["a", "submit 0", "b", "wait 1", "c", "d"],
        "cpu": ["wait 0", "s1", "s2", "submit 1"],
    }
    gpu, cpu = parts["gpu"], parts["cpu"]
    assert gpu.nodes[1].attr("until") == "c.wait" and gpu.nodes[3].attr("since") == "s1.submit"
    assert cpu.nodes[0].attr("since") == "" and cpu.nodes[3].attr("until") == ""
    # What the peer may still read is not overwritten, what it may write already is not in use.
    plan = plan_memory(gpu, dependencies(gpu, in_order=True))
    assert plan.offsets["s2"] not in (plan.offsets["a"], plan.offsets["b"])
    assert liveness(gpu)["s2"].by_peer and not liveness(cpu)["s2"].ends
    together = plan_memory(cpu, dependencies(cpu))
    assert len(set(together.offsets.values())) == len(together.offsets)


def test_a_program_on_one_device_is_its_own_part() -> None:
    program = norms(FORK)
    assert partition(program) == {"cpu": program}


def halves() -> Program:
    """Two linears write the halves of y; a norm of its left half stands between them."""
    b = Builder("halves", {"T": 2, "S": 1, "R": 1})
    b.buffer("x", "T", 4, kind="input")
    b.buffer("y", "T", 8, kind="output")
    b.buffer("normed", "T", 4, kind="output")
    weight = {"weight": SQUARE}
    b.node("linear", "left", {"x": "x"}, {"out": "y"}, weight)
    b.node(
        "rms_norm",
        "norm",
        {"x": "y"},
        {"out": "normed"},
        {"weight": WeightSpec.tensor("ones", 4)},
        eps=1.0,
    )
    b.node("linear", "right", {"x": "x", "out": "y"}, {"out": "y"}, weight, start=4)
    return b.build()


@pytest.mark.parametrize(
    ("node", "cause"),
    [("right", "'y' of 'halves' is written on cpu and on gpu"), ("norm", "right .* updates 'y'")],
)
def test_a_cut_through_updates_is_refused(node: str, cause: str) -> None:
    program = halves()
    nodes = tuple(replace(n, device="gpu" if n.name == node else "cpu") for n in program.nodes)
    with pytest.raises(PykernelsError, match=cause):
        partition(replace(program, nodes=nodes))


def test_ranks_meet_in_order_and_sends_run_in_parallel() -> None:
    """Whatever runs beside: the other members wait in that order."""
    b = Builder("ranks", {"T": T, "S": 1, "R": 1})
    for name in ("x", "y"):
        b.buffer(name, "T", H, kind="input")
    for name in ("z", "first", "second"):
        b.buffer(name, "T", H, kind="output")
    b.node("all_reduce", "one", {"x": "x"}, {"out": "first"}, ranks=(0, 1))
    b.node("send", "send", {"value0": "x"}, {}, peer=1)
    b.node("recv", "recv", {}, {"value0": "z"}, peer=1)
    b.node("all_reduce", "two", {"x": "y"}, {"out": "second"}, ranks=(0, 1))
    program = b.build()
    assert dependencies(program).direct == ((), (), (), (0,))
    assert on_streams(program).direct == ((), (0,), (1,), (2,))
    streams = {"send": "out", "recv": "in"}
    nodes = (replace(node, on_stream=streams.get(node.name)) for node in program.nodes)
    assert on_streams(replace(program, nodes=tuple(nodes))).direct == ((), (), (), (0,))


def test_a_rank_meets_others_alone() -> None:
    b = Builder("ranks", {"T": T, "S": 1, "R": 1})
    b.buffer("x", "T", H, kind="input")
    b.buffer("out", "T", H, kind="output")
    b.node("all_reduce", "sum", {"x": "x"}, {"out": "out"}, ranks=(1, 2))
    with pytest.raises(
        PykernelsError, match=r"rank 0, which runs it, is not in its group \(1, 2\)"
    ):
        b.build()
