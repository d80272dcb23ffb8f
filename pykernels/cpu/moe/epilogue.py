"""What both stages do with finished sums of tiles and GEMM, 32 of one token at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...shapes import ExpertSpec


@dataclass(frozen=True)
class Epilogue:
    """The epilogues of both stages, for one set of instructions and ``ExpertSpec``.

    A bias is an address, unread where the spec has none.

    Attributes:
        name: tells it from others.
        swiglu: of gate-up: ``swiglu(gate, up, bias, h)``: h[0:32] = bf16 of what ``spec`` makes of
            gate and up; bias[0:32] is gate's, bias[32:64] up's.
        weighted_add: of down: ``weighted_add(weight, value, bias, acc)``: acc[0:32] += weight *
            (value + bias).
    """

    name: str
    spec: ExpertSpec
    swiglu: Callable
    weighted_add: Callable
