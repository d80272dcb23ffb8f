"""Experts modules of Hugging Face's that there are kernels for, known by what they hold and do."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import torch

from pykernels.errors import PykernelsError
from pykernels.ref.activation import swiglu
from pykernels.shapes import GEGLU, ExpertSpec, MoEShape


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
    if in_turns(experts):
        H, I = I, H  # noqa: E741
    spec = _spec(experts)
    assert spec is not None
    return MoEShape(E=E, H=H, I=I, topk=topk, spec=spec)


def experts_per_token(config: Any) -> Any:
    """What a configuration says of how many experts a token takes; None if nothing."""
    names = ("num_experts_per_tok", "top_k_experts")  # the second one is Gemma's
    return next(filter(None, (getattr(config, name, None) for name in names)), None)


def why_not_fused(experts: Any) -> str | None:
    """Why there is no kernel for an experts module; None if there is one.

    It needs `gate_up_proj` [E, 2 I, H] (gate first) and `down_proj` [E, H, I], or gpt-oss' [E, H, 2
    I] (gate and up in turns), [E, I, H] and biases; SwiGLU, clamped or not, or GEGLU; and a
    `forward` of hidden states, expert numbers and their weights.
    """
    unknown = "experts of a layout that is not known"
    gate_up, down = getattr(experts, "gate_up_proj", None), getattr(experts, "down_proj", None)
    if not all(isinstance(p, torch.Tensor) and p.ndim == 3 for p in (gate_up, down)):
        return unknown
    assert gate_up is not None and down is not None
    turned = in_turns(experts)
    E, H, I = down.mT.shape if turned else down.shape  # noqa: E741
    own = {"gate_up_proj", "down_proj"} | ({f"{n}_proj_bias" for n in _HALVES} if turned else set())
    odd = getattr(experts, "has_post_expert_norm", False) or not _takes_routing(experts)
    plain = turned or (not getattr(experts, "is_transposed", False) and _concatenated(experts))
    if (
        (gate_up.mT if turned else gate_up).shape != (E, 2 * I, H)
        or {name for name, _ in experts.named_parameters()} != own
        or odd
        or not plain
    ):
        return unknown
    if _spec(experts) is None:
        act = getattr(getattr(experts, "config", None), "hidden_act", "another gate")
        known = "it is silu, gelu_pytorch_tanh, or gpt-oss' one"
        return f"experts whose gate (hidden_act {act!r}) no kernel has: {known}"
    return None


_HALVES = ("gate_up", "down")


def in_turns(experts: Any) -> bool:
    """Whether gate and up lie in turns, transposed and with biases, as gpt-oss has them."""
    return bool(getattr(experts, "is_transposed", False)) and not _concatenated(experts)


def _concatenated(experts: Any) -> bool:
    return bool(getattr(experts, "is_concatenated", True))


def _takes_routing(experts: Any) -> bool:
    names = list(inspect.signature(experts.forward).parameters)
    return len(names) == 3 and "ind" in names[1] and "weight" in names[2]


def _spec(experts: Any) -> ExpertSpec | None:
    """What it does beside its products, seen from what its gate does: classes name it in many ways.
    None: nothing that there is a kernel for."""
    gate = torch.linspace(-20, 20, 41, dtype=torch.float32, device="cpu")
    up = torch.linspace(30, -30, 41, dtype=torch.float32, device="cpu")
    apply = getattr(experts, "_apply_gate", None)
    if apply is not None:
        turned = in_turns(experts)
        both = torch.stack([gate, up], -1).flatten() if turned else torch.cat([gate, up])
        outputs = apply(both[None])[0]
    elif hasattr(experts, "act_fn"):
        outputs = experts.act_fn(gate) * up
    else:
        return None
    bias = any(name.endswith("bias") for name, _ in experts.named_parameters())
    alpha, limit = getattr(experts, "alpha", 1.0), getattr(experts, "limit", None)
    known = [ExpertSpec(bias=bias), replace(GEGLU, bias=bias)]
    if limit is not None:
        known += [ExpertSpec(alpha, limit, offset, bias) for offset in (0.0, 1.0)]
    close = (s for s in known if torch.allclose(outputs, swiglu(gate, up, s), atol=1e-5))
    return next(close, None)
