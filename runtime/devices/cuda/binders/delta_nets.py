"""The ops of gated delta nets, and the gates of heads, as launches over states in slots.

A launch has room for any sequences of its bucket: which of them there are, where their tokens lie,
and in which slots their states, it reads from the step's inputs, so that it can be captured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from pykernels.gpu.delta_net.causal_conv1d import causal_conv1d as convolve
from pykernels.gpu.delta_net.copy_states import save_states
from pykernels.gpu.delta_net.decode import DeltaNet, norm_and_shift
from pykernels.gpu.delta_net.decode import delta_step as step
from pykernels.gpu.delta_net.gate import delta_gates as make_gates
from pykernels.gpu.delta_net.gate import gated_rms_norm as norm_and_gate
from pykernels.gpu.delta_net.gate import sigmoid_mul as multiply_by_sigmoid
from pykernels.gpu.delta_net.gated_delta_rule import gated_delta_rule as remember
from pykernels.shapes import StateBatch

from ....kv_cache.layout import PAGE
from ....program.node import Node
from ..memory.buffers import GpuBuffers
from .dense import Launch, void

_OF_ONE_TOKEN = ("delta_step", "delta_norm")


def causal_conv1d(m: GpuBuffers, node: Node) -> Launch:
    weight, bias = m.weight(node, "weight").T, m.optional_weight(node, "bias")  # [C, K], [C]
    state, out = m.read(node, "conv"), m.written(node, "out")

    def channels(port: str) -> torch.Tensor:
        start = node.attr(f"{port}_start")
        return m.read(node, port)[:, start : start + len(weight)]

    x, silu = channels("x"), bool(node.attr("silu"))
    gates = (channels("in_gate"), channels("out_gate")) if "in_gate" in node.inputs else None

    def over(batch: StateBatch) -> None:
        convolve(x, weight, state, batch, silu=silu, bias=bias, gates=gates, out=out)

    return _saving(m, node, state, over)


def delta_gates(m: GpuBuffers, node: Node) -> Launch:
    a_log, dt_bias = m.weight(node, "rate").neg().log(), m.weight(node, "dt_bias")
    a, b = (
        m.read(node, port)[:, start : start + len(a_log)]
        for port, start in (("a", node.attr("a_start")), ("b", node.attr("b_start")))
    )
    out = m.written(node, "g"), m.written(node, "beta")
    return lambda: void(make_gates(a, b, a_log, dt_bias, out))


def gated_delta_rule(m: GpuBuffers, node: Node) -> Launch:
    state, HK = m.read(node, "delta"), node.attr("HK")
    how: Any = {name: node.attr(name) for name in ("scale", "eps", "tiled")}
    HV, DK, DV = state.shape[1:]
    q, k, v = m.read(node, "qkv").split([HK * DK, HK * DK, HV * DV], 1)
    heads = q.unflatten(1, (HK, DK)), k.unflatten(1, (HK, DK)), v.unflatten(1, (HV, DV))
    gates = m.read(node, "g"), m.read(node, "beta")
    out = m.written(node, "out").view(-1, HV, DV)

    def over(batch: StateBatch) -> None:
        remember(*heads, *gates, state, batch, **how, out=out)

    return _saving(m, node, state, over)


def delta_step(m: GpuBuffers, node: Node) -> Launch:
    conv, state = m.weight(node, "weight").T, m.read(node, "delta")  # [C, K], [slots, HV, DK, DV]
    gates = m.weight(node, "rate").neg().log(), m.weight(node, "dt_bias")
    how: Any = {name: node.attr(name) for name in ("HK", "tiled", "scale", "eps")}
    net = DeltaNet(conv, m.read(node, "conv"), state, *gates, **how)
    x, a, b = (
        m.read(node, port)[:, start : start + width]
        for port, start, width in (
            ("x", node.attr("x_start"), len(conv)),
            ("a", node.attr("a_start"), state.shape[1]),
            ("b", node.attr("b_start"), state.shape[1]),
        )
    )
    batch, (_, HV, _, DV) = _batch(m, node), state.shape
    out = m.written(node, "out").view(-1, HV, DV)
    return lambda: void(step(x, a, b, net, batch, out))


def delta_norm(m: GpuBuffers, node: Node) -> Launch:
    weight, eps, state = m.weight(node, "weight"), node.attr("eps"), m.read(node, "conv")
    values, gate, out = _gated(m, node, len(weight))
    start = node.attr("x_start")
    x, batch = m.read(node, "inputs")[:, start : start + state.shape[2]], _batch(m, node)
    return lambda: void(norm_and_shift(values, gate, weight, eps, x, state, batch, out))


def gated_rms_norm(m: GpuBuffers, node: Node) -> Launch:
    weight, eps = m.weight(node, "weight"), node.attr("eps")
    x, gate, out = _gated(m, node, len(weight))
    return lambda: void(norm_and_gate(x, gate, weight, eps, out))


def sigmoid_mul(m: GpuBuffers, node: Node) -> Launch:
    x, gate, out = _gated(m, node, node.attr("D"))
    return lambda: void(multiply_by_sigmoid(x, gate, out))


def _gated(m: GpuBuffers, node: Node, D: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Heads, their gates and the results, [T, heads, D] each."""
    heads, start = node.attr("heads"), node.attr("gate_start")
    gate = m.read(node, "gate")[:, start : start + heads * D]
    x, out = m.read(node, "x"), m.written(node, "out")
    return x.view(-1, heads, D), gate.unflatten(1, (heads, D)), out.view(-1, heads, D)


def _saving(
    m: GpuBuffers, node: Node, state: torch.Tensor, over: Callable[[StateBatch], None]
) -> Launch:
    """Goes over a step's tokens; where states are saved on the way, over those up to there, and
    then over those behind."""
    whole = _batch(m, node)
    if "saved_slots" not in node.inputs:
        return partial(over, whole)
    head = replace(whole, lengths=m.read(node, "head_lengths"))
    lengths, saved = m.read(node, "tail_lengths"), m.read(node, "saved_slots")
    # Whoever has tokens there has a state.
    places = {"starts": m.read(node, "tail_starts"), "lengths": lengths, "past": lengths}
    tail = replace(whole, **places, max_length=min(whole.max_length, PAGE))

    def launch() -> None:
        over(head)
        save_states(state, whole.slots, saved)
        over(tail)

    return launch


def _batch(m: GpuBuffers, node: Node) -> StateBatch:
    """Where the step's sequences have their tokens and states."""
    longest = 1 if node.op in _OF_ONE_TOKEN else node.attr("longest")
    return StateBatch(
        starts=m.read(node, "query_starts"),
        lengths=m.read(node, "query_lengths"),
        slots=m.read(node, "state_slots"),
        past=m.read(node, "has_state"),
        max_length=longest or len(m.written(node, "out")),
    )


DELTA_NETS = {
    op.__name__: op
    for op in (
        causal_conv1d,
        delta_gates,
        delta_norm,
        delta_step,
        gated_delta_rule,
        gated_rms_norm,
        sigmoid_mul,
    )
}
