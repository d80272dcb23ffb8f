"""The weights of a model on its devices: each is made once for a device, in the device's layout.

A ``WeightSource`` reads what is stored, a ``Layout`` is a function of a device that makes of it
what the device's kernels read, and the ``WeightStore`` keeps what was made.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pykernels.errors import PykernelsError
from pykernels.quant import PackedExperts, PackedHeads, PackedMatrix, Packer, Weight
from pykernels.quant.layout import N_BLOCK
from pykernels.quant.matrix import pack_alone
from pykernels.quant.split import SplitExperts

from ..machine.nodes import ONE_NODE, MemoryNodes
from .node import Node
from .program import Program
from .replaced import base, holds, shape_of, writer
from .weight_shard import Expert, expert_shards, matrix_shards, tensor_shard
from .weight_spec import WeightPart, WeightSpec

Packed = PackedMatrix | PackedHeads | PackedExperts | SplitExperts
"""A weight in the CPU's tiles."""
Ready = Packed | torch.Tensor
"""A weight in one of the CPU's layouts: in tiles, or as rows of numbers."""


class WeightSource(ABC):
    """A model as it is stored: the one interface through which weights are read."""

    @abstractmethod
    def tensor(self, spec: WeightSpec) -> torch.Tensor:
        """A tensor, in any float dtype, on the CPU."""

    @abstractmethod
    def matrices(self, spec: WeightSpec) -> Iterator[Weight]:
        """The parts of a matrix, or the matrices of all heads, in the spec's format."""

    @abstractmethod
    def experts(self, spec: WeightSpec) -> Iterator[Expert]:
        """All experts of a layer in order, in the spec's formats."""

    def ready(self, spec: WeightSpec, layout: str) -> Ready | None:
        """The weight as it lies in main memory or in a mapped file already, in one of the CPU's
        layouts; None: it has to be read."""
        return None

    @property
    def is_mapped(self) -> bool:
        """Whether weights may lie in mapped files, which nothing can be written into."""
        return False


