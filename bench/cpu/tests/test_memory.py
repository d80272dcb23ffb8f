"""How many experts fit beside the peers; nothing of that size is made."""

from __future__ import annotations

import re

import pytest

from bench.cpu import memory
from bench.cpu.cases import Settings, Tokens
from bench.cpu.memory import OURS, PROCESS, group_bytes, layer_shape, peer_layers
from bench.peers.catalog import ENGINES, PEERS, ROOT, Peer
from pykernels.errors import PykernelsError
from pykernels.quant import FORMATS
from pykernels.shapes import MoEShape
from pykernels.target import Target

GIB, MIB, L3, ROOF = 1 << 30, 1 << 20, 32 << 20, 512 << 20
TOKENS = Tokens(1), Tokens(8), Tokens(64, True)
NAMED = {peer.name: peer for peer in PEERS}


@pytest.fixture(autouse=True)
def one_read_roof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "roof_bytes", lambda: ROOF)  # this machine's cache may be larger


def fixed(peers: list[Peer], shape: MoEShape) -> float:
    """What does not grow with experts: the processes, the roof, the first expert of a peer."""
    first = 4.7 * shape.weights if peers else 0.0
    return first + OURS + ROOF + sum(PROCESS[peer.engine] for peer in peers)


def fitted(
    gib: float,
    peers: tuple[str, ...] = ENGINES,
    tokens: tuple[Tokens, ...] = TOKENS,
    sections: tuple[str, ...] = ("table", "skew", "latency", "threads"),
    formats: tuple[str, ...] = tuple(FORMATS),
) -> tuple[int, str]:
    target = Target("cpu", "x86_64", frozenset(), 0, 0, L3)
    chosen = Settings.make(
        target, formats=formats, tokens=tokens, sections=sections, threads=1, peers=peers
    )
    shape, why = layer_shape(int(gib * GIB), L3, formats, chosen.together)
    return shape.E, why


def test_thirty_two_experts_fit_in_what_the_readme_says() -> None:
    readme = " ".join((ROOT / "README.md").read_text().split())
    said = re.search(r"32 experts where ([\d.]+) GiB are free \(([\d.]+) without llama", readme)
    assert said
    rest = tuple(engine for engine in ENGINES if engine != "llama.cpp")
    for gib, peers in ((float(said[1]), ENGINES), (float(said[2]), rest)):
        assert fitted(gib, peers) == (32, "")
        assert fitted(gib - 0.5, peers)[0] == 16


@pytest.mark.parametrize(
    "fewer",
    [
        {"peers": ("kt-kernel", "torch")},
        {"formats": ("fp8", "int4", "q6_k"), "peers": ("kt-kernel", "llama.cpp", "torch")},
        {"tokens": (Tokens(64, True),)},  # nobody has float32 for those
        {"sections": ("skew", "latency", "threads")},
    ],
)
def test_what_is_not_up_leaves_room(fewer: dict[str, tuple[str, ...]]) -> None:
    whole, why = fitted(21)
    assert whole == 16
    assert why.startswith("16 experts: 32 in int8 beside kt-kernel, llama.cpp, torch, numpy are ")
    assert fitted(21, **fewer) == (32, "")  # type: ignore[arg-type]


def test_the_largest_group_is_ours_and_its_peers_with_the_experts_that_they_hold() -> None:
    shape = MoEShape(32, 7168, 2048, 8)
    peers = [NAMED[name] for name in ("kt-kernel bf16", "torch bf16", "torch fp32", "numpy fp32")]
    expert = 3 * 7168 * 2048
    weights = group_bytes("bf16", peers, shape, L3) - fixed(peers, shape)
    assert weights == pytest.approx(expert * (32 * (2 + 2 + 2 + 4) + 16 * 4))


def test_only_one_peer_loads_at_a_time() -> None:
    shape = MoEShape(32, 7168, 2048, 8)
    peers = [NAMED[name] for name in ("kt-kernel amxint8", "llama.cpp q8_0", "torch bf16")]
    weights = group_bytes("int8", peers, shape, L3) - fixed(peers, shape)
    of_a_weight = weights / (shape.E * shape.weights)
    assert 1 + 1 + 34 / 32 + 2 + 4 <= of_a_weight < 9.1  # and the scales of ours


def test_layers_that_keep_weights_out_of_cache_are_counted() -> None:
    shape, l3 = MoEShape(8, 7168, 2048, 8), 260 << 20
    amx = NAMED["kt-kernel amxint4"]
    assert peer_layers(amx, shape, l3) == 7
    loading = 4  # once: layers load one after the other
    weights = 2 * 2 + 7 * 0.5
    found = group_bytes("bf16", [amx], shape, l3) - fixed([amx], shape)
    assert found == pytest.approx(shape.E * shape.weights * (weights + loading))


def test_what_processes_took_is_counted_where_the_layer_is_small() -> None:
    shape = MoEShape(8, 7168, 2048, 8)
    names = ("kt-kernel bf16", "torch bf16", "torch fp32", "numpy fp32")
    peers = [NAMED[name] for name in names]
    resident = (906, 895, 1567, 1377)  # VmRSS with weights, measured; 196 more while one loads
    ours = 672 + 512 + 759  # weights, roof, and the rest after eight formats
    measured = (sum(resident) + 196 + ours) * MIB
    assert measured <= group_bytes("bf16", peers, shape, L3) < 1.1 * measured
    assert set(PROCESS) == set(ENGINES)


def test_too_little_memory_is_said_with_what_would_help() -> None:
    with pytest.raises(PykernelsError, match=r"1\.0 GiB are free.*int8 beside kt.*fewer --peers"):
        fitted(1)
    with pytest.raises(PykernelsError, match=r"0\.5 GiB.*needs 2\.3 \(bf16\)\. Free some memory\."):
        fitted(0.5, peers=())
