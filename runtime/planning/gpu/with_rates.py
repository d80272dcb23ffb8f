"""What a plan leaves open until it is measured, decided by what was: pure functions from a plan and
rates to a plan."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace

from pykernels.errors import PykernelsError

from ...passes.layers import moe_layers
from ...program import Program
from ..compile import compile
from ..execution import ExecutionPlan, Phase
from ..lowerable import Lowerable
from ..prefill_rates import Rates
from ..prompt_sizes import SPLIT_BUCKETS, PromptSizes
from ..residency import Filled
from .capacity import step_bytes
from .machine import Machine

MOST_SPLIT = 0.95
"""Share of the experts for which a split step must have room."""


def with_pinned(
    plan: ExecutionPlan, program: Program, layers: Collection[int], why_no_more: str
) -> ExecutionPlan:
    """The plan with the experts of these layers streamed, which are pinned; nothing is streamed
    where there are none.

    Args:
        program: any of the model's, placed.
        why_no_more: as a clause; "": these are all.

    Raises:
        PykernelsError: streamed experts were asked for.
    """
    assert plan.streaming is not None
    streaming = replace(plan.streaming, layers=frozenset(layers))
    if why_no_more:
        if plan.prefill == "split" or (plan.prefill == "stream" and not layers):
            raise PykernelsError(
                f"experts cannot be streamed: {why_no_more}", "Leave prefill at auto"
            )
        gpus = dict.fromkeys((plan.placement.device, *plan.placement.by_layer.values()))
        warnings.warn(
            f"experts of {len(layers)} of {len(moe_layers(program))} layers are streamed to"
            f" {', '.join(gpus)} in prompts, the others computed by the CPU: {why_no_more}",
            stacklevel=2,
        )
    if not layers:
        return replace(plan, streaming=None, prompts=None, measures_prompts=False)
    return replace(plan, streaming=streaming)


def with_links(plan: ExecutionPlan, links: Mapping[str, float]) -> ExecutionPlan:
    """The plan with what its streamed experts take to cross."""
    assert plan.streaming is not None
    return replace(plan, streaming=replace(plan.streaming, links=links))


def splits(machine: Machine, plan: ExecutionPlan, program: Program) -> bool:
    """Whether there are kernels for split steps: of all experts, each of which crosses by itself.

    Args:
        program: any of the model's, placed.
    """
    streaming = plan.streaming
    if streaming is None or not streaming.streams_all(program):
        return False
    return all(machine.layouts.gathers(spec) for _, spec in streaming.experts(program))


def fits_split(model: Lowerable, machine: Machine, plan: ExecutionPlan, program: Program) -> bool:
    """Whether the GPUs have memory for split steps beside streamed ones.

    Args:
        machine: its free memory is what weights and cache have left.
        program: any of the model's, placed.
    """
    needed, most = Counter[str](), plan.sizes.tokens
    for name, record in plan.placement.filled(Filled.BETWEEN_STEPS).items():
        filling = machine.layouts.filling_bytes(program.weights[name])
        needed[record.device] = max(needed[record.device], filling)
    needed.update(step_bytes(machine, compile(model, plan, Phase.STREAMED, most)))
    few = min(most, SPLIT_BUCKETS[-1])
    needed.update(step_bytes(machine, compile(model, plan, Phase.SPLIT, few, MOST_SPLIT)))
    return all(nbytes >= needed[gpu] for gpu, nbytes in machine.free.items())


def check_split(plan: ExecutionPlan, may_split: bool) -> None:
    """Raises PykernelsError where split steps were asked for and cannot be."""
    if plan.prefill == "split" and not may_split:
        raise PykernelsError(
            "experts of prompts cannot be split: some are not pinned, too little memory"
            " of the GPU for two layers of them twice, or no kernel that gathers them",
            "Leave prefill at auto, or give expert_cache fewer slots",
        )


def with_rates(plan: ExecutionPlan, rates: Rates | None, may_split: bool) -> ExecutionPlan:
    """The plan with prompts of each size by the way that was asked for, or takes the least time.

    Args:
        rates: None: every step is streamed.
        may_split: whether steps can be split.
    """
    most, decisions = plan.sizes.tokens, plan.decisions
    if rates is None:
        sizes = PromptSizes.streamed_only(most)
    elif plan.prefill == "split":
        sizes = PromptSizes.split_only(most, rates.share)
    else:
        sizes = PromptSizes.chosen(rates, most, may_split, plan.sizes.sequences)
        decisions = (*decisions, sizes.described(rates))
    return replace(plan, prompts=sizes, decisions=decisions, measures_prompts=False)
