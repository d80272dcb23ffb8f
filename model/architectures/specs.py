"""The specs of a model's weights: what lowering asks for, by the names of parameters.

Nothing is read here. Which matrices become one, and in which format a weight is where parts of it
differ, follows from the ``Schema`` alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pykernels.errors import PykernelsError
from pykernels.quant import get_format
from pykernels.quant.layout import N_BLOCK, ceil_to
from pykernels.shapes import SWIGLU, ExpertSpec, MoEShape
from runtime.program.weight_spec import WeightPart, WeightSpec

from ..modules.moe import FusedMoE
from .linear import Linear
from .schema import Schema

Spans = Sequence[tuple[int, int]]
"""Runs of rows, (first, last) each."""
BLOCK = 128
"""Rows and columns of an FP8 scale."""


class Specs:
    """Makes the specs of a model's weights."""

    def __init__(self, schema: Schema) -> None:
        self._schema, self._tensors = schema, schema.tensors

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        return name in self._tensors

    def tensor(self, name: str) -> WeightSpec | None:
        """A parameter that is not a linear's matrix; None if the model has none of that name."""
        if (tensor := self._tensors.get(name)) is None:
            return None
        return WeightSpec.tensor(name, *tensor.shape)

    def flat(self, name: str) -> WeightSpec | None:
        """``tensor``, as a vector."""
        if (tensor := self._tensors.get(name)) is None:
            return None
        return WeightSpec.tensor(name, math.prod(tensor.shape))

    def vector(self, name: str, change: str = "") -> WeightSpec:
        """A norm's weight, or other numbers of which there is a row.

        Args:
            change: of what is stored, a key of ``weight_spec.CHANGES``.
        """
        shape = self._tensor(name).shape
        if change == "by places":
            shape = shape[2], shape[0]
        return WeightSpec.tensor(name, *shape, parts=[WeightPart(name, shape, change=change)])

    def table(self, name: str) -> WeightSpec:
        """An embedding [V, H], in the format that it is stored in."""
        tensor = self._tensor(name)
        V, H = tensor.shape
        return WeightSpec.matrix(name, tensor.fmt, [(name, V, H)])

    def matrix(self, name: str) -> WeightSpec:
        """The matrix of a parameter."""
        (matrix,) = self.runs(name)
        return matrix

    def linear(self, *modules: str) -> Linear:
        """The linears of these modules, which read the same inputs, with their biases."""
        runs = self.runs(*(f"{module}.weight" for module in modules))
        return Linear.of(runs, self._biases)

    def some_rows(self, name: str, *taken: tuple[str, str, Spans]) -> Linear:
        """Rows of the linears of some modules, which read the same inputs, as one linear.

        Args:
            name: in which the parts' own labels are put together.
            taken: (label, module, runs of its rows) of each part; no runs: all rows.
        """

        def fmt_of(part: tuple[str, str, Spans]) -> str:
            fmt: str = self._tensor(f"{part[1]}.weight").linear
            return fmt if _can_cut(fmt, part[2]) else "bf16"

        weights = []
        for fmt, group in itertools.groupby(taken, fmt_of):
            labels, parts, at = list[str](), list[WeightPart](), 0
            for label, module, spans in group:
                N, K = self._tensor(f"{module}.weight").shape
                N = sum(last - first for first, last in spans) if spans else N
                at = ceil_to(at, N_BLOCK)
                parts.append(WeightPart(f"{module}.weight", (N, K), at, tuple(spans)))
                labels.append(label)
                at += N
            weight = f"{name}.{'+'.join(labels)}.weight"
            weights.append(WeightSpec(weight, "matrix", fmt, (at, K), tuple(parts)))
        return Linear.of(weights, self._biases)

    def runs(self, *names: str) -> list[WeightSpec]:
        """Matrices stacked along N; neighbours of the same format become one weight."""
        runs = itertools.groupby(names, lambda name: self._tensor(name).linear)
        return [self._stacked(fmt, list(run)) for fmt, run in runs]

    def heads(
        self, name: str, stored: str, rows: Sequence[slice], transposed: bool = False
    ) -> WeightSpec:
        """Slices of one matrix as one matrix per head, in its own format where its scales allow.

        Args:
            name: of the weight; ``stored``: of the matrix.
        """
        tensor = self._tensor(stored)
        K = tensor.shape[1]
        shapes = [(at.stop - at.start, K) for at in rows]
        shapes = [shape[::-1] for shape in shapes] if transposed else shapes
        parts = tuple(
            WeightPart(stored, shape, rows=((at.start, at.stop),), transposed=transposed)
            for at, shape in zip(rows, shapes, strict=True)
        )
        fits = all(_can_cut(tensor.fmt, [(at.start, at.stop)], transposed) for at in rows)
        fmt = tensor.fmt if fits else "bf16"
        return WeightSpec(name, "heads", fmt, (len(rows), *shapes[0]), parts)

    def stack(self, name: str, shape: tuple[int, int, int]) -> WeightSpec | None:
        """A stored tensor [heads, N, K], one matrix per head; None if there is none.

        Raises:
            PykernelsError: it has another shape.
        """
        if (tensor := self._tensors.get(name)) is None:
            return None
        if tensor.shape != shape:
            raise PykernelsError(
                f"{name} has the shape {list(tensor.shape)}, the model needs {list(shape)}",
                "Check that config and weights are of one model",
            )
        parts = tuple(WeightPart(name, shape[1:], index=head) for head in range(shape[0]))
        return WeightSpec(name, "heads", tensor.fmt, shape, parts)

    def mlp(self, gate: str, up: str, down: str, spec: ExpertSpec = SWIGLU) -> WeightSpec:
        """A gated MLP, with its biases if it has some, as the one expert of a layer; gate and up in
        bfloat16 where their formats differ.

        Args:
            spec: what it does beside its products, but for biases.
        """
        names = gate, up, down
        formats = [self._tensor(name).linear for name in names]
        if formats[0] != formats[1]:
            formats[:2] = "bf16", "bf16"
        H, I = self._tensor(down).shape  # noqa: E741
        biases = [f"{name.removesuffix('weight')}bias" for name in names]
        shapes = (I, H), (I, H), (H, I)
        parts = [WeightPart(name, shape) for name, shape in zip(names, shapes, strict=True)]
        parts += [
            WeightPart(name, (N,))
            for name, N in zip(biases, (I, I, H), strict=True)
            if name in self._tensors  # of some of the three in a GGUF file
        ]
        moe = MoEShape(E=1, H=H, I=I, topk=1, spec=replace(spec, bias=len(parts) > len(names)))
        return WeightSpec.experts(_joined(names), moe, formats[0], formats[2], parts)

    def experts(self, module: FusedMoE) -> WeightSpec:
        """The routed experts of a block."""
        formats = self._schema.experts[module.name]
        return WeightSpec.experts(module.stored_name, module.shape, *formats)

    def _stacked(self, fmt: str, names: list[str]) -> WeightSpec:
        shapes: list[Any] = [self._tensor(name).shape for name in names]
        parts = [(name, N, K) for name, (N, K) in zip(names, shapes, strict=True)]
        return WeightSpec.matrix(_joined(names), fmt, parts)

    def _biases(self, matrix: WeightSpec) -> WeightSpec | None:
        """The biases of stacked matrices, where some of them have one."""
        names = [f"{part.name.removesuffix('weight')}bias" for part in matrix.parts]
        parts = [
            WeightPart(name, part.shape[:1], part.at, part.rows)
            for name, part in zip(names, matrix.parts, strict=True)
            if name in self._tensors
        ]
        if not parts:
            return None
        return WeightSpec.tensor(_joined(names), matrix.shape[0], parts=parts)

    def _tensor(self, name: str) -> Any:
        if name not in self._tensors:
            raise PykernelsError(
                f"there is no {name} among the weights",
                "Check that config and weights are of one model",
            )
        return self._tensors[name]


