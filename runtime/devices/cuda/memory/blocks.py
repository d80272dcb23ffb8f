"""Tensors over one block of bytes: what crosses to a GPU, or comes from it, in one copy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch

from ....passes.stream_dense import ALIGN
from ....program.weight_spec import WeightSpec
from ....program.weights import Layout, WeightStore

Shape = tuple[tuple[int, ...], torch.dtype]
"""Dimensions of a tensor, and its dtype."""


def view(block: torch.Tensor, shape: Shape, at: int = 0) -> torch.Tensor:
    """The tensor of that shape over a block, uint8 [bytes], from byte ``at`` on."""
    dims, dtype = shape
    return block[at : at + _nbytes(shape)].view(dtype).view(dims)


def views(block: torch.Tensor, shapes: Mapping[str, Shape]) -> dict[str, torch.Tensor]:
    """Tensors, by name, that lie one behind the other in a block of ``block_bytes``."""
    tensors, at = dict[str, torch.Tensor](), 0
    for name, shape in shapes.items():
        tensors[name] = view(block, shape, at)
        at += aligned(_nbytes(shape))
    return tensors


def block_bytes(shapes: Mapping[str, Shape]) -> int:
    """Bytes that tensors of these shapes take together."""
    return sum(aligned(_nbytes(shape)) for shape in shapes.values())


def aligned(nbytes: int) -> int:
    """Bytes up to where the next tensor of a block may begin."""
    return -(-nbytes // ALIGN) * ALIGN


def _nbytes(shape: Shape) -> int:
    return math.prod(shape[0]) * shape[1].itemsize


def stored_bytes(value: Any) -> int:
    """Bytes that a weight takes in a block: a tensor, or an object or a tuple that has tensors, on
    any device."""
    return sum(aligned(part.nbytes) for part in _tensors(value))


def within(value: Any, block: torch.Tensor) -> Any:
    """The weight with its tensors over the first ``stored_bytes`` of a block, which has their
    numbers, or will."""
    at = 0

    def there(part: torch.Tensor) -> torch.Tensor:
        nonlocal at
        found = view(block, (tuple(part.shape), part.dtype), at)
        at += aligned(part.nbytes)
        return found

    return _changed(value, there)


def _tensors(value: Any) -> list[torch.Tensor]:
    tensors = list[torch.Tensor]()

    def note(part: torch.Tensor) -> torch.Tensor:
        tensors.append(part)
        return part

    _changed(value, note)
    return tensors


def _changed(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A weight with other tensors in their places."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple):
        return tuple(_changed(part, change) for part in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    old = {field.name: getattr(value, field.name) for field in fields(value)}
    new = {name: _changed(part, change) for name, part in old.items()}
    other = {name: part for name, part in new.items() if part is not old[name]}
    return replace(value, **other) if other else value


@dataclass(frozen=True)
class HostResident:
    """A weight in a GPU's layout in one block of main memory: it crosses to a slot of the GPU's.

    Attributes:
        memory: uint8 [bytes], pinned once its runner has done so.
        value: the weight, over that memory.
    """

    memory: torch.Tensor
    value: Any

    @classmethod
    def of(cls, value: Any) -> HostResident:
        """A copy of a weight."""
        memory = torch.empty(stored_bytes(value), dtype=torch.uint8, device="cpu")
        copy = within(value, memory)
        for source, target in zip(_tensors(value), _tensors(copy), strict=True):
            target.copy_(source)
        return cls(memory, copy)

    def within(self, slot: torch.Tensor) -> Any:
        """The weight as it is once ``memory`` was copied to the beginning of ``slot``, uint8."""
        return within(self.value, slot)


def host_resident(layout: Layout) -> Layout:
    """Returns a layout that makes the same in main memory, as ``HostResident``."""

    def make(spec: WeightSpec, store: WeightStore, device: torch.device) -> HostResident:
        return HostResident.of(layout(spec, store, device))

    make.__name__ = f"staged_{layout.__name__}"
    return make
