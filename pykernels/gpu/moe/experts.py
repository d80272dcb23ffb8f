"""A layer's experts on the GPU: stacks of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...errors import PykernelsError
from ...quant import Biases, Format, Weight
from ...shapes import SWIGLU, ExpertSpec
from ..gemm.weights import Matrices, empty_for_gpu, pack_for_gpu, unpack_from_gpu


@dataclass(frozen=True)
class GpuExperts:
    """A layer's experts on the GPU, or those of them that lie there (``place_routing``).

    Attributes:
        fmt: the format they were quantized in.
        gate_up: 2 matrices [I, H] an expert: gate of expert e is number 2 e, up number 2 e + 1.
        down: a matrix [H, I] an expert.
        spec: what an expert does besides its products.
        gate_up_bias: float32 [2 E, I], as the matrices lie, and ``down_bias`` [E, H], where
            ``spec`` has biases; else None.
    """

    fmt: Format
    gate_up: Matrices
    down: Matrices
    spec: ExpertSpec = SWIGLU
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None

    def __post_init__(self) -> None:
        both, down = self.gate_up, self.down
        if len(both) != 2 * len(down) or (both.N, both.K) != (down.K, down.N):
            raise PykernelsError(
                f"{len(both)} matrices [{both.N}, {both.K}] of gate and up beside {len(down)}"
                f" [{down.N}, {down.K}] of down",
                "Give two [I, H] and one [H, I] for each expert",
            )
        pairs = ((both, self.gate_up_bias), (down, self.down_bias))
        if not all(_fits(bias, stack, self.spec) for stack, bias in pairs):
            raise PykernelsError(
                f"the biases of {len(down)} experts do not fit {self.spec}",
                "Give contiguous float32 [2 E, I] and [E, H], or none if it has none",
            )

    @property
    def down_fmt(self) -> Format:
        """Format of down; every matrix has the same one here."""
        return self.fmt

    @property
    def E(self) -> int:
        return len(self.down)

    @property
    def H(self) -> int:
        return self.down.N

    @property
    def I(self) -> int:  # noqa: E743 - the house's letter for the intermediate size
        return self.down.K

    @classmethod
    def pack(
        cls,
        fmt: Format,
        experts: Sequence[tuple[Weight, Weight, Weight]],
        device: torch.device,
        spec: ExpertSpec = SWIGLU,
        biases: Sequence[Biases] = (),
    ) -> GpuExperts:
        """From (gate, up, down) of each expert, as a checkpoint (or ``PackedExperts``) has them,
        and its biases, where ``spec`` has them."""
        both = [weight for gate, up, _ in experts for weight in (gate, up)]
        downs = [down for *_, down in experts]
        stacks = (pack_for_gpu(fmt, both).to(device), pack_for_gpu(fmt, downs).to(device))
        if not biases:
            return cls(fmt, *stacks, spec=spec)
        inner = torch.stack([bias for gate, up, _ in biases for bias in (gate, up)])
        outer = torch.stack([bias for *_, bias in biases])
        given = (part.to(device, torch.float32) for part in (inner, outer))
        return cls(fmt, *stacks, spec, *given)

    @classmethod
    def empty(
        cls,
        fmt: Format,
        E: int,
        H: int,
        I: int,  # noqa: E741
        device: torch.device,
        spec: ExpertSpec = SWIGLU,
    ) -> GpuExperts:
        """Memory for E experts, to be copied in one by one."""
        stacks = (
            empty_for_gpu(fmt, 2 * E, I, H, device),
            empty_for_gpu(fmt, E, H, I, device),
        )
        if not spec.bias:
            return cls(fmt, *stacks, spec=spec)
        biases = (
            torch.empty(len(each), each.N, dtype=torch.float32, device=device) for each in stacks
        )
        return cls(fmt, *stacks, spec, *biases)

    def holds(self, expert: int) -> bool:
        """Whether there is such an expert."""
        return 0 <= expert < self.E

    def unpack(self, expert: int) -> tuple[Weight, Weight, Weight]:
        """(gate, up, down) of one expert on the CPU, as the twin in ``ref`` reads them.

        Raises:
            PykernelsError: there is no such expert.
        """
        self._check(expert)
        gate, up = (unpack_from_gpu(self.fmt, self.gate_up, 2 * expert + i) for i in range(2))
        return gate, up, unpack_from_gpu(self.fmt, self.down, expert)

    def biases(self, expert: int) -> Biases | None:
        """The biases of one expert on the CPU; None where there are none. Raises as ``unpack``."""
        if self.gate_up_bias is None or self.down_bias is None:
            return None
        self._check(expert)
        gate, up = self.gate_up_bias[2 * expert : 2 * expert + 2].cpu()
        return Biases(gate, up, self.down_bias[expert].cpu())

    def _check(self, expert: int) -> None:
        if not self.holds(expert):
            raise PykernelsError(f"there is no expert {expert}", f"There are {self.E}, from 0 on")


def _fits(bias: torch.Tensor | None, stack: Matrices, spec: ExpertSpec) -> bool:
    """Whether it is one for each output of the stack, or none where there is to be none."""
    if bias is None or not spec.bias:
        return bias is None and not spec.bias
    shape = (len(stack), stack.N)
    return bias.shape == shape and bias.dtype == torch.float32 and bias.is_contiguous()
