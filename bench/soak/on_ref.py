"""The ref device with its experts on the CPU in every step, as a GPU has them."""

from __future__ import annotations

from functools import partial

from model.llm import LLM
from runtime.devices.ref.runner import RefRunner
from runtime.devices.runner import Pass
from runtime.engine import Engine
from runtime.passes import defer as defer_pass
from runtime.passes import offload
from runtime.program import Program
from runtime.workers.pool import WorkerPool


class OnRef(RefRunner):
    """On the ref device, but for routed experts: those are on the CPU in every step."""

    def lowered(self, *sizes: int) -> Program:
        return offload(super().lowered(*sizes))


def on_ref(llm: LLM, tokens: int, sequences: int, defer: str) -> tuple[Engine, OnRef, WorkerPool]:
    """An engine over a loaded model, its cache's size and its workers, which run the experts.

    Args:
        tokens, sequences: most of a step.
        defer: a number of experts, or "off"; with a number the engine has no thread.
    """
    passes: list[Pass] = [partial(defer_pass, N=int(defer))] if defer.isdecimal() else []
    cpu = llm.runner
    runner = OnRef(cpu.model, cpu.max_model_len, cpu.num_pages, tokens, sequences, passes, llm.pool)
    return Engine(runner, threaded=defer == "off"), runner, llm.pool
