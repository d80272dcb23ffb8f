"""Matrices of 4 bits with zero points, as `awq` and `gptq` describe them: looked up, and read.

They become `int4-zp-g128` where their groups are of a multiple of 128 inputs (scales are repeated
for each 128), else `int4-zp`, of a multiple of 32. Scales of other dtypes are cast to float16 if
that loses nothing.
"""

from __future__ import annotations

import warnings

import torch

from pykernels.errors import PykernelsError
from pykernels.quant import Weight

from ..tensors.matrix import Lookup, Matrix
from ..tensors.safetensors import Checkpoint, Part
from . import auto_round, awq, gptq
from .words import HINT

_PARTS = ("qweight", "qzeros", "scales")


def find(names: Lookup, base: str, shape: tuple[int, ...]) -> Matrix | None:
    """The matrix [N, K] of a linear stored as ``base.qweight``; None if a part is missing (noted).

    Raises:
        PykernelsError: a part of another shape or dtype, groups that are not read, or act-order.
    """
    checkpoint = names.checkpoint
    data, zero, scale = (names.companion(base, f".{what}") for what in _PARTS)
    order = names.companion(base, ".g_idx") if f"{base}.g_idx" in names.stored else None
    if data is None or zero is None or scale is None:
        return None
    layout = _layout(names)
    N, K = shape if len(shape) == 2 else (0, 0)
    rows = checkpoint.tensors[scale.name].shape
    groups = rows[0] if rows else 0
    words = (K, N // 8) if layout == "awq" else (K // 8, N)
    needed: dict[Part, tuple[str | None, tuple[int, ...]]] = {
        data: ("I32", words),
        zero: ("I32", (groups, N // 8)),
        scale: (None, (groups, N)),
    }
    if order is not None:
        needed[order] = ("I32", (K,))
    for part, (dtype, expected) in needed.items():
        info = checkpoint.tensors[part.name]
        if N % 8 or K % 8 or info.shape != expected or info.dtype != (dtype or info.dtype):
            raise PykernelsError(
                f"{part.name} is {info.dtype} {list(info.shape)}, the model's {list(shape)} in "
                f"{layout} needs {dtype or 'F16'} {list(expected)}",
                names.checkpoint.mismatch,
            )
    if not groups or K % groups or K // groups % 32:
        raise PykernelsError(f"{scale.name} has {groups} groups for {K} inputs", HINT)
    fmt = "int4-zp" if K // groups % 128 else "int4-zp-g128"
    symmetric = layout != "awq" and gptq.is_symmetric(names.quantization)
    found = Matrix(data, shape, scale, fmt, zero, order, layout, symmetric)
    if names.quantization.get("desc_act"):  # if not, it is checked when it is read
        _check_order(checkpoint, found, groups)
    return found


def read(checkpoint: Checkpoint, source: Matrix) -> Weight:
    """A matrix of ``find``'s as a `Weight`.

    Raises:
        PykernelsError: scales that float16 does not hold, or inputs in another order.
    """
    assert source.scale is not None and source.zero is not None
    words, scale = checkpoint.read(source.data), checkpoint.read(source.scale)
    groups, (_, K) = len(scale), source.shape
    _check_order(checkpoint, source, groups)
    points = checkpoint.read(source.zero)
    if source.layout == "awq":
        codes, zero = awq.codes(words), awq.zeros(points)
    else:
        codes = gptq.codes(words)
        zero, layout = gptq.zeros(points, source.layout, source.symmetric)
        if layout != source.layout:
            _tell(checkpoint, source.layout, layout)
    halves = scale.to(torch.float16)
    if not torch.equal(halves.float(), scale.float()):
        raise PykernelsError(
            f"{source.scale.name} is {str(scale.dtype).removeprefix('torch.')} with values that "
            "float16 does not hold, or NaN",
            HINT,
        )
    both = torch.stack((halves.T, zero.T.to(torch.float16)), dim=2)  # [N, groups, 2]
    width = 32 if source.fmt == "int4-zp" else 128
    both = both.repeat_interleave(K // groups // width, dim=1)
    return Weight(codes, both.reshape(len(codes), -1))


def _tell(checkpoint: Checkpoint, said: str, found: str) -> None:
    warnings.warn(
        f"{checkpoint.folder} says that its zero points are stored as in {said}, and those of its"
        f" symmetric weights are as in {found}: they are read so",
        stacklevel=2,
    )


def _layout(names: Lookup) -> str:
    """How the codes of a checkpoint lie."""
    method = auto_round.packed_as(names.quantization)
    if method is None:
        raise PykernelsError(
            f"{names.checkpoint.folder} has tensors called qweight, and the quant_method"
            f" {names.quantization.get('quant_method')!r} in its config.json",
            "Get a checkpoint whose quantization_config says awq or gptq",
        )
    return "awq" if method == "awq" else gptq.layout(names.quantization)


def _check_order(checkpoint: Checkpoint, source: Matrix, groups: int) -> None:
    if source.order is not None:
        gptq.check_order(checkpoint.read(source.order), groups, source.data.name)
