"""Rows of the table of GPU ops (see ``ops.py``): gated delta nets, with states in slots."""

from __future__ import annotations

import torch

from pykernels.gpu.delta_net.causal_conv1d import causal_conv1d
from pykernels.gpu.delta_net.copy_states import StateCopies, save_states
from pykernels.gpu.delta_net.decode import DeltaNet, delta_step, norm_and_shift
from pykernels.gpu.delta_net.gate import delta_gates, gated_rms_norm, sigmoid_mul
from pykernels.gpu.delta_net.gated_delta_rule import gated_delta_rule
from pykernels.gpu.moe.shared_factor import shared_factor
from pykernels.shapes import Routing, StateBatch

from .ops import BF16, FP32, Op, Tensors, empty, large, normal

_BATCH = ("starts", "lengths", "slots", "past")


def _sequences(device: torch.device, longest: int) -> Tensors:
    """A padding, then two sequences of which one goes on, each behind a row of no sequence."""
    lengths, past = [longest, 1, longest], [4, 3, 0]
    values = ([1, longest + 2, longest + 4], lengths, [-1, 3, 1], past)
    return {
        name: torch.tensor(x, dtype=torch.int32, device=device)
        for name, x in zip(_BATCH, values, strict=True)
    }


def _batch(t: Tensors, longest: int) -> StateBatch:
    return StateBatch(*(t[name] for name in _BATCH), longest)


def _rule(longest: int) -> Op:
    def make(device: torch.device) -> Tensors:
        T, HK, HV = 2 * longest + 5, large(device, 16, 1), large(device, 32, 2)
        DK, DV = large(device, 128, 32), large(device, 128, 48)
        made = {name: normal(device, T, HK, DK) for name in "qk"}
        made |= {"v": normal(device, T, HV, DV), "out": empty(device, T, HV, DV)}
        made |= {"g": -torch.rand(T, HV, device=device), "beta": torch.rand(T, HV, device=device)}
        made["state"] = normal(device, 5, HV, DK, DV, dtype=FP32)
        return made | _sequences(device, longest)

    def run(t: Tensors) -> None:
        inputs = (t[name] for name in ("q", "k", "v", "g", "beta", "state"))
        gated_delta_rule(*inputs, _batch(t, longest), out=t["out"])

    return Op(f"gated_delta_rule, {longest} tokens", make, run, ("out", "state"))


def _conv(longest: int) -> Op:
    def make(device: torch.device) -> Tensors:
        T, C = 2 * longest + 5, large(device, 8192, 200)
        made = {"x": normal(device, T, C), "weight": normal(device, C, 4)}
        made |= {"state": normal(device, 5, 3, C, dtype=FP32), "out": empty(device, T, C)}
        return made | _sequences(device, longest)

    def run(t: Tensors) -> None:
        causal_conv1d(t["x"], t["weight"], t["state"], _batch(t, longest), out=t["out"])

    return Op(f"causal_conv1d, {longest} tokens", make, run, ("out", "state"))


def _short_conv(longest: int) -> Op:
    def make(device: torch.device) -> Tensors:
        T, C = 2 * longest + 5, large(device, 2048, 200)
        made = {"rows": normal(device, T, 3 * C), "weight": normal(device, C, 3)}
        made |= {"bias": normal(device, C, dtype=FP32), "out": empty(device, T, C)}
        made |= {"state": normal(device, 5, 2, C, dtype=FP32)}
        return made | _sequences(device, longest)

    def run(t: Tensors) -> None:
        before, behind, x = t["rows"].chunk(3, -1)
        how = {"silu": False, "bias": t["bias"], "gates": (before, behind), "out": t["out"]}
        causal_conv1d(x, t["weight"], t["state"], _batch(t, longest), **how)

    return Op(f"causal_conv1d between gates, {longest} tokens", make, run, ("out", "state"))


def _gated(norm: bool) -> Op:
    def make(device: torch.device) -> Tensors:
        made = {name: normal(device, 5, 6, 80) for name in ("x", "gate")}
        return made | {"weight": normal(device, 80, dtype=FP32), "out": empty(device, 5, 6, 80)}

    def run(t: Tensors) -> None:
        if norm:
            gated_rms_norm(t["x"], t["gate"], t["weight"], 1e-6, t["out"])
        else:
            sigmoid_mul(t["x"], t["gate"], t["out"])

    return Op("gated_rms_norm" if norm else "sigmoid_mul", make, run)


