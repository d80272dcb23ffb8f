"""What of a model lies in main memory beside GPUs that have no room for all of it.

Routed experts go first (``placement.place``). Of what is left, keys and values go before dense
weights: a step reads as many of them as sequences have written, and every dense weight.
"""

from __future__ import annotations

from dataclasses import replace

from pykernels.errors import PykernelsError

from ..execution import ExecutionPlan
from ..lowerable import Lowerable
from ..placement import CPU
from .capacity import free_for_steps, short_step_bytes, short_tokens
from .dense import crossing_weights
from .kv import layers_in_main, with_kv_in_main
from .machine import Machine
from .stream_budget import streaming_bytes

_GIB = 2**30


def fitted(
    model: Lowerable,
    machine: Machine,
    plan: ExecutionPlan,
    kv: float | str = "auto",
    dense: float | str = "auto",
    prefill: str = "cpu",
) -> ExecutionPlan:
    """The plan with what does not fit in main memory.

    Args:
        plan: in which nothing crosses yet.
        kv, dense, prefill: ``kv_gpu_gib``, ``dense_gib`` and ``prefill`` of ``ExecutionConfig``.

    Raises:
        PykernelsError: what cannot be in main memory needs more than ``gpu_gib``.
    """
    tokens = plan.sizes.tokens
    reserved = _for_streams(model, machine, plan) if prefill != CPU else {}
    layers = layers_in_main(model, machine, plan, kv, tokens, reserved)
    plan = with_kv_in_main(plan, layers)
    crossing = crossing_weights(model, machine, plan, dense, tokens)
    plan = replace(plan, placement=plan.placement.with_residency(crossing))
    if machine.capped:
        check_cap(model, machine, plan)
    return plan


def _for_streams(model: Lowerable, machine: Machine, plan: ExecutionPlan) -> dict[str, int]:
    """Bytes of each GPU through which experts of prompts cross: prompts read at the GPU's speed
    are worth more than some layers' caches there."""
    if plan.placement.experts != CPU or not machine.bounded:
        return {}
    try:
        return streaming_bytes(model, machine, plan)
    except PykernelsError:  # experts that cannot cross
        return {}


def check_cap(model: Lowerable, machine: Machine, plan: ExecutionPlan) -> None:
    """Raises PykernelsError where a plan needs more of a GPU than it may take, with what would
    do."""
    tokens, steps = short_tokens(plan), short_step_bytes(model, machine, plan)
    for gpu, left in free_for_steps(model, machine, plan).items():
        if (short := steps[gpu] - left) > 0:
            cap = machine.caps[gpu]
            enough = -(-10 * (cap + short) // _GIB) / 10
            raise PykernelsError(
                f"{gpu} may take {cap / _GIB:.4g} GiB (gpu_gib), and what cannot be in main memory"
                f" of {model.name} needs {short / _GIB:.2f} more, in steps of {tokens} tokens",
                f"Give gpu_gib {enough:.1f} or more, fewer kv_tokens or max_num_batched_tokens,"
                " experts cpu, or leave kv_gpu_gib and dense_gib at auto",
            )
