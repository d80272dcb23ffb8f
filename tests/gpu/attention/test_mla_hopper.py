"""MLA decode for Hopper, and on any CPU its arithmetic and who waits for whom."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pykernels import ref
from pykernels.gpu.attention.mla_decode import mla_decode
from pykernels.gpu.plans.attention import DecodePlan

from .inputs import check, mla_inputs

PLAN = DecodePlan(rows=64, keys=64, num_warps=8, num_stages=1, warp_specialized=True)

MLA = [
    ({"lengths": [130, 0, 64, 65]}, 1, "ragged: an empty sequence, whole blocks and one more"),
    ({"lengths": [333, 65], "softcap": 3.0}, 0, "one split a sequence: no combining; capped"),
    ({"lengths": [200]}, 9, "a split for each block"),
    ({"lengths": [260, 3, 70]}, 3, "a long sequence beside short ones"),
    ({"lengths": [130, 1], "NH": 20, "S": 4}, 1, "new tokens and heads over two tiles"),
    ({"lengths": [66, 2, 0], "NH": 16, "S": 4}, 9, "splits in which a row has no key"),
    ({"lengths": [200, 72], "page": 8}, 1, "small pages"),
    ({"lengths": [270], "page": 256, "softcap": 3.0}, 1, "large pages; capped"),
    ({"lengths": [140, 0, 64], "page": 64, "fp8": True}, 1, "E4M3, ragged"),
    ({"lengths": [200], "page": 128, "fp8": True, "softcap": 3.0}, 0, "E4M3, no combining; capped"),
]


@pytest.mark.parametrize(("sizes", "ctas_per_sm", "why"), MLA, ids=[row[2] for row in MLA])
def test_mla_decode(sizes: dict[str, Any], ctas_per_sm: int, why: str, device, hopper) -> None:
    given = mla_inputs(device=device, L=512, R=64, **sizes)
    check(mla_decode, ref.mla_decode, given, plan=replace(PLAN, ctas_per_sm=ctas_per_sm))


def test_a_missing_barrier_is_noticed(device, hopper) -> None:
    if device.type == "cuda":
        pytest.skip("for the interpreter")
    hopper("barrier")
    inputs, options = mla_inputs([200], device, L=512, R=64)
    with pytest.raises(Exception, match="barrier"):
        mla_decode(*inputs, **options, plan=PLAN)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [{"S": 2, "NH": 40}, {"page": 16}, {"fp8": True}], ids=str)
@pytest.mark.parametrize("ctas_per_sm", [0, 1])
def test_mla_decode_full(sizes: dict[str, Any], ctas_per_sm: int, device, hopper) -> None:
    sizes = {"NH": 128, "L": 512, "R": 64, "page": 64, "softcap": 20.0} | sizes
    given = mla_inputs([6000, 1, 64, 300], device, **sizes)
    check(mla_decode, ref.mla_decode, given, plan=replace(PLAN, ctas_per_sm=ctas_per_sm))


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True])
def test_mla_decode_has_no_race(fp8: bool, device, hopper) -> None:
    """The same bits again and again, on two streams: each warpgroup reads what the other wrote, and
    each call has its own splits."""
    sizes: dict[str, Any] = {"NH": 128, "L": 512, "R": 64, "page": 64, "fp8": fp8}
    cases = [mla_inputs([9000, n], device, **sizes) for n in (4000, 9)]
    want = [mla_decode(*inputs, **options) for inputs, options in cases]
    streams = [torch.cuda.Stream(device) for _ in cases]
    torch.cuda.synchronize()
    found = []
    for _ in range(50):
        for stream, (inputs, options) in zip(streams, cases, strict=True):
            with torch.cuda.stream(stream):
                found.append(mla_decode(*inputs, **options))
    torch.cuda.synchronize()
    assert all(torch.equal(result, want[i % 2]) for i, result in enumerate(found))
