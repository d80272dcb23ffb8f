"""Where lowering takes weights from: a loaded model's parameters, or a checkpoint's own tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import nn

from pykernels.quant import PackedExperts, Weight, get_format
from pykernels.shapes import MoEShape
from runtime.machine.memory import allocate
from runtime.matrix import Pack, PackedHeads, PackedMatrix, outline

from ..checkpoint.load import Converted, expert_weights, naming, nbytes, stored_weight
from ..checkpoint.load import matrix as read_matrix
from ..checkpoint.plan import Dense, Experts, Plan
from ..checkpoint.safetensors import Checkpoint
from ..modules.moe import FusedMoE

BLOCK = 128
"""Rows and columns of an FP8 scale."""

MakeExperts = Callable[[MoEShape, str], PackedExperts]
"""(shape, format) -> room for the experts of a layer."""


class Source(Protocol):
    """A model's stored tensors by the names of its parameters."""

    def matrix(self, name: str) -> tuple[str, Weight]:
        """(format, weight) of a linear's matrix [N, K]."""

    def tensor(self, name: str) -> torch.Tensor | None:
        """Any other tensor as it is; None if there is none of that name."""

    def experts(self, module: FusedMoE, make: MakeExperts) -> PackedExperts:
        """The routed experts of an injected block."""


class Loaded:
    """Experts of blocks that hold them already."""

    def experts(self, module: FusedMoE, make: MakeExperts) -> PackedExperts:
        assert module.routed is not None
        (experts,) = module.routed.weights.slices
        return experts


class Parameters(Loaded):
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
        converted: called with what experts are, and with what they become in another format.
    """

    def __init__(
        self,
        plan: Plan,
        checkpoint: Checkpoint,
        report: Callable[[int], None] = lambda _: None,
        converted: Converted | None = None,
    ) -> None:
        self._items = {item.name: item for item in plan.items if isinstance(item, Dense)}
        self._experts = {item.name: item for item in plan.items if isinstance(item, Experts)}
        self._checkpoint, self._report, self._converted = checkpoint, report, converted

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

    def experts(self, module: FusedMoE, make: MakeExperts) -> PackedExperts:
        item = self._experts[module.name]
        fmt = module.packed_format(item.stored)
        packed = make(module.shape, fmt)
        each = nbytes(self._checkpoint, item) // len(item.experts)
        for e, weights in enumerate(expert_weights(self._checkpoint, item, fmt, self._converted)):
            with naming(item, e):
                packed.pack(e, *weights)
            self._report(each)
        return packed


class Outline:
    """Shapes and formats alone, from a plan: no weight is read."""

    def __init__(self, plan: Plan) -> None:
        self._items = {item.name: item for item in plan.items if isinstance(item, Dense)}
        self._experts = {item.name: item for item in plan.items if isinstance(item, Experts)}

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

    def experts(self, module: FusedMoE, make: MakeExperts) -> PackedExperts:
        return make(module.shape, module.packed_format(self._experts[module.name].stored))


class Packing(ABC):
    """A model's weights as programs hold them, by the names of its parameters.

    These few doors are all that lowering goes through, so a packed cache is what came out of them.
    """

    @abstractmethod
    def tensor(self, name: str) -> torch.Tensor | None:
        """One that is no matrix of a linear; None if the model has none of that name."""

    @abstractmethod
    def table(self, name: str) -> torch.Tensor:
        """An embedding, bfloat16 [V, H]."""

    @abstractmethod
    def matrix(self, *names: str) -> PackedMatrix:
        """The matrices of these parameters, one below the other: in their format, or in bfloat16
        where they differ in it."""

    @abstractmethod
    def heads(self, name: str, rows: Sequence[slice], transposed: bool = False) -> PackedHeads:
        """Rows of one matrix, a matrix for each head: in its format where that can be cut so."""

    @abstractmethod
    def mlp(self, gate: str, up: str, down: str) -> PackedExperts:
        """A gated MLP as the one expert of a layer."""

    @abstractmethod
    def experts(self, module: FusedMoE) -> PackedExperts:
        """The routed experts of an injected block."""

    def bias(self, matrix: PackedMatrix, *names: str) -> torch.Tensor | None:
        """Their biases in the places of their rows; None if none has one."""
        biases = [self.tensor(name) for name in names]
        if all(bias is None for bias in biases):
            return None
        out = torch.zeros(matrix.N)
        for start, bias in zip(matrix.starts, biases, strict=True):
            if bias is not None:
                out[start : start + len(bias)] = bias.float()
        return out

    def vector(self, name: str) -> torch.Tensor:
        """A norm's weight, float32."""
        found = self.tensor(name)
        assert found is not None, name
        return found.float().contiguous()


class FromSource(Packing):
    """Packs what a source holds; matrices that are read together become one if they can."""

    def __init__(self, source: Source, pack: Pack) -> None:
        self.source, self.pack = source, pack

    def tensor(self, name: str) -> torch.Tensor | None:
        return self.source.tensor(name)

    def table(self, name: str) -> torch.Tensor:
        return _as_bf16(*self.source.matrix(name)).data.contiguous()

    def matrix(self, *names: str) -> PackedMatrix:
        fmt, weights = self._alike(names)
        return PackedMatrix(get_format(fmt), weights, self.pack)

    def heads(self, name: str, rows: Sequence[slice], transposed: bool = False) -> PackedHeads:
        fmt, weight = self.source.matrix(name)
        cuts = [_cut(fmt, weight, at, transposed) for at in rows]
        if None in cuts:
            fmt, whole = "bf16", _as_bf16(fmt, weight).data
            cuts = [Weight(whole[at].T.contiguous() if transposed else whole[at]) for at in rows]
        return PackedHeads(get_format(fmt), [cut for cut in cuts if cut is not None], self.pack)

    def mlp(self, gate: str, up: str, down: str) -> PackedExperts:
        name, weights = self._alike((gate, up, down))
        H, I = get_format(name).logical_shape(weights[2])  # noqa: E741
        packed = self.make_experts(MoEShape(E=1, H=H, I=I, topk=1), name)
        if self.pack is not outline:  # whose weights are no numbers to check
            packed.pack(0, *weights)
        return packed

    def experts(self, module: FusedMoE) -> PackedExperts:
        return self.source.experts(module, self.make_experts)

    def make_experts(self, shape: MoEShape, fmt: str) -> PackedExperts:
        """Room for the experts of a layer."""
        return PackedExperts(shape, get_format(fmt), self.room, self.pack)

    def room(self, nbytes: int) -> torch.Tensor:
        """Memory for experts, uint8 [nbytes]."""
        return allocate(nbytes)

    def linear(self, name: str) -> tuple[str, Weight]:
        """(format, weight) of a linear's matrix, as it is packed."""
        return self.source.matrix(name)

    def _alike(self, names: Sequence[str]) -> tuple[str, list[Weight]]:
        """Their format, bfloat16 where they differ, and the matrices in it."""
        found = [self.linear(name) for name in names]
        if len({fmt for fmt, _ in found}) > 1:
            found = [("bf16", _as_bf16(*one)) for one in found]
        return found[0][0], [weight for _, weight in found]


def _as_bf16(fmt: str, weight: Weight) -> Weight:
    if fmt == "bf16":
        return weight
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
