"""Decode in the lanes that multiply, on any CPU: its arithmetic, permutations and masks.

On a GPU test_attention_decode.py runs the real one, and here are other plans.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pykernels.gpu.common.launch as launch
from pykernels import ref
from pykernels.errors import PykernelsError
from pykernels.gpu.plans.attention import DecodePlan, in_lanes_takes

from .test_attention_decode import check, gqa, gqa_inputs


@pytest.fixture
def in_lanes(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the interpreter's version in the kernel's place; skips where the real one cannot run."""
    if not launch.interpreted():
        if not in_lanes_takes(128, True, 64, device, True):
            pytest.skip("the GPU has no conversion from E4M3")
        return
    from pykernels.gpu.attention import gqa_decode, gqa_decode_fp8

    from .gluon_shim import interpreted

    kernel = interpreted(gqa_decode_fp8.gqa_decode_lanes)
    monkeypatch.setattr(gqa_decode_fp8, "gqa_decode_lanes", kernel)
    monkeypatch.setattr(gqa_decode, "in_lanes_takes", lambda *lies: True)


EIGHT = DecodePlan(rows=8, keys=64, warps=2, stages=1, in_lanes=True)
SIXTEEN = DecodePlan(rows=16, keys=64, warps=4, stages=1, in_lanes=True)
ONCE = DecodePlan(rows=8, keys=64, warps=2, stages=1, per_sm=0, in_lanes=True)
CASES = [
    ({"lengths": [100, 0, 64, 1]}, EIGHT, "ragged: an empty sequence, one key"),
    ({"lengths": [100, 33]}, ONCE, "one program a sequence: no combining"),
    (
        {"lengths": [90, 2], "NH": 11, "S": 2, "window": 70, "softcap": 2.0},
        SIXTEEN,
        "two tiles of sixteen rows, tokens, window, cap",
    ),
    ({"lengths": [135, 136], "S": 2, "window": 71}, EIGHT, "windows at the edge of a block"),
]


@pytest.mark.parametrize(("sizes", "plan", "why"), CASES, ids=[row[2] for row in CASES])
def test_gqa_decode_in_lanes(
    sizes: dict[str, Any], plan: DecodePlan, why: str, device, in_lanes
) -> None:
    shape: dict[str, Any] = {"NH": 4, "KVH": 1, "D": 128, "page": 32, "fp8": True} | sizes
    inputs, options = gqa_inputs(device=device, **shape)
    check(gqa, ref.gqa_decode, inputs, options, plan=plan)


@pytest.mark.gpu
@pytest.mark.parametrize("keys", [64, 128])
@pytest.mark.parametrize("rows", [8, 16])
@pytest.mark.parametrize("per_sm", [0, 3])
def test_plans_agree(rows: int, keys: int, per_sm: int, device, in_lanes) -> None:
    sizes: dict[str, Any] = {"NH": 24, "KVH": 2, "D": 128, "page": 64, "fp8": True}
    inputs, options = gqa_inputs([6000, 0, 500, 65], device, **sizes)
    plan = DecodePlan(rows, keys, warps=4, stages=1, per_sm=per_sm, in_lanes=True)
    check(gqa, ref.gqa_decode, inputs, options, plan=plan)


@pytest.mark.parametrize("bad", [{"fp8": False}, {"page": 16}, {"D": 64}], ids=str)
def test_what_lanes_do_not_take_is_refused(bad: dict[str, Any], device) -> None:
    shape: dict[str, Any] = {"NH": 4, "KVH": 1, "D": 128, "page": 32, "fp8": True} | bad
    inputs, options = gqa_inputs([20], device, **shape)
    with pytest.raises(PykernelsError, match="a plan in lanes for"):
        gqa(*inputs, **options, plan=EIGHT)
