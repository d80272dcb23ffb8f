"""Weights in a GPU's layout that lie in main memory: they cross to a slot of the GPU's memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch

from ....passes.stream_dense import ALIGN
from ....program.weight_spec import WeightSpec
from ....program.weights import Layout, WeightStore


@dataclass(frozen=True)
class Staged:
    """A weight in one piece of main memory.

    Attributes:
        memory: uint8 [bytes], pinned once its runner has done so.
        value: the weight, over that memory.
    """

    memory: torch.Tensor
    value: Any

    @classmethod
    def of(cls, value: Any) -> Staged:
        """A copy of a weight: a tensor, or an object or a tuple that has tensors."""
        memory = torch.empty(stored_bytes(value), dtype=torch.uint8, device="cpu")
        free = memory

        def place(part: torch.Tensor) -> torch.Tensor:
            nonlocal free
            found = free[: part.nbytes].view(part.dtype).view(part.shape)
            found.copy_(part)
            free = free[_aligned(part) :]
            return found

        return cls(memory, changed(value, place))

    def within(self, slot: torch.Tensor) -> Any:
        """The weight as it is once ``memory`` was copied to the beginning of ``slot``, uint8."""
        start = self.memory.data_ptr()

        def there(part: torch.Tensor) -> torch.Tensor:
            at = part.data_ptr() - start
            return slot[at : at + part.nbytes].view(part.dtype).view(part.shape)

        return changed(self.value, there)


def staged(layout: Layout) -> Layout:
    """Returns a layout that makes the same in main memory, as ``Staged``."""

    def make(spec: WeightSpec, store: WeightStore, device: torch.device) -> Staged:
        return Staged.of(layout(spec, store, device))

    make.__name__ = f"staged_{layout.__name__}"
    return make


def stored_bytes(value: Any) -> int:
    """Bytes of the ``memory`` that a weight takes; its tensors may be on any device."""
    total = 0

    def add(part: torch.Tensor) -> torch.Tensor:
        nonlocal total
        total += _aligned(part)
        return part

    changed(value, add)
    return total


def changed(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A weight with other tensors in their places."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple):
        return tuple(changed(part, change) for part in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    own = {field.name: getattr(value, field.name) for field in fields(value)}
    new = {name: changed(part, change) for name, part in own.items()}
    other = {name: part for name, part in new.items() if part is not own[name]}
    return replace(value, **other) if other else value


def _aligned(part: torch.Tensor) -> int:
    return -(-part.nbytes // ALIGN) * ALIGN
