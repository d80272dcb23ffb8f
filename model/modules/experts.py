"""`FusedExperts`: the routed experts of a Hugging Face MoE block on the CPU kernels."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F

from pykernels import quant
from pykernels.errors import PykernelsError
from pykernels.registry import ACTIVATIONS
from pykernels.shapes import MoEShape
from runtime.experts.routed import RoutedExperts, Ticket

from .registry import ModuleContext, Operator, operator

FORMATS = ("auto", *quant.FORMATS)


@operator
class FusedExperts(Operator):
    """Routed experts packed for the CPU; the block around them stays transformers' own.

    It works in every family whose block calls `experts(hidden_states, ids, weights)`, whatever its
    router is. The packed weights are neither parameters nor buffers: `.to()` leaves them in main
    memory. Inference only.

    Rule's kwargs: `kernel` auto | amx | avx512 | avx2 | generic (default: the caller's choice);
    `format` auto (as stored), or one of `pykernels.quant.FORMATS` to convert to while loading;
    `activations` bf16 (exact), or int8 for integer formats, about 1 % off and faster. Rule's
    device: `cpu` only.
    """

    def __init__(
        self,
        original: Any,
        context: ModuleContext,
        *,
        kernel: str | None = None,
        format: str = "auto",
        activations: str = "bf16",
    ) -> None:
        super().__init__(original, context)
        if format not in FORMATS:
            raise PykernelsError(
                f"{context.name}: there is no expert format {format!r}",
                f"Use one of {', '.join(FORMATS)}",
            )
        if activations not in ACTIVATIONS:
            raise PykernelsError(
                f"{context.name}: there are no {activations!r} activations",
                f"Use {' or '.join(ACTIVATIONS)}",
            )
        if context.device not in (None, "cpu"):
            raise PykernelsError(
                f"{context.name}: routed experts cannot run on {context.device!r}",
                "Write device: cpu in the rule, or drop the rule to leave the block as it is",
            )
        self.name = context.name
        self.kernel = kernel or context.kernel
        self.format = format
        self.activations = activations
        self.shape = self._take(original, context)
        self.routed: RoutedExperts | None = None

    def _take(self, original: Any, context: ModuleContext) -> MoEShape:
        """Sizes of the experts; keeps of what is replaced what is to run on. `PykernelsError` if it
        cannot be replaced."""
        topk = getattr(context.config, "num_experts_per_tok", None)
        return experts_shape(original, context.name, topk if isinstance(topk, int) else 1)

    @property
    def stored_name(self) -> str:
        """What the checkpoint's names of the experts begin with."""
        return self.name

    def allocate(self, stored: str) -> RoutedExperts:
        """Make room for the packed experts of a checkpoint that stores them as `stored`."""
        fmt = self.packed_format(stored)
        self.routed = RoutedExperts(
            self.shape, fmt, kernel=self.kernel, activations=self.activations
        )
        return self.routed

    def packed_format(self, stored: str) -> str:
        """Name of the format that experts are packed in, if the checkpoint has `stored`."""
        return stored if self.format == "auto" else self.format

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Same as the module's own: [..., H] in and out, in the same dtype and device.

        Args:
            top_k_index: expert numbers [T, topk]; ``top_k_weights``: of each one's output.

        Raises `PykernelsError` in training mode, on inputs that need gradients, and before the
        weights are loaded.
        """
        ticket = self.submit(hidden_states, top_k_index, top_k_weights)
        return self.sync(ticket, hidden_states)

    def submit(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Ticket:
        """Start the experts; raises as `forward`."""
        routed, rows = self._ready(x), x.reshape(-1, self.shape.H)  # [T, H]
        # float16 has no expert kernel: its values fit float32 exactly.
        rows = rows.float() if x.dtype == torch.float16 else rows
        return routed.submit(
            rows.to("cpu").contiguous(),
            ids.to("cpu", torch.int64).contiguous(),
            weights.to("cpu", torch.float32).contiguous(),
        )

    def sync(self, ticket: Ticket, x: torch.Tensor) -> torch.Tensor:
        """Wait for them; their result in the shape, dtype and device of `x`."""
        assert self.routed is not None
        return self.routed.sync(ticket).to(x.device, x.dtype).reshape(x.shape)

    def extra_repr(self) -> str:
        packed = "not loaded" if self.routed is None else "on the CPU"
        return f"{self.shape}, kernel={self.kernel}, format={self.format}, experts {packed}"

    def _ready(self, hidden_states: torch.Tensor) -> RoutedExperts:
        if self.training or (torch.is_grad_enabled() and hidden_states.requires_grad):
            raise PykernelsError(
                f"{self.name}: the CPU experts cannot be trained",
                "Call model.eval() and run under torch.no_grad()",
            )
        if self.routed is None:
            raise PykernelsError(
                f"{self.name}: its experts are not loaded", "Load with model.from_pretrained"
            )
        return self.routed

    def _save_to_state_dict(self, *_: object) -> None:
        # Without this the saved model would silently lack its experts.
        raise PykernelsError(
            f"{self.name}: packed experts are in no state dict",
            "Copy the checkpoint's own files instead of saving the model",
        )


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
