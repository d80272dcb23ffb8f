"""The stages of an ablation: each has what the one before has, and one idea more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass

import torch

from bench.e2e.ours import Ours
from runtime.devices.cpu.runner import CpuRunner
from runtime.devices.cpu.step import CpuExecutable
from runtime.make_runner import make_plan
from runtime.planning.compile import Compiled
from runtime.planning.config import ExecutionConfig
from runtime.planning.execution import largest_step
from runtime.planning.placement import CPU
from runtime.profiling.engine_speed import EngineTimer, Load
from runtime.runner.batch import StepBatch
from runtime.runner.paged_runner import PagedRunner
from runtime.workers.job import Jobs
from runtime.workers.worker_pool import InFlight

STEP_TOKENS = 512
"""Most tokens of a step."""
PLAIN = "generic"
"""The kernels without a CPU's own instructions."""


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        name: what it has more than the one before.
        make: an engine with room for a load.
    """

    name: str
    make: Callable[[Ours, Load], EngineTimer]


def stages(device: str, kernel: str = "auto", batch: int = 1) -> tuple[Stage, ...]:
    """The stages of a device: "cpu", or "cuda:N" with the experts on the CPU.

    Args:
        kernel: of the stages with a CPU's own instructions.
        batch: sequences at once; of one there are no two microbatches.
    """
    if device == "cpu":
        return (
            Stage("plain kernels, a call a node", _on_cpu(NodeByNode, PLAIN)),
            Stage("+ AMX or AVX kernels", _on_cpu(NodeByNode, kernel)),
            Stage("+ one call a step", _on_cpu(InOrder, kernel)),
            Stage("+ nodes wait for what they read", _on_cpu(OneByOne, kernel)),
            Stage("+ two steps in the ring", _on_cpu(CpuRunner, kernel)),
        )
    microbatches = Stage(
        "+ two microbatches (dual batch)", _on_gpu(device, kernel, dual_batch=True)
    )
    return (
        Stage("plain kernels, a launch a node", _on_gpu(device, PLAIN, graph=False)),
        Stage("+ AMX or AVX kernels", _on_gpu(device, kernel, graph=False)),
        Stage("+ CUDA graph", _on_gpu(device, kernel)),
        *([microbatches] if batch > 1 else []),
        Stage("+ Expert Deferral", _on_gpu(device, kernel, defer=True, dual_batch=batch > 1)),
    )


class OneByOne(CpuRunner):
    """Python launches each step when the one before has ended."""

    def launch_behind(self, batch: StepBatch, ends: Set[int]) -> bool:
        return False


class InOrder(OneByOne):
    """Each node waits for the whole of the one before, whatever it reads."""

    late_masks = False

    def make_step(self, compiled: Compiled, inputs: Mapping[str, torch.Tensor]) -> CpuExecutable:
        return CpuExecutable(
            compiled.parts[CPU],
            self.weights,
            self.pool,
            inputs,
            self.caches,
            self.plan.kernel,
            self.sizes,
            in_order=True,
        )


class NodeByNode(OneByOne):
    """Python calls one node after the other."""

    def make_step(self, compiled: Compiled, inputs: Mapping[str, torch.Tensor]) -> CpuExecutable:
        return _Calls(
            compiled.parts[CPU],
            self.weights,
            self.pool,
            inputs,
            self.caches,
            self.plan.kernel,
            self.sizes,
            in_order=True,
        )


class _Calls(CpuExecutable):
    """A program whose jobs are published one at a time; ``jobs`` is the last."""

    _first: tuple[Jobs, ...] = ()

    def run(self) -> None:
        self._run_first()
        super().run()

    def launch(self) -> InFlight:
        self._run_first()
        return super().launch()

    def _run_first(self) -> None:
        self.prepare()
        if not self._first and len(self.jobs.jobs) > 1:
            *first, self.jobs = (Jobs([job]) for job in self.jobs.jobs)
            self._first = tuple(first)
        for jobs in self._first:
            self.pool.run(jobs)


def _on_cpu(runner: type[CpuRunner], kernel: str) -> Callable[[Ours, Load], EngineTimer]:
    def make(ours: Ours, load: Load) -> EngineTimer:
        positions, pages = load.positions(STEP_TOKENS), load.pages(STEP_TOKENS)
        sizes = largest_step(positions, pages, STEP_TOKENS, load.batch)
        plan = make_plan(ExecutionConfig(kernel=kernel), ours.decoder, positions, sizes)
        return _timer(runner(ours.decoder, plan, ours.pool))

    return make


def _on_gpu(
    device: str,
    kernel: str,
    graph: bool = True,
    defer: bool = False,
    dual_batch: bool = False,
) -> Callable[[Ours, Load], EngineTimer]:
    execution = ExecutionConfig(
        device=device,
        experts="cpu",
        prefill="cpu",
        kernel=kernel,
        defer="auto" if defer else "off",
        dual_batch=dual_batch,
    )

    def make(ours: Ours, load: Load) -> EngineTimer:
        timer = ours.timer(load, execution, STEP_TOKENS)
        runner = timer.runner
        if not graph:
            for step in {id(step): step for step in (*runner.steps, *runner.decode_steps)}.values():
                step.drop_graph()  # type: ignore[attr-defined]
        return timer

    return make


def _timer(runner: PagedRunner) -> EngineTimer:
    runner.load()
    return EngineTimer(runner)
