"""The routed experts of a layer on the GPU: gate and up, down, the sum over a token's experts.

Sort, two grouped products, weighted sum: no launch depends on the routing but by what it reads, so
a captured graph replays with other tokens and other experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton

from ...errors import PykernelsError
from ...quant import Format, Weight
from ...shapes import MoEShape, SortedSlots
from ..common.launch import check_device
from ..common.launch import supports as device_supports
from ..common.strides import check_out
from ..gemm.grouped import Plan, multiply
from ..gemm.weights import Matrices, empty_for_gpu, pack_for_gpu, supports_format, unpack_from_gpu
from ..plans.gemm import GemmPlan
from ..quantize import GROUP, quantize_fp8
from .permute import check_sum, permute, sort_slots, unpermute
from .select import select

ACTIVATIONS = ("bf16", "fp8")


@dataclass(frozen=True)
class Experts:
    """A layer's experts on the GPU, or as many of them as its slots hold.

    Attributes:
        fmt: the format they were quantized in.
        gate_up: 2 matrices [I, H] a slot: gate of slot s is number 2 s, up number 2 s + 1.
        down: a matrix [H, I] a slot.
        slots: contiguous int32 [E]: the slot of each expert, negative if it has none (what it would
            have contributed is left out); None: expert e is in slot e.
    """

    fmt: Format
    gate_up: Matrices
    down: Matrices
    slots: torch.Tensor | None = None

    def __post_init__(self) -> None:
        both, down, slots = self.gate_up, self.down, self.slots
        if len(both) != 2 * len(down) or (both.N, both.K) != (down.K, down.N):
            raise PykernelsError(
                f"{len(both)} matrices [{both.N}, {both.K}] of gate and up beside {len(down)}"
                f" [{down.N}, {down.K}] of down",
                "Give two [I, H] and one [H, I] for each slot",
            )
        if slots is not None and (
            slots.dtype != torch.int32 or slots.ndim != 1 or not slots.is_contiguous()
        ):
            raise PykernelsError(
                f"the slot table is {slots.dtype} {tuple(slots.shape)}", "Give contiguous int32 [E]"
            )

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
        downs = [down for *_, down in experts]
        return cls(fmt, pack_for_gpu(fmt, both).to(device), pack_for_gpu(fmt, downs).to(device))

    @classmethod
    def empty(
        cls,
        fmt: Format,
        slots: int,
        H: int,
        I: int,  # noqa: E741
        device: torch.device,
    ) -> Experts:
        """Room for experts, to be copied into slot by slot."""
        return cls(
            fmt,
            empty_for_gpu(fmt, 2 * slots, I, H, device),
            empty_for_gpu(fmt, slots, H, I, device),
        )

    def with_slots(self, slots: torch.Tensor) -> Experts:
        """The same matrices under another table of slots."""
        return replace(self, slots=slots)

    def holds(self, expert: int) -> bool:
        """Whether there is such an expert, and it has a slot."""
        return 0 <= expert < self.E and (self.slots is None or int(self.slots[expert]) >= 0)

    def unpack(self, expert: int) -> tuple[Weight, Weight, Weight]:
        """(gate, up, down) of one expert on the CPU, as the twin in ``ref`` reads them.

        Raises:
            PykernelsError: it has no slot, or there is no such expert.
        """
        if not self.holds(expert):
            raise PykernelsError(
                f"expert {expert} of {self.E} is in no slot", "Ask for those that holds() has"
            )
        slot = expert if self.slots is None else int(self.slots[expert])
        gate, up = (unpack_from_gpu(self.fmt, self.gate_up, 2 * slot + i) for i in range(2))
        return gate, up, unpack_from_gpu(self.fmt, self.down, slot)


def supports(
    shape: MoEShape, fmt: Format, device: torch.device, activations: str = "bf16"
) -> str | None:
    """None if ``moe_ffn`` runs these experts there, or the reason why not."""
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
    order: SortedSlots,
    *,
    activations: str = "bf16",
    plan: Plan | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``silu(x @ gate.T) * (x @ up.T)`` of each sorted slot's token: bfloat16 [S, I].

    Args:
        x: bfloat16 [T, H].
        order: of T tokens; rows of slots that have no expert are not written.
    """
    S = _check_tokens(x, experts, order, activations)
    out = check_out(out, x, S, experts.I, dtype=torch.bfloat16)
    plan = plan or select("gate_up", experts.gate_up, activations, S, experts.E, x.device)
    _gate_up(x, experts, order, activations, plan, out, None)
    return out