class WeightStore:
    """The weights of one model.

    Args:
        source: of those that are not given by ``add``.
        pack: packs into the CPU's layout, see ``matrix.packer``.
        nodes: NUMA nodes: one slice of each matrix and of each expert lies on each.

    Attributes:
        changed: whether ``replace`` has ever changed a parameter.
    """

    def __init__(
        self,
        source: WeightSource | None = None,
        pack: Packer = pack_alone,
        nodes: MemoryNodes = ONE_NODE,
    ) -> None:
        self.pack, self.nodes = pack, nodes
        self._source = source
        self._given: dict[str, Ready] = {}
        self._made: dict[tuple[str, str, str], Any] = {}
        self._specs: dict[str, WeightSpec] = {}  # of what was made
        self._replaced: dict[str, torch.Tensor] = {}
        self.changed = False

    def read_from(self, source: WeightSource, pack: Packer, nodes: MemoryNodes = ONE_NODE) -> None:
        """Sets where weights are read from from now on; the arguments as the class's."""
        self._source, self.pack, self.nodes = source, pack, nodes

    def add(self, name: str, value: Ready) -> WeightSpec:
        """Gives a weight that is in memory; returns its spec."""
        self._given[name] = value
        return spec_of(name, value)

    def get(self, spec: WeightSpec, device: torch.device, layout: Layout) -> Any:
        """A weight on a device in a layout; it is made when it is first asked for.

        Raises:
            PykernelsError: it cannot be read, or has no such layout.
        """
        key = spec.name, str(device), layout.__name__
        if key not in self._made:
            made = layout(spec, self, device)
            for name, values in self._replaced.items():
                if spec.full is None and holds(spec, name):  # some experts: of the changed tiles
                    writer(spec, made, device.type, name, values, self.pack)()
            self._made[key], self._specs[spec.name] = made, spec
        return self._made[key]

    def is_made(self, spec: WeightSpec, device: torch.device) -> bool:
        """Whether a weight lies on a device already, in some layout."""
        return any(key[:2] == (spec.name, str(device)) for key in self._made)

    def load(self, *programs: tuple[Program, LayoutOf]) -> None:
        """Makes all that programs need: first what is outside the layers, then layer by layer the
        experts and the rest, since what is large takes more for a moment."""
        nodes = [
            (-1 if node.layer is None else node.layer, node.op != "moe_ffn", i, node)
            for i, (program, _) in enumerate(programs)
            for node in program.nodes
        ]
        for _, _, i, node in sorted(nodes, key=lambda entry: entry[:2]):
            program, layout_of = programs[i]
            for port, name in node.weights.items():
                self.get(program.weights[name], *layout_of(node, port))

    def replace(self, name: str, values: torch.Tensor) -> None:
        """Changes a parameter in all weights that were or will be made of it, in their formats. To
        be called between steps: the next one reads it. Keys and values that are cached stay.

        Args:
            name: of the model's parameter; of a routed expert's matrix as checkpoints have it,
                ``model.layers.1.mlp.experts.3.gate_proj.weight``.
            values: floats in its shape.

        Raises:
            PykernelsError: no weight that was made has it, another shape, values that its format
                cannot hold, a weight that is on a GPU or in a mapped file. Nothing is changed then.
        """
        specs = [spec for spec in self._specs.values() if holds(spec, name)]
        if not specs:
            near = difflib.get_close_matches(name, self._parameters(), 1)
            hint = f"Did you mean {near[0]}?" if near else "Give the name of a model's parameter"
            raise PykernelsError(f"no weight was made of a parameter {name!r}", hint)
        shape = shape_of(specs, name)
        if values.shape != shape or not values.is_floating_point():
            raise PykernelsError(
                f"{name} is {list(shape)}, not {values.dtype} {list(values.shape)}",
                "Give floats of its shape",
            )
        if self._source is not None and self._source.is_mapped:
            raise PykernelsError(
                f"{name} lies in a mapped file", "Load the checkpoint that it was converted from"
            )
        values = values.detach().to("cpu", torch.float32, copy=True)
        writers = [
            writer(self._specs[made_of], made, torch.device(device).type, name, values, self.pack)
            for (made_of, device, _), made in self._made.items()
            if holds(self._specs[made_of], name)
        ]
        for write in writers:
            write()
        self._replaced[name] = values
        self.changed = True

    def drop(self, name: str) -> None:
        """Forgets a weight, given or made, and what has replaced its parameters: it is made anew
        when it is asked for. Its memory is free when no bound program reads it any more.

        Raises:
            PykernelsError: there is no such weight.
        """
        gone = {spec.name for spec in self._specs.values() if name in (spec.name, base(spec).name)}
        if not gone and name not in self._given:
            raise PykernelsError(
                f"there is no weight {name!r} to drop", "Give the name that a program has for it"
            )
        for spec in [self._specs.pop(each) for each in gone]:
            for parameter in [each for each in self._replaced if holds(spec, each)]:
                del self._replaced[parameter]
        self._given.pop(name, None)
        self._made = {key: made for key, made in self._made.items() if key[0] not in gone}

    def _parameters(self) -> list[str]:
        return [part.name for spec in self._specs.values() for part in spec.parts]

    def is_given(self, spec: WeightSpec) -> bool:
        """Whether ``add`` gave it."""
        return spec.name in self._given

    # What layouts are made from.

    def tensor(self, spec: WeightSpec) -> torch.Tensor:
        """A tensor, float32 and contiguous, on the CPU."""
        if spec.shard is not None:
            return tensor_shard(spec, self.tensor(spec.shard.full))
        added = self._given.get(spec.name)
        value = added if isinstance(added, torch.Tensor) else self._reader(spec).tensor(spec)
        return value.detach().float().contiguous()

    def matrices(self, spec: WeightSpec) -> Iterator[Weight]:
        """The parts of a matrix, or the matrices of all heads, in the spec's format."""
        if spec.shard is not None:
            return matrix_shards(spec, self.matrices(spec.shard.full))
        added = self._given.get(spec.name)
        if isinstance(added, torch.Tensor):
            return iter([Weight(added)])
        if added is not None:
            return unpacked(added, spec)
        return self._reader(spec).matrices(spec)

    def experts(self, spec: WeightSpec) -> Iterator[Expert]:
        """All experts of a layer, in order."""
        if spec.shard is not None:
            return expert_shards(spec, self.experts(spec.shard.full))
        added = self._given.get(spec.name)
        if isinstance(added, PackedExperts | SplitExperts):
            return unpacked_experts(added)
        return self._reader(spec).experts(spec)

    def ready(self, spec: WeightSpec, layout: str) -> Ready | None:
        """The weight in one of the CPU's layouts, where it exists so already."""
        if spec.shard is not None:
            return None
        added = self._given.get(spec.name)
        if added is not None:
            return added if isinstance(added, torch.Tensor) == (layout == "rows") else None
        return None if self._source is None else self._source.ready(spec, layout)

    def _reader(self, spec: WeightSpec) -> WeightSource:
        if self._source is None:
            raise PykernelsError(f"the weight {spec.name!r} is not given", "See WeightStore.add")
        return self._source


