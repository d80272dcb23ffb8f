"""One output being generated: its tokens, its state, its times."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Collection, Sequence

from pykernels.errors import PykernelsError

from ...kv_cache import PageTable
from ...runner.batch import BANNED_BIAS, SequenceSampling
from ...runner.constraint import MaskedOutput
from ...runner.counts import TokenCounts
from ...runner.routing import RoutedLayer, RoutingLog
from ...runner.sampling_params import MAX_SEED, SamplingParams
from .acceptance import Acceptance
from .drafters import Drafter
from .outputs import FinishReason, RequestStats, TokenLogprob
from .text import TextStream


class State(enum.Enum):
    NEW = "new"
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


Event = tuple["Request", int, TokenLogprob | None, str, FinishReason | None]
"""A token (-1: none), its logprob, the text to show, and why the request ended, if it did. Text
comes this way only from a request with stop strings: any other's is made by its consumer."""

Sink = Callable[[Event], None]


class Request:
    """One of the ``n`` outputs of a submitted prompt. The engine's thread alone changes it.

    Attributes:
        tokens: prompt and output; after a preemption all of them are computed again.
        computed: how many of them have keys and values in the cache, once the steps that are
            scheduled have ended.
        drawn: tokens of the output, those that are still being drawn included.
        sampling: how its tokens are drawn; ``early``: the first ``min_tokens`` of them.
        order: the smallest is served first and preempted last. It is (time of arrival + priority *
            ageing_seconds, arrival, index): a request that has waited ``ageing_seconds`` longer
            than another makes up for one step of priority, so none waits for ever.
        masked: of a request with a constraint, else None.
        text: of a request with stop strings, else None.
        routing: of a request that asks for its experts, else None.
        streamed: whether each token is an event; otherwise only the end is.
        drafter: of its next tokens, else None; ``acceptance``: how often its drafts were right.
        deadline: on the clock of ``time.perf_counter``.
    """

    __slots__ = (
        "acceptance",
        "admitted_at",
        "cached",
        "computed",
        "deadline",
        "drafter",
        "drawn",
        "early",
        "end_ids",
        "error",
        "first_at",
        "index",
        "last_at",
        "logprobs",
        "masked",
        "max_tokens",
        "min_tokens",
        "name",
        "order",
        "params",
        "preemptions",
        "prompt_logprobs",
        "prompt_size",
        "reason",
        "routing",
        "sampling",
        "sink",
        "state",
        "streamed",
        "submitted_at",
        "table",
        "text",
        "tokens",
    )

    def __init__(
        self,
        name: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        index: int,
        arrival: int,
        seed: int,
        max_tokens: int,
        eos_ids: Collection[int],
        vocab_size: int,
        now: float,
        ageing_seconds: float,
        sink: Sink,
        streamed: bool,
        text: TextStream | None = None,
        routed_layers: Sequence[RoutedLayer] = (),
    ) -> None:
        self.name, self.index, self.params = name, index, params
        self.tokens = list(prompt)
        self.prompt_size = len(self.tokens)
        self.computed = self.drawn = 0
        self.order = (now + params.priority * ageing_seconds, arrival, index)
        self.max_tokens, self.min_tokens = max_tokens, params.min_tokens
        self.end_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            self.end_ids = self.end_ids.union(eos_ids)
        counts = TokenCounts(prompt, max_tokens, vocab_size) if params.penalizes else None
        self.masked: MaskedOutput | None = None
        if params.constraint is not None:
            banned = [token for token, bias in params.logit_bias.items() if bias <= BANNED_BIAS]
            ends = self.end_ids if self.min_tokens else ()
            self.masked = MaskedOutput(params.constraint, vocab_size, banned, ends, self.min_tokens)
        mask = None if self.masked is None else self.masked.mask
        self.sampling = SequenceSampling(params, seed, counts, params.logit_bias, mask)
        self.early = self.sampling
        if self.min_tokens:
            bias = {**params.logit_bias, **dict.fromkeys(self.end_ids, -math.inf)}
            self.early = SequenceSampling(params, seed, counts, bias, mask)
        self.drafter: Drafter | None = None
        self.acceptance = Acceptance()
        self.table = PageTable(forks=params.n > 1)
        self.state = State.NEW
        self.reason: FinishReason | None = None
        self.error: BaseException | None = None
        self.text = text
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self.routing = RoutingLog(routed_layers) if params.routed_experts else None
        self.sink, self.streamed = sink, streamed
        self.submitted_at = now
        self.deadline = math.inf if params.deadline is None else now + params.deadline
        self.admitted_at = self.first_at = self.last_at = math.nan
        self.cached = 0
        self.preemptions = 0

    def resume(self, drawn: Sequence[int]) -> None:
        """Goes on behind tokens that another engine has drawn for it, as if it had been preempted
        behind them; they are not told again."""
        for count, token in enumerate(drawn, 1):
            self.tokens.append(token)
            if self.sampling.counts is not None:
                self.sampling.counts.add(token)
            if self.masked is not None:
                self.masked.accept(token)
            if self.text is not None:
                self.text.push(token, check=count > self.min_tokens)
        self.drawn = len(drawn)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_size

    @property
    def left(self) -> int:
        """Tokens that are not computed yet."""
        return len(self.tokens) - self.computed

    @property
    def next_sampling(self) -> SequenceSampling:
        """How the next token is drawn: no end token among the first ``min_tokens``."""
        return self.early if self.drawn < self.min_tokens else self.sampling

    @property
    def most_drafts(self) -> int:
        """Drafts that its next step may have: all its tokens are drawn in one way, and none lies
        behind ``max_tokens``. None where penalties or a constraint go by the token before."""
        if self.drafter is None or self.sampling.counts is not None or self.masked is not None:
            return 0
        early = self.drawn < self.min_tokens
        return (self.min_tokens if early else self.max_tokens) - self.drawn - 1

    @property
    def first_row(self) -> int:
        """Position of the first token that is to be computed for its logits: the last, or the one
        before the first prompt token whose log-probability is asked for and not there yet."""
        start = self.params.logprob_start
        if start is not None and start + len(self.prompt_logprobs) < self.prompt_size:
            return start + len(self.prompt_logprobs) - 1
        return len(self.tokens) - 1

    def prompt_logprob_positions(self, first: int, size: int) -> range:
        """Positions among ``size`` tokens from ``first`` on whose logits give a prompt token's
        logprob."""
        return range(max(first, self.first_row), min(first + size, self.prompt_size - 1))

    @property
    def output(self) -> tuple[int, ...]:
        return tuple(self.tokens[self.prompt_size :])

    def stats(self) -> RequestStats:
        first = None if math.isnan(self.first_at) else self.first_at - self.submitted_at
        begun = self.last_at if math.isnan(self.admitted_at) else self.admitted_at
        return RequestStats(
            prompt_tokens=self.prompt_size,
            cached_tokens=self.cached,
            new_tokens=self.num_output_tokens,
            queue_seconds=begun - self.submitted_at,
            time_to_first_token=first,
            decode_seconds=0.0 if first is None else self.last_at - self.first_at,
            preemptions=self.preemptions,
        )


def failed(name: str, error: BaseException) -> PykernelsError:
    """What ended the request of that name, or kept it from being made, as its consumer gets it."""
    if isinstance(error, PykernelsError):
        told = PykernelsError(f"{name}: {error.cause}", error.hint)
    else:
        cause = f"{name} failed: {type(error).__name__}: {error}"
        told = PykernelsError(cause, "Its traceback is the error's __cause__")
    told.__cause__ = error
    return told


def fork_seed(seed: int, index: int) -> int:
    """Seed of output ``index`` of a request; of output 0 the request's own.

    SplitMix64's finalizer (Steele et al., OOPSLA 2014): streams of near seeds have nothing in
    common.
    """
    if index == 0:
        return seed
    x = (seed + index * 0x9E3779B97F4A7C15) & (2**64 - 1)
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (x ^ (x >> 31)) & MAX_SEED
