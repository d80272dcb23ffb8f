"""From turns to the figures of a row: whose bytes, which roof, which way a ratio goes."""

from __future__ import annotations

from bench.harness.report import markdown
from bench.harness.timing.rows import against, figures
from bench.harness.timing.turns import Calls, Times, alternate, speedup
from bench.peers.client import PeerMissing


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


def test_the_roof_is_the_larger_floor() -> None:
    for flops, compute, bound, floor, share in (
        (8_000_000, 800.0, "memory", 1.0, 0.5),
        (1_600_000_000, 800.0, "compute", 2.0, 1.0),
        (1_600_000_000, 1600.0, "memory", 1.0, 0.5),  # a tie goes to memory
        (1_600_000_000, None, "memory", 1.0, 0.5),
    ):
        row = figures(Times([[(0, 2e-6)]]), [4_000_000], flops, 4000.0, compute)
        assert (row["bound"], row["roof_us"], row["roof_share"]) == (bound, floor, share)
        assert row["gbps"] == 2000.0 and row["read_share"] == 0.5


def test_the_page_says_what_is_missing() -> None:
    row = {"op": "moe", "name": "experts", **figures(Times([[(0, 2e-6)]]), [4e6], 0, 4000.0, None)}
    results = {
        "machine": {"name": "a CPU", "date": "2031-02-03", "about": "", "versions": {}},
        "headline": "a CPU",
        "quick": True,
        "command": "make bench-cpu",
        "why": "it was interrupted",
        "notes": [],
        "rows": [{**row, "x_torch": 3.0}, {**row, "why_torch": "not installed"}],
    }
    page = markdown(results, ["one.png"])
    assert "Rows are missing: it was interrupted." in page and "| 3.00 |" in page
    assert "No torch for experts: not installed" in page and "![one.png](one.png)" in page
