"""Decode's inputs over paged caches, and the check that its kernels have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..caches import BF16, make_cache, no_worse

Given = tuple[tuple[torch.Tensor, ...], dict[str, Any]]


def mla_inputs(
    lengths: list[int],
    device: torch.device,
    *,
    NH: int = 16,
    S: int = 1,
    page: int = 16,
    L: int = 64,
    R: int = 16,
    fp8: bool = False,
    **options: Any,
) -> Given:
    cache = make_cache(lengths, page, [(L,), (R,)], device, fp8=(fp8, False))
    q, q_rope = (torch.randn(len(lengths), S, NH, n).to(BF16).to(device) for n in (L, R))
    if S == 1:
        q, q_rope = q[:, 0], q_rope[:, 0]
    options |= {"scale": (L + R) ** -0.5, "latent_scale": cache.scales[0]}
    return (q, q_rope, *cache.values, cache.table, cache.lengths), options


def gqa_inputs(
    lengths: list[int],
    device: torch.device,
    *,
    NH: int = 8,
    KVH: int = 2,
    D: int = 32,
    S: int = 1,
    page: int = 16,
    fp8: bool = False,
    sinks: torch.dtype | None = None,
    **options: Any,
) -> Given:
    cache = make_cache(lengths, page, [(KVH, D)] * 2, device, fp8=(fp8, fp8))
    q = torch.randn(len(lengths), S, NH, D).to(BF16).to(device)
    options |= {"scale": D**-0.5, "k_scale": cache.scales[0], "v_scale": cache.scales[1]}
    if sinks is not None:
        options["sinks"] = random_sinks(NH, sinks, device)
    return (q[:, 0] if S == 1 else q, *cache.values, cache.table, cache.lengths), options


def random_sinks(NH: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[NH], from little to most of what a row of some 50 keys has."""
    return (4 + 2 * torch.randn(NH)).to(dtype).to(device)


def check(
    run: Callable[..., torch.Tensor], truth: Callable[..., torch.Tensor], given: Given, **extra: Any
) -> None:
    """The kernel's result, in a poisoned buffer, is as near to float64 as torch's in bf16 is."""
    inputs, options = given
    exact = truth(*inputs, **options, dtype=torch.float64)
    native = truth(*inputs, **options, dtype=BF16)
    out = torch.full_like(exact, float("nan"), dtype=BF16)
    assert run(*inputs, **options, out=out, **extra) is out
    no_worse(out, exact, native)


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
