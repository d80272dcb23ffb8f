"""The routed experts of one layer on the GPU: gate and up, down, and the sum over a token's experts.

Three launches (and two that quantize, with E4M3 activations), none of which depends on the routing
but by what it reads: a captured graph replays with other tokens and other experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ..errors import PykernelsError
from ..quant import Format, Weight
from ..shapes import MoEShape
from .combine import combine
from .grouped_gemm import Sorted, check_sorted, multiply, path_of
from .launch import arch, check_device
from .matrices import Matrices, pack_for_gpu, supports_format, unpack_from_gpu
from .plan import GemmPlan, gemm_plan
from .quantize import quantize_fp8

ACTIVATIONS = ("bf16", "fp8")


@dataclass(frozen=True)
class Experts:
    """A layer's experts on the GPU, or as many of them as its slots hold.

    Attributes:
        fmt: the format they were quantized in.
        gate_up: 2 matrices [I, H] a slot: gate of slot s is number 2 s, up number 2 s + 1.
        down: a matrix [H, I] a slot.
        slots: int32 [E]: the slot of each expert, negative if it has none (what it would have
            contributed is left out); None: expert e is in slot e.
    """

    fmt: Format
    gate_up: Matrices
    down: Matrices
    slots: torch.Tensor | None = None

    @property
    def E(self) -> int:
        return len(self.down) if self.slots is None else self.slots.shape[0]

    @property
    def H(self) -> int:
        return self.down.N

    @property
    def I(self) -> int:  # noqa: E743 - the house's letter for the intermediate size
        return self.down.K

    @classmethod
    def pack(
        cls, fmt: Format, experts: Sequence[tuple[Weight, Weight, Weight]], device: torch.device
    ) -> Experts:
        """From (gate, up, down) of each expert, as a checkpoint (or ``PackedExperts``) has them."""
        both = [weight for gate, up, _ in experts for weight in (gate, up)]
        stacks = (pack_for_gpu(fmt, both), pack_for_gpu(fmt, [down for *_, down in experts]))
        return cls(fmt, *(stack.to(device) for stack in stacks))

    def with_slots(self, slots: torch.Tensor) -> Experts:
        """The same matrices under another table of slots."""
        return replace(self, slots=slots)

    def unpack(self, expert: int) -> tuple[Weight, Weight, Weight]:
        """(gate, up, down) of one expert on the CPU, as the twin in ``ref`` reads them."""
        slot = expert if self.slots is None else int(self.slots[expert])
        gate, up = (unpack_from_gpu(self.fmt, self.gate_up, 2 * slot + i) for i in range(2))
        return gate, up, unpack_from_gpu(self.fmt, self.down, slot)


def supports(
    shape: MoEShape, fmt: Format, device: torch.device, activations: str = "bf16"
) -> str | None:
    """None if ``moe_ffn`` runs these experts there, or the reason why not."""
    from .launch import supports as device_supports

    if reason := device_supports(device):
        return reason
    if activations not in ACTIVATIONS:
        return f"there are no {activations!r} activations (only {', '.join(ACTIVATIONS)})"
    if activations == "fp8" and fmt.name != "fp8":
        return f"{fmt.name} weights are not multiplied with fp8 activations"
    return supports_format(fmt, shape.H) or supports_format(fmt, shape.I)


def gate_up(
    x: torch.Tensor,
    experts: Experts,
    groups: Sorted,
    *,
    activations: str = "bf16",
    plan: GemmPlan | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``silu(x @ gate.T) * (x @ up.T)`` of each sorted slot's token: bfloat16 [S, I].

    Args:
        x: bfloat16 [T, H].
        groups: the slots sorted by expert; ``groups.slots`` is replaced by the experts' table.
    """
    check_device(x, experts.gate_up.data, groups.order)
    S = x.shape[0] * groups.topk
    groups = replace(groups, slots=experts.slots)
    check_sorted(groups, S)
    _check_inputs(x, experts.H, "x")
    _check_activations(experts, activations)
    if out is None:
        out = torch.empty(S, experts.I, dtype=torch.bfloat16, device=x.device)
    rows, scale = quantize_fp8(x) if activations == "fp8" else (x, None)
    plan = plan or _plan("gate_up", experts.gate_up, activations, S, experts.E, x.device)
    multiply(
        rows, experts.gate_up, out, plan, x_scale=scale, groups=groups, gated=True, gather=True
    )
    return out


