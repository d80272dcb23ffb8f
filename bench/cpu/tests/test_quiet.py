"""Parts that were disturbed are measured again; the clocks are made up."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from bench.cpu import quiet
from bench.cpu.quiet import Watch, clock, others


def watch(monkeypatch: pytest.MonkeyPatch, shares: list[float], spare: float = 60.0) -> Watch:
    """A watch that sees these shares of others, one a part; waiting is always quiet."""
    made, left = Watch(spare), iter(shares)
    monkeypatch.setattr(made, "_wait", lambda: None)

    def share(part) -> float:
        part()
        return next(left)

    monkeypatch.setattr(made, "_share", share)
    return made


def test_others_are_what_is_neither_idle_nor_ours() -> None:
    assert others((10.0, 1.0), (14.0, 4.0), cores=2, wall=2.0) == 0.25
    assert others((10.0, 1.0), (11.0, 2.5), cores=2, wall=2.0) == 0.0  # clocks are coarse


def test_a_quiet_part_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = iter([[{"run": 1}], [{"run": 2}]])
    made = watch(monkeypatch, [0.01, 0.0])
    assert made.run("part", lambda: next(runs)) == [{"run": 1}]
    assert made.disturbed == []


def test_a_part_that_only_prepares_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = iter([[{"run": 1}], [{"run": 2}]])
    made = watch(monkeypatch, [0.5, 0.0])
    assert made.run("part", lambda: next(runs), tries=1) == [{"run": 1}]
    assert made.disturbed == [("part", 0.5)]


def test_a_disturbed_part_runs_again_and_the_quietest_run_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = iter([[{"run": n}] for n in (1, 2, 3)])
    made = watch(monkeypatch, [0.5, 0.2, 0.3])
    assert made.run("part", lambda: next(runs)) == [{"run": 2}]
    assert made.disturbed == [("part", 0.2)]


def test_without_time_to_spare_a_part_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = iter([[{"run": n}] for n in (1, 2, 3)])
    made = watch(monkeypatch, [0.5, 0.2, 0.3], spare=0.0)
    assert made.run("part", lambda: next(runs)) == [{"run": 1}]
    assert made.disturbed == [("part", 0.5)]


def test_waiting_ends_with_the_time_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet, "_LOOK", 0.01)
    monkeypatch.setattr(quiet, "LIMIT", -1.0)  # never quiet
    Watch(0.1)._wait()


def test_the_clock_counts_what_a_hypervisor_takes_and_no_idle_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = SimpleNamespace(user=1.0, system=2.0, idle=1000.0, iowait=500.0, steal=4.0)
    monkeypatch.setattr(quiet.psutil, "cpu_times", lambda: times)
    assert clock()[0] == 7.0


def test_the_clock_counts_our_own_work() -> None:
    before = clock()
    sum(i * i for i in range(2_000_000))
    after = clock()
    assert after[1] > before[1]
    assert after[0] >= before[0]
