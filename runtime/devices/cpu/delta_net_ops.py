"""The ops of gated delta nets, and the gates of heads, as jobs."""

from __future__ import annotations

from pykernels.cpu.delta_net.args import DELTA_RULE, plan
from pykernels.cpu.delta_net.conv import CONV, make_causal_conv1d
from pykernels.cpu.delta_net.gate import DELTA_GATES, GATE, make_delta_gates, make_gate
from pykernels.cpu.delta_net.kernel import make_delta_rule
from pykernels.cpu.vectors import width
from pykernels.errors import PykernelsError
from pykernels.target import detect

from ...passes.gpu.save_states import refuse_saved
from ...program import Node
from ...workers.job import Job
from .context import Context


def causal_conv1d(ctx: Context, node: Node) -> list[Job]:
    """A task has some channels of a sequence."""
    out, weight = node.outputs["out"], ctx.weight(node, "weight")
    K, C = weight.shape
    _check(node, "channels", C)
    gated, fields = "in_gate" in node.inputs, dict[str, int]()
    for name in ("x", "in_gate", "out_gate") if gated else ("x",):
        rows = node.inputs[name]
        fields[name] = ctx.at(rows) + 4 * node.attr(f"{name}_start")
        fields[f"{name}_stride"] = ctx.stride(rows)
    if "bias" in node.weights:
        fields["bias"] = ctx.retain(ctx.weight(node, "bias"))
    setup, run = make_causal_conv1d(K, bool(node.attr("silu")), gated, width(detect()))
    record = ctx.record(
        CONV,
        **_sequences(ctx, node, "conv"),
        **fields,
        weight=ctx.retain(weight),
        C=C,
        out=ctx.at(out),
        out_stride=ctx.stride(out),
    )
    return [Job(node.name, run.address, record, setup.address)]


def delta_gates(ctx: Context, node: Node) -> list[Job]:
    a, b = node.inputs["a"], node.inputs["b"]
    rate = ctx.weight(node, "rate")
    setup, run = make_delta_gates()
    record = ctx.record(
        DELTA_GATES,
        count_at=ctx.count_at(a),
        a=ctx.at(a) + 4 * node.attr("a_start"),
        a_stride=ctx.stride(a),
        b=ctx.at(b) + 4 * node.attr("b_start"),
        b_stride=ctx.stride(b),
        rate=ctx.retain(rate),
        dt_bias=ctx.retain(ctx.weight(node, "dt_bias")),
        HV=len(rate),
        g=ctx.at(node.outputs["g"]),
        beta=ctx.at(node.outputs["beta"]),
    )
    return [Job(node.name, run.address, record, setup.address)]


def gated_delta_rule(ctx: Context, node: Node) -> list[Job]:
    """A task has a head of a sequence, or some of its columns: as many tasks as all workers need
    where there is one sequence."""
    qkv, out, state = node.inputs["qkv"], node.outputs["out"], ctx.tensor(node.inputs["delta"])
    HK, (HV, DK, DV) = node.attr("HK"), state.shape[1:]
    _check(node, "numbers of a key", DK)
    _check(node, "numbers of a value", DV)
    kernel = make_delta_rule(DK, DV, width(detect()))
    rows, stride = ctx.at(qkv), ctx.stride(qkv)
    record = ctx.record(
        DELTA_RULE,
        **_sequences(ctx, node, "delta"),
        q=rows,
        q_stride=stride,
        k=rows + 4 * HK * DK,
        k_stride=stride,
        v=rows + 8 * HK * DK,
        v_stride=stride,
        g=ctx.at(node.inputs["g"]),
        g_stride=ctx.stride(node.inputs["g"]),
        beta=ctx.at(node.inputs["beta"]),
        beta_stride=ctx.stride(node.inputs["beta"]),
        HK=HK,
        HV=HV,
        group=1 if node.attr("tiled") else HV // HK,
        scale=ctx.bits(node.attr("scale")),
        eps=ctx.bits(node.attr("eps")),
        out=ctx.at(out),
        out_stride=ctx.stride(out),
        columns=plan(1, HV, DV, kernel.strip, ctx.workers(node)).columns,
    )
    return [Job(node.name, kernel.run.address, record, kernel.setup.address)]


def gated_rms_norm(ctx: Context, node: Node) -> list[Job]:
    weight = ctx.weight(node, "weight")
    return _gate(
        ctx,
        node,
        len(weight),
        {"weight": ctx.retain(weight), "eps": ctx.bits(node.attr("eps"))},
    )


def sigmoid_mul(ctx: Context, node: Node) -> list[Job]:
    return _gate(ctx, node, node.attr("D"), {})


def _gate(ctx: Context, node: Node, D: int, fields: dict[str, int]) -> list[Job]:
    x, gate, out = node.inputs["x"], node.inputs["gate"], node.outputs["out"]
    _check(node, "numbers of a head", D)
    setup, run = make_gate(width(detect()))
    record = ctx.record(
        GATE,
        count_at=ctx.count_at(x),
        x=ctx.at(x),
        x_stride=ctx.stride(x),
        gate=ctx.at(gate) + 4 * node.attr("gate_start"),
        gate_stride=ctx.stride(gate),
        gate_head_bytes=4 * D,
        heads=node.attr("heads"),
        D=D,
        out=ctx.at(out),
        out_stride=ctx.stride(out),
        **fields,
    )
    return [Job(node.name, run.address, record, setup.address)]


def _sequences(ctx: Context, node: Node, state: str) -> dict[str, int]:
    """The fields of a record that say where tokens and states lie."""
    refuse_saved(node)
    slots = node.inputs[state]
    return {
        "count_at": ctx.count_at(node.inputs["state_slots"]),
        "starts": ctx.at(node.inputs["query_starts"]),
        "lengths": ctx.at(node.inputs["query_lengths"]),
        "slots": ctx.at(node.inputs["state_slots"]),
        "past": ctx.at(node.inputs["has_state"]),
        "state": ctx.at(slots),
        "slot_bytes": ctx.stride(slots),
    }


def _check(node: Node, what: str, count: int) -> None:
    """Raises PykernelsError for a size that the kernels' vectors do not divide."""
    if count % 16:
        raise PykernelsError(
            f"{node.name} has {count} {what}, the cpu device takes multiples of 16", "Use --eager"
        )


DELTA_NETS = {
    op.__name__: op
    for op in (causal_conv1d, delta_gates, gated_delta_rule, gated_rms_norm, sigmoid_mul)
}
