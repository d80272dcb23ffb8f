"""A shared expert's factor on a GPU: one launch for a linear and a router of one expert."""

from __future__ import annotations

from dataclasses import replace

from ...program import Node, Program
from ..layers import rebuilt

_CPU = "cpu"


def with_shared_factors(program: Program) -> Program:
    """The program of a decode step with ``shared_factor`` on GPUs, for each linear of one output
    that only a router of one expert reads."""
    readers: dict[str, list[Node]] = {}
    for node in program.nodes:
        for name in set(node.reads):
            readers.setdefault(name, []).append(node)
    made: dict[str, Node] = {}  # by the router's name
    gone = set[str]()
    for linear in program.nodes:
        if linear.op != "linear" or linear.device == _CPU or linear.role != "shared":
            continue
        after = readers.get(linear.outputs["out"], [])
        plain = not {"streamed", "out"} & set(linear.inputs) and "bias" not in linear.weights
        if not plain or program.weight(linear, "weight").shape[0] != 1 or len(after) != 1:
            continue
        router = after[0]
        spec = router.attr("spec") if router.op == "router" else None
        if spec is None or router.attr("experts") != 1 or router.weights or router.device == _CPU:
            continue
        if spec.scoring != "sigmoid" or spec.renormalize or spec.scale != 1:
            continue
        slots = {port: router.inputs[port] for port in ("slot_mapping",) if port in router.inputs}
        made[router.name] = replace(
            router,
            op="shared_factor",
            inputs={"x": linear.inputs["x"], **slots},
            weights=dict(linear.weights),
            attrs={"experts": 1},
        )
        gone.add(linear.name)
    if not made:
        return program
    nodes = [made.get(node.name, node) for node in program.nodes if node.name not in gone]
    return rebuilt(program, nodes, {})
