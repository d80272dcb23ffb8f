"""CPU kernels: serial, allocation-free tiles that ``runtime`` spreads over threads."""

from __future__ import annotations

import torch

from ..quant import PackedExperts
from ..registry import resolve
from ..target import detect
from .intrin.sync import call_task
from .jit import kernel
from .moe import make_kernel
from .pack import make_pack, pack_job
from .plan import MoEPlan, plan
from .workspace import MoECall, Workspace


@kernel()
def _run_serially(gate_up, down, job, gate_up_tasks, down_tasks):
    for index in range(gate_up_tasks):
        call_task(gate_up, job, index, 0)
    for index in range(down_tasks):
        call_task(down, job, index, 0)


def moe_ffn(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    experts: PackedExperts,
    *,
    kernel: str = "auto",
    cut: MoEPlan | None = None,
) -> torch.Tensor:
    """``sum_k weights[t, k] * expert[ids[t, k]](x[t])`` on the calling thread alone.

    The fast twin of ``pykernels.ref.moe_ffn``; ``runtime.experts`` is this on many threads.

    Args:
        x: bf16 or float32 [T, H]; the kernels take it as bf16.
        ids: int64 [T, topk].
        weights: float32 [T, topk].
        experts: all E experts of the layer, packed.
        kernel: a backend's name, or "auto".
        cut: how the call is cut into tasks; the default is ``plan(...)``'s.

    Returns:
        [T, H] in x's dtype. Sums are float32; ``h = silu(gate) * up`` is rounded to bf16.

    Raises:
        PykernelsError: inputs that do not fit, or a kernel that cannot run here.
    """
    backend = resolve(kernel, experts.fmt.name, detect())
    stages = make_kernel(backend.name, experts.fmt.name)
    call = MoECall(experts, stages, Workspace(), cut=cut)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    active, gate_up_tasks, chunks = call.prepare(x, ids, weights, y)
    _run_serially(
        stages.gate_up.address, stages.down.address, call.address, gate_up_tasks, chunks * active
    )
    return y


__all__ = [
    "MoECall",
    "MoEPlan",
    "Workspace",
    "make_kernel",
    "make_pack",
    "moe_ffn",
    "pack_job",
    "plan",
]
