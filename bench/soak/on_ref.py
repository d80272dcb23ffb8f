"""The ref device with its experts on the CPU in every step, as a GPU has them."""

from __future__ import annotations

from model.llm import LLM
from runtime.devices.ref.runner import RefRunner
from runtime.engine import Engine
from runtime.passes import offload
from runtime.program import Program
from runtime.program.sizes import ONE_TOKEN, StepSizes
from runtime.workers.pool import WorkerPool


class OnRef(RefRunner):
    """On the ref device, but for routed experts: those are on the CPU in every step."""

    def lowered(self, sizes: StepSizes = ONE_TOKEN) -> Program:
        return offload(super().lowered(sizes))


def on_ref(llm: LLM, tokens: int, sequences: int) -> tuple[Engine, OnRef, WorkerPool]:
    """An engine over a loaded model: its deferral, its cache's size, and its workers, which run the
    experts.

    Args:
        tokens, sequences: most of a step.
    """
    cpu = llm.runner
    sizes = cpu.max_model_len, cpu.num_pages, tokens, sequences
    runner = OnRef(cpu.model, *sizes, pool=llm.pool, deferred=cpu.deferred)
    return Engine(runner), runner, llm.pool
