"""Triton's interpreter without what it does in vain: more than half of its time.

At each call of each function it looks through all of Triton's language for what it must patch,
again and again within a launch; and it finds out for each integer operation whether it overflows,
for an assertion that it then leaves out.
"""

from __future__ import annotations

import functools
from typing import Any


@functools.cache  # once a process
def quicken() -> None:
    """Leaves that out, for all launches to come."""
    from triton.runtime import interpreter

    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    numpy_of = interpreter._get_np_dtype
    seen: set[int] = set()
    known: dict[str, Any] = {}

    def patch_once(function: Any) -> Any:
        """For functions of a module once a launch: what is patched stays so until its end."""
        module = id(function.__globals__)
        if module in seen:
            return None
        seen.add(module)
        return patch(function)

    def launched(self: Any, *args: Any, **kwargs: Any) -> None:
        seen.clear()
        launch(self, *args, **kwargs)

    def known_numpy_of(kind: Any) -> Any:
        """By the name of its scalars, without a table of all types for each question."""
        scalar = kind.scalar
        if scalar.name not in known:
            known[scalar.name] = numpy_of(scalar)
        return known[scalar.name]

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launched
    interpreter._get_np_dtype = known_numpy_of
    builder = interpreter.interpreter_builder
    assert not builder.options.debug  # else somebody sees the assertions
    builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
