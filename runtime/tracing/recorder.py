"""Records steps of a runner: its workers, its streams, the engine's thread, a GPU's kernels."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from pykernels.errors import PykernelsError

from ..program import Program
from ..program.node import Node
from ..program.partition import partition
from ..runner import active
from ..runner.paged_runner import PagedRunner
from ..workers.spans import SETUP
from ..workers.spans import WAIT as WAITED
from ..workers.trace import TaskSpan
from .gpu import GpuActivity, gpu_spans
from .kernels import assigned
from .timeline import COPY, ENGINE, STREAM, WAIT, WORKER, Lane, Span, Step, Timeline, op_of

THREAD = Lane(ENGINE, "cpu", 0, "engine")


class Recorder:
    """While it is entered, steps in ``with recorder.step():`` are recorded; an ``Observer``. It
    may be entered again, for more steps.

    One thread drives the engine. Meanwhile a task of the workers takes some 50 ns longer.

    Args:
        runner: an engine is bound to it.
        title: of the timeline.

    Raises:
        PykernelsError: another recorder is on.
    """

    def __init__(self, runner: PagedRunner, title: str = "") -> None:
        self._runner, self._title = runner, title
        programs = [step.program for step in (*runner.steps, *runner.decode_steps)]
        self._nodes = {node.name: node for program in programs for node in program.nodes}
        devices = {node.device for node in self._nodes.values()}
        self._gpus = sorted(name for name in devices if name.startswith("cuda:"))
        self._steps: list[Step] = []
        self._programs: list[Program] = []
        self._spans: list[Span] = []
        self._phase: tuple[str, int] | None = None
        self._on_gpu: list[Span] = []
        self._open = ExitStack()

    def __enter__(self) -> Recorder:
        if active.active is not None:
            raise PykernelsError("another recorder is on", "Close it first")
        if self._real:
            activity = GpuActivity(self._gpus)
            self._open.callback(self._read, activity)
            self._open.enter_context(activity)
        for pool in self._pools():
            self._open.callback(pool.trace, False)
            pool.trace(True)
        self._open.callback(active.activate, None)
        active.activate(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @contextmanager
    def step(self) -> Iterator[None]:
        """One step of the engine; what the workers wrote is read behind it.

        Raises:
            PykernelsError: a worker ran more tasks than can be traced.
        """
        self._collect(keep=False)  # of steps that were not recorded
        begin = time.monotonic_ns()
        self.phase("schedule")
        yield
        end = time.monotonic_ns()
        self._end_phase(end)
        if (last := self._runner.last_step) is not None:
            kind = "decode" if last.decode else "prefill"
            self._steps.append(Step(kind, begin, end, last.T, last.S))
            self._programs.append(last.program)
        self._collect(keep=True)

    def timeline(self) -> Timeline:
        """What was recorded; called when the recorder is off.

        Raises:
            PykernelsError: steps of a GPU, of which the profiler saw nothing.
        """
        if self._real and self._steps and not self._on_gpu:
            raise PykernelsError(
                f"torch's profiler saw nothing of {', '.join(self._gpus)}",
                "It needs CUPTI, and a driver that lets this user profile"
                " (NVreg_RestrictProfilingToAdminUsers=0)",
            )
        spans = [span for span in (*self._spans, *self._on_gpu) if self._of_steps(span)]
        spans.sort(key=lambda span: (span.lane, span.begin, -span.end))
        return Timeline(tuple(self._steps), tuple(spans), self._title)

    def phase(self, name: str) -> None:
        """See ``active.Sink``."""
        now = time.monotonic_ns()
        self._end_phase(now)
        self._phase = name, now

    def node(self, stream: str, name: str, begin: int, end: int) -> None:
        """See ``active.Sink``."""
        lane = Lane(STREAM, stream, 0, f"{stream} stream")
        self._spans.append(Span(lane, name, self._op(name), begin, end, self._layer(name)))

    @property
    def _real(self) -> bool:
        """Whether there is a GPU, and not Triton's interpreter."""
        return any(gpu.removeprefix("cuda:").isdecimal() for gpu in self._gpus)

    def _end_phase(self, now: int) -> None:
        if self._phase is not None:
            name, begin = self._phase
            self._spans.append(Span(THREAD, name, name, begin, now))
            self._phase = None

    def _pools(self) -> list:
        return [] if self._runner.pool is None else [self._runner.pool]

    def _node(self, name: str) -> Node | None:
        """The node of that name, or of the first part of it."""
        while name and name not in self._nodes:
            name = name.rpartition(".")[0]
        return self._nodes.get(name)

    def _op(self, name: str) -> str:
        """The op of a node or of a part of it; what it is to ``partition`` at a channel's ends."""
        node = self._node(name)
        if node is None:
            return name
        part = name.removeprefix(node.name).split(".")
        return WAIT if "wait" in part else COPY if "submit" in part else op_of(node)

    def _layer(self, name: str) -> int | None:
        node = self._node(name)
        return None if node is None else node.layer

    def _collect(self, keep: bool) -> None:
        several = len(self._pools()) > 1
        for number, pool in enumerate(self._pools()):
            trace = pool.tracing
            assert trace is not None
            calls = trace.calls()
            if not keep:
                trace.skip()
                continue
            tasks = trace.take()
            for begin, jobs in calls:
                end = max(begin, jobs.jobs[-1].times[1])
                self._spans.append(Span(THREAD, "jobs", "jobs", begin, end))
            prefix = f"pool {number} " if several else ""
            self._spans += (self._task(task, number, prefix) for task in tasks)

    def _task(self, task: TaskSpan, pool: int, prefix: str) -> Span:
        lane = Lane(WORKER, "cpu", (pool << 16) + task.worker, f"{prefix}worker {task.worker}")
        name = "a barrier or the next job" if task.job is None else task.job.name
        layer, begin, end = self._layer(name), task.begin, task.end
        if task.task == WAITED or task.job is None:
            return Span(lane, f"wait for {name}", WAIT, begin, end, layer)
        detail = "setup" if task.task == SETUP else task.job.describe(task.task)
        return Span(lane, name, self._op(name), begin, end, layer, detail)

    def _read(self, activity: GpuActivity) -> None:
        """What the GPUs did since the recorder was entered, by the nodes of the program that ran
        last; steps between those that are recorded are left out then."""
        spans = gpu_spans(activity.events, activity.offset_ns)
        halves = partition(self._programs[-1]) if self._programs else {}
        for gpu in self._gpus:
            nodes = halves[gpu].nodes if gpu in halves else ()
            self._on_gpu += assigned([span for span in spans if span.lane.device == gpu], nodes)
        self._on_gpu += (span for span in spans if span.lane.device not in self._gpus)

    def _of_steps(self, span: Span) -> bool:
        return any(span.begin < step.end and step.begin < span.end for step in self._steps)
