"""The load of a server: requests and their arrivals, drawn from one seed before the first one."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from runtime.planning.option import SettingError, option

CLIENTS = 8
"""Clients at once, where they ask as soon as they are answered."""

PromptWord = int | str
"""What prompts are made of: a token id, or a word with the space before it."""

_CONSONANTS, _VOWELS = "bcdfghjklmnprstvwz", "aeiou"


@dataclass(frozen=True)
class Load:
    """How a server is driven.

    Attributes:
        requests: how many there are.
        rate: Poisson arrivals a second; infinite: each client asks as soon as it is answered.
        clients: most requests at once; None: no bound.
        prompt, tokens: length of a prompt, and of an answer.
        shared_prefix: so many tokens at the start of a prompt are the same in all of them.
        cancel: share of requests, from 0 to 1, whose client goes away in the middle.
        seed: of arrivals, prompts and cancels.

    Raises:
        SettingError: a number out of its range.
    """

    requests: int = option(64, "How many, after one that warms up.", "N", kind=int, least=1)
    rate: float = option(
        math.inf,
        "Poisson arrivals a second; inf: a client asks again as soon as it is answered.",
        "R",
        kind=float,
    )
    clients: int | None = option(
        None,
        "Most requests at once.",
        "N",
        kind=int,
        shown=f"{CLIENTS}; with --rate no bound",
        least=1,
    )
    prompt: int = option(512, "Tokens of a prompt.", "N", kind=int, least=1)
    tokens: int = option(64, "Tokens of an answer.", "N", kind=int, least=1)
    shared_prefix: int = option(
        0, "Tokens at the start of a prompt that all have in common.", "N", kind=int, least=0
    )
    cancel: float = option(
        0.0, "0 to 1: of clients that go away in the middle.", "SHARE", kind=float
    )
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise SettingError("rate", self.rate, "Give arrivals a second above 0, or inf")
        if not 0 <= self.cancel <= 1:
            raise SettingError("cancel", self.cancel, "Give a share from 0 to 1")
        if self.shared_prefix > self.prompt:
            why = f"is longer than prompts of {self.prompt}"
            raise SettingError("shared_prefix", self.shared_prefix, "Give fewer tokens", why)


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        at: seconds after the start at which it arrives; 0 where the rate is infinite.
        prompt: token ids, or a text.
        cancel_after: its client goes away after so many pieces of the answer, at the latest after
            its last one; None: it stays.
    """

    at: float
    prompt: list[int] | str
    cancel_after: int | None


def words(count: int, seed: int) -> list[str]:
    """Made-up words with a space before each: no word list, and many different tokens."""
    draw = random.Random(f"words {seed}")
    return [
        " " + "".join(draw.choice(_CONSONANTS) + draw.choice(_VOWELS) for _ in range(syllables))
        for syllables in draw.choices((1, 2, 3), k=count)
    ]


def prompt_of(pieces: Sequence[PromptWord]) -> list[int] | str:
    """Ids stay a list; words become a text."""
    if isinstance(pieces[0], int):
        return [piece for piece in pieces if isinstance(piece, int)]
    return "".join(str(piece) for piece in pieces)


def plan(
    load: Load, vocabulary: Sequence[PromptWord], pieces_per_token: float = 1.0
) -> list[Request]:
    """The requests in the order of their arrival.

    Args:
        load: how the server is driven.
        vocabulary: what prompts are drawn from.
        pieces_per_token: how many of the vocabulary are one token of the server: 1 for ids.
    """
    arrivals, texts, cancels = (
        random.Random(f"{what} {load.seed}") for what in ("arrivals", "prompts", "cancels")
    )
    total = max(1, round(load.prompt * pieces_per_token))
    shared = min(total, round(load.shared_prefix * pieces_per_token))
    prefix = texts.choices(vocabulary, k=shared)
    cancelled = set(cancels.sample(range(load.requests), round(load.cancel * load.requests)))
    at, requests = 0.0, []
    for index in range(load.requests):
        if load.rate != float("inf"):
            at += arrivals.expovariate(load.rate)
        after = cancels.randint(1, max(1, load.tokens - 1)) if index in cancelled else None
        tail = texts.choices(vocabulary, k=total - shared)
        requests.append(Request(at, prompt_of([*prefix, *tail]), after))
    return requests
