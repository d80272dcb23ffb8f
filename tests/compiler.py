"""Numba's compiler without what it does again and again: a tenth of its time.

For each variable on the stack it builds a module to learn the size of its type; and several times
in each function it looks for the variables of every statement, whatever is in it.
"""

from __future__ import annotations

import functools
from typing import Any


@functools.cache  # once a process
def quicken() -> None:
    """Leaves that out, for all that is compiled from now on."""
    from numba.core import ir
    from numba.core.base import BaseContext

    measure = BaseContext.get_abi_sizeof
    sizes: dict[str, int] = {}

    def known_size(self: Any, kind: Any) -> int:
        """By how the type is written: the process compiles for one machine."""
        text = str(kind)
        if text not in sizes:
            sizes[text] = measure(self, kind)
        return sizes[text]

    kinds: dict[type, int] = {}

    def kind_of(cls: type) -> int:
        for kind, classes in enumerate(((list, tuple), dict, ir.Inst, ir.Var), 1):
            if issubclass(cls, classes):
                kinds[cls] = kind
        return kinds.setdefault(cls, 0)

    def list_vars(self: Any, value: Any) -> list[Any]:
        """By the class of a value, which is looked at once."""
        cls = type(value)
        kind = kinds[cls] if cls in kinds else kind_of(cls)
        if kind == 0:
            return []
        if kind == 4:
            return [value]
        if kind == 3:
            return value.list_vars()
        found: list[Any] = []
        for part in value if kind == 1 else value.values():
            found += list_vars(self, part)
        return found

    BaseContext.get_abi_sizeof = known_size
    ir.Inst._rec_list_vars = list_vars
