"""Experts modules of Hugging Face's that there are kernels for, known by what they hold and do."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F

from pykernels.errors import PykernelsError
from pykernels.shapes import MoEShape


def experts_shape(experts: Any, where: str, topk: int) -> MoEShape:
    """Sizes of a Hugging Face experts module.

    Raises:
        PykernelsError: there is no kernel for such experts.
    """
    if reason := why_not_fused(experts):
        raise PykernelsError(
            f"{where} ({type(experts).__name__}) has {reason}",
            "Drop the rule for it, so that transformers runs the block itself",
        )
    E, H, I = experts.down_proj.shape  # noqa: E741
    return MoEShape(E=E, H=H, I=I, topk=topk)


def why_not_fused(experts: Any) -> str | None:
    """Why there is no kernel for an experts module; None if there is one.

    It needs `gate_up_proj` [E, 2 I, H] (gate first) and `down_proj` [E, H, I], no biases, SiLU, and
    a `forward` of hidden states, expert numbers and their weights.
    """
    unknown = "experts of a layout that is not known"
    gate_up, down = getattr(experts, "gate_up_proj", None), getattr(experts, "down_proj", None)
    if not all(isinstance(p, torch.Tensor) and p.ndim == 3 for p in (gate_up, down)):
        return unknown
    own = dict(experts.named_parameters())
    if any(name.endswith("bias") for name in own):
        return "experts with biases, for which there is no kernel"
    assert gate_up is not None and down is not None
    E, H, I = down.shape  # noqa: E741
    odd = len(own) > 2 or any(getattr(experts, name, value) != value for name, value in _LAYOUT)
    if gate_up.shape != (E, 2 * I, H) or odd or not _takes_routing(experts):
        return unknown
    if not _gates_by_silu(experts):
        act = getattr(getattr(experts, "config", None), "hidden_act", "another gate")
        return f"experts that use {act!r}, the kernels have silu only"
    return None


_LAYOUT = (("is_transposed", False), ("is_concatenated", True), ("has_post_expert_norm", False))
"""What transformers says of experts that are laid out as here."""


def _takes_routing(experts: Any) -> bool:
    names = list(inspect.signature(experts.forward).parameters)
    return len(names) == 3 and "ind" in names[1] and "weight" in names[2]


def _gates_by_silu(experts: Any) -> bool:
    """Whether its gate is `silu(gate) * up`, seen from what it does: classes name it in many ways,
    and some clamp."""
    gate, up = torch.linspace(-20, 20, 41, device="cpu"), torch.linspace(30, -30, 41, device="cpu")
    apply = getattr(experts, "_apply_gate", None)
    if apply is None and not hasattr(experts, "act_fn"):
        return False
    found = experts.act_fn(gate) * up if apply is None else apply(torch.cat([gate, up])[None])[0]
    return found.shape == gate.shape and torch.allclose(found, F.silu(gate) * up)
