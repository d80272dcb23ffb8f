"""Which peers are up, and on how many threads; the peers are stand-ins with set times."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from bench.harness.settings import Settings, Tokens
from bench.peers import table as peer_table
from bench.peers.catalog import PEERS, Peer
from bench.peers.client import PeerMissing, PeerProcess
from bench.peers.table import PeerTable
from pykernels.shapes import MoEShape
from pykernels.target import Target

from .stand_ins import stand_in

SHAPE = MoEShape(E=4, H=64, I=32, topk=2)
NAMED = {peer.name: peer for peer in PEERS}
TORCH, FP32, NUMPY = NAMED["torch bf16"], NAMED["torch fp32"], NAMED["numpy fp32"]

Times = dict[tuple[int, int], float | None]
"""Seconds of a call by (threads, tokens); None: it fails. No time for one token: no start."""


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


def table(monkeypatch: pytest.MonkeyPatch, times: Times, *counts: int) -> tuple[PeerTable, House]:
    house = House(times)
    monkeypatch.setattr(peer_table, "PeerProcess", house.start)
    target = Target("cpu", "x86_64", frozenset(), 0, 0, 1)
    chosen = Settings.make(target, threads=1, tokens=(Tokens(1), Tokens(64)))
    return PeerTable(replace(chosen, peer_threads=counts), SHAPE, target), house


@pytest.mark.parametrize(
    ("times", "best", "started"),
    [
        # The best one starts again unless it was the last.
        ({(2, 1): 1.0, (2, 64): 10.0, (4, 1): 3.0, (4, 64): 5.0}, 2, [2, 4, 2]),
        ({(2, 1): 1.0, (2, 64): 10.0, (4, 1): 1.5, (4, 64): 5.0}, 4, [2, 4]),
        # One that does not start leaves the other.
        ({(4, 1): 1.0, (4, 64): 1.0}, 4, [2, 4]),
        # One that answers fewer cases loses, however fast it is on the rest.
        ({(2, 1): 9.0, (2, 64): 9.0, (4, 1): 1.0, (4, 64): None}, 2, [2, 4, 2]),
    ],
)  # fmt: skip
def test_the_best_thread_count_stays_up(
    monkeypatch: pytest.MonkeyPatch, times: Times, best: int, started: list[int]
) -> None:
    peers, house = table(monkeypatch, times, 2, 4)
    try:
        up = peers.get(TORCH)
        assert (up.threads, house.started) == (best, started)
        assert peers.get(TORCH) is up  # and is not tried again
        assert peers.versions == {"torch (peer)": "9"}
    finally:
        peers.close()


def test_when_every_count_fails_the_reasons_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    peers, house = table(monkeypatch, {(4, 1): None}, 2, 4)
    for _ in range(2):
        with pytest.raises(PeerMissing, match="no room for 2; .*too many tokens"):
            peers.get(TORCH)
    assert house.started == [2, 4]
    with pytest.raises(PeerMissing, match="^this CPU lacks avx512bf16$"):  # once, not per count
        peers.get(NAMED["kt-kernel fp8"])


def test_a_peer_is_ended_for_another_count_or_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """And starts again after a call that it failed on."""
    times: Times = {(n, T): 1.0 for n in (1, 3) for T in (1, 64)} | {(1, 64): None}
    peers, house = table(monkeypatch, times, 3)
    try:
        assert [peers.get(TORCH, n).threads for n in (1, 3)] == [1, 3]
        peers.retire([FP32, TORCH])
        assert peers.get(TORCH).threads == 3 and house.started == [1, 3]
        peers.retire([FP32])
        assert peers.ready(TORCH, 1, 1).turn(0.0) and house.started == [1, 3, 1]
        with pytest.raises(PeerMissing, match="too many tokens"):
            peers.ready(TORCH, 64, 1)
        assert peers.ready(TORCH, 1, 1).turn(0.0) and house.started == [1, 3, 1, 1]
    finally:
        peers.close()
