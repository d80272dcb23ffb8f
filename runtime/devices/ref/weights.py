"""Packed weights in float32, dequantized once: what the reference ops multiply with."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from pykernels.quant import Biases, Format, PackedExperts, Weight

from ...matrix import PackedHeads, PackedMatrix

_matrices: weakref.WeakKeyDictionary[Any, torch.Tensor] = weakref.WeakKeyDictionary()
_experts: weakref.WeakKeyDictionary[PackedExperts, Dequantized] = weakref.WeakKeyDictionary()


def matrix(packed: PackedMatrix) -> torch.Tensor:
    """float32 [N, K], rows that fill up blocks included."""
    if packed not in _matrices:
        ends = (*packed.starts[1:], packed.N)
        _matrices[packed] = torch.cat(
            [
                _unpacked(
                    packed.fmt,
                    packed.blocks[start // 32 : -(-end // 32)],
                    packed.scales[start // 32 : -(-end // 32)],
                    end - start,
                    packed.K,
                )
                for start, end in zip(packed.starts, ends, strict=True)
            ]
        )
    return _matrices[packed]


def heads(packed: PackedHeads) -> torch.Tensor:
    """float32 [G, N, K]."""
    if packed not in _matrices:
        _matrices[packed] = torch.stack(
            [
                _unpacked(packed.fmt, blocks, scales, packed.N, packed.K)
                for blocks, scales in zip(packed.blocks, packed.scales, strict=True)
            ]
        )
    return _matrices[packed]


class Dequantized:
    """Experts as ``ref.moe_ffn`` reads them, dequantized when they are first asked for."""

    def __init__(self, packed: PackedExperts) -> None:
        self._packed, self.spec = weakref.proxy(packed), packed.spec
        self.fmt, self.down_fmt = _Plain(packed.fmt), _Plain(packed.down_fmt)
        self._found: dict[int, tuple[torch.Tensor, ...]] = {}

    def holds(self, expert: int) -> bool:
        """Whether there is such an expert."""
        return bool(self._packed.holds(expert))

    def unpack(self, expert: int) -> tuple[torch.Tensor, ...]:
        """float32 gate, up [I, H] and down [H, I]."""
        if expert not in self._found:
            gate, up, down = self._packed.unpack(expert)
            fmt, down_fmt = self._packed.fmt, self._packed.down_fmt
            self._found[expert] = (
                fmt.dequantize(gate),
                fmt.dequantize(up),
                down_fmt.dequantize(down),
            )
        return self._found[expert]

    def biases(self, expert: int) -> Biases | None:
        """Those of one expert, float32; None where there are none."""
        found: Biases | None = self._packed.biases(expert)
        return found


def experts(packed: Any) -> Dequantized:
    """Dequantizes ``PackedExperts``, or a program's view of them."""
    packed = packed if isinstance(packed, PackedExperts) else packed.packed
    if packed not in _experts:
        _experts[packed] = Dequantized(packed)
    return _experts[packed]


class _Plain:
    """A format whose weights are dequantized already."""

    def __init__(self, fmt: Format) -> None:
        self.int8_kind = fmt.int8_kind

    def dequantize(self, weight: torch.Tensor) -> torch.Tensor:
        return weight


def _unpacked(
    fmt: Format, blocks: torch.Tensor, scales: torch.Tensor, N: int, K: int
) -> torch.Tensor:
    weight: Weight = fmt.unpack(blocks, scales, N, K)
    return fmt.dequantize(weight).float()
