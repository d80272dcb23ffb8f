"""Where lowering takes weights from: a loaded model's parameters, or a checkpoint's own tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import nn

from pykernels.quant import Biases, PackedExperts, Weight, get_format
from pykernels.shapes import ExpertSpec, MoEShape
from runtime.machine.memory import allocate
from runtime.matrix import Pack, PackedHeads, PackedMatrix, outline

from ..checkpoint.load import matrix as read_matrix
from ..checkpoint.load import nbytes, stored_weight
from ..checkpoint.plan import Dense, Plan
from ..checkpoint.safetensors import Checkpoint

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
        self._tensors: dict[str, torch.Tensor] = {}
        self._tensors.update(model.named_parameters(remove_duplicate=False))
        self._tensors.update(model.named_buffers())

    def matrix(self, name: str) -> tuple[str, Weight]:
        return "bf16", Weight(self._tensors[name].detach().to(torch.bfloat16))

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
        if item.source.fmt is None:
            return "bf16", Weight(self._checkpoint.read(item.source.data).to(torch.bfloat16))
        weight = stored_weight(self._checkpoint, item.source)
        N, K = item.source.shape
        get_format(item.source.fmt).check(weight, N, K, name)
        return item.source.fmt, weight

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
        N, K = source.shape
        fmt = get_format(source.fmt or "bf16")
        scale = fmt.scale_shape(N, K)
        scales = None if scale is None else torch.ones(scale).to(fmt.scale_dtypes[0])
        return fmt.name, Weight(torch.empty(fmt.data_shape(N, K), dtype=fmt.dtype), scales)

    def tensor(self, name: str) -> torch.Tensor | None:
        item = self._items.get(name)
        return None if item is None else torch.ones(item.source.shape)


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
        """A gated MLP, with its biases if it has some, as the one expert of a layer; gate and up in
        bfloat16 where their formats differ."""
        names = (gate, up, down)
        found = [self.source.matrix(name) for name in names]
        if found[0][0] != found[1][0]:
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
