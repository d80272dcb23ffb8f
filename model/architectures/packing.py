"""The interface through which lowering gets packed weights; ``FromSource`` packs them."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from pykernels.errors import PykernelsError
from pykernels.quant import Biases, Weight, get_format
from pykernels.quant.split import Experts
from pykernels.shapes import ExpertSpec, MoEShape
from runtime.experts.sharding import make_room
from runtime.machine.nodes import ONE_NODE, MemoryNodes
from runtime.matrix import (
    Pack,
    PackedHeads,
    PackedMatrix,
    pack_nothing,
    weights_on,
)

from ..modules.moe import FusedMoE
from .linear import Linear
from .weights import Source

BLOCK = 128
"""Rows and columns of an FP8 scale."""


class Packing(ABC):
    """A model's packed weights, by the names of its parameters.

    Lowering gets every weight through this interface. ``FromSource`` packs, ``FromCache`` maps; a
    packed cache stores exactly what this interface returned.
    """

    @abstractmethod
    def tensor(self, name: str) -> torch.Tensor | None:
        """A parameter that is not a linear's matrix; None if the model has none of that name."""

    @abstractmethod
    def table(self, name: str) -> torch.Tensor | PackedMatrix:
        """An embedding [V, H]: bfloat16, or packed in the format that it is stored in."""

    @abstractmethod
    def runs(self, *names: str) -> list[PackedMatrix]:
        """Matrices stacked along N; neighbours of the same format become one ``PackedMatrix``."""

    @abstractmethod
    def stack(self, name: str, shape: tuple[int, int, int]) -> PackedHeads | None:
        """A stored tensor [heads, N, K], one matrix per head; None if there is none."""

    @abstractmethod
    def heads(self, name: str, rows: Sequence[slice], transposed: bool = False) -> PackedHeads:
        """Slices of one matrix as one matrix per head, in its own format where its scales allow."""

    @abstractmethod
    def mlp(self, gate: str, up: str, down: str) -> Experts:
        """A gated MLP, with its biases if it has some, as the one expert of a layer; gate and up in
        bfloat16 where their formats differ.

        Raises:
            PykernelsError: they differ in a GGUF file.
        """

    @abstractmethod
    def experts(self, module: FusedMoE) -> Experts:
        """The routed experts of a block."""

    def matrix(self, name: str) -> PackedMatrix:
        """The matrix of a parameter."""
        (matrix,) = self.runs(name)
        return matrix

    def linear(self, *modules: str) -> Linear:
        """The linears of these modules, which read the same inputs, with their biases."""
        parts = self.runs(*(f"{module}.weight" for module in modules))
        return Linear.of(parts, [self.tensor(f"{module}.bias") for module in modules])

    def vector(self, name: str) -> torch.Tensor:
        """A norm's weight, float32."""
        tensor = self.tensor(name)
        assert tensor is not None, name
        return tensor.float().contiguous()


class FromSource(Packing):
    """Packs the weights of a source.

    Args:
        nodes: NUMA nodes: one slice of each linear's matrix and of each expert lies on each, and a
            share of the heads.
    """

    def __init__(self, source: Source, pack: Pack, nodes: MemoryNodes = ONE_NODE) -> None:
        self.source, self.pack, self.nodes = source, pack, nodes

    def tensor(self, name: str) -> torch.Tensor | None:
        return self.source.tensor(name)

    def table(self, name: str) -> torch.Tensor | PackedMatrix:
        stored = self.source.matrix(name)
        return stored[1].data.contiguous() if stored[0] == "bf16" else self._packed([stored])

    def runs(self, *names: str) -> list[PackedMatrix]:
        weights = [self.weight(name) for name in names]
        return [
            self._packed(list(run))
            for _, run in itertools.groupby(weights, lambda weight: weight[0])
        ]

    def stack(self, name: str, shape: tuple[int, int, int]) -> PackedHeads | None:
        if (stacked := self.source.stack(name)) is None:
            return None
        packed = self._packed_heads(stacked[0], stacked[1])
        if (stored := (packed.G, packed.N, packed.K)) != shape:
            raise PykernelsError(
                f"{name} has the shape {list(stored)}, the model needs {list(shape)}",
                "Check that config and weights are of one model",
            )
        return packed

    def heads(self, name: str, rows: Sequence[slice], transposed: bool = False) -> PackedHeads:
        fmt, weight = self.source.matrix(name)
        cuts = [_cut(fmt, weight, at, transposed) for at in rows]
        if None in cuts:
            fmt, whole = "bf16", _as_bf16(fmt, weight).data
            cuts = [Weight(whole[at].T.contiguous() if transposed else whole[at]) for at in rows]
        return self._packed_heads(fmt, [cut for cut in cuts if cut is not None])

    def mlp(self, gate: str, up: str, down: str) -> Experts:
        names = (gate, up, down)
        weights = [self.weight(name) for name in names]
        if weights[0][0] != weights[1][0]:
            if any(fmt != "bf16" and weight.scale is None for fmt, weight in weights[:2]):
                raise PykernelsError(
                    f"{gate} is {weights[0][0]} and {up} is {weights[1][0]}",
                    "Quantize the model with one type for both",
                )
            weights[:2] = [("bf16", _as_bf16(*weight)) for weight in weights[:2]]
        (fmt, _), _, (down_fmt, matrix) = weights
        H, I = get_format(down_fmt).logical_shape(matrix)  # noqa: E741
        tensors = [self.source.tensor(f"{name.removesuffix('weight')}bias") for name in names]
        biases = None
        if any(bias is not None for bias in tensors):  # of some of the three in a GGUF file
            sizes = (I, I, H)
            biases = Biases(
                *(
                    torch.zeros(N, dtype=torch.float32, device="cpu") if bias is None else bias
                    for bias, N in zip(tensors, sizes, strict=True)
                )
            )
        shape = MoEShape(E=1, H=H, I=I, topk=1, spec=ExpertSpec(bias=biases is not None))
        packed = self.make_experts(shape, fmt, down_fmt)
        if self.pack is not pack_nothing:  # whose weights are no numbers to check
            packed.pack(0, *(weight for _, weight in weights), biases=biases)
        return packed

    def experts(self, module: FusedMoE) -> Experts:
        return self.source.experts(module, self.make_experts)

    def make_experts(self, shape: MoEShape, fmt: str, down_fmt: str) -> Experts:
        """Memory for the experts of a layer."""
        return make_room(shape, get_format(fmt), get_format(down_fmt), self.nodes, self.pack)

    def weight(self, name: str) -> tuple[str, Weight]:
        """(format, weight) of a linear's matrix, as it is packed."""
        return self.source.matrix(name)

    def _packed(self, weights: list[tuple[str, Weight]]) -> PackedMatrix:
        """Matrices of one format as one."""
        parts, allocate = [weight for _, weight in weights], weights_on(self.nodes)
        return PackedMatrix(get_format(weights[0][0]), parts, self.pack, allocate)

    def _packed_heads(self, fmt: str, heads: Sequence[Weight]) -> PackedHeads:
        allocate = weights_on(self.nodes, len(heads))
        return PackedHeads(get_format(fmt), heads, self.pack, allocate)


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
