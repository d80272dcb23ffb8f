"""Linears and experts in slices, one a NUMA node (tensor parallelism, SOSP'25 section 3.3).

A linear is cut by rows, and a matrix per head by heads: each slice writes its own columns of the
same buffer, so the numbers are those of the whole. Experts are cut along their intermediate size
(``quant.split``): each slice writes a sum of its own, and the next norm adds them in the order of
the nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from pykernels.errors import PykernelsError
from pykernels.quant import get_format
from pykernels.quant.layout import N_BLOCK

from ..experts.sharding import slices_on
from ..machine.nodes import MemoryNodes, slice_cuts
from ..program import Program
from ..program.node import Node, repeated
from ..program.op_table.sandwich import NORMS
from ..program.weight_spec import WeightSpec
from .layers import rebuilt
from .order import ordered


@dataclass(frozen=True)
class _Slices:
    """What takes the place of a node.

    Attributes:
        weights: weights that the slices read.
        sums: for each buffer that is now a sum of several, those.
    """

    nodes: list[Node]
    weights: list[WeightSpec] = field(default_factory=list)
    sums: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@ordered
def split_over_nodes(program: Program, nodes: MemoryNodes) -> Program:
    """The program with the CPU's linears and experts in slices, one a NUMA node.

    A matrix of fewer 32-row blocks than nodes, and experts too narrow to be cut, stay as they are:
    all workers share them.

    Raises:
        PykernelsError: experts too narrow for the nodes that were asked for.
    """
    if len(nodes) < 2:
        return program
    new_nodes: list[Node] = []
    weights = dict(program.weights)
    sums: dict[str, tuple[str, ...]] = {}
    ends: dict[str, list[str]] = {}  # of each node, the names of its slices
    for node in program.nodes:
        slices = _slices(program, node, nodes)
        new_nodes += slices.nodes
        weights |= {spec.name: spec for spec in slices.weights}
        sums |= slices.sums
        ends[node.name] = [one.name for one in slices.nodes]
    new_nodes = [_renamed(node, ends) for node in new_nodes]
    buffers = {
        part: replace(program.buffers[name], name=part, kind="scratch")
        for name, parts in sums.items()
        for part in parts
    }
    program = replace(program, weights=weights)
    return rebuilt(program, _read_sums(program, new_nodes, sums), buffers)


def _slices(program: Program, node: Node, nodes: MemoryNodes) -> _Slices:
    if node.device != "cpu":
        return _Slices([node])
    if node.op == "linear":
        blocks = -(-program.weight(node, "weight").shape[0] // N_BLOCK)
        return _side_by_side(program, node, slice_cuts(blocks, len(nodes)), "start", N_BLOCK)
    if node.op == "per_head_linear":
        heads = program.weight(node, "heads").shape[0]
        return _side_by_side(program, node, slice_cuts(heads, len(nodes)), "first", 1)
    if node.op == "moe_ffn":
        return _experts(program, node, nodes)
    return _Slices([node])


def _experts(program: Program, node: Node, nodes: MemoryNodes) -> _Slices:
    spec = program.weight(node, "experts")
    assert spec.moe is not None
    count = slices_on(spec.moe, get_format(spec.down_fmt), nodes)
    if count == 1:
        return _Slices([node])
    if others := sorted(node.weights.keys() - {"experts"}):
        raise PykernelsError(
            f"{node.name} has weights that are not sliced with its experts: {', '.join(others)}",
            "Run it on one NUMA node (--numa off)",
        )
    specs, out = spec.expert_slices(count), node.outputs["out"]
    parts = tuple(f"{out}.node{i}" for i in range(count))
    split = [
        replace(
            node,
            name=f"{node.name}.node{i}",
            weights={"experts": own.name},
            outputs={"out": part},
            numa=i,
        )
        for i, (own, part) in enumerate(zip(specs, parts, strict=True))
    ]
    return _Slices(split, specs, {out: parts})


def _side_by_side(
    program: Program, node: Node, cuts: Sequence[int], attr: str, unit: int
) -> _Slices:
    """A linear in slices that each write columns of its output.

    Args:
        cuts: of its matrix, in units that are not cut.
        attr: that says where a slice's columns begin, in ``unit`` of them a unit of the cuts.
    """
    if len(cuts) == 2:
        return _Slices([node])
    slices = _Slices([])
    for i, (first, last) in enumerate(zip(cuts, cuts[1:], strict=False)):
        weights: dict[str, str] = {}
        for port, name in node.weights.items():
            spec = program.weights[name]
            if spec.kind == "tensor":  # a bias, of which each row has a number
                slice_spec = spec.part(unit * first, min(unit * last, spec.shape[0]))
            else:
                slice_spec = spec.part(first, last)
            slices.weights.append(slice_spec)
            weights[port] = slice_spec.name
        slices.nodes.append(
            replace(
                node,
                name=f"{node.name}.node{i}",
                # The others write their columns where the first one has written its own.
                inputs={**node.inputs, "out": node.outputs["out"]} if i else node.inputs,
                weights=weights,
                attrs={**node.attrs, attr: node.attr(attr) + unit * first},
                numa=i,
            )
        )
    return slices


def _renamed(node: Node, ends: Mapping[str, list[str]]) -> Node:
    """A wait or a submit with the nodes that it names: a peer may write when the last slice of one
    has run, and has read when any of them may begin."""
    attrs = dict(node.attrs)
    if node.op == "wait" and node.attr("since"):
        attrs["since"] = ends[node.attr("since")][-1]
    if node.op == "submit" and node.attr("until"):
        attrs["until"] = ends[node.attr("until")][0]
    return replace(node, attrs=MappingProxyType(attrs))


def _read_sums(
    program: Program, nodes: list[Node], sums: Mapping[str, tuple[str, ...]]
) -> list[Node]:
    """The nodes with what they read in place: norms add all parts of a sum; for any other reader a
    node adds them up first."""
    whole = {
        name
        for name in sums
        if program.buffers[name].kind == "output"
        or any(
            name in set(node.reads) - set(node.series("add")) or node.op not in NORMS
            for node in program.readers(name)
        )
    }
    new_nodes: list[Node] = []
    for node in nodes:
        if node.op in NORMS and any(name in sums for name in node.series("add")):
            adds = [part for name in node.series("add") for part in _parts(name, sums, whole)]
            others = {
                port: name for port, name in node.inputs.items() if not port.startswith("add")
            }
            node = replace(node, inputs={**others, **repeated("add", adds)})
        new_nodes.append(node)
        for name in whole:
            if sums[name][-1] in node.writes:
                add = Node("add", repeated("x", sums[name]), {"out": name}, name=f"{name}.add")
                new_nodes.append(replace(add, device=node.device, layer=node.layer, role=node.role))
    return new_nodes


def _parts(name: str, sums: Mapping[str, tuple[str, ...]], whole: set[str]) -> tuple[str, ...]:
    return (name,) if name in whole else sums.get(name, (name,))
