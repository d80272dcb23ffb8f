"""What the stages do with the float32 outputs of tiles and GEMM, 32 of one token at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Epilogue:
    """The epilogues of both stages, for one set of instructions.

    Attributes:
        name: tells it from others.
        silu_mul: of gate-up: ``silu_mul(gate, up, h)``: h[0:32] = bf16(silu(gate) * up).
        weighted_add: of down: ``weighted_add(weight, value, acc)``: acc[0:32] += weight * value.
    """

    name: str
    silu_mul: Callable
    weighted_add: Callable
