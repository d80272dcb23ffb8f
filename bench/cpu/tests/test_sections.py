"""The rows of the sections, from made-up turns: whose bytes, whose roof, which way a ratio goes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bench.cpu import sections
from bench.cpu.cases import Settings, Tokens
from bench.cpu.sections import Bench
from bench.cpu.turns import Seen
from bench.peers.catalog import PEERS
from pykernels.shapes import MoEShape
from pykernels.target import detect

SHAPE = MoEShape(E=16, H=512, I=256, topk=4)
SECONDS = {"avx512": 2e-3, "generic": 4e-3, "pykernels": 2e-3}
THEIRS = 6e-3
BYTES = 1e6
"""Of an expert of ours."""


class Player:
    """Ours without a layer, or a peer without a process."""

    threads = 2

    def __init__(self, *given: Any) -> None:
        pass

    def prepare(self, *given: Any) -> None:
        pass


class Roofs:
    read = 100.0

    def __init__(self, *given: Any) -> None:
        pass

    def compute(self, backend: str, activations: str = "bf16") -> tuple[str, float]:
        return "dot", 0.5


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A Bench; ``used`` has the thread counts that it took."""
    settings = Settings.make(detect(), ("bf16",), threads=1, peers=("kt-kernel", "torch"))
    made: Any = Bench.__new__(Bench)
    made.settings, made.target, made.shape = settings, detect(), SHAPE
    made.pool = SimpleNamespace(threads=1)
    made.peers = SimpleNamespace(ready=lambda peer, *given: Player())
    made.used = []
    monkeypatch.setattr(made, "_use_threads", made.used.append)
    monkeypatch.setattr(made, "backends", lambda fmt: (["avx512", "generic"], {}))
    monkeypatch.setattr(sections, "Ours", Player)
    monkeypatch.setattr(sections, "Roofs", Roofs)

    def alternate(players: Any, *given: Any) -> dict[str, Seen]:
        return {name: Seen([[(0, SECONDS.get(name, THEIRS))]] * 3) for name in players}

    monkeypatch.setattr(sections, "alternate", alternate)
    return made


WEIGHTS: Any = SimpleNamespace(fmt="bf16", bytes_per_expert=BYTES)


def test_ratios_are_of_a_peers_time_over_ours(bench: Any) -> None:
    rows = {(r["engine"], r["backend"]): r for r in bench.table(WEIGHTS, Tokens(1))}
    peers = {"kt-kernel bf16", "torch bf16", "torch fp32"}
    assert rows["pykernels", "avx512"]["ratios"] == dict.fromkeys(peers, 3.0)
    assert rows["pykernels", "generic"]["ratios"] == dict.fromkeys(peers, 1.5)


def test_a_peer_is_shown_with_its_own_bytes_threads_and_roof(bench: Any) -> None:
    rows = {(r["engine"], r["backend"]): r for r in bench.table(WEIGHTS, Tokens(1))}
    assert rows["pykernels", "avx512"]["gbps"] == 4 * BYTES / 2e-3 / 1e9
    for mode, nbytes in (("bf16", 2), ("fp32", 4)):
        row = rows["torch", mode]
        assert row["gbps"] == round(4 * nbytes * SHAPE.weights / THEIRS / 1e9, 2)
        assert (row["threads"], row["compute_roof"]) == (2, 0.5 if mode == "bf16" else None)


def test_the_latency_curve_is_by_tokens_of_each_expert(bench: Any) -> None:
    rows = [r for r in bench.latency(WEIGHTS) if r["backend"] == "avx512"]
    assert [(r["per_expert"], r["tokens"]) for r in rows[:3]] == [(1, 4), (2, 8), (4, 16)]
    assert {r["ms"] for r in rows} == {2.0}


def test_threads_are_put_back_behind_the_curve_of_threads(bench: Any) -> None:
    (peer,) = bench.settings.like("bf16")
    assert peer is next(p for p in PEERS if p.name == "kt-kernel bf16")
    ours, theirs = bench.threads(WEIGHTS)
    assert (ours["engine"], ours["gbps"]) == ("pykernels", 2.0)
    assert theirs["gbps"] == round(4 * 2 * SHAPE.weights / THEIRS / 1e9, 2)
    assert bench.used == [1, 1]
