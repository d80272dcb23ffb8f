"""Tensors of a plan as they are read: matrices in a format, and experts ahead of their use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from pykernels.errors import PykernelsError
from pykernels.quant import Biases, Weight, get_format

from ..modules.moe import FusedMoE
from .gguf.types import as_weight
from .plan import PlannedDense, PlannedExperts
from .quantized import mxfp4, nvfp4, zero_points
from .quantized.compressed_tensors import as_q4_0, unpack_int4
from .tensors.ahead import ahead
from .tensors.floats import floats
from .tensors.matrix import Matrix
from .tensors.safetensors import Checkpoint

Changed = Callable[[torch.Tensor, torch.Tensor], None]
"""Called with the values of a matrix, and with those that it has in another format (float32)."""
Expert = tuple[tuple[Weight, Weight, Weight], Biases | None]
"""(gate, up, down) and their biases."""


def matrix(checkpoint: Checkpoint, source: Matrix, dtype: torch.dtype) -> torch.Tensor:
    """A stored tensor in `dtype`: cast, or dequantized in float32 and rounded once.

    Raises `PykernelsError` for NaN or infinite values or scales.
    """
    if source.fmt is None:
        return source.of(floats(checkpoint, source.data)).to(dtype)
    fmt, weight = get_format(source.fmt), stored_weight(checkpoint, source)
    N, K = source.shape
    fmt.check(weight, N, K, source.data.name)
    return fmt.dequantize(weight).to(dtype)


def stored_weight(checkpoint: Checkpoint, source: Matrix) -> Weight:
    """A quantized matrix as it is stored, a `Weight` in `source.fmt`."""
    assert source.fmt is not None
    if checkpoint.blocks:
        whole = None if source.whole is None else checkpoint.read(source.whole)
        N, K = source.shape
        return as_weight(checkpoint.read(source.data), source.fmt, N, K, whole)
    assert source.scale is not None
    N, K = source.shape
    if source.zero is not None:
        return zero_points.read(checkpoint, source)
    if source.fmt == "mxfp4":
        return mxfp4.read(checkpoint, source)
    if source.fmt == "nvfp4":
        return nvfp4.read(checkpoint, source)
    data, scale = checkpoint.read(source.data), checkpoint.read(source.scale)
    if source.fmt == "q4_0":
        return as_q4_0(unpack_int4(data, K), scale, source.data.name)
    if source.fmt.startswith("int4"):
        return Weight(unpack_int4(data, K), scale)
    if source.fmt.endswith("-channel"):
        scale = scale.view(-1, 1).expand(N, 1).contiguous()  # one for the tensor: for each output
    return Weight(data, scale.float())


def weight_in(
    fmt: str, checkpoint: Checkpoint, source: Matrix, changed: Changed | None = None
) -> Weight:
    """A stored matrix as a `Weight` in `fmt`: as stored if that is `fmt`, else converted."""
    if fmt == source.fmt:
        return stored_weight(checkpoint, source)
    if fmt == "bf16" and (source.fmt is None or changed is None):
        return Weight(matrix(checkpoint, source, torch.bfloat16))
    values = matrix(checkpoint, source, torch.float32)
    weight = get_format(fmt).quantize(values)
    if changed is not None:
        changed(values, get_format(fmt).dequantize(weight))
    return weight


def expert_weights(
    checkpoint: Checkpoint, item: PlannedExperts, module: FusedMoE, changed: Changed | None = None
) -> Iterator[Expert]:
    """Each expert in the formats that `module` wants, read and converted ahead of its use."""

    def one(e: int) -> Expert:
        fmt, down_fmt = item.packed(module)
        pairs = zip((fmt, fmt, down_fmt), item.experts[e], strict=True)
        with naming(module, e):
            gate, up, down = (weight_in(each, checkpoint, m, changed) for each, m in pairs)
            return (gate, up, down), _biases(checkpoint, item, e)

    return ahead(one, len(item.experts), nbytes(checkpoint, item) // len(item.experts))


@contextmanager
def naming(module: FusedMoE, expert: int) -> Iterator[None]:
    """Puts the block and the expert before what is wrong with one of its matrices."""
    try:
        yield
    except PykernelsError as error:  # its message has the expert's number at most
        name = f"{module.stored_name}.{expert}"
        raise PykernelsError(f"{name}: {error.cause}", error.hint) from None


def _biases(checkpoint: Checkpoint, item: PlannedExperts, expert: int) -> Biases | None:
    if not item.biases:
        return None
    return Biases(*(matrix(checkpoint, m, torch.float32) for m in item.biases[expert]))


def nbytes(checkpoint: Checkpoint, item: PlannedDense | PlannedExperts) -> int:
    """Stored bytes of what a plan's item takes."""
    matrices = (
        [item.source] if isinstance(item, PlannedDense) else [m for e in item.experts for m in e]
    )
    return sum(
        checkpoint.nbytes(part) // (1 if m.pick is None else 2)
        for m in matrices
        for part in m.parts
    )
