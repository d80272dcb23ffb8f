"""Linears and experts in slices, one a NUMA node (tensor parallelism, SOSP'25 section 3.3).

A linear is cut by rows, and a matrix per head by heads: each slice writes its own columns of the
same buffer, so the numbers are those of the whole. Experts are cut along their intermediate size
(``quant.split``): each slice writes a sum of its own, and the next norm adds them in the order of
the nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from pykernels.errors import PykernelsError
from pykernels.quant.layout import N_BLOCK

from ..machine.nodes import slice_cuts
from ..matrix import PackedHeads, PackedMatrix
from ..node import Node, repeated
from ..program import Program
from .layers import rebuilt


@dataclass(frozen=True)
class _Slices:
    """What takes the place of a node.

    Attributes:
        sums: for each buffer that is now a sum of several, those.
    """

    nodes: list[Node]
    sums: Mapping[str, tuple[str, ...]]


def split_over_nodes(program: Program, nodes: int) -> Program:
    """The program with its linears and experts in slices for so many NUMA nodes.

    A matrix of fewer 32-row blocks than nodes, and experts whose weights were packed whole, stay as
    they are: all workers share them.

    Raises:
        PykernelsError: experts that were packed in more slices.
    """
    for node in program.nodes:
        if node.op == "moe_ffn" and (count := len(node.weights["experts"].slices)) > nodes:
            raise PykernelsError(
                f"experts that were split across {count} NUMA nodes cannot run on a pool of"
                f" {nodes}",
                "Pack them for the nodes of the pool",
            )
    if nodes < 2:
        return program
    found: list[Node] = []
    sums: dict[str, tuple[str, ...]] = {}
    ends: dict[str, list[str]] = {}  # of each node, the names of its slices
    for node in program.nodes:
        slices = _slices(node, nodes)
        found += slices.nodes
        sums |= slices.sums
        ends[node.name] = [one.name for one in slices.nodes]
    found = [_renamed(node, ends) for node in found]
    buffers = {
        part: replace(program.buffers[name], name=part, kind="scratch")
        for name, parts in sums.items()
        for part in parts
    }
    return rebuilt(program, _read_sums(program, found, sums), buffers)


def _slices(node: Node, nodes: int) -> _Slices:
    if node.op == "linear":
        return _Slices(_linears(node, nodes), {})
    if node.op == "per_head_linear":
        return _Slices(_heads(node, nodes), {})
    if node.op == "moe_ffn" and len(slices := node.weights["experts"].slices) > 1:
        out = node.outputs["out"]
        parts = tuple(f"{out}.node{i}" for i in range(len(slices)))
        split = [
            replace(
                node,
                name=f"{node.name}.node{i}",
                weights={"experts": packed},
                outputs={"out": part},
                numa=i,
            )
            for i, (packed, part) in enumerate(zip(slices, parts, strict=True))
        ]
        return _Slices(split, {out: parts})
    return _Slices([node], {})


def _renamed(node: Node, ends: Mapping[str, list[str]]) -> Node:
    """A wait or a submit with the nodes that it names: a peer may write when the last slice of one
    has run, and has read when any of them may begin."""
    attrs = dict(node.attrs)
    if node.op == "wait" and node.attr("since"):
        attrs["since"] = ends[node.attr("since")][-1]
    if node.op == "submit" and node.attr("until"):
        attrs["until"] = ends[node.attr("until")][0]
    return replace(node, attrs=MappingProxyType(attrs))


def _linears(node: Node, nodes: int) -> list[Node]:
    matrix: PackedMatrix = node.weights["weight"]

    def part(first: int, last: int) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        weights: dict[str, Any] = {"weight": matrix.rows(first, last)}
        if "bias" in node.weights:
            start = N_BLOCK * first
            weights["bias"] = node.weights["bias"][start : start + weights["weight"].N]
        return weights, {"start": node.attr("start") + N_BLOCK * first}

    return _side_by_side(node, slice_cuts(matrix.blocks.shape[0], nodes), part)


def _heads(node: Node, nodes: int) -> list[Node]:
    heads: PackedHeads = node.weights["heads"]

    def part(first: int, last: int) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        return {"heads": heads.some(first, last)}, {"first": node.attr("first") + first}

    return _side_by_side(node, slice_cuts(heads.G, nodes), part)


def _side_by_side(
    node: Node,
    cuts: Sequence[int],
    part: Callable[[int, int], tuple[Mapping[str, Any], Mapping[str, Any]]],
) -> list[Node]:
    """A node in slices that each write columns of its output.

    Args:
        part: (first, last) of the cuts -> a slice's weights, and the attributes that change.
    """
    if len(cuts) == 2:
        return [node]
    found: list[Node] = []
    for i, (first, last) in enumerate(zip(cuts, cuts[1:], strict=False)):
        weights, attrs = part(first, last)
        found.append(
            replace(
                node,
                name=f"{node.name}.node{i}",
                # The others write their columns where the first one has written its own.
                inputs={**node.inputs, "out": node.outputs["out"]} if i else node.inputs,
                weights=weights,
                attrs={**node.attrs, **attrs},
                numa=i,
            )
        )
    return found


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
            name in set(node.reads) - set(node.series("add")) or node.op != "rms_norm"
            for node in program.readers(name)
        )
    }
    found: list[Node] = []
    for node in nodes:
        if node.op == "rms_norm" and any(name in sums for name in node.series("add")):
            adds = [part for name in node.series("add") for part in _parts(name, sums, whole)]
            others = {
                port: name for port, name in node.inputs.items() if not port.startswith("add")
            }
            node = replace(node, inputs={**others, **repeated("add", adds)})
        found.append(node)
        for name in whole:
            if sums[name][-1] in node.writes:
                add = Node("add", repeated("x", sums[name]), {"out": name}, name=f"{name}.add")
                found.append(replace(add, device=node.device, layer=node.layer, role=node.role))
    return found


def _parts(name: str, sums: Mapping[str, tuple[str, ...]], whole: set[str]) -> tuple[str, ...]:
    return (name,) if name in whole else sums.get(name, (name,))
