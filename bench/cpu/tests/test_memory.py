"""How many experts fit beside the peers; nothing of that size is made."""

from __future__ import annotations

import pytest

from bench.cpu.cases import Settings, Tokens
from bench.cpu.memory import group_bytes, layer_shape, peer_layers
from bench.peers.catalog import ENGINES, PEERS
from pykernels.errors import PykernelsError
from pykernels.quant import FORMATS
from pykernels.shapes import MoEShape
from pykernels.target import Target

GIB, L3 = 1 << 30, 32 << 20
TOKENS = Tokens(1), Tokens(8), Tokens(64, True)
NAMED = {peer.name: peer for peer in PEERS}


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


def test_thirty_two_experts_and_every_peer_fit_a_machine_of_24_gib() -> None:
    assert fitted(22.5) == (32, "")


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
    whole, why = fitted(18)
    assert whole == 16
    assert why.startswith("16 experts: 32 in int8 beside kt-kernel, llama.cpp, torch, numpy are ")
    assert fitted(18, **fewer) == (32, "")  # type: ignore[arg-type]


def test_the_largest_group_is_ours_and_its_peers_with_the_experts_that_they_hold() -> None:
    shape = MoEShape(32, 7168, 2048, 8)
    peers = [NAMED[name] for name in ("kt-kernel bf16", "torch bf16", "torch fp32", "numpy fp32")]
    expert = 3 * 7168 * 2048
    assert group_bytes("bf16", peers, shape, L3) == expert * (32 * (2 + 2 + 2 + 4) + 16 * 4)


def test_only_one_peer_loads_at_a_time() -> None:
    shape = MoEShape(32, 7168, 2048, 8)
    peers = [NAMED[name] for name in ("kt-kernel amxint8", "llama.cpp q8_0", "torch bf16")]
    of_a_weight = group_bytes("int8", peers, shape, L3) / (shape.E * shape.weights)
    assert 1 + 1 + 34 / 32 + 2 + 4 <= of_a_weight < 9.1  # and the scales of ours


def test_layers_that_keep_weights_out_of_cache_are_counted() -> None:
    shape, l3 = MoEShape(8, 7168, 2048, 8), 260 << 20
    amx = NAMED["kt-kernel amxint4"]
    assert peer_layers(amx, shape, l3) == 7
    loading = 4  # once: layers load one after the other
    weights = 2 * 2 + 7 * 0.5
    assert group_bytes("bf16", [amx], shape, l3) == shape.E * shape.weights * (weights + loading)


def test_too_little_memory_is_said_with_what_would_help() -> None:
    with pytest.raises(PykernelsError, match=r"1\.0 GiB are free.*int8 beside kt.*fewer --peers"):
        fitted(1)
    with pytest.raises(PykernelsError, match=r"0\.5 GiB.*needs 0\.7 \(bf16\)\. Free some memory\."):
        fitted(0.5, peers=())
