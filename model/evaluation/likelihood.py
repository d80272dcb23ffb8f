"""How likely a model holds given texts: all tokens of a continuation at once, through the engine.

A request whose prompt is the context and the continuation without its last token gives logprobs of
the prompt's tokens from the context's end on; a bias makes it draw the last one, whose logprob,
like any, is that of the logits without it. So nothing is computed that is not needed, requests run
side by side, and whole pages that begin alike are computed once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pykernels.errors import PykernelsError
from runtime.engine import RequestHandle, Result, SamplingParams

from ..llm import LLM

ROWS = 128
"""A step's rows of logits: what ``load_engine`` should be given as ``max_num_logits`` for long
continuations. An engine with fewer takes more steps."""
_SURE = 1e30
"""A bias that decides what is drawn."""


@dataclass(frozen=True)
class Likelihood:
    """Likelihood of one continuation.

    Attributes:
        logprob: natural logarithm of its probability behind its context.
        greedy: whether greedy decoding would have written it.
        tokens: of the continuation.
    """

    logprob: float
    greedy: bool
    tokens: int


Pair = tuple[Sequence[int], Sequence[int]]
"""Token ids of a context, at least one, and of its continuation."""


def likelihoods(
    llm: LLM, pairs: Sequence[Pair], progress: Callable[[int], None] = lambda count: None
) -> list[Likelihood]:
    """The likelihood of each continuation behind its context.

    Args:
        progress: called with 1 after each.

    Raises:
        PykernelsError: an empty context, or a continuation longer than the model's.
    """
    whole = [
        _fit(context, continuation, llm.runner.max_model_len) for context, continuation in pairs
    ]
    handles: list[RequestHandle | None] = []
    try:
        for tokens, (_, continuation) in zip(whole, pairs, strict=True):
            handles.append(_submit(llm, tokens, len(continuation)) if continuation else None)
        results = []
        for handle in handles:
            results.append(Likelihood(0.0, True, 0) if handle is None else _of(handle.result()))
            progress(1)
        return results
    except BaseException:
        for handle in handles:
            if handle is not None:
                handle.cancel()
        raise


def _fit(context: Sequence[int], continuation: Sequence[int], limit: int) -> list[int]:
    """Both, the context cut on its left where the model has no room for it."""
    if not context:
        raise PykernelsError("an empty context", "Give it the token that texts begin with")
    whole = [*context, *continuation]
    if len(whole) <= limit:
        return whole
    if len(continuation) >= limit:
        raise PykernelsError(
            f"a continuation of {len(continuation)} tokens and a context of the model of {limit}",
            "Score it in pieces",
        )
    warnings.warn(f"A context is cut to the model's {limit} tokens.", stacklevel=4)
    return whole[-limit:]


def _submit(llm: LLM, tokens: list[int], continuation: int) -> RequestHandle:
    params = SamplingParams(
        temperature=0,
        max_tokens=1,
        ignore_eos=True,
        logprobs=1,
        logprob_start=len(tokens) - continuation if continuation > 1 else None,
        logit_bias={tokens[-1]: _SURE},
    )
    return llm.engine.submit(tokens[:-1], params)


def _of(result: Result) -> Likelihood:
    output = result.completions[0]
    each = (*output.prompt_logprobs, *output.logprobs)
    return Likelihood(
        sum(token.logprob for token in each),
        all(token.token == token.top[0][0] for token in each),
        len(each),
    )
