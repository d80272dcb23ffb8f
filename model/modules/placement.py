"""The device on which rules place each module.

A module runs where the first placing rule that matches it says, else where its parent does. An
operator with a device of its own (``Operator.placed``) is there whatever the rules say.

Source: KTransformers (SOSP 2025), section 5 (several GPUs: layers are split over them).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from pykernels.errors import PykernelsError

from ..rules import Part, Rule
from .recognise import why_not_fused
from .registry import Operator, is_class


@dataclass(frozen=True)
class ModulePlacement:
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


def place(model: nn.Module, rules: Sequence[Rule], root: str = "cpu") -> ModulePlacement:
    """Where each module of an injected model runs.

    Raises:
        PykernelsError: a placing rule that matches no module, or is never reached; tied tensors
            on two devices.
    """
    names = [name for name, _ in model.named_modules()]
    placed: dict[str, str] = {}
    for rule in rules:
        if rule.replace.cls is not None or rule.check:
            continue
        matching = [name for name, module in model.named_modules() if matches(rule, name, module)]
        # What is in a module goes with it: only the outermost ones are dealt out.
        tops = [name for name in matching if not any(within(name, other) for other in matching)]
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
    placement = ModulePlacement(root, placed)
    for target, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        if placement.of(target) != placement.of(source):
            raise PykernelsError(
                f"{target} on {placement.of(target)} and {source} on {placement.of(source)} are"
                " one tensor",
                "Place both on one device",
            )
    return placement


def check_places(model: nn.Module, rules: Sequence[Rule], placement: ModulePlacement) -> None:
    """Holds a placement against the rules that only check one.

    Raises:
        PykernelsError: a part that is elsewhere; a rule that matches none.
    """
    for rule in rules:
        if not rule.check:
            continue
        device, name = rule.devices[0], rule.match.name or ""
        places = {
            part: module for part, module in _parts(model, rule.match.part) if re.search(name, part)
        }
        if not places:
            raise PykernelsError(
                f"{rule.origin} ({rule.clauses}) matches no module", "Correct it or drop it"
            )
        for part, module in places.items():
            if (there := placement.of(module)) != device:
                raise PykernelsError(
                    f"{rule.origin} wants {part} on {device}, and its layer is on {there}",
                    f"Name {there} there too, or place the layer on {device}",
                )


def _parts(model: nn.Module, part: Part | None) -> Iterator[tuple[str, str]]:
    """Names of a kind of part as KTransformers' models have them, each with that of the module
    whose place is its place."""
    for name, module in model.named_modules():
        leaf = name.rpartition(".")[2]
        if part in ("attention", "rotary") and leaf in _ATTENTION:
            yield (f"{name}.rotary_emb" if part == "rotary" else name), name
        elif part in ("block", "experts", "router") and _is_block(module):
            if part == "router":
                yield f"{name}.gate", f"{name}.gate"
            else:
                yield (f"{name}.experts" if part == "experts" else name), name
        elif part == "mlp" and leaf in _MLPS and not _is_block(module):
            yield name, name
        elif part == "norm" and type(module).__name__.endswith("Norm"):
            yield name, name
        elif part == "model" and name == "model":
            yield name, name


_ATTENTION = ("self_attn", "linear_attn", "conv")
_MLPS = ("mlp", "feed_forward", "shared_experts", "shared_expert")


def _is_block(module: nn.Module) -> bool:
    return hasattr(module, "experts") or (isinstance(module, Operator) and hasattr(module, "gate"))


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