def gate_up_quantized(
    x: torch.Tensor, experts: Experts, order: SortedSlots, *, plan: Plan | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``quantize_fp8`` of ``gate_up`` with fp8 activations, bit for bit; one launch where it can.

    Returns:
        (float8_e4m3fn [S, I], float32 scales [S, ceil(I / 128)]): what ``down`` takes.
    """
    S = _check_tokens(x, experts, order, "fp8")
    plan = plan or select("gate_up", experts.gate_up, "fp8", S, experts.E, x.device)
    if not isinstance(plan, GemmPlan) or not plan.warp_specialized:
        return quantize_fp8(gate_up(x, experts, order, activations="fp8", plan=plan))
    out = torch.empty(S, experts.I, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(S, triton.cdiv(experts.I, GROUP), dtype=torch.float32, device=x.device)
    _gate_up(x, experts, order, "fp8", plan, out, scale)
    return out, scale


def _gate_up(
    x: torch.Tensor,
    experts: Experts,
    order: SortedSlots,
    activations: str,
    plan: Plan,
    out: torch.Tensor,
    out_scale: torch.Tensor | None,
) -> None:
    rows, scale = x, None
    warp_specialized = isinstance(plan, GemmPlan) and plan.warp_specialized
    if activations == "fp8":
        rows, scale = quantize_fp8(x, order if warp_specialized else None)
    elif warp_specialized:
        rows = permute(x, order)
    multiply(
        rows, experts.gate_up, out, plan,
        x_scale=scale, order=order, table=experts.slots, gated=True, out_scale=out_scale,
    )  # fmt: skip


def down(
    h: torch.Tensor,
    experts: Experts,
    order: SortedSlots,
    *,
    activations: str = "bf16",
    plan: Plan | None = None,
    out: torch.Tensor | None = None,
    h_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """``h @ down.T`` of each sorted slot: bfloat16 [S, H], sorted; ``unpermute`` weights and adds.

    Args:
        h: bfloat16 [S, I], sorted.
        h_scale: of ``gate_up_quantized``, whose h is E4M3.
    """
    S = order.slots.shape[0]
    _check(h, experts.down, experts, order, activations, h_scale)
    if S != h.shape[0]:
        raise PykernelsError(f"{h.shape[0]} rows in an order of {S}", "Give gate_up's result")
    out = check_out(out, h, S, experts.H, dtype=torch.bfloat16)
    if activations == "fp8" and h_scale is None:
        h, h_scale = quantize_fp8(h)
    aligned = h.data_ptr() % 16 == 0
    plan = plan or select("down", experts.down, activations, S, experts.E, h.device, aligned)
    multiply(h, experts.down, out, plan, x_scale=h_scale, order=order, table=experts.slots)
    return out


def moe_ffn(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    experts: Experts,
    *,
    activations: str = "bf16",
    add: torch.Tensor | None = None,
    plans: tuple[Plan, Plan] | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``sum_k weights[t, k] * expert[ids[t, k]](x[t])``.

    Args:
        x: bfloat16 [T, H].
        ids: int32 or int64 [T, topk]; those outside ``0..E-1`` contribute nothing.
        weights: float32 [T, topk].
        activations: "bf16"; "fp8" (fp8 weights only) multiplies E4M3 inputs, which are quantized
            for each token and 128 inputs, on E4M3 tensor cores where the GPU has them.
        add: [T, H] that joins the sum, such as the shared experts' output.
        plans: of gate_up and down, in place of the table's.

    Returns:
        bfloat16 [T, H]: products are added in float32; h, and each expert's output, are rounded
        to bfloat16 once.

    Raises:
        PykernelsError: tensors on several devices, of other shapes or dtypes, or a GPU or format
            that has no kernel.
    """
    first, second = plans or (None, None)
    order = sort_slots(ids, experts.E)
    check_sum(order, weights, add, experts.H)
    if out is not None:
        check_out(out, order.slots, ids.shape[0], experts.H)
    scale = None
    if activations == "fp8":
        h, scale = gate_up_quantized(x, experts, order, plan=first)
    else:
        h = gate_up(x, experts, order, activations=activations, plan=first)
    y = down(h, experts, order, activations=activations, plan=second, h_scale=scale)
    return unpermute(y, order, weights, add, out)


def _check_tokens(x: torch.Tensor, experts: Experts, order: SortedSlots, activations: str) -> int:
    """Sorted slots. Raises PykernelsError unless the order is one of these tokens."""
    S = order.slots.shape[0]
    _check(x, experts.gate_up, experts, order, activations)
    if S != x.shape[0] * order.topk:
        raise PykernelsError(
            f"an order of {S} slots, top-{order.topk}, for {x.shape[0]} tokens", "Sort these tokens"
        )
    return S


def _check(
    x: torch.Tensor,
    stack: Matrices,
    experts: Experts,
    order: SortedSlots,
    activations: str,
    scale: torch.Tensor | None = None,
) -> None:
    """Raises PykernelsError unless a kernel multiplies these; a scale comes with E4M3 inputs."""
    table = experts.slots
    check_device(x, stack.data, order.slots, *(() if table is None else (table,)))
    dtype = torch.bfloat16 if scale is None else torch.float8_e4m3fn
    if x.dtype != dtype or x.ndim != 2 or x.shape[1] != stack.K or not x.is_contiguous():
        raise PykernelsError(
            f"the inputs are {x.dtype} {tuple(x.shape)}",
            f"Give contiguous {str(dtype).removeprefix('torch.')} [.., {stack.K}]",
        )
    if scale is not None and (
        activations != "fp8"
        or scale.shape != (x.shape[0], triton.cdiv(stack.K, GROUP))
        or scale.dtype != torch.float32
        or not scale.is_contiguous()
        or scale.device != x.device
    ):
        raise PykernelsError(
            f"scales {scale.dtype} {tuple(scale.shape)} of inputs with {activations} activations",
            "Give gate_up_quantized's, and fp8 activations",
        )
    if order.starts.shape != (experts.E + 1,):
        raise PykernelsError(
            f"an order of {order.starts.shape[0] - 1} experts for {experts.E}", "Sort for these"
        )
    shape = MoEShape(experts.E, experts.H, experts.I, 1)
    if reason := supports(shape, experts.fmt, x.device, activations):
        raise PykernelsError(f"no GPU kernel multiplies these experts: {reason}", "See supports()")
