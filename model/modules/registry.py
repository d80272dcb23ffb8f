"""What a rule may put in place of a module: the base class and the register of operators."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn
from transformers import PretrainedConfig

from pykernels.errors import PykernelsError

O = TypeVar("O", bound="type[Operator]")  # noqa: E741 - a type variable, never a value


@dataclass(frozen=True, slots=True)
class Place:
    """Where an operator is put.

    `name`: dotted name in the model; `config`: the model's; `device`: the rule's, or None;
    `kernel`: the expert kernel that the caller asked for, where the rule names none.
    """

    name: str
    config: PretrainedConfig
    device: str | None = None
    kernel: str = "auto"


class Operator(nn.Module):
    """Base of the modules that rules put in place: built from the (meta) original and its place.

    A subclass takes `(original, place, *, ...)`; a rule's `kwargs` are its keyword arguments.
    """

    def __init__(self, original: nn.Module, place: Place, **kwargs: Any) -> None:
        super().__init__()


OPERATORS: dict[str, type[Operator]] = {}
"""Full dotted path -> operator."""


def operator(cls: O) -> O:
    """Class decorator: let rules name this operator, by its dotted path or the end of it."""
    OPERATORS[f"{cls.__module__}.{cls.__qualname__}"] = cls
    return cls


def find_operator(path: str, origin: str) -> type[Operator]:
    """The operator whose dotted path is, or ends with, `path`; `PykernelsError` if none is."""
    from .. import modules  # noqa: F401 - importing it registers the operators of this package

    found = [cls for full, cls in OPERATORS.items() if f".{full}".endswith(f".{path}")]
    if not found:
        raise PykernelsError(
            f"{origin}: there is no operator {path!r}", f"Use one of {', '.join(sorted(OPERATORS))}"
        )
    if len(found) > 1:
        raise PykernelsError(f"{origin}: {path!r} names several operators", "Write its full path")
    return found[0]


def build(
    cls: type[Operator], original: nn.Module, place: Place, kwargs: dict[str, Any], origin: str
) -> Operator:
    """`cls(original, place, **kwargs)` with unknown or missing arguments told in one line."""
    try:
        inspect.signature(cls).bind(original, place, **kwargs)
    except TypeError as error:
        known = [
            p.name
            for p in inspect.signature(cls).parameters.values()
            if p.kind is inspect.Parameter.KEYWORD_ONLY
        ]
        raise PykernelsError(
            f"{origin}: {cls.__name__} {error}", f"Its kwargs are {', '.join(known) or 'none'}"
        ) from None
    return cls(original, place, **kwargs)
