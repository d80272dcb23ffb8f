"""Which requests `pykernels bench disagg` makes, and on which engines."""

from __future__ import annotations

from dataclasses import dataclass

from bench.papers.osdi_text import DECODE_PROMPT, PREFILL_TOKENS
from pykernels.errors import PykernelsError
from runtime.planning.config import ExecutionConfig
from runtime.planning.option import option

from ..ways import Way, count_gpus, named, numbers, on_all, on_first

PARTS = ("streams", "requests", "behind")
SWITCH = ("on", "off")
LEAST_DECODE, MOST_DECODE = 16, 480
"""Tokens of an answer that is to take as long as a prompt; the paper has the larger number."""
NO_YIELD = {"prefill_yield": 0.0}
"""Of ``EngineConfig``: a long prompt's step lets nobody else in."""


@dataclass(frozen=True)
class Requests:
    """Sizes of all of them."""

    parts: str = option(
        ",".join(PARTS),
        "What is timed: sequences that decode, alone and beside long prompts (streams); prompts and"
        " answers that come at once (requests); a short request behind a long prompt (behind).",
        "PART,PART",
    )
    batches: str = option("1,2,4,6", "How many sequences decode.", "N,M")
    context: int = option(128, "Tokens in each one's cache before.", "N", kind=int, least=1)
    answer: int = option(
        2048, "Tokens of each, behind which another one begins.", "N", kind=int, least=64
    )
    prompt: int = option(PREFILL_TOKENS, "Tokens of a long prompt.", "N", kind=int, least=1)
    prompts: int = option(
        2, "Long prompts beside the sequences, one behind the other.", "N", kind=int, least=1
    )
    decode: int | None = option(
        None,
        "Tokens of an answer that comes with a prompt.",
        "N",
        kind=int,
        shown=f"as many as take as long as the prompt, {MOST_DECODE} at most",
        least=2,
    )
    behind: int = option(
        85000, "Tokens of the prompt that the short request is behind.", "N", kind=int, least=1
    )
    short: int = option(128, "Tokens of that request.", "N", kind=int, least=1)
    budget: int | None = option(None, "Tokens of a step.", "N", kind=int, shown="auto", least=1)
    repeats: int = option(3, "Of requests and behind: medians.", "N", kind=int, least=1)
    yields: str = option(
        "on",
        "On one GPU: a long prompt's step lets others in (on), or nobody (off), or both after each"
        " other.",
        "on|off|on,off",
    )

    def check(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Parts and batches. Raises PykernelsError for what cannot be meant."""
        named("--yields", self.yields, SWITCH)
        return named("--parts", self.parts, PARTS), numbers("--batches", self.batches, "1,2,4")

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        parts = named("--parts", self.parts, PARTS)
        return max(
            self.prompt if {"streams", "requests"} & {*parts} else 1,
            self.behind if "behind" in parts else 1,
        )

    @property
    def settings(self) -> str:
        """Options that make the longest sequence shorter."""
        asked = named("--parts", self.parts, PARTS)
        own = {"streams": "--prompt", "requests": "--decode", "behind": "--behind"}
        return "".join(f"{own[part]}, " for part in asked) + "--short, --context or --answer"

    @property
    def positions(self) -> int:
        """Positions of the longest sequence."""
        decode = DECODE_PROMPT + (self.decode or MOST_DECODE)
        return max(self.longest, self.short, self.context + self.answer, decode) + 2


def ways_of(execution: ExecutionConfig, yields: str) -> list[Way]:
    """The CPU; or the first GPU, with yields or without, and all GPUs where there are several.

    Raises:
        PykernelsError: no yields, and no GPU.
    """
    count = count_gpus(execution.device)
    if not count:
        if yields != "on":
            raise PykernelsError(f"--yields {yields} is for a GPU", "Give --device cuda:0")
        return [Way("CPU", execution)]
    found = []
    for switch in named("--yields", yields, SWITCH):
        if switch == "on":
            found.append(Way("1 GPU", on_first(execution)))
            continue
        found.append(Way("1 GPU, no yields", on_first(execution), engine=NO_YIELD))
    if count > 1:
        found.append(Way(f"{count} GPUs", on_all(execution, "disaggregated")))
    return found
