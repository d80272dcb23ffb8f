"""What the two processes of a server tell each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from runtime.engine import FinishReason, RequestStats, SamplingParams, TokenLogprob
from runtime.kv_tiers.transfer.endpoint import Peer
from runtime.runner.routing import RoutedExperts

from ..http.settings import ServerSettings
from .interface import ModelFacts

# From the engine's process to the one that speaks HTTP.


@dataclass(frozen=True)
class Begin:
    """The model is there.

    Attributes:
        read_roof: see ``Served``.
    """

    facts: ModelFacts
    settings: ServerSettings
    read_roof: float | None


class Failure(NamedTuple):
    """An exception: the name of its class, and what a ``PykernelsError`` is made of."""

    kind: str
    cause: str
    hint: str = ""


class Told(NamedTuple):
    """A token of an output, its end, or both; as ``runtime.engine.requests.request.Event``.

    Attributes:
        key: of the request's ``Submit``; ``output``: which of its ``n``.
        prompt_logprobs: with the first token.
        stats, failure: with the end.
    """

    key: int
    output: int
    token: int
    logprob: TokenLogprob | None
    text: str
    reason: FinishReason | None
    prompt_logprobs: Sequence[TokenLogprob] = ()
    stats: RequestStats | None = None
    failure: Failure | None = None


class Routed(NamedTuple):
    """Experts of tokens of an output, which come before these tokens are told."""

    key: int
    output: int
    experts: RoutedExperts


class Reply(NamedTuple):
    """Answers an ``Ask`` or an ``Observe`` by a value, or a failure."""

    key: int
    value: Any
    failure: Failure | None = None


@dataclass(frozen=True)
class Batch:
    """What has come since the last one.

    Attributes:
        healthy: whether the engine can still serve anything.
    """

    healthy: bool
    news: Sequence[Told | Routed | Reply]


# The other way.


class Ready(NamedTuple):
    """Clients can come."""


class Submit(NamedTuple):
    """A prompt.

    Attributes:
        params: with a seed, and without a constraint.
        grammar: of its constraint; None: it has none.
        special, drawn: see ``ServedModel.asubmit``.
    """

    key: int
    name: str
    prompt_ids: list[int]
    params: SamplingParams
    grammar: str | None
    special: tuple[str, ...]
    drawn: tuple[int, ...] = ()


class Cancel(NamedTuple):
    """Ends an output of a ``Submit``."""

    key: int
    output: int


class Ask(NamedTuple):
    """Asks for the engine's figures."""

    key: int


class AskHeld(NamedTuple):
    """Asks what it has of a prompt: see ``ServedModel.held``."""

    key: int
    keys: Sequence[bytes]


class Meet(NamedTuple):
    """Says which nodes there are: see ``ServedModel.meet``."""

    peers: tuple[Peer, ...]


class Observe(NamedTuple):
    """Asks for a record of steps; the answer is JSON. ``steps=0``: no more, if that goes on."""

    key: int
    steps: int
    title: str
