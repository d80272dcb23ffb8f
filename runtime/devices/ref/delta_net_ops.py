"""The ops of gated delta nets, and the gates of heads, in float32 torch."""

from __future__ import annotations

import torch

from pykernels import ref
from pykernels.shapes import StateBatch

from ...passes.gpu.save_states import refuse_saved
from ...program import Node
from .memory import RefBuffers


def causal_conv1d(m: RefBuffers, node: Node) -> None:
    weight = m.weight(node, "weight")  # [K, C]

    def channels(name: str) -> torch.Tensor:
        start = node.attr(f"{name}_start")
        return m.read(node.inputs[name]).flatten(1)[:, start : start + weight.shape[1]]

    gated = "in_gate" in node.inputs
    out = ref.causal_conv1d(
        channels("x"),
        weight.T,
        m.full(node.inputs["conv"]),
        _batch(m, node),
        silu=bool(node.attr("silu")),
        bias=m.weight(node, "bias") if "bias" in node.weights else None,
        gates=(channels("in_gate"), channels("out_gate")) if gated else None,
    )
    m.write(node.outputs["out"], out)


def delta_gates(m: RefBuffers, node: Node) -> None:
    rate = m.weight(node, "rate")
    a, b = (
        m.read(node.inputs[name]).flatten(1)[:, start : start + len(rate)]
        for name, start in (("a", node.attr("a_start")), ("b", node.attr("b_start")))
    )
    gates = ref.delta_gates(a, b, rate.neg().log(), m.weight(node, "dt_bias"))
    for name, value in zip(("g", "beta"), gates, strict=True):
        m.write(node.outputs[name], value)


def gated_delta_rule(m: RefBuffers, node: Node) -> None:
    state, HK = m.full(node.inputs["delta"]), node.attr("HK")
    HV, DK, DV = state.shape[1:]
    qkv = m.read(node.inputs["qkv"]).flatten(1)
    q, k, v = qkv.split([HK * DK, HK * DK, HV * DV], 1)
    out = ref.gated_delta_rule(
        q.unflatten(1, (HK, DK)),
        k.unflatten(1, (HK, DK)),
        v.unflatten(1, (HV, DV)),
        m.read(node.inputs["g"]),
        m.read(node.inputs["beta"]),
        state,
        _batch(m, node),
        scale=node.attr("scale"),
        eps=node.attr("eps"),
        tiled=bool(node.attr("tiled")),
    )
    m.write(node.outputs["out"], out)


def gated_rms_norm(m: RefBuffers, node: Node) -> None:
    weight = m.weight(node, "weight")
    x, gate = _gated(m, node, len(weight))
    m.write(node.outputs["out"], ref.gated_rms_norm(x, gate, weight, node.attr("eps")))


def sigmoid_mul(m: RefBuffers, node: Node) -> None:
    m.write(node.outputs["out"], ref.sigmoid_mul(*_gated(m, node, node.attr("D"))))


def _gated(m: RefBuffers, node: Node, D: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Heads and their gates, [T, heads, D] each."""
    heads, start = node.attr("heads"), node.attr("gate_start")
    x, gate = (m.read(node.inputs[name]).flatten(1) for name in ("x", "gate"))
    gate = gate[:, start : start + heads * D]
    return x.unflatten(1, (heads, D)), gate.unflatten(1, (heads, D))


def _batch(m: RefBuffers, node: Node) -> StateBatch:
    """Where the step's sequences have their tokens and states."""
    refuse_saved(node)
    names = ("query_starts", "query_lengths", "state_slots", "has_state")
    starts, lengths, slots, past = (m.read(node.inputs[name]).int().contiguous() for name in names)
    return StateBatch(starts, lengths, slots, past, max_length=m.length(node.outputs["out"]))


DELTA_NETS = {
    op.__name__: op
    for op in (causal_conv1d, delta_gates, gated_delta_rule, gated_rms_norm, sigmoid_mul)
}
