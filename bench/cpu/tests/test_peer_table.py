"""Which peers are up, and on how many threads; the peers are stand-ins with set times."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from bench.cpu import peer_table
from bench.cpu.cases import Settings, Tokens
from bench.cpu.peer_table import PeerTable
from bench.peers.catalog import PEERS, Peer
from bench.peers.client import PeerMissing, PeerProcess
from pykernels.shapes import MoEShape
from pykernels.target import Target

from .stand_ins import stand_in

SHAPE = MoEShape(E=4, H=64, I=32, topk=2)
NAMED = {peer.name: peer for peer in PEERS}
TORCH, FP32, NUMPY = NAMED["torch bf16"], NAMED["torch fp32"], NAMED["numpy fp32"]

Times = dict[tuple[int, int], float | None]
"""Seconds of a call by (threads, tokens); None: it fails. No time for one token: no start."""


def settings(*counts: int, tokens: tuple[int, ...] = (1, 64)) -> Settings:
    target = Target("cpu", "x86_64", frozenset(), 0, 0, 0)
    calls = tuple(map(Tokens, tokens))
    return replace(Settings.make(target, threads=1, tokens=calls), peer_threads=counts)


class House:
    """Starts stand-ins; at most one may be alive."""

    def __init__(self, times: Times) -> None:
        self.times, self.started = times, list[int]()
        self._alive: int | None = None

    def start(self, peer: Peer, shape: Any, threads: int, layers: int, most: int) -> PeerProcess:
        if self._alive is not None:
            with pytest.raises(ProcessLookupError):
                os.kill(self._alive, 0)
        self.started.append(threads)
        body = f"""
    times = {self.times}
    if request["op"] == "prepare":
        took = times[{threads}, request["tokens"]]
        if took is None: sys.exit("too many tokens")
        say(finite=True)
    else:
        say(calls=[[0, took / 2], [0, took], [0, 9 * took]])
