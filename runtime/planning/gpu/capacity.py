"""How much of a GPU's memory is left, and so how many tokens a step may have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from ...passes.gpu.offload_kv import host_caches
from ...program import Program
from ..compile import Compiled, compile
from ..execution import ExecutionPlan, Phase
from ..lowerable import Lowerable
from ..placement import CPU
from .machine import Machine

STEP_TOKENS = (4096, 2048, 1024, 512)
"""Default token budgets of a step: the largest that fits; the last one if experts are on the CPU,
or if none fits."""


def step_tokens(model: Lowerable, machine: Machine, plan: ExecutionPlan) -> int:
    """The token budget of a step: the largest of ``STEP_TOKENS`` that fits.

    Args:
        machine: in the interpreter the fewest.
        plan: of the model, whose tokens are not chosen yet.
    """
    if not machine.bounded or plan.placement.experts == CPU:
        return STEP_TOKENS[-1]
    for T in STEP_TOKENS[:-1]:
        if all(free >= 0 for free in free_after_steps(model, machine, plan, T).values()):
            return T
    return STEP_TOKENS[-1]


def free_for_experts(model: Lowerable, machine: Machine, plan: ExecutionPlan) -> dict[str, int]:
    """Bytes of each GPU that experts may take beside the rest of a model, its cache and its steps;
    below 0 where these alone are too much.

    Args:
        plan: of all that is no routed expert.
    """
    if not machine.bounded:
        return dict.fromkeys(machine.free, 1 << 62)
    return free_after_steps(model, machine, plan, plan.sizes.tokens)


def free_after_steps(
    model: Lowerable, machine: Machine, plan: ExecutionPlan, tokens: int
) -> dict[str, int]:
    """Bytes that are free on each GPU beside weights, cache and steps of so many tokens."""
    # Steps have memory for experts wherever these are: some may be on a GPU besides.
    on_gpu = replace(plan, placement=replace(plan.placement, experts=plan.placement.device))
    steps = step_bytes(machine, compile(model, on_gpu, Phase.PROMPT, tokens))
    free = free_for_steps(model, machine, plan)
    return {gpu: nbytes - steps[gpu] for gpu, nbytes in free.items()}


def free_for_steps(model: Lowerable, machine: Machine, plan: ExecutionPlan) -> dict[str, int]:
    """Bytes of each GPU that are left beside the weights that are yet to come and the cache."""
    compiled = compile(model, plan)
    left: dict[str, int] = {}
    for gpu, free in machine.free.items():
        part, records = compiled.parts[gpu], compiled.residency(gpu).items()
        specs = [part.weights[name] for name, record in records if not record.crosses]
        missing = [spec for spec in specs if not machine.is_made(spec, gpu)]
        elsewhere = host_caches(part)
        cached = sum(
            math.prod(part.shape(name)) * buffer.dtype.itemsize
            for name, buffer in part.buffers.items()
            if buffer.kind == "cache" and name not in elsewhere
        )
        left[gpu] = free - cached - sum(map(machine.layouts.weight_bytes, missing))
    return left


def step_bytes(machine: Machine, compiled: Compiled) -> dict[str, int]:
    """Bytes of each GPU that a step's buffers and launches take."""
    return {
        name: machine.layouts.step_bytes(part) for name, part in on_gpus(compiled.parts).items()
    }


def short_tokens(plan: ExecutionPlan) -> int:
    """Tokens of the longest step in which no experts cross, where they cross in longer ones."""
    return min(plan.sizes.tokens or STEP_TOKENS[-1], STEP_TOKENS[-1])


def short_step_bytes(model: Lowerable, machine: Machine, plan: ExecutionPlan) -> dict[str, int]:
    """``step_bytes`` of such a step."""
    return step_bytes(machine, compile(model, plan, Phase.PROMPT, short_tokens(plan)))


def on_gpus(parts: Mapping[str, Program]) -> dict[str, Program]:
    """The parts of a step that run on GPUs."""
    return {name: part for name, part in parts.items() if name != CPU}
