"""How a request's tokens are drawn, and when it ends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pykernels.errors import PykernelsError

from .constraint import Constraint

MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Checked at construction; a bad value raises ``PykernelsError`` that names the field.

    Logits go through bias, penalties, temperature, top-k, min-p and top-p, in this order, as in
    vLLM.

    Attributes:
        temperature: 0 is greedy.
        top_k: draw from the k most likely tokens; 0: from all.
        top_p: draw from the most likely tokens that make up this mass, 0 to 1.
        min_p: drop tokens less likely than this share of the most likely one, 0 to 1.
        repetition_penalty: divides positive logits of tokens seen in prompt or output, multiplies
            negative ones; above 0.
        presence_penalty: subtracted once for a token of the output, -2 to 2.
        frequency_penalty: subtracted for each occurrence in the output, -2 to 2.
        logit_bias: added to the logits, token id -> number; -inf: never drawn. With the end tokens
            of ``min_tokens`` at most 4096.
        logprobs: None, or how many of the most likely tokens to report beside the drawn one's
            log-probability, 0 to 20.
        logprob_start: with ``logprobs``: report them of the prompt's tokens too, from this position
            on, at least 1 (nothing is before the first). What lies before may come from the cache.
        seed: of the draws, 0 to 2**63 - 1; None: a new one for each request.
        n: outputs a prompt; each has a stream of draws of its own.
        max_tokens: most tokens an output; None: what context and cache hold.
        stop: an output ends before any of these strings; a single one may be given bare.
        stop_token_ids: an output ends with any of these, beside the model's own.
        ignore_eos: go on after the model's own end tokens.
        min_tokens: end tokens are not drawn, and stop strings not looked for, before this many.
        deadline: seconds from submission after which the request ends with what it has.
        priority: lower is served first and preempted last.
        constraint: which tokens may come next, as a grammar says; each output begins one of its
            own. None: any. Where ``logit_bias`` (of -inf) and ``min_tokens`` exclude all that it
            allows, the output ends with an error that says so, as where it raises one.
        routed_experts: tell which experts each token used, see ``Completion.routed_experts``.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    logprobs: int | None = None
    logprob_start: int | None = None
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    deadline: float | None = None
    priority: int = 0
    constraint: Constraint | None = field(default=None, hash=False)
    routed_experts: bool = False

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0, math.inf)
        _whole("top_k", self.top_k, 0)
        _number("top_p", self.top_p, 0, 1)
        _number("min_p", self.min_p, 0, 1)
        _number("repetition_penalty", self.repetition_penalty, 0, math.inf)
        if self.repetition_penalty == 0:
            raise _bad("repetition_penalty", 0, "a number above 0; 1 changes nothing")
        _number("presence_penalty", self.presence_penalty, -2, 2)
        _number("frequency_penalty", self.frequency_penalty, -2, 2)
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.logprob_start is not None:
            _whole("logprob_start", self.logprob_start, 1)
            if self.logprobs is None:
                raise _bad("logprob_start", self.logprob_start, "logprobs beside it")
        if self.seed is not None:
            _whole("seed", self.seed, 0, MAX_SEED)
        _whole("n", self.n, 1)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1)
        _whole("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _bad("min_tokens", self.min_tokens, f"at most max_tokens, {self.max_tokens}")
        if self.deadline is not None:
            _number("deadline", self.deadline, 0, math.inf)
        _whole("priority", self.priority)
        if not isinstance(self.routed_experts, bool):
            raise _bad("routed_experts", self.routed_experts, "True or False")
        self._freeze("logit_bias", _bias(self.logit_bias))
        self._freeze("stop", _strings(self.stop))
        self._freeze("stop_token_ids", _ids(self.stop_token_ids))

    def _freeze(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def penalizes(self) -> bool:
        """Whether drawing depends on which tokens were seen before."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )


def _bad(name: str, value: object, wanted: str) -> PykernelsError:
    return PykernelsError(f"{name}={value!r} cannot be used", f"Give {name} {wanted}")


def _number(name: str, value: Any, low: float, high: float) -> None:
    wanted = f"a finite number from {low}" + (f" to {high}" if high < math.inf else "")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _bad(name, value, wanted)
    if not (low <= value <= high and math.isfinite(value)):
        raise _bad(name, value, wanted)


def _whole(name: str, value: Any, low: int | None = None, high: int | None = None) -> None:
    wanted = "a whole number"
    wanted += "" if low is None else f" from {low}"
    wanted += "" if high is None else f" to {high}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise _bad(name, value, wanted)
    if (low is not None and value < low) or (high is not None and value > high):
        raise _bad(name, value, wanted)


def _bias(bias: Any) -> dict[int, float]:
    wanted = "token ids from 0 and numbers; -inf for tokens that must not come"
    if not isinstance(bias, Mapping):
        raise _bad("logit_bias", bias, wanted)
    for token, value in bias.items():
        whole = isinstance(token, int) and not isinstance(token, bool) and token >= 0
        if not whole or isinstance(value, bool) or not isinstance(value, (int, float)):
            raise _bad("logit_bias", {token: value}, wanted)
        if math.isnan(value) or value == math.inf:
            raise _bad("logit_bias", {token: value}, wanted)
    return dict(bias)


def _strings(stop: Any) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence) or not all(isinstance(s, str) and s for s in strings):
        raise _bad("stop", stop, "strings that are not empty")
    return tuple(strings)


def _ids(ids: Any) -> tuple[int, ...]:
    if not isinstance(ids, Sequence) or isinstance(ids, str):
        raise _bad("stop_token_ids", ids, "a list of token ids")
    for token in ids:
        _whole("stop_token_ids", token, 0)
    return tuple(ids)
