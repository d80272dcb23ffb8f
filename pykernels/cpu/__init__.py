"""CPU kernels: serial, allocation-free tiles that ``runtime`` spreads over threads.

The ops that are exported here run them on the calling thread alone, each the twin of the op of its
name in ``pykernels.ref``.
"""

from __future__ import annotations

import torch

from ..quant import PackedExperts
from . import raised
from .intrin.sync import call_task
from .jit import kernel
from .moe.call import MoECall, MoEWorkspace, contiguous_rows
from .moe.kernel import kernel_of, make_kernel, make_routines
from .moe.plan import MoEPlan, plan
from .ops.attention import gqa_decode, gqa_prefill, mla_decode
from .ops.delta_net import causal_conv1d, gated_delta_rule
from .ops.embedding import embed
from .ops.gate import delta_gates, gated_rms_norm, sigmoid_mul
from .ops.linear import linear
from .ops.norm import rms_norm
from .ops.rope import gqa_rope_cache_write, mla_rope_cache_write, rope_table
from .ops.router import router
from .sampling import sample, sample_requests
from .weights.pack import make_pack, pack_job, packs_scales


@kernel()
def _run_stages(rows, pack, gate_up, down, args, row_tasks, pack_tasks, gate_up_tasks, down_tasks):
    for index in range(row_tasks):
        call_task(rows, args, index, 0)
    for index in range(pack_tasks):
        call_task(pack, args, index, 0)
    for index in range(gate_up_tasks):
        call_task(gate_up, args, index, 0)
    for index in range(down_tasks):
        call_task(down, args, index, 0)


def run_serially(
    call: MoECall, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    """Prepares a call (``MoECall.prepare``) and runs all its tasks on this thread; returns y."""
    x = contiguous_rows(x)
    tasks, stages = call.prepare(x, ids, weights, y), call.kernel.stages
    _run_stages(
        stages.rows.address,
        stages.pack.address,
        stages.gate_up.address,
        stages.down.address,
        call.address,
        tasks.row_tasks,
        tasks.pack_tasks,
        tasks.gate_up_tasks,
        tasks.down_chunks * tasks.active,
    )
    if int(call.args["raised"][0]):
        raise raised.take() or RuntimeError("a kernel raised")
    return y


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

    The fast twin of ``pykernels.ref.moe_ffn``; ``runtime.experts.routed`` is this on many threads.

    Args:
        x: bf16 or float32 [T, H]; the kernels take it as bf16.
        ids: int64 [T, topk].
        weights: float32 [T, topk].
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


__all__ = [
    "MoECall",
    "MoEPlan",
    "MoEWorkspace",
    "causal_conv1d",
    "contiguous_rows",
    "delta_gates",
    "embed",
    "gated_delta_rule",
    "gated_rms_norm",
    "gqa_decode",
    "gqa_prefill",
    "gqa_rope_cache_write",
    "linear",
    "make_kernel",
    "make_pack",
    "make_routines",
    "mla_decode",
    "mla_rope_cache_write",
    "moe_ffn",
    "pack_job",
    "packs_scales",
    "plan",
    "rms_norm",
    "rope_table",
    "router",
    "run_serially",
    "sample",
    "sample_requests",
    "sigmoid_mul",
]