Layout = Callable[[WeightSpec, WeightStore, torch.device], Any]
"""Makes what kernels read of a weight, of the store's ``tensor``, ``matrices`` or ``experts``; its
name tells it from the device's other layouts."""
LayoutOf = Callable[[Node, str], tuple[torch.device, Layout]]
"""(node of a program, the op's name for a weight) -> where it reads it, and in which layout."""


def spec_of(name: str, value: Ready) -> WeightSpec:
    """The spec of a weight that is in memory."""
    if isinstance(value, PackedMatrix):
        parts = tuple(
            WeightPart(name, shape, at)
            for at, shape in zip(value.starts, value.shapes, strict=True)
        )
        return WeightSpec(name, "matrix", value.fmt.name, value.shape, parts)
    if isinstance(value, PackedHeads):
        parts = tuple(WeightPart(name, (value.N, value.K)) for _ in range(value.G))
        return WeightSpec(name, "heads", value.fmt.name, value.shape, parts)
    if isinstance(value, PackedExperts | SplitExperts):
        return WeightSpec.experts(name, value.shape, value.fmt.name, value.down_fmt.name)
    return WeightSpec.tensor(name, *value.shape)


def unpacked(packed: Packed, spec: WeightSpec) -> Iterator[Weight]:
    """The matrices of a weight that lies in the CPU's layout."""
    fmt = packed.fmt
    if isinstance(packed, PackedHeads):
        for blocks, scales in zip(packed.blocks, packed.scales, strict=True):
            yield fmt.unpack(blocks, scales, packed.N, packed.K)
        return
    assert isinstance(packed, PackedMatrix)
    for part in spec.parts:
        at = slice(part.at // N_BLOCK, -(-(part.at + part.shape[0]) // N_BLOCK))
        yield fmt.unpack(packed.blocks[at], packed.scales[at], part.shape[0], packed.K)


def unpacked_experts(packed: PackedExperts | SplitExperts) -> Iterator[Expert]:
    """The experts of a layer that lie in the CPU's layout."""
    for e in range(packed.shape.E):
        yield packed.unpack(e), packed.biases(e)


@contextmanager
def naming(spec: WeightSpec, expert: int) -> Iterator[None]:
    """Puts the weight and the expert before what is wrong with one of its matrices."""
    try:
        yield
    except PykernelsError as error:  # its message has the expert's number at most
        raise PykernelsError(f"{spec.name}.{expert}: {error.cause}", error.hint) from None
