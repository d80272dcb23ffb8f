"""Peers: the wire to their processes, their thread counts, that they compute what we compute."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bench.cases.peers import table
from bench.cases.peers.table import PeerTable
from bench.harness.settings import Settings, Tokens
from bench.peers import client
from bench.peers.catalog import PEERS
from bench.peers.client import PeerMissing, PeerProcess
from bench.peers.driver import Turns
from bench.peers.engines import ENGINES, Shape
from bench.peers.llama_cpp import BLOCKS
from pykernels.quant import FORMATS
from pykernels.shapes import MoEShape
from pykernels.target import Target

SHAPE = MoEShape(E=4, H=64, I=32, topk=2)
NAMED = {peer.name: peer for peer in PEERS}


def process(body: str) -> PeerProcess:
    """A process that says it is ready, then runs ``body`` for each request."""
    script = f"""
import json, os, sys, time
def say(**message): print(json.dumps(message), flush=True)
say(ready=True, versions={{"it": "1"}})
for line in sys.stdin:
    request = json.loads(line)
    {body}
"""
    command = [sys.executable, "-c", script]
    return PeerProcess(NAMED["torch bf16"], SHAPE, 1, 1, 4, command=command)


def test_requests_are_answered() -> None:
    peer = process('say(calls=[[0, request["seconds"]], [1, 0.5]])')
    assert peer.versions == {"it": "1"}
    assert peer.turn(0.25) == [(0, 0.25), (1, 0.5)]
    peer.close()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("time.sleep(60)", "no answer for 0 s"),
        ("sys.exit('bad luck')", "exit code 1: bad luck"),
        ("say(error='ValueError: no')", "ValueError: no"),
        ("print('hello', flush=True)", "does not speak the protocol"),
        ("say(calls=[[0, 0.0]])", "does not speak the protocol"),  # which took no time
    ],
)
def test_a_peer_that_fails_is_ended_and_keeps_its_reason(
    body: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It neither runs on beside the others' turns nor answers a later request with an old reply."""
    monkeypatch.setattr(client, "REPLY_SECONDS", 0.4)
    peer = process(body)
    for _ in range(2):
        with pytest.raises(PeerMissing, match=reason):
            peer.turn(0.1)
        assert peer._process.poll() is not None
    peer.close()


def test_a_peer_that_is_not_here_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "VENVS", tmp_path)
    with pytest.raises(PeerMissing, match=r"not installed: python -m bench\.peers\.install"):
        PeerProcess(NAMED["kt-kernel fp8"], SHAPE, 1, 1, 4)
    target = Target("cpu", "x86_64", frozenset(), 0, 0, 1)
    with pytest.raises(PeerMissing, match="^this CPU lacks avx512bf16$"):
        PeerTable(Settings.make(target), SHAPE, target).get(NAMED["kt-kernel fp8"])


@pytest.mark.parametrize(
    ("seconds", "best", "started"),
    [
        # The best one starts again unless it was the last.
        ({(2, 1): 1.0, (2, 64): 10.0, (4, 1): 3.0, (4, 64): 5.0}, 2, [2, 4, 2]),
        ({(2, 1): 1.0, (2, 64): 10.0, (4, 1): 1.5, (4, 64): 5.0}, 4, [2, 4]),
        # One that does not start leaves the other.
        ({(4, 1): 1.0, (4, 64): 1.0}, 4, [2, 4]),
        # One that fails on a case loses, however fast it is on the rest.
        ({(2, 1): 9.0, (2, 64): 9.0, (4, 1): 1.0}, 2, [2, 4, 2]),
    ],
)
def test_a_peer_has_the_threads_that_it_is_fastest_on(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[Any, float], best: int, started: list[int]
) -> None:
    """``seconds`` of a call by (threads, tokens)."""
    begun: list[int] = []

    def start(peer: Any, shape: Any, threads: int, layers: int, most: int) -> Any:
        def prepare(tokens: int, ids: Any) -> None:
            if (threads, tokens) not in seconds:
                raise PeerMissing(f"no {tokens} tokens on {threads} threads")
            up.tokens = tokens

        def turn(_: float) -> list[tuple[int, float]]:
            return [(0, seconds[threads, up.tokens])]

        begun.append(threads)
        up = SimpleNamespace(threads=threads, why="", prepare=prepare, turn=turn, tokens=0)
        return SimpleNamespace(**vars(up), versions={"torch": "9"}, close=lambda: None)

    monkeypatch.setattr(table, "PeerProcess", start)
    target = Target("cpu", "x86_64", frozenset(), 0, 0, 1)
    chosen = Settings.make(target, threads=1, tokens=(Tokens(1), Tokens(64)))
    peers = PeerTable(replace(chosen, peer_threads=(2, 4)), SHAPE, target)
    up = peers.get(NAMED["torch bf16"])
    assert (up.threads, begun) == (best, started)
    assert peers.get(NAMED["torch bf16"]) is up  # and is not tried again


@pytest.mark.parametrize("name", ["torch bf16", "torch fp32", "numpy fp32"])
def test_a_peer_computes_the_experts(name: str) -> None:
    engine, mode = name.split()
    T, threads = 1 if engine == "numpy" else 3, torch.get_num_threads()
    try:
        made = ENGINES[engine](mode, Shape(4, 64, 32, 2), 1, 1, T)
        turns = Turns(made, 1)
        ids = [[0, 1, 2, 3, 0, 2][: 2 * T], [3, 1, 0, 1, 0, 3][: 2 * T]]
        assert turns.answer({"op": "prepare", "tokens": T, "ids": ids}) == {"finite": True}
        calls = turns.answer({"op": "turn", "seconds": 9.0, "most": 3})["calls"]
    finally:
        torch.set_num_threads(threads)
        torch.set_grad_enabled(True)
    assert [routing for routing, _ in calls] == [1, 0, 1]
    as_numpy = [torch.as_tensor(t).float().numpy() for t in (made.x, made.weights, made.y)]
    x, weights, y = (t.reshape(T, -1) for t in as_numpy)
    gate_up, down = (torch.as_tensor(m[0]).float().numpy() for m in made.layers[0])  # all alike
    gate, up = np.split(x @ gate_up.T, 2, -1)
    want = (gate / (1 + np.exp(-gate)) * up) @ down.T * weights.sum(1, keepdims=True)
    np.testing.assert_allclose(y, want, atol=0.03 * float(np.abs(want).max()))


def test_every_format_has_a_peer_that_reads_as_many_bytes() -> None:
    assert all(any(fmt in peer.formats for peer in PEERS) for fmt in FORMATS)
    for peer in PEERS:
        if peer.engine == "llama.cpp":
            block = BLOCKS[peer.mode]
            assert peer.bytes_per_weight == block.nbytes / block.weights
