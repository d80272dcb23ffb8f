"""Operators whose routed experts run on the CPU kernels: `FusedMoE`, a Hugging Face MoE block, and
`FusedExperts`, the experts module in one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from pykernels import quant
from pykernels.errors import PykernelsError
from pykernels.quant import Biases, Weight
from pykernels.registry import ACTIVATIONS
from pykernels.shapes import MoEShape
from runtime.devices.cpu.routed import CpuExperts

from .recognise import experts_per_token, experts_shape, in_turns
from .registry import ModuleContext, Operator, operator

R = TypeVar("R")

FORMATS = ("auto", *quant.FORMATS)
SHARED = ("shared_experts", "shared_expert", "shared_expert_gate")
"""Children of a block that every token passes through, under the names that models give them."""


@operator
class FusedMoE(Operator):
    """Router and shared experts as they were; routed experts packed for the CPU.

    Replaces a whole block, so that the workers compute the routed experts beside the shared ones.
    The packed weights are neither parameters nor buffers: `.to()` leaves them where they are.
    Inference only.

    Rule's kwargs: `kernel` auto | amx | avx512 | avx2 | generic (default: the caller's choice);
    `format` auto (as stored), or one of `pykernels.quant.FORMATS` to convert to while loading;
    `activations` bf16 (exact), or int8 for integer formats, about 1 % off and faster; `defer`: of a
    token's experts, how many join one layer later in the engine, if its caller does not say;
    `stay`: on the CPU even where a GPU has room for them, if its caller does not say. Rule's
    device: `cpu` only.

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
        defer: int = 0,
        stay: bool = False,
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
        if type(defer) is not int or defer < 0:
            raise PykernelsError(f"{context.name}: {defer!r} experts deferred", "Give a number")
        if type(stay) is not bool:
            raise PykernelsError(f"{context.name}: stay is {stay!r}", "Use true or false")
        if context.device not in (None, "cpu"):
            raise PykernelsError(
                f"{context.name}: routed experts cannot run on {context.device!r}",
                "Write device: cpu in the rule, or drop the rule to leave the block as it is",
            )
        self.name = context.name
        self.kernel = kernel or context.kernel
        self.format = format
        self.activations = activations
        self.defer, self.stay = defer, stay
        self.shape = self._take(original, context)
        self.routed: CpuExperts | None = None

    def _take(self, original: Any, context: ModuleContext) -> MoEShape:
        """Sizes of the experts; keeps of what is replaced what is to run on. `PykernelsError` if it
        cannot be replaced."""
        shape = block_shape(original, context)
        self.in_turns = in_turns(original.experts)
        self.gate: nn.Module = original.gate
        for child in SHARED:
            if getattr(original, child, None) is not None:
                setattr(self, child, getattr(original, child))
        return shape

    @property
    def stored_name(self) -> str:
        """What the checkpoint's names of the experts begin with."""
        return f"{self.name}.experts"

    def allocate(self, stored: str, down_stored: str | None = None) -> CpuExperts:
        """Make room for the packed experts of a checkpoint that stores them as `stored`, and down
        as `down_stored` (None: the same)."""
        fmt, down_fmt = self.packed_format(stored), self.packed_format(down_stored or stored)
        self.routed = CpuExperts(
            self.shape, fmt, kernel=self.kernel, activations=self.activations, down_fmt=down_fmt
        )
        return self.routed

    def packed_format(self, stored: str) -> str:
        """Name of the format that a matrix is packed in, if the checkpoint has `stored`."""
        return stored if self.format == "auto" else self.format

    def load_expert(
        self, expert: int, gate: Weight, up: Weight, down: Weight, biases: Biases | None = None
    ) -> None:
        """Packs one expert, in the formats that `allocate` was given."""
        assert self.routed is not None
        self.routed.load_expert(expert, gate, up, down, biases=biases)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Same as the block's own: [..., H] in and out, in the same dtype.

        Raises `PykernelsError` in training mode, on inputs that need gradients, and before the
        weights are loaded.
        """
        self._ready(hidden_states)
        x = hidden_states.reshape(-1, self.shape.H)  # [T, H]
        _, weights, ids = self.gate(x)  # [T, topk] both
        # The workers are busy with the routed experts meanwhile.
        out, shared = self._run(x, ids, weights, lambda: self._shared(x))
        if shared is not None:
            out = out + shared
        return out.reshape(hidden_states.shape)

    def _run(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, meanwhile: Callable[[], R]
    ) -> tuple[torch.Tensor, R]:
        """The routed experts' result, in the shape and dtype of `x`, and that of `meanwhile`."""
        routed, rows = self._ready(x), x.reshape(-1, self.shape.H)  # [T, H]
        # float16 has no expert kernel: its values fit float32 exactly.
        rows = rows.float() if x.dtype == torch.float16 else rows
        y, other = routed.run(rows, ids.to(torch.int64), weights, meanwhile)
        return y.to(x.dtype).reshape(x.shape), other

    def extra_repr(self) -> str:
        packed = "not loaded" if self.routed is None else "on the CPU"
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

    def _ready(self, hidden_states: torch.Tensor) -> CpuExperts:
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


@operator
class FusedExperts(FusedMoE):
    """Routed experts packed for the CPU; the block around them stays transformers' own.

    Replaces the experts alone, in every family whose block calls `experts(hidden_states, ids,
    weights)`, whatever its router is and whatever runs beside. The rest is as in `FusedMoE`.
    """

    def _take(self, original: Any, context: ModuleContext) -> MoEShape:
        topk = experts_per_token(context.config)
        self.in_turns = in_turns(original)
        return experts_shape(original, context.name, topk if isinstance(topk, int) else 1)

    @property
    def stored_name(self) -> str:
        return self.name

    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Same as the module's own: [..., H] in and out, in the same dtype.

        Args:
            top_k_index: expert numbers [T, topk]; ``top_k_weights``: of each one's output.

        Raises `PykernelsError` in training mode, on inputs that need gradients, and before the
        weights are loaded.
        """
        return self._run(hidden_states, top_k_index, top_k_weights, lambda: None)[0]


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


def routed_experts(model: nn.Module) -> list[CpuExperts]:
    """The packed experts of a model, in the order of its layers."""
    modules = (module for module in model.modules() if isinstance(module, FusedMoE))
    return [module.routed for module in modules if module.routed is not None]


def deferred_by_rules(model: nn.Module) -> int:
    """How many experts of a token rules defer.

    Raises:
        PykernelsError: not the same number in all layers.
    """
    blocks = (module for module in model.modules() if isinstance(module, FusedMoE))
    by_count = {block.defer: block.name for block in blocks}
    if len(by_count) > 1:
        (one, here), (other, there), *_ = by_count.items()
        raise PykernelsError(
            f"rules defer {one} experts in {here} and {other} in {there}",
            "Defer as many in all layers",
        )
    return next(iter(by_count), 0)


def stay_on_cpu(model: nn.Module) -> bool:
    """Whether a rule keeps routed experts on the CPU."""
    return any(module.stay for module in model.modules() if isinstance(module, FusedMoE))