def down(
    h: torch.Tensor,
    experts: Experts,
    groups: Sorted,
    weights: torch.Tensor,
    *,
    activations: str = "bf16",
    plan: GemmPlan | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``weights[slot] * (h @ down.T)`` by slot (not sorted any more): bfloat16 [S, H].

    Args:
        h: bfloat16 [S, I], sorted.
        weights: float32 [S], by slot.
    """
    check_device(h, experts.down.data, groups.order, weights)
    S = h.shape[0]
    groups = replace(groups, slots=experts.slots)
    check_sorted(groups, S)
    _check_inputs(h, experts.I, "h")
    _check_activations(experts, activations)
    if weights.shape != (S,) or weights.dtype != torch.float32:
        raise PykernelsError(
            f"router weights are {weights.dtype} {tuple(weights.shape)}", f"Give float32 [{S}]"
        )
    if out is None:
        out = torch.empty(S, experts.H, dtype=torch.bfloat16, device=h.device)
    rows, scale = quantize_fp8(h) if activations == "fp8" else (h, None)
    plan = plan or _plan("down", experts.down, activations, S, experts.E, h.device)
    multiply(rows, experts.down, out, plan, x_scale=scale, groups=groups, row_weights=weights)
    return out


def moe_ffn(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    experts: Experts,
    *,
    permute: Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]],
    activations: str = "bf16",
    plans: tuple[GemmPlan, GemmPlan] | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``sum_k weights[t, k] * expert[ids[t, k]](x[t])``.

    Args:
        x: bfloat16 [T, H].
        ids: int [T, topk].
        weights: float32 [T, topk].
        permute: (ids, E) -> (order int32 [T * topk], starts int32 [E + 1]).
        activations: "bf16"; "fp8" (fp8 weights only) multiplies E4M3 inputs, which are quantized
            for each token and 128 inputs, on E4M3 tensor cores where the GPU has them.
        plans: of gate_up and down, in place of the table's.

    Returns:
        bfloat16 [T, H]: products are added in float32; h, and each expert's weighted output, are
        rounded to bfloat16 once.

    Raises:
        PykernelsError: tensors on several devices, of other shapes or dtypes, or a GPU or format
            that has no kernel.
    """
    check_device(x, ids, weights)
    T, H = x.shape
    if ids.shape != weights.shape or ids.ndim != 2 or ids.shape[0] != T:
        raise PykernelsError(
            f"ids {tuple(ids.shape)} and weights {tuple(weights.shape)} for {T} tokens",
            "Give both as [T, topk]",
        )
    if out is None:
        out = torch.empty(T, H, dtype=torch.bfloat16, device=x.device)
    if not T:
        return out
    first, second = plans or (None, None)
    groups = Sorted(*permute(ids, experts.E), ids.shape[1])
    h = gate_up(x, experts, groups, activations=activations, plan=first)
    slot_weights = weights.contiguous().view(-1)
    y = down(h, experts, groups, slot_weights, activations=activations, plan=second)
    combine(y, out)
    return out


def _plan(
    op: str, stack: Matrices, activations: str, S: int, E: int, device: torch.device
) -> GemmPlan:
    path = path_of(stack, activations == "fp8")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    key = stack.kind if path == "decoded" else path
    return gemm_plan(op, key, arch(device), S / min(E, max(S, 1)), stack.N, stack.K, name)


def _check_inputs(x: torch.Tensor, K: int, name: str) -> None:
    if x.dtype != torch.bfloat16 or x.ndim != 2 or x.shape[1] != K or not x.is_contiguous():
        raise PykernelsError(
            f"{name} is {x.dtype} {tuple(x.shape)}", f"Give contiguous bfloat16 [rows, {K}]"
        )


def _check_activations(experts: Experts, activations: str) -> None:
    shape = MoEShape(experts.E, experts.H, experts.I, 1)
    if reason := supports(shape, experts.fmt, experts.down.data.device, activations):
        raise PykernelsError(f"no GPU kernel multiplies these experts: {reason}", "See supports()")
