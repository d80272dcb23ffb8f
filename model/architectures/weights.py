"""Where lowering takes weights from: a loaded model's parameters, or a checkpoint's own tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import nn

from pykernels.errors import PykernelsError
from pykernels.quant import Biases, PackedExperts, Weight, get_format
from pykernels.quant.layout import N_BLOCK, ceil_to
from pykernels.shapes import ExpertSpec, MoEShape
from runtime.machine.memory import allocate
from runtime.matrix import Pack, PackedHeads, PackedMatrix, outline

from ..checkpoint.load import matrix as read_matrix
from ..checkpoint.load import nbytes, stored_weight
from ..checkpoint.matrix import Matrix
from ..checkpoint.plan import Dense, Plan
from ..checkpoint.safetensors import Checkpoint, Part
from .linear import Linear

BLOCK = 128
"""Rows and columns of an FP8 scale."""


class Source(Protocol):
    """A model's stored tensors by the names of its parameters."""

    def matrix(self, name: str) -> tuple[str, Weight]:
        """(format, weight) of a linear's matrix [N, K]."""

    def stack(self, name: str) -> tuple[str, list[Weight]] | None:
        """(format, matrices) of a tensor [heads, N, K]; None if there is none of that name."""

    def tensor(self, name: str) -> torch.Tensor | None:
        """Any other tensor as it is; None if there is none of that name."""


class Parameters:
    """Those of a loaded model: matrices count as bfloat16."""

    def __init__(self, model: nn.Module) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._tensors.update(model.named_parameters(remove_duplicate=False))
        self._tensors.update(model.named_buffers())

    def matrix(self, name: str) -> tuple[str, Weight]:
        return "bf16", Weight(self._tensors[name].detach().to(torch.bfloat16))

    def stack(self, name: str) -> tuple[str, list[Weight]] | None:
        return None

    def tensor(self, name: str) -> torch.Tensor | None:
        found = self._tensors.get(name)
        return None if found is None else found.detach()


class Stored:
    """Those of a checkpoint as they are stored, read when they are asked for.

    Args:
        plan: of ``model.checkpoint.plan``.
        checkpoint: open.
        report: called with the bytes of what was read.
    """

    def __init__(
        self, plan: Plan, checkpoint: Checkpoint, report: Callable[[int], None] = lambda _: None
    ) -> None:
        self._items = {item.name: item for item in plan.items if isinstance(item, Dense)}
        self._checkpoint, self._report = checkpoint, report

    def matrix(self, name: str) -> tuple[str, Weight]:
        item = self._items[name]
        self._report(nbytes(self._checkpoint, item))
        return item.source.fmt or "bf16", self._weight(item.source, name)

    def stack(self, name: str) -> tuple[str, list[Weight]] | None:
        if (item := self._items.get(name)) is None:
            return None
        self._report(nbytes(self._checkpoint, item))
        source = item.source
        heads = [
            Matrix(Part(source.data.name, h), source.shape[1:], fmt=source.fmt)
            for h in range(source.shape[0])
        ]
        return source.fmt or "bf16", [self._weight(head, name) for head in heads]

    def _weight(self, source: Matrix, name: str) -> Weight:
        if source.fmt is None:
            return Weight(self._checkpoint.read(source.data).to(torch.bfloat16))
        weight = stored_weight(self._checkpoint, source)
        N, K = source.shape
        get_format(source.fmt).check(weight, N, K, name)
        return weight

    def tensor(self, name: str) -> torch.Tensor | None:
        if (item := self._items.get(name)) is None:
            return None
        self._report(nbytes(self._checkpoint, item))
        return read_matrix(self._checkpoint, item.source, item.dtype)


class Outline:
    """Shapes and formats alone, from a plan: no weight is read."""

    def __init__(self, plan: Plan) -> None:
        self._items = {item.name: item for item in plan.items if isinstance(item, Dense)}

    def matrix(self, name: str) -> tuple[str, Weight]:
        source = self._items[name].source
        fmt = source.fmt or "bf16"
        return fmt, _outlined(fmt, *source.shape)

    def stack(self, name: str) -> tuple[str, list[Weight]] | None:
        if (item := self._items.get(name)) is None:
            return None
        (heads, N, K), fmt = item.source.shape, item.source.fmt or "bf16"
        return fmt, [_outlined(fmt, N, K)] * heads

    def tensor(self, name: str) -> torch.Tensor | None:
        item = self._items.get(name)
        return None if item is None else torch.ones(item.source.shape)


