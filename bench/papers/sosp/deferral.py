"""Figure 10: a layer of DeepSeek-V3 with experts deferred."""

from __future__ import annotations

from runtime.devices.sim.step import SimulatedStep

from ..cells import ABOUT, Cell
from ..on import run
from . import told

FIGURE = "Figure 10"
EDGE = 4
"""Layers at each end of a step that are left out: the first ones wait for nothing deferred, and the
last one defers nothing."""


def figure10() -> list[Cell]:
    """Busy devices without deferral, and what 2, 3 and 4 deferred experts save."""
    steps = {
        defer: run("deepseek-v3", "bf16", told.A100, system=told.KT, defer=defer)
        for defer in (0, *told.LESS_A_LAYER)
    }
    layers = {defer: layer(step.decode) for defer, step in steps.items()}
    names = {"cpu": "CPU", "cuda:0": "GPU"}
    found = [
        Cell(
            FIGURE,
            f"{names[device]} busy, none deferred",
            "%",
            told.BUSY[device],
            100 * busy,
            given=device == "cpu",
        )
        for device, busy in layers[0][1].items()
    ]
    for defer, (seconds, busy) in layers.items():
        if not defer:
            continue
        less = 100 * (1 - seconds / layers[0][0])
        what = f"{defer} deferred: less time a layer"
        found.append(Cell(FIGURE, what, "%", told.LESS_A_LAYER[defer], less))
        full = 100.0 if defer >= 3 else None
        what = f"{defer} deferred: CPU busy"
        found.append(Cell(FIGURE, what, "%", full, 100 * busy["cpu"], says=ABOUT if full else ""))
    gain = steps[0].decode.seconds / steps[3].decode.seconds
    found.append(Cell(FIGURE, "3 deferred: decode faster", "x", told.DEFERRED_GAIN, gain))
    return found


def layer(step: SimulatedStep) -> tuple[float, dict[str, float]]:
    """Seconds of a layer in the middle of a step, and the part of it in which each device
    computes."""
    order = sorted({ran.node.layer for ran in step.ran if ran.node.layer is not None})
    first, last = order[EDGE], order[-EDGE]
    begins = {
        number: min(r.begin for r in step.ran if r.node.layer == number and r.lane[0] != "cpu")
        for number in (first, last)
    }
    begin, end = begins[first], begins[last]
    busy = {}
    for device in ("cpu", "cuda:0"):
        within = [
            max(0.0, min(ran.end, end) - max(ran.begin, begin))
            for ran in step.ran
            if ran.lane[0] == device and ran.node.op not in ("submit", "wait")
        ]
        busy[device] = min(1.0, sum(within) / (end - begin))
    return (end - begin) / (order.index(last) - order.index(first)), busy
