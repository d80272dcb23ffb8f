"""What is measured, and how turns become figures; no time is asserted."""

from __future__ import annotations

import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.cpu import estimate
from bench.cpu import skew as skew_module
from bench.cpu.cases import Settings, Tokens, default_peer_threads, parse_counts, thread_counts
from bench.cpu.ours import Ours
from bench.cpu.rows import Row, figures
from bench.cpu.sections import Bench
from bench.cpu.skew import skew
from bench.cpu.static import StaticOurs
from bench.cpu.turns import Calls, Seen, alternate, speedup
from bench.peers.catalog import ENGINES, PEERS
from bench.peers.client import PeerMissing
from pykernels.errors import PykernelsError
from pykernels.quant import FORMATS
from pykernels.registry import kernels
from pykernels.shapes import MoEShape
from pykernels.target import Target
from runtime.machine.topology import Topology
from runtime.profiling.workload import RandomLayers, routings
from runtime.workers.pool import configure_default_pool

SHAPE = MoEShape(E=16, H=64, I=32, topk=4)


def target(*isa: str) -> Target:
    return Target("cpu", "x86_64", frozenset(isa), 0, 0, 32 << 20)


def test_tokens_are_parsed_and_scaled() -> None:
    assert Tokens.parse("8").of(SHAPE) == 8
    assert Tokens.parse(" 64/expert").of(SHAPE) == 64 * 16 // 4
    for bad in ("", "0", "-1", "8/token", "8/", "many"):
        with pytest.raises(PykernelsError, match="no number of tokens"):
            Tokens.parse(bad)


def test_settings_default_to_every_format_and_more_tokens_with_amx() -> None:
    formats = Settings.make(target()).formats
    assert formats[:6] == ("fp8", "bf16", "int8", "int4", "q4_k", "q6_k")
    assert sorted(formats) == sorted(FORMATS)
    assert Tokens(256, True) not in Settings.make(target()).tokens
    assert Tokens(256, True) in Settings.make(target("amx-bf16")).tokens


TOO_MANY = Topology.detect().usable + 1


@pytest.mark.parametrize(
    ("wrong", "cause"),
    [
        ({"formats": ("fp9",)}, "no weight format 'fp9'"),
        ({"sections": ("table", "skews")}, "no section 'skews'"),
        ({"threads": TOO_MANY}, "cores are usable"),
        ({"peer_threads": (1, TOO_MANY)}, f"{TOO_MANY} threads"),
        ({"peer_threads": (0, 1)}, "0 threads"),
        ({"peers": ("torch", "vllm")}, "no peer 'vllm'.*kt-kernel, llama.cpp, torch, numpy"),
        ({"minutes": -1.0}, "-1 minutes"),
        ({"minutes": float("nan")}, "nan minutes"),  # would never be over
    ],
)
def test_settings_refuse_what_is_not_there(wrong: dict[str, Any], cause: str) -> None:
    with pytest.raises(PykernelsError, match=cause):
        Settings.make(target(), **wrong)


def test_sections_come_in_the_order_of_a_run_and_once() -> None:
    asked = ("threads", "table", "threads")
    assert Settings.make(target(), sections=asked).sections == ("table", "threads")


def test_peers_are_those_of_the_engines_asked_for() -> None:
    assert Settings.make(target()).peers == ENGINES
    chosen = Settings.make(target(), peers=("torch", "kt-kernel"))
    assert chosen.peers == ("kt-kernel", "torch")
    names = [peer.name for peer in chosen.peers_of("fp8", 8, 64)]
    assert names == ["kt-kernel fp8", "torch bf16", "torch fp32"]
    assert [peer.name for peer in chosen.peers_of("fp8", 64)] == names[:-1]
    assert chosen.peers_of("q4_k", 64) == [PEERS[-3]]
    assert Settings.make(target(), peers=()).peers_of("fp8", 1) == []


@pytest.mark.parametrize(("threads", "counts"), [(1, (1,)), (4, (4,)), (5, (2, 5)), (16, (8, 16))])
def test_peers_are_tried_on_half_of_many_threads(threads: int, counts: tuple[int, ...]) -> None:
    assert default_peer_threads(threads) == counts


