"""Where lowering takes weights from: a loaded model's parameters, or a checkpoint's own tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from pykernels.quant import PackedExperts, Weight, get_format
from pykernels.shapes import MoEShape
from runtime.machine.memory import allocate
from runtime.matrix import Pack, PackedHeads, PackedMatrix

BLOCK = 128
"""Rows and columns of an FP8 scale."""


class Source(Protocol):
    """A model's stored tensors by the names of its parameters."""

    def matrix(self, name: str) -> tuple[str, Weight]:
        """(format, weight) of a linear's matrix [N, K]."""

    def tensor(self, name: str) -> torch.Tensor | None:
        """Any other tensor as it is; None if there is none of that name."""


class Parameters:
    """Those of a loaded model: matrices count as bfloat16."""

    def __init__(self, model: nn.Module) -> None:
        self._tensors = dict(model.named_parameters(remove_duplicate=False))
        self._tensors |= dict(model.named_buffers())

    def matrix(self, name: str) -> tuple[str, Weight]:
        return "bf16", Weight(self._tensors[name].detach().to(torch.bfloat16))

    def tensor(self, name: str) -> torch.Tensor | None:
        found = self._tensors.get(name)
        return None if found is None else found.detach()


@dataclass(frozen=True)
class Stored:
    """Tensors that a checkpoint's loader has put aside.

    Attributes:
        matrices: (format, weight) by name; ``others``: any other tensor.
    """

    matrices: Mapping[str, tuple[str, Weight]]
    others: Mapping[str, torch.Tensor]

    def matrix(self, name: str) -> tuple[str, Weight]:
        if name in self.matrices:
            return self.matrices[name]
        return "bf16", Weight(self.others[name].to(torch.bfloat16))

    def tensor(self, name: str) -> torch.Tensor | None:
        return self.others.get(name)


class Packing:
    """Packs what a source holds; matrices that are read together become one if they can."""

    def __init__(self, source: Source, pack: Pack) -> None:
        self.source, self.pack = source, pack

    def matrix(self, *names: str) -> PackedMatrix:
        """The matrices of these parameters, one below the other: in their format, or in bfloat16
        where they differ in it."""
        found = [self.source.matrix(name) for name in names]
        formats = {fmt for fmt, _ in found}
        if len(formats) > 1:
            found = [("bf16", _as_bf16(*one)) for one in found]
        fmt = get_format(found[0][0])
        return PackedMatrix(fmt, [weight for _, weight in found], self.pack)

    def bias(self, matrix: PackedMatrix, *names: str) -> torch.Tensor | None:
        """Their biases in the places of their rows; None if none has one."""
        biases = [self.source.tensor(name) for name in names]
        if all(bias is None for bias in biases):
            return None
        out = torch.zeros(matrix.N)
        for start, bias in zip(matrix.starts, biases, strict=True):
            if bias is not None:
                out[start : start + len(bias)] = bias.float()
        return out

    def heads(self, name: str, rows: Sequence[slice], transposed: bool = False) -> PackedHeads:
        """Rows of one matrix, a matrix for each head: in its format where that can be cut so."""
        fmt, weight = self.source.matrix(name)
        cuts = [_cut(fmt, weight, at, transposed) for at in rows]
        if None in cuts:
            fmt, whole = "bf16", _as_bf16(fmt, weight).data
            cuts = [Weight(whole[at].T.contiguous() if transposed else whole[at]) for at in rows]
        return PackedHeads(get_format(fmt), [cut for cut in cuts if cut is not None], self.pack)

    def mlp(self, gate: str, up: str, down: str) -> PackedExperts:
        """A gated MLP as the one expert of a layer."""
        found = [self.source.matrix(name) for name in (gate, up, down)]
        if len({fmt for fmt, _ in found}) > 1:
            found = [("bf16", _as_bf16(*one)) for one in found]
        fmt = get_format(found[0][0])
        H, I = fmt.logical_shape(found[2][1])  # noqa: E741
        packed = PackedExperts(MoEShape(E=1, H=H, I=I, topk=1), fmt, allocate, self.pack)
        packed.pack(0, *(weight for _, weight in found))
        return packed

    def vector(self, name: str) -> torch.Tensor:
        """A norm's weight, float32."""
        found = self.source.tensor(name)
        assert found is not None, name
        return found.float().contiguous()


def _as_bf16(fmt: str, weight: Weight) -> Weight:
    return Weight(get_format(fmt).dequantize(weight).to(torch.bfloat16))


def _cut(fmt: str, weight: Weight, rows: slice, transposed: bool) -> Weight | None:
    """Rows of a matrix in its own format; None where its scales do not allow it."""
    data = weight.data[rows]
    if fmt == "bf16":
        return Weight(data.T.contiguous() if transposed else data.contiguous())
    if fmt != "fp8" or weight.scale is None:
        return None
    first, last = rows.start // BLOCK, (rows.stop - 1) // BLOCK
    if first != last and rows.start % BLOCK:
        return None
    scale, codes = weight.scale[first : last + 1], data.view(torch.uint8)
    if transposed:
        codes, scale = codes.T, scale.T
    return Weight(codes.contiguous().view(torch.float8_e4m3fn), scale.contiguous())
