"""A whole ablation: every stage of every model, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

from bench.e2e.ours import Ours, Shape
from bench.e2e.players import Case, Engines, Rates, Transformers
from bench.harness.machine import describe_machine
from bench.harness.timing.rows import reason
from bench.peers.client import PeerMissing
from bench.tables.ablation import OP, Row
from model.named import ARCHS
from pykernels.errors import PykernelsError
from pykernels.quant import get_format
from pykernels.target import Target
from runtime.planning.config import ExecutionConfig

from .stages import stages

EAGER = "transformers, bf16, on the CPU"
SECONDS = 1800.0
"""The time limit of its process."""


@dataclass(frozen=True)
class Settings:
    """One run.

    Attributes:
        device: "cpu", or "cuda:N" with the experts on the CPU.
        tokens: decode steps of a turn; ``context``: tokens in each cache before.
        batches: sequences at once, a case each.
        eager: whether transformers' own model is the first stage.
    """

    arch: str
    fmt: str
    device: str
    layers: int | None
    experts: int | None
    vocab: int | None
    threads: int
    kernel: str
    tokens: int
    context: int
    batches: tuple[int, ...]
    rounds: int
    eager: bool

    def check(self) -> Settings:
        """Itself. Raises PykernelsError for what there is not."""
        if self.arch not in ARCHS:
            raise PykernelsError(
                f"there is no architecture {self.arch!r}", f"Use {', '.join(ARCHS)}"
            )
        get_format(self.fmt)
        numbers = (self.tokens, self.context, self.rounds, *self.batches)
        if min(numbers) < 1 or any(n is not None and n < 1 for n in (self.layers, self.experts)):
            raise PykernelsError("a number below 1", "Give counts from 1 on")
        return self


class AblationRun:
    """See ``harness.session.Run``."""

    def __init__(self, settings: Settings, target: Target) -> None:
        self.settings, self.target = settings.check(), target
        self.step: Callable[[str, int, int], None] = lambda *_: None
        self._left = list(settings.batches)
        self._under_way: list[Row] = []

    def rows(self) -> Iterator[list[Row]]:
        """The rows of each batch size; of one that is ended early those of its whole rounds."""
        s = self.settings
        self._machine, self._start = describe_machine(self.target, s.device), time.monotonic()
        self.step("weights", 0, s.rounds)
        shape = Shape(s.arch, s.layers, s.experts, s.vocab)
        execution = ExecutionConfig(threads=s.threads, kernel=s.kernel)
        ours = Ours.random(shape, s.fmt, execution)
        try:
            for batch in s.batches:
                self._under_way = []
                try:
                    self._case(ours, shape, Case("decode", s.tokens, batch, s.context))
                except BaseException:
                    yield self._under_way
                    raise
                self._left.remove(batch)
                yield self._under_way
        finally:
            ours.close()

    def head(self) -> dict[str, Any]:
        """See ``harness.session``."""
        s, machine = self.settings, self._machine
        minutes = round((time.monotonic() - self._start) / 60, 1)
        left = ", ".join(map(str, self._left))
        return {
            "machine": machine,
            "headline": f"{machine['name']}: what each idea adds to decode",
            "settings": {**asdict(s), "minutes_taken": minutes},
            "quick": False,
            "part": (OP,),
            "notes": [f"Not measured: batch {left}."] if left else [],
            "missing": [f"batch {batch}" for batch in self._left],
            "why": "",
        }

    def _case(self, ours: Ours, shape: Shape, case: Case) -> None:
        """Rows of one batch size, anew after each of ``rounds`` rounds: a turn of each stage."""
        s = self.settings
        every = stages(s.device, s.kernel, case.batch)
        names = [*([EAGER] if s.eager else []), *(stage.name for stage in every)]
        engines: dict[str, Engines] = {}
        eager = Transformers(shape, s.threads) if s.eager else None
        whys: dict[str, str] = {}
        turns: dict[str, list[Rates]] = {name: [] for name in names}
        try:
            for stage in every:
                self.step(f"batch {case.batch}: {stage.name}", 0, s.rounds)
                try:
                    engines[stage.name] = Engines(partial(stage.make, ours), [case])
                except PykernelsError as error:
                    whys[stage.name] = reason(error)
            for number in range(s.rounds):
                self.step(f"batch {case.batch}: round {number + 1}", number, s.rounds)
                for name, engine in engines.items():
                    turns[name].append(engine.turn([case]))
                if eager is not None and EAGER not in whys:
                    try:
                        (played,) = eager.turn([case], SECONDS).values()
                        turns[EAGER].append({case: played[case].tok_s})
                    except PeerMissing as error:
                        whys[EAGER] = str(error)
                rates = {n: [turn[case] for turn in turns[n]] for n in names if n not in whys}
                rows = self._rows(ours, case, names, rates, whys)
                for row in rows:
                    if row["stage"] in engines and s.device != "cpu":
                        runner = engines[row["stage"]].timer(case).runner
                        row["deferred"] = runner.deferred
                self._under_way = rows
        finally:
            for engine in engines.values():
                engine.close()

    def _rows(
        self,
        ours: Ours,
        case: Case,
        names: list[str],
        rates: dict[str, list[float]],
        whys: dict[str, str],
    ) -> list[Row]:
        s, rows = self.settings, []
        timed = list(rates)
        for name in names:
            row = {
                "op": OP,
                "name": "pykernels",
                "model": ours.name,
                "format": s.fmt,
                "layers": ours.layers,
                "device": s.device,
                "threads": s.threads,
                "tokens": case.tokens,
                "batch": case.batch,
                "context": case.context,
                "rounds": max(map(len, rates.values()), default=0),
                "stage": name,
            }
            if name in whys:
                rows.append(row | {"why": whys[name]})
                continue
            mine = median(rates[name])
            before = timed[max(0, timed.index(name) - 1)]
            rows.append(
                row
                | {
                    "tok_s": round(mine, 2),
                    "us_per_step": round(1e6 * case.batch / mine, 1),
                    "x_before": faster(rates[name], rates[before]),
                    "x_first": faster(rates[name], rates[timed[0]]),
                }
            )
        return rows


def faster(mine: list[float], theirs: list[float]) -> float:
    """The median of the ratios of the rounds."""
    return round(median(a / b for a, b in zip(mine, theirs, strict=True)), 3)
