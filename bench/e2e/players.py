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

from bench.peers.catalog import ROOT
from bench.peers.client import PeerMissing
from bench.peers.llama_bench import decode_many, decodes, prompts
from bench.peers.llama_fit import fitted
from bench.peers.llama_settings import Batching, Offload, batchings, thread_counts
from runtime.devices.cpu.runner import CpuRunner
from runtime.profiling.engine_speed import EngineTimer, Load, StepTime

from .ours import Shape, spin


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


@dataclass(frozen=True)
class Played:
    """A case as a peer has played it: its tokens a second, and with which options."""

    tok_s: float
    settings: str = ""


Turn = dict[str, dict[Case, Played]]
"""What a peer's turn yields, by the names of the peer's columns."""


class Player(Protocol):
    """A peer.

    Attributes:
        names: of its columns, a way of its each.
    """

    names: tuple[str, ...]

    def turn(self, cases: Sequence[Case], seconds: float) -> Turn:
        """Each case that it plays once, each of its processes in so many seconds. Raises
        PeerMissing where it cannot."""
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
            # A GPU takes long prompts and contexts by other kernels, compiled when they first run.
            on_cpu = isinstance(timer.runner, CpuRunner)
            timer.prefill(min(load.prompt, 64) if on_cpu else load.prompt)
            timer.decode(batch, min(load.context, 8) if on_cpu else load.context, 2)

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


class LlamaDecodes:
    """llama.cpp's decodes, of one sequence on as many threads as were fastest in the first turn."""

    def __init__(self, file: Path, threads: int, offload: Offload) -> None:
        self.file, self.threads, self.offload = file, threads, offload
        self.names: tuple[str, ...] = (offload.name,)
        self._counts: dict[Case, list[int]] = {}

    def turn(self, cases: Sequence[Case], seconds: float) -> Turn:
        self.offload = fitted(self.offload, self.file)
        mine = [case for case in cases if case.op == "decode"]
        return {self.names[0]: {case: self._played(case, seconds) for case in mine}}

    def _played(self, case: Case, seconds: float) -> Played:
        file, threads, offload = self.file, self.threads, self.offload
        if case.batch > 1:
            sizes = case.tokens, case.batch, case.context
            rates = {threads: decode_many(file, *sizes, threads, offload, seconds)}
        else:
            counts = self._counts.get(case, thread_counts(threads))
            rates = decodes(file, case.tokens, case.context, counts, offload, seconds)
        best = max(rates, key=rates.__getitem__)
        self._counts[case] = [best]
        return Played(rates[best], " ".join([*offload.options, "-t", str(best)]))


class LlamaPrompts:
    """llama.cpp's prompts, as its program takes them unless told otherwise (default) and at its
    best: with the fastest of ``batchings`` in the first turn. The default, too, is timed again
    unless weights had to be loaded another way for it."""

    def __init__(self, file: Path, threads: int, offload: Offload) -> None:
        self.file, self.threads, self.offload = file, threads, offload
        self.names: tuple[str, ...] = (f"{offload.name} default", f"{offload.name} best")
        self._again: dict[Case, list[Batching]] = {}

    def turn(self, cases: Sequence[Case], seconds: float) -> Turn:
        self.offload = fitted(self.offload, self.file)
        found: Turn = {name: {} for name in self.names}
        for case in cases:
            if case.op == "prefill":
                for name, played in zip(self.names, self._played(case, seconds), strict=True):
                    if played is not None:
                        found[name][case] = played
        return found

    def _played(self, case: Case, seconds: float) -> tuple[Played | None, Played]:
        """By default, where that was timed, and at its best."""
        wanted = self._again.get(case, batchings(case.tokens, self.offload))
        file, threads, offload = self.file, self.threads, self.offload
        rates = prompts(file, case.tokens, threads, wanted, offload, seconds=seconds)
        words = " ".join([*offload.options, "-t", str(threads)])
        by = {one: Played(rates[one], f"{words} {' '.join(one.options)}") for one in rates}
        defaults = [one for one in rates if one.is_default]
        if case not in self._again:
            best = max(rates, key=rates.__getitem__)
            self._again[case] = [best, *(one for one in defaults if one.lm == best.lm)]
        return by[defaults[0]] if defaults else None, by[self._again[case][0]]


def llama_players(file: Path, threads: int, offload: Offload) -> list[Player]:
    """llama.cpp's players for a file."""
    return [LlamaDecodes(file, threads, offload), LlamaPrompts(file, threads, offload)]


class Transformers:
    """transformers' own eager model of the architecture, bfloat16."""

    def __init__(self, shape: Shape, threads: int) -> None:
        self.names: tuple[str, ...] = ("transformers bf16",)
        self.shape, self.threads = shape, threads

    def turn(self, cases: Sequence[Case], seconds: float) -> Turn:
        s = self.shape
        asked = json.dumps([astuple(case) for case in cases])
        numbers = [str(n or 0) for n in (s.layers, s.experts, s.vocab, self.threads)]
        try:
            done = subprocess.run(
                [sys.executable, "-m", "bench.e2e.eager", s.arch, *numbers, asked],
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=seconds,
                errors="replace",
            )
        except subprocess.TimeoutExpired:
            raise PeerMissing(f"it ran for over {seconds:.0f} s") from None
        if done.returncode:
            last = [line.strip() for line in done.stderr.splitlines() if line.strip()][-1:]
            raise PeerMissing("".join(last)[:200] or f"it ended with {done.returncode}")
        rates = map(Played, json.loads(done.stdout))
        return {self.names[0]: dict(zip(cases, rates, strict=True))}
