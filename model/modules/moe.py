"""`FusedMoE`: a Hugging Face MoE block whose routed experts run on the CPU kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pykernels.errors import PykernelsError
from pykernels.shapes import MoEShape
from runtime.experts.routed import RoutedExperts

from .experts import FusedExperts, experts_shape
from .registry import ModuleContext, operator

SHARED = ("shared_experts", "shared_expert", "shared_expert_gate")
"""Children of a block that every token passes through, under the names that models give them."""


@operator
class FusedMoE(FusedExperts):
    """Router and shared experts as they were; routed experts packed for the CPU.

    Replaces a whole block, so that the CPU works on the routed experts while the shared
    ones run on the model's device. Everything else is as in `FusedExperts`.

    Source: KTransformers (SOSP 2025), section 3.3 (asynchronous scheduling) and Listing 1.
    """

    def _take(self, original: Any, context: ModuleContext) -> MoEShape:
        shape = block_shape(original, context)
        self.gate: nn.Module = original.gate
        for child in SHARED:
            if getattr(original, child, None) is not None:
                setattr(self, child, getattr(original, child))
        return shape

    @property
    def stored_name(self) -> str:
        return f"{self.name}.experts"

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Same as the block's own: [..., H] in and out, in the same dtype and device.

        Raises `PykernelsError` in training mode, on inputs that need gradients, and before the
        weights are loaded.
        """
        self._ready(hidden_states)
        x = hidden_states.reshape(-1, self.shape.H)  # [T, H]
        _, weights, ids = self.gate(x)  # [T, topk] both
        ticket = self.submit(x, ids, weights)
        try:
            shared = self._shared(x)  # the workers are busy with the routed experts meanwhile
        finally:
            out = self.sync(ticket, x)  # [T, H]; also on an error: one call at a time
        if shared is not None:
            out = out + shared
        return out.reshape(hidden_states.shape)

    def _shared(self, x: torch.Tensor) -> torch.Tensor | None:
        parts = self._modules
        if (shared := parts.get("shared_experts")) is not None:
            return shared(x)
        if (shared := parts.get("shared_expert")) is not None:
            gate = parts["shared_expert_gate"]
            assert gate is not None  # checked by block_shape
            return torch.sigmoid(gate(x)) * shared(x)
        return None


def block_shape(block: Any, context: ModuleContext) -> MoEShape:
    """Sizes of a Hugging Face MoE block; `PykernelsError` if `FusedMoE` cannot replace it.

    It needs a `gate` that returns (logits, weights, indices), and `experts` as `FusedExperts` does.
    """
    known = {"gate", "experts", *SHARED}
    children = {name for name, child in block.named_children() if child is not None}
    where = f"{context.name} ({type(block).__name__})"
    hint = "Drop the rule for it, so that transformers runs the block itself"
    if not {"gate", "experts"} <= children:
        raise PykernelsError(f"{where} is no MoE block with a gate and experts", hint)
    if unknown := sorted(children - known):
        raise PykernelsError(f"{where} has parts that are not known: {', '.join(unknown)}", hint)
    if own := [name for name, _ in _own_tensors(block)]:
        raise PykernelsError(f"{where} has values of its own: {', '.join(own)}", hint)
    if ("shared_expert" in children) != ("shared_expert_gate" in children):
        raise PykernelsError(f"{where} has a shared_expert without its gate", hint)
    return experts_shape(block.experts, f"{context.name}.experts", int(block.gate.top_k))


def _own_tensors(block: nn.Module) -> list[tuple[str, torch.Tensor]]:
    own = [*block.named_parameters(recurse=False), *block.named_buffers(recurse=False)]
    return [(name, tensor) for name, tensor in own if tensor is not None]


def routed_experts(model: nn.Module) -> list[RoutedExperts]:
    """The packed experts of a model, in the order of its layers."""
    found = (module for module in model.modules() if isinstance(module, FusedExperts))
    return [module.routed for module in found if module.routed is not None]
