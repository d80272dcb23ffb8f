"""Dual batch (OSDI'26 3.3.1): a decode step as two microbatches of half of its sequences each.

The microbatches take turns at the layers of routed experts: up to the experts of layer k microbatch
A, then microbatch B, then the same of layer k + 1. So where a CPU has the experts and a GPU the
rest, the GPU computes one microbatch's attention while the CPU computes the other microbatch's
experts, and one stream is enough:

    A.attention k, A.submit k, B.attention k, B.submit k, A.wait k, A.attention k + 1, ...

Both microbatches have inputs and buffers of their own, and share weights and caches. Their rows are
joined in front of the last norm, so that the head is read once, and a step is sampled as without
microbatches.
"""

from __future__ import annotations

from dataclasses import replace

from pykernels.errors import PykernelsError

from ..program import Buffer, Node, Program
from ..program.sizes import MICROBATCHES, microbatch_dim, microbatch_name, microbatch_tokens
from ..program.step_inputs import WINDOW_TABLE
from .layers import moe_layers, rebuilt
from .offload import OFFLOADED
from .order import ordered

_ROWS = ("T", "S")
_SHARED = ("page_table", WINDOW_TABLE)
"""Inputs that both microbatches read whole: a token says which row is its own."""


@ordered
def dual_batch(program: Program) -> Program:
    """The program of a decode step in two microbatches; of one token: the program itself.

    Raises:
        PykernelsError: it has no routed experts, or has two microbatches already, or its experts
            are streamed; a node that is none of a microbatch reads what tokens have, and is no norm
            of some of them.
    """
    if program.sizes["T"] < 2:
        return program
    if not moe_layers(program):
        raise PykernelsError(f"{program.name!r} has no routed experts", "Use it as it is")
    halved = [node for node in program.nodes if _is_of_a_microbatch(program, node)]
    buffers: dict[str, Buffer] = {}
    microbatches = [
        [_of_microbatch(program, node, microbatch, buffers) for node in halved]
        for microbatch in MICROBATCHES
    ]
    nodes: list[Node] = []
    start = 0
    for end in (*_turns(halved), len(halved)):
        for microbatch in microbatches:
            nodes += microbatch[start:end]
        start = end
    for node in program.nodes:
        if not _is_of_a_microbatch(program, node):
            nodes += _joined(program, node, buffers)
    tokens = zip(MICROBATCHES, microbatch_tokens(program.sizes["T"]), strict=True)
    sizes = {**program.sizes, **{microbatch_dim(microbatch): count for microbatch, count in tokens}}
    named = {name for node in nodes for name in (*node.reads, *node.writes)}
    kept = {name: buffer for name, buffer in program.buffers.items() if name in named}
    return rebuilt(replace(program, sizes=sizes, buffers=kept), nodes, buffers)


def _is_of_a_microbatch(program: Program, node: Node) -> bool:
    return any(_has_rows(program, name) for name in node.writes)


def _has_rows(program: Program, name: str) -> bool:
    return program.buffers[name].shape[0] in _ROWS


def _turns(nodes: list[Node]) -> list[int]:
    """Where microbatches take turns: the places behind the experts of each layer."""
    ends = {
        node.layer: i + 1
        for i, node in enumerate(nodes)
        if node.op == "moe_ffn" and node.role in OFFLOADED
    }
    return sorted(ends.values())


def _of_microbatch(
    program: Program, node: Node, microbatch: str, buffers: dict[str, Buffer]
) -> Node:
    """A microbatch's own of a node; its buffers join ``buffers``."""

    def renamed(port: str, name: str) -> str:
        if port in _SHARED or not _has_rows(program, name):
            return name
        buffer = program.buffers[name]
        label = microbatch_name(microbatch, name)
        buffers[label] = replace(
            buffer, name=label, shape=(microbatch_dim(microbatch), *buffer.shape[1:])
        )
        return label

    return replace(
        node,
        inputs={port: renamed(port, name) for port, name in node.inputs.items()},
        outputs={port: renamed(port, name) for port, name in node.outputs.items()},
        name=microbatch_name(microbatch, node.name),
        microbatch=microbatch,
    )


def _joined(program: Program, node: Node, buffers: dict[str, Buffer]) -> list[Node]:
    """A node of no microbatch; in front of a norm of some of the tokens' rows, what joins them."""
    rows = [name for name in node.reads if _has_rows(program, name)]
    if not rows:
        return [node]
    if node.op != "rms_norm" or "rows" not in node.inputs:
        raise PykernelsError(
            f"{node.name} of {program.name!r} reads {rows[0]!r}, which is in two microbatches",
            "Apply dual_batch before the pass that added it",
        )
    x, H = program.buffers[node.inputs["x"]], program.weight(node, "weight").shape[0]
    inputs = {port: name for port, name in node.inputs.items() if port != "rows"}
    parts: dict[str, str] = {}
    nodes: list[Node] = []
    for microbatch, port in zip(MICROBATCHES, ("first", "last"), strict=True):
        outputs = {port: f"{node.name}.{port}" for port in ("out", "sum")}
        summed = replace(node, inputs=inputs, outputs=outputs)
        with_sums = replace(program, buffers={**program.buffers, **_sums(summed, H)})
        nodes.append(_of_microbatch(with_sums, summed, microbatch, buffers))
        parts[port] = microbatch_name(microbatch, outputs["sum"])
    total = f"{node.name}.joined"
    buffers[total] = replace(x, name=total, shape=("T", H), kind="scratch")
    join = Node(
        "join_rows", parts, {"out": total}, device=node.device, name=total, layer=node.layer
    )
    rest = {"x": total, "rows": node.inputs["rows"]}
    return [*nodes, join, replace(node, inputs=rest)]


def _sums(node: Node, H: int) -> dict[str, Buffer]:
    return {name: Buffer(name, ("T", H)) for name in node.writes}
