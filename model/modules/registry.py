"""Operators: the base class of the modules that rules put into a model, and their register."""

from __future__ import annotations

import difflib
import importlib
import inspect
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn
from transformers import PretrainedConfig

from pykernels.errors import PykernelsError

O = TypeVar("O", bound="type[Operator]")  # noqa: E741 - a type variable, never a value


@dataclass(frozen=True, slots=True)
class ModuleContext:
    """What an operator knows of the module that it replaces, beside the module itself.

    `name`: dotted name in the model; `config`: the model's; `device`: the rule's, or None;
    `kernel`: the expert kernel that the caller asked for, where the rule names none.
    """

    name: str
    config: PretrainedConfig
    device: str | None = None
    kernel: str = "auto"


class Operator(nn.Module):
    """Base of the modules that rules put into a model, built from the original (on meta).

    A subclass takes `(original, context, *, ...)`; a rule's `kwargs` are its keyword arguments.
    `placed`: the device that it runs on, if it is not that of what is around it.
    """

    placed: str | None = None

    def __init__(self, original: nn.Module, context: ModuleContext, **kwargs: Any) -> None:
        super().__init__()


OPERATORS: dict[str, type[Operator]] = {}
"""Full dotted path -> operator."""


def operator(cls: O) -> O:
    """Class decorator: let rules name this operator, by its dotted path or the end of it."""
    OPERATORS[f"{cls.__module__}.{cls.__qualname__}"] = cls
    return cls


def find_operator(path: str, origin: str) -> type[Operator]:
    """The registered operator whose dotted path is, or ends with, `path`.

    Raises `PykernelsError`, which names the rule's `origin`, if there is none or several.
    """
    candidates = [cls for full, cls in OPERATORS.items() if f".{full}".endswith(f".{path}")]
    if not candidates:
        by_leaf = {full.rpartition(".")[2]: full for full in OPERATORS}
        near = difflib.get_close_matches(path.rpartition(".")[2], by_leaf, 1, 0.5)
        known = f"Use one of {', '.join(sorted(OPERATORS))}"
        hint = f"Did you mean {by_leaf[near[0]]}?" if near else known
        raise PykernelsError(f"{origin}: there is no operator {path!r}", hint)
    if len(candidates) > 1:
        raise PykernelsError(f"{origin}: {path!r} names several operators", "Write its full path")
    return candidates[0]


def build(
    cls: type[Operator],
    original: nn.Module,
    context: ModuleContext,
    kwargs: dict[str, Any],
    origin: str,
) -> Operator:
    """`cls(original, context, **kwargs)`; `PykernelsError` for unknown or missing arguments."""
    try:
        inspect.signature(cls).bind(original, context, **kwargs)
    except TypeError as error:
        known = [
            p.name
            for p in inspect.signature(cls).parameters.values()
            if p.kind is inspect.Parameter.KEYWORD_ONLY
        ]
        hint = f"Its kwargs are {', '.join(known) or 'none'}"
        for key in kwargs:
            if key not in known and (near := difflib.get_close_matches(key, known, 1, 0.6)):
                hint = f"Did you mean {near[0]}? {hint}"
                break
        raise PykernelsError(f"{origin}: {cls.__name__} {error}", hint) from None
    return cls(original, context, **kwargs)


def is_class(cls: type, path: str) -> bool:
    """Whether `path` names `cls`: its bare name, the end of its dotted path, or an alias of it.

    An alias is a public name such as `torch.nn.Linear`, whose module is `torch.nn.modules.linear`.
    """
    full = f"{cls.__module__}.{cls.__qualname__}"
    if f".{full}".endswith(f".{path}"):
        return True
    module, _, leaf = path.rpartition(".")
    if leaf != cls.__name__ or module.split(".")[0] != full.split(".")[0]:
        return False
    try:
        return getattr(importlib.import_module(module), leaf, None) is cls
    except ImportError:
        return False
