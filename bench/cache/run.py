"""Rows of a cache's simulated hits, and of an engine on a GPU with such a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from statistics import mean, median

from bench.harness.timing.rows import Row, attempt
from runtime.experts.cache import POLICIES, CachePolicy, CacheStats
from runtime.experts.cache.simulate import Recording, best_fixed, simulate
from runtime.planning.config import ExecutionConfig
from runtime.profiling.engine_speed import EngineTimer, Load, decode_speed

from ..e2e.ours import Ours, cache_figures, roof

Step = Callable[[str], None]
"""Called before each part with its name."""
SWAPS = (0, 1, 2, 3)
"""Experts that a layer exchanges in a step, SMOE's Figure 14; 0: what the prompts have filled."""
_ROUNDS = 3


def slots_of(shares: Sequence[float], experts: int) -> list[int]:
    """Slots of a layer for each share of its experts, one at the least and all but one at most."""
    return [min(max(1, round(share * experts)), experts - 1) for share in shares]


def simulated(
    recordings: Sequence[Recording], experts: int, slots: Sequence[int], swaps: Sequence[int]
) -> Iterator[Row]:
    """A row for each size, policy and number of swaps.

    Args:
        experts: of a layer; ``slots``: sizes of its cache.
    """
    tokens = sum(len(one.ids) - one.prompt for one in recordings)
    for size in slots:
        known = best_fixed(recordings, experts, size)
        for name in POLICIES:
            for N in swaps:
                stats = simulate(recordings, experts, size, CachePolicy(name, N))
                yield {
                    **_named("simulated", size, name, N),
                    "share": round(size / experts, 4),
                    **hits(stats, tokens),
                    "best_fixed": round(known, 4),
                }


def simulated_plan(slots: Sequence[int], swaps: Sequence[int]) -> list[Row]:
    """Lists, for each row, the columns that name it."""
    cases = product(slots, POLICIES, swaps)
    return [_named("simulated", size, name, N) for size, name, N in cases]


def _named(kind: str, slots: int, policy: str, swaps: int) -> Row:
    return {"kind": kind, "policy": policy, "slots": slots, "swaps": swaps}


def hits(stats: CacheStats, steps: int) -> Row:
    """Hits of decode steps; what the CPU reads of the experts that they take; swaps a step."""
    return {
        "hit_rate": round(stats.hit_rate, 4),
        "cpu_bytes": round(stats.missed / max(1, stats.distinct), 4),
        "swaps_per_step": round(stats.swaps / max(1, steps), 3),
    }


@dataclass(frozen=True)
class OnGpu:
    """How an engine is timed.

    Attributes:
        execution: on a GPU, with the experts on the CPU.
        lengths: of prompts; the first one's context is decoded behind.
        tokens: decode steps.
    """

    execution: ExecutionConfig
    lengths: tuple[int, ...] = (512,)
    tokens: int = 128

    def rows(
        self,
        ours: Ours,
        experts: int,
        slots: Sequence[int],
        policies: Sequence[CachePolicy],
        step: Step = lambda name: None,
    ) -> Iterator[Row]:
        """A row without a cache, and one for each size and policy; of these one that fails has
        ``why``."""
        for named, (size, policy) in zip(
            self.plan(slots, policies), self._cases(slots, policies), strict=True
        ):
            share = {"share": round(size / experts, 4)}
            part = partial(self._row, ours, size, policy, step)
            yield named | share | (attempt(part) if size else part())

    def plan(self, slots: Sequence[int], policies: Sequence[CachePolicy]) -> list[Row]:
        """Lists, for each row, the columns that name it."""
        return [
            _named("measured", size, policy.name, policy.swaps)
            if size
            else _named("measured", 0, "", 0)
            for size, policy in self._cases(slots, policies)
        ]

    @staticmethod
    def _cases(
        slots: Sequence[int], policies: Sequence[CachePolicy]
    ) -> list[tuple[int, CachePolicy]]:
        return [(0, CachePolicy()), *((size, policy) for size in slots for policy in policies)]

    def _row(self, ours: Ours, slots: int, policy: CachePolicy, step: Step) -> Row:
        name = f"{slots} slots, {policy.name}, {policy.swaps} swaps"
        step(f"{name}: compiling")
        load = Load(max(self.lengths), self.tokens, 1, self.lengths[0])
        execution = replace(
            self.execution,
            expert_cache=slots,
            expert_cache_policy=policy.name,
            expert_cache_swaps=policy.swaps,
        )
        timer = ours.timer(load, execution)
        try:
            step(name)
            timer.prefill(self.lengths[0])
            timer.decode(1, self.lengths[0], 4)
            return self._figures(timer, ours)
        finally:
            timer.close()
            timer.runner.close()

    def _figures(self, timer: EngineTimer, ours: Ours) -> Row:
        before = (
            replace(timer.runner.expert_slots.stats)
            if timer.runner.expert_slots is not None
            else None
        )
        roofs, steps = [roof(self.execution.threads)], []
        for _ in range(_ROUNDS):
            steps += timer.decode(1, self.lengths[0], self.tokens)
        roofs.append(roof(self.execution.threads))
        program = timer.runner.decode_steps[0].program
        speed = decode_speed(steps, program, 1, ours.layers, mean(roofs))
        row: Row = {
            "decode_tok_s": speed.decode_tok_s,
            "us_per_step": speed.us_per_step,
            "bytes_per_step": speed.bytes_per_step,
            "roof_gbps": speed.roof_gbps,
            "cpu_busy": speed.cpu_busy,
        }
        if timer.runner.expert_slots is not None and before is not None:
            row |= hits(since(timer.runner.expert_slots.stats, before), len(steps))
            row |= {"cache_slots": cache_figures(timer.runner)["cache_slots"]}
        for length in self.lengths:
            timer.prefill(length)
            seconds = median(timer.prefill(length) for _ in range(_ROUNDS))
            row[f"ttft_ms_{length}"] = round(1e3 * seconds, 2)
        return row


def since(stats: CacheStats, before: CacheStats) -> CacheStats:
    """What was counted since then."""
    old = asdict(before)
    return CacheStats(**{name: value - old[name] for name, value in asdict(stats).items()})
