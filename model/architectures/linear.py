"""Linears that read the same inputs, as nodes: one matrix where their formats agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pykernels.quant.layout import N_BLOCK, ceil_to
from runtime.matrix import PackedMatrix
from runtime.program import Builder


@dataclass(frozen=True)
class Linear:
    """Matrices [N, K] one below the other, their outputs side by side in one buffer.

    Attributes:
        parts: a run of matrices of one format each.
        at: the first output of each part.
        starts: the first output of each matrix.
        N: outputs, those that fill up blocks between parts included.
        bias: float32 [N]; None for none.
    """

    parts: tuple[PackedMatrix, ...]
    at: tuple[int, ...]
    starts: tuple[int, ...]
    N: int
    bias: torch.Tensor | None

    @classmethod
    def of(cls, parts: Sequence[PackedMatrix], biases: Sequence[torch.Tensor | None]) -> Linear:
        """Stacks packed matrices, with the bias of each matrix in them."""
        at, starts, N = list[int](), list[int](), 0
        for part in parts:
            at.append(ceil_to(N, N_BLOCK))
            starts += [at[-1] + start for start in part.starts]
            N = at[-1] + part.N
        bias = None
        if any(values is not None for values in biases):
            bias = torch.zeros(N, dtype=torch.float32, device="cpu")
            for start, values in zip(starts, biases, strict=True):
                if values is not None:
                    bias[start : start + len(values)] = values.float()
        return cls(tuple(parts), tuple(at), tuple(starts), N, bias)

    def lower(self, b: Builder, name: str, x: str, out: str) -> str:
        """Adds its nodes; returns the buffer [T, N], which is called `out`."""
        b.buffer(out, "T", self.N)
        for i, (matrix, start) in enumerate(zip(self.parts, self.at, strict=True)):
            weights: dict[str, Any] = {"weight": matrix}
            if self.bias is not None:
                weights["bias"] = self.bias[start : start + matrix.N]
            # The first part writes its columns of out, the others update it in place.
            inputs, label = ({"x": x}, name) if i == 0 else ({"x": x, "out": out}, f"{name}.{i}")
            b.node("linear", label, inputs, {"out": out}, weights, start=start)
        return out
