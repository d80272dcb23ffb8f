"""What a step's result says of its requests."""

from __future__ import annotations

from ..runner.batch import StepResult
from .requests.outputs import TokenLogprob
from .requests.request import State
from .scheduling.step import ScheduledStep


def check_drawn(sampled_token_ids: list[int], R: int, vocab_size: int) -> None:
    """Raises RuntimeError unless there is a token of the vocabulary for each row."""
    # An id out of range would be an address out of range in the next step.
    if len(sampled_token_ids) != R:
        raise RuntimeError(f"the runner gave {len(sampled_token_ids)} tokens for {R} rows")
    if R and not 0 <= min(sampled_token_ids) <= max(sampled_token_ids) < vocab_size:
        raise RuntimeError(f"the runner drew a token outside the vocabulary: {sampled_token_ids}")


def write_routing(step: ScheduledStep, result: StepResult) -> None:
    """Adds a step's experts to the requests that ask for them, before the next step is launched,
    which writes over them."""
    at = 0
    # What a decoding request computes is its last token, until this step's is appended.
    for request, count in zip(step.decoding, step.num_scheduled, strict=True):
        if request.routing is not None and request.state is State.RUNNING:
            request.routing.write(len(request.tokens) - 1, at, at + 1, result.routing)
        at += count
    for request, first, size in step.chunks:
        if request.routing is not None and request.state is State.RUNNING:
            request.routing.write(first, at, at + size, result.routing)
        at += size


def logprob_of(token: int, top: int, row: int, result: StepResult) -> TokenLogprob:
    """The log-probability of a row's token, and those of the ``top`` most likely tokens."""
    if result.logprobs is None:
        raise RuntimeError("the runner gave no logprobs")
    pairs: tuple[tuple[int, float], ...] = ()
    if top:
        if result.top_ids is None or result.top_logprobs is None:
            raise RuntimeError("the runner gave no top logprobs")
        ids, values = result.top_ids[row, :top].tolist(), result.top_logprobs[row, :top].tolist()
        pairs = tuple(zip(ids, values, strict=True))
    return TokenLogprob(token, float(result.logprobs[row]), pairs)
