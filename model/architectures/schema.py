"""The schema of a model's weights: what each stored tensor is, known before any is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from torch import nn

from pykernels.quant import get_format

from ..checkpoint.plan import Plan, PlannedDense
from ..modules.linear import linears
from ..modules.moe import FusedMoE

ROUTERS = ("gate.weight", "router.weight", "router.proj.weight")
"""Endings of the names of routers' matrices, which are never converted: they decide which experts a
token uses."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A stored tensor as the model gets it.

    Attributes:
        fmt: the format that it is stored in, or a rule's; "bf16" of plain numbers.
        linear: the format that it has as the matrix of a linear, where conversion asks for another.
    """

    shape: tuple[int, ...]
    fmt: str
    linear: str


@dataclass(frozen=True)
class Schema:
    """All tensors by the names of the model's parameters.

    Attributes:
        experts: formats of routed experts (of gate and up, of down) by the names of their modules.
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    experts: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The schema as a manifest writes it."""
        tensors = {
            name: [list(t.shape), *dict.fromkeys((t.fmt, t.linear))]
            for name, t in self.tensors.items()
        }
        return {"tensors": tensors, "experts": {n: list(f) for n, f in self.experts.items()}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Schema:
        """The inverse of ``to_json``."""
        tensors = {
            name: Tensor(tuple(shape), formats[0], formats[-1])
            for name, (shape, *formats) in data["tensors"].items()
        }
        return cls(tensors, {name: (a, b) for name, (a, b) in data["experts"].items()})


def stored_schema(model: nn.Module, plan: Plan, converted: str | None = None) -> Schema:
    """Makes the schema of a checkpoint: what is stored, or what rules ask for.

    Args:
        model: injected; its modules have the rules' formats.
        converted: format of all linears but routers, where their inputs suit it.
    """
    tensors: dict[str, Tensor] = {}
    experts: dict[str, tuple[str, str]] = {}
    ours = linears(model)
    for item in plan.items:
        if isinstance(item, PlannedDense):
            fmt, shape = item.source.fmt or "bf16", item.source.shape
            if (linear := ours.get(item.name)) is not None:
                fmt = linear.packed_format(fmt)
            tensors[item.name] = Tensor(shape, fmt, _as_linear(item.name, shape, fmt, converted))
        else:
            module = model.get_submodule(item.name)
            assert isinstance(module, FusedMoE)
            experts[item.name] = item.packed(module)
    return Schema(tensors, experts)


def loaded_schema(model: nn.Module) -> Schema:
    """Makes the schema of a loaded or a meta model, whose matrices count as bfloat16."""
    named = chain(model.named_parameters(remove_duplicate=False), model.named_buffers())
    tensors = {name: Tensor(tuple(tensor.shape), "bf16", "bf16") for name, tensor in named}
    experts = {
        name: (module.routed.weights.fmt.name, module.routed.weights.down_fmt.name)
        for name, module in model.named_modules()
        if isinstance(module, FusedMoE) and module.routed is not None
    }
    return Schema(tensors, experts)


def _as_linear(name: str, shape: tuple[int, ...], fmt: str, converted: str | None) -> str:
    """The format of a linear's matrix where ``converted`` is asked for."""
    if converted is None or len(shape) != 2 or name.endswith(ROUTERS):
        return fmt
    return fmt if shape[1] % get_format(converted).k_multiple else converted
