"""On which device rules place each module.

A module runs where the first placing rule that matches it says, else where its parent does. An
operator with a device of its own (``Operator.placed``) is there whatever the rules say.

Source: KTransformers (SOSP 2025), section 5 (several GPUs: layers are split over them).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from pykernels.errors import PykernelsError

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
    if match.holds == "mla" and not hasattr(module, "kv_b_proj"):
        return False
    return match.cls is None or is_class(type(module), match.cls)