class Packing:
    """Packs what a source holds; matrices that are read together become one if they can."""

    def __init__(self, source: Source, pack: Pack) -> None:
        self.source, self.pack = source, pack

    def matrix(self, name: str) -> PackedMatrix:
        """The matrix of a parameter."""
        return self._packed([self.source.matrix(name)])

    def linear(self, *modules: str) -> Linear:
        """The linears of these modules, which read the same inputs, with their biases."""
        found = [self.source.matrix(f"{module}.weight") for module in modules]
        runs = itertools.groupby(found, lambda one: one[0])
        parts, at, starts, N = [self._packed(list(run)) for _, run in runs], [], [], 0
        for part in parts:
            first = ceil_to(N, N_BLOCK)
            at.append(first)
            starts += [first + start for start in part.starts]
            N = first + part.N
        bias, out = [self.source.tensor(f"{module}.bias") for module in modules], torch.zeros(N)
        for start, values in zip(starts, bias, strict=True):
            if values is not None:
                out[start : start + len(values)] = values.float()
        biased = any(values is not None for values in bias)
        return Linear(tuple(parts), tuple(at), tuple(starts), N, out if biased else None)

    def table(self, name: str) -> torch.Tensor | PackedMatrix:
        """An embedding [V, H]: bfloat16, or packed in the format that it is stored in."""
        found = self.source.matrix(name)
        return found[1].data.contiguous() if found[0] == "bf16" else self._packed([found])

    def stack(self, name: str) -> PackedHeads | None:
        """A stored tensor [heads, N, K], a matrix for each head; None if there is none."""
        if (found := self.source.stack(name)) is None:
            return None
        return PackedHeads(get_format(found[0]), found[1], self.pack)

    def heads(self, name: str, rows: Sequence[slice], transposed: bool = False) -> PackedHeads:
        """Rows of one matrix, a matrix for each head: in its format where that can be cut so."""
        fmt, weight = self.source.matrix(name)
        cuts = [_cut(fmt, weight, at, transposed) for at in rows]
        if None in cuts:
            fmt, whole = "bf16", _as_bf16(fmt, weight).data
            cuts = [Weight(whole[at].T.contiguous() if transposed else whole[at]) for at in rows]
        return PackedHeads(get_format(fmt), [cut for cut in cuts if cut is not None], self.pack)

    def mlp(self, gate: str, up: str, down: str) -> PackedExperts:
        """A gated MLP, with its biases if it has some, as the one expert of a layer; gate and up in
        bfloat16 where their formats differ.

        Raises:
            PykernelsError: they differ in a GGUF file.
        """
        names = (gate, up, down)
        found = [self.source.matrix(name) for name in names]
        if found[0][0] != found[1][0]:
            if any(fmt != "bf16" and weight.scale is None for fmt, weight in found[:2]):
                raise PykernelsError(
                    f"{gate} is {found[0][0]} and {up} is {found[1][0]}",
                    "Quantize the model with one type for both",
                )
            found[:2] = [("bf16", _as_bf16(*one)) for one in found[:2]]
        fmt, down_fmt = get_format(found[0][0]), get_format(found[2][0])
        H, I = down_fmt.logical_shape(found[2][1])  # noqa: E741
        tensors = [self.source.tensor(f"{name.removesuffix('weight')}bias") for name in names]
        given = [bias for bias in tensors if bias is not None]
        assert len(given) in (0, len(names)), names
        biases = Biases(*given) if given else None
        shape = MoEShape(E=1, H=H, I=I, topk=1, spec=ExpertSpec(bias=biases is not None))
        packed = PackedExperts(shape, fmt, allocate, self.pack, down_fmt)
        if self.pack is not outline:  # whose weights are no numbers to check
            packed.pack(0, *(weight for _, weight in found), biases=biases)
        return packed

    def _packed(self, found: list[tuple[str, Weight]]) -> PackedMatrix:
        """Matrices of one format as one."""
        return PackedMatrix(get_format(found[0][0]), [weight for _, weight in found], self.pack)

    def vector(self, name: str) -> torch.Tensor:
        """A norm's weight, float32."""
        found = self.source.tensor(name)
        assert found is not None, name
        return found.float().contiguous()


def _outlined(fmt: str, N: int, K: int) -> Weight:
    """A matrix of that shape without its numbers."""
    chosen = get_format(fmt)
    scale = chosen.scale_shape(N, K)
    scales = None if scale is None else torch.ones(scale).to(chosen.scale_dtypes[0])
    return Weight(torch.empty(chosen.data_shape(N, K), dtype=chosen.dtype), scales)


def _as_bf16(fmt: str, weight: Weight) -> Weight:
    return Weight(get_format(fmt).dequantize(weight).to(torch.bfloat16))


def _cut(fmt: str, weight: Weight, rows: slice, transposed: bool) -> Weight | None:
    """Rows of a matrix in its own format; None where its scales do not allow it."""
    data = weight.data[rows]
    if fmt == "bf16" and transposed:
        return Weight(data.T.contiguous())
    if weight.scale is None and not transposed:
        return Weight(data.contiguous())
    if fmt != "fp8" or weight.scale is None:
        return None
    first, last = rows.start // BLOCK, (rows.stop - 1) // BLOCK
    if first != last and rows.start % BLOCK:
        return None
    scale, codes = weight.scale[first : last + 1], data.view(torch.uint8)
    if transposed:
        codes, scale = codes.T, scale.T
    return Weight(codes.contiguous().view(torch.float8_e4m3fn), scale.contiguous())