def test_only_engines_that_gain_by_it_are_tried_on_several_counts() -> None:
    settings = replace(Settings.make(target(), threads=1), peer_threads=(8, 16))
    counts = {peer.engine: settings.threads_of(peer) for peer in PEERS}
    several = (8, 16)
    assert counts == {"kt-kernel": several, "llama.cpp": several, "torch": several, "numpy": (1,)}


def test_the_portable_backend_alone_is_left_out_of_long_calls() -> None:
    """AVX-512 goes on beside AMX: where the two cross is what the latency plot is for."""
    amx = target(*next(backend.features for backend in kernels() if backend.name == "amx"))
    bench = Bench(Settings.make(amx, threads=1), amx, SHAPE, peers=None)  # type: ignore[arg-type]
    configure_default_pool()
    assert bench.timed_backends("fp8", 8) == ["amx", "avx512", "generic"]
    assert bench.timed_backends("fp8", 1024) == ["amx", "avx512"]
    assert bench.timed_backends("int4", 9) == ["amx", "amx/int8", "avx512"]
    assert bench.untimed(("fp8", "int4")) == [
        "generic: timed up to 8 tokens a call, seconds beyond"
    ]


def test_thread_counts_of_peers_are_parsed() -> None:
    assert parse_counts("16, 8") == (16, 8)
    for bad in ("", "8,", "8;16", "-8", "many"):
        with pytest.raises(PykernelsError, match="no list of thread counts"):
            parse_counts(bad)


def test_thread_counts() -> None:
    assert thread_counts(1) == [1]
    assert thread_counts(6) == [1, 2, 4, 6]
    assert thread_counts(16) == [1, 2, 4, 8, 16]


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
    players: dict[str, Any] = {
        name: Script(name, log, [t, 2 * t, 4 * t]) for name, t in (("ours", 1.0), ("peer", 3.0))
    }
    roofs: Any = SimpleNamespace(sample=lambda: log.append("roofs"))
    seen = alternate(players, roofs, rounds=3, seconds=0.1)
    assert log == ["roofs", "ours", "peer"] * 4
    assert seen["ours"].seconds == [1.0, 2.0, 4.0]
    assert seen["ours"].median == 2.0
    assert seen["ours"].rate([10.0, 10.0]) == 5.0


def test_a_turn_of_ours_has_one_call_at_least_and_no_more_than_asked_for(monkeypatch) -> None:
    ours = Ours.__new__(Ours)
    monkeypatch.setattr(Ours, "_call", lambda self: (0, 1e-6))
    assert [len(ours.turn(seconds, most)) for seconds, most in ((0.0, 9), (9.0, 3))] == [1, 3]


def test_speedup_is_the_median_ratio_within_a_round() -> None:
    ours = Seen([[(0, 1.0)], [(0, 10.0)], [(0, 1.0)]])
    peer = Seen([[(0, 2.0)], [(0, 30.0)], [(0, 5.0)]])
    assert speedup(ours, peer) == 3.0


def test_a_peer_that_dies_drops_out_with_its_reason() -> None:
    log: list[str] = []
    players: dict[str, Any] = {
        "ours": Script("ours", log, [1.0, 1.0]),
        "peer": Script("peer", log, [1.0, None]),
    }
    seen = alternate(players, None, rounds=2, seconds=0.1)
    assert seen["peer"].why == "it died"
    assert len(seen["ours"].rounds) == 2


def test_figures_count_the_bytes_of_distinct_experts() -> None:
    class Roofs:
        read = 100.0

    seen = Seen([[(0, 1e-3), (1, 2e-3), (0, 1e-3)]])
    head = {"format": "fp8", "tokens": 2, "threads": 1}
    row = figures(head, "torch", "bf16", seen, [4, 8], 1e6, SHAPE, Roofs(), None)  # type: ignore[arg-type]
    assert row["gbps"] == 4.0  # 4 experts in 1 ms, 8 in 2 ms
    assert row["read_share"] == 0.04
    assert row["us"] == 1000.0
    flops = 2 * 2 * 4 * SHAPE.weights
    assert row["tflops"] == round(flops / 1e-3 / 1e12, 4)
    assert row["compute_share"] is None
    row = figures(head, "torch", "bf16", seen, [4, 8], 1e6, SHAPE, Roofs(), 2e-4)  # type: ignore[arg-type]
    assert row["compute_share"] == round(flops / 1e-3 / 1e12 / 2e-4, 4)