def _delta_gates() -> Op:
    def make(device: torch.device) -> Tensors:
        made = {name: normal(device, 70, 6, dtype=BF16) for name in "ab"}
        made |= {name: normal(device, 6, dtype=FP32) for name in ("a_log", "dt_bias")}
        return made | {name: empty(device, 70, 6, dtype=FP32) for name in ("g", "beta")}

    def run(t: Tensors) -> None:
        delta_gates(t["a"], t["b"], t["a_log"], t["dt_bias"], (t["g"], t["beta"]))

    return Op("delta_gates", make, run, ("g", "beta"))


def _step() -> Op:
    def make(device: torch.device) -> Tensors:
        HK, HV = large(device, 16, 1), large(device, 32, 2)
        DK, DV = large(device, 128, 32), large(device, 128, 48)
        C = 2 * HK * DK + HV * DV
        made = {"x": normal(device, 7, C), "weight": normal(device, C, 4)}
        made |= {name: normal(device, 7, HV) for name in "ab"}
        made |= {name: normal(device, HV, dtype=FP32) for name in ("a_log", "dt_bias")}
        made |= {"conv": normal(device, 5, 3, C, dtype=FP32), "norm": normal(device, DV)}
        made |= {"state": normal(device, 5, HV, DK, DV, dtype=FP32)}
        made |= {name: empty(device, 7, HV, DV) for name in ("read", "out")}
        return made | {"gate": normal(device, 7, HV, DV)} | _sequences(device, 1)

    def run(t: Tensors) -> None:
        HK = (t["x"].shape[1] - t["out"][0].numel()) // (2 * t["state"].shape[2])
        net = DeltaNet(t["weight"], t["conv"], t["state"], t["a_log"], t["dt_bias"], HK)
        batch = _batch(t, 1)
        delta_step(t["x"], t["a"], t["b"], net, batch, t["read"])
        norm = t["gate"], t["norm"], 1e-6
        norm_and_shift(t["read"], *norm, t["x"], t["conv"], batch, t["out"])

    return Op("delta_step", make, run, ("read", "out", "state", "conv"))


def _copy_states() -> Op:
    def make(device: torch.device) -> Tensors:
        return {
            "state": normal(device, 5, 3, large(device, 4096, 80), dtype=FP32),
            "conv": normal(device, 5, 3, 200, dtype=FP32),
        }

    def run(t: Tensors) -> None:
        StateCopies([t["state"], t["conv"]]).copy(1, 3)

    return Op("copy_states", make, run, ("state", "conv"))


def _save_states() -> Op:
    def make(device: torch.device) -> Tensors:
        slots, saved = (
            torch.tensor(numbers, dtype=torch.int32, device=device)
            for numbers in ([3, 1, -1], [0, -1, -1])
        )
        state = normal(device, 5, 3, large(device, 4096, 80), dtype=FP32)
        return {"state": state, "slots": slots, "saved": saved}

    def run(t: Tensors) -> None:
        save_states(t["state"], t["slots"], t["saved"])

    return Op("save_states", make, run, ("state",))


def _shared_factor() -> Op:
    def make(device: torch.device) -> Tensors:
        H = large(device, 2048, 200)
        made = {"x": normal(device, 5, H), "gate": normal(device, 1, H)}
        slots = torch.tensor([3, 4, -1, 9, -1], dtype=torch.int32, device=device)
        ids = empty(device, 5, 1, dtype=torch.int32)
        return made | {"slots": slots, "ids": ids, "weights": empty(device, 5, 1, dtype=FP32)}

    def run(t: Tensors) -> None:
        shared_factor(t["x"], t["gate"], Routing(t["ids"], t["weights"]), None, t["slots"])

    return Op("shared_factor", make, run, ("ids", "weights"))


DELTA_NET = (
    _step(),
    _copy_states(),
    _save_states(),
    _shared_factor(),
    _rule(1),
    _rule(70),
    _conv(1),
    _conv(20),
    _short_conv(20),
    _gated(True),
    _gated(False),
    _delta_gates(),
)
