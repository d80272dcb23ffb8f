"""What the attention kernels do not take is a clear error before any kernel runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pykernels.errors import PykernelsError
from pykernels.gpu.attention import gqa_decode, gqa_prefill, mla_decode, mla_prefill
from pykernels.shapes import Ragged

from ..caches import BF16, FP8


def zeros(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=BF16, device=device)


def decode_arguments(device: torch.device) -> dict[str, Any]:
    return {
        "q": zeros(device, 2, 8, 32),
        "k": zeros(device, 6, 16, 2, 32),
        "v": zeros(device, 6, 16, 2, 32),
        "page_table": torch.zeros(2, 3, dtype=torch.int32, device=device),
        "lengths": torch.ones(2, dtype=torch.int32, device=device),
        "scale": 0.1,
    }


def e4m3(found: dict[str, Any], *names: str) -> dict[str, Any]:
    """Arguments with these in E4M3 and their scales."""
    for name in names:
        found[f"{name}_scale"] = torch.ones(found[name].shape[:-1], device=found[name].device)
        found[name] = found[name].to(FP8)
    return found


BAD_DECODE: list[tuple[str, Callable[[Any], Any], str]] = [
    ("q", lambda x: x.float(), "q is torch.float32"),
    ("q", lambda x: x[0], r"q is \[8, 32\]"),
    ("q", lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), "q has strides"),
    ("q", lambda x: x[:, :7], "7 query heads on 2 KV heads"),
    ("k", lambda x: x[:, :12].contiguous(), "pages of 12 tokens"),
    ("k", lambda x: x.to(FP8), "k_scale is not"),
    ("v", lambda x: x[:5].contiguous(), "v has 5 pages"),
    ("v", lambda x: x[..., :16].contiguous(), r"v is \[6, 16, 2, 16\]"),
    ("page_table", lambda x: x.long(), "page table is torch.int64"),
    ("lengths", lambda x: x.repeat(2)[::2], "lengths are"),
    ("scale", lambda x: float("nan"), "scale of nan"),
    ("window", lambda x: 0, "window of 0"),
    ("softcap", lambda x: float("inf"), "softcap of inf"),
    ("k_scale", lambda x: torch.ones(6, 16, 2), "k_scale is given"),
    ("sinks", lambda x: torch.ones(2), r"sinks are torch.float32 \[2\]"),
    ("sinks", lambda x: torch.ones(8, dtype=torch.int64), "sinks are torch.int64"),
    ("out", lambda x: torch.zeros(2, 8, 16, dtype=BF16), "out is"),
]


@pytest.mark.parametrize(
    ("name", "spoil", "complaint"), BAD_DECODE, ids=[f"{r[0]}: {r[2]}" for r in BAD_DECODE]
)
def test_gqa_decode(name: str, spoil: Callable[[Any], Any], complaint: str, device) -> None:
    arguments = decode_arguments(device)
    assert gqa_decode.supports(**arguments) is None
    arguments[name] = spoil(arguments.get(name))
    with pytest.raises(PykernelsError, match=complaint) as refused:
        gqa_decode.gqa_decode(**arguments)
    if name != "out":
        assert gqa_decode.supports(**arguments) == refused.value.cause


@pytest.mark.parametrize(
    ("narrow", "complaint"), [("k", "k is .*e4m3.* v .*bf"), ("v", "v .*e4m3")]
)
def test_keys_and_values_of_two_dtypes(narrow: str, complaint: str, device) -> None:
    with pytest.raises(PykernelsError, match=complaint):
        gqa_decode.gqa_decode(**e4m3(decode_arguments(device), narrow))
    n, q = torch.ones(1, dtype=torch.int32, device=device), zeros(device, 4, 2, 32)
    for where, shape in (
        ({"page_table": n[:, None] * 0}, (1, 4, 2, 32)),
        ({"k_starts": n}, q.shape),
    ):
        given = e4m3({"k": zeros(device, *shape), "v": zeros(device, *shape)}, narrow)
        given = (
            given | {"v_scale": given["k_scale"]} if narrow == "k" else given | {"v_scale": None}
        )
        with pytest.raises(PykernelsError, match=complaint):
            gqa_prefill.gqa_prefill(q, batch=Ragged(n, n, n, 1, **where), scale=1.0, **given)


def test_scales_with_gaps(device) -> None:
    arguments = e4m3(decode_arguments(device), "k", "v")
    arguments["v_scale"] = torch.ones(6, 16, 4, device=device)[..., ::2]
    with pytest.raises(PykernelsError, match="v_scale is"):
        gqa_decode.gqa_decode(**arguments)


@pytest.mark.parametrize(
    ("L", "R", "heads", "why"),
    [(48, 16, 16, "latents of 48"), (512, 128, 16, r"512 \+ 128"), (64, 16, 3, "do not match")],
)
def test_mla_decode(L: int, R: int, heads: int, why: str, device) -> None:
    q, rope = zeros(device, 1, 16, L), zeros(device, 1, heads, R)
    table, lengths = (torch.ones(n, dtype=torch.int32, device=device) for n in ((1, 3), 1))
    given = (q, rope, zeros(device, 3, 16, L), zeros(device, 3, 16, R), table, lengths)
    with pytest.raises(PykernelsError, match=why) as refused:
        mla_decode.mla_decode(*given, scale=1.0)
    assert mla_decode.supports(*given, scale=1.0) == refused.value.cause


def test_mla_prefill(device) -> None:
    n, k = torch.ones(1, dtype=torch.int32, device=device), zeros(device, 1, 16, 64)
    for R, why in ((64, None), (128, "a rotated part of 128")):
        rope, batch = zeros(device, 1, 16, R), Ragged(n, n, n, 1, k_starts=n)
        assert mla_prefill.supports(k, rope, k, rope[:, 0], k, batch, scale=1.0) == why


def test_ragged() -> None:
    n = torch.ones(2, dtype=torch.int32)
    for broken, why in (({}, "a start each or a"), ({"page_table": n}, "page table is")):
        with pytest.raises(PykernelsError, match=why):
            Ragged(n, n, n, 1, **broken)


def test_gqa_prefill(device) -> None:
    n = torch.ones(1, dtype=torch.int32, device=device)
    batch = Ragged(n, n, n, 1, k_starts=n)
    q, k = (zeros(device, 4, heads, 32) for heads in (6, 4))
    assert gqa_prefill.supports(q[:, :4], k, k, batch, scale=1.0) is None
    narrow = e4m3({"k": k, "v": k}, "k", "v") | {"scale": 1.0}
    for given, why in (
        ({"q": q, "k": k, "v": k, "scale": 1.0}, "6 query heads on 4 KV heads"),
        ({"q": q, "k": k, "v": k[:3], "scale": 1.0}, "do not match"),
        ({"q": q.float(), "k": k, "v": k, "scale": 1.0}, "q is torch.float32"),
        ({"q": q[:, :4], **narrow}, "e4m3fn without pages"),
        ({"q": q[:, :4], "k": k, "v": k, "scale": 1.0, "sinks": zeros(device, 6)}, "sinks are"),
    ):
        with pytest.raises(PykernelsError, match=why) as refused:
            gqa_prefill.gqa_prefill(batch=batch, **given)
        assert gqa_prefill.supports(batch=batch, **given) == refused.value.cause


def test_numbers_of_numpy_are_numbers(device) -> None:
    theirs = {"scale": np.float32(0.5), "window": np.int64(3), "softcap": np.float32(4)}
    ours = {"scale": 0.5, "window": 3, "softcap": 4.0}
    given = decode_arguments(device) | {"q": torch.randn(2, 8, 32, device=device).to(BF16)}
    expected = gqa_decode.gqa_decode(**given | ours)
    assert torch.equal(gqa_decode.gqa_decode(**given | theirs), expected)
