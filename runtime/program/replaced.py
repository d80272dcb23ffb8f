"""Parameters that change while a model is loaded: they are written where the weights lie that were
made of them, so bound programs read them in their next step."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

import torch

from pykernels.errors import PykernelsError
from pykernels.quant import PackedExperts, PackedHeads, PackedMatrix, Packer, get_format
from pykernels.quant.split import SplitExperts

from .weight_spec import WeightPart, WeightSpec, part_values, stored_shape

_EXPERT = re.compile(r"(?P<layer>.+)\.(?P<expert>\d+)\.(?P<matrix>gate|up|down)_proj\.weight")
_MATRICES = "gate", "up", "down"


@runtime_checkable
class Derived(Protocol):
    """A weight in a layout that is made of another layout, piece by piece."""

    def forget(self) -> None:
        """Drops what was made, so that it is made anew."""


def holds(spec: WeightSpec, name: str) -> bool:
    """Whether a weight has the parameter, or some of it."""
    whole = base(spec)
    return any(part.name == name for part in whole.parts) or _expert(whole, name) is not None


def shape_of(specs: Iterable[WeightSpec], name: str) -> tuple[int, ...]:
    """A parameter's own shape, by the weights that hold it."""
    shape: tuple[int, ...] = (0,)
    for spec in map(base, specs):
        if (number := _expert(spec, name)) is not None:
            _, H, I = spec.shape  # noqa: E741
            return (H, I) if number[1] == 2 else (I, H)
        parts = [part for part in spec.parts if part.name == name]
        if parts[0].index is not None:
            return len(parts), *parts[0].shape
        if not parts[0].rows:
            return stored_shape(parts[0])
        last = max(end for part in parts for _, end in part.rows)
        columns = parts[0].shape[:1] if parts[0].transposed else parts[0].shape[1:]
        shape = max(last, *shape[:1]), *columns
    return shape


def writer(
    spec: WeightSpec, made: Any, device: str, name: str, values: torch.Tensor, pack: Packer
) -> Callable[[], None]:
    """What writes a parameter into a weight that holds it.

    Args:
        made: the weight in one of its layouts on ``device``.
        values: float32, in the parameter's shape; they are brought into the weight's format.

    Raises:
        PykernelsError: a layout that cannot be written in part, values that the format cannot hold.
            Nothing is written then.
    """
    if spec.slice_of is not None:
        return lambda: None  # in the memory of the whole
    if device != "cpu" or spec.shard is not None or not _is_writable(spec, made):
        where = "the host, for a GPU" if device == "cpu" else device
        raise PykernelsError(
            f"{name} cannot be replaced in {spec.name}, which has a layout of its own on {where}",
            "Only what the cpu device reads can be; load the changed model",
        )
    if isinstance(made, Derived):
        return made.forget
    if isinstance(made, PackedExperts | SplitExperts):
        return _expert_writer(spec, made, name, values)
    numbers = [number for number, part in enumerate(spec.parts) if part.name == name]
    rows = [_rows(spec.parts[number], values) for number in numbers]
    if isinstance(made, torch.Tensor):
        if spec.kind != "tensor":
            fmt = get_format(spec.fmt)
            rows = [fmt.dequantize(fmt.quantize(each)) for each in rows]
        return lambda: _put(made, spec, numbers, rows)
    weights = [made.fmt.quantize(each) for each in rows]

    def write() -> None:
        for number, weight in zip(numbers, weights, strict=True):
            made.pack(number, weight, pack)

    return write


def _put(
    made: torch.Tensor, spec: WeightSpec, numbers: list[int], rows: list[torch.Tensor]
) -> None:
    for number, values in zip(numbers, rows, strict=True):
        part = spec.parts[number]
        heads = spec.kind == "heads"
        to = made[number] if heads else made[part.at : part.at + part.shape[0]]
        to.copy_(values)


def _is_writable(spec: WeightSpec, made: Any) -> bool:
    if isinstance(made, torch.Tensor):  # as numbers, not as bytes of a GPU's layout
        return made.dtype in (torch.float32, torch.bfloat16) and made.shape == spec.shape
    if isinstance(made, PackedExperts | SplitExperts | Derived):
        return spec.full is None
    return isinstance(made, PackedMatrix | PackedHeads)


def _expert_writer(
    spec: WeightSpec, made: PackedExperts | SplitExperts, name: str, values: torch.Tensor
) -> Callable[[], None]:
    parts = [part.name for part in spec.parts]
    expert, which = _expert(spec, name) or (0, parts.index(name))  # an MLP is one expert
    if which > 2:
        raise PykernelsError(f"{name} is a bias of an MLP", "Only its matrices can be replaced")
    weight = (made.down_fmt if which == 2 else made.fmt).quantize(values)

    def write() -> None:
        matrices = list(made.unpack(expert))
        matrices[which] = weight
        gate, up, down = matrices
        made.pack(expert, gate, up, down, biases=made.biases(expert))

    return write


def _expert(spec: WeightSpec, name: str) -> tuple[int, int] | None:
    """(expert, 0 to 2 for gate, up, down) of a routed expert's matrix in a layer; else None."""
    match = _EXPERT.fullmatch(name)
    if spec.moe is None or spec.parts or match is None or match["layer"] != spec.name:
        return None
    expert = int(match["expert"])
    return (expert, _MATRICES.index(match["matrix"])) if expert < spec.moe.E else None


def base(spec: WeightSpec) -> WeightSpec:
    """The weight that it is a slice of, or some experts of."""
    return spec.slice_of.full if spec.slice_of is not None else spec.full or spec


def _rows(part: WeightPart, values: torch.Tensor) -> torch.Tensor:
    """What a part of a weight takes of a parameter."""
    if part.index is not None:
        values = values[part.index]
    return part_values(values, part)
