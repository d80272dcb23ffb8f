"""The experts of a layer on the calling thread."""

from __future__ import annotations

import torch

from ...quant import PackedExperts
from .. import raised
from ..activations.row_layout import row_bytes
from ..intrin.sync import call_task
from ..jit import kernel
from ..moe.call import BAD_EXPERT, MoECall, MoEWorkspace, take_call
from ..moe.checks import bad_routing, check_call, check_readable
from ..moe.kernel import kernel_of
from ..moe.plan import MoEPlan
from .rows import make_rows


@kernel()
def _take(args, ids, weights):
    return take_call(args, ids, weights)


@kernel()
def _run_stages(pack, gate_up, down, args, pack_tasks, gate_up_tasks, down_tasks):
    for index in range(pack_tasks):
        call_task(pack, args, index, 0)
    for index in range(gate_up_tasks):
        call_task(gate_up, args, index, 0)
    for index in range(down_tasks):
        call_task(down, args, index, 0)


def take_serially(
    call: MoECall, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, y: torch.Tensor
) -> object:
    """Binds a call and sorts its routing; its stages (``call.tasks``) are to be run then.

    Args:
        x, ids, weights: as of ``moe_ffn``.
        y: float32 [T, H], where the result goes, with the numbers of a row side by side.

    Returns:
        what must live until they have run.

    Raises:
        PykernelsError: inputs that do not fit.
    """
    shape, routines = call.experts.shape, call.kernel.gate_up
    check_call(x, ids, weights, shape.H)
    check_readable("y", y)  # a FakeTensorMode of the caller would have made it a fake one
    ids = ids.contiguous().resolve_neg()
    weights = weights.float().contiguous().resolve_neg()
    padded = call.experts.fmt.padded_k(shape.H)
    rows, _ = make_rows(x.detach().float().contiguous().resolve_neg(), padded, routines)
    stride = row_bytes(padded, routines.row_formats[0])
    T, topk = ids.shape
    call.bind(T, topk, rows.data_ptr(), stride, y.data_ptr(), 4 * y.stride(0))
    if _take(call.address, ids.data_ptr(), weights.data_ptr()) == BAD_EXPERT:
        raise bad_routing(ids, shape.E)
    return rows, ids, weights, y


def run_serially(
    call: MoECall, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    """Runs all tasks of a call on this thread; returns y.

    Args:
        y: float32 or bfloat16 [T, H], with the numbers of a row side by side; the rest as of
            ``moe_ffn``.

    Raises:
        PykernelsError: inputs that do not fit.
    """
    exact = y.dtype == torch.float32
    out = y if exact else torch.empty(y.shape, dtype=torch.float32, device="cpu")
    held = take_serially(call, x, ids, weights, out)
    stages, tasks = call.kernel.stages, call.tasks
    _run_stages(
        stages.pack.address,
        stages.gate_up.address,
        stages.down.address,
        call.address,
        tasks.pack,
        tasks.gate_up,
        tasks.down_chunks * tasks.active,
    )
    del held
    if int(call.args["raised"][0]):
        raise raised.take() or RuntimeError("a kernel raised")
    return y if exact else y.copy_(out)


def moe_ffn(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    experts: PackedExperts,
    *,
    kernel: str = "auto",
    activations: str = "bf16",
    moe_plan: MoEPlan | None = None,
) -> torch.Tensor:
    """``sum_k weights[t, k] * expert[ids[t, k]](x[t])`` on the calling thread alone.

    The fast twin of ``pykernels.ref.moe_ffn``.

    Args:
        x: bf16 or float32 [T, H]; the kernels take it as bf16.
        ids: int64 [T, topk]; -1: none, which adds nothing.
        weights: real [T, topk], taken as float32.
        experts: all E experts of the layer, packed.
        kernel: a backend's name, or "auto".
        activations: "bf16" for exact products, "int8" for ones of dynamically quantized inputs.
        moe_plan: how the call is divided into tasks; the default is ``plan(...)``'s.

    Returns:
        [T, H] in x's dtype. Sums are float32; ``h = silu(gate) * up`` is rounded to bf16.

    Raises:
        PykernelsError: inputs that do not fit, or a kernel that cannot run here.
    """
    call = MoECall(
        experts, kernel_of(experts, kernel, activations), MoEWorkspace(), moe_plan=moe_plan
    )
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return run_serially(call, x, ids, weights, y)
