"""What a step has around its products, at the sizes of DeepSeek-V3 and Qwen3-30B: one launch each.

Peers named "one by one" are a launch for each part: our own kernels, and torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench.harness.timing.case import Case, rotating, sets_for
from pykernels.gpu.handshake import combine
from pykernels.gpu.norm import rms_norm
from pykernels.gpu.per_head_linear import per_head_linear
from pykernels.gpu.rope import rope_frequencies, rope_table
from pykernels.gpu.rope_cache_write.gqa import gqa_rope_cache_write
from pykernels.gpu.rope_cache_write.mla import mla_rope_cache_write

BF16 = torch.bfloat16
PAGES, PAGE = 256, 64


def _sets(make: Callable[[], tuple[Any, ...]], nbytes: int, device: torch.device) -> list[Any]:
    return [make() for _ in range(min(sets_for(nbytes, device), 32))]


def _rotary(T: int, R: int, device: torch.device) -> torch.Tensor:
    """The table of angles."""
    positions = torch.arange(T, device=device) + 5000
    frequencies = rope_frequencies(R).to(device)
    return rope_table(positions, frequencies)


def _turned(x: torch.Tensor, angles: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x [T, heads, R] turned by angles [T, 2, R / 2]."""
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    cos, sin = angles[:, :1], angles[:, 1:]
    parts = [a * cos - b * sin, a * sin + b * cos]
    both = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return both.to(x.dtype)


def gqa_write_case(T: int, heads: int, kv: int, D: int, device: torch.device) -> Case:
    """Norms of heads, rope, and the cache's rows: queries, keys and values read and written."""
    nbytes = T * (2 * 2 * (heads + 2 * kv) * D + 4 * D + 8)
    k_cache, v_cache = (torch.zeros(PAGES, PAGE, kv, D, device=device, dtype=BF16) for _ in "kv")
    angles = _rotary(T, D, device)
    q_norm, k_norm = (torch.rand(D, device=device).to(BF16) for _ in "qk")
    out = torch.empty(T, heads, D, device=device, dtype=BF16)

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        qkv = torch.randn(T, (heads + 2 * kv) * D, device=device).to(BF16)
        return qkv, torch.randperm(PAGES * PAGE, device=device)[:T]

    def ours(qkv: torch.Tensor, slot_mapping: torch.Tensor) -> object:
        return gqa_rope_cache_write(
            qkv, angles, slot_mapping, k_cache, v_cache, q_norm=q_norm, k_norm=k_norm, out=out
        )

    def peer(qkv: torch.Tensor, slot_mapping: torch.Tensor) -> object:
        q, k, v = qkv.unflatten(1, (-1, D)).split([heads, kv, kv], 1)
        q, k = (rms_norm(x.contiguous(), w, 1e-6)[0] for x, w in ((q, q_norm), (k, k_norm)))
        q, k = _turned(q, angles, False), _turned(k, angles, False)
        for rows, cache in ((k, k_cache), (v, v_cache)):
            cache.flatten(0, 1).index_copy_(0, slot_mapping, rows)
        return q

    sets = _sets(make, nbytes, device)
    return Case(
        "small_ops",
        "gqa_rope_cache_write",
        {"tokens": T, "heads": heads, "kv_heads": kv, "head_dim": D},
        rotating(ours, sets),
        nbytes,
        0,
        {"one by one": rotating(peer, sets)},
        len(sets),
    )


def mla_write_case(T: int, heads: int, device: torch.device) -> Case:
    """The queries' part that turns is read and written, the latent and its key part too."""
    L, R, nope = 512, 64, 128
    nbytes = T * (2 * 2 * (heads * R + L + R) + 4 * R + 8)
    latent, keys = (torch.zeros(PAGES, PAGE, n, device=device, dtype=BF16) for n in (L, R))
    angles = _rotary(T, R, device)
    weight = torch.rand(L, device=device).to(BF16)
    out = torch.empty(T, heads, L + R, device=device, dtype=BF16)[..., L:]

    def make() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q = torch.randn(T, heads, nope + R, device=device).to(BF16)[..., nope:]
        kv = torch.randn(T, L + R, device=device).to(BF16)
        return q, kv, torch.randperm(PAGES * PAGE, device=device)[:T]

    def ours(q: torch.Tensor, kv: torch.Tensor, slot_mapping: torch.Tensor) -> object:
        return mla_rope_cache_write(
            q, kv, angles, slot_mapping, latent, keys, weight, interleaved=True, out=out
        )

    def peer(q: torch.Tensor, kv: torch.Tensor, slot_mapping: torch.Tensor) -> object:
        latent.flatten(0, 1).index_copy_(0, slot_mapping, rms_norm(kv[:, :L], weight, 1e-6)[0])
        turned = _turned(kv[:, None, L:], angles, True)[:, 0]
        keys.flatten(0, 1).index_copy_(0, slot_mapping, turned)
        return out.copy_(_turned(q, angles, True))

    sets = _sets(make, nbytes, device)
    return Case(
        "small_ops",
        "mla_rope_cache_write",
        {"tokens": T, "heads": heads},
        rotating(ours, sets),
        nbytes,
        0,
        {"one by one": rotating(peer, sets)},
        len(sets),
    )


def per_head_case(T: int, G: int, K: int, N: int, device: torch.device) -> Case:
    """Each head's matrix, its inputs and its outputs once."""
    nbytes = 2 * G * (N * K + T * (N + K))

    def make() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weight = torch.randn(G, N, K, device=device).to(BF16)
        x = torch.randn(T, G, K, device=device).to(BF16)
        return x, weight, torch.empty(T, G, N, device=device, dtype=BF16)

    def peer(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)

    sets = _sets(make, nbytes, device)
    return Case(
        "small_ops",
        "per_head_linear",
        {"tokens": T, "heads": G, "inputs": K, "outputs": N},
        rotating(per_head_linear, sets),
        nbytes,
        2 * T * G * N * K,
        {"torch": rotating(peer, sets)},
        len(sets),
    )


def combine_case(T: int, H: int, device: torch.device) -> Case:
    """A float32 residual and two float32 addends, one of bf16; all on the GPU."""
    nbytes = T * H * (4 + 4 + 4 + 2 + 2 + 4) + 2 * H
    weight = torch.rand(H, device=device).to(BF16)
    out = torch.empty(T, H, device=device, dtype=BF16), torch.empty(T, H, device=device)

    def make() -> tuple[torch.Tensor, ...]:
        floats = (torch.randn(T, H, device=device) for _ in "rab")
        return *floats, torch.randn(T, H, device=device).to(BF16)

    def peer(residual: torch.Tensor, *addends: torch.Tensor) -> object:
        for addend in addends:
            residual = residual + addend
        normed = torch.nn.functional.rms_norm(residual, (H,), weight.float(), 1e-6)
        return normed.to(BF16), residual

    sets = _sets(make, nbytes, device)
    return Case(
        "small_ops",
        "combine",
        {"tokens": T, "hidden": H},
        rotating(lambda r, *addends: combine(r, addends, weight, 1e-6, out), sets),
        nbytes,
        0,
        {"torch": rotating(peer, sets)},
        len(sets),
    )


def rows(quick: bool) -> list[tuple[Any, ...]]:
    """(function, its arguments) of each case."""
    made: list[tuple[Any, ...]] = []
    for T in (1, 4096) if quick else (1, 16, 64, 4096):
        made += [(gqa_write_case, T, 32, 4, 128), (mla_write_case, T, 128)]
        made += [(per_head_case, T, 128, *sizes) for sizes in ((128, 512), (512, 128))]
        made += [(combine_case, T, 7168)]
    return made
