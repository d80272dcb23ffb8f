"""What becomes of requests, as messages to whoever is far from their engine."""

from __future__ import annotations

from pykernels.errors import PykernelsError
from runtime.engine.requests.request import Event, Request

from ..http.errors import LOG
from .messages import Failure, Routed, Told


class Teller:
    """Makes messages of events, in their order; each experts' choice is told once."""

    def __init__(self) -> None:
        self._told_routing: dict[Request, int] = {}
        self._told_prompts: set[Request] = set()

    def told(self, key: int, event: Event) -> list[Told | Routed]:
        """The messages of one event of the request with this key."""
        request, token, logprob, text, reason = event
        news: list[Told | Routed] = []
        if request.routing is not None:
            count = self._told_routing.get(request, 0)
            routed = request.routing.since(count)
            if len(routed.ids):
                self._told_routing[request] = count + len(routed.ids)
                news.append(Routed(key, request.index, routed))
        told = Told(key, request.index, token, logprob, text, reason)
        if request.params.logprob_start is not None and request not in self._told_prompts:
            self._told_prompts.add(request)
            told = told._replace(prompt_logprobs=tuple(request.prompt_logprobs))
        if reason is not None:
            self._told_routing.pop(request, None)
            self._told_prompts.discard(request)
            told = told._replace(stats=request.stats())
            if request.error is not None:
                if not isinstance(request.error, PykernelsError):
                    LOG.error("%s", request.error, exc_info=request.error)
                told = told._replace(failure=failure_of(request.error))
        return [*news, told]


def failure_of(error: BaseException) -> Failure:
    """What the other process is told of an exception."""
    if isinstance(error, PykernelsError):
        return Failure("PykernelsError", error.cause, error.hint)
    return Failure(type(error).__name__, str(error))


def error_of(failure: Failure) -> Exception:
    """The exception again, without its traceback."""
    if failure.kind == "PykernelsError":
        return PykernelsError(failure.cause, failure.hint)
    kind: type[Exception] = type(failure.kind, (RuntimeError,), {})
    return kind(failure.cause)
