"""What comes out of the engine: chunks while it runs, completions at the end, figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ...kv_tiers.stats import LevelStats
from ...runner.routing import RoutedExperts

FinishReason = Literal["stop", "length", "cancelled", "deadline", "error"]
"""stop: an end token or a stop string; length: max_tokens."""


class TokenLogprob(NamedTuple):
    """Log-probability of a token, and of the most likely ones: (id, logprob), best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One output's new tokens and text. The last of each output has a ``finish_reason``.

    Text may come later than its tokens: a character may be incomplete, a stop string may begin.
    """

    output: int
    """Which of the request's ``n`` outputs."""
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class RequestStats:
    """Figures of one output. Seconds are wall-clock; ``time_to_first_token`` is from submission."""

    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose keys and values were in the cache already."""
    new_tokens: int
    queue_seconds: float
    time_to_first_token: float | None
    decode_seconds: float
    """From the first token to the last."""
    preemptions: int

    @property
    def decode_tokens_per_second(self) -> float:
        return (self.new_tokens - 1) / self.decode_seconds if self.decode_seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Completion:
    """One output, whole. A token that ended it is in ``token_ids``, but not in ``text``."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob, ...]
    """One for each of the prompt's tokens from ``logprob_start`` on."""
    finish_reason: FinishReason
    stats: RequestStats
    routed_experts: RoutedExperts | None = None
    """The computed tokens' experts, if ``SamplingParams.routed_experts`` asks for them."""


@dataclass(frozen=True, slots=True)
class Result:
    """All outputs of a request."""

    name: str
    prompt_ids: tuple[int, ...]
    completions: tuple[Completion, ...]

    @property
    def text(self) -> str:
        """Text of the first output."""
        return self.completions[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of the first output."""
        return self.completions[0].token_ids


@dataclass(slots=True)
class EngineStats:
    """Counts since the engine began, and how things stand."""

    steps: int = 0
    computed_tokens: int = 0
    """Tokens that went through the model, those of a recomputation as well."""
    prompt_tokens: int = 0
    """Tokens in the prompts of admitted requests."""
    cached_tokens: int = 0
    """The ones of these that were found in the cache."""
    new_tokens: int = 0
    draft_tokens: int = 0
    """Drafts that steps have checked."""
    accepted_tokens: int = 0
    """The ones of these that were what was drawn."""
    preemptions: int = 0
    finished: int = 0
    failed_steps: int = 0
    decode_seconds: float = 0.0
    """Seconds of the steps that read no prompt."""
    decode_steps: Counter[int] = field(default_factory=Counter)
    """How many of those there were, by their tokens."""
    prompt_steps: Counter[str] = field(default_factory=Counter)
    """Steps with prompts, by their way (``runner.route.Route``)."""
    parked_seconds: float = 0.0
    """For which steps of long prompts waited for those of short ones."""
    waiting: int = 0
    running: int = 0
    free_pages: int = 0
    cached_pages: int = 0
    """Pages that only the prefix tree holds: as good as free."""
    kv_levels: Mapping[str, LevelStats] = field(default_factory=dict)
    """Of what is behind the pages, by name."""
