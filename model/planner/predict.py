"""Decoding and prompts of a case, step by step on the simulated device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from runtime.devices.sim.cost import Load
from runtime.devices.sim.drafts import DraftForecast, draft_forecast
from runtime.devices.sim.machine import kernel_of
from runtime.devices.sim.step import SimulatedStep, simulate
from runtime.engine.scheduling.config import STEP_TOKENS, EngineConfig
from runtime.passes.layers import moe_layers
from runtime.planning.execution import Phase
from runtime.planning.gpu.routes import DISAGGREGATED, DSLP
from runtime.planning.placement import CPU
from runtime.planning.prefill_rates import MEASURED

from .placing import Placed


@dataclass(frozen=True)
class Prompt:
    """A prompt.

    Attributes:
        seconds: of all its steps; ``steps``: how many; ``way``: of its experts: "cpu", "stream",
            "split" or, where they need not cross, "".
        bounds: by what bounds it, seconds.
    """

    tokens: int
    seconds: float
    steps: int
    way: str
    bounds: Mapping[str, float]

    @property
    def tok_s(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    @property
    def bound(self) -> str:
        """What most of it waits for."""
        return max(self.bounds, key=lambda name: self.bounds[name])


@dataclass(frozen=True)
class Prediction:
    """What a case will do.

    Attributes:
        decode: a step of ``case.wanted.batch`` sequences; ``prompt``: alone.
    """

    placed: Placed
    decode: SimulatedStep
    prompt: Prompt

    @property
    def decode_tok_s(self) -> float:
        """Tokens a second of all sequences."""
        return self.placed.case.wanted.batch / self.decode.seconds

    @property
    def first_token_s(self) -> float:
        """Seconds from a prompt to its first token, in an engine that is idle."""
        return self.prompt.seconds

    @property
    def request_s(self) -> float:
        """Seconds of a prompt and its answer."""
        return self.prompt.seconds + self.placed.case.wanted.answer * self.decode.seconds


def predict(placed: Placed, prompt: Prompt | None = None) -> Prediction:
    """Decoding and a prompt of a case that is placed.

    Args:
        prompt: where it is known already.
    """
    case = placed.case
    machine = case.machine
    if case.execution.threads is not None:
        machine = machine.with_threads(case.execution.threads)
    batch, law = case.wanted.batch, case.wanted.routing
    compiled = placed.compiled(Phase.DECODE, batch)
    decode = simulate(compiled, machine, Load(batch, case.wanted.context, batch, law))
    placed = replace(placed, case=replace(case, machine=machine))
    prompt = prompt or predict_prompt(placed, case.wanted.prompt)
    return Prediction(placed, decode.stretched(case.subject.stretch), prompt)


def drafts_of(found: Prediction) -> DraftForecast:
    """What checking drafts takes of a case that is predicted."""
    placed, wanted = found.placed, found.placed.case.wanted
    load = Load(wanted.batch, wanted.context, wanted.batch, wanted.routing)
    decoder, most = placed.case.subject.decoder, EngineConfig.draft_tokens
    return draft_forecast(placed.plan, decoder, placed.case.machine, load, most)


def predict_prompt(placed: Placed, tokens: int) -> Prompt:
    """A prompt, by the way of its experts that takes the least time, of those that are tried."""
    ways = {"": Phase.PROMPT}
    if placed.plan.streaming is not None:
        asked = placed.case.execution.prefill
        ways = {"cpu": Phase.PROMPT, "stream": Phase.STREAMED, "split": Phase.SPLIT}
        if placed.case.slots:
            del ways["stream"]
        elif asked != "split" and min(tokens, placed.plan.sizes.tokens) > MEASURED[-1]:
            del ways["split"]
        ways = {asked: ways[asked]} if asked in ways else ways
    elif placed.plan.placement.experts == CPU and placed.plan.placement.device != CPU:
        ways = {"cpu": Phase.PROMPT}
    found = [_by(placed, tokens, way, phase) for way, phase in ways.items()]
    return min(found, key=lambda prompt: prompt.seconds)


def _by(placed: Placed, tokens: int, way: str, phase: Phase) -> Prompt:
    budget, share = placed.plan.sizes.tokens, 0.0
    asked = placed.case.wanted.step_tokens
    if phase is Phase.PROMPT and placed.plan.streaming is not None and asked is None:
        budget = min(budget, STEP_TOKENS)
    if phase is Phase.SPLIT:
        share = balanced_share(placed, min(budget, tokens))
    routes = placed.plan.routes if phase is Phase.STREAMED else {}
    over = routes.get(DSLP) or routes.get(DISAGGREGATED) or ()  # nothing decodes beside it
    seconds, steps, bounds = 0.0, 0, dict[str, float]()
    for start in range(0, tokens, budget):
        T = min(budget, tokens - start)
        load = Load(T, start + T // 2, 1, placed.case.wanted.routing)
        compiled = placed.compiled(phase, T, share, over)
        step = simulate(compiled, placed.case.machine, load)
        step = step.stretched(placed.case.subject.stretch)
        seconds, steps = seconds + step.seconds, steps + 1
        for name, took in step.bounds.items():
            bounds[name] = bounds.get(name, 0.0) + took
    return Prompt(tokens, seconds, steps, way, bounds)


def balanced_share(placed: Placed, tokens: int) -> float:
    """The share of a layer's experts that crosses in a split step: as many as take the link as long
    as the CPU takes for the others."""
    machine, program = placed.case.machine, placed.case.subject.decoder.lower()
    layer = moe_layers(program)[0]
    spec = program.weight(layer.experts, "experts")
    E, H, I = spec.shape  # noqa: E741
    gpu, law = machine.gpu, placed.case.wanted.routing
    assert gpu is not None
    kernel = kernel_of(machine.cpu.kernels, spec.fmt)
    decode = (kernel.rows_gweights_s or kernel.decode_gweights_s) * 1e9
    topk = float(layer.topk)

    def took(k: int) -> float:
        link = k * spec.bytes_per_expert / (gpu.link_gbps * 1e9)
        distinct, rows = law.distinct(E, topk, tokens, k), tokens * topk * law.share(E, topk, k)
        cpu = 3 * H * I * (distinct / decode + 2 * rows / (kernel.tflops * 1e12))
        return max(link, cpu)

    return min(range(1, E), key=took) / E
