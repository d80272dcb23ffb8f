"""What a program must be to run: every node against its row of the op table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from pykernels.errors import PykernelsError
from runtime.program import Builder, Node, Program, repeated
from runtime.program.ops import OPS
from runtime.program.weight_spec import WeightSpec


def tiny_program() -> Program:
    """Two norms; the second adds up three buffers."""
    b = Builder("tiny", {"T": 4, "S": 1, "R": 2})
    b.buffer("x", "T", 8, kind="input")
    b.buffer("ids", "R", dtype=torch.int64, kind="input")
    for name in ("a", "b", "normed", "sum"):
        b.buffer(name, "T", 8)
    b.buffer("out", "R", 8, kind="output")
    weights = {"weight": WeightSpec.tensor("eight", 8)}
    b.node("rms_norm", "first", {"x": "x"}, {"out": "a"}, weights, eps=1e-6)
    b.node("rms_norm", "second", {"x": "a"}, {"out": "b"}, weights, eps=1e-6)
    b.node(
        "rms_norm",
        "third",
        {"x": "x", **repeated("add", ("a", "b"))},
        {"out": "normed", "sum": "sum"},
        weights,
        eps=1e-6,
    )
    b.node("rms_norm", "last", {"x": "sum", "rows": "ids"}, {"out": "out"}, weights, eps=1e-6)
    return b.build()


def changed(at: int, **fields: Any) -> Callable[[Program], Program]:
    """The program with other fields of one node."""

    def change(program: Program) -> Program:
        nodes = list(program.nodes)
        nodes[at] = replace(nodes[at], **fields)
        return replace(program, nodes=tuple(nodes))

    return change


def buffer(name: str, **fields: Any) -> Callable[[Program], Program]:
    """The program with other fields of one buffer."""

    def change(program: Program) -> Program:
        other = replace(program.buffers[name], **fields)
        return replace(program, buffers={**program.buffers, name: other})

    return change


def without(at: int) -> Callable[[Program], Program]:
    return lambda p: replace(p, nodes=p.nodes[:at] + p.nodes[at + 1 :])


WRONG = {
    "an unknown op": (changed(0, op="rmsnorm"), "first: there is no op 'rmsnorm'"),
    "an unknown role": (changed(0, role="expert"), "there is no role 'expert'"),
    "an unknown input": (changed(0, inputs={"x": "x", "y": "x"}), "first: it has no input 'y'"),
    "a missing input": (changed(0, inputs={}), "its input 'x' is missing"),
    "an unknown output": (changed(0, outputs={"o": "a"}), "it has no output 'o'"),
    "a missing weight": (changed(0, weights={}), "its weight 'weight' is missing"),
    "an unknown weight": (
        changed(0, weights={"weight": "eight", "bias": "eight"}),
        "it has no weight 'bias'",
    ),
    "a missing attribute": (changed(0, attrs={}), "its attribute 'eps' is missing"),
    "an unknown attribute": (changed(0, attrs={"eps": 1.0, "e": 1}), "no attribute 'e'"),
    "an attribute of another type": (changed(0, attrs={"eps": "1"}), "which is no float"),
    "addends that are not numbered": (
        changed(2, inputs={"x": "x", "add1": "a"}),
        "not numbered from 0",
    ),
    "no such buffer": (changed(0, inputs={"x": "z"}), "it names 'z', which is no buffer"),
    "an undefined dimension": (buffer("a", shape=("B", 8)), "a dimension 'B'"),
    "no such weight": (changed(0, weights={"weight": "w"}), "it names 'w', which is no weight"),
    "a weight of another width": (
        lambda p: replace(p, weights={"eight": WeightSpec.tensor("eight", 6)}),
        r"out \('a'\) is \['T', 8\], not \[T, 6\]",
    ),
    "an addend of another width": (
        changed(2, inputs={"x": "x", "add0": "ids"}),
        "ids' of torch.int64, which is no activation",
    ),
    "rows that do not agree": (buffer("a", shape=("R", 8)), "no `rows` says which"),
    "an index in floats": (buffer("ids", dtype=torch.float32), "which is no index"),
    "a residual stream in bfloat16": (buffer("sum", dtype=torch.bfloat16), "which is no float32"),
    "two nodes of one name": (changed(1, name="first"), "two nodes are called 'first'"),
    "no name": (changed(1, name=""), "a node of 'rms_norm' has no name"),
    "a read before the write": (without(0), "second: it reads 'a' before it is written"),
    "a second write": (changed(1, outputs={"out": "a"}), "'a', which is written already"),
    "an output that nothing writes": (without(3), "nothing writes the output 'out'"),
}


@pytest.mark.parametrize(("change", "cause"), WRONG.values(), ids=WRONG)
def test_a_program_that_cannot_run_says_why(
    change: Callable[[Program], Program], cause: str
) -> None:
    with pytest.raises(PykernelsError, match=f"'tiny' cannot run: .*{cause}"):
        change(tiny_program()).check()


def test_what_is_updated_in_place_is_one_buffer() -> None:
    b = Builder("place", {"T": 2, "S": 1, "R": 1})
    b.buffer("x", "T", 4, kind="input")
    b.buffer("y", "T", 12, kind="output")
    b.buffer("z", "T", 12)
    weights = {"weight": WeightSpec.matrix("w", "bf16", [("w", 4, 4)])}
    b.node("linear", "left", {"x": "x"}, {"out": "y"}, weights)
    b.node("linear", "right", {"x": "x", "out": "y"}, {"out": "y"}, weights, start=8)
    program = b.build()
    apart = changed(1, outputs={"out": "z"})
    with pytest.raises(PykernelsError, match="updates 'out' in place: 'z' is not 'y'"):
        apart(program).check()
    too_far = changed(1, attrs={"start": 10})
    with pytest.raises(PykernelsError, match="not .T, at least 14"):
        too_far(program).check()


def test_a_buffer_is_declared_once() -> None:
    b = Builder("twice", {"T": 2, "S": 1, "R": 1})
    b.buffer("x", "T", 4)
    with pytest.raises(PykernelsError, match="two buffers called 'x'"):
        b.buffer("x", "T", 8)


def test_defaults_stand_in_the_table() -> None:
    node = Node("attention", attrs={"window": 7})
    assert node.attr("window") == 7 and node.attr("expand_from") == 0
    assert all(OPS[op].inputs or op in ("wait", "recv") for op in OPS)
