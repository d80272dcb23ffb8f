"""What the ops ask of their inputs before an address of them is taken."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real

import torch

from ...errors import PykernelsError
from ..moe.checks import check_dense, check_readable

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32)

Shape = Sequence[int | str]
"""Sizes that a tensor must have; a name: any size."""


def check_tensor(
    name: str, given: torch.Tensor, shape: Shape, dtypes: Sequence[torch.dtype]
) -> None:
    """Whether it is dense, in main memory, of one of the dtypes and of the shape.

    Raises:
        PykernelsError: what does not fit.
    """
    check_dense(name, given)
    fits = given.ndim == len(shape) and all(
        isinstance(wanted, str) or wanted == size
        for wanted, size in zip(shape, given.shape, strict=True)
    )
    if given.dtype not in dtypes or not fits:
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise PykernelsError(
            f"{name} is {given.dtype} {list(given.shape)}",
            f"Give {kinds} of shape [{', '.join(map(str, shape))}]",
        )
    check_readable(name, given)


def floats(name: str, given: torch.Tensor, *shape: int | str) -> torch.Tensor:
    """Contiguous float32: the tensor itself where it is that, else a copy.

    Raises:
        PykernelsError: it does not fit (``check_tensor``).
    """
    check_tensor(name, given, shape, FLOATS)
    return given.detach().float().contiguous().resolve_neg()


def optional_floats(
    name: str, given: torch.Tensor | None, *shape: int | str
) -> torch.Tensor | None:
    """``floats`` of what may be left out."""
    return None if given is None else floats(name, given, *shape)


def integers(name: str, given: torch.Tensor, *shape: int | str) -> torch.Tensor:
    """Contiguous int64: the tensor itself where it is that, else a copy.

    Raises:
        PykernelsError: it does not fit (``check_tensor``).
    """
    check_tensor(name, given, shape, INTEGERS)
    return given.detach().long().contiguous()


def number(name: str, value: object, least: float = -math.inf) -> float:
    """A finite number above ``least`` as a float.

    Raises:
        PykernelsError: it is none.
    """
    if not isinstance(value, Real) or not least < float(value) < math.inf:
        above = "" if least == -math.inf else f" above {least:g}"
        raise PykernelsError(f"{name} is {value!r}", f"Give a finite number{above}")
    return float(value)
