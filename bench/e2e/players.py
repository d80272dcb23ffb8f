"""Players timed on a whole model: our engine, llama.cpp's programs, transformers' own model.

A turn is every case once, in tokens a second. The peers run in processes of their own, which load
the model anew; the workers of ours sleep meanwhile.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Protocol

from bench.peers import llama_bench
from bench.peers.catalog import ROOT
from bench.peers.client import PeerMissing
from bench.peers.llama_bench import CPU_ONLY, DEFAULT, Batching, Offload
from bench.peers.llama_fit import fitted
from runtime.devices.cpu.runner import CpuRunner
from runtime.profiling.engine_speed import EngineTimer, Load, StepTime

from .ours import Shape, spin

SECONDS = 1800.0
"""The time limit of transformers' process."""


@dataclass(frozen=True)
class Case:
    """One case to time.

    Attributes:
        op: "prefill": one prompt of ``tokens``; "decode": so many steps.
        batch: sequences at once; ``context``: tokens in each one's cache before.
    """

    op: str
    tokens: int
    batch: int = 1
    context: int = 0


Rates = dict[Case, float]
"""Tokens a second."""


class Player(Protocol):
    """One of those who are timed.

    Attributes:
        settings: options with which it played a case, for those that have a choice.
    """

    settings: dict[Case, str]

    def turn(self, cases: Sequence[Case]) -> Rates:
        """Each case that it plays once. Raises PeerMissing where it cannot."""
        ...


class Engines:
    """Ours in one way: an engine for each batch size, whose steps are kept.

    Args:
        make: an engine with room for a load.

    Raises:
        PykernelsError: what such an engine needs is not there.
    """

    def __init__(self, make: Callable[[Load], EngineTimer], cases: Sequence[Case]) -> None:
        self.prompts: dict[Case, list[float]] = {}
        self.steps: dict[Case, list[StepTime]] = {}
        self._timers: dict[int, EngineTimer] = {}
        for batch in dict.fromkeys(case.batch for case in cases):
            load = load_of([case for case in cases if case.batch == batch])
            self._timers[batch] = timer = make(load)
            timer.prefill(min(load.prompt, 64))
            timer.decode(batch, 8, 2)

    def turn(self, cases: Sequence[Case]) -> Rates:
        rates: Rates = {}
        for case in cases:
            timer = self._timers[case.batch]
            if (pool := timer.runner.pool) is not None:
                spin(pool, "cpu" if isinstance(timer.runner, CpuRunner) else "cuda")
            if case.op == "prefill":
                took = timer.prefill(case.tokens)
                self.prompts.setdefault(case, []).append(took)
                rates[case] = case.tokens / took
            else:
                steps = timer.decode(case.batch, case.context, case.tokens)
                self.steps.setdefault(case, []).extend(steps)
                rates[case] = case.batch * len(steps) / sum(step.seconds for step in steps)
        return rates

    def timer(self, case: Case) -> EngineTimer:
        """The one of a case's batch."""
        return self._timers[case.batch]

    def close(self) -> None:
        """Ends the engines; the workers stay."""
        for timer in self._timers.values():
            timer.close()
            timer.runner.close()


def load_of(cases: Sequence[Case]) -> Load:
    """What an engine needs room for: the largest of cases of one batch size."""
    prompts = [case.tokens for case in cases if case.op == "prefill"]
    decodes = [case for case in cases if case.op == "decode"]
    return Load(
        prompt=max(prompts, default=64),
        tokens=max((case.tokens for case in decodes), default=2),
        batch=cases[0].batch,
        context=max((case.context for case in decodes), default=8),
    )


class LlamaCpp:
    """llama.cpp on a GGUF file of the same shapes and type.

    Args:
        prompts: "" to play decodes, else prompts: "default" as its program takes them, "best" with
            the fastest of ``llama_bench.batchings``, which are tried in the first turn.
    """

    def __init__(
        self, file: Path, threads: int, offload: Offload = CPU_ONLY, prompts: str = ""
    ) -> None:
        self.file, self.threads, self.offload, self.prompts = file, threads, offload, prompts
        self.settings: dict[Case, str] = {}
        self._batchings: dict[Case, Batching] = {}

    def turn(self, cases: Sequence[Case]) -> Rates:
        self.offload = fitted(self.offload, self.file)
        op = "prefill" if self.prompts else "decode"
        return {case: self._rate(case) for case in cases if case.op == op}

    def _rate(self, case: Case) -> float:
        file, threads, offload = self.file, self.threads, self.offload
        words = [*offload.options, "-t", str(threads)]
        if case.op == "decode":
            self.settings[case] = " ".join(words)
            sizes = case.tokens, case.batch, case.context
            return llama_bench.decode(file, *sizes, threads, offload=offload)
        if case not in self._batchings:
            best = self.prompts == "best"
            self._batchings[case] = (
                llama_bench.best_batching(file, case.tokens, threads, offload) if best else DEFAULT
            )
        batching = self._batchings[case]
        self.settings[case] = " ".join([*words, *batching.options])
        return llama_bench.prefill(file, case.tokens, threads, offload=offload, batching=batching)


def llama_players(file: Path, threads: int, offload: Offload) -> dict[str, Player]:
    """llama.cpp's players by name: its decodes, its prompts by default and at its best."""
    return {
        offload.name: LlamaCpp(file, threads, offload),
        f"{offload.name} default": LlamaCpp(file, threads, offload, "default"),
        f"{offload.name} best": LlamaCpp(file, threads, offload, "best"),
    }


class Transformers:
    """transformers' own eager model of the architecture, bfloat16."""

    def __init__(self, shape: Shape, threads: int) -> None:
        self.shape, self.threads = shape, threads
        self.settings: dict[Case, str] = {}

    def turn(self, cases: Sequence[Case]) -> Rates:
        s = self.shape
        asked = json.dumps([astuple(case) for case in cases])
        numbers = [str(n or 0) for n in (s.layers, s.experts, s.vocab, self.threads)]
        try:
            done = subprocess.run(
                [sys.executable, "-m", "bench.e2e.eager", s.arch, *numbers, asked],
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=SECONDS,
                errors="replace",
            )
        except subprocess.TimeoutExpired:
            raise PeerMissing(f"it ran for over {SECONDS:.0f} s") from None
        if done.returncode:
            last = [line.strip() for line in done.stderr.splitlines() if line.strip()][-1:]
            raise PeerMissing("".join(last)[:200] or f"it ended with {done.returncode}")
        return dict(zip(cases, json.loads(done.stdout), strict=True))
