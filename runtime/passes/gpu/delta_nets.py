"""A gated delta net's decode step on a GPU in two nodes, a launch each, instead of four."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...program import Node, Program
from ..layers import rebuilt

_CPU = "cpu"
_BY_SEQUENCE = ("query_starts", "query_lengths", "state_slots", "has_state")
_STARTS = ("a_start", "b_start")


def with_delta_steps(program: Program) -> Program:
    """The program of a decode step with ``delta_step`` and ``delta_norm`` on GPUs, for each run of
    convolution, gates, rule and norm whose results nothing else reads."""
    readers: dict[str, list[Node]] = {}
    for node in program.nodes:
        for name in set(node.reads):
            readers.setdefault(name, []).append(node)
    instead: dict[str, list[Node]] = {}
    for rule in program.nodes:
        if rule.op == "gated_delta_rule" and rule.device != _CPU:
            instead |= _two_for_four(rule, program.writers, readers)
    if not instead:
        return program
    nodes = [each for node in program.nodes for each in instead.get(node.name, [node])]
    return rebuilt(program, nodes, {})


def _two_for_four(
    rule: Node, writers: Mapping[str, Node], readers: Mapping[str, list[Node]]
) -> dict[str, list[Node]]:
    """By the names of four nodes, the nodes in their places; nothing where others are around."""
    conv, gates = writers[rule.inputs["qkv"]], writers[rule.inputs["g"]]
    norms = readers.get(rule.outputs["out"], [])
    between = (rule.inputs["qkv"], rule.inputs["g"], rule.inputs["beta"])
    if any(readers[name] != [rule] for name in between) or len(norms) != 1:
        return {}
    norm = norms[0]
    plain = conv.op == "causal_conv1d" and conv.attr("silu") and not conv.attr("x_start")
    plain = plain and "in_gate" not in conv.inputs and "bias" not in conv.weights
    if not plain or gates.op != "delta_gates" or norm.op != "gated_rms_norm":
        return {}
    sequences = {port: rule.inputs[port] for port in _BY_SEQUENCE}
    kept = {"conv": conv.inputs["conv"]}
    step = replace(
        rule,
        op="delta_step",
        inputs={
            "x": conv.inputs["x"],
            **{port: gates.inputs[port] for port in "ab"},
            **kept,
            "delta": rule.inputs["delta"],
            **sequences,
        },
        weights={**conv.weights, **gates.weights},
        attrs={
            **{name: rule.attr(name) for name in ("HK", "scale", "eps", "tiled")},
            **{name: gates.attr(name) for name in _STARTS},
        },
    )
    behind = replace(
        norm,
        op="delta_norm",
        inputs={**norm.inputs, "inputs": conv.inputs["x"], **kept, **sequences},
        outputs={**norm.outputs, **kept},
    )
    return {conv.name: [], gates.name: [], rule.name: [step], norm.name: [behind]}
