"""`FusedMoE`: a Hugging Face MoE block whose routed experts run on the CPU kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pykernels import quant
from pykernels.errors import PykernelsError
from pykernels.quant import Weight
from pykernels.registry import ACTIVATIONS
from pykernels.shapes import MoEShape
from runtime.experts.routed import RoutedExperts

from .pinned import PinnedExperts
from .registry import ModuleContext, Operator, operator

FORMATS = ("auto", *quant.FORMATS)
SHARED = ("shared_experts", "shared_expert", "shared_expert_gate")
"""Children of a block that every token passes through, under the names that models give them."""


@operator
class FusedMoE(Operator):
    """Router and shared experts as they were; routed experts packed for the CPU.

    Replaces a whole block, so that the CPU works on the routed experts while the shared
    ones run on the model's device. The packed weights are neither parameters nor buffers: `.to()`
    leaves them in main memory. Inference only.

    Rule's kwargs: `kernel` auto | amx | avx512 | generic (default: the caller's choice); `format`
    auto (as stored), or one of `pykernels.quant.FORMATS` to convert to while loading; `activations`
    bf16 (exact), or int8 for integer formats, about 1 % off and faster. Rule's device: `cpu` only.

    Source: KTransformers (SOSP 2025), section 3.3 (asynchronous scheduling) and Listing 1.
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
        self.shape = block_shape(original, context)
        self.gate: nn.Module = original.gate
        for child in SHARED:
            if hasattr(original, child):
                setattr(self, child, getattr(original, child))
        self.routed: RoutedExperts | None = None
        self.pinned: PinnedExperts | None = None

    @property
    def cpu_shape(self) -> MoEShape:
        """Of the experts that are packed for the CPU: all, but for those pinned on a GPU."""
        return self.shape if self.pinned is None else self.pinned.rest

    def allocate(self, stored: str) -> RoutedExperts:
        """Make room for the packed experts of a checkpoint that stores them as `stored`."""
        fmt = self.packed_format(stored)
        self.routed = RoutedExperts(
            self.cpu_shape, fmt, kernel=self.kernel, activations=self.activations
        )
        return self.routed

    def packed_format(self, stored: str) -> str:
        """Name of the format that experts are packed in, if the checkpoint has `stored`."""
        return stored if self.format == "auto" else self.format

    def load_expert(self, expert: int, gate: Weight, up: Weight, down: Weight) -> None:
        """Packs one expert, in `expert_format`, where it will be computed."""
        assert self.routed is not None
        if self.pinned is None:
            self.routed.load_expert(expert, gate, up, down)
        elif expert in self.pinned.pinned:
            self.pinned.put(expert, (gate, up, down))
        else:
            self.routed.load_expert(int(self.pinned.index[expert]), gate, up, down)

    def expert_format(self, expert: int, stored: str) -> str:
        """Name of the format that one expert is packed in."""
        if self.pinned is not None and expert in self.pinned.pinned:
            return self.pinned.fmt.name
        return self.packed_format(stored)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Same as the block's own: [..., H] in and out, in the same dtype and device.

        Raises `PykernelsError` in training mode, on inputs that need gradients, and before the
        weights are loaded.
        """
        routed = self._ready(hidden_states)
        x = hidden_states.reshape(-1, self.shape.H)  # [T, H]
        _, weights, ids = self.gate(x)  # [T, topk] both
        # float16 has no expert kernel: its values fit float32 exactly.
        rows = (x.float() if x.dtype == torch.float16 else x).to("cpu")
        taken = ids.to("cpu", torch.int64), weights.to("cpu", torch.float32)
        tokens = None
        if self.pinned is not None:
            tokens, *taken = self.pinned.split(*taken)  # type: ignore[assignment]
            rows = rows[tokens]
        ticket = routed.submit(rows.contiguous(), *(part.contiguous() for part in taken))
        try:  # the workers are busy with the routed experts meanwhile
            beside = None if self.pinned is None else self.pinned(x, ids, weights)
            shared = self._shared(x)
        finally:
            out = routed.sync(ticket)  # [T, H]; also on an error: one call at a time
        out = out.to(x.device, x.dtype)
        if beside is not None and tokens is not None:
            out = beside.index_add(0, tokens.to(x.device), out)
        if shared is not None:
            out = out + shared
        return out.reshape(hidden_states.shape)

    def extra_repr(self) -> str:
        packed = "not loaded" if self.routed is None else "on the CPU"
        if self.pinned is not None:
            packed += f", {len(self.pinned.pinned)} of them on {self.pinned.device}"
        return f"{self.shape}, kernel={self.kernel}, format={self.format}, experts {packed}"

    def _shared(self, x: torch.Tensor) -> torch.Tensor | None:
        parts = self._modules
        if (shared := parts.get("shared_experts")) is not None:
            return shared(x)
        if (shared := parts.get("shared_expert")) is not None:
            gate = parts["shared_expert_gate"]
            assert gate is not None  # checked by block_shape
            return torch.sigmoid(gate(x)) * shared(x)
        return None

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


def block_shape(block: Any, context: ModuleContext) -> MoEShape:
    """Sizes of a Hugging Face MoE block; `PykernelsError` if `FusedMoE` cannot replace it.

    It needs a `gate` that returns (logits, weights, indices), and `experts` with the fused
    `gate_up_proj` [E, 2 I, H] (gate first) and `down_proj` [E, H, I], no biases, SiLU.
    """
    known = {"gate", "experts", *SHARED}
    experts = getattr(block, "experts", None)
    children = {name for name, _ in block.named_children()}
    where = f"{context.name} ({type(block).__name__})"
    hint = "Drop the rule for it, so that transformers runs the block itself"
    if experts is not None and any(n.endswith("bias") for n, _ in experts.named_parameters()):
        raise PykernelsError(f"{where} has experts with biases, for which there is no kernel", hint)
    if not {"gate", "experts"} <= children:
        raise PykernelsError(f"{where} is no MoE block with a gate and experts", hint)
    if unknown := sorted(children - known):
        raise PykernelsError(f"{where} has parts that are not known: {', '.join(unknown)}", hint)
    if ("shared_expert" in children) != ("shared_expert_gate" in children):
        raise PykernelsError(f"{where} has a shared_expert without its gate", hint)
    activation = getattr(context.config, "hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise PykernelsError(f"{where} uses {activation!r}, the kernels have silu only", hint)
    gate_up, down = getattr(experts, "gate_up_proj", None), getattr(experts, "down_proj", None)
    if gate_up is None or down is None or gate_up.ndim != 3 or down.ndim != 3:
        raise PykernelsError(f"{where} has experts of a layout that is not known", hint)
    E, H, I = down.shape  # noqa: E741
    if gate_up.shape != (E, 2 * I, H):
        raise PykernelsError(f"{where} has experts of a layout that is not known", hint)
    return MoEShape(E=E, H=H, I=I, topk=int(block.gate.top_k))


def routed_experts(model: nn.Module) -> list[RoutedExperts]:
    """The packed experts of a model, in the order of its layers."""
    blocks = (module for module in model.modules() if isinstance(module, FusedMoE))
    return [block.routed for block in blocks if block.routed is not None]
