"""Linears that read the same inputs, as nodes: one matrix where their formats agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pykernels.quant.layout import N_BLOCK, ceil_to
from runtime.program import Builder
from runtime.program.weight_spec import WeightSpec


@dataclass(frozen=True)
class Linear:
    """Matrices [N, K] one below the other, their outputs side by side in one buffer.

    Attributes:
        parts: a run of matrices of one format each.
        biases: float32 [N] of each part; None for none.
        at: the first output of each part.
        starts: the first output of each matrix.
        N: outputs, those that fill up blocks between parts included.
    """

    parts: tuple[WeightSpec, ...]
    biases: tuple[WeightSpec | None, ...]
    at: tuple[int, ...]
    starts: tuple[int, ...]
    N: int

    @classmethod
    def of(
        cls, parts: Sequence[WeightSpec], bias_of: Callable[[WeightSpec], WeightSpec | None]
    ) -> Linear:
        """Stacks weights, with the biases of the matrices in them."""
        at, starts, N = list[int](), list[int](), 0
        for part in parts:
            at.append(ceil_to(N, N_BLOCK))
            starts += [at[-1] + start for start in part.starts]
            N = at[-1] + part.shape[0]
        biases = tuple(bias_of(part) for part in parts)
        return cls(tuple(parts), biases, tuple(at), tuple(starts), N)

    def lower(self, b: Builder, name: str, x: str, out: str) -> str:
        """Adds its nodes; returns the buffer [T, N], which is called `out`."""
        b.buffer(out, "T", self.N)
        parts = zip(self.parts, self.biases, self.at, strict=True)
        for i, (matrix, bias, start) in enumerate(parts):
            # The first part writes its columns of out, the others update it in place.
            inputs, label = ({"x": x}, name) if i == 0 else ({"x": x, "out": out}, f"{name}.{i}")
            weights = {"weight": matrix, "bias": bias}
            b.node("linear", label, inputs, {"out": out}, weights, start=start)
        return out
