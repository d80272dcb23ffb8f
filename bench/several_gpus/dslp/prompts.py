"""Which prompts `pykernels bench dslp` times, and in which ways."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.planning.config import ExecutionConfig
from runtime.planning.option import option

from ..ways import Way, count_gpus, named, numbers, on_first, on_some

ACCESS = {"on": "", "off": ", no peers"}
EXCHANGES = {"small_ep": "", "all_to_all": ", standard EP"}
"""How GPUs share experts, and what that adds to the name of a way."""
CPU_MOST = 4096
"""Tokens of the longest prompt that --cpu times: the paper's CPU reads prompts up to there."""

WHOLE_STEPS = {"prefill_yield": 0.0}
"""Of ``EngineConfig``: nobody waits, so steps are as long as they can be."""


@dataclass(frozen=True)
class Prompts:
    """Which prompts are timed, and in which ways."""

    lengths: str = option("256,1024,4096,16384,20480,32768,65536", "Tokens of the prompts.", "N,M")
    rounds: int = option(3, "Of each, after one that warms up.", "N", kind=int, least=1)
    budget: int | None = option(None, "Tokens of a step.", "N", kind=int, shown="auto", least=1)
    cpu: bool = option(
        False,
        f"Also by the CPU, beside the first GPU: prompts of at most {CPU_MOST} tokens.",
        kind=bool,
    )
    counts: str | None = option(
        None, "So many GPUs share a prompt, after each other.", "N,M", shown="all of them"
    )
    peer_access: str = option(
        "on",
        "With several GPUs: from one to the other directly (on), by main memory as cards for"
        " consumers do (off), or both after each other.",
        "on|off|on,off",
    )
    exchange: str = option(
        "small_ep",
        "How several GPUs share the experts of a step: as the engine does (small_ep), by standard"
        " expert parallelism (all_to_all), or both after each other.",
        "small_ep|all_to_all|small_ep,all_to_all",
    )
    thin: int | None = option(
        None,
        "Time the first N layers too: what a layer adds is then known, and the whole model's time"
        " follows.",
        "N",
        kind=int,
        shown="all the time is put down to the layers with experts",
        least=1,
    )

    def check(self) -> tuple[int, ...]:
        """The lengths. Raises PykernelsError for what cannot be meant."""
        named("--peer-access", self.peer_access, tuple(ACCESS))
        named("--exchange", self.exchange, tuple(EXCHANGES))
        return numbers("--lengths", self.lengths, "256,4096,32768")


def ways_of(execution: ExecutionConfig, prompts: Prompts) -> list[Way]:
    """The first GPU, and several by each exchange, with peer access and without."""
    found = [Way("1 GPU", on_first(execution), WHOLE_STEPS)]
    for exchange in named("--exchange", prompts.exchange, tuple(EXCHANGES)):
        for access in named("--peer-access", prompts.peer_access, tuple(ACCESS)):
            flags = {} if access == "on" else {"peer_access": "off"}
            for some in on_some(execution, "dslp", prompts.counts):
                several = f"{count_gpus(some.device)} GPUs"
                name = f"{several}{EXCHANGES[exchange]}{ACCESS[access]}"
                found.append(Way(name, some, WHOLE_STEPS, flags, exchange))
    return found
