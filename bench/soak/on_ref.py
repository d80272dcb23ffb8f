"""The ref device with its experts on the CPU in every step, as a GPU has them."""

from __future__ import annotations

from dataclasses import replace

from model.llm import LLM
from runtime.devices.ref.runner import RefRunner
from runtime.engine import Engine
from runtime.planning.placement import CPU, Placement
from runtime.workers.pool import WorkerPool


def on_ref(llm: LLM, tokens: int, sequences: int) -> tuple[Engine, RefRunner, WorkerPool]:
    """An engine over a loaded model: its deferral, its cache's size, and its workers, which run the
    experts.

    Args:
        tokens, sequences: most of a step.
    """
    cpu = llm.runner
    logits = min(tokens, max(cpu.plan.sizes.logits, sequences))
    sizes = replace(cpu.plan.sizes, tokens=tokens, sequences=sequences, logits=logits)
    plan = replace(cpu.plan, sizes=sizes, placement=Placement("ref", CPU), passes=())
    runner = RefRunner(cpu.model, plan, llm.pool)
    return Engine(runner), runner, llm.pool
