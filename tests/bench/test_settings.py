"""What a run on the CPU measures, beside whom, and how many experts fit in memory."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from bench.cases.experts import Experts
from bench.harness import estimate
from bench.harness.settings import Settings, Tokens, default_peer_threads, parse_counts
from bench.peers import memory
from bench.peers.catalog import ENGINES, PEERS, ROOT
from bench.peers.memory import OURS, PROCESS, group_bytes, layer_shape
from pykernels.errors import PykernelsError
from pykernels.quant import FORMATS
from pykernels.registry import kernels
from pykernels.shapes import MoEShape
from pykernels.target import Target
from runtime.machine.topology import Topology
from runtime.workers.pool import configure_default_pool

SHAPE = MoEShape(E=16, H=64, I=32, topk=4)
GIB, L3, ROOF = 1 << 30, 32 << 20, 512 << 20
NAMED = {peer.name: peer for peer in PEERS}
TOO_MANY = Topology.detect().usable + 1


def target(*isa: str) -> Target:
    return Target("cpu", "x86_64", frozenset(isa), 0, 0, L3)


def test_tokens_and_thread_counts_are_parsed() -> None:
    assert Tokens.parse("8").of(SHAPE) == 8
    assert Tokens.parse(" 64/expert").of(SHAPE) == 64 * 16 // 4
    for bad in ("", "-1", "8/token", "many"):
        with pytest.raises(PykernelsError, match="no number of tokens"):
            Tokens.parse(bad)
    assert parse_counts("16, 8") == (16, 8)
    with pytest.raises(PykernelsError, match="no list of thread counts"):
        parse_counts("8;16")


@pytest.mark.parametrize(
    ("wrong", "cause"),
    [
        ({"formats": ("fp9",)}, "no weight format 'fp9'"),
        ({"sections": ("table", "skews")}, "no section 'skews'"),
        ({"threads": TOO_MANY}, "cores are usable"),
        ({"peer_threads": (0, 1)}, "0 threads"),
        ({"peers": ("torch", "vllm")}, "no peer 'vllm'.*kt-kernel, llama.cpp, torch, numpy"),
        ({"minutes": float("nan")}, "nan minutes"),  # would never be over
    ],
)
def test_settings_refuse_what_is_not_there(wrong: dict[str, Any], cause: str) -> None:
    with pytest.raises(PykernelsError, match=cause):
        Settings.make(target(), **wrong)


def test_every_format_is_compared_with_its_like() -> None:
    assert sorted(Settings.make(target()).formats) == sorted(FORMATS)
    assert all(any(fmt in peer.formats for peer in PEERS) for fmt in FORMATS)
    chosen = Settings.make(target(), peers=("torch", "kt-kernel"))
    names = [peer.name for peer in chosen.peers_of("fp8", 8, 64)]
    assert names == ["kt-kernel fp8", "torch bf16", "torch fp32"]
    assert [peer.name for peer in chosen.peers_of("fp8", 64)] == names[:-1]
    assert Settings.make(target(), peers=()).peers_of("fp8", 1) == []
    assert Tokens(256, True) in Settings.make(target("amx-bf16")).tokens


def test_peers_that_gain_by_it_are_tried_on_half_the_threads() -> None:
    assert [default_peer_threads(n) for n in (1, 4, 5, 16)] == [(1,), (4,), (2, 5), (8, 16)]
    settings = replace(Settings.make(target(), threads=1), peer_threads=(8, 16))
    counts = {peer.engine: settings.threads_of(peer) for peer in PEERS}
    several = (8, 16)
    assert counts == {"kt-kernel": several, "llama.cpp": several, "torch": several, "numpy": (1,)}


def test_the_portable_backend_alone_is_left_out_of_long_calls() -> None:
    """AVX-512 goes on beside AMX: where the two cross is what the latency plot is for."""
    amx = target(*next(backend.features for backend in kernels() if backend.name == "amx"))
    settings = Settings.make(amx, threads=1)
    layer = Experts(settings, amx, SHAPE, peers=None)  # type: ignore[arg-type]
    configure_default_pool()
    assert {"amx", "avx512", "generic"} <= set(layer.timed_backends("fp8", 8))
    assert "generic" not in layer.timed_backends("fp8", 1024)
    assert "amx/int8" in layer.timed_backends("int4", 9)
    untimed = layer.untimed(("fp8", "int4"))
    assert "generic: timed up to 8 tokens a call, seconds beyond" in untimed


def test_more_work_is_estimated_to_take_longer() -> None:
    settings, shape = Settings.make(target(), threads=1), MoEShape(16, 7168, 2048, 8)
    assert estimate.call(shape, 1, 1) < estimate.call(shape, 64, 1)
    assert estimate.table(settings, shape, 1, 2) < estimate.table(settings, shape, 1, 6)
    torch = NAMED["torch bf16"]
    alone = estimate.starts(settings, shape, [torch])
    assert estimate.starts(replace(settings, peer_threads=(1, 2)), shape, [torch]) > 2 * alone


@pytest.fixture
def one_read_roof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "roof_bytes", lambda: ROOF)  # this machine's cache may be larger


def fitted(gib: float, peers: tuple[str, ...] = ENGINES, **fewer: Any) -> tuple[int, str]:
    tokens = Tokens(1), Tokens(8), Tokens(64, True)
    options = {"formats": tuple(FORMATS), "tokens": tokens, "threads": 1, "peers": peers, **fewer}
    chosen = Settings.make(target(), **options)
    shape, why = layer_shape(int(gib * GIB), L3, chosen.formats, chosen.together)
    return shape.E, why


def test_the_experts_of_the_readme_fit(one_read_roof: None) -> None:
    readme = " ".join((ROOT / "README.md").read_text().split())
    said = re.search(r"32 experts where ([\d.]+) GiB are free \(([\d.]+) without llama", readme)
    assert said
    rest = tuple(engine for engine in ENGINES if engine != "llama.cpp")
    for gib, peers in ((float(said[1]), ENGINES), (float(said[2]), rest)):
        assert fitted(gib, peers) == (32, "")
        assert fitted(gib - 0.5, peers)[0] == 16
    experts, why = fitted(21)
    assert experts == 16 and why.startswith("16 experts: 32 in int8 beside kt-kernel, llama.cpp")
    assert fitted(21, ("kt-kernel", "torch")) == fitted(21, sections=("skew",)) == (32, "")
    with pytest.raises(PykernelsError, match=r"1\.0 GiB are free.*int8 beside kt.*fewer --peers"):
        fitted(1)


def test_a_group_is_ours_and_its_peers_and_one_that_loads(one_read_roof: None) -> None:
    """A peer of short calls holds experts for two of them; one peer loads at a time."""
    shape = MoEShape(32, 7168, 2048, 8)

    def of_a_weight(fmt: str, *names: str) -> float:
        peers = [NAMED[name] for name in names]
        fixed = 4.7 * shape.weights + OURS + ROOF + sum(PROCESS[peer.engine] for peer in peers)
        found: float = (group_bytes(fmt, peers, shape, L3) - fixed) / (shape.E * shape.weights)
        return found

    names = ("kt-kernel bf16", "torch bf16", "torch fp32", "numpy fp32")
    assert of_a_weight("bf16", *names) == pytest.approx(2 + 2 + 2 + 4 + 4 / 2)
    found = of_a_weight("int8", "kt-kernel amxint8", "llama.cpp q8_0", "torch bf16")
    assert 1 + 1 + 34 / 32 + 2 + 4 <= found < 9.1  # and the scales of ours
    assert set(PROCESS) == set(ENGINES)