@pytest.mark.parametrize("kernel", ["generic", "auto"])
@pytest.mark.parametrize("T", [1, 5, 40, pytest.param(600, id="600: rows are a stage")])
def test_static_shares_compute_the_same(kernel: str, T: int) -> None:
    shape = MoEShape(E=4, H=256, I=128, topk=2)
    ids = routings(shape, T, "zipf", count=1)
    with configure_default_pool(Topology.detect().usable):
        weights = RandomLayers(shape, "fp8", ids)
        ours, static = Ours(weights, kernel), StaticOurs(weights, kernel)
        ours.prepare(T, ids)
        static.prepare(T, ids)
        want = ours.run(0, 0)
        static._pool.workspace.buffers["x"].fill_(255)  # or it might find the rows of that call
        assert torch.equal(static.run(0, 0), want)
    configure_default_pool()


@pytest.fixture(scope="module")
def skewed() -> tuple[list[Row], list[int]]:
    """The rows of the skew section, and how many layers were alive when it made new ones."""
    made: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def random_layers(*given: Any) -> RandomLayers:
        alive.append(sum(one() is not None for one in made))
        layers = RandomLayers(*given)
        made.extend(weakref.ref(packed) for packed in layers.packed)
        return layers

    shape = MoEShape(E=8, H=64, I=32, topk=8)
    with pytest.MonkeyPatch.context() as patch, configure_default_pool(1) as pool:
        patch.setattr(skew_module, "RandomLayers", random_layers)
        settings = Settings.make(target(), formats=("bf16",), threads=1, quick=True)
        rows = skew("bf16", "generic", shape, pool, settings)
    configure_default_pool()
    return rows, alive


def test_skew_compares_with_balanced_on_the_queue(skewed: tuple[list[Row], list[int]]) -> None:
    rows, _ = skewed
    assert [(r["tokens"], r["routing"], r["schedule"]) for r in rows] == [
        (T, kind, schedule)
        for T in (256, 8)
        for kind in ("balanced", "zipf", "one")
        for schedule in ("dynamic", "static")
    ]
    crowded = {r["routing"]: r for r in rows if r["tokens"] == 256 and r["schedule"] == "dynamic"}
    assert crowded["balanced"]["against_balanced"] == 1.0
    assert (crowded["balanced"]["busiest"], crowded["one"]["busiest"]) == (1.0, 4.0)
    assert 1.0 < crowded["zipf"]["busiest"] < 4.0
    assert (crowded["balanced"]["active"], crowded["one"]["active"]) == (8, 2)
    for row in rows:
        a_byte = row["against_balanced"] * crowded["balanced"]["active"] / row["active"]
        assert row["against_balanced_a_byte"] == pytest.approx(a_byte, rel=0.01, abs=0.01)


def test_skew_has_the_layers_of_one_turn_at_a_time(skewed: tuple[list[Row], list[int]]) -> None:
    _, alive = skewed
    assert alive == [0, 0]


def test_a_run_is_estimated_in_parts() -> None:
    shape = MoEShape(16, 7168, 2048, 8)
    settings = Settings.make(target(), threads=1)
    assert estimate.call(shape, 1, 1) < estimate.call(shape, 64, 1)
    assert estimate.table(settings, shape, 1, 2) < estimate.table(settings, shape, 1, 6)
    twice = replace(settings, peer_threads=(1, 2))
    torch, numpy = PEERS[-3], PEERS[-1]
    alone = estimate.starts(settings, shape, [torch])
    assert alone == estimate.START
    assert estimate.starts(twice, shape, [torch]) > 2 * alone  # and the trials
    assert estimate.starts(twice, shape, [torch, numpy]) == alone + estimate.starts(
        twice, shape, [torch]
    )
    alone = estimate.threads(settings, shape, 1)
    counts = len(thread_counts(settings.threads))
    assert estimate.threads(settings, shape, 3) == 3 * alone + 2 * counts * estimate.START
    assert estimate.in_words(20) == estimate.in_words(60) == "about a minute"
    assert estimate.in_words(840) == "about 14 minutes"
