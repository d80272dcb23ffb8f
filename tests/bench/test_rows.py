"""From turns to the figures of a row: whose bytes, which roof, which way a ratio goes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bench.cases import experts
from bench.cases.experts import Experts
from bench.harness.report import markdown
from bench.harness.rows import against, figures, params
from bench.harness.settings import Settings, Tokens
from bench.harness.turns import Calls, Times, alternate, speedup
from bench.peers.client import PeerMissing
from pykernels.shapes import MoEShape
from pykernels.target import detect


class Script:
    """A player with given seconds per turn; None: it dies."""

    def __init__(self, name: str, log: list[str], turns: list[float | None]) -> None:
        self.name, self.log, self.turns = name, log, iter([0.0, *turns])

    def turn(self, seconds: float, most: int = 1000) -> Calls:
        self.log.append(self.name)
        took = next(self.turns)
        if took is None:
            raise PeerMissing("it died")
        return [(0, took), (1, took)]


def test_players_alternate_and_the_first_round_is_not_counted() -> None:
    log: list[str] = []
    players = {
        name: Script(name, log, [t, 2 * t, 4 * t]) for name, t in (("ours", 1.0), ("peer", 3.0))
    }
    times = alternate(players, 3, 0.1, lambda: log.append("roofs"))
    assert log == ["roofs", "ours", "peer"] * 4
    assert times["ours"].medians == [1.0, 2.0, 4.0]
    assert times["ours"].median == 2.0 and times["ours"].rate([10.0, 10.0]) == 5.0


def test_a_slow_peer_has_fewer_rounds_and_one_that_dies_a_reason() -> None:
    log: list[str] = []
    players = {
        "ours": Script("ours", log, [1.0, 1.0, 1.0]),
        "slow": Script("slow", log, [4.0]),
        "dead": Script("dead", log, [1.0, None]),
    }
    times = alternate(players, {"ours": 3, "slow": 1, "dead": 3})
    assert [len(times[name].rounds) for name in players] == [3, 1, 0]
    row = against(times["ours"], {"slow": times["slow"], "dead": times["dead"]})
    assert row == {"us_slow": 4e6, "x_slow": 4.0, "why_dead": "it died"}
    ours = Times([[(0, 1.0)], [(0, 10.0)], [(0, 1.0)]])
    peer = Times([[(0, 2.0)], [(0, 30.0)], [(0, 5.0)]])
    assert speedup(ours, peer) == 3.0  # theirs over ours, the median within a round


def test_rates_count_the_bytes_of_each_input_set() -> None:
    times = Times([[(0, 1e-3), (1, 2e-3), (0, 1e-3)]])
    row = figures(times, [4e6, 8e6], 2e8, 100.0, 0.5)
    assert row["gbps"] == 4.0  # 4 MB in 1 ms, 8 in 2 ms
    assert (row["read_share"], row["us_median"]) == (0.04, 1000.0)
    assert (row["tflops"], row["compute_share"]) == (0.2, 0.4)
    assert figures(times, [4e6, 8e6], 2e8, 100.0, None)["compute_share"] is None
    assert params({"op": "a", "name": "b", "tokens": 1, "x_torch": 2.0, **row}) == {"tokens": 1}


@pytest.mark.parametrize(
    ("nbytes", "flops", "compute", "bound", "floor", "share"),
    [
        (4_000_000, 8_000_000, 800.0, "memory", 1.0, 0.5),
        (4_000_000, 1_600_000_000, 800.0, "compute", 2.0, 1.0),
        (4_000_000, 1_600_000_000, 1600.0, "memory", 1.0, 0.5),  # a tie goes to memory
        (4_000_000, 1_600_000_000, None, "memory", 1.0, 0.5),
    ],
)
def test_the_roof_is_the_larger_floor(
    nbytes: int, flops: int, compute: float | None, bound: str, floor: float, share: float
) -> None:
    row = figures(Times([[(0, 2e-6)]]), [nbytes], flops, 4000.0, compute)
    assert (row["bound"], row["roof_us"], row["roof_share"]) == (bound, floor, share)
    assert row["gbps"] == 2000.0 and row["read_share"] == 0.5


SHAPE = MoEShape(E=16, H=512, I=256, topk=4)
SECONDS = {"avx512": 2e-3, "generic": 4e-3}
THEIRS = 6e-3
WEIGHTS: Any = SimpleNamespace(fmt="bf16", bytes_per_expert=1e6)


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

    def sample(self) -> None:
        pass

    def compute(self, backend: str, activations: str = "bf16") -> tuple[str, float]:
        return "dot", 0.5


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Experts with made-up turns."""
    settings = Settings.make(detect(), ("bf16",), threads=1, peers=("kt-kernel", "torch"))
    made: Any = Experts.__new__(Experts)
    made.settings, made.target, made.shape = settings, detect(), SHAPE
    made.pool = SimpleNamespace(threads=1)

    def ready(peer: Any, *given: Any) -> Player:
        if peer.mode == "fp32":
            raise PeerMissing("not [at all] installed")
        return Player()

    made.peers = SimpleNamespace(ready=ready)
    monkeypatch.setattr(made, "_use_threads", lambda threads: None)
    monkeypatch.setattr(made, "backends", lambda fmt: (["avx512", "generic"], {}))
    monkeypatch.setattr(experts, "Ours", Player)
    monkeypatch.setattr(experts, "Roofs", Roofs)

    def alternate(players: Any, *given: Any) -> dict[str, Times]:
        return {name: Times([[(0, SECONDS.get(name, THEIRS))]] * 3) for name in players}

    monkeypatch.setattr(experts, "alternate", alternate)
    return made


def test_the_table_has_ours_with_ratios_and_peers_with_their_bytes(layer: Any) -> None:
    rows = {row["name"]: row for row in layer.table(WEIGHTS, Tokens(1))}
    assert list(rows) == ["pykernels avx512", "pykernels generic", "kt-kernel bf16", "torch bf16"]
    for name, ratio in (("avx512", 3.0), ("generic", 1.5)):
        ours = rows[f"pykernels {name}"]
        assert ours["x_torch bf16"] == ours["x_kt-kernel bf16"] == ratio
        assert ours["why_torch fp32"] == "not [at all] installed"
    assert rows["pykernels avx512"]["gbps"] == 4 * 1e6 / 2e-3 / 1e9
    theirs = rows["torch bf16"]
    assert theirs["gbps"] == round(4 * 2 * SHAPE.weights / THEIRS / 1e9, 2)
    assert (theirs["threads"], theirs["compute_roof_tflops"]) == (2, 0.5)
    head = {
        "machine": {"name": "a CPU", "date": "2031-02-03", "about": "", "versions": {}},
        "headline": "a CPU", "quick": True, "missing": "it was interrupted", "notes": [],
    }  # fmt: skip
    page = markdown({**head, "rows": list(rows.values())}, ["one.png"])
    assert "Rows are missing: it was interrupted." in page and "| 3.00 |" in page
    assert "No torch fp32 for 2 cases" in page and "![one.png](one.png)" in page


def test_latency_and_threads_are_rows_of_the_same_kind(layer: Any) -> None:
    rows = [row for row in layer.latency(WEIGHTS) if row["name"] == "pykernels avx512"]
    assert [(r["per_expert"], r["tokens"]) for r in rows[:3]] == [(1, 4), (2, 8), (4, 16)]
    ours, theirs = layer.threads(WEIGHTS)
    assert (ours["name"], ours["gbps"]) == ("pykernels avx512", 2.0)
    assert (theirs["engine"], theirs["threads"]) == ("kt-kernel", 1)
