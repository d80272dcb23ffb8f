"""The prefill kernel written out for Hopper, on any CPU: its arithmetic, and who waits for whom.

On a GPU test_attention_prefill.py runs the real one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

import pykernels.gpu.common.launch as launch
from pykernels.gpu.plans.attention import PrefillPlan

from .test_attention_prefill import run_gqa, run_mla


@pytest.fixture
def warp_specialized(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts the interpreter's version in the kernel's place; ``warp_specialized(without=...)``
    anew."""
    if not launch.interpreted():
        pytest.skip("for the interpreter: the GPU runs the real one")
    from pykernels.gpu.attention import prefill
    from pykernels.gpu.attention.hopper import prefill as hopper_prefill

    from .gluon_shim import interpreted

    kernel = hopper_prefill.prefill_hopper
    monkeypatch.setattr(prefill, "warp_specialized_prefills", lambda *sizes: True)

    def described(x: torch.Tensor, rows: int) -> TensorDescriptor:
        T, heads, width = x.shape
        columns = (heads - 1) * x.stride(1) + width
        return TensorDescriptor(x, [T, columns], [x.stride(0), 1], [rows, width])

    monkeypatch.setattr(hopper_prefill, "described", described)

    def put(without: str | None = None) -> None:
        made = interpreted(kernel, without)
        monkeypatch.setattr(hopper_prefill, "prefill_hopper", made)

    put()
    return put


PREFILL = [
    ({"queries": [300], "keys": [300], "NH": 4, "KVH": 2}, 64, "no prefix, a ragged last block"),
    ({"queries": [200, 77, 0, 30], "keys": [500, 77, 9, 400]}, 128, "ragged, behind prefixes"),
    (
        {"queries": [130, 128, 127, 1], "keys": [130, 256, 500, 1], "gap": 3}, 128,
        "edges; padding is NaN",
    ),
    ({"queries": [300, 9], "keys": [401, 4], "window": 150}, 64, "a window; queries without keys"),
    ({"queries": [200], "keys": [333], "window": 1}, 128, "a window of the token itself"),
    (
        {"queries": [128, 5], "keys": [129, 195], "window": 128, "loud": (0, 63)}, 64,
        "windows that leave out a block's first key and take in its last",
    ),
    ({"queries": [140], "keys": [140], "softcap": 2.0}, 128, "capped scores"),
    ({"queries": [200, 9], "keys": [470, 30], "page": 64}, 128, "pages"),
    ({"queries": [100], "keys": [270], "page": 8, "window": 100}, 128, "small pages and a window"),
    ({"queries": [100], "keys": [270], "page": 256}, 64, "large pages"),
]  # fmt: skip


def plan(keys: int) -> PrefillPlan:
    return PrefillPlan(128, keys, 8, 1, warp_specialized=True)


@pytest.mark.parametrize(("sizes", "keys", "why"), PREFILL, ids=[row[2] for row in PREFILL])
def test_prefill(sizes: dict[str, Any], keys: int, why: str, device, warp_specialized) -> None:
    run_gqa(device, plan=plan(keys), **{"D": 64, "NH": 2, "KVH": 1, **sizes})


@pytest.mark.parametrize("keys", [64, 128])
def test_prefill_with_a_rotated_part(keys: int, device, warp_specialized) -> None:
    run_mla(device, [200, 77], [333, 77], D=64, R=64, plan=plan(keys))


def test_a_missing_fence_is_missed(device, warp_specialized) -> None:
    warp_specialized("fence_async_shared")
    with pytest.raises(Exception, match="fence"):
        run_gqa(device, [300], [300], NH=1, KVH=1, D=64, plan=plan(64))


@pytest.mark.parametrize(("without", "what"), [("wait", "wait"), ("arrive", "each other")])
def test_missing_waits_and_arrivals_are_missed(
    without: str, what: str, device, warp_specialized, monkeypatch: pytest.MonkeyPatch
) -> None:
    from . import gluon_roles

    monkeypatch.setattr(gluon_roles.MBarriers, without, lambda *args, **options: None)
    with pytest.raises(Exception, match=what):
        run_gqa(device, [300], [300], NH=1, KVH=1, D=64, plan=plan(64))
