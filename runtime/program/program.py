"""A forward step as data: nodes over named buffers. Passes rewrite it; devices run it.

A ``Program`` is what one forward step of a bucket of tokens does: a tuple of ``Node``s, in an order
in which they may run, over ``Buffer``s whose shapes are known. *Lowering* makes it from a model's
modules, passes are functions Program -> Program, and a device binds it to memory and runs it as
often as there are steps. ``ops`` says what each op reads and writes; nothing here knows a kernel,
or transformers.

Dims: ``T`` tokens of the step, ``S`` sequences, ``R`` rows of logits that are sampled; ``TA`` and
``TB`` tokens of each microbatch, where there are two; ``TW`` tokens of all ranks. A dimension is a
number or one of these names: its size differs from step to step, up to the bucket's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch

from pykernels.errors import PykernelsError

from .checks import fault
from .node import RANK_SIZES, STEP_SIZES, Buffer, Dim, Node, repeated
from .weight_spec import WeightSpec

__all__ = ["Buffer", "Builder", "Dim", "Node", "Program", "repeated"]


@dataclass(frozen=True)
class Program:
    """Nodes in order, and the buffers and weights that they name.

    Attributes:
        name: of the model and the bucket.
        sizes: the bucket: the most "T", "S" and "R" of a step, and of its microbatches if it has
            any.
        weights: what each weight is; a ``WeightStore`` has them.
        passes: names of those that have rewritten it, in order.
        rank: which of its ranks runs it; its collectives name the others.
    """

    name: str
    nodes: tuple[Node, ...]
    buffers: Mapping[str, Buffer]
    sizes: Mapping[str, int]
    weights: Mapping[str, WeightSpec] = field(default_factory=dict)
    passes: tuple[str, ...] = ()
    rank: int = 0

    def rewritten_by(self, name: str) -> Program:
        """The program after a pass of that name."""
        return replace(self, passes=(*self.passes, name))

    def check(self) -> Program:
        """Returns the program itself if it is valid.

        Raises:
            PykernelsError: an unknown op; an input, output, weight or attribute that the op does
                not have, or that is missing; dimensions or dtypes that do not agree; two nodes of
                one name; an undeclared buffer, a read before the first write, a second write.
        """
        cause = fault(self.nodes, self.buffers, self.sizes, self.weights, self.rank)
        if cause is not None:
            raise PykernelsError(
                f"the program {self.name!r} cannot run: {cause}", "Look at the pass that made it"
            )
        return self

    def shape(self, name: str) -> tuple[int, ...]:
        """A buffer's shape in the largest step."""
        dims = self.buffers[name].shape
        return tuple(self.sizes[dim] if isinstance(dim, str) else dim for dim in dims)

    def step_sizes(self) -> torch.Tensor:
        """int64 [3], [5] with microbatches, [6] with tokens by rank: zeros for the sizes of a
        step."""
        named = next(s for s in (STEP_SIZES[:3], STEP_SIZES, RANK_SIZES) if {*s} >= {*self.sizes})
        return torch.zeros(len(named), dtype=torch.int64, device="cpu")

    def on(self, device: str) -> Program:
        """The program with all nodes on one device."""
        return replace(self, nodes=tuple(replace(node, device=device) for node in self.nodes))

    def weight(self, node: Node, port: str) -> WeightSpec:
        """The weight that a node has under one of its op's names."""
        return self.weights[node.weights[port]]

    def readers(self, name: str) -> tuple[Node, ...]:
        """The nodes that read a buffer."""
        return tuple(node for node in self.nodes if name in node.reads)

    @cached_property
    def writers(self) -> Mapping[str, Node]:
        """By buffer, the last node that writes it."""
        return {name: node for node in self.nodes for name in node.writes}

    def __str__(self) -> str:
        sizes = ", ".join(f"{key} <= {value}" for key, value in self.sizes.items())
        after = f", after {', '.join(self.passes)}" if self.passes else ""
        lines = [f"{self.name} ({sizes}), {len(self.nodes)} nodes{after}"]
        width = max((len(node.name) for node in self.nodes), default=0)
        lines += [
            f"  {node.name:<{width}}  {node.device:<4}  {node.text(self.weights)}"
            for node in self.nodes
        ]
        return "\n".join(lines)


class Builder:
    """Collects nodes and their buffers; ``build`` makes the program.

    Lowering calls ``node`` once per operation; buffers are named after the node that writes them.
    """

    def __init__(self, name: str, sizes: Mapping[str, int], device: str = "cpu") -> None:
        self._name, self._sizes, self._device = name, dict(sizes), device
        self._layer: int | None = None
        self._role = ""
        self._nodes: list[Node] = []
        self._buffers: dict[str, Buffer] = {}
        self._weights: dict[str, WeightSpec] = {}

    def size(self, dim: str) -> int:
        """The largest "T", "S" or "R" of a step."""
        return self._sizes[dim]

    def has(self, name: str) -> bool:
        """Whether there is a buffer of this name."""
        return name in self._buffers

    def buffer(
        self,
        name: str,
        *shape: Dim,
        dtype: torch.dtype = torch.float32,
        kind: str = "scratch",
    ) -> str:
        """Declares a buffer; returns its name.

        Raises:
            PykernelsError: there is one of this name.
        """
        if name in self._buffers:
            raise PykernelsError(
                f"the program {self._name!r} has two buffers called {name!r}", "Rename one of them"
            )
        self._buffers[name] = Buffer(name, shape, dtype, kind)
        return name

    @contextmanager
    def marked(self, layer: int | None = None, role: str | None = None) -> Iterator[None]:
        """Nodes that are added inside have this layer and this role."""
        before = self._layer, self._role
        self._layer = before[0] if layer is None else layer
        self._role = before[1] if role is None else role
        yield
        self._layer, self._role = before

    def node(
        self,
        op: str,
        name: str,
        inputs: Mapping[str, str],
        outputs: Mapping[str, str],
        weights: Mapping[str, WeightSpec | None] | None = None,
        **attrs: Any,
    ) -> None:
        """Adds a node; the names are those of the op's row in ``ops.OPS``. Weights that are None
        are left out."""
        given = {port: spec for port, spec in (weights or {}).items() if spec is not None}
        self._weights |= {spec.name: spec for spec in given.values()}
        self._nodes.append(
            Node(
                op,
                MappingProxyType(dict(inputs)),
                MappingProxyType(dict(outputs)),
                MappingProxyType({port: spec.name for port, spec in given.items()}),
                MappingProxyType(attrs),
                self._device,
                name,
                self._layer,
                self._role,
            )
        )

    def build(self) -> Program:
        """The program, checked."""
        nodes = tuple(self._nodes)
        program = Program(self._name, nodes, self._buffers, self._sizes, self._weights)
        return program.check()
