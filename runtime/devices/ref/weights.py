"""Weights in float32, dequantized once: what the reference ops read."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pykernels.quant import Biases, Format, PackedExperts, get_format

from ...program import Program
from ...program.node import Node
from ...program.weight_spec import WeightSpec
from ...program.weights import Layout, LayoutOf, Packed, WeightStore
from ..cpu import weights as cpu


def layouts(program: Program) -> LayoutOf:
    """The layout in which each node reads its weights; nodes on ``cpu`` keep that device's."""
    on_cpu = cpu.layouts(program)
    kinds: dict[str, Layout] = {
        "tensor": cpu.vector,
        "matrix": exact_matrix,
        "heads": exact_heads,
        "experts": exact_experts,
    }

    def layout_of(node: Node, port: str) -> tuple[torch.device, Layout]:
        if node.device == "cpu":
            return on_cpu(node, port)
        if node.role == "load" or "resident" in node.inputs:
            return cpu.CPU_DEVICE, tiles_of_all
        return cpu.CPU_DEVICE, kinds[program.weight(node, port).kind]

    return layout_of


def exact_matrix(spec: WeightSpec, store: WeightStore, device: torch.device) -> torch.Tensor:
    """float32 [N, K]; rows that fill up blocks are zeros."""
    fmt = get_format(spec.fmt)
    matrix = torch.zeros(spec.shape, dtype=torch.float32, device=device)
    for part, weight in zip(spec.parts, store.matrices(spec), strict=True):
        matrix[part.at : part.at + part.shape[0]] = fmt.dequantize(weight)
    return matrix


def exact_heads(spec: WeightSpec, store: WeightStore, device: torch.device) -> torch.Tensor:
    """float32 [G, N, K]."""
    fmt = get_format(spec.fmt)
    return torch.stack([fmt.dequantize(weight) for weight in store.matrices(spec)]).float()


def exact_experts(spec: WeightSpec, store: WeightStore, device: torch.device) -> Dequantized:
    """The experts of a layer, all or some, over those in the CPU's tiles."""
    packed = store.get(spec.full or spec, cpu.CPU_DEVICE, cpu.packed)
    if spec.is_expert_slots:
        return Dequantized(packed, [NONE] * spec.shape[0])
    return Dequantized(packed, spec.expert_ids or range(spec.shape[0]))


def tiles_of_all(spec: WeightSpec, store: WeightStore, device: torch.device) -> Packed:
    """The CPU's tiles of a layer's experts, from which some of them are copied."""
    tiles: Packed = store.get(spec.full or spec, cpu.CPU_DEVICE, cpu.packed)
    return tiles


NONE = -1


class Dequantized:
    """Experts as ``ref.moe_ffn`` reads them, dequantized when they are first asked for.

    Args:
        chosen: the number of each in ``packed``; ``NONE``: it is not there yet.
    """

    def __init__(self, packed: PackedExperts, chosen: Sequence[int]) -> None:
        self._packed, self._chosen, self.spec = packed, list(chosen), packed.spec
        self.fmt, self.down_fmt = _Plain(packed.fmt), _Plain(packed.down_fmt)
        self._found: dict[int, tuple[torch.Tensor, ...]] = {}

    def holds(self, expert: int) -> bool:
        """Whether there is such an expert."""
        return 0 <= expert < len(self._chosen) and self._packed.holds(self._chosen[expert])

    def put(self, slot: int, expert: int) -> None:
        """From now on ``slot`` is the expert of that number in ``packed``."""
        self._chosen[slot] = expert
        self._found.pop(slot, None)

    def forget(self) -> None:
        """Drops what was dequantized: the tiles have changed."""
        self._found.clear()

    def unpack(self, expert: int) -> tuple[torch.Tensor, ...]:
        """float32 gate, up [I, H] and down [H, I]."""
        if expert not in self._found:
            gate, up, down = self._packed.unpack(self._chosen[expert])
            fmt, down_fmt = self._packed.fmt, self._packed.down_fmt
            self._found[expert] = (
                fmt.dequantize(gate),
                fmt.dequantize(up),
                down_fmt.dequantize(down),
            )
        return self._found[expert]

    def biases(self, expert: int) -> Biases | None:
        """The biases of one expert, float32; None where there are none."""
        biases_: Biases | None = self._packed.biases(self._chosen[expert])
        return biases_


class _Plain:
    """A format whose weights are dequantized already."""

    def __init__(self, fmt: Format) -> None:
        self.int8_kind = fmt.int8_kind

    def dequantize(self, weight: torch.Tensor) -> torch.Tensor:
        return weight
