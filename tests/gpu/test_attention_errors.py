"""What the attention kernels do not take is a clear error before any kernel runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pykernels.errors import PykernelsError
from pykernels.shapes import Ragged

from .caches import BF16, FP8


def decode_arguments(device: torch.device) -> dict[str, Any]:
    def made(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=BF16, device=device)

    return {
        "q": made(2, 8, 32),
        "k": made(6, 16, 2, 32),
        "v": made(6, 16, 2, 32),
        "page_table": torch.zeros(2, 3, dtype=torch.int32, device=device),
        "lengths": torch.ones(2, dtype=torch.int32, device=device),
        "scale": 0.1,
    }


BAD_DECODE: list[tuple[str, Callable[[Any], Any], str]] = [
    ("q", lambda x: x.float(), "q is torch.float32"),
    ("q", lambda x: x[0], r"q is \[8, 32\]"),
    ("q", lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), "q has strides"),
    ("q", lambda x: x[:, :7], "7 query heads on 2 KV heads"),
    ("k", lambda x: x.half(), "k is torch.float16"),
    ("k", lambda x: x[:, :12], "k has strides"),
    ("k", lambda x: x[:, :12].contiguous(), "pages of 12 tokens"),
    ("k", lambda x: x.to(FP8), "k_scale is not"),
    ("v", lambda x: x[:5].contiguous(), "v has 5 pages"),
    ("v", lambda x: x[..., :16].contiguous(), r"v is \[6, 16, 2, 16\]"),
    ("page_table", lambda x: x.long(), "page table is torch.int64"),
    ("page_table", lambda x: x[:1], "page table"),
    ("lengths", lambda x: x[:1], "lengths are"),
    ("lengths", lambda x: x.long(), "lengths are torch.int64"),
    ("lengths", lambda x: x.repeat(2)[::2], "lengths are"),
    ("scale", lambda x: float("nan"), "scale of nan"),
    ("scale", lambda x: 0.0, "scale of 0"),
    ("scale", lambda x: -0.1, "scale of -0.1"),
    ("window", lambda x: 0, "window of 0"),
    ("window", lambda x: 2.5, "window of 2.5"),
    ("scale", lambda x: torch.tensor(0.1), "a scale of tensor"),
    ("softcap", lambda x: torch.tensor(9.0), "a softcap of tensor"),
    ("softcap", lambda x: -1.0, "softcap of -1"),
    ("softcap", lambda x: float("inf"), "softcap of inf"),
    ("softcap", lambda x: float("nan"), "softcap of nan"),
    ("k_scale", lambda x: torch.ones(6, 16, 2), "k_scale is given"),
    ("out", lambda x: torch.zeros(2, 8, 32), "out is torch.float32"),
    ("out", lambda x: torch.zeros(2, 8, 16, dtype=BF16), "out is"),
]


@pytest.mark.parametrize(
    ("halves", "complaint"), [("k", "k is .*e4m3.* v .*bf"), ("v", "v .*e4m3")]
)
def test_gqa_decode_refuses_keys_and_values_of_two_dtypes(
    halves: str, complaint: str, device
) -> None:
    from pykernels.gpu.attention.gqa_decode import gqa_decode

    arguments = decode_arguments(device)
    arguments[halves] = arguments[halves].to(FP8)
    arguments[f"{halves}_scale"] = torch.ones(6, 16, 2, device=device)
    with pytest.raises(PykernelsError, match=complaint):
        gqa_decode(**arguments)


@pytest.mark.parametrize(
    ("name", "spoil", "complaint"), BAD_DECODE, ids=[f"{r[0]}: {r[2]}" for r in BAD_DECODE]
)
def test_gqa_decode_refuses(name: str, spoil: Callable[[Any], Any], complaint: str, device) -> None:
    from pykernels.gpu.attention.gqa_decode import gqa_decode, supports

    arguments = decode_arguments(device)
    assert supports(**arguments) is None
    arguments[name] = spoil(arguments.get(name))
    with pytest.raises(PykernelsError, match=complaint) as refused:
        gqa_decode(**arguments)
    if name != "out":
        assert supports(**arguments) == refused.value.cause


def test_scales_with_gaps_are_refused(device) -> None:
    from pykernels.gpu.attention.gqa_decode import gqa_decode

    arguments = decode_arguments(device)
    arguments |= {name: arguments[name].to(FP8) for name in "kv"}
    whole = torch.ones(6, 16, 4, device=device)
    arguments |= {"k_scale": whole[..., :2].contiguous(), "v_scale": whole[..., ::2]}
    with pytest.raises(PykernelsError, match="v_scale is"):
        gqa_decode(**arguments)


def test_mla_decode_refuses(device) -> None:
    from pykernels.gpu.attention.mla_decode import mla_decode, supports

    q, rope = (torch.zeros(1, 4, n, dtype=BF16, device=device) for n in (48, 16))
    pages, ropes = (torch.zeros(3, 16, n, dtype=BF16, device=device) for n in (48, 16))
    where = [torch.ones(1, n, dtype=torch.int32, device=device) for n in (3, 1)]
    with pytest.raises(PykernelsError, match="latents of 48"):
        mla_decode(q, rope, pages, ropes, where[0], where[1][0], scale=1.0)
    assert supports(q, rope, pages, ropes, where[0], where[1][0], scale=1.0) is not None
    with pytest.raises(PykernelsError, match="do not match"):
        mla_decode(q, rope[:, :3], pages, ropes, where[0], where[1][0], scale=1.0)


@pytest.mark.parametrize(("L", "R"), [(1024, 64), (512, 128)])
def test_mla_refuses_what_no_gpu_has_shared_memory_for(L: int, R: int, device) -> None:
    from pykernels.gpu.attention import mla_decode, mla_prefill

    q, rope = (torch.zeros(1, 16, n, dtype=BF16, device=device) for n in (L, R))
    pages, ropes = (torch.zeros(3, 16, n, dtype=BF16, device=device) for n in (L, R))
    where = [torch.ones(1, n, dtype=torch.int32, device=device) for n in (3, 1)]
    why = mla_decode.supports(q, rope, pages, ropes, where[0], where[1][0], scale=1.0)
    assert why == f"latents of {L} + {R}"
    n = torch.ones(1, dtype=torch.int32, device=device)
    batch, k = Ragged(n, n, n, 1, k_starts=n), torch.zeros(1, 16, 64, dtype=BF16, device=device)
    why = mla_prefill.supports(k, rope, k, rope[:, 0], k, batch, scale=1.0)
    assert why == (None if R == 64 else f"a rotated part of {R}")


def test_ragged_refuses() -> None:
    n = torch.ones(2, dtype=torch.int32)
    for broken, complaint in [
        ({}, "a start each or a page table"),
        ({"k_starts": n, "page_table": n[:, None]}, "a start each or a page table"),
        ({"k_starts": n[:1]}, "starts and lengths"),
        ({"k_starts": n.long()}, "starts and lengths"),
        ({"page_table": n}, "page table is"),
    ]:
        with pytest.raises(PykernelsError, match=complaint):
            Ragged(n, n, n, 1, **broken)


def test_prefill_refuses(device) -> None:
    from pykernels.gpu.attention.gqa_prefill import gqa_prefill, supports

    n = torch.ones(1, dtype=torch.int32, device=device)
    batch = Ragged(n, n, n, 1, k_starts=n)
    q, k = (torch.zeros(4, h, 32, dtype=BF16, device=device) for h in (6, 4))
    with pytest.raises(PykernelsError, match="6 query heads on 4 KV heads"):
        gqa_prefill(q, k, k, batch, scale=1.0)
    with pytest.raises(PykernelsError, match="do not match"):
        gqa_prefill(q, k, k[:3], batch, scale=1.0)
    with pytest.raises(PykernelsError, match="q is torch.float32"):
        gqa_prefill(q.float(), k, k, batch, scale=1.0)
    assert "6 query heads" in (supports(q, k, k, batch, scale=1.0) or "")
    assert supports(q[:, :4], k, k, batch, scale=1.0) is None


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(
    ("narrow", "complaint"), [("k", "k is .*e4m3.* v .*bf"), ("v", "v .*e4m3")]
)
def test_prefill_refuses_keys_and_values_of_two_dtypes(
    narrow: str, complaint: str, paged: bool, device
) -> None:
    from pykernels.gpu.attention.gqa_prefill import gqa_prefill, supports

    n = torch.ones(1, dtype=torch.int32, device=device)
    where = {"page_table": n[:, None] * 0} if paged else {"k_starts": n}
    x = torch.zeros(4, 2, 32, dtype=BF16, device=device)
    given = {"k": x[None], "v": x[None]} if paged else {"k": x, "v": x}
    given[narrow] = given[narrow].to(FP8)
    scale = torch.ones(given["k"].shape[:-1], device=device) if narrow == "k" else None
    options = {"scale": 1.0, "k_scale": scale, "v_scale": scale}
    with pytest.raises(PykernelsError, match=complaint) as refused:
        gqa_prefill(x, given["k"], given["v"], Ragged(n, n, n, 1, **where), **options)
    cause = supports(x, given["k"], given["v"], Ragged(n, n, n, 1, **where), **options)
    assert cause == refused.value.cause


def test_prefill_takes_e4m3_in_pages_alone(device) -> None:
    from pykernels.gpu.attention.gqa_prefill import gqa_prefill

    n = torch.ones(1, dtype=torch.int32, device=device)
    x, scale = torch.zeros(4, 2, 32, dtype=BF16, device=device), torch.ones(4, 2, device=device)
    keys, batch = x.to(FP8), Ragged(n, n, n, 1, k_starts=n)
    with pytest.raises(PykernelsError, match="e4m3fn without pages"):
        gqa_prefill(x, keys, keys, batch, scale=1.0, k_scale=scale, v_scale=scale)


def test_numbers_of_numpy_are_numbers(device) -> None:
    import numpy as np

    from pykernels.gpu.attention.gqa_decode import gqa_decode
    from pykernels.gpu.attention.gqa_prefill import gqa_prefill

    theirs = {"scale": np.float32(0.5), "window": np.int64(3), "softcap": np.float32(4)}
    ours = {"scale": 0.5, "window": 3, "softcap": 4.0}
    given = decode_arguments(device)
    given = {**given, "q": torch.randn(2, 8, 32, device=device).to(BF16)}
    assert torch.equal(gqa_decode(**given | theirs), gqa_decode(**given | ours))
    n = torch.full((1,), 4, dtype=torch.int32, device=device)
    x, batch = torch.randn(4, 2, 32, device=device).to(BF16), Ragged(n - 4, n, n, 4, k_starts=n - 4)
    found, expected = (gqa_prefill(x, x, x, batch, **how) for how in (theirs, ours))
    assert torch.equal(found, expected)


def test_tensors_on_two_devices_are_refused(device) -> None:
    from pykernels.gpu.attention.gqa_decode import gqa_decode

    arguments = decode_arguments(device)
    arguments["lengths"] = torch.ones(2, dtype=torch.int32, device="meta")
    with pytest.raises(PykernelsError, match="lie on"):
        gqa_decode(**arguments)
