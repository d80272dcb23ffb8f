"""From a prompt and its parameters to requests, or a refusal before any work is done."""

from __future__ import annotations

import itertools
import operator
import secrets
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from pykernels.errors import PykernelsError

from ...program.step_inputs import MAX_BIASES
from ...runner.batch import BANNED_BIAS
from ...runner.routing import RoutedLayer
from ...runner.sampling_params import MAX_SEED, SamplingParams
from .request import Request, Sink, failed, fork_seed
from .text import MakeDetokenizer, TextStream


class Limits(Protocol):
    """What bounds the requests of an engine; its runner's, see there."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def page_size(self) -> int: ...
    @property
    def routed_layers(self) -> Sequence[RoutedLayer]: ...


class Intake:
    """Makes the requests of one engine. Callable from any thread."""

    def __init__(
        self,
        runner: Limits,
        eos_ids: Collection[int],
        ageing_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self.ageing_seconds, self.clock = ageing_seconds, clock
        self.vocab_size, self.max_model_len = runner.vocab_size, runner.max_model_len
        self.num_pages, self.page_size = runner.num_pages, runner.page_size
        self.routed_layers = runner.routed_layers
        # Others are never drawn; ``min_tokens`` would write their bias past the logits.
        self.eos_ids = tuple(token for token in eos_ids if 0 <= token < runner.vocab_size)
        self._arrivals = itertools.count(1)

    def requests(
        self,
        prompt_ids: Iterable[int],
        params: SamplingParams | None,
        sink: Sink,
        streamed: bool,
        name: str | None,
        detokenizer: MakeDetokenizer | None,
        drawn: Sequence[int] = (),
    ) -> list[Request]:
        """``params.n`` requests of one prompt.

        Args:
            drawn: tokens of its one output that another engine has drawn, with the same seed; it
                goes on behind them.

        Raises:
            PykernelsError: this engine can never serve it; the line has its name.
        """
        params = params or SamplingParams()
        arrival = next(self._arrivals)
        name = name or f"request-{arrival}"
        prompt = self._prompt(name, prompt_ids)
        max_tokens = self._max_new_tokens(name, len(prompt), params)
        self._check_ids(name, params)
        self._check_drawn(name, params, drawn, max_tokens)
        if (params.logprob_start or 0) > len(prompt):
            raise PykernelsError(
                f"{name}: logprob_start={params.logprob_start} lies behind a prompt of"
                f" {len(prompt)}",
                f"Give 1 to {len(prompt)}",
            )
        if params.stop and detokenizer is None:
            raise PykernelsError(
                f"{name} has stop strings, and this engine has no detokenizer",
                "Give the engine one, or use stop_token_ids",
            )
        if params.routed_experts and not self.routed_layers:
            raise PykernelsError(
                f"{name} asks for routed experts, and no layer of this model chooses experts",
                "Leave routed_experts out, or use a Mixture-of-Experts model",
            )
        seed = secrets.randbelow(MAX_SEED + 1) if params.seed is None else params.seed
        now = self.clock()

        def one(index: int) -> Request:
            text = None
            if params.stop and detokenizer is not None:
                text = TextStream(detokenizer(), tuple(params.stop))
            return Request(
                name,
                prompt,
                params,
                index=index,
                arrival=arrival,
                seed=fork_seed(seed, index),
                max_tokens=max_tokens,
                eos_ids=self.eos_ids,
                vocab_size=self.vocab_size,
                now=now,
                ageing_seconds=self.ageing_seconds,
                sink=sink,
                streamed=streamed,
                text=text,
                routed_layers=self.routed_layers,
            )

        try:
            requests = [one(index) for index in range(params.n)]
            if drawn:
                requests[0].resume(drawn)
            return requests
        except Exception as error:  # of a constraint or a detokenizer, which are not the engine's
            raise failed(name, error) from error

    def _prompt(self, name: str, prompt_ids: Iterable[int]) -> list[int]:
        try:
            prompt = list(map(operator.index, prompt_ids))
        except TypeError:
            raise PykernelsError(
                f"{name}: the prompt is not a list of token ids", "Tokenize the text first"
            ) from None
        if not prompt:
            raise PykernelsError(f"{name}: the prompt is empty", "Give it at least one token")
        if min(prompt) < 0 or max(prompt) >= self.vocab_size:
            bad = min(prompt) if min(prompt) < 0 else max(prompt)
            raise PykernelsError(
                f"{name}: token {bad} of the prompt is outside the vocabulary of {self.vocab_size}",
                "Use the tokenizer of this model",
            )
        return prompt

    def _max_new_tokens(self, name: str, P: int, params: SamplingParams) -> int:
        """Most tokens that the output may have."""
        # The last token is drawn but never computed: it needs no place in the cache.
        places = self.num_pages * self.page_size + 1
        limit = min(self.max_model_len, places)
        new_tokens = max(1, params.min_tokens) if params.max_tokens is None else params.max_tokens
        if P + new_tokens > limit:
            what = "the context" if limit == self.max_model_len else "the KV cache"
            raise PykernelsError(
                f"{name}: a prompt of {P} and {new_tokens} new tokens can never fit into {what}"
                f" of {limit}",
                "Shorten the prompt, lower max_tokens"
                + ("" if limit == self.max_model_len else ", or give the cache more pages"),
            )
        return limit - P if params.max_tokens is None else params.max_tokens

    def _check_drawn(
        self, name: str, params: SamplingParams, drawn: Sequence[int], max_tokens: int
    ) -> None:
        if not drawn:
            return
        if (
            params.n > 1
            or len(drawn) >= max_tokens
            or min(drawn) < 0
            or max(drawn) >= self.vocab_size
        ):
            raise PykernelsError(
                f"{name} cannot go on behind {len(drawn)} tokens that were drawn elsewhere",
                "Give one output, and fewer of its tokens than max_tokens",
            )

    def _check_ids(self, name: str, params: SamplingParams) -> None:
        named: Sequence[tuple[str, Iterable[int]]] = (
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias),
        )
        for field, ids in named:
            if (most := max(ids, default=0)) >= self.vocab_size:
                raise PykernelsError(
                    f"{name}: token {most} of {field} is outside the vocabulary of"
                    f" {self.vocab_size}",
                    "Use the tokenizer of this model",
                )
        eos = () if params.ignore_eos else self.eos_ids
        ends = {*params.stop_token_ids, *eos} if params.min_tokens else set[int]()
        banned = {token for token, bias in params.logit_bias.items() if bias <= BANNED_BIAS}
        if len(banned | ends) >= self.vocab_size:
            raise PykernelsError(
                f"{name}: logit_bias and min_tokens exclude all {self.vocab_size} tokens",
                "Leave one that may come",
            )
        if (biased := len({*params.logit_bias, *ends})) > MAX_BIASES:
            raise PykernelsError(
                f"{name}: the logits of {biased} tokens are biased, by logit_bias or min_tokens",
                f"Name {MAX_BIASES} at most",
            )
