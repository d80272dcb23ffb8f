"""Routers and experts as jobs."""

from __future__ import annotations

import functools

import torch

from pykernels.cpu import MoECall
from pykernels.cpu.gemv.common import MAX_TOKENS
from pykernels.cpu.moe.kernel import join
from pykernels.cpu.moe.plan import plan
from pykernels.cpu.router import ROUTER, make_router
from pykernels.cpu.split_routing import MAX_TOPK, SPLIT, make_split
from pykernels.errors import PykernelsError

from ...program import Node
from ...workers.job import Job
from ...workers.moe_job import MOE, barrier_bytes, describe, make_moe
from .context import Context


def router(step: Context, node: Node) -> list[Job]:
    logits, ids, weights = node.inputs["logits"], node.outputs["ids"], node.outputs["weights"]
    spec, bias = node.attr("spec"), node.weights.get("bias")
    opening, run = make_router()
    record = step.record(
        ROUTER,
        count_at=step.count_at(logits),
        logits=step.at(logits),
        logits_stride=step.stride(logits),
        bias=0 if bias is None else step.keep(bias.float().contiguous()),
        E=node.attr("experts"),
        topk=spec.topk,
        sigmoid=spec.scoring == "sigmoid",
        renormalize=spec.renormalize,
        min_sum=step.bits(spec.min_sum),
        groups=spec.groups,
        group_topk=spec.group_topk,
        top2=spec.group_score == "top2",
        scale=step.bits(spec.scale),
        ids=step.at(ids),
        weights=step.at(weights),
        width=step.program.shape(ids)[1],
        chunk=8,
    )
    return [Job(node.name, run.address, record, opening.address)]


def split_routing(step: Context, node: Node) -> list[Job]:
    """A token's experts in two parts, the second of which may be dropped."""
    ids, weights = node.inputs["ids"], node.inputs["weights"]
    topk = step.program.shape(ids)[1]
    if topk > MAX_TOPK:
        raise PykernelsError(
            f"{node.name} parts {topk} experts of a token", f"It can part {MAX_TOPK} at most"
        )
    opening, run = make_split()
    record = step.record(
        SPLIT,
        count_at=step.count_at(ids),
        ids=step.at(ids),
        weights=step.at(weights),
        topk=topk,
        last=node.attr("last"),
        **{name: step.at(out) for name, out in node.outputs.items()},
    )
    return [Job(node.name, run.address, record, opening.address)]


def moe_ffn(step: Context, node: Node) -> list[Job]:
    """Routed experts; or a dense MLP as the one expert that every token takes."""
    x, out = node.inputs["x"], node.outputs["out"]
    experts, activations = node.weights["experts"], node.attr("activations")
    gate_up, down = (
        step.kernel_of(fmt.name, activations) for fmt in (experts.fmt, experts.down_fmt)
    )
    kernel = join(gate_up, down, experts.shape.spec)
    rows, jobs = step.rows(node, x, gate_up, False)
    T = step.most(x)
    topk = step.program.shape(node.inputs["ids"])[1] if "ids" in node.inputs else 1
    cut = plan(experts.shape, experts.fmt, step.pool.threads, 1 if T <= MAX_TOKENS else T,
               max(step.gemm_from(gate_up), step.gemm_from(down)))  # fmt: skip
    call = MoECall(experts, kernel, step.workspace(node.role), step.pool.threads, cut)
    call.bind(T, topk, rows.address, rows.stride, step.at(out), step.stride(out))
    step.keep(call.job)
    step.calls.append(call)
    if "ids" in node.inputs:
        ids, weights = (step.at(node.inputs[name]) for name in ("ids", "weights"))
    else:
        ids = step.keep(torch.zeros(T, dtype=torch.int64, device="cpu"))
        weights = step.keep(torch.ones(T, dtype=torch.float32, device="cpu"))
    opening, run = make_moe()
    record = step.record(
        MOE, ring=step.pool.ring, count_at=step.count_at(x), job=call.address, ids=ids,
        weights=weights, barriers=step.room(barrier_bytes(experts.shape.E, call.down_chunks)),
    )  # fmt: skip
    tell = functools.partial(describe, call.job)
    return [*jobs, Job(node.name, run.address, record, opening.address, describe=tell)]
