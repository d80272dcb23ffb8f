"""The dimensions of a Mixture-of-Experts layer and of one call of it, validated once.

Letters used everywhere: ``T`` tokens, ``E`` experts, ``topk`` experts a token takes, ``H`` hidden
size, ``I`` intermediate size of one expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .errors import PykernelsError


@dataclass(frozen=True, slots=True)
class MoEShape:
    """Sizes of one layer's routed experts.

    An expert is ``down(silu(gate(x)) * up(x))`` with ``gate, up: [I, H]`` and ``down: [H, I]``.
    """

    E: int
    H: int
    I: int  # noqa: E741 - the field's own letter for the intermediate size
    topk: int

    def __post_init__(self) -> None:
        for name in ("E", "H", "I", "topk"):
            if getattr(self, name) < 1:
                raise PykernelsError(
                    f"MoE shape has {name}={getattr(self, name)}", f"{name} must be at least 1"
                )
        if self.topk > self.E:
            raise PykernelsError(
                f"MoE shape asks for top-{self.topk} of {self.E} experts", "topk must be at most E"
            )

    @property
    def weights(self) -> int:
        """Weights in one expert: gate, up and down."""
        return 3 * self.H * self.I


@dataclass(frozen=True, slots=True)
class Routing:
    """Which experts each token takes, and how much of each.

    ``ids``: int64 [T, topk], each in ``0..E-1``, no expert twice in a row of it;
    ``weights``: float32 [T, topk].
    """

    ids: torch.Tensor
    weights: torch.Tensor

    def __post_init__(self) -> None:
        if self.ids.ndim != 2 or self.ids.shape != self.weights.shape:
            raise PykernelsError(
                f"routing ids {tuple(self.ids.shape)} and weights {tuple(self.weights.shape)}"
                " do not match",
                "both must be [T, topk]",
            )

    @property
    def T(self) -> int:
        return self.ids.shape[0]

    @property
    def topk(self) -> int:
        return self.ids.shape[1]

    def distinct_experts(self) -> int:
        """Experts touched at least once: what a call must read from memory."""
        return int(torch.unique(self.ids).numel())
