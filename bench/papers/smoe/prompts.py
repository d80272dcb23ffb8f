"""Figures 10 and 11: prompts, of which experts that many tokens take cross to the GPU."""

from __future__ import annotations

from runtime.devices.sim.step import SimulatedStep

from ..cells import Cell
from ..on import crossing, streamed
from ..skew import measured_law
from . import told

LENGTHS = (400, 512, 1024, 2048, 4096)


def _step(model: str, tokens: int, share: float | None) -> SimulatedStep:
    """A prompt.

    Args:
        share: of a layer's experts that cross; None: Algorithm 1's, with which neither the link nor
            the CPU waits.
    """
    options = {"system": told.EAGER, "share": share, "routing": measured_law()}
    return streamed(told.MODELS[model], told.FMT, told.NODE, tokens, **options)  # type: ignore[arg-type]


def figures() -> list[Cell]:
    """Seconds to the first token, and where they go."""
    ten, eleven = list[Cell](), list[Cell]()
    for model in told.MODELS:
        for tokens in LENGTHS:
            cpu, smoe = (_step(model, tokens, share) for share in (0.0, None))
            share = crossing(told.MODELS[model], told.FMT, told.NODE, tokens, measured_law())
            what = f"{model}, {tokens} tokens"
            ten.append(Cell("Figure 10", f"{what}, KTransformers", "s", None, cpu.seconds))
            ten.append(Cell("Figure 10", f"{what}, SMOE", "s", None, smoe.seconds))
            paper = told.PROMPT_GAIN.get((model, tokens))
            gain = cpu.seconds / smoe.seconds
            ten.append(Cell("Figure 10", f"{what}, gain", "x", paper, gain))
            eleven.append(
                Cell("Figure 11", f"{what}, on the GPU", "% of experts", None, 100 * share)
            )
            for name, seconds in _breakdown(smoe).items():
                eleven.append(Cell("Figure 11", f"{what}, {name}", "ms a layer", None, seconds))
    return [*ten, *eleven]


def _breakdown(step: SimulatedStep) -> dict[str, float]:
    """Milliseconds of a layer: the link's, the GPU's for experts, and what is waited for the CPU
    after both."""
    thin = len({ran.node.layer for ran in step.ran if ran.node.layer is not None})
    sums = {"link": 0.0, "GPU": 0.0, "CPU": 0.0}
    for ran in step.ran:
        took = 1e3 * (ran.end - ran.begin) / thin
        if ran.node.op in ("load_experts", "load_weights"):
            sums["link"] += took
        elif ran.node.op in ("moe_ffn", "unpack_experts"):
            sums["CPU" if ran.lane[0] == "cpu" else "GPU"] += took
    waits = max(0.0, sums["CPU"] - max(sums["link"], sums["GPU"]))
    return {"link": sums["link"], "GPU": sums["GPU"], "waits for the CPU": waits}
