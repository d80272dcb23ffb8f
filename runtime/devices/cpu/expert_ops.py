"""Routers and experts as jobs."""

from __future__ import annotations

import functools

import torch

from pykernels.cpu import MoECall
from pykernels.cpu.gemv.common import MAX_TOKENS
from pykernels.cpu.moe.kernel import join
from pykernels.cpu.moe.plan import plan
from pykernels.cpu.place_routing import PLACE, make_place
from pykernels.cpu.router import ROUTER, make_router
from pykernels.cpu.split_routing import MAX_TOPK, SPLIT, make_split
from pykernels.errors import PykernelsError
from pykernels.quant.split import SplitExperts

from ...program import Node
from ...workers.job import Job
from ...workers.moe_job import MOE, barrier_bytes, describe, make_moe
from .context import Context


def router(ctx: Context, node: Node) -> list[Job]:
    logits, ids, weights = node.inputs["logits"], node.outputs["ids"], node.outputs["weights"]
    spec, bias = node.attr("spec"), ctx.optional(node, "bias")
    factors = ctx.optional(node, "factors")
    setup, run = make_router()
    record = ctx.record(
        ROUTER,
        count_at=ctx.count_at(logits),
        logits=ctx.at(logits),
        logits_stride=ctx.stride(logits),
        bias=0 if bias is None else ctx.retain(bias),
        E=node.attr("experts"),
        topk=spec.topk,
        sigmoid=spec.scoring == "sigmoid",
        renormalize=spec.renormalize,
        min_sum=ctx.bits(spec.min_sum),
        groups=spec.groups,
        group_topk=spec.group_topk,
        top2=spec.group_score == "top2",
        scale=ctx.bits(spec.scale),
        factors=0 if factors is None else ctx.retain(factors),
        ids=ctx.at(ids),
        weights=ctx.at(weights),
        width=ctx.program.shape(ids)[1],
        chunk=8,
    )
    return [Job(node.name, run.address, record, setup.address)]


def split_routing(ctx: Context, node: Node) -> list[Job]:
    """A token's experts in two parts, the second of which may be dropped."""
    ids, weights = node.inputs["ids"], node.inputs["weights"]
    topk = ctx.program.shape(ids)[1]
    if topk > MAX_TOPK:
        raise PykernelsError(
            f"{node.name} parts {topk} experts of a token", f"It can part {MAX_TOPK} at most"
        )
    setup, run = make_split()
    record = ctx.record(
        SPLIT,
        count_at=ctx.count_at(ids),
        ids=ctx.at(ids),
        weights=ctx.at(weights),
        topk=topk,
        last=node.attr("last"),
        **{name: ctx.at(whole) for name, whole in node.inputs.items() if name == "whole"},
        **{name: ctx.at(out) for name, out in node.outputs.items()},
    )
    return [Job(node.name, run.address, record, setup.address)]


def place_routing(ctx: Context, node: Node) -> list[Job]:
    """A token's experts in two parts: those in slots, and the others."""
    ids, slots = node.inputs["ids"], node.inputs["slots"]
    setup, run = make_place()
    record = ctx.record(
        PLACE,
        count_at=ctx.count_at(ids),
        ids=ctx.at(ids),
        slots=ctx.at(slots),
        E=ctx.program.shape(slots)[0],
        topk=ctx.program.shape(ids)[1],
        **{name: ctx.at(out) for name, out in node.outputs.items()},
    )
    return [Job(node.name, run.address, record, setup.address)]


def moe_ffn(ctx: Context, node: Node) -> list[Job]:
    """Routed experts; or a dense MLP as the one expert that every token takes."""
    x, out = node.inputs["x"], node.outputs["out"]
    experts, activations = ctx.weight(node, "experts"), node.attr("activations")
    if isinstance(experts, SplitExperts):
        raise PykernelsError(
            f"{node.name} was loaded in {len(experts.slices)} slices, the pool is on one NUMA node",
            "Load the model for the nodes of the pool",
        )
    gate_up, down = (
        ctx.kernel_of(fmt.name, activations) for fmt in (experts.fmt, experts.down_fmt)
    )
    kernel = join(gate_up, down, experts.shape.spec)
    rows, jobs = ctx.rows(node, x, gate_up, False)
    T = ctx.most(x)
    topk = ctx.program.shape(node.inputs["ids"])[1] if "ids" in node.inputs else 1
    moe_plan = plan(
        experts.shape,
        experts.fmt,
        ctx.workers(node),
        1 if T <= MAX_TOKENS else T,
        max(ctx.gemm_from(gate_up), ctx.gemm_from(down)),
    )
    call = MoECall(experts, kernel, ctx.workspace(node), ctx.pool.threads, moe_plan)
    call.bind(T, topk, rows.address, rows.stride, ctx.at(out), ctx.stride(out))
    ctx.retain(call.args)
    ctx.calls.append(call)
    if "ids" in node.inputs:
        ids, weights = (ctx.at(node.inputs[name]) for name in ("ids", "weights"))
    else:
        ids = ctx.retain(torch.zeros(T, dtype=torch.int64, device="cpu"))
        weights = ctx.retain(torch.ones(T, dtype=torch.float32, device="cpu"))
    setup, run = make_moe()
    record = ctx.record(
        MOE,
        ring=ctx.pool.ring,
        count_at=ctx.count_at(x),
        args=call.address,
        ids=ids,
        weights=weights,
        barriers=ctx.allocate(barrier_bytes(experts.shape.E, call.down_chunks)),
    )
    describe_task = functools.partial(describe, call.args)
    job = Job(node.name, run.address, record, setup.address, describe=describe_task, node=node.numa)
    return [*jobs, job]
