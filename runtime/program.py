"""A step of a model as data: nodes over named buffers, for a passes to rewrite, devices to run.

A ``Program`` is what one forward step of a bucket of tokens does: a tuple of ``Node``s, in an order
in which they may run, over ``Buffer``s whose shapes are known. *Lowering* makes it from a model's
modules, passes are functions Program -> Program, and a device binds it to memory and runs it as
often as there are steps. Nothing here knows a kernel, or transformers.

Dims: ``T`` tokens of the step, ``S`` sequences, ``R`` rows that are sampled; a shape has them by
name, since a step fills as many as it has, up to the bucket's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from pykernels.errors import PykernelsError

Dim = int | str
"""A size, or the name of one that each step has its own of: "T", "S" or "R"."""

INPUTS = ("tokens", "positions", "sequences", "slots", "page_table", "sampled")
"""Buffers that the engine writes before a step: int64 [T] token ids, positions, which sequence each
token is of, where its keys go (page * 64 + offset, -1 nowhere); [S, pages]; [R], tokens whose
logits are wanted."""


@dataclass(frozen=True)
class Buffer:
    """Memory that nodes write and read.

    Attributes:
        shape: sizes, outermost first.
        kind: "scratch", written and read within a step; "input", written before it; "output", read
            after it; "cache", kept from step to step.
    """

    name: str
    shape: tuple[Dim, ...]
    dtype: torch.dtype = torch.float32
    kind: str = "scratch"


@dataclass(frozen=True)
class Node:
    """One operation.

    Attributes:
        op: its name, the same in ``pykernels.ref``, ``.cpu`` and ``.gpu``.
        inputs, outputs: names of buffers; an output that is an input too, or a "cache", is changed
            in part.
        weights: what does not change from step to step, by the op's own names for it.
        attrs: numbers and words.
        device: "cpu", "cuda:0", "host".
    """

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    attrs: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    device: str = "cpu"
    name: str = ""

    def __str__(self) -> str:
        attrs = ", ".join(f"{key}={_short(value)}" for key, value in self.attrs.items())
        weights = ", ".join(f"{key}: {describe(value)}" for key, value in self.weights.items())
        inside = "; ".join(part for part in (", ".join(self.inputs), weights, attrs) if part)
        return f"{', '.join(self.outputs)} = {self.op}({inside})"


@dataclass(frozen=True)
class Program:
    """Nodes in order, and the buffers that they name.

    Attributes:
        name: of the model and the bucket.
        sizes: the bucket: the most "T", "S" and "R" of a step.
    """

    name: str
    nodes: tuple[Node, ...]
    buffers: Mapping[str, Buffer]
    sizes: Mapping[str, int]

    def check(self) -> Program:
        """Itself, if it can run.

        Raises:
            PykernelsError: a buffer that there is not, that is read before it is written, or that
                two nodes write; a size that the bucket has not.
        """
        written = {b.name for b in self.buffers.values() if b.kind in ("input", "cache")}
        for buffer in self.buffers.values():
            for dim in buffer.shape:
                if isinstance(dim, str) and dim not in self.sizes:
                    raise _broken(self, f"{buffer.name} has the size {dim!r}, the bucket has not")
        for node in self.nodes:
            where = f"{node.name or node.op}"
            for name in (*node.inputs, *node.outputs):
                if name not in self.buffers:
                    raise _broken(self, f"{where} names {name!r}, which is no buffer")
            for name in node.inputs:
                if name not in written:
                    raise _broken(self, f"{where} reads {name!r} before it is written")
            for name in node.outputs:
                in_place = self.buffers[name].kind == "cache" or name in node.inputs
                if name in written and not in_place:
                    raise _broken(self, f"{where} writes {name!r}, which is written already")
                written.add(name)
        for buffer in self.buffers.values():
            if buffer.kind == "output" and buffer.name not in written:
                raise _broken(self, f"nothing writes the output {buffer.name!r}")
        return self

    def shape(self, name: str) -> tuple[int, ...]:
        """A buffer's shape in the largest step."""
        dims = self.buffers[name].shape
        return tuple(self.sizes[dim] if isinstance(dim, str) else dim for dim in dims)

    def readers(self, name: str) -> tuple[Node, ...]:
        """The nodes that read a buffer."""
        return tuple(node for node in self.nodes if name in node.inputs)

    def __str__(self) -> str:
        sizes = ", ".join(f"{key} <= {value}" for key, value in self.sizes.items())
        lines = [f"{self.name} ({sizes}), {len(self.nodes)} nodes"]
        width = max((len(node.name) for node in self.nodes), default=0)
        lines += [f"  {node.name:<{width}}  {node.device:<4}  {node}" for node in self.nodes]
        return "\n".join(lines)


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def describe(weight: Any) -> str:
    """A weight in a few words: "bf16 [2048, 768]"."""
    if isinstance(weight, torch.Tensor):
        return f"{str(weight.dtype).removeprefix('torch.')} {list(weight.shape)}"
    return str(weight)


class Builder:
    """Collects nodes and their buffers; ``build`` makes the program.

    Each method call of lowering is one node; buffers are named after the node that writes them.
    """

    def __init__(self, name: str, sizes: Mapping[str, int], device: str = "cpu") -> None:
        self._name, self._sizes, self._device = name, dict(sizes), device
        self._nodes: list[Node] = []
        self._buffers: dict[str, Buffer] = {}

    def size(self, dim: str) -> int:
        """The most that a step has of "T", "S" or "R"."""
        return self._sizes[dim]

    def buffer(
        self,
        name: str,
        *shape: Dim,
        dtype: torch.dtype = torch.float32,
        kind: str = "scratch",
    ) -> str:
        """Declares a buffer; returns its name."""
        self._buffers[name] = Buffer(name, shape, dtype, kind)
        return name

    def node(
        self,
        op: str,
        name: str,
        inputs: Iterable[str],
        outputs: Iterable[str],
        weights: Mapping[str, Any] | None = None,
        **attrs: Any,
    ) -> None:
        """Adds a node."""
        self._nodes.append(
            Node(
                op, tuple(inputs), tuple(outputs), MappingProxyType(dict(weights or {})),
                MappingProxyType(attrs), self._device, name,
            )
        )  # fmt: skip

    def build(self) -> Program:
        """The program, checked."""
        program = Program(self._name, tuple(self._nodes), self._buffers, self._sizes)
        return program.check()


def _broken(program: Program, cause: str) -> PykernelsError:
    return PykernelsError(
        f"the program {program.name!r} cannot run: {cause}", "Look at the pass that made it"
    )
