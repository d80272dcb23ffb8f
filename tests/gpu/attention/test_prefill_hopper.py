"""The prefill for Hopper, and on any CPU its arithmetic and who waits for whom."""

from __future__ import annotations

from typing import Any

import pytest

from .test_prefill import run_gqa, run_mla, warp_specialized

PREFILL = [
    ({"queries": [150], "keys": [150], "NH": 4, "KVH": 2}, 64, "no prefix, a ragged last block"),
    ({"queries": [200, 77, 0, 30], "keys": [300, 77, 9, 200]}, 128, "ragged, behind prefixes"),
    ({"queries": [130, 127, 1], "keys": [256, 500, 1], "gap": 3}, 128, "edges; padding is NaN"),
    ({"queries": [200, 9], "keys": [301, 4], "window": 100}, 64, "a window; queries without keys"),
    ({"queries": [200], "keys": [333], "window": 1}, 128, "a window of the token itself"),
    (
        {"queries": [128, 5], "keys": [129, 195], "window": 128, "loud": (0, 63)},
        64,
        "windows that leave out a block's first key and take in its last",
    ),
    ({"queries": [140], "keys": [140], "softcap": 2.0}, 128, "capped scores"),
    ({"queries": [140, 9], "keys": [270, 30], "page": 64}, 128, "pages"),
    ({"queries": [100], "keys": [270], "page": 8, "window": 100}, 128, "small pages and a window"),
    ({"queries": [100], "keys": [270], "page": 256}, 64, "large pages"),
    (
        {"queries": [100, 9], "keys": [130, 4], "window": 100, "NH": 4, "KVH": 2, "sinks": True},
        64,
        "sinks, a window; queries without keys",
    ),
]


@pytest.mark.parametrize(("sizes", "keys", "why"), PREFILL, ids=[row[2] for row in PREFILL])
def test_prefill(sizes: dict[str, Any], keys: int, why: str, device, hopper) -> None:
    run_gqa(device, plan=warp_specialized(keys), **{"D": 64, "NH": 2, "KVH": 1, **sizes})


@pytest.mark.parametrize("keys", [64, 128])
def test_prefill_with_a_rotated_part(keys: int, device, hopper) -> None:
    D = 64 if device.type == "cpu" else 128
    run_mla(device, [200, 77], [333, 77], D=D, R=64, gap=3, plan=warp_specialized(keys))


@pytest.mark.parametrize("without", ["fence_async_shared", "wait", "arrive"])
def test_what_is_missing_is_noticed(without: str, device, hopper) -> None:
    if device.type == "cuda":
        pytest.skip("for the interpreter")
    hopper(without)
    with pytest.raises(Exception, match=r"fence|wait"):
        run_gqa(device, [150], [150], NH=1, KVH=1, D=64, plan=warp_specialized(64))


FULL = [  # the table above runs on a GPU too
    ({"queries": [1000, 77, 0, 300], "keys": [1500, 77, 9, 4000]}, "ragged, prefixes"),
    ({"queries": [700, 300, 9], "keys": [701, 1200, 4], "window": 300}, "a window"),
    ({"queries": [256, 9], "keys": [257, 391], "window": 256, "loud": (0, 127)}, "its edges"),
    ({"queries": [9, 200], "keys": [0, 0]}, "no keys at all"),
    ({"queries": [700, 50, 0], "keys": [1900, 50, 0], "page": 64}, "pages"),
    ({"queries": [300, 9], "keys": [900, 333], "page": 8}, "the smallest pages"),
    ({"queries": [300, 9], "keys": [900, 333], "window": 128, "sinks": True}, "sinks, a window"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("keys", [64, 128])
@pytest.mark.parametrize(("sizes", "why"), FULL, ids=[row[1] for row in FULL])
def test_prefill_full(keys: int, sizes: dict[str, Any], why: str, device, hopper) -> None:
    run_gqa(device, plan=warp_specialized(keys), D=128, **sizes)