def _joined(names: Sequence[str]) -> str:
    """One name for several: ``layer.{q,k,v}_proj.weight`` by what they differ in."""
    if len(names) == 1:
        return names[0]
    split = [name.split(".") for name in names]
    (at,) = [i for i, parts in enumerate(zip(*split, strict=True)) if len(set(parts)) > 1]
    differing = "+".join(parts[at] for parts in split)
    return ".".join((*split[0][:at], differing, *split[0][at + 1 :]))


def _holds_scales(fmt: str) -> bool:
    """Whether the rows of a quantized matrix hold their own scales, as in a GGUF file."""
    return fmt != "bf16" and get_format(fmt).scale_shape(1, get_format(fmt).k_block) is None


def scales_by_rows(fmt: str) -> bool:
    """Whether each row of a quantized matrix has scales that no other one has, beside it."""
    found, N = get_format(fmt), 2 * BLOCK
    shape = found.scale_shape(N, found.k_block)
    return shape is not None and shape[0] == N and found.data_shape(N, found.k_block)[0] == N


def _can_cut(fmt: str, spans: Spans, transposed: bool = False) -> bool:
    """Whether runs of rows of a matrix can be a matrix in its own format."""
    if fmt == "bf16" or not spans:
        return True
    if not transposed and (_holds_scales(fmt) or scales_by_rows(fmt)):
        return True
    if fmt != "fp8":
        return False
    *others, (first, last) = spans
    whole = all(first % BLOCK == last % BLOCK == 0 for first, last in others)
    one = not others and first // BLOCK == (last - 1) // BLOCK
    return whole and (one or first % BLOCK == 0)
