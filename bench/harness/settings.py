"""The settings of a run on the CPU: formats, tokens, threads, peers."""

from __future__ import annotations

from dataclasses import dataclass

from bench.peers.catalog import ENGINES, PEERS, TUNED, Peer
from pykernels.errors import PykernelsError
from pykernels.quant import FORMATS, get_format
from pykernels.shapes import MoEShape
from pykernels.target import Target
from runtime.machine.topology import Topology

ROUTINGS = 16
"""Routings that the calls of a case take in turn."""

SECTIONS = ("table", "skew", "latency", "threads")
"""The sections of a run, in order: where time runs short, the last ones go."""

FIRST = ("fp8", "bf16", "int8", "int4", "q4_k", "q6_k")
"""The formats that a run begins with, for the same reason."""

FEW_THREADS = 4
"""Up to so many, a peer is only tried on all of them."""


@dataclass(frozen=True, order=True)
class Tokens:
    """Tokens of a call: ``count`` in all, or ``count`` for each expert on average."""

    count: int
    per_expert: bool = False

    @classmethod
    def parse(cls, text: str) -> Tokens:
        """ "8" or "64/expert". Raises PykernelsError for anything else."""
        number, slash, unit = text.strip().partition("/")
        if not number.isdecimal() or int(number) < 1 or (slash and unit != "expert"):
            raise PykernelsError(f"{text!r} is no number of tokens", "Write 8, or 64/expert")
        return cls(int(number), bool(slash))

    def __str__(self) -> str:
        return f"{self.count}/expert" if self.per_expert else f"{self.count}"

    @property
    def in_words(self) -> str:
        """ "1 token", "64 tokens per expert"."""
        plural, per = "s" if self.count > 1 else "", " per expert" if self.per_expert else ""
        return f"{self.count} token{plural}{per}"

    def of(self, shape: MoEShape) -> int:
        """T, the tokens of a call of this layer."""
        if not self.per_expert:
            return self.count
        return max(1, self.count * shape.E // shape.topk)


@dataclass(frozen=True)
class Settings:
    """One run of the benchmark.

    Attributes:
        sections: of ``SECTIONS``, in its order.
        threads: ours.
        peer_threads: counts that a peer of ``TUNED`` is tried on.
        peers: of ``ENGINES``, in its order.
        minutes: after so many no further part is begun; 0: no limit.
        rounds: turns of each engine, of about ``turn`` seconds.
    """

    formats: tuple[str, ...]
    tokens: tuple[Tokens, ...]
    sections: tuple[str, ...]
    threads: int
    peer_threads: tuple[int, ...]
    peers: tuple[str, ...]
    quick: bool
    minutes: float
    rounds: int
    turn: float

    @classmethod
    def make(
        cls,
        target: Target,
        formats: tuple[str, ...] | None = None,
        tokens: tuple[Tokens, ...] | None = None,
        sections: tuple[str, ...] = SECTIONS,
        threads: int | None = None,
        peer_threads: tuple[int, ...] | None = None,
        peers: tuple[str, ...] = ENGINES,
        quick: bool = False,
        minutes: float = 0.0,
    ) -> Settings:
        """Fills in what was not asked for. Raises PykernelsError for what cannot be."""
        usable = Topology.detect().usable
        for count in (() if threads is None else (threads,)) + (peer_threads or ()):
            if not 1 <= count <= usable:
                raise PykernelsError(
                    f"{count} threads, {usable} cores are usable", "Give 1 to that"
                )
        for what, names, known in (("section", sections, SECTIONS), ("peer", peers, ENGINES)):
            for name in names:
                if name not in known:
                    raise PykernelsError(
                        f"there is no {what} {name!r}", f"Use {', '.join(known)}, or some of them"
                    )
        if not 0 <= minutes < float("inf"):
            raise PykernelsError(f"{minutes:g} minutes", "Give a positive number, or no --minutes")
        rest = (name for name in FORMATS if name not in FIRST)
        chosen = formats or (FIRST[:2] if quick else (*FIRST, *rest))
        chosen = tuple(dict.fromkeys(chosen))
        for name in chosen:
            get_format(name)
        return cls(
            chosen,
            tuple(dict.fromkeys(tokens or default_tokens(target, quick))),
            tuple(name for name in SECTIONS if name in sections),
            threads or usable,
            tuple(sorted(set(peer_threads or default_peer_threads(threads or usable)))),
            tuple(name for name in ENGINES if name in peers),
            quick,
            minutes,
            rounds=2 if quick else 5,
            turn=0.1 if quick else 0.15,
        )

    def peers_of(self, fmt: str, *tokens: int) -> list[Peer]:
        """The peers that a call of so many tokens, or of one of several, is to be compared with."""
        return [
            peer
            for peer in PEERS
            if peer.engine in self.peers and any(peer.matches(fmt, T) for T in tokens)
        ]

    def like(self, fmt: str) -> list[Peer]:
        """The first peer that stores weights as ``fmt`` does, if there is one."""
        return [peer for peer in self.peers_of(fmt, 1) if peer.formats][:1]

    def together(self, fmt: str, shape: MoEShape) -> list[Peer]:
        """The peers that are up at the same time, beside our weights in ``fmt``."""
        if "table" in self.sections:
            return self.peers_of(fmt, *(tokens.of(shape) for tokens in self.tokens))
        return self.like(fmt) if "threads" in self.sections else []

    def threads_of(self, peer: Peer) -> tuple[int, ...]:
        """Thread counts that a peer is tried on."""
        return self.peer_threads if peer.engine in TUNED else (self.threads,)


def default_peer_threads(threads: int) -> tuple[int, ...]:
    """All, and where they are many also half: spinning workers take each other's cores."""
    return (threads,) if threads <= FEW_THREADS else (threads // 2, threads)


def parse_counts(text: str) -> tuple[int, ...]:
    """ "8,16" -> (8, 16). Raises PykernelsError for anything else."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise PykernelsError(f"{text!r} is no list of thread counts", "Write 8, or 8,16")
    return tuple(map(int, words))


def default_tokens(target: Target, quick: bool) -> tuple[Tokens, ...]:
    """1, 4, 8 tokens a call and 64 an expert; with AMX also 256."""
    if quick:
        return Tokens(1), Tokens(64, True)
    many = (64, 256) if "amx-bf16" in target.isa else (64,)
    return Tokens(1), Tokens(4), Tokens(8), *(Tokens(n, True) for n in many)


def thread_counts(most: int) -> list[int]:
    """1, 2, 4, ... and ``most``."""
    return sorted({most, *(1 << i for i in range(most.bit_length()) if 1 << i <= most)})
