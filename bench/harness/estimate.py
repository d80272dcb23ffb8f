"""About how long each part of a run takes: for the line up front and the bar's time left.

The rates are guesses on the slow side of what was measured; the bar corrects them as it goes.
"""

from __future__ import annotations

from collections.abc import Iterable

from bench.peers.catalog import Peer
from pykernels.shapes import MoEShape

from .settings import Settings, thread_counts

START = 9.0
"""Seconds until a peer with its weights is up."""
TRIAL = 0.3
"""Seconds of the turn that each thread count of a peer is tried for, at each number of tokens."""
WEIGHTS = 4.0
"""Seconds to fill and pack a format's experts, and to compile or load its kernels."""

_GBPS, _TFLOPS = 10.0, 0.12  # a thread's: a peer's experts read, anybody's products
_ROOFS = 0.12  # seconds of one look at both roofs


def call(shape: MoEShape, T: int, threads: int) -> float:
    """Seconds of a call of T tokens by some engine."""
    read = min(shape.E, T * shape.topk) * shape.weights / (_GBPS * 1e9)
    multiplied = 2 * T * shape.topk * shape.weights / (_TFLOPS * 1e12)
    return max(read, multiplied) / threads


def table(settings: Settings, shape: MoEShape, T: int, players: int) -> float:
    """One group of the table; a round more than counted, and a call to prepare."""
    one = call(shape, T, settings.threads)
    rounds = settings.rounds + 1
    return players * (rounds * max(settings.turn, one) + one) + rounds * _ROOFS


def starts(settings: Settings, shape: MoEShape, peers: Iterable[Peer]) -> float:
    """Until these peers are up, on the best of the thread counts that each is tried on."""
    seconds = 0.0
    for peer in peers:
        counts = settings.threads_of(peer)
        seconds += len(counts) * START
        if len(counts) > 1:  # the last one is not always the best: then it starts again
            most = max(tokens.of(shape) for tokens in settings.tokens)
            cases = (1, min(most, peer.max_tokens or most))
            one = [call(shape, T, n) for T in cases for n in counts]
            seconds += START / 2 + sum(t + max(TRIAL, t) for t in one)
    return seconds


def latency(settings: Settings, shape: MoEShape, tokens: list[int], backends: int) -> float:
    """The latency curve of one format: ours alone."""
    calls = (max(settings.turn / 2, call(shape, T, settings.threads) / 3) for T in tokens)
    return backends * 5 * sum(calls)


def threads(settings: Settings, shape: MoEShape, players: int) -> float:
    """One token on every thread count; a peer starts again for each."""
    counts = thread_counts(settings.threads)
    turns = sum(max(settings.turn, call(shape, 1, n)) for n in counts)
    return 5 * players * turns + START * max(0, players - 1) * len(counts)


def in_words(seconds: float) -> str:
    """ "about 14 minutes", "about a minute"."""
    minutes = round(seconds / 60)
    return f"about {minutes} minutes" if minutes > 1 else "about a minute"