"""
        command = stand_in(body.strip())
        if (threads, 1) not in self.times:
            command = [command[0], "-c", f"import sys; sys.exit('no room for {threads}')"]
        else:
            command[2] = command[2].replace('{"it": "1"}', '{"torch": "9", "numpy": "9"}')
        made = PeerProcess(peer, shape, threads, layers, most, command=command)
        self._alive = made._process.pid
        return made


def table(monkeypatch: pytest.MonkeyPatch, chosen: Settings, times: Times) -> tuple[PeerTable, Any]:
    house = House(times)
    monkeypatch.setattr(peer_table, "PeerProcess", house.start)
    return PeerTable(chosen, SHAPE, Target("cpu", "x86_64", frozenset(), 0, 0, 1)), house


@pytest.mark.parametrize(
    ("times", "best", "started"),
    [
        # The best one starts again unless it was the last.
        ({(2, 1): 1.0, (2, 64): 10.0, (4, 1): 3.0, (4, 64): 5.0}, 2, [2, 4, 2]),
        ({(2, 1): 1.0, (2, 64): 10.0, (4, 1): 1.5, (4, 64): 5.0}, 4, [2, 4]),
        # One that does not start, or fails on its first call, leaves the other.
        ({(4, 1): 1.0, (4, 64): 1.0}, 4, [2, 4]),
        ({(2, 1): 1.0, (2, 64): 1.0, (4, 1): None}, 2, [2, 4, 2]),
        # One that answers fewer cases loses, however fast it is on the rest.
        ({(2, 1): 9.0, (2, 64): 9.0, (4, 1): 1.0, (4, 64): None}, 2, [2, 4, 2]),
        # All fail on many tokens: it stays for the few.
        ({(2, 1): 2.0, (2, 64): None, (4, 1): 1.0, (4, 64): None}, 4, [2, 4, 4]),
    ],
)  # fmt: skip
def test_the_best_thread_count_stays_up(
    monkeypatch: pytest.MonkeyPatch, times: Times, best: int, started: list[int]
) -> None:
    peers, house = table(monkeypatch, settings(2, 4), times)
    try:
        up = peers.get(TORCH)
        assert (up.threads, house.started) == (best, started)
        assert peers.get(TORCH) is up  # and is not tried again
        up.prepare(1, [[0, 1]])
        assert peers.versions == {"torch (peer)": "9"}
    finally:
        peers.close()


def test_when_every_count_fails_the_reasons_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    peers, house = table(monkeypatch, settings(2, 4), {(4, 1): None})
    for _ in range(2):
        with pytest.raises(PeerMissing, match="no room for 2; .*too many tokens"):
            peers.get(TORCH)
    assert house.started == [2, 4]


@pytest.mark.parametrize(
    ("peer", "chosen", "tokens"),
    [
        (FP32, settings(2, 4, tokens=(4, 8, 64)), {1, 8}),  # 64 are never asked of it
        (FP32, settings(2, 4, tokens=(64,)), {1}),
        (TORCH, settings(2, 4, tokens=(1,)), {1}),
    ],
)
def test_a_peer_is_tried_on_calls_that_it_will_get(
    monkeypatch: pytest.MonkeyPatch, peer: Peer, chosen: Settings, tokens: set[int]
) -> None:
    times: Times = {(n, T): float(n) for n in (2, 4) for T in tokens}  # other tokens end it
    peers, house = table(monkeypatch, chosen, times)
    try:
        assert peers.get(peer).threads == 2
        assert house.started == [2, 4, 2]
    finally:
        peers.close()


@pytest.mark.parametrize(
    ("peer", "counts", "threads"), [(TORCH, (3,), 3), (NUMPY, (2, 4), 1)], ids=["one", "not-tuned"]
)
def test_a_peer_with_one_count_is_not_tried(
    monkeypatch: pytest.MonkeyPatch, peer: Peer, counts: tuple[int, ...], threads: int
) -> None:
    peers, house = table(monkeypatch, settings(*counts), {(threads, 1): 1.0})
    try:
        assert peers.get(peer).threads == threads
        assert house.started == [threads]
    finally:
        peers.close()


def test_a_count_asked_for_takes_the_place_of_the_one_that_was_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times: Times = {(n, T): 1.0 for n in (1, 2, 3) for T in (1, 64)}
    peers, house = table(monkeypatch, settings(3), times)
    try:
        assert [peers.get(TORCH, n).threads for n in (1, 2, 2)] == [1, 2, 2]
        assert peers.get(TORCH).threads == 3
        assert house.started == [1, 2, 3]
        peers.retire([FP32, TORCH])
        assert peers.get(TORCH).threads == 3 and house.started == [1, 2, 3]
        peers.retire([FP32])
        assert peers.get(TORCH).threads == 3 and house.started == [1, 2, 3, 3]
    finally:
        peers.close()


def test_a_peer_that_failed_on_a_call_starts_again_for_the_next_case(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peers, house = table(monkeypatch, settings(3), {(3, 1): 1.0, (3, 64): None})
    try:
        peers.ready(TORCH, 1)
        with pytest.raises(PeerMissing, match="too many tokens"):
            peers.ready(TORCH, 64)
        assert peers.ready(TORCH, 1).turn(0.0)
        assert house.started == [3, 3]
    finally:
        peers.close()


def test_a_peer_with_fewer_experts_is_asked_for_those(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = replace(SHAPE, E=32)
    held: list[int] = []

    def start(peer: Peer, shape: MoEShape, threads: int, layers: int, most: int) -> PeerProcess:
        held.append(shape.E)
        body = f'say(finite={{n for ids in request["ids"] for n in ids}} == set(range({shape.E})))'
        command = stand_in(body)
        command[2] = command[2].replace('{"it": "1"}', '{"torch": "9", "numpy": "9"}')
        return PeerProcess(peer, shape, threads, layers, most, command=command)

    monkeypatch.setattr(peer_table, "PeerProcess", start)
    peers = PeerTable(settings(1), shape, Target("cpu", "x86_64", frozenset(), 0, 0, 1))
    try:
        for peer in (NUMPY, TORCH):
            peers.ready(peer, 1)
        assert held == [4, 32]
    finally:
        peers.close()


def test_a_cpu_without_the_instructions_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    peers, house = table(monkeypatch, settings(1, 2), {})
    with pytest.raises(PeerMissing, match="^this CPU lacks avx512bf16$"):  # once, not per count
        peers.get(NAMED["kt-kernel fp8"])
    assert house.started == []
