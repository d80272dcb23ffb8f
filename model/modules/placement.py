"""Which device each module runs on, and handing activations over where it changes.

A module runs where the first placing rule that matches it says, else where its parent does. An
operator with a device of its own (``Operator.placed``) is there whatever the rules say.

Source: KTransformers (SOSP 2025), section 5 (several GPUs: layers are split over them).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pykernels.errors import PykernelsError

from ..device import check_device
from ..rules import Rule
from .recognise import why_not_fused
from .registry import Operator, is_class


@dataclass(frozen=True)
class Placement:
    """The device of every module and tensor by its dotted name.

    Attributes:
        root: of what no rule places.
        placed: of the modules that rules place; what is in them goes with them.
    """

    root: str
    placed: Mapping[str, str] = field(default_factory=dict)

    def of(self, name: str) -> str:
        """The device of a module, parameter or buffer."""
        while name not in self.placed and name:
            name = name.rpartition(".")[0]
        return self.placed.get(name, self.root)

    @property
    def devices(self) -> list[str]:
        """All of them, the root's first."""
        root = self.of("")
        return [root, *sorted({*self.placed.values()} - {root})]

    def check(self) -> None:
        """Raise `PykernelsError` for a device that this machine does not have."""
        for device in self.devices:
            check_device(device)

    def gpu(self) -> str | None:
        """A device other than the CPU, if there is one."""
        return next((device for device in self.devices if device != "cpu"), None)


def place(model: nn.Module, rules: Sequence[Rule], root: str = "cpu") -> Placement:
    """Where each module of an injected model runs.

    Raises:
        PykernelsError: a placing rule that matches no module, or is never reached; tied tensors
            on two devices.
    """
    names = [name for name, _ in model.named_modules()]
    placed: dict[str, str] = {}
    for rule in rules:
        if rule.replace.cls is not None:
            continue
        found = [name for name, module in model.named_modules() if matches(rule, name, module)]
        # What is in a module goes with it: only the outermost ones are dealt out.
        tops = [name for name in found if not any(within(name, other) for other in found)]
        if not tops:
            few = ", ".join(names[1:4])
            raise PykernelsError(
                f"{rule.origin} ({rule.clauses}) matches no module",
                f"Modules are called like {few}; the whole model is ^$",
            )
        if all(name in placed for name in tops):
            raise PykernelsError(
                f"{rule.origin} ({rule.clauses}) is never reached: earlier rules place all its"
                " modules",
                "Put it before them or drop it",
            )
        for i, name in enumerate(tops):
            device = rule.devices[i * len(rule.devices) // len(tops)]
            placed.setdefault(name, device)
    for name, module in model.named_modules():
        if isinstance(module, Operator) and module.placed is not None:
            placed[name] = module.placed
    placement = Placement(root, placed)
    for target, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        if placement.of(target) != placement.of(source):
            raise PykernelsError(
                f"{target} on {placement.of(target)} and {source} on {placement.of(source)} are"
                " one tensor",
                "Place both on one device",
            )
    return placement


def within(name: str, other: str) -> bool:
    """Whether a module is inside another one (every one is in the model, called "")."""
    return name != other and (not other or name.startswith(f"{other}."))


def matches(rule: Rule, name: str, module: nn.Module) -> bool:
    """Whether every clause of a rule holds for a module, called `name` in its model."""
    match = rule.match
    if match.name is not None and not re.search(match.name, name):
        return False
    if match.holds == "experts" and why_not_fused(module) is not None:
        return False
    return match.cls is None or is_class(type(module), match.cls)


def hand_over(model: nn.Module, placement: Placement) -> None:
    """Let activations move where the device changes: into a module on its call, and back to the
    caller's device, but between the layers of a list, where the next one takes them as they are."""
    callers: dict[str, list[str]] = {}
    modules = dict(model.named_modules())
    for name in modules:
        if name and not isinstance(modules[name], nn.ModuleList):
            callers.setdefault(_caller(name, modules), []).append(name)
    for caller, called in callers.items():
        here = placement.of(caller)
        if all(placement.of(name) == here for name in called):
            continue
        for name in called:
            there = placement.of(name)
            modules[name].register_forward_pre_hook(_bring(there), with_kwargs=True)
            listed = isinstance(modules[name.rpartition(".")[0]], nn.ModuleList)
            if there != here and not listed:
                modules[name].register_forward_hook(_give_back(here))
    if placement.placed:
        model.register_forward_pre_hook(_bring(placement.of("")), with_kwargs=True)


def moved(value: Any, device: torch.device) -> Any:
    """The same with every tensor on a device; tuples, lists and dicts are looked into."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if type(value) in (tuple, list):
        return type(value)(moved(one, device) for one in value)
    if type(value) is dict:
        return {key: moved(one, device) for key, one in value.items()}
    return value


def _caller(name: str, modules: Mapping[str, nn.Module]) -> str:
    """The module whose forward calls this one: a list has none."""
    parent = name.rpartition(".")[0]
    while isinstance(modules[parent], nn.ModuleList):
        parent = parent.rpartition(".")[0]
    return parent


def _bring(device: str) -> Any:
    target = torch.device(device)

    def hook(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return moved(args, target), moved(kwargs, target)

    return hook


def _give_back(device: str) -> Any:
    target = torch.device(device)

    def hook(_: nn.Module, args: Any, output: Any) -> Any:
        return moved(output, target)

    return hook
