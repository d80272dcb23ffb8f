"""Replace modules of a model by rules, before any weight exists.

Source: KTransformers (SOSP 2025), section 5: walk the tree; the first rule that matches a module
replaces it; go on through the new submodules.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from pykernels.errors import PykernelsError

from ..rules import Rule
from . import linear, moe  # noqa: F401 - registers the shipped operators
from .placement import matches
from .recognise import why_not_fused
from .registry import ModuleContext, Operator, build, find_operator, is_class


@dataclass(frozen=True, slots=True)
class Replacement:
    """One replaced module: its dotted name, its class before, and the operator in its place."""

    name: str
    was: str
    operator: Operator


def inject(
    model: PreTrainedModel, rules: Sequence[Rule], kernel: str = "auto"
) -> list[Replacement]:
    """Apply the `rules` that have a class to `model` in place; returns what was replaced.

    The model's class, its configuration and its public interface stay. Raises `PykernelsError` for
    a rule that names an unknown operator, gives it wrong arguments, matches nothing, or is never
    reached because earlier rules replace all its modules.
    """
    rules = [rule for rule in rules if rule.replace.cls is not None]
    operators = [find_operator(str(rule.replace.cls), rule.origin) for rule in rules]
    present = {name: type(module) for name, module in model.named_modules() if name}
    replaced: list[Replacement] = []
    applied = [0] * len(rules)
    # An operator may keep the module it replaced, which is then not replaced a second time.
    originals: list[nn.Module] = []

    def walk(parent: nn.Module, prefix: str) -> None:
        for leaf, child in list(parent.named_children()):
            name = f"{prefix}.{leaf}" if prefix else leaf
            index = next((i for i, r in enumerate(rules) if matches(r, name, child)), None)
            if index is not None and not any(child is original for original in originals):
                rule = rules[index]
                device = next(iter(rule.devices), None)
                context = ModuleContext(name, model.config, device, kernel)
                new = build(operators[index], child, context, rule.replace.kwargs, rule.origin)
                setattr(parent, leaf, new)
                replaced.append(Replacement(name, type(child).__name__, new))
                originals.append(child)
                applied[index] += 1
                child = new
                if not rule.recursive:
                    continue
            walk(child, name)

    walk(model, "")
    for rule, count in zip(rules, applied, strict=True):
        if not count and not rule.optional:
            by_parts = rule.match.holds == "experts"
            raise _none_hold(rule, model) if by_parts else _unused(rule, present)
    return replaced


def _unused(rule: Rule, present: dict[str, type]) -> PykernelsError:
    """Why a rule did nothing: an earlier one took its modules, or there are none (near misses)."""
    by_class = [n for n, c in present.items() if rule.match.cls and is_class(c, rule.match.cls)]
    by_name = [n for n in present if rule.match.name and re.search(rule.match.name, n)]
    hits = set(by_class or present) & set(by_name or present)
    if (by_class or not rule.match.cls) and (by_name or not rule.match.name) and hits:
        return PykernelsError(
            f"{rule.origin} ({rule.clauses}) is never reached: earlier rules replace all its"
            " modules",
            "Put it before them or drop it",
        )
    classes = sorted({cls.__name__ for cls in present.values()})
    if rule.match.cls and not by_class:
        near = difflib.get_close_matches(rule.match.cls.rpartition(".")[2], classes, 3, 0.5)
        hint = f"Did you mean {', '.join(near)}?" if near else f"Classes here: {', '.join(classes)}"
    elif rule.match.cls:
        hint = f"The class is at {_few(by_class)}"
    else:
        hint = f"Modules are called like {_few(list(present))}"
    return PykernelsError(f"{rule.origin} ({rule.clauses}) matches no module", hint)


def _none_hold(rule: Rule, model: PreTrainedModel) -> PykernelsError:
    """Why nothing holds what a rule asks for: there are no experts, or others than ours."""
    experts = [
        f"{name} has {why_not_fused(module)}"
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == "experts"
    ]
    holder = experts[0] if experts else "none of its modules is called experts"
    return PykernelsError(
        f"{rule.origin}: {model.config.model_type} has no routed experts that could be recognised:"
        f" {holder}",
        "Run it as transformers has it, with an empty list of rules",
    )


def _few(names: list[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
